"""The CDI specification in its folder: there before it is needed, and right whatever changes."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from metagpu.core import cdi
from metagpu.core.errors import CdiError, NotNamed, ToolError, ToolMissing
from metagpu.core.facts import DriverRead, GpusFound, StockTold
from metagpu.core.gpu import Gpu
from metagpu.core.injection import DeviceListStrategy, Injection
from metagpu.core.model import Made, Stock
from metagpu.core.registry import Registry
from metagpu.core.snapshot import Versions
from metagpu.core.tools import Tools
from metagpu.host import device_nodes
from metagpu.nvml import Nvml
from metagpu.plugins import cdi_file
from metagpu.plugins.cdi_file import CdiFile
from metagpu.sim.library import Library
from metagpu.sim.spec import simulated
from tests.cdi_rig import CdiRefusedError, checked, host, resolved
from tests.core.test_cdi import TOOLKIT
from tests.heard import heard
from tests.recorded_tools import RecordedTools

BY_CDI = frozenset({DeviceListStrategy.CDI_CRI})
NODE_FILE = "gpus: [{board: a100-40gb, mig: true, instances: [2g.10gb@4]}, {board: a100-40gb}]\n"


class Toolkit:
    """A host with NVIDIA's toolkit, which prints its specification."""

    async def run(self, *command: str) -> str:
        """Print it."""
        assert command[:4] == ("nvidia-ctk", "cdi", "generate", "--format=json")
        assert command[4].startswith("--driver-root=/")
        return f"time=now level=info\n{json.dumps(TOOLKIT)}\n"


class Kept:
    """A file under test, and what is around it."""

    def __init__(self, file: CdiFile, folder: Path, gpus: tuple[Gpu, ...]) -> None:
        self.file, self.folder, self.gpus = file, folder, gpus

    @property
    def _file(self) -> Path:
        return self.folder / cdi.FILE_NAME

    @property
    def names(self) -> list[str]:
        """The devices that are in the file."""
        spec = checked(self._file.read_text())
        return [device["name"] for device in spec["devices"]]

    def tell(self, **named: Made) -> None:
        """Let the first GPU's backend tell which devices there are."""
        stock = Stock(named={name.replace("_", "-"): it for name, it in named.items()}, alone=True)
        self.file.registry.apply(StockTold(self.gpus[0].id, "mig", stock, at=1))

    async def until_named(self, *names: str) -> None:
        """Wait until exactly these are in the file, beside the GPUs."""
        wanted = sorted([*(gpu.id for gpu in self.gpus), *names])
        with anyio.fail_after(30):
            while not self._file.exists() or sorted(self.names) != wanted:  # noqa: ASYNC110 - a file tells nobody
                await anyio.sleep(0.01)


@asynccontextmanager
async def kept(root: Path, tools: Tools | None = None) -> AsyncIterator[Kept]:
    """Have two GPUs, one of them with a MIG instance that was there before us."""
    host(root, gpus=2)
    file = root / "node.yaml"
    file.write_text(NODE_FILE)
    driver, registry = Nvml(Library(simulated(str(file)))), Registry()
    folder = root / "var/run/cdi"

    async with driver.session():
        gpus = (await driver.survey()).gpus
        registry.apply(GpusFound(gpus, at=0))
        known = tools or RecordedTools()
        made = CdiFile(registry, driver, known, folder, lambda: device_nodes(root))
        yield Kept(made, folder, gpus)


def told(file: CdiFile, what: str) -> object:
    """Give what is reported of a file that is kept."""
    report = file.report()
    assert report is not None
    return report[what]


def injection(root: Path, **changes: object) -> Injection:
    """Give GPUs by CDI."""
    return Injection(**{"strategies": BY_CDI, "dev_root": str(root), **changes})  # type: ignore[arg-type]


