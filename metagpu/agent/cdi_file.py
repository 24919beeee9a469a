"""The node's CDI specification, a file that container runtimes read.

The file names the node's GPUs and MIG devices. It is written before the kubelet receives a name
from it, and stays when the daemon ends: containers restart while no daemon runs. A reboot removes
the file with /var/run; the daemon writes it again before it offers anything.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog
from anyio import to_thread
from msgspec.structs import replace

from metagpu.agent.driver_edits import DriverEdits
from metagpu.agent.paths import CDI_DIR
from metagpu.core.contracts.driver import Driver, read_instances
from metagpu.core.errors import CdiError, DriverError
from metagpu.core.grants import cdi
from metagpu.core.grants.injection import NO_DEVICES, VISIBLE_DEVICES, Injection
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.request_errors import CdiNameMissing
from metagpu.core.model.shares import HardwareDevice
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.schema.daemon import CdiReport
from metagpu.core.runtime.files import replace_text
from metagpu.core.state.registry import Registry

NO_DEVICE_NODES: Final = (
    "no GPU has all of its device nodes on this machine, so there is no CDI specification, and "
    "containers that get their GPUs by CDI do not start; load the driver, run "
    "`nvidia-modprobe -c 0 -u`, or name the folder that has the host's /dev with --dev-root"
)
"""The problem while there are GPUs and no GPU can be named."""

NamedDevices = Mapping[GpuId, tuple[Gpu, Mapping[str, HardwareDevice]]]
"""The GPUs, and the MIG devices on each GPU by their CDI names."""
Nodes = tuple[frozenset[str], Mapping[str, int], str]
"""The device nodes that exist, the numbers of MIG's, and their root (see `Injection`)."""

log = structlog.get_logger()


class CdiTiming(msgspec.Struct, frozen=True):
    """Seconds.

    Attributes:
        check: between two checks whether another program has changed the file, and between two
            attempts to read the driver's edits.
        node_deadline: the wait for the device nodes of a new MIG device. The driver's programs, or
            udev, create them a moment after the device.
        node_poll: between two scans for these nodes.
    """

    check: float = 30.0
    node_deadline: float = 1.0
    node_poll: float = 0.05


class MonitorFile:
    """The CDI specification of GPUs for monitoring, by claims with `adminAccess`.

    A container with such a name can ask NVML about the GPU, and has no device node to compute with.
    There is no file without such a claim.

    Attributes:
        wanted: whether a claim looks at a GPU of it.
        names: the GPUs that are in it.
    """

    def __init__(self, folder: Path | None) -> None:
        self.wanted = False
        self.names = frozenset[GpuId]()
        self._path = folder / cdi.MONITOR_FILE if folder is not None else None

    def want(self, *, wanted: bool) -> None:
        """Write the file from now on, or let it be removed."""
        self.wanted = wanted

    def replace(self, gpus: Iterable[Gpu], injection: Injection, edits: cdi.ContainerEdits) -> None:
        """Write the file for GPUs that have their device nodes, if it is wanted. Blocks.

        Raises:
            OSError: the file cannot be written.
        """
        if not self.wanted or self._path is None:
            return
        named = {str(gpu.id): nodes for gpu in gpus if (nodes := injection.monitor_nodes(gpu))}
        self.names = frozenset(map(GpuId, named))
        if not named:
            self._path.unlink(missing_ok=True)
            return
        variables = {VISIBLE_DEVICES: NO_DEVICES}
        text = cdi.build_monitor_spec(named, injection.monitor_common_nodes(), edits, variables)
        if not self._path.exists() or self._path.read_text() != text:
            replace_text(self._path, text)

    def remove(self) -> None:
        """Remove the file, unless it is wanted again meanwhile. Blocks."""
        self.names = frozenset()
        if self._path is not None and not self.wanted:
            with suppress(OSError):  # it harms nobody: no container names its devices any more
                self._path.unlink(missing_ok=True)


