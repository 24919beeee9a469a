"""ResourceClaims prepared: from allocated devices to leases and CDI names.

A claim that is prepared has its leases until it is unprepared, whatever its containers do. From the
kubelet's answer on, only the kubelet ends it, by its call or by its checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import anyio

from metagpu.core.contracts.backend import Backend
from metagpu.core.contracts.capabilities import Provisions
from metagpu.core.errors import ClusterError, MetagpuError
from metagpu.core.model.request_errors import ProvisioningLasts, RequestError, ResourceClaimUnusable
from metagpu.core.model.resource_claims import ReadSharing
from metagpu.core.model.shares import ResourceClaimRef, ResourceName, ShareId
from metagpu.core.runtime.rate_limit import Backoff
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.allocation import (
    Allocation,
    ReadResourceClaim,
    is_reserved,
    parse_allocation,
)
from metagpu.plugins.dra.claim_leases import (
    ClaimLeases,
    ClaimPlanner,
    Part,
    by_request,
    leased_shares,
    with_settings,
)
from metagpu.plugins.dra.prepared_claim import (
    ClaimFiles,
    EnsureMonitored,
    PreparedDevice,
    all_monitored,
    is_joint,
    monitor_devices,
    monitored_gpus,
    shares_by_request,
    whole_claim_device,
    with_joint_variables,
)
from metagpu.plugins.kubelet.granting import EnsureCdiNames, grant_shares, is_provisioned

if TYPE_CHECKING:
    from metagpu.core.grants.grant import Grant


@dataclass
class FailedClaims:
    """Claims that failed for a reason whose end nothing reports: each has a back-off.

    Attributes:
        first: the delay after a claim's first failure, in seconds; each further one doubles it.
        longest: its limit. The kubelet repeats a call by itself after 60 to 90 s.
    """

    first: float = 1.0
    longest: float = 30.0
    _backoffs: dict[ResourceClaimRef, Backoff] = field(default_factory=dict)
    _due: dict[ResourceClaimRef, float] = field(default_factory=dict)
    _noted: anyio.Event = field(default_factory=anyio.Event)

    def __len__(self) -> int:
        """Return the number of claims that have neither been prepared nor left since."""
        return len(self._backoffs)

    def __contains__(self, claim: ResourceClaimRef) -> bool:
        """Return whether a claim has failed, and has neither been prepared nor left since."""
        return claim in self._backoffs

    def note(self, claim: ResourceClaimRef) -> None:
        """Note one more failure of a claim."""
        new = Backoff(self.first, self.longest, jitter=True)
        delay = self._backoffs.setdefault(claim, new).next()
        self._due[claim] = anyio.current_time() + delay
        self._noted.set()

    def forget(self, claim: ResourceClaimRef) -> None:
        """Forget a claim that is prepared, or needs no further attempt."""
        self._backoffs.pop(claim, None)
        self._due.pop(claim, None)

    async def wait_due(self) -> ResourceClaimRef:
        """Wait until the back-off of a claim has passed; return the claim, once."""
        while True:
            self._noted = anyio.Event()
            claim = min(self._due, key=self._due.__getitem__, default=None)
            wait = inf if claim is None else self._due[claim] - anyio.current_time()
            if claim is not None and wait <= 0:
                del self._due[claim]
                return claim
            with anyio.move_on_after(wait):
                await self._noted.wait()


@dataclass(frozen=True)
class ClaimStates:
    """The claims that the driver knows. A change of one is made under its lock.

    Attributes:
        prepared: the devices of each prepared claim; after a start, as the kubelet's checkpoint has
            them.
        refused: the allocations of claims that could not be prepared; changes of GPUs show when
            they can be.
        failed: the other claims that could not be prepared, and may be later.
    """

    prepared: dict[ResourceClaimRef, tuple[PreparedDevice, ...]] = field(default_factory=dict)
    refused: dict[ResourceClaimRef, Allocation] = field(default_factory=dict)
    failed: FailedClaims = field(default_factory=FailedClaims)
    _locks: WeakValueDictionary[ResourceClaimRef, anyio.Lock] = field(
        default_factory=WeakValueDictionary
    )

    def lock_of(self, claim: ResourceClaimRef) -> anyio.Lock:
        """Return the lock of a claim, the same one while anybody has it or waits for it.

        The kubelet repeats the calls that it gave up.
        """
        return self._locks.setdefault(claim, anyio.Lock())


_NOT_FOUND: Final = 404
LONGEST: Final = 40.0
"""Seconds of a call, its read of the claim included: the kubelet gives it up after 45."""


class ClaimPreparer:
    """Prepares and unprepares the ResourceClaims of this node.

    Attributes:
        states: what is known of each claim.
        leases: begins and ends the leases of claims.

    Args:
        registry: has the leases.
        driver: the name of this driver.
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
        *,
        read_claim: ReadResourceClaim,
        backend: Callable[[ResourceName], Backend],
        files: ClaimFiles,
        ensure_cdi_names: EnsureCdiNames,
        ensure_monitored: EnsureMonitored,
        read_sharing: ReadSharing | None = None,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self.states = ClaimStates()
        self._registry = registry
        self._driver = driver
        self._read_claim = read_claim
        self._backend = backend
        self._planner = ClaimPlanner(backend)
        self.leases = ClaimLeases(registry, self._planner, clock)
        self._files = files
        self._ensure_cdi_names = ensure_cdi_names
        self._ensure_monitored = ensure_monitored
        self._read_sharing = read_sharing
        self._clock = clock

    async def prepare(self, claim: ResourceClaimRef) -> tuple[PreparedDevice, ...]:
        """Prepare a claim, or return the devices of a prepared one.

        Raises:
            MetagpuError: the claim cannot be prepared now; the text reaches its pods.
        """
        states = self.states
        async with states.lock_of(claim):
            if (known := states.prepared.get(claim)) is not None:
                if not await self._has_other_devices(claim):
                    return known
                await self._end(claim)
            states.refused.pop(claim, None)
            try:
                devices = await self._prepare(claim, self._clock() + LONGEST)
            except ResourceClaimUnusable:
                states.failed.forget(claim)  # as it is, no further attempt helps
                raise
            except Exception:
                if claim in states.refused:
                    states.failed.forget(claim)
                else:
                    states.failed.note(claim)
                raise
            states.failed.forget(claim)
            states.prepared[claim] = devices
            return devices

    async def _prepare(self, claim: ResourceClaimRef, until: float) -> tuple[PreparedDevice, ...]:
        found = await self._read_claim(claim)
        allocation = parse_allocation(claim, found, self._driver, self._read_sharing)
        if allocation.admin:
            return await self._look(claim, allocation)
        return await self._hold(claim, allocation, until)

    async def _look(
        self, claim: ResourceClaimRef, allocation: Allocation
    ) -> tuple[PreparedDevice, ...]:
        """Return a claim's devices with `adminAccess`, once the runtime has them."""
        prepared = self.states.prepared
        try:
            devices = monitor_devices(allocation.admin, self._registry.snapshot)
        except RequestError:
            self.states.refused[claim] = allocation
            raise
        prepared[claim] = devices  # the runtime knows the GPUs that prepared claims look at
        try:
            await self._ensure_monitored(monitored_gpus(devices))
        except BaseException:
            del prepared[claim]
            raise
        return devices

    async def _hold(
        self, claim: ResourceClaimRef, allocation: Allocation, until: float
    ) -> tuple[PreparedDevice, ...]:
        """Lease the devices of a claim, and write what its containers get."""
        leases, refused = self.leases, self.states.refused
        try:
            parts, fresh = await leases.lease_soon(claim, allocation.results, until - self._clock())
        except RequestError:
            refused[claim] = allocation
            raise
        try:
            return await self._grant(claim, parts, until - self._clock())
        except ProvisioningLasts:
            refused[claim] = allocation
            raise  # the leases stay: the next call finds the hardware made
        except Exception:
            leases.release(fresh)
            raise

    async def read_allocation(
        self, namespace: str, name: str
    ) -> tuple[ResourceClaimRef, Allocation]:
        """Read what a claim of a pod was allocated of this driver.

        Raises:
            ClusterError: the API server does not answer, or has no such claim.
            RequestError: the claim cannot be prepared as it is.
        """
        found = await self._read_claim(ResourceClaimRef(namespace, name, ""))
        claim = ResourceClaimRef(namespace, name, str(found["metadata"]["uid"]))
        return claim, parse_allocation(claim, found, self._driver, self._read_sharing)

    async def find_unprepared(
        self, namespace: str, name: str
    ) -> tuple[ResourceClaimRef, Allocation] | None:
        """Read a claim; return it if it has devices of this driver and is not prepared.

        Raises:
            ClusterError: the API server does not answer.
        """
        try:
            claim, allocation = await self.read_allocation(namespace, name)
        except ClusterError as error:
            if error.status == _NOT_FOUND:
                return None
            raise
        except RequestError:
            return None  # it is of no use; the kubelet's call will say why
        wanted = allocation.results or allocation.admin
        return (claim, allocation) if wanted and claim not in self.states.prepared else None

    async def may_be_in_use(self, claim: ResourceClaimRef) -> bool:
        """Return whether pods have what was prepared; true where nobody says."""
        try:
            found = await self._read_claim(claim)
        except ClusterError as error:
            return error.status != _NOT_FOUND
        shares = leased_shares(claim.uid, self._registry.snapshot)
        looked = monitored_gpus(self.states.prepared.get(claim, ()))
        return is_reserved(claim, found, {share.gpu for share in shares} | looked)

    async def _has_other_devices(self, claim: ResourceClaimRef) -> bool:
        """Return whether a prepared claim is allocated other devices by now.

        A kubelet that lost its checkpoint does not unprepare what its pods leave.
        """
        try:
            found, now = await self.read_allocation(claim.namespace, claim.name)
        except MetagpuError:
            return False
        allocated = {(its.pool, its.device) for its in (*now.results, *now.admin)}
        prepared = {(its.pool, its.device) for its in self.states.prepared[claim]}
        return found == claim and bool(allocated) and allocated != prepared

    def can_prepare(self, claim: ResourceClaimRef, allocation: Allocation) -> bool:
        """Return whether a refused claim would be prepared now."""
        snapshot = self._registry.snapshot
        try:
            monitor_devices(allocation.admin, snapshot)
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
        devices = (its for claim, its in self.states.prepared.items() if claim.uid == uid)
        return shares_by_request(next(devices, ()))

    async def unprepare(self, claim: ResourceClaimRef) -> None:
        """End the leases of a claim; of one that is not prepared, there are none."""
        async with self.states.lock_of(claim):
            await self._end(claim)

    async def _end(self, claim: ResourceClaimRef) -> None:
        states = self.states
        self.leases.release_all(claim)
        looked = monitored_gpus(states.prepared.pop(claim, ()))
        states.refused.pop(claim, None)
        states.failed.forget(claim)
        if looked and not all_monitored(states.prepared):
            await self._ensure_monitored(frozenset())
        await self._files.remove(claim.uid)

    async def _grant(
        self, claim: ResourceClaimRef, parts: Sequence[Part], longest: float
    ) -> tuple[PreparedDevice, ...]:
        """Create what the shares need, write the claim's CDI file, and return its devices.

        All devices of one request have one grant: a container gets them together, and each
        variable has one value. So has the whole claim.
        """
        grants: dict[str, Grant] = {}
        base: dict[str, tuple[str, ...]] = {}
        for (_, resource), together in by_request(parts).items():
            backend = self._backend(resource)
            shares = [share for part in together for share in part.shares]
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
