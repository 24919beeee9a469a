"""The node's CDI specification, kept as its GPUs and MIG devices are; runtimes read it.

It is written before anybody is told a name in it, and stays when the daemon ends: containers start
anew while none is here. After a reboot it is gone with /var/run, and written before anything is
offered.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio
import structlog
from anyio import to_thread
from msgspec.structs import replace

from metagpu.core import cdi
from metagpu.core.driver import Driver
from metagpu.core.errors import CdiError, DriverError, NotNamed, ToolError
from metagpu.core.gpu import Gpu, GpuId
from metagpu.core.injection import Injection
from metagpu.core.model import Made
from metagpu.core.registry import Registry
from metagpu.core.snapshot import Snapshot
from metagpu.core.tools import Tools

LOOK: Final = 30.0
"""Seconds between two looks whether the file is as it was left."""
NODES_DEADLINE: Final = 1.0
NODES_PAUSE: Final = 0.05
"""Seconds that the nodes of a new MIG device are awaited, and between two looks: the driver's
programs, or udev, make them a moment after the device."""
NOTHING: Final = (
    "no GPU has all of its device nodes on this machine, so there is no CDI specification, and "
    "containers that are given GPUs by it do not start until there are; load the driver, run "
    "`nvidia-modprobe -c 0 -u`, or say with --dev-root where the host's /dev stands"
)
"""What is wrong while there are GPUs and none can be named."""
_ASKED: Final = ("nvidia-ctk", "cdi", "generate", "--format=json")

Found = Mapping[GpuId, tuple[Gpu, Mapping[str, Made]]]
"""The GPUs, and the MIG devices on each by their names."""
Nodes = tuple[frozenset[str], Mapping[str, int]]
"""The device nodes that exist, and the numbers of MIG's (see `Injection`)."""

log = structlog.get_logger()


