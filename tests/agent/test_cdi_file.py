"""The CDI specification in its folder: present before containers need it, and always current."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from metagpu.agent import cdi_file, driver_edits
from metagpu.agent.cdi_file import NO_DEVICE_NODES, CdiFile, CdiTiming
from metagpu.agent.driver_edits import DriverEdits
from metagpu.core.contracts.programs import Programs
from metagpu.core.errors import CdiError, ProgramError, ProgramMissing
from metagpu.core.grants import cdi
from metagpu.core.grants.injection import DeviceListStrategy, Injection
from metagpu.core.model.driver_roots import DriverRoots, Folder
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.request_errors import CdiNameMissing
from metagpu.core.model.shares import HardwareDevice, ProvisionedState
from metagpu.core.model.snapshot import Versions
from metagpu.core.reports.reading import plain_report
from metagpu.core.state.facts import DriverRead, GpusFound, ProvisioningReported
from metagpu.core.state.registry import Registry
from metagpu.host.device_nodes import device_nodes
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from metagpu.testing.node import RecordedPrograms
from tests.core.grants.test_cdi import TOOLKIT
from tests.rigs.cdi import CdiRefusedError, check_spec, host, resolve_nodes
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes, until

BY_CDI = frozenset({DeviceListStrategy.CDI_CRI})
NODE_FILE = "gpus: [{model: a100-40gb, mig: true, instances: [2g.10gb@4]}, {model: a100-40gb}]\n"


class Toolkit:
    """A host with NVIDIA's toolkit, which prints its specification."""

    async def run(self, *command: str) -> str:
        """Print it."""
        assert command[:4] == ("nvidia-ctk", "cdi", "generate", "--format=json")
        assert command[4:] == ("--nvidia-ctk-path=/usr/bin/nvidia-cdi-hook",)
        return f"time=now level=info\n{json.dumps(TOOLKIT)}\n"


class CdiFileRig:
    """The file under test, with its host, driver and backends."""

    def __init__(self, file: CdiFile, folder: Path, gpus: tuple[Gpu, ...]) -> None:
        self.file, self.folder, self.gpus = file, folder, gpus

    @property
    def _file(self) -> Path:
        return self.folder / cdi.FILE_NAME

    @property
    def names(self) -> list[str]:
        """Return the devices that are in the file."""
        spec = check_spec(self._file.read_text())
        return [device["name"] for device in spec["devices"]]

    @property
    def spec(self) -> dict[str, Any]:
        """Return what is in the file."""
        return check_spec(self._file.read_text())

    def set_devices(self, **named: HardwareDevice) -> None:
        """Set the devices that the first GPU's backend reports."""
        provisioned_state = ProvisionedState(
            named_devices={name.replace("_", "-"): device for name, device in named.items()},
            exclusive=True,
        )
        self.file.registry.apply(
            ProvisioningReported(self.gpus[0].id, "mig", provisioned_state, at=1)
        )

    async def until_named(self, *names: str) -> None:
        """Wait until the file has exactly these devices beside the GPUs."""
        wanted = sorted([*(gpu.id for gpu in self.gpus), *names])
        with anyio.fail_after(30):
            while not self._file.exists() or sorted(self.names) != wanted:  # noqa: ASYNC110 - a file has no event
                await anyio.sleep(0.01)


@asynccontextmanager
async def run_file(
    root: Path, tools: Programs | None = None, timing: CdiTiming | None = None
) -> AsyncIterator[CdiFileRig]:
    """Serve two GPUs, one of them with a MIG instance from before the daemon."""
    host(root, gpus=2)
    file = root / "node.yaml"
    file.write_text(NODE_FILE)
    driver, registry = NvmlDriver(SimLibrary(build_node(str(file)))), Registry()
    folder = root / "var/run/cdi"

    async with driver.session():
        gpus = (await driver.survey()).gpus
        registry.apply(GpusFound(gpus, at=0))
        edits = DriverEdits(tools or RecordedPrograms(), DriverRoots, "/usr/bin/nvidia-cdi-hook")
        cdi_specification = CdiFile(
            registry,
            driver,
            edits,
            folder,
            lambda: device_nodes(Folder(str(root), str(root))),
            timing or CdiTiming(),
        )
        yield CdiFileRig(cdi_specification, folder, gpus)


