"""Devices, health and the end of endpoints in the simulated kubelet (§1.4; cases 12-20, 26, 27)."""

from pathlib import Path

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from metagpu.sim.kubelet.kubelet import AdmissionError, ContainerStartError, SimKubelet
from tests.sim.kubelet.rig import GPU, NIC, Clock, FakePlugin, device, devices, pod


@pytest.mark.parametrize("health", ["healthy", "", "Unknown"])
async def test_only_one_word_is_healthy(tmp_path: Path, health: str) -> None:
    """Any other string counts as unhealthy (§1.1)."""
    plugin = FakePlugin(GPU, [device("a", health=health)])
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        assert (kubelet.capacity(), kubelet.allocatable()) == ({GPU: 1}, {GPU: 0})


async def test_resources_have_their_own_numbers(tmp_path: Path) -> None:
    """Two resources are counted apart (case 16)."""
    gpu, nic = FakePlugin(GPU, devices("a b c")), FakePlugin(NIC, devices("n"))
    async with (
        SimKubelet(tmp_path).running() as kubelet,
        gpu.registered(kubelet, "gpu.sock"),
        nic.registered(kubelet, "nic.sock"),
    ):
        assert kubelet.capacity() == {GPU: 3, NIC: 1}


async def test_a_repeated_id_lands_in_both_sets(tmp_path: Path) -> None:
    """The capacity is 2 and allocatable 1: the plugin has to de-duplicate (§1.1)."""
    plugin = FakePlugin(GPU, [device("a"), device("a", health="Unhealthy")])
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        assert (kubelet.capacity(), kubelet.allocatable()) == ({GPU: 2}, {GPU: 1})


async def test_a_list_that_fails_at_once_leaves_a_resource_of_nothing(tmp_path: Path) -> None:
    """The resource is 0/0, and the kubelet does not try again (case 17)."""
    plugin = FakePlugin(GPU, devices("a"))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.serving(tmp_path):
        plugin.list_refusal = GRPCError(Status.INTERNAL, "no list")
        await plugin.register(kubelet)
        await kubelet.wait_for(lambda: GPU in kubelet.capacity())
        assert (kubelet.capacity(), kubelet.allocatable()) == ({GPU: 0}, {GPU: 0})
        assert kubelet.open_streams[GPU] == 0


async def test_the_death_of_the_plugin_ends_the_stream(tmp_path: Path) -> None:
    """A killed process ends its stream without a goodbye (case 19)."""
    plugin = FakePlugin(GPU, devices("a"))
    async with SimKubelet(tmp_path).running() as kubelet:
        async with plugin.registered(kubelet):
            pass
        await kubelet.wait_for(lambda: kubelet.allocatable()[GPU] == 0)


async def test_after_the_grace_period_a_tick_sets_the_capacity_to_zero(tmp_path: Path) -> None:
    """The endpoint is deleted, the key stays (cases 18 to 20)."""
    clock = Clock()
    plugin = FakePlugin(GPU, devices("a"))
    async with SimKubelet(tmp_path, clock=clock).running() as kubelet:
        async with plugin.registered(kubelet):
            pass
        await kubelet.wait_for(lambda: kubelet.allocatable()[GPU] == 0)
        clock.now += 301
        assert kubelet.capacity() == {GPU: 1}
        await kubelet.tick()
        assert (kubelet.capacity(), kubelet.allocatable()) == ({GPU: 0}, {GPU: 0})


async def test_what_a_pod_meets_after_the_grace_period(tmp_path: Path) -> None:
    """A holder cannot restart; new pods are refused in two ways (§1.4)."""
    clock = Clock()
    plugin = FakePlugin(GPU, devices("a b"))
    holder = pod("holder", ("main", 1))
    async with SimKubelet(tmp_path, clock=clock).running() as kubelet:
        async with plugin.registered(kubelet):
            await kubelet.admit(holder)
        await kubelet.wait_for(lambda: kubelet.allocatable()[GPU] == 0)
        clock.now += 301
        await kubelet.tick()
        with pytest.raises(ContainerStartError) as start:
            await kubelet.start_container(holder, "main")
        assert str(start.value) == f"endpoint not found in cache for a registered resource: {GPU}"
        with pytest.raises(AdmissionError, match=f"cannot allocate unregistered device {GPU}"):
            await kubelet.admit(pod("early", ("main", 1)))
        await kubelet.delete(holder)
        # The first look frees what the holder held, but only after it was asked for as ours.
        with pytest.raises(AdmissionError, match="unregistered"):
            await kubelet.admit(pod("second", ("main", 1)))
        with pytest.raises(AdmissionError) as late:
            await kubelet.admit(pod("late", ("main", 1)))
        assert late.value.reason == f"OutOf{GPU}"
        assert late.value.message.startswith("Node didn't have enough resource")


async def test_a_list_over_four_mebibytes_kills_the_stream(tmp_path: Path) -> None:
    """The receive limit of grpc-go ends the stream (case 27)."""
    plugin = FakePlugin(GPU, devices("a"))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        plugin.send(*(device(f"{n:063d}") for n in range(60_000)))
        await kubelet.wait_for(lambda: kubelet.open_streams[GPU] == 0)
        assert (kubelet.capacity(), kubelet.allocatable()) == ({GPU: 1}, {GPU: 0})


async def test_a_list_just_below_the_limit_passes(tmp_path: Path) -> None:
    """A list of 50 000 ids of 63 characters passes, as measured (§1.2)."""
    plugin = FakePlugin(GPU, [device(f"{n:063d}") for n in range(50_000)])
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        assert kubelet.capacity() == {GPU: 50_000}


async def test_waiting_has_an_end(tmp_path: Path) -> None:
    """A predicate that never holds is a TimeoutError, not a hang."""
    async with SimKubelet(tmp_path).running() as kubelet:
        with pytest.raises(TimeoutError):
            await kubelet.wait_for(lambda: False, within=0.01)
