"""The file of faults and cordons: what is read, and what is ignored."""

import os
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from metagpu.agent import fault_note_file
from metagpu.agent.fault_note_file import FaultNoteFile
from metagpu.core.health.verdicts import SIZE_LIMIT, FaultNote, NotedFault, encode
from metagpu.core.health.watch import HealthWatch
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Fault
from metagpu.core.state.registry import Registry
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes

NOTE = FaultNote((NotedFault(GpuId("GPU-x"), "XID 95", 7, Fault.XID, needs_proof=True),))


def note_file(folder: Path) -> FaultNoteFile:
    """Return the file of a watch on a simulated GPU, in the boot `boot`."""
    registry = Registry()
    watch = HealthWatch(NvmlDriver(SimLibrary(build_node("t4:1"))), registry)
    return FaultNoteFile(folder, registry, watch, lambda: "boot\n")


async def test_a_note_of_an_absent_gpu_stays(tmp_path: Path) -> None:
    """The entries of a GPU that NVML does not list are written again; only root reads them."""
    file = note_file(tmp_path)
    await to_thread.run_sync(file._write, NOTE)
    await file.load()
    async with file.health.driver.session():
        await file.health.survey()
    assert file.health.note == NOTE
    assert (await anyio.Path(file.path).stat()).st_mode & 0o777 == 0o600
    assert [path.name async for path in anyio.Path(tmp_path).iterdir()] == ["faults.json"]


async def proof_is_noted(file: FaultNoteFile) -> bool:
    """Return whether the file says that a GPU needs proof."""
    path = anyio.Path(file.path)
    return await path.exists() and b'"needs_proof":true' in await path.read_bytes()


async def test_a_fatal_xid_of_a_gpu_that_is_out_already_is_noted(tmp_path: Path) -> None:
    """A fault that needs proof is written also where the GPU's first reason and time stay."""
    file = note_file(tmp_path)
    async with file.health.driver.session():
        await file.health.survey()
        [gpu] = file.registry.snapshot.gpus
        file.health.verdicts.fault(gpu, "it does not answer", Fault.NO_ANSWER)
        file.health.surveyed.set()
        async with anyio.create_task_group() as group:
            group.start_soon(file.follow)
            await anyio.wait_all_tasks_blocked()
            file.health.verdicts.fault(gpu, "XID 79: gone", Fault.XID, proof=True)
            with anyio.fail_after(30):
                while not await proof_is_noted(file):
                    await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()


async def test_a_note_that_could_not_be_written_is_written_soon(tmp_path: Path) -> None:
    """A full disk, or no free descriptor, costs no fault or cordon once it has passed."""
    file = note_file(tmp_path / "later")
    file.retry_delay = 0.01
    async with file.health.driver.session():
        await file.health.survey()
        [gpu] = file.registry.snapshot.gpus
        file.health.surveyed.set()
        with capture_module_logs(fault_note_file) as entries:
            async with anyio.create_task_group() as group:
                group.start_soon(file.follow)
                file.health.verdicts.fault(gpu, "XID 79: gone", Fault.XID, proof=True)
                await becomes(lambda: bool(entries))
                file.folder.mkdir()
                await becomes(lambda: file.path.exists() and b"XID 79" in file.path.read_bytes())
                group.cancel_scope.cancel()
    assert [entry["event"] for entry in entries] == ["note of faults not written"]


async def test_the_next_daemon_restores_what_the_file_says(tmp_path: Path) -> None:
    """The file follows the faults, and a GPU is never seen healthy by the next daemon."""
    file = note_file(tmp_path)
    file.health.noted = NOTE
    async with file.health.driver.session():
        await file.health.survey()
        [gpu] = file.registry.snapshot.gpus
        file.health.verdicts.fault(gpu, "XID 79: gone", Fault.XID, proof=True)
        file.health.surveyed.set()
        async with anyio.create_task_group() as group:
            group.start_soon(file.follow)
            with anyio.fail_after(30):
                while not file.path.exists():
                    await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()

    later = note_file(tmp_path)
    await later.load()
    async with later.health.driver.session():
        await later.health.survey()
    assert later.registry.snapshot.gpus[gpu].verdict == file.registry.snapshot.gpus[gpu].verdict
    assert later.health.verdicts.recovering[gpu].needs_proof
    assert later.health.note == file.health.note


def linked(path: Path) -> None:
    """Put a link to a good note at a path."""
    (path.parent / "other").write_bytes(encode(NOTE, "boot"))
    path.symlink_to(path.parent / "other")


def writable(path: Path) -> None:
    """Put a good note there that anybody may write."""
    path.write_bytes(encode(NOTE, "boot"))
    path.chmod(0o666)


@pytest.mark.parametrize(
    "spoil",
    [
        linked,
        writable,
        os.mkfifo,
        Path.mkdir,
        lambda path: path.write_bytes(b"{"),
        lambda path: path.write_bytes(encode(NOTE, "boot") + b" " * SIZE_LIMIT),
    ],
    ids=["link", "writable", "pipe", "folder", "broken", "large"],
)
async def test_a_note_that_cannot_be_trusted_is_logged_and_ignored(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    """The daemon starts without the note, and the log has the file and the reason."""
    file = note_file(tmp_path)
    spoil(file.path)
    with capture_module_logs(fault_note_file) as logs:
        await file.load()

    assert file.health.noted == FaultNote()
    assert [line["event"] for line in logs] == ["note of faults ignored"]
    assert logs[0]["file"] == str(file.path)


async def test_without_a_note_nothing_is_logged(tmp_path: Path) -> None:
    """The first daemon of a boot finds no note."""
    file = note_file(tmp_path)
    with capture_module_logs(fault_note_file) as logs:
        await file.load()
    assert not logs


async def test_a_note_that_cannot_be_written_ends_no_daemon(tmp_path: Path) -> None:
    """A lost run folder or a full disk at a daemon's end is logged: the locks fall all the same."""
    file = note_file(tmp_path / "lost")
    async with file.health.driver.session():
        await file.health.survey()
        file.health.surveyed.set()
        with capture_module_logs(fault_note_file) as logs:
            await file.save()
    assert [log["event"] for log in logs] == ["note of faults not written"]