def problems_of(file: CdiFile, what: str) -> object:
    """Return the problems that the file reports."""
    report = file.report()
    assert report is not None
    return plain_report(report)[what]


def injection(root: Path, **changes: object) -> Injection:
    """Return the settings that give GPUs by CDI."""
    return Injection(**{"strategies": BY_CDI, "dev_root": str(root), **changes})  # type: ignore[arg-type]


async def test_gpus_and_instances_are_named_by_uuid(tmp_path: Path) -> None:
    """At the start the file names every GPU and every MIG device, each with its own nodes."""
    async with run_file(tmp_path) as rig:
        await rig.file.update(injection(tmp_path))

        first, second, device = rig.names[0], rig.names[2], rig.names[1]
        assert [first, second] == [gpu.id for gpu in rig.gpus]
        assert device.startswith("MIG-")
        driver = [f"{tmp_path}/dev/nvidiactl", f"{tmp_path}/dev/nvidia-uvm"]
        assert resolve_nodes(rig.folder, second) == [*driver, f"{tmp_path}/dev/nvidia1"]
        nodes = resolve_nodes(rig.folder, device)
        assert nodes[:3] == [*driver, f"{tmp_path}/dev/nvidia0"]
        # GPU instance 5, by its place: nine numbers for each before it, and the first is 3.
        assert [Path(node).name for node in nodes[3:]] == ["nvidia-cap48", "nvidia-cap49"]


async def test_a_name_is_there_when_it_was_asked_for(tmp_path: Path) -> None:
    """The file has, once `describe` returns, the new instance and no longer the removed one."""
    async with run_file(tmp_path) as rig:
        await rig.file.update(injection(tmp_path))
        rig.set_devices(MIG_a=HardwareDevice("MIG-a", 5, 0))
        await rig.file.ensure_names(frozenset({"MIG-a"}))
        assert len(resolve_nodes(rig.folder, "MIG-a")) == 5

        rig.set_devices(MIG_b=HardwareDevice("MIG-b", 6, 0))
        with pytest.raises(CdiNameMissing, match="CDI has no MIG-a: it is gone"):
            await rig.file.ensure_names(frozenset({"MIG-a"}))
        with pytest.raises(CdiRefusedError):
            resolve_nodes(rig.folder, "MIG-a")


async def test_a_name_follows_the_instance_of_its_placement(tmp_path: Path) -> None:
    """The name of a placement stands for the nodes of the instance that is there now."""
    async with run_file(tmp_path) as rig:
        await rig.file.update(injection(tmp_path))
        rig.set_devices(place=HardwareDevice("MIG-a", 5, 0))
        await rig.file.ensure_names(frozenset({"place"}))
        before = resolve_nodes(rig.folder, "place")
        rig.set_devices(place=HardwareDevice("MIG-b", 6, 0))
        await rig.file.ensure_names(frozenset({"place"}))

        assert resolve_nodes(rig.folder, "place") != before


async def test_the_file_follows_the_devices(tmp_path: Path) -> None:
    """Without any request the file names devices that come and drops devices that go."""
    async with run_file(tmp_path) as rig, anyio.create_task_group() as group:
        await rig.file.update(injection(tmp_path))
        group.start_soon(rig.file.run)
        rig.set_devices(MIG_a=HardwareDevice("MIG-a", 5, 0), MIG_b=HardwareDevice("MIG-b", 6, 0))
        await rig.until_named("MIG-a", "MIG-b")
        rig.set_devices(MIG_b=HardwareDevice("MIG-b", 6, 0))
        await rig.until_named("MIG-b")
        group.cancel_scope.cancel()


