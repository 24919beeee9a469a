"""The DRA driver of one node: earlier leases, the service, its registration.

The kubelet watches a folder for registration sockets, asks each for its service, and says how it
went. A kubelet that starts finds the socket that stands; the socket's end deregisters the driver.
"""

import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Final

import anyio
import msgspec
import structlog
from anyio import to_thread
from grpclib.const import Handler as Method
from grpclib.exceptions import GRPCError, StreamTerminatedError

from metagpu.core.contracts.backend import Backend
from metagpu.core.errors import describe_error
from metagpu.core.model.resource_claims import ReadSharing
from metagpu.core.model.shares import ResourceName, count_containers
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.schema.daemon import DraReport
from metagpu.core.runtime.files import file_identity
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.state.call_stats import CallStats
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.allocation import ReadResourceClaim
from metagpu.plugins.dra.checkpoint import CheckpointFollower
from metagpu.plugins.dra.claim_status import ApplyClaimStatus, ClaimStatuses, ClaimStatusTiming
from metagpu.plugins.dra.prepared_claim import ClaimFiles, EnsureMonitored, all_monitored
from metagpu.plugins.dra.preparer import ClaimPreparer
from metagpu.plugins.dra.retries import AnnotatePod, PreparationRetries, ReadPendingPods
from metagpu.plugins.dra.service import SERVICE, DraService, HealthStream
from metagpu.plugins.dra.service import SERVICES as HEALTH_SERVICES
from metagpu.plugins.kubelet.fast_codec import check_message
from metagpu.plugins.kubelet.granting import EnsureCdiNames
from metagpu.plugins.kubelet.grpc_client import call_raw
from metagpu.plugins.kubelet.grpc_server import StreamingCalls, serve_grpc, unary_method
from metagpu.plugins.kubelet.pb import pluginregistration as pb

_PATH: Final = "/pluginregistration.Registration/"
_TYPE: Final = "DRAPlugin"
_CREDENTIALS: Final = Struct("3i")
"""The kernel's `struct ucred`: pid, uid, gid."""

log = structlog.get_logger()


class RegistrationTiming(msgspec.Struct, frozen=True):
    """Seconds.

    Attributes:
        poll: between two checks of the sockets' files.
        answer: for another driver to say who it is.
    """

    poll: float = 1.0
    answer: float = 1.0


TIMING: Final = RegistrationTiming()


class RegistrationStatus(msgspec.Struct):
    """The kubelet's last word of the driver; it may change at each of its starts.

    Attributes:
        registered: whether the kubelet has the driver.
        problem: why it has not, empty if it has.
    """

    registered: bool = False
    problem: str = "the kubelet has not asked yet"


