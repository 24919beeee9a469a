"""Container start in the simulated kubelet (§1.5; cases 36, 37, 50)."""

from pathlib import Path

import anyio
import pytest

from metagpu.sim.kubelet.kubelet import ContainerStartError, SimKubelet
from tests.rigs.waiting import skip
from tests.sim.kubelet.rig import GPU, FakePlugin, devices, pod


async def test_a_restarted_container_gets_the_stored_answer(tmp_path: Path) -> None:
    """A restart has no second Allocate and the same devices (case 50)."""
    plugin = FakePlugin(GPU, devices("a b"))
    one = pod("p", ("main", 1))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        admitted = await kubelet.admit(one)
        started = await kubelet.start_container(one, "main")
        kubelet.stop_container(one, "main")
        again = await kubelet.start_container(one, "main")
    assert admitted["main"].envs == started.envs == again.envs
    assert len(plugin.allocations) == 1


async def test_prestart_is_called_with_exactly_what_is_held(tmp_path: Path) -> None:
    """The call comes before every start, but not for a quantity of 0 (case 36)."""

    async def fine() -> None:
        pass

    plugin = FakePlugin(GPU, devices("a b c"), pre_start=fine)
    one = pod("p", ("main", 2), ("none", 0))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(one)
        held = kubelet.devices(one)["main"][GPU]
        for name in ("main", "none", "main"):
            await kubelet.start_container(one, name)
    assert [set(ids) for ids in plugin.pre_started] == [held, held]


async def test_a_slow_prestart_is_an_error_and_the_next_try_works(tmp_path: Path) -> None:
    """The call ends after 30 s (case 37)."""
    tries: list[str] = []

    async def slow_then_fast() -> None:
        tries.append("try")
        if len(tries) == 1:
            skip(30)
            await anyio.sleep_forever()

    plugin = FakePlugin(GPU, devices("a"), pre_start=slow_then_fast)
    one = pod("p", ("main", 1))
    kubelet = SimKubelet(tmp_path)
    async with kubelet.running(), plugin.registered(kubelet):
        await kubelet.admit(one)
        with pytest.raises(ContainerStartError) as caught:
            await kubelet.start_container(one, "main")
        assert "code = DeadlineExceeded" in str(caught.value)
        await kubelet.start_container(one, "main")


async def test_prestart_fails_while_the_plugin_is_stopped(tmp_path: Path) -> None:
    """The container waits until the plugin is back (case 37)."""

    async def fine() -> None:
        pass

    plugin = FakePlugin(GPU, devices("a"), pre_start=fine)
    one = pod("p", ("main", 1))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(one)
        plugin.hang_up()
        await kubelet.wait_for(lambda: kubelet.allocatable()[GPU] == 0)
        with pytest.raises(ContainerStartError, match="has been stopped"):
            await kubelet.start_container(one, "main")