async def test_a_file_that_another_program_removes_comes_back(tmp_path: Path) -> None:
    """The file is checked periodically, and written only when it has changed."""
    async with (
        run_file(tmp_path, timing=CdiTiming(check=0.01)) as rig,
        anyio.create_task_group() as group,
    ):
        await rig.file.update(injection(tmp_path))
        group.start_soon(rig.file.run)
        rig.set_devices(MIG_a=HardwareDevice("MIG-a", 5, 0))
        await rig.until_named("MIG-a")
        (rig.folder / cdi.FILE_NAME).unlink()
        await rig.until_named("MIG-a")
        group.cancel_scope.cancel()


async def test_nothing_is_left_beside_the_file(tmp_path: Path) -> None:
    """The file is put in place by one rename, in its own folder, readable by every user."""
    async with run_file(tmp_path) as rig:
        await rig.file.update(injection(tmp_path))

        assert [file.name for file in rig.folder.iterdir()] == [cdi.FILE_NAME]
        assert (rig.folder / cdi.FILE_NAME).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "changes",
    [
        {"strategies": frozenset({DeviceListStrategy.ENVVAR})},
        {"cdi_kind": "nvidia.com/gpu"},
    ],
)
async def test_no_file_is_written_without_names_of_ours(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    """Without CDI names, or with another program's kind, the daemon writes no file."""
    tools = RecordedPrograms()
    async with run_file(tmp_path, tools) as rig:
        await rig.file.update(injection(tmp_path, **changes))
        await rig.file.ensure_names(frozenset({"GPU-x"}))

        assert not rig.folder.exists()
        assert tools.calls == []
        assert rig.file.report() is None


async def test_names_that_were_given_outlive_the_strategy(tmp_path: Path) -> None:
    """A written file stays current after CDI is switched off, as containers restart."""
    async with run_file(tmp_path) as rig:
        await rig.file.update(injection(tmp_path))
        await rig.file.update(
            injection(tmp_path, strategies=frozenset({DeviceListStrategy.ENVVAR}))
        )
        rig.set_devices(MIG_a=HardwareDevice("MIG-a", 5, 0))
        await rig.file.ensure_names(frozenset({"MIG-a"}))

        assert "MIG-a" in rig.names


async def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    """One error names the path, the reason and the fix, for the status and for `describe`."""
    async with run_file(tmp_path) as rig:
        rig.folder.parent.mkdir(parents=True)
        rig.folder.write_text("")
        sentence = (
            f"{rig.folder} cannot be written: File exists; run as root, mount the host's folder "
            "there, name another one with --cdi-dir, or leave CDI out of deviceListStrategy"
        )
        with pytest.raises(CdiError) as raised:
            await rig.file.update(injection(tmp_path))
        assert str(raised.value) == sentence
        assert rig.file.report() is None  # it is not in use

        rig.folder.unlink()
        await rig.file.update(injection(tmp_path))
        for file in rig.folder.iterdir():
            file.unlink()
        rig.folder.rmdir()
        rig.folder.write_text("")
        rig.set_devices(MIG_a=HardwareDevice("MIG-a", 5, 0))
        with pytest.raises(
            CdiNameMissing, match=r"CDI has no MIG-a: .* cannot be written: File exists"
        ):
            await rig.file.ensure_names(frozenset({"MIG-a"}))
        report = rig.file.report()
        assert report is not None
        assert report.problem == sentence


async def test_the_toolkit_lists_the_libraries(tmp_path: Path) -> None:
    """The file has the toolkit's mounts and hooks, which are asked for once for each driver."""
    async with run_file(tmp_path, Toolkit()) as rig:
        await rig.file.update(injection(tmp_path))
        spec = check_spec((rig.folder / cdi.FILE_NAME).read_text())

        assert spec["containerEdits"]["mounts"] == TOOLKIT["containerEdits"]["mounts"]
        report = rig.file.report()
        assert report is not None
        assert report.no_libraries is None


@pytest.mark.parametrize(
    ("refusal", "why"),
    [
        (
            ProgramMissing("there is no nvidia-ctk here; looked in PATH"),
            "there is no nvidia-ctk here",
        ),
        (ProgramError("`nvidia-ctk` failed with status 1: no"), "failed with status 1: no"),
        (None, "`nvidia-ctk`: it printed no CDI specification"),
    ],
)
async def test_an_absent_toolkit_is_reported_once(
    tmp_path: Path, refusal: ProgramError | None, why: str
) -> None:
    """Without the toolkit the nodes are named; log and status report the missing libraries once."""
    tools = RecordedPrograms(refusal=refusal)
    async with run_file(tmp_path, tools) as rig:
        with capture_module_logs(driver_edits) as log:
            await rig.file.update(injection(tmp_path))
            await rig.file.update(injection(tmp_path))

        assert resolve_nodes(rig.folder, rig.gpus[1].id)
        event = "cdi edits of the driver unavailable"
        assert len([line for line in log if line["event"] == event]) == 1
        report = rig.file.report()
        assert report is not None
        assert why in (report.no_libraries or "")
        assert len(tools.calls) == 2  # it may have been installed meanwhile


class LateToolkit(Toolkit):
    """A host whose toolkit answers in some of its runs."""

    def __init__(self, *answers: bool) -> None:
        self.answers = [*answers]

    async def run(self, *command: str) -> str:
        """Print the specification, or fail; the last answer repeats."""
        if self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]:
            return await super().run(*command)
        raise ProgramError("`nvidia-ctk` did not end within 30 s")


