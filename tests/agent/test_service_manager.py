"""A service manager starts the kubelet, or ends an old daemon, once it hears that we are ready."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio import to_thread
from anyio.abc import Process

from metagpu.sim.kubelet.kubelet import SimKubelet
from tests.agent.test_daemon import METAGPU_ITSELF, command_line
from tests.rigs.agent import METAGPU, QUICK


@asynccontextmanager
async def started(folder: Path, name: str, *more: str) -> AsyncIterator[Process]:
    """Run a daemon, as a service manager does, and wait until it is ready."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(folder / name))
        listener.settimeout(30)
        command = [*command_line(folder, METAGPU_ITSELF), *more]
        env = {"NOTIFY_SOCKET": str(folder / name)}
        async with await anyio.open_process(command, env=env, stderr=None) as process:
            try:
                assert await to_thread.run_sync(listener.recv, 100) == b"READY=1"
                yield process
            finally:
                if process.returncode is None:
                    process.kill()


async def test_a_kubelet_that_starts_after_us_has_its_lists_at_once(tmp_path: Path) -> None:
    """The daemon is ready without a kubelet, or a boot would wait for both; then one starts."""
    await anyio.Path(tmp_path / "metagpu.yaml").write_text(QUICK)
    kubelet = SimKubelet(tmp_path / "dp", pod_resources=tmp_path / "pr.sock")

    async with started(tmp_path, "notify"):
        assert not await anyio.Path(tmp_path / "dp").exists()
        async with kubelet.running():
            await kubelet.wait_for(lambda: kubelet.allocatable().get(METAGPU) == 20)


async def test_a_daemon_that_waits_is_ready_when_the_old_one_may_end(tmp_path: Path) -> None:
    """The service manager ends the old daemon then, and the one that waited serves."""
    await anyio.Path(tmp_path / "metagpu.yaml").write_text(QUICK)
    kubelet = SimKubelet(tmp_path / "dp", pod_resources=tmp_path / "pr.sock")

    async with kubelet.running(), started(tmp_path, "old", "--take-over") as old:
        await kubelet.wait_for(lambda: kubelet.allocatable().get(METAGPU) == 20)
        async with started(tmp_path, "new", "--take-over"):
            old.kill()
            await old.wait()
            await kubelet.wait_for(lambda: kubelet.registrations[METAGPU] == 2)
            await kubelet.wait_for(lambda: kubelet.allocatable().get(METAGPU) == 20)