async def test_gpus_and_instances_are_named_by_uuid(tmp_path: Path) -> None:
    """At the start every GPU is named, and every MIG device there is, each with its own nodes."""
    async with kept(tmp_path) as it:
        await it.file.keep(injection(tmp_path))

        first, second, device = it.names[0], it.names[2], it.names[1]
        assert [first, second] == [gpu.id for gpu in it.gpus]
        assert device.startswith("MIG-")
        driver = [f"{tmp_path}/dev/nvidiactl", f"{tmp_path}/dev/nvidia-uvm"]
        assert resolved(it.folder, second) == [*driver, f"{tmp_path}/dev/nvidia1"]
        nodes = resolved(it.folder, device)
        assert nodes[:3] == [*driver, f"{tmp_path}/dev/nvidia0"]
        # GPU instance 5, by its place: nine numbers for each before it, and the first is 3.
        assert [Path(node).name for node in nodes[3:]] == ["nvidia-cap48", "nvidia-cap49"]


async def test_a_name_is_there_when_it_was_asked_for(tmp_path: Path) -> None:
    """What was made a moment ago is in the file when `describe` returns; what is gone is not."""
    async with kept(tmp_path) as it:
        await it.file.keep(injection(tmp_path))
        it.tell(MIG_a=Made("MIG-a", 5, 0))
        await it.file.describe(frozenset({"MIG-a"}))
        assert len(resolved(it.folder, "MIG-a")) == 5

        it.tell(MIG_b=Made("MIG-b", 6, 0))
        with pytest.raises(NotNamed, match="CDI has no MIG-a: it is gone"):
            await it.file.describe(frozenset({"MIG-a"}))
        with pytest.raises(CdiRefusedError):
            resolved(it.folder, "MIG-a")


async def test_a_name_follows_what_stands_for_it(tmp_path: Path) -> None:
    """A place that has another instance than before stands for that one's nodes."""
    async with kept(tmp_path) as it:
        await it.file.keep(injection(tmp_path))
        it.tell(place=Made("MIG-a", 5, 0))
        await it.file.describe(frozenset({"place"}))
        before = resolved(it.folder, "place")
        it.tell(place=Made("MIG-b", 6, 0))
        await it.file.describe(frozenset({"place"}))

        assert resolved(it.folder, "place") != before


async def test_the_file_follows_what_there_is(tmp_path: Path) -> None:
    """Without anybody asking, devices that come are named, and those that go are not."""
    async with kept(tmp_path) as it, anyio.create_task_group() as group:
        await it.file.keep(injection(tmp_path))
        group.start_soon(it.file.run)
        it.tell(MIG_a=Made("MIG-a", 5, 0), MIG_b=Made("MIG-b", 6, 0))
        await it.until_named("MIG-a", "MIG-b")
        it.tell(MIG_b=Made("MIG-b", 6, 0))
        await it.until_named("MIG-b")
        group.cancel_scope.cancel()


async def test_a_file_that_somebody_removes_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked after from time to time, and only written if it is not as it was left."""
    monkeypatch.setattr(cdi_file, "LOOK", 0.01)
    async with kept(tmp_path) as it, anyio.create_task_group() as group:
        await it.file.keep(injection(tmp_path))
        group.start_soon(it.file.run)
        it.tell(MIG_a=Made("MIG-a", 5, 0))
        await it.until_named("MIG-a")
        (it.folder / cdi.FILE_NAME).unlink()
        await it.until_named("MIG-a")
        group.cancel_scope.cancel()


async def test_nothing_is_left_beside_the_file(tmp_path: Path) -> None:
    """It is put in its place in one piece, in its own folder, for everybody to read."""
    async with kept(tmp_path) as it:
        await it.file.keep(injection(tmp_path))

        assert [file.name for file in it.folder.iterdir()] == [cdi.FILE_NAME]
        assert (it.folder / cdi.FILE_NAME).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "changes",
    [
        {"strategies": frozenset({DeviceListStrategy.ENVVAR})},
        {"cdi_kind": "nvidia.com/gpu"},
    ],
)
async def test_nothing_is_written_for_nobody(tmp_path: Path, changes: dict[str, object]) -> None:
    """Where no names are given, or those of somebody else's file, there is no file of ours."""
    tools = RecordedTools()
    async with kept(tmp_path, tools) as it:
        await it.file.keep(injection(tmp_path, **changes))
        await it.file.describe(frozenset({"GPU-x"}))

        assert not it.folder.exists()
        assert tools.calls == []
        assert it.file.report() is None


