"""Speaking to a control daemon: what is no answer is an error that says so."""

from pathlib import Path

import pytest

from metagpu.backends.mps_daemon.control import Control, Folders, control_daemon
from metagpu.core.errors import ToolError
from tests.companions_rig import COMPANIONS, serving

GPU = "GPU-00000000-0000-0000-0000-000000000000"
MIG = "MIG-00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize("device", [GPU, MIG])
def test_a_control_daemon_is_of_one_device(device: str) -> None:
    """It sees nothing else, runs in the foreground, and has pipes, logs and /dev/shm to itself."""
    home = Path("/run/metagpu/mps") / device
    daemon = control_daemon(device, Folders(home))

    assert (daemon.program, daemon.arguments) == ("nvidia-cuda-mps-control", ("-f",))
    assert daemon.env == {
        "CUDA_VISIBLE_DEVICES": device,
        "CUDA_MPS_PIPE_DIRECTORY": f"{home}/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{home}/log",
    }
    assert daemon.mounts == {Path("/dev/shm"): home / "shm"}  # noqa: S108 - MPS's own place


def test_its_sockets_have_a_path_that_linux_takes() -> None:
    """A unix socket's path has 107 bytes at most; there is room for a longer run directory."""
    folders = Folders(Path("/run/metagpu/mps") / GPU)

    assert len(str(folders.pipes / "control_privileged")) <= 85


async def test_clients_are_listed_by_server(tmp_path: Path) -> None:
    """The first client starts a server; each is listed by its process."""
    async with serving(tmp_path) as it:
        with it.client(), it.client():
            [server] = await it.control.servers()
            assert len(await it.control.clients(server)) == 2
            assert await it.control.status(server) == "ACTIVE"


@pytest.mark.parametrize("question", ["probe", "servers"])
async def test_nonsense_is_no_answer(tmp_path: Path, question: str) -> None:
    """What was asked and what came back are in the error."""
    async with serving(tmp_path) as it:
        it.steer("garbage")
        with pytest.raises(
            ToolError, match=r"it answered get_\w+ with '\?\\x07 not what you asked"
        ):
            await getattr(it.control, question)()


async def test_silence_has_a_deadline(tmp_path: Path) -> None:
    """A control daemon that hangs costs a second here, and is told with the command."""
    async with serving(tmp_path) as it:
        it.steer("hang")
        with pytest.raises(ToolError) as caught:
            await Control(COMPANIONS, it.daemon, deadline=1.0).probe()

    assert str(caught.value).endswith(
        "<<< get_default_active_thread_percentage` did not end within 1 s"
    )


async def test_a_crash_is_no_answer(tmp_path: Path) -> None:
    """It leaves its sockets and its number behind, and nobody is taken for it."""
    async with serving(tmp_path) as it:
        it.steer("crash")
        with pytest.raises(ToolError, match="Cannot find MPS control daemon process"):
            await it.control.probe()

        assert (it.folders.pipes / "control").is_socket()
        assert await it.process() is None
