"""ResourceClaims prepared: from allocated devices to leases and CDI names.

A claim that is prepared has its leases until it is unprepared, whatever its containers do.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import anyio

from metagpu.core.contracts.backend import Backend
from metagpu.core.contracts.capabilities import Provisions
from metagpu.core.devices.devices import (
    gpu_of_pool,
    pool_name,
)
from metagpu.core.errors import (
    ClusterError,
    FractionSplit,
    ProvisioningLasts,
    RequestError,
)
from metagpu.core.model.claim_sharing import ReadSharing
from metagpu.core.model.shares import ResourceClaimRef, ResourceName, Share, ShareId
from metagpu.core.state.facts import SharesClaimed, SharesReleased
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.admin_access import EnsureMonitored, monitor_devices, monitored_gpus
from metagpu.plugins.dra.answer import PreparedDevice, shares_by_request, whole_claim_device
from metagpu.plugins.dra.claim_files import ClaimFiles
from metagpu.plugins.dra.claim_planner import ClaimPlanner, leased_shares
from metagpu.plugins.dra.parts import Part, with_settings
from metagpu.plugins.dra.resource_claim import (
    AllocatedDevice,
    Allocation,
    ReadResourceClaim,
    parse_allocation,
)
from metagpu.plugins.dra.together import is_joint, with_joint_variables
from metagpu.plugins.kubelet.granting import EnsureCdiNames, grant_shares
from metagpu.plugins.kubelet.provisioning import is_provisioned

if TYPE_CHECKING:
    from metagpu.core.grants.grant import Grant

_NOT_FOUND: Final = 404
LONGEST: Final = 40.0
"""Seconds of a call, its read of the claim included: the kubelet gives it up after 45."""


class ClaimPreparer:
    """Prepares and unprepares the ResourceClaims of this node.

    Attributes:
        refused: the allocations of claims that could not be prepared for a reason that may end.
        prepared: the devices of each prepared claim, by its uid; after a start, as the kubelet's
            account has them.
        reserved: the claims with leases that the kubelet has not asked for yet.

    Args:
        registry: has the leases.
        driver: the name of this driver.
        node: the name of this node, which the pools of devices begin with.
        read_claim: reads a claim from the API server.
        backend: finds the backend of a resource.
        files: the CDI specifications of claims.
        ensure_cdi_names: makes names of the node's CDI specification known.
        ensure_monitored: makes GPUs for monitoring known to the container runtime.
        read_sharing: reads the driver's opaque parameters, `None` where it has none.
        clock: returns the event loop's time.
    """

    def __init__(
        self,
        registry: Registry,
        driver: str,
        node: str,
        *,
        read_claim: ReadResourceClaim,
        backend: Callable[[ResourceName], Backend],
        files: ClaimFiles,
        ensure_cdi_names: EnsureCdiNames,
        ensure_monitored: EnsureMonitored,
        read_sharing: ReadSharing | None = None,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self.prepared: dict[str, tuple[PreparedDevice, ...]] = {}
        self.refused: dict[ResourceClaimRef, Allocation] = {}
        self.reserved: set[ResourceClaimRef] = set()
        self._registry = registry
        self._driver = driver
        self._node = node
        self._read_claim = read_claim
        self._backend = backend
        self._planner = ClaimPlanner(node, backend)
        self._files = files
        self._ensure_cdi_names = ensure_cdi_names
        self._ensure_monitored = ensure_monitored
        self._read_sharing = read_sharing
        self._clock = clock
        # A claim's calls come one after the other: the kubelet repeats those that it gave up.
        self._turns = defaultdict[str, anyio.Lock](anyio.Lock)

    async def prepare(self, claim: ResourceClaimRef) -> tuple[PreparedDevice, ...]:
        """Prepare a claim, or return the devices of a prepared one.

        Raises:
            MetagpuError: the claim cannot be prepared now; the text reaches its pods.
        """
        async with self._turns[claim.uid]:
            if (known := self.prepared.get(claim.uid)) is not None:
                return known
            until = self._clock() + LONGEST
            found = await self._read_claim(claim)
            allocation = parse_allocation(claim, found, self._driver, self._read_sharing)
            self.refused.pop(claim, None)
            try:
                looking = monitor_devices(allocation.admin, self._registry.snapshot, self._node)
                await self._ensure_monitored(monitored_gpus(looking))
                parts, fresh = await self._lease_soon(
                    claim, allocation.results, until - self._clock()
                )
            except RequestError:
                self.refused[claim] = allocation
                raise
            try:
                devices = looking + await self._grant(claim, parts, until - self._clock())
            except ProvisioningLasts:
                self.refused[claim] = allocation
                raise  # the leases stay: the next call finds the hardware made
            except Exception:
                self._release(fresh)
                raise
            self.prepared[claim.uid] = devices
            self.reserved.discard(claim)
            return devices

    async def reserve(self, namespace: str, name: str) -> None:
        """Lease what a claim was allocated, before the kubelet asks for it.

        Only of GPUs with both fronts: from the time that its pod is bound, others could be granted
        the same shares. What cannot be leased now is left to the kubelet's call, which says why.

        Raises:
            ClusterError: the API server does not answer.
        """
        found = await self._read_claim(ResourceClaimRef(namespace, name, ""))
        claim = ResourceClaimRef(namespace, name, str(found["metadata"]["uid"]))
        async with self._turns[claim.uid]:
            if claim.uid in self.prepared:
                return
            try:
                allocation = parse_allocation(claim, found, self._driver, self._read_sharing)
                if self._is_of_both_fronts(allocation):
                    self._lease(claim, allocation.results)
                    self.reserved.add(claim)
            except RequestError:
                return

    def _is_of_both_fronts(self, allocation: Allocation) -> bool:
        snapshot = self._registry.snapshot
        gpus = (snapshot.gpus.get(gpu_of_pool(it.pool)) for it in allocation.results)
        return any(it is not None and it.has_both_fronts for it in gpus)

    async def find_unprepared(self, namespace: str, name: str) -> ResourceClaimRef | None:
        """Return a claim that has devices of this driver and is not prepared, else `None`.

        Raises:
            ClusterError: the API server does not answer.
        """
        try:
            found = await self._read_claim(ResourceClaimRef(namespace, name, ""))
            claim = ResourceClaimRef(namespace, name, found["metadata"]["uid"])
            allocation = parse_allocation(claim, found, self._driver, self._read_sharing)
        except ClusterError as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        except RequestError:
            return None  # it is of no use; the kubelet's call will say why
        wanted = allocation.results or allocation.admin
        return claim if wanted and claim.uid not in self.prepared else None

    def can_prepare(self, claim: ResourceClaimRef, allocation: Allocation) -> bool:
        """Return whether a refused claim would be prepared now."""
        snapshot = self._registry.snapshot
        try:
            monitor_devices(allocation.admin, snapshot, self._node)
            parts, _ = self._planner.plan(claim, allocation.results, snapshot)
        except RequestError:
            return False
        return all(
            is_provisioned(share, snapshot)
            for part in parts
            if isinstance(self._backend(part.device.resource), Provisions)
            for share in part.shares
            if share.id in snapshot.gpus[share.gpu].leases
        )

    def requests_of(self, uid: str) -> Mapping[ShareId, str]:
        """Return the request of each share of a prepared claim with several requests."""
        return shares_by_request(self.prepared.get(uid, ()))

    async def unprepare(self, claim: ResourceClaimRef) -> None:
        """End the leases of a claim; of one that is not prepared, there are none."""
        async with (turn := self._turns[claim.uid]):
            self._release(leased_shares(claim.uid, self._registry.snapshot))
            self.prepared.pop(claim.uid, None)
            self.refused.pop(claim, None)
            self.reserved.discard(claim)
            await self._files.remove(claim.uid)
        if not turn.locked():
            self._turns.pop(claim.uid, None)

    async def _lease_soon(
        self, claim: ResourceClaimRef, results: Sequence[AllocatedDevice], longest: float
    ) -> tuple[list[Part], list[Share]]:
        """Lease shares as `_lease` does, once what ends by itself has ended.

        The scheduler has a device back as soon as its claim is unprepared: its GPU may still be
        cleaned. The kubelet repeats a refused call only a minute later.
        """
        pools = {it.pool for it in results}
        first = self._registry.snapshot
        gpus = [gpu for gpu in first.gpus if pool_name(self._node, gpu) in pools]
        refusal: RequestError | None = None
        with anyio.move_on_after(longest):
            async for _ in self._registry.watch(
                lambda now: (now.offers, *(now.gpus.get(gpu) for gpu in gpus))
            ):
                try:
                    return self._lease(claim, results)
                except RequestError as error:
                    refusal = error
                    if not self._planner.ends_soon(claim, results, self._registry.snapshot):
                        raise
        assert refusal is not None  # noqa: S101 - the first look came before any wait
        raise refusal

    def _lease(
        self, claim: ResourceClaimRef, results: Sequence[AllocatedDevice]
    ) -> tuple[list[Part], list[Share]]:
        """Choose shares for all results and claim them; return those newly claimed too.

        Nothing waits in between, so that no other request can get them.

        Raises:
            RequestError: some of them cannot be had now; then none is claimed.
        """
        parts, own = self._planner.plan(claim, results, self._registry.snapshot)
        chosen = tuple(share for part in parts for share in part.shares)
        settings = {share.id: part.settings for part in parts for share in part.shares}
        settings = {share: its for share, its in settings.items() if its}
        fact = SharesClaimed(chosen, self._clock(), resource_claim=claim, settings=settings)
        self._registry.apply(fact)
        return parts, [share for share in chosen if share.id not in own]

    async def _grant(
        self, claim: ResourceClaimRef, parts: Sequence[Part], longest: float
    ) -> tuple[PreparedDevice, ...]:
        """Create what the shares need, write the claim's CDI file, and return its devices.

        All devices of one request have one grant: a container gets them together, and each
        variable has one value. So has the whole claim.
        """
        grants: dict[str, Grant] = {}
        requests: dict[tuple[str, ResourceName], list[Part]] = defaultdict(list)
        for part in parts:
            requests[part.result.main_request, part.device.resource].append(part)
        base: dict[str, tuple[str, ...]] = {}
        for (_, resource), together in requests.items():
            backend = self._backend(resource)
            shares = [share for part in together for share in part.shares]
            if len(together) > 1 and not together[0].is_shared:
                self._check_together(backend, shares)
            grant = await grant_shares(
                shares,
                backend,
                self._registry,
                self._ensure_cdi_names,
                self._clock,
                longest=longest,
                claimed=True,
            )
            grant = with_settings(grant, backend, together[0].settings)
            for part in together:
                name = part.claim_device(claim.uid).name
                grants[name] = grant
                base[name] = grant.cdi_names
        if not parts:
            return ()
        names = {part.claim_device(claim.uid).name: part.result.main_request for part in parts}
        await self._files.write(claim.uid, with_joint_variables(claim.uid, grants, names))
        devices = [self._prepared_device(claim.uid, part, base) for part in parts]
        if is_joint(names.values()):
            devices.append(whole_claim_device(claim.uid, devices[0]))
        return tuple(devices)

    def _check_together(self, backend: Backend, shares: Sequence[Share]) -> None:
        """Refuse devices of one request that one container cannot have together.

        A fraction of several GPUs is no mistake here: the claim asked for several devices.
        """
        try:
            backend.check(shares, self._registry.snapshot)
        except FractionSplit:
            return

    @staticmethod
    def _prepared_device(
        uid: str, part: Part, base: Mapping[str, tuple[str, ...]]
    ) -> PreparedDevice:
        own = part.claim_device(uid)
        return PreparedDevice(
            (part.result.main_request,),
            part.result.pool,
            part.result.device,
            (*base[own.name], own.qualified_name),
            part.result.share_id,
        )

    def _release(self, shares: Sequence[Share]) -> None:
        if shares:
            self._registry.apply(SharesReleased(tuple(shares), self._clock()))