async def test_names_that_were_given_outlive_the_strategy(tmp_path: Path) -> None:
    """A file that was written is kept right when CDI is switched off: containers start anew."""
    async with kept(tmp_path) as it:
        await it.file.keep(injection(tmp_path))
        await it.file.keep(injection(tmp_path, strategies=frozenset({DeviceListStrategy.ENVVAR})))
        it.tell(MIG_a=Made("MIG-a", 5, 0))
        await it.file.describe(frozenset({"MIG-a"}))

        assert "MIG-a" in it.names


async def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """One sentence says what cannot be written, why, and what to do; so does who asks for names."""
    async with kept(tmp_path) as it:
        it.folder.parent.mkdir(parents=True)
        it.folder.write_text("")
        sentence = (
            f"{it.folder} cannot be written: File exists; run as root, mount the host's folder "
            "there, name another one with --cdi-dir, or leave CDI out of deviceListStrategy"
        )
        with pytest.raises(CdiError) as told:
            await it.file.keep(injection(tmp_path))
        assert str(told.value) == sentence
        assert it.file.report() is None  # it is not in use

        it.folder.unlink()
        await it.file.keep(injection(tmp_path))
        for file in it.folder.iterdir():
            file.unlink()
        it.folder.rmdir()
        it.folder.write_text("")
        it.tell(MIG_a=Made("MIG-a", 5, 0))
        with pytest.raises(NotNamed, match=r"CDI has no MIG-a: .* cannot be written: File exists"):
            await it.file.describe(frozenset({"MIG-a"}))
        report = it.file.report()
        assert report is not None
        assert report["problem"] == sentence


async def test_the_toolkit_says_the_libraries(tmp_path: Path) -> None:
    """Where NVIDIA's toolkit is, its mounts and hooks are in the file; asked once for a driver."""
    async with kept(tmp_path, Toolkit()) as it:
        await it.file.keep(injection(tmp_path))
        spec = checked((it.folder / cdi.FILE_NAME).read_text())

        assert spec["containerEdits"]["mounts"] == TOOLKIT["containerEdits"]["mounts"]
        report = it.file.report()
        assert report is not None
        assert report["noLibraries"] is None


@pytest.mark.parametrize(
    ("refusal", "why"),
    [
        (ToolMissing("there is no nvidia-ctk here; looked in PATH"), "there is no nvidia-ctk here"),
        (ToolError("`nvidia-ctk` failed with status 1: no"), "failed with status 1: no"),
        (None, "`nvidia-ctk`: it printed no CDI specification"),
    ],
)
async def test_its_absence_is_said_once(
    tmp_path: Path, refusal: ToolError | None, why: str
) -> None:
    """Without the toolkit the nodes are named all the same; log and status say what is missing."""
    tools = RecordedTools(refusal=refusal)
    async with kept(tmp_path, tools) as it:
        with heard(cdi_file) as log:
            await it.file.keep(injection(tmp_path))
            await it.file.keep(injection(tmp_path))

        assert resolved(it.folder, it.gpus[1].id)
        said = "containers get no libraries of the driver by CDI"
        assert len([line for line in log if line["event"] == said]) == 1
        report = it.file.report()
        assert report is not None
        assert why in report["noLibraries"]
        assert len(tools.calls) == 2  # it may have been installed meanwhile


async def test_another_driver_has_other_libraries(tmp_path: Path) -> None:
    """The toolkit is asked again when the driver is another one, and not before."""
    calls: list[str] = []

    class Counting(Toolkit):
        async def run(self, *command: str) -> str:
            calls.append(command[0])
            return await super().run(*command)

    async with kept(tmp_path, Counting()) as it:
        for version in ("570.1", "570.1", "580.2"):
            it.file.registry.apply(DriverRead(Versions(version)))
            await it.file.keep(injection(tmp_path))
        assert len(calls) == 2


