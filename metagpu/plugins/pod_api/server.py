"""The server of `mgctl` in containers, and the folder with `mgctl` and its socket.

The server answers about the caller's pod alone. The folder is not in /run: distributions mount /run
noexec, and containers inherit that. The folder outlives the daemon and reboots, as do the mounts
that the kubelet repeats.
"""

import platform
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

import anyio
import structlog
from anyio import CapacityLimiter, to_thread
from msgspec import to_builtins
from msgspec.structs import replace

from metagpu import __version__
from metagpu.core.contracts.host import Container, Host
from metagpu.core.contracts.programs import RunChild
from metagpu.core.errors import FileNotWritten, MetagpuError, PackageIncomplete
from metagpu.core.grants.cdi import HOOK_NAME
from metagpu.core.grants.injection import CLIENT_NAME
from metagpu.core.reports.schema.daemon import EventReport, PodMgctlReport
from metagpu.core.reports.schema.gpus import UsedGpuReport
from metagpu.core.reports.schema.usage import UsageReport
from metagpu.core.runtime.files import is_noexec
from metagpu.core.usage.report import RequestingPod
from metagpu.display.table import PLAIN, Terminal, redraw
from metagpu.display.usage import TABLES, Answer, Top, format_usage
from metagpu.plugins.pod_api.command import HELP, PodCommand, UsageError, parse_command
from metagpu.plugins.pod_api.frames import PodRequest
from metagpu.plugins.pod_api.socket import (
    DEFAULT_LIMITS,
    CallerConnection,
    CallerRefused,
    PodApiTiming,
    PodSocket,
    PodSocketLimits,
)

MGCTL_PROGRAMS: Final = Path(__file__).parents[2] / "programs"

log = structlog.get_logger()


class PodFolder:
    """The folder that is mounted into containers, prepared when it is first needed.

    Attributes:
        path: the folder, at the same path for the container runtime; `None` mounts none.
        runs_programs: whether the host may start programs from it (not mounted `noexec`).
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.runs_programs = False
        self._installed: bool | None = None
        self._installing = anyio.Lock()

    async def prepare(self) -> Path | None:
        """Install mgctl in the folder, once; return the folder, or `None` if that failed.

        A failure is logged once; containers then start without mgctl.
        """
        # The layout and the server of the folder ask at the same time: two installations at once
        # would take each other's new file away.
        async with self._installing:
            if self.path is not None and self._installed is None:
                await self._install(self.path)
        return self.path if self._installed else None

    async def _install(self, path: Path) -> None:
        try:
            await to_thread.run_sync(install_mgctl, path)
            self.runs_programs = not await to_thread.run_sync(is_noexec, path)
            self._installed = True
            if not self.runs_programs:
                effect = "containers start without the start hook"
                log.warning("pod folder mounted noexec", folder=str(path), effect=effect)
        except MetagpuError as error:
            self._installed = False
            log.warning("mgctl installation failed", folder=str(path), error=str(error))


def install_mgctl(folder: Path, programs: Path = MGCTL_PROGRAMS) -> None:
    """Copy the `mgctl` of this architecture into the folder, also as our hook; blocks.

    The hook has a file of its own, which daemons before it leave alone.

    Raises:
        MetagpuError: the package has no such program, or the folder cannot be written.
    """
    program = programs / f"mgctl-{platform.machine()}"

    try:
        content = program.read_bytes()
    except OSError as error:
        raise PackageIncomplete(
            f"this installation has no {program.name} ({error.strerror}); build it with "
            "`make mgctl` before the package is built"
        ) from error

    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # for users of any number, whatever our own files are like
        for target in (folder / CLIENT_NAME, folder / HOOK_NAME):
            if target.is_dir():
                # A container runtime creates a folder for a mount whose source is missing.
                target.rmdir()
            if not target.exists() or target.read_bytes() != content:
                # A rename: running containers keep their file, and none sees half of a new one.
                new = folder / f".{target.name}.new"
                new.write_bytes(content)
                new.chmod(0o755)
                new.replace(target)
    except OSError as error:
        raise FileNotWritten(
            f"{error.filename or folder} cannot be made: {error.strerror or error}; run as root, "
            "or name another folder with --pod-dir"
        ) from error


SHOWN_WITHIN: Final = 2.0
"""Seconds from a call to the shares of its pod: the kubelet lists a pod half a second after it gave
them, and usage is collected once a second."""
NAMED_WITHIN: Final = 1.0
"""Seconds from a call to the name of its container: the kubelet makes its link in /var/log a moment
after the container's start."""
PERIOD: Final = 1.0
"""Seconds between two screens of `-w` and `top`."""
USAGE_STATUS: Final = 2
"""The exit status for a wrong command line."""


PodEvents = Callable[[RequestingPod, Sequence[UsedGpuReport]], Sequence[EventReport]]
"""Returns the recent events that a pod may read, by the GPUs of its usage."""


def no_events(_pod: RequestingPod, _gpus: Sequence[UsedGpuReport]) -> Sequence[EventReport]:
    """Return no event: nobody reads them here."""
    return ()