@dataclass
class CdiFile:
    """Keeps the file, once names are given that are ours.

    Attributes:
        folder: where it is, as the container runtime finds it too; `None` where none is written.
        look: reads the host's device nodes; blocks.
    """

    registry: Registry
    driver: Driver
    tools: Tools
    folder: Path | None
    look: Callable[[], Nodes]
    _injection: Injection | None = None
    _edits: cdi.Edits = field(default_factory=cdi.Edits)
    _edits_of: str | None = None
    _no_libraries: str = ""
    _listed: dict[GpuId, Mapping[str, Made]] = field(default_factory=dict)
    _seen: Found | None = None
    _names: frozenset[str] = frozenset()
    _text: str = ""
    _problem: str = ""
    _turn: anyio.Lock = field(default_factory=anyio.Lock)

    async def keep(self, injection: Injection) -> None:
        """Have the file right for this way of giving GPUs, from now on; it is when this returns.

        A file that was once written is kept right also when no new names of it are given: who was
        told one may start anew.

        Raises:
            CdiError: if it cannot be written, and names are given; says how to mend.
        """
        if self.folder is None or not (injection.names_here or self._names):
            return

        before, self._injection = self._injection, injection
        await self._ask_toolkit()
        await self._list_devices()
        try:
            await self._write()
        except CdiError:
            if injection.names_here:
                self._injection = before
                raise

    async def describe(self, names: frozenset[str]) -> None:
        """Have these devices in the file when this returns.

        Raises:
            NotNamed: if they cannot be; the text reaches the pod.
        """
        if self._injection is None:
            return
        told = ", ".join(sorted(names))
        try:
            await self._write(anew=False)
            with anyio.move_on_after(NODES_DEADLINE):
                while not names <= self._names and names <= self._known():
                    await self._write()
                    if not names <= self._names:
                        await anyio.sleep(NODES_PAUSE)
        except CdiError as error:
            raise NotNamed(told, str(error)) from error
        if not names <= self._known():
            raise NotNamed(told, "it is gone")
        if not names <= self._names:
            raise NotNamed(told, "not all of its device nodes are on this machine")

    async def run(self) -> None:
        """Follow what there is until cancelled; what goes wrong is told, and tried again."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._look_after)
            async for _ in self.registry.watch(self._found):
                await self._try(anew=False)

    def report(self) -> dict[str, Any] | None:
        """Say what is written, and what of it is missing; `None` where nothing is."""
        if self._injection is None or self.folder is None:
            return None
        return {
            "file": str(self._file),
            "kind": cdi.KIND,
            "devices": len(self._names),
            "problem": self._problem or None,
            "noLibraries": self._no_libraries or None,
        }

    @property
    def _file(self) -> Path:
        return (self.folder or cdi.DEFAULT_DIR) / cdi.FILE_NAME

    async def _look_after(self) -> None:
        """Write the file again if somebody else has changed or removed it."""
        while True:
            await anyio.sleep(LOOK)
            if self._names and await to_thread.run_sync(_read, self._file) != self._text:
                self._text = ""
            if self._problem or not self._text:
                await self._try()

    async def _try(self, *, anew: bool = True) -> None:
        """Write, where there is something to write; tell what goes wrong, once."""
        if self._injection is None:
            return
        before = self._problem
        try:
            await self._write(anew=anew)
        except CdiError as error:
            if str(error) != before:
                log.error("containers may not start", error=str(error))

    def _found(self, now: Snapshot) -> Found:
        """Give what is to be named; of a GPU, what a backend tells counts, not the first look."""
        if self._injection is None:
            return {}
        return {
            gpu: (
                state.gpu,
                {name: it for stock in state.stocks.values() for name, it in stock.named.items()}
                or self._listed.get(gpu, {}),
            )
            for gpu, state in now.gpus.items()
        }

    def _known(self) -> frozenset[str]:
        """Give the names of all that there is, be there nodes or not."""
        found = self._found(self.registry.snapshot)
        return frozenset(found).union(*(devices for _, devices in found.values()))

    async def _list_devices(self) -> None:
        """Read which MIG devices are there, of GPUs of which no backend has told yet.

        Containers of before have their names, and may start anew in this moment.
        """
        for gpu, state in self.registry.snapshot.gpus.items():
            if gpu in self._listed or state.stocks or not state.gpu.mig_enabled:
                continue
            try:
                instances = await self.driver.mig.instances(gpu)
            except DriverError as error:
                log.warning("MIG devices are not named yet", gpu=str(state.gpu), error=str(error))
                continue
            self._listed[gpu] = {
                part.uuid: Made(part.uuid, instance.number, part.number)
                for instance in instances
                for part in instance.computes
                if part.uuid
            }

    async def _ask_toolkit(self) -> None:
        """Ask NVIDIA's toolkit for the driver's libraries and its hooks, once for each driver."""
        driver = self.registry.snapshot.versions.driver
        if self._edits_of == driver:
            return
        root = self._injection.dev_root if self._injection else ""
        asked = [*_ASKED, *([f"--driver-root={root}"] if root else [])]
        try:
            self._edits = cdi.edits_in(await self.tools.run(*asked))
        except (ToolError, ValueError) as error:
            why = str(error) if isinstance(error, ToolError) else f"`{_ASKED[0]}`: {error}"
            if why != self._no_libraries:
                log.warning("containers get no libraries of the driver by CDI", error=why)
            self._no_libraries = why
        else:
            self._edits_of, self._no_libraries = driver, ""

    async def _write(self, *, anew: bool = True) -> None:
        """Write the file, if it is to be another one; look at the nodes `anew`, or for new devices.

        Raises:
            CdiError: if that cannot be done.
        """
        if not anew and self._seen == self._found(self.registry.snapshot):
            return
        async with self._turn:
            now = self.registry.snapshot
            self._listed |= {gpu: {} for gpu, state in now.gpus.items() if state.stocks}
            found = self._found(now)
            if not anew and self._seen == found:
                return  # whom we waited for has done it
            try:
                self._names = await to_thread.run_sync(self._put, found)
            except OSError as error:
                self._problem = (
                    f"{error.filename or self.folder} cannot be written: "
                    f"{error.strerror or error}; run as root, mount the host's folder there, name "
                    "another one with --cdi-dir, or leave CDI out of deviceListStrategy"
                )
                raise CdiError(self._problem) from error
            self._seen, before = found, self._problem
            self._problem = NOTHING if found and not self._names else ""
            if self._problem not in ("", before):
                log.error("containers may not start", error=self._problem)

    def _put(self, found: Found) -> frozenset[str]:
        """Put what was found into the file; give the names in it. Blocks.

        No specification is one without a device, and an old one would name what is not there: a
        container would get a dead node, or whatever has its number by now. So it goes, and runtimes
        say that they know no such device.
        """
        present, capabilities = self.look()
        ours = self._injection or Injection()
        injection = replace(ours, present=present, capabilities=capabilities)

        named = {
            name: nodes
            for gpu, devices in found.values()
            for name, made in ((gpu.id, None), *devices.items())
            if (nodes := injection.nodes_of(gpu, made))
        }
        if not named:
            self._text = ""
            if self._file.exists():
                self._file.unlink()
            return frozenset()
        text = cdi.specification(named, injection.common_nodes(), self._edits)
        if text != self._text:
            _replace(self._file, text)
            self._text = text
        return frozenset(named)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _replace(file: Path, text: str) -> None:
    """Put a text in a file's place at once; readers have the one or the other, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Beside it: CDI's library hears of a file that is moved within its folder, not into it.
    fresh = file.with_name(f".{file.name}.new")
    fresh.write_text(text)
    fresh.chmod(0o644)
    fresh.replace(file)