async def test_a_toolkit_that_answers_later_is_asked_again(tmp_path: Path) -> None:
    """Without any change of the node the file gets the libraries; the log has one failure."""
    tools = LateToolkit(False, False, True)  # noqa: FBT003 - three runs
    async with (
        run_file(tmp_path, tools, CdiTiming(check=0.01)) as rig,
        anyio.create_task_group() as group,
    ):
        with capture_module_logs(driver_edits) as log:
            await rig.file.update(injection(tmp_path))
            assert "containerEdits" in rig.spec
            assert "mounts" not in rig.spec["containerEdits"]
            group.start_soon(rig.file.run)

            async def mounted() -> bool:
                return "mounts" in rig.spec["containerEdits"]

            await until(mounted)
        assert len(log) == 1
        assert problems_of(rig.file, "noLibraries") is None
        group.cancel_scope.cancel()


async def test_a_failing_toolkit_leaves_no_libraries_of_another_driver(tmp_path: Path) -> None:
    """The file loses the old driver's libraries when those of the new one cannot be read."""
    async with run_file(tmp_path, LateToolkit(True, False, True)) as rig:  # noqa: FBT003 - three runs
        for version, known in (("570.1", True), ("580.2", False), ("570.1", True)):
            rig.file.registry.apply(DriverRead(Versions(version)))
            await rig.file.update(injection(tmp_path))
            assert ("mounts" in rig.spec["containerEdits"]) == known
            assert (problems_of(rig.file, "noLibraries") is None) == known


async def test_another_driver_has_other_libraries(tmp_path: Path) -> None:
    """The toolkit is asked again when the driver changes, and not before."""
    calls: list[str] = []

    class Counting(Toolkit):
        async def run(self, *command: str) -> str:
            calls.append(command[0])
            return await super().run(*command)

    async with run_file(tmp_path, Counting()) as rig:
        for version in ("570.1", "570.1", "580.2"):
            rig.file.registry.apply(DriverRead(Versions(version)))
            await rig.file.update(injection(tmp_path))
        assert len(calls) == 2


async def test_a_gpu_without_a_node_is_not_named(tmp_path: Path) -> None:
    """A GPU without a device node is left out of the file, and the other GPUs stay."""
    async with run_file(tmp_path, timing=CdiTiming(node_deadline=0.1)) as rig:
        (tmp_path / "dev/nvidia1").unlink()
        await rig.file.update(injection(tmp_path))

        assert rig.gpus[1].id not in rig.names
        with pytest.raises(CdiNameMissing, match="not all of its device nodes are"):
            await rig.file.ensure_names(frozenset({rig.gpus[1].id}))


