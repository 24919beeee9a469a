"""Companions: programs that outlive the daemon, found again and never mistaken."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from anyio import from_thread, to_thread
from msgspec.structs import replace

from metagpu.companions import HostCompanions
from metagpu.core.companions import Companion, Process
from metagpu.core.errors import ToolError, ToolMissing
from metagpu.core.model import Holder
from metagpu.host import running
from metagpu.sim.host import SimHost
from metagpu.tools import HostTools
from tests.companions_rig import COMPANIONS, serving, stand_in
from tests.test_tools import program
from tests.waiting import until

HERE = os.getpid()


def sleeper(folder: Path, text: str = "print('up', flush=True); time.sleep(60)") -> Companion:
    """Describe a program of a test's own, which sleeps unless it is told otherwise."""
    path = program(folder / "bin", text, name="sleeper")
    return Companion(
        str(path),
        ("-f",),
        {"WHERE": str(folder)},
        folder / "output",
    )


async def said(companion: Companion, word: str) -> None:
    """Wait until a companion has said a word."""

    async def is_so() -> bool:
        return word in await anyio.Path(companion.output).read_text()

    await until(is_so)


HOST = HostCompanions(HostTools(roots=()))


async def test_a_companion_has_a_session_of_its_own(tmp_path: Path) -> None:
    """No signal meant for the daemon's terminal or group reaches it, and it is not our child."""
    process = await HOST.start(sleeper(tmp_path))
    try:
        assert os.getsid(process.pid) != os.getsid(0)
        assert os.getpgid(process.pid) != os.getpgid(0)
        status = await anyio.Path(f"/proc/{process.pid}/stat").read_text()
        assert int(status.rpartition(")")[2].split()[1]) != HERE
    finally:
        await HOST.kill(process)


async def test_a_companion_outlives_who_started_it(tmp_path: Path) -> None:
    """It is found again by the next daemon, which waits for its end and ends it."""
    folder = str(tmp_path)
    script = (
        "import anyio\n"
        "from pathlib import Path\n"
        "from tests.test_companions import HOST, sleeper\n"
        f"print(anyio.run(HOST.start, sleeper(Path({folder!r}))).pid)\n"
    )
    starter = await anyio.run_process([sys.executable, "-c", script], stderr=None)
    pid = int(starter.stdout)
    await said(sleeper(tmp_path), "up")  # before that it is not itself yet, but its interpreter

    found = await HOST.find(sleeper(tmp_path), pid)
    assert found is not None
    assert found.pid == pid
    await HOST.kill(found)
    await HOST.ended(found)
    assert await HOST.find(sleeper(tmp_path), pid) is None


async def test_what_a_pod_makes_look_like_it_is_not_taken_for_it(tmp_path: Path) -> None:
    """A container may write the number of a look-alike of its own where ours is looked up."""
    place = tmp_path / "host"
    place.mkdir()
    seen = SimHost(place)
    host = HostCompanions(HostTools(roots=()), proc=seen.proc)
    process = await host.start(sleeper(tmp_path))
    try:
        await said(sleeper(tmp_path), "up")
        seen.show(HERE, "0::/system.slice/metagpu.service\n")
        seen.house(process.pid, Holder("team", "mallory", "main"))
        assert await host.find(sleeper(tmp_path), process.pid) is None

        seen.house(HERE, Holder("team", "mallory", "main"))
        assert await host.find(sleeper(tmp_path), process.pid) == process

        seen.show(process.pid, "0::/system.slice/metagpu.service\n")
        assert await host.find(sleeper(tmp_path), process.pid) == process
    finally:
        await host.kill(process)


async def test_another_process_is_never_taken_for_it(tmp_path: Path) -> None:
    """A number alone says nothing: the environment and the command line have to be the same."""
    async with serving(tmp_path) as it, stand_in(tmp_path, "GPU-1") as other:
        process = await it.process()
        assert process is not None
        pid = process.pid
        assert await COMPANIONS.find(it.daemon, pid) == process
        with it.client():
            [server] = await it.control.servers()

            assert await COMPANIONS.find(it.daemon, server) is None
        assert await COMPANIONS.find(other.daemon, pid) is None
        assert await COMPANIONS.find(it.daemon, HERE) is None
        assert await COMPANIONS.find(replace(it.daemon, arguments=("-d",)), pid) is None
        assert await COMPANIONS.find(it.daemon, 2**22 + 1) is None