@dataclass
class PodMgctlServer:
    """Answers `mgctl` on the socket in the folder that containers see.

    Attributes:
        folder: the folder that is mounted into containers, and has the socket.
        node: the node's name.
        host: identifies and names callers.
        usage_report: returns the usage of one pod.
        is_enabled: whether the configuration has `mgctl` in pods now. Without it there is no
            socket.
        run_child: starts the process that holds the connections of containers.
        limits: of callers.
        events_of: returns the recent events that a pod may read, by the GPUs of its usage.
    """

    folder: PodFolder
    node: str
    host: Host
    usage_report: Callable[[RequestingPod], Awaitable[UsageReport]]
    is_enabled: Callable[[], bool]
    run_child: RunChild
    timing: PodApiTiming = field(default_factory=PodApiTiming)
    events_of: PodEvents = no_events
    limits: ClassVar[PodSocketLimits] = DEFAULT_LIMITS
    _socket: PodSocket | None = None
    _render_limiter: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(2))

    async def run(self) -> None:
        """Answer until cancelled, while it is enabled; return at once without a folder."""
        folder = await self.folder.prepare()
        if folder is None:
            return

        pods = self._socket = PodSocket(
            folder,
            self.host,
            self.run_child,
            self._respond,
            limits=self.limits,
            timing=self.timing,
        )
        while True:
            await self._until(enabled=True)
            async with anyio.create_task_group() as group:
                group.start_soon(pods.run)
                await self._until(enabled=False)
                group.cancel_scope.cancel()

    def report(self) -> PodMgctlReport:
        """Return whether containers have `mgctl`, and why their calls are not answered."""
        problem = self._socket.problem if self._socket is not None else ""
        return PodMgctlReport(self.is_enabled(), problem or None)

    async def _until(self, *, enabled: bool) -> None:
        while self.is_enabled() != enabled:  # noqa: ASYNC110 - the configuration has no event
            await anyio.sleep(self.timing.switch_period)

    async def _respond(
        self, container: Container, request: PodRequest, caller: CallerConnection
    ) -> int:
        if request.has_metagpu_env and not caller.wants_json:
            await caller.write_stderr(
                "MG_CTL_ADDR and MG_CTL_TOKEN are MetaGPU's and have no effect here: metagpu runs "
                "on this node and identifies the caller"
            )
        try:
            command = parse_command(request.arguments)
        except UsageError as error:
            await caller.write_stderr(str(error))
            return USAGE_STATUS

        match command.name:
            case "help":
                await caller.write_stdout(HELP)
            case "version":
                await caller.write_stdout(f"metagpu {__version__}\n")
            case _:
                pod = await self._pod(container)
                await self._show(pod, command, _terminal(request), caller)
        return 0

    async def _show(
        self, pod: RequestingPod, command: PodCommand, terminal: Terminal, caller: CallerConnection
    ) -> None:
        """Write the answer once, or repeatedly until the caller has gone."""
        form, top = command.output_format, Top()
        is_table = form in TABLES
        is_screen = is_table and terminal is not PLAIN
        is_top = command.name == "top" and is_table
        follow = is_screen if is_top else command.watch and (is_screen or not is_table)

        def render(report: UsageReport) -> str:
            answer: Answer = to_builtins(report)
            if is_top:
                return top.screen(answer, terminal, command.sort_by)
            return format_usage(
                answer, command.kind, form, terminal, compact=follow, sort_by=command.sort_by
            )

        report = await self._first_report(pod)
        while True:
            # In a thread: a pod with very many processes must not keep the kubelet waiting.
            text = await to_thread.run_sync(render, report, limiter=self._render_limiter)
            await caller.write_stdout(redraw(text, terminal) if follow and is_screen else text)
            if not follow:
                return
            await anyio.sleep(PERIOD)
            report = await self._report(pod)

    async def _first_report(self, pod: RequestingPod) -> UsageReport:
        """Return a report with the pod's shares, or without any where none become known."""
        until = anyio.current_time() + SHOWN_WITHIN
        while True:
            report = await self._report(pod)
            if report.containers or anyio.current_time() >= until:
                return report
            await anyio.sleep(SHOWN_WITHIN / 10)

    async def _report(self, pod: RequestingPod) -> UsageReport:
        report = await self.usage_report(pod)
        events = list(self.events_of(pod, report.gpus))
        return replace(report, version=__version__, node=self.node, events=events)

    async def _pod(self, container: Container) -> RequestingPod:
        """Return the pod of a container, by name.

        Raises:
            CallerRefused: the pod's name does not become known.
        """
        until = anyio.current_time() + NAMED_WITHIN
        while container not in (holders := await self.host.holders([container])):
            if anyio.current_time() < until:
                await anyio.sleep(NAMED_WITHIN / 10)
                continue
            raise CallerRefused(
                "metagpu does not know this container's name yet; try again in a second. If this "
                "stays: metagpu's pod needs the host's /var/log, read-only"
            )
        holder = holders[container]
        return RequestingPod(holder.namespace, holder.pod, container.pod_uid)


def _terminal(request: PodRequest) -> Terminal:
    if not request.tty:
        return PLAIN
    return Terminal(request.columns or None, request.rows or None, colours=True)