async def test_a_gpu_without_a_node_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CDI has no device without a node: such a GPU is left out, and the others stay."""
    monkeypatch.setattr(cdi_file, "NODES_DEADLINE", 0.1)
    async with kept(tmp_path) as it:
        (tmp_path / "dev/nvidia1").unlink()
        await it.file.keep(injection(tmp_path))

        assert it.gpus[1].id not in it.names
        with pytest.raises(NotNamed, match="not all of its device nodes are"):
            await it.file.describe(frozenset({it.gpus[1].id}))


async def test_a_mig_device_that_nothing_opens_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPU's node alone is no use: without the driver's list of numbers it has no name."""
    monkeypatch.setattr(cdi_file, "NODES_DEADLINE", 0.1)
    async with kept(tmp_path) as it:
        (tmp_path / "proc/driver/nvidia-caps/mig-minors").write_text("config 1\nmonitor 2\n")
        await it.file.keep(injection(tmp_path))
        assert it.names == [gpu.id for gpu in it.gpus]

        it.tell(MIG_a=Made("MIG-a", 5, 0))
        with pytest.raises(NotNamed, match="not all of its device nodes are on this machine"):
            await it.file.describe(frozenset({"MIG-a"}))


async def test_nodes_that_come_a_moment_later_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver makes the nodes of an instance after it; until then it has no name."""
    monkeypatch.setattr(cdi_file, "NODES_DEADLINE", 60.0)
    async with kept(tmp_path) as it, anyio.create_task_group() as group:
        await it.file.keep(injection(tmp_path))
        node = tmp_path / "dev/nvidia-caps/nvidia-cap49"
        node.unlink()
        it.tell(MIG_a=Made("MIG-a", 5, 0))
        group.start_soon(it.file.describe, frozenset({"MIG-a"}))
        await anyio.wait_all_tasks_blocked()
        assert "MIG-a" not in it.names
        node.touch()

    assert len(resolved(it.folder, "MIG-a")) == 5


async def test_no_device_is_no_file(tmp_path: Path) -> None:
    """Runtimes refuse a specification of nothing, so none is written."""
    async with kept(tmp_path) as it:
        for number in range(2):
            (tmp_path / f"dev/nvidia{number}").unlink()
        for node in (tmp_path / "dev/nvidia-caps").iterdir():
            node.unlink()
        await it.file.keep(injection(tmp_path))

        assert not it.folder.exists()


async def test_a_file_of_dead_devices_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no node is left the file goes, that is said once, and it is back with the nodes."""
    monkeypatch.setattr(cdi_file, "LOOK", 0.01)
    monkeypatch.setattr(cdi_file, "NODES_DEADLINE", 0.1)
    async with kept(tmp_path) as it, anyio.create_task_group() as group:
        await it.file.keep(injection(tmp_path))
        nodes = [tmp_path / f"dev/nvidia{number}" for number in range(2)]
        for node in nodes:
            node.unlink()
        with heard(cdi_file) as lines:
            await it.file.keep(injection(tmp_path))
            await it.file.keep(injection(tmp_path))
        assert [line["error"] for line in lines] == [cdi_file.NOTHING]
        assert list(it.folder.iterdir()) == []
        assert told(it.file, "devices") == 0
        assert told(it.file, "problem") == cdi_file.NOTHING
        with pytest.raises(NotNamed, match="not all of its device nodes are on this machine"):
            await it.file.describe(frozenset({it.gpus[0].id}))

        group.start_soon(it.file.run)
        for node in nodes:
            node.touch()
        it.tell(MIG_a=Made("MIG-a", 5, 0))
        await it.until_named("MIG-a")
        assert told(it.file, "problem") is None
        group.cancel_scope.cancel()


async def test_a_file_of_before_goes_where_there_is_no_gpu(tmp_path: Path) -> None:
    """What a daemon of before named is not there any more; that nothing is named is no problem."""
    async with kept(tmp_path) as it:
        await it.file.keep(injection(tmp_path))
        look = it.file.look
        none = CdiFile(Registry(), it.file.driver, RecordedTools(), it.folder, look)
        await none.keep(injection(tmp_path))

        assert list(it.folder.iterdir()) == []
        assert told(none, "problem") is None