class DraRegistration:
    """Serves a driver, and keeps it registered.

    Attributes:
        status: what the kubelet said last.

    Args:
        driver: the name of the driver.
        kubelet_root: the kubelet's own folder, which has the sockets of its plugins.
        services: the names of the gRPC services, the preferred one first.
        methods: the methods of these services.
        on_registered: is called whenever the kubelet has registered the driver.
    """

    def __init__(
        self,
        driver: str,
        kubelet_root: Path,
        services: tuple[str, ...],
        methods: Callable[[StreamingCalls], Mapping[str, Method]],
        timing: RegistrationTiming = TIMING,
        *,
        on_registered: Callable[[], None] = lambda: None,
    ) -> None:
        self.status = RegistrationStatus()
        self._driver = driver
        self._services = services
        self._methods = methods
        self._timing = timing
        self._on_registered = on_registered
        self._socket = kubelet_root / "plugins_registry" / f"{driver}-reg.sock"
        self._endpoint = kubelet_root / "plugins" / driver / "dra.sock"
        self._logged = LogOnce()

    async def run(self) -> None:
        """Serve until cancelled; serve again what is removed by somebody else."""
        while True:
            try:
                await self._serve_once()
            except OSError as error:
                self.status.registered = False
                where = error.filename or self._endpoint.parent
                self.status.problem = f"{where}: {describe_error(error)}"
                if self._logged.is_new(self._socket, self.status.problem):
                    log.error("dra sockets failed", error=self.status.problem)
                await anyio.sleep(self._timing.poll)

    async def _serve_once(self) -> None:
        """Serve until the service's own socket is lost.

        The service comes first: the kubelet calls it as soon as it sees the registration. It goes
        on while the registration is made again.
        """
        await self._wait_for_others()
        calls = StreamingCalls()
        async with _socket_at(self._endpoint, self._methods(calls), calls) as served:
            while served():
                await self._wait_for_others()
                registration = self._registration_methods()
                async with _socket_at(self._socket, registration, StreamingCalls()) as offered:
                    log.info("dra driver served", driver=self._driver, socket=str(self._socket))
                    while served() and offered():  # noqa: ASYNC110 - of files
                        await anyio.sleep(self._timing.poll)
                log.warning("dra socket lost", driver=self._driver)

    async def _wait_for_others(self) -> None:
        """Wait while another process serves a driver of this name for the kubelet.

        None of ours does so meanwhile. Another daemon has our endpoint too: each would remove the
        other's sockets, for ever.
        """
        while (other := await self._find_other()) is not None:
            self.status.registered = False
            self.status.problem = (
                f"{other} as the driver {self._driver} of this kubelet; stop it, or give this one "
                "another name by `dra.driver`"
            )
            if self._logged.is_new("other", other):
                log.error("competing dra driver found", problem=self.status.problem)
            await anyio.sleep(self._timing.poll)

    async def _find_other(self) -> str | None:
        """Return who answers on our registration socket, and with which endpoint."""
        try:
            method = f"{_PATH}GetInfo"
            answer = await call_raw(self._socket, method, b"", self._timing.answer)
            process = await to_thread.run_sync(_listening_process, self._socket)
        except (OSError, GRPCError, StreamTerminatedError):
            return None  # there is none, or its daemon has ended
        try:
            check_message(answer)
            endpoint = pb.PluginInfo.parse(answer).endpoint
        except Exception as error:  # noqa: BLE001 - the generated class has no error of its own
            log.warning(
                "dra socket of no driver",
                socket=str(self._socket),
                error=f"its answer is not a PluginInfo: {describe_error(error)}",
                effect="metagpu serves there now",
            )
            return None
        return f"{process} serves {endpoint}"

    def _registration_methods(self) -> Mapping[str, Method]:
        calls = {"GetInfo": self._get_info, "NotifyRegistrationStatus": self._notify}
        return {f"{_PATH}{name}": unary_method(call) for name, call in calls.items()}

    async def _get_info(self, _: bytes) -> bytes:
        return bytes(
            pb.PluginInfo(
                type=_TYPE,
                name=self._driver,
                endpoint=str(self._endpoint),
                supported_versions=list(self._services),
            )
        )

    async def _notify(self, request: bytes) -> bytes:
        said = pb.RegistrationStatus.parse(request)
        self.status.registered, self.status.problem = said.plugin_registered, said.error
        if said.plugin_registered:
            log.info("dra driver registered", driver=self._driver)
            self._on_registered()
        else:
            log.error("dra driver refused", driver=self._driver, error=said.error)
        return bytes(pb.RegistrationStatusResponse())


def _listening_process(path: Path) -> str:
    """Return the process that listens on a socket, for people.

    Raises:
        OSError: none does.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMING.answer)
        connection.connect(str(path))
        size = _CREDENTIALS.size
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, _, _ = _CREDENTIALS.unpack(found)
    return f"process {pid}" if pid else "a process of another pid namespace"


@asynccontextmanager
async def _socket_at(
    path: Path, methods: Mapping[str, Method], calls: StreamingCalls
) -> AsyncIterator[Callable[[], bool]]:
    """Serve at a path; the block gets a check of whether the file is still there.

    Raises:
        OSError: the socket cannot be made.
    """
    await to_thread.run_sync(_make_way, path)
    async with serve_grpc(path, methods, calls):
        identity = file_identity(path)
        yield lambda: file_identity(path) == identity


def _make_way(path: Path) -> None:
    """Make the folder of a socket, and remove the socket of a daemon that was killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)


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
        streams = HealthStream(self.registry, self.node, self._states.prepared).methods(calls)
        service = DraService(self.preparer, self.registry.events, self.statuses.note, self.stats)
        return {**service.methods(), **streams}


def crowded_gpus(snapshot: Snapshot) -> Iterator[str]:
    """Yield a sentence for each GPU with too many containers of ResourceClaims.

    All containers of a claim use its shares together, and the kubelet asks for a claim once: a pod
    that joins later meets no check.
    """
    for state in snapshot.gpus.values():
        for resource in dict.fromkeys(lease.share.resource for lease in state.leases.values()):
            offer = snapshot.offers.get(resource)
            most = offer and offer.rule.max_containers.get(state.gpu.id)
            leases = [lease for lease in state.leases.values() if lease.share.resource == resource]
            claims = {str(lease.resource_claim) for lease in leases if lease.sharers}
            if most and claims and (count := count_containers(leases)) > most:
                yield (
                    f"GPU {state.gpu.index} serves {most} containers of {resource} at once, and "
                    f"has {count} by ResourceClaim {', '.join(sorted(claims))}: the last of them "
                    "get no client of MPS; end a pod, or give it a claim of its own"
                )