async def test_a_mig_device_without_capability_nodes_is_not_named(tmp_path: Path) -> None:
    """Without the driver's list of minor numbers a MIG device has no name."""
    async with run_file(tmp_path, timing=CdiTiming(node_deadline=0.1)) as rig:
        (tmp_path / "proc/driver/nvidia-caps/mig-minors").write_text("config 1\nmonitor 2\n")
        await rig.file.update(injection(tmp_path))
        assert rig.names == [gpu.id for gpu in rig.gpus]

        rig.set_devices(MIG_a=HardwareDevice("MIG-a", 5, 0))
        with pytest.raises(CdiNameMissing, match="not all of its device nodes are on this machine"):
            await rig.file.ensure_names(frozenset({"MIG-a"}))


async def test_nodes_that_come_a_moment_later_are_waited_for(tmp_path: Path) -> None:
    """An instance has no name until the driver has created its nodes."""
    async with (
        run_file(tmp_path, timing=CdiTiming(node_deadline=60.0)) as rig,
        anyio.create_task_group() as group,
    ):
        await rig.file.update(injection(tmp_path))
        node = tmp_path / "dev/nvidia-caps/nvidia-cap49"
        node.unlink()
        rig.set_devices(MIG_a=HardwareDevice("MIG-a", 5, 0))
        group.start_soon(rig.file.ensure_names, frozenset({"MIG-a"}))
        await anyio.wait_all_tasks_blocked()
        assert "MIG-a" not in rig.names
        node.touch()

    assert len(resolve_nodes(rig.folder, "MIG-a")) == 5


async def test_no_device_is_no_file(tmp_path: Path) -> None:
    """Without devices no file is written, as runtimes refuse an empty specification."""
    async with run_file(tmp_path) as rig:
        for number in range(2):
            (tmp_path / f"dev/nvidia{number}").unlink()
        for node in (tmp_path / "dev/nvidia-caps").iterdir():
            node.unlink()
        await rig.file.update(injection(tmp_path))

        assert not rig.folder.exists()


async def test_a_file_of_dead_devices_is_removed(tmp_path: Path) -> None:
    """Without nodes the file is removed, with one log event, and returns with the nodes."""
    async with (
        run_file(tmp_path, timing=CdiTiming(check=0.01, node_deadline=0.1)) as rig,
        anyio.create_task_group() as group,
    ):
        await rig.file.update(injection(tmp_path))
        nodes = [tmp_path / f"dev/nvidia{number}" for number in range(2)]
        for node in nodes:
            node.unlink()
        with capture_module_logs(cdi_file) as lines:
            await rig.file.update(injection(tmp_path))
            await rig.file.update(injection(tmp_path))
        assert [line["error"] for line in lines] == [NO_DEVICE_NODES]
        assert list(rig.folder.iterdir()) == []
        assert problems_of(rig.file, "devices") == 0
        assert problems_of(rig.file, "problem") == NO_DEVICE_NODES
        with pytest.raises(CdiNameMissing, match="not all of its device nodes are on this machine"):
            await rig.file.ensure_names(frozenset({rig.gpus[0].id}))

        group.start_soon(rig.file.run)
        for node in nodes:
            node.touch()
        rig.set_devices(MIG_a=HardwareDevice("MIG-a", 5, 0))
        await rig.until_named("MIG-a")
        await becomes(lambda: problems_of(rig.file, "problem") is None)
        group.cancel_scope.cancel()


async def test_a_file_of_before_goes_where_there_is_no_gpu(tmp_path: Path) -> None:
    """On a node without GPUs an earlier daemon's file is removed, and no problem is reported."""
    async with run_file(tmp_path) as rig:
        await rig.file.update(injection(tmp_path))
        look = rig.file.read_nodes
        none = CdiFile(Registry(), rig.file.driver, rig.file.driver_edits, rig.folder, look)
        await none.update(injection(tmp_path))

        assert list(rig.folder.iterdir()) == []
        assert problems_of(none, "problem") is None