@dataclass
class CdiFile:
    """The writer of the file, from the first configuration that gives GPUs by CDI on.

    Attributes:
        folder: the file's folder, at the same path for the container runtime; `None` writes none.
        read_nodes: reads the host's device nodes; blocks.
    """

    registry: Registry
    driver: Driver
    driver_edits: DriverEdits
    folder: Path | None
    read_nodes: Callable[[], Nodes]
    timing: CdiTiming = field(default_factory=CdiTiming)
    _injection: Injection | None = None
    _listed: dict[GpuId, Mapping[str, HardwareDevice]] = field(default_factory=dict)
    _seen: NamedDevices | None = None
    _names: frozenset[str] = frozenset()
    _text: str = ""
    _problem: str = ""
    _lock: anyio.Lock = field(default_factory=anyio.Lock)

    def __post_init__(self) -> None:
        self._monitors = MonitorFile(self.folder)

    async def update(self, injection: Injection) -> None:
        """Write the file for this injection, and keep it up to date from now on.

        A file that exists stays up to date also when the injection gives no names from it: a
        container that has such a name may restart.

        Raises:
            CdiError: if the file cannot be written, and the injection gives names from it; the text
                names the fix.
        """
        if self.folder is None or not (injection.uses_own_cdi or self._names):
            return

        before, self._injection = self._injection, injection
        await self.driver_edits.read(self.registry.snapshot.versions.driver)
        await self._list_devices()
        try:
            await self._write()
        except CdiError:
            if injection.uses_own_cdi:
                self._injection = before
                raise

    async def ensure_names(self, names: frozenset[str]) -> None:
        """Wait until the file names these devices.

        Raises:
            CdiNameMissing: if it cannot name them; the text reaches the pod.
        """
        if self._injection is None:
            return
        wanted = ", ".join(sorted(names))
        try:
            await self._write(rescan=False)
            with anyio.move_on_after(self.timing.node_deadline):
                while not names <= self._names and names <= self._known():
                    await self._write()
                    if not names <= self._names:
                        await anyio.sleep(self.timing.node_poll)
        except CdiError as error:
            raise CdiNameMissing(wanted, str(error)) from error
        if not names <= self._known():
            raise CdiNameMissing(wanted, "it is gone")
        if not names <= self._names:
            raise CdiNameMissing(wanted, "not all of its device nodes are on this machine")

    async def ensure_monitored(self, gpus: frozenset[GpuId]) -> None:
        """Wait until containers can look at these GPUs by their CDI names.

        Without any GPU, no claim looks at one any more.

        Raises:
            CdiNameMissing: if they cannot; the text reaches the pod.
        """
        if self._injection is None:
            return
        self._monitors.want(wanted=bool(gpus))
        if not gpus:
            async with self._lock:
                await to_thread.run_sync(self._monitors.remove)
            return
        wanted = ", ".join(sorted(gpus))
        try:
            await self._write()
        except CdiError as error:
            raise CdiNameMissing(wanted, str(error)) from error
        if missing := sorted(gpus - self._monitors.names):
            reason = "it has no device node on this machine"
            raise CdiNameMissing(", ".join(missing), reason)

    async def run(self) -> None:
        """Follow the GPUs and MIG devices until cancelled; log failures, and retry."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._check_file)
            async for _ in self.registry.watch(self._named_devices):
                await self._try(rescan=False)

    def report(self) -> CdiReport | None:
        """Return the file's path, size and problems; `None` where no file is written."""
        if self._injection is None or self.folder is None:
            return None
        return CdiReport(
            file=str(self._file),
            kind=cdi.KIND,
            devices=len(self._names),
            problem=self._problem or None,
            no_libraries=self.driver_edits.problem or None,
        )

    @property
    def _file(self) -> Path:
        return (self.folder or CDI_DIR) / cdi.FILE_NAME

    async def _check_file(self) -> None:
        """Write the file again when another program has changed or removed it.

        While the driver's edits are missing, the toolkit is asked for them again: it may have been
        installed meanwhile, or have been over its deadline.
        """
        while True:
            await anyio.sleep(self.timing.check)
            if self._names and await to_thread.run_sync(_read, self._file) != self._text:
                self._text = ""
            if missing := bool(self.driver_edits.problem):
                await self.driver_edits.read(self.registry.snapshot.versions.driver)
            if missing or self._problem or not self._text or self._monitors.wanted:
                await self._try()

    async def _try(self, *, rescan: bool = True) -> None:
        """Write the file, if there is an injection; log each new problem once."""
        if self._injection is None:
            return
        before = self._problem
        try:
            await self._write(rescan=rescan)
        except CdiError as error:
            if str(error) != before:
                log.error("cdi specification failed", error=str(error))

    def _named_devices(self, now: Snapshot) -> NamedDevices:
        """Return the devices to name; a backend's report replaces the first listing."""
        if self._injection is None:
            return {}
        return {
            gpu: (
                state.gpu,
                {
                    name: device
                    for provisioned in state.provisioned.values()
                    for name, device in provisioned.named_devices.items()
                }
                or self._listed.get(gpu, {}),
            )
            for gpu, state in now.gpus.items()
        }

    def _known(self) -> frozenset[str]:
        """Return the names of all devices, with or without device nodes."""
        found = self._named_devices(self.registry.snapshot)
        return frozenset(found).union(*(devices for _, devices in found.values()))

    async def _list_devices(self) -> None:
        """List the MIG devices of GPUs that no backend has reported on yet.

        Older containers have these names, and may restart at this moment.
        """
        gpus = self.registry.snapshot.gpus
        unlisted = [
            gpu
            for gpu, state in gpus.items()
            if gpu not in self._listed and not state.provisioned and state.gpu.mig_enabled
        ]
        for gpu, answer in (await read_instances(self.driver.mig, unlisted)).items():
            if isinstance(answer, DriverError):
                name = str(gpus[gpu].gpu)
                log.warning("listing of mig devices failed", gpu=name, error=str(answer))
                continue
            self._listed[gpu] = {
                part.uuid: HardwareDevice(part.uuid, instance.number, part.number)
                for instance in answer
                for part in instance.compute_instances
                if part.uuid
            }

    async def _write(self, *, rescan: bool = True) -> None:
        """Write the file, if its text changes.

        With `rescan`, the host's device nodes are read in any case; without, only for new devices.

        Raises:
            CdiError: if the file cannot be written.
        """
        if not rescan and self._seen == self._named_devices(self.registry.snapshot):
            return
        async with self._lock:
            now = self.registry.snapshot
            self._listed |= {gpu: {} for gpu, state in now.gpus.items() if state.provisioned}
            found = self._named_devices(now)
            if not rescan and self._seen == found:
                return  # the writer that held the lock has done it
            try:
                self._names = await to_thread.run_sync(self._replace_file, found)
            except OSError as error:
                self._problem = (
                    f"{error.filename or self.folder} cannot be written: "
                    f"{error.strerror or error}; run as root, mount the host's folder there, name "
                    "another one with --cdi-dir, or leave CDI out of deviceListStrategy"
                )
                raise CdiError(self._problem) from error
            self._seen, before = found, self._problem
            self._problem = NO_DEVICE_NODES if found and not self._names else ""
            if self._problem not in ("", before):
                log.error("cdi specification failed", error=self._problem)

    def _replace_file(self, found: NamedDevices) -> frozenset[str]:
        """Replace the file by one of these devices; return the names in it. Blocks.

        Without any device the file is removed: CDI allows no specification without devices, and an
        old file would name absent devices. A container would get a dead node, or the device that
        has the node's number by now. Without the file, runtimes refuse the unknown name.
        """
        present, capabilities, root = self.read_nodes()
        injection = self._injection or Injection()
        injection = replace(
            injection, device_nodes_present=present, capabilities=capabilities, dev_root=root
        )

        self._monitors.replace(
            (gpu for gpu, _ in found.values()), injection, self.driver_edits.edits
        )
        named = {
            name: nodes
            for gpu, devices in found.values()
            for name, device in ((gpu.id, None), *devices.items())
            if (nodes := injection.device_nodes(gpu, device))
        }
        if not named:
            self._text = ""
            if self._file.exists():
                self._file.unlink()
            return frozenset()
        text = cdi.build_spec(
            *(named, injection.common_nodes(), self.driver_edits.edits), hook=injection.start_hook
        )
        if text != self._text:
            replace_text(self._file, text)
            self._text = text
        return frozenset(named)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