async def test_a_number_that_was_given_away_is_left_alone(tmp_path: Path) -> None:
    """A process with the same number and another start time is neither waited for nor killed."""
    process = await HOST.start(sleeper(tmp_path))
    before = replace(process, started=process.started - 1)

    with anyio.fail_after(30):
        await HOST.ended(before)
        await HOST.kill(before)
    assert await to_thread.run_sync(running.read, process.pid) is not None
    await HOST.kill(process)


async def test_its_end_is_heard(tmp_path: Path) -> None:
    """Waiting lasts as long as the process does."""
    process = await HOST.start(sleeper(tmp_path))
    over = anyio.Event()

    async with anyio.create_task_group() as group:

        async def wait() -> None:
            await HOST.ended(process)
            over.set()

        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert not over.is_set()
        await HOST.kill(process)
        with anyio.fail_after(30):
            await over.wait()


async def test_a_wait_that_is_given_up_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it is cancelled, the descriptor of the process is closed."""
    process = await HOST.start(sleeper(tmp_path))
    opened, descriptors = running.opened, []
    scope = anyio.CancelScope()

    def late(wanted: Process) -> int | None:
        descriptors.append(opened(wanted))
        from_thread.run_sync(scope.cancel)
        return descriptors[-1]

    monkeypatch.setattr(running, "opened", late)
    with scope:
        await HOST.ended(process)
    monkeypatch.undo()
    await HOST.kill(process)

    [descriptor] = descriptors
    assert descriptor is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


async def test_what_has_ended_is_killed_without_a_word(tmp_path: Path) -> None:
    """To kill a process that is gone is no error."""
    process = await HOST.start(sleeper(tmp_path))

    await HOST.kill(process)
    await HOST.kill(process)


async def test_what_it_prints_is_kept(tmp_path: Path) -> None:
    """What it says, to whichever stream, is in its output for people to read."""
    companion = sleeper(tmp_path, "print('one'); sys.stderr.write('no such GPU')")

    with suppress(ToolError):  # it may be seen before it has ended
        await HOST.ended(await HOST.start(companion))
    assert "no such GPU" in await anyio.Path(companion.output).read_text()


async def test_a_missing_program_is_told(tmp_path: Path) -> None:
    """Nothing is started, and the error says where the program was looked for."""
    companion = Companion("no-such-program", (), {}, tmp_path / "output")

    with pytest.raises(ToolMissing, match="there is no no-such-program here; looked in PATH"):
        await HOST.start(companion)


async def test_a_companion_sees_its_own_folder(tmp_path: Path) -> None:
    """What is mounted for it, it alone sees; the host's folder stays as it is."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount: run as root to see that a companion has its own /dev/shm")
    place, private = tmp_path / "place", tmp_path / "private"
    place.mkdir()
    private.mkdir()
    text = f"open({str(place / 'mark')!r}, 'w').close(); print('done', flush=True); time.sleep(60)"
    companion = replace(sleeper(tmp_path, text), mounts={place: private})

    process = await HOST.start(companion)
    try:
        await said(companion, "done")
        assert [path.name for path in private.iterdir()] == ["mark"]
        assert list(place.iterdir()) == []
        assert await HOST.find(companion, process.pid) == process
    finally:
        await HOST.kill(process)


async def test_mounts_that_are_refused_are_told(tmp_path: Path) -> None:
    """A mount that cannot be made ends the start, and the companion's output has the reason."""
    companion = replace(sleeper(tmp_path), mounts={tmp_path / "nowhere": tmp_path / "missing"})

    with suppress(ToolError):  # it may be seen before it has ended
        await HOST.ended(await HOST.start(companion))
    assert "mount" in await anyio.Path(companion.output).read_text()


def test_processes_are_told_apart_by_their_start() -> None:
    """We ourselves run; what is named by our number and another start does not."""
    ourselves = running.read(HERE)
    assert ourselves is not None
    assert ourselves.process.pid == HERE

    assert running.opened(Process(HERE, ourselves.process.started - 1)) is None
    descriptor = running.opened(ourselves.process)
    assert descriptor is not None
    os.close(descriptor)
