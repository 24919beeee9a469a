"""Another device plugin with a resource of ours: named, left alone, and succeeded."""

from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from metagpu.core.state.facts import SharesOffered
from metagpu.plugins.kubelet.directory import KubeletDirectory
from metagpu.plugins.kubelet.endpoint import find_competing_socket
from tests.plugins.kubelet.rig import METAGPU, Node, node
from tests.rigs.build import gpu

SHARED = "nvidia.com/gpu.shared"
BOTH = f"""
version: metagpu/v1
pools:
  - name: all
    backends:
      - {{backend: fraction, sharesPerGpu: 10}}
      - {{backend: timeslice, resource: {SHARED}, replicas: 4}}
"""


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[None]:
    """Listen on a socket as another plugin does, while the block lasts."""
    async with (
        await anyio.create_unix_listener(path) as listener,
        anyio.create_task_group() as all_,
    ):
        all_.start_soon(listener.serve, _hang_up)
        yield
        all_.cancel_scope.cancel()
    await anyio.Path(path).unlink(missing_ok=True)


async def _hang_up(stream: anyio.abc.SocketStream) -> None:
    await stream.aclose()


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/mig-1g.5gb"])
async def test_nvidias_plugin_is_known_by_its_socket(tmp_path: Path, resource: str) -> None:
    """A listener on the socket of NVIDIA's plugin competes for that resource alone."""
    path = tmp_path / f"nvidia-{resource.partition('/')[2]}.sock"
    async with listening(path):
        assert await find_competing_socket(KubeletDirectory(tmp_path), resource) == path
        assert await find_competing_socket(KubeletDirectory(tmp_path), SHARED) is None
        assert await find_competing_socket(KubeletDirectory(tmp_path), METAGPU) is None


async def test_metagpu_is_known_by_its_socket(tmp_path: Path) -> None:
    """Cnvrg's plugin has a socket whose name is its resource in base64."""
    path = tmp_path / "Y252cmcuaW8vbWV0YWdwdQ=="
    async with listening(path):
        assert await find_competing_socket(KubeletDirectory(tmp_path), METAGPU) == path
        assert await find_competing_socket(KubeletDirectory(tmp_path), "nvidia.com/gpu") is None


async def test_gkes_plugin_is_known_by_its_socket(tmp_path: Path) -> None:
    """Google's plugin has nvidia.com/gpu, on a socket with its start time in the name."""
    path = tmp_path / "nvidiaGPU-1763737200.sock"
    async with listening(path):
        assert await find_competing_socket(KubeletDirectory(tmp_path), "nvidia.com/gpu") == path
        assert (
            await find_competing_socket(KubeletDirectory(tmp_path), "nvidia.com/mig-1g.5gb") is None
        )
    assert await find_competing_socket(KubeletDirectory(tmp_path), "nvidia.com/gpu") is None


async def test_another_metagpu_is_known_by_its_socket(tmp_path: Path) -> None:
    """Another daemon of metagpu competes for the resource in its socket's name, and no other."""
    mine, other = KubeletDirectory(tmp_path), KubeletDirectory(tmp_path)
    async with listening(mine.new_socket_path(METAGPU)):
        assert await find_competing_socket(mine, METAGPU) is None
        assert await find_competing_socket(mine, "cnvrg.io/meta") is None
    path = other.new_socket_path(METAGPU)
    async with listening(path):
        assert await find_competing_socket(mine, METAGPU) == path
        assert await find_competing_socket(mine, "cnvrg.io/meta") is None


async def test_name_that_makes_no_file_has_no_socket(tmp_path: Path) -> None:
    """A base64 name with a slash cannot be a socket of MetaGPU, and is not tried."""
    resource = "cnvrg.io/???"
    assert "/" in b64encode(resource.encode()).decode()
    assert await find_competing_socket(KubeletDirectory(tmp_path), resource) is None


async def test_resource_of_metagpu_is_served_when_it_has_gone(tmp_path: Path) -> None:
    """We register a resource of cnvrg's plugin only after that plugin has gone."""
    async with node(tmp_path, gpu(0)) as live_node, live_node.kubelet.running():
        await live_node.until(10, 10)
        live_node.registry.apply(SharesOffered((), ()))
        await live_node.until(0, 0)
        socket = live_node.directory / "Y252cmcuaW8vbWV0YWdwdQ=="
        async with listening(socket):
            live_node.offer()
            await _knows(live_node, {METAGPU: str(socket)})
            assert not live_node.kubelet.allocatable().get(METAGPU)

        await live_node.until(10, 10)


async def test_socket_that_was_left_behind_is_no_competing_plugin(tmp_path: Path) -> None:
    """A socket file without a listener does not keep a resource from being served."""
    path = tmp_path / "nvidia-gpu.sock"
    async with listening(path):
        await anyio.Path(path).rename(tmp_path / "kept")
    await anyio.Path(tmp_path / "kept").rename(path)

    assert path.is_socket()
    assert await find_competing_socket(KubeletDirectory(tmp_path), "nvidia.com/gpu") is None


async def test_resource_of_a_competing_plugin_is_served_when_it_has_gone(tmp_path: Path) -> None:
    """Only the resource that both have waits, with the reason known, until the other ends."""
    async with node(tmp_path, gpu(0)) as live_node, live_node.kubelet.running():
        await live_node.until(10, 10)
        async with listening(live_node.directory / "nvidia-gpu.shared.sock"):
            live_node.offer(BOTH)
            await _knows(live_node, {SHARED: str(live_node.directory / "nvidia-gpu.shared.sock")})
            assert SHARED not in live_node.kubelet.capacity()

        await live_node.until(4, 4, SHARED)
        assert live_node.registry.snapshot.competing_plugins == {}


async def _knows(live_node: Node, rivals: dict[str, str]) -> None:
    with anyio.fail_after(30):
        async for known in live_node.registry.watch(lambda now: now.competing_plugins):
            if known == rivals:
                return
