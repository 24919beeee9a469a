"""The front DRA of one node: leases of before, the service, its registration."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import structlog
from anyio import to_thread
from grpclib.const import Handler as Method

from metagpu.core.contracts.backend import Backend
from metagpu.core.errors import MetagpuError
from metagpu.core.model.claim_sharing import ReadSharing
from metagpu.core.model.shares import ResourceClaimRef, ResourceName, Share, ShareId
from metagpu.core.state.facts import ResourceClaimsRead
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.admin_access import EnsureMonitored, all_monitored
from metagpu.plugins.dra.answer import PreparedDevice
from metagpu.plugins.dra.checkpoint import KubeletAccount, read_account
from metagpu.plugins.dra.claim_files import ClaimFiles
from metagpu.plugins.dra.claim_status import ApplyClaimStatus, ClaimStatuses, ClaimStatusTiming
from metagpu.plugins.dra.crowded import crowded_gpus
from metagpu.plugins.dra.health import SERVICES as HEALTH_SERVICES
from metagpu.plugins.dra.health import HealthStream
from metagpu.plugins.dra.parts import with_settings
from metagpu.plugins.dra.preparer import ClaimPreparer
from metagpu.plugins.dra.registration import DraRegistration, RegistrationTiming
from metagpu.plugins.dra.reservations import ClaimReservations
from metagpu.plugins.dra.resource_claim import ReadResourceClaim
from metagpu.plugins.dra.retries import AnnotatePod, PreparationRetries, ReadPendingPods
from metagpu.plugins.dra.service import SERVICE, DraService
from metagpu.plugins.dra.together import with_joint_variables
from metagpu.plugins.kubelet.granting import EnsureCdiNames
from metagpu.plugins.kubelet.grpc_server import StreamingCalls

if TYPE_CHECKING:
    from metagpu.core.grants.grant import Grant
    from metagpu.core.model.claim_device import ClaimDevice

log = structlog.get_logger()


@dataclass
class DraFront:
    """Serves the ResourceClaims of a node.

    Attributes:
        registry: has the shares, and the leases of claims.
        driver: the name of the driver.
        node: the name of the node.
        kubelet_root: the kubelet's own folder.
        cdi_dir: the folder of CDI specifications.
        backend: finds the backend of a resource.
        ensure_cdi_names: makes names of the node's CDI specification known.
        ensure_monitored: makes GPUs for monitoring known to the container runtime.
        read_claim: reads a ResourceClaim from the API server.
        apply_status: applies the status of a ResourceClaim at the API server.
        annotate_pod: annotates a pod at the API server.
        read_pending: reads the node's pods that wait.
        read_sharing: reads the driver's opaque parameters, `None` where it has none.
        timing: of the registration.
        account_period: seconds between two looks at the kubelet's account.
        status_timing: of the status of claims' devices.
    """

    registry: Registry
    driver: str
    node: str
    kubelet_root: Path
    cdi_dir: Path
    backend: Callable[[ResourceName], Backend]
    ensure_cdi_names: EnsureCdiNames
    ensure_monitored: EnsureMonitored
    read_claim: ReadResourceClaim
    apply_status: ApplyClaimStatus
    annotate_pod: AnnotatePod
    read_pending: ReadPendingPods
    read_sharing: ReadSharing | None = None
    timing: RegistrationTiming = field(default_factory=RegistrationTiming)
    account_period: float = 60.0
    status_timing: ClaimStatusTiming = field(default_factory=ClaimStatusTiming)

    def __post_init__(self) -> None:
        self._files = ClaimFiles(self.cdi_dir)
        self.preparer = ClaimPreparer(
            self.registry,
            self.driver,
            self.node,
            read_claim=self.read_claim,
            backend=self.backend,
            files=self._files,
            ensure_cdi_names=self.ensure_cdi_names,
            ensure_monitored=self.ensure_monitored,
            read_sharing=self.read_sharing,
        )
        self.retries = PreparationRetries(
            self.registry, self.preparer, self.annotate_pod, self.read_pending
        )
        self.statuses = ClaimStatuses(
            self.registry,
            self.driver,
            self.preparer.prepared,
            read=self.read_claim,
            apply=self.apply_status,
            timing=self.status_timing,
        )
        self.reservations = ClaimReservations(self.registry, self.preparer)
        self.registration = DraRegistration(
            self.driver,
            self.kubelet_root,
            (SERVICE, *HEALTH_SERVICES),
            self._methods,
            self.timing,
            on_registered=self.retries.note_registered,
        )

    async def run(self) -> None:
        """Begin with the leases of before, then serve until cancelled."""
        await self.restore()
        async with anyio.create_task_group() as group:
            group.start_soon(self.retries.run)
            group.start_soon(self.statuses.run)
            group.start_soon(self.reservations.run)
            group.start_soon(self._follow_account)
            await self.registration.run()

    def report(self) -> Mapping[str, Any]:
        """Return the registration, prepared claims, and GPUs with too many of their pods."""
        status = self.registration.status
        return {
            "driver": self.driver,
            "registered": status.registered,
            "problem": status.problem or None,
            "claims": len(self.preparer.prepared),
            "monitored": sorted(all_monitored(self.preparer.prepared)),
            "statusProblem": self.statuses.problem or None,
            "crowded": list(crowded_gpus(self.registry.snapshot)),
        }

    async def read_leases(self) -> KubeletAccount | None:
        """Begin the leases in the kubelet's account; return it, `None` if it is unknown."""
        read = partial(read_account, self.kubelet_root, self.driver)
        account = await to_thread.run_sync(read)
        if account is not None:
            self.registry.apply(ResourceClaimsRead(account.devices, anyio.current_time()))
        return account

    async def restore(self) -> None:
        """Take the leases of claims from the kubelet's account; end those that it lacks.

        What their containers get is written again where it is missing, as after a reboot: the
        kubelet believes that it stands.
        """
        account = await self.read_leases()
        if account is None:
            return
        await self._release_others(account)
        self.preparer.prepared.update({ref.uid: it for ref, it in account.prepared.items()})
        for ref in account.prepared:
            self.statuses.note(ref, restored=True)
        await self._write_missing(account.prepared)
        try:
            await self.ensure_monitored(all_monitored(self.preparer.prepared))
        except MetagpuError as error:
            log.error("cdi names of monitored gpus not written again", error=str(error))
        # The kubelet may not have written the last answers yet: their files stay.
        await self._files.remove_others(account.known)

    async def _write_missing(
        self, prepared: Mapping[ResourceClaimRef, tuple[PreparedDevice, ...]]
    ) -> None:
        """Write the CDI specifications of claims that have none."""
        offered = self._shares_of_claims()
        for ref, devices in prepared.items():
            held = any(it.claimed for it in devices)
            if held and not await self._files.exists(ref.uid):
                try:
                    await self._write_again(ref, devices, offered)
                except MetagpuError as error:
                    log.error(
                        "cdi specification of a resource claim not written again",
                        claim=str(ref),
                        error=str(error),
                        effect="its containers do not start again",
                    )

    def _shares_of_claims(self) -> Mapping[ShareId, Share]:
        """Return the shares that claims hold, and that are on offer as they were."""
        return {
            lease.share.id: lease.share
            for state in self.registry.snapshot.gpus.values()
            for lease in state.leases.values()
            if lease.resource_claim is not None and lease not in state.orphaned_leases
        }

    async def _follow_account(self) -> None:
        """End leases of claims that the kubelet has forgotten: it unprepares none of them.

        Those of a GPU that is found only after the start begin.
        """
        suspected = frozenset[ResourceClaimRef]()
        while True:
            await anyio.sleep(self.account_period)
            held = self._leased_claims() - self.preparer.reserved
            if not held and not self.preparer.prepared:
                continue
            account = await to_thread.run_sync(read_account, self.kubelet_root, self.driver)
            if account is not None:
                await self._begin_missing(account)
            missing = {it for it in held if account is not None and it.uid not in account.known}
            for claim in missing & suspected:  # twice: the kubelet may have been writing the file
                log.warning("resource claim forgotten by the kubelet", claim=str(claim))
                await self.preparer.unprepare(claim)
            suspected = frozenset(missing)

    async def _begin_missing(self, account: KubeletAccount) -> None:
        """Begin leases of claims that are prepared, and were not unprepared meanwhile."""
        before = self._leased_claims()
        known = {ref for ref in account.prepared if ref.uid in self.preparer.prepared}
        devices = {ref: account.devices[ref] for ref in known}
        self.registry.apply(ResourceClaimsRead(devices, anyio.current_time()))
        begun = self._leased_claims() - before
        await self._write_missing({ref: account.prepared[ref] for ref in begun})

    def _leased_claims(self) -> set[ResourceClaimRef]:
        return {
            lease.resource_claim
            for state in self.registry.snapshot.gpus.values()
            for lease in state.leases.values()
            if lease.resource_claim is not None
        }

    async def _release_others(self, account: KubeletAccount) -> None:
        """End the leases of claims that the kubelet does not know."""
        for claim in self._leased_claims():
            if claim.uid not in account.known:
                await self.preparer.unprepare(claim)

    async def _write_again(
        self,
        claim: ResourceClaimRef,
        devices: tuple[PreparedDevice, ...],
        offered: Mapping[ShareId, Share],
    ) -> None:
        """Write the CDI specification of a claim from its names alone.

        As at its preparation, all devices of one request have one grant.
        """
        requests: dict[tuple[tuple[str, ...], str], list[ClaimDevice]] = defaultdict(list)
        names: dict[str, str] = {}
        for prepared in devices:
            if (own := prepared.claimed) is not None:
                requests[prepared.requests, own.backend].append(own)
                names[own.name] = prepared.requests[0] if prepared.requests else ""
        grants: dict[str, Grant] = {}
        for together in requests.values():
            shares = [offered.get(share_id) for it in together for share_id in it.share_ids]
            held = [share for share in shares if share is not None]
            if len(held) < len(shares):
                log.error(
                    "resource claim without its shares",
                    claim=str(claim),
                    effect="its containers do not start again",
                    fix="offer the shares of before again, or delete the pods of this claim",
                )
                return
            backend = self.backend(held[0].resource)
            grant = await backend.grant(held, self.registry.snapshot)
            grant = with_settings(grant, backend, together[0].settings)
            grants.update((it.name, grant) for it in together)
        await self._files.write(claim.uid, with_joint_variables(claim.uid, grants, names))

    def _methods(self, calls: StreamingCalls) -> Mapping[str, Method]:
        streams = HealthStream(self.registry, self.node).methods(calls)
        service = DraService(self.preparer, self.registry.events, self.statuses.note)
        return {**service.methods(), **streams}
