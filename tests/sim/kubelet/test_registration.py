"""Registration with the simulated kubelet (kubelet.md §1.2, §1.3; cases 1-6)."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from grpclib.exceptions import GRPCError
from grpclib.protocol import Stream
from grpclib.server import Handler

from metagpu.sim.kubelet.kubelet import SimKubelet
from metagpu.sim.kubelet.registration import is_extended_resource
from tests.sim.kubelet.rig import GPU, FakePlugin, devices, pod

Headers = list[tuple[str, str]]


@pytest.mark.parametrize(
    "name", ["vendor.com/foo_Bar-1.2", f"vendor.com/{'x' * 63}", f"{'v' * 200}/foo", "v/x"]
)
def test_these_resource_names_are_taken(name: str) -> None:
    """A real kubelet accepted these names (§1.3)."""
    assert is_extended_resource(name)


@pytest.mark.parametrize(
    "name",
    [
        "foo",
        "",
        "kubernetes.io/foo",
        "vendor.kubernetes.io/foo",
        "requests.vendor.com/foo",
        "vendor.com/",
        "Vendor.com/foo",
        "vendor.com/a/b",
        f"vendor.com/{'x' * 64}",
        "vendor.com/-x",
        "vendor.com/x-",
        f"{'v' * 245}/foo",
        "vendor.com/foo\n",
    ],
)
def test_these_resource_names_are_not(name: str) -> None:
    """A real kubelet refused these names (§1.3)."""
    assert not is_extended_resource(name)


async def test_without_a_listener_register_fails_when_the_dial_times_out(tmp_path: Path) -> None:
    """The dial fails after 0.1 s instead of 10 s (case 4)."""
    plugin = FakePlugin(GPU, [])
    plugin.endpoint = "nobody.sock"
    async with SimKubelet(tmp_path, dial_timeout=0.01).running() as kubelet:
        with pytest.raises(GRPCError) as caught:
            await plugin.register(kubelet)
        assert kubelet.capacity() == {}
    assert caught.value.message == "failed to dial device plugin: context deadline exceeded"


async def test_a_listener_that_says_nothing_is_no_listener(tmp_path: Path) -> None:
    """The dial waits for the server's first frame, as grpc-go's blocking dial does."""
    plugin = FakePlugin(GPU, [])
    plugin.endpoint = "../mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute.sock"))
        mute.listen()
        async with SimKubelet(tmp_path / "k", dial_timeout=0.01).running() as kubelet:
            with pytest.raises(GRPCError, match="failed to dial"):
                await plugin.register(kubelet)


@pytest.mark.parametrize("endpoint", ["sub/p.sock", "../beside.sock", "/absolute.sock"])
async def test_the_endpoint_is_joined_below_the_directory(tmp_path: Path, endpoint: str) -> None:
    """Sub-directories and ".." work; an absolute path lands below the directory (§1.2)."""
    directory = tmp_path / "k"
    plugin = FakePlugin(GPU, devices("a"))
    async with (
        SimKubelet(directory).running() as kubelet,
        plugin.serving(directory, endpoint.lstrip("/")),
    ):
        plugin.endpoint = endpoint
        await plugin.register(kubelet)


async def test_the_kubelet_says_localhost_and_sets_no_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The headers of the kubelet's calls are the real ones (§1.2)."""
    seen: list[dict[str, str]] = []
    accept = Handler.accept

    def noting(
        handler: Handler, stream: Stream, headers: Headers, release: Callable[[], None]
    ) -> None:
        seen.append(dict(headers))
        accept(handler, stream, headers, release)

    monkeypatch.setattr(Handler, "accept", noting)
    plugin = FakePlugin(GPU, devices("a"))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(pod("p", ("main", 1)))
    register, *calls = seen
    assert register[":path"] == "/v1beta1.Registration/Register"
    assert [call[":path"] for call in calls] == [
        "/v1beta1.DevicePlugin/GetDevicePluginOptions",
        "/v1beta1.DevicePlugin/ListAndWatch",
        "/v1beta1.DevicePlugin/Allocate",
    ]
    assert {call[":authority"] for call in calls} == {"localhost"}
    assert not any("grpc-timeout" in call for call in calls)


async def test_one_socket_registered_twice_ends_both_streams(tmp_path: Path) -> None:
    """The same hazard exists without a second socket (§1.4)."""
    plugin = FakePlugin(GPU, devices("a"))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await plugin.register(kubelet)
        await kubelet.wait_for(lambda: kubelet.lists[GPU] == 2)
        assert len(plugin.streams) == 2
        plugin.streams[0].put_nowait(None)
        await kubelet.wait_for(lambda: kubelet.open_streams[GPU] == 0)
        assert kubelet.allocatable() == {GPU: 0}


async def test_a_fixed_kubelet_keeps_the_new_client(tmp_path: Path) -> None:
    """With clients keyed by socket path as well, the old stream ends alone (#135437)."""
    old, new = FakePlugin(GPU, devices("a b")), FakePlugin(GPU, devices("a b"))
    async with (
        SimKubelet(tmp_path, fixed_clashes=True).running() as kubelet,
        old.registered(kubelet, "old.sock"),
        new.registered(kubelet, "new.sock"),
    ):
        old.hang_up()
        await kubelet.wait_for(lambda: kubelet.open_streams[GPU] == 1)
        assert kubelet.allocatable() == {GPU: 2}
        assert len(new.streams) == 1


async def test_a_plugin_may_serve_a_hundred_resources_at_once(tmp_path: Path) -> None:
    """Concurrent registrations do not wait for each other (case 11)."""
    plugins = [FakePlugin(f"example.com/r{n}", devices("a")) for n in range(100)]
    async with SimKubelet(tmp_path).running() as kubelet, AsyncExitStack() as doors:
        for number, plugin in enumerate(plugins):
            await doors.enter_async_context(plugin.serving(tmp_path, f"{number}.sock"))
        await asyncio.gather(*(plugin.register(kubelet) for plugin in plugins))
        await kubelet.wait_for(lambda: sum(kubelet.allocatable().values()) == 100)
