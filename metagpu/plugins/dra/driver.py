"""The DRA driver of one node: earlier leases, the service, its registration."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
from grpclib.const import Handler as Method

from metagpu.core.contracts.backend import Backend
from metagpu.core.model.resource_claims import ReadSharing
from metagpu.core.model.shares import ResourceName, count_containers
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.schema import DraReport
from metagpu.core.state.call_stats import CallStats
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.allocation import ReadResourceClaim
from metagpu.plugins.dra.checkpoint import CheckpointFollower
from metagpu.plugins.dra.claim_status import ApplyClaimStatus, ClaimStatuses, ClaimStatusTiming
from metagpu.plugins.dra.prepared_claim import ClaimFiles, EnsureMonitored, all_monitored
from metagpu.plugins.dra.preparer import ClaimPreparer
from metagpu.plugins.dra.registration import DraRegistration, RegistrationTiming
from metagpu.plugins.dra.retries import AnnotatePod, PreparationRetries, ReadPendingPods
from metagpu.plugins.dra.service import SERVICE, DraService, HealthStream
from metagpu.plugins.dra.service import SERVICES as HEALTH_SERVICES
from metagpu.plugins.kubelet.granting import EnsureCdiNames
from metagpu.plugins.kubelet.grpc_server import StreamingCalls


@dataclass
class DraDriver:
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
        stats: counts the preparations.
        timing: of the registration.
        checkpoint_period: seconds between two looks at the kubelet's checkpoint.
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
    stats: CallStats = field(default_factory=CallStats)
    timing: RegistrationTiming = field(default_factory=RegistrationTiming)
    checkpoint_period: float = 60.0
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
        self._states = self.preparer.states
        self.retries = PreparationRetries(
            self.registry, self.preparer, self.annotate_pod, self.read_pending
        )
        self.statuses = ClaimStatuses(
            self.registry,
            self.driver,
            self._states.prepared,
            read=self.read_claim,
            apply=self.apply_status,
            timing=self.status_timing,
        )
        self.checkpoint = CheckpointFollower(
            self.registry,
            self.preparer,
            self.kubelet_root,
            self.driver,
            backend=self.backend,
            files=self._files,
            ensure_monitored=self.ensure_monitored,
            note_restored=partial(self.statuses.note, restored=True),
            period=self.checkpoint_period,
        )
        self.registration = DraRegistration(
            self.driver,
            self.kubelet_root,
            (SERVICE, *HEALTH_SERVICES),
            self._methods,
            self.timing,
            on_registered=self.retries.note_registered,
        )

    async def run(self) -> None:
        """Begin with the earlier leases, then serve until cancelled."""
        await self.checkpoint.restore()
        async with anyio.create_task_group() as group:
            group.start_soon(self.retries.run)
            group.start_soon(self.statuses.run)
            group.start_soon(self.checkpoint.follow)
            await self.registration.run()

    def report(self) -> DraReport:
        """Return the registration, prepared claims, and GPUs with too many of their pods."""
        status = self.registration.status
        return DraReport(
            driver=self.driver,
            registered=status.registered,
            problem=self.checkpoint.problem or status.problem or None,
            claims=len(self._states.prepared),
            monitored=sorted(all_monitored(self._states.prepared)),
            status_problem=self.statuses.problem or None,
            crowded=list(crowded_gpus(self.registry.snapshot)),
        )

    def _methods(self, calls: StreamingCalls) -> Mapping[str, Method]:
        streams = HealthStream(self.registry, self.node).methods(calls)
        service = DraService(self.preparer, self.registry.events, self.statuses.note, self.stats)
        return {**service.methods(), **streams}


def crowded_gpus(snapshot: Snapshot) -> Iterator[str]:
    """Yield a sentence for each GPU with too many containers of ResourceClaims.

    All containers of a claim use its shares together, and the kubelet asks for a claim once: a pod
    that joins later meets no check.
    """
    for state in snapshot.gpus.values():
        for resource in dict.fromkeys(it.share.resource for it in state.leases.values()):
            offer = snapshot.offers.get(resource)
            most = offer and offer.rule.max_containers.get(state.gpu.id)
            leases = [it for it in state.leases.values() if it.share.resource == resource]
            claims = {str(it.resource_claim) for it in leases if it.sharers}
            if most and claims and (count := count_containers(leases)) > most:
                yield (
                    f"GPU {state.gpu.index} serves {most} containers of {resource} at once, and "
                    f"has {count} by ResourceClaim {', '.join(sorted(claims))}: the last of them "
                    "get no client of MPS; end a pod, or give it a claim of its own"
                )
