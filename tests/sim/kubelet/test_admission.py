"""Admission and container start in the simulated kubelet (§1.5; cases 28-35, 41-44)."""

import asyncio
from pathlib import Path

import anyio
import pytest

from metagpu.sim.kubelet.kubelet import AdmissionError, SimContainer, SimKubelet, SimPod
from tests.sim.kubelet.rig import GPU, NIC, FakePlugin, devices, dice, pod

UNEXPECTED = "UnexpectedAdmissionError"


async def test_ids_come_in_random_order(tmp_path: Path) -> None:
    """The order of ids has no meaning for a plugin (case 42)."""
    plugin = FakePlugin(GPU, devices("a b c d e f"))
    kubelet = SimKubelet(tmp_path, rng=dice(1))
    async with kubelet.running(), plugin.registered(kubelet):
        for n in range(8):
            await kubelet.admit(one := pod(f"p{n}", ("main", 6)))
            await kubelet.delete(one)
    assert len({tuple(ids) for ids in plugin.allocations}) > 1


async def test_answers_of_several_resources_are_merged_first_wins(tmp_path: Path) -> None:
    """Own keys all arrive, common ones from either, CDI names once (cases 30, 33)."""
    gpu, nic = FakePlugin(GPU, devices("a b")), FakePlugin(NIC, devices("n"))
    both = SimPod.single("both", {GPU: 2, NIC: 1})
    async with (
        SimKubelet(tmp_path).running() as kubelet,
        gpu.registered(kubelet, "gpu.sock"),
        nic.registered(kubelet, "nic.sock"),
    ):
        options = (await kubelet.admit(both))["main"]
    assert (options.envs["GPU"], options.envs["NIC"]) == ("a,b", "n")
    assert options.envs["LAST"] in {"GPU", "NIC"}
    assert [mount.container_path for mount in options.mounts] == ["/shared"]
    assert {spec.container_path for spec in options.devices} == {"/dev/GPU", "/dev/NIC"}
    assert options.cdi_devices == ("example.com/all=all",)


async def test_a_container_without_devices_is_allocated_late(tmp_path: Path) -> None:
    """A container gets devices at its start once the resource has a plugin (§1.5)."""
    plugin = FakePlugin(GPU, devices("a"))
    early = pod("early", ("main", 1))
    async with SimKubelet(tmp_path).running() as kubelet:
        await kubelet.admit(early)
        async with plugin.registered(kubelet):
            options = await kubelet.start_container(early, "main")
            assert options.envs["GPU"] == "a"


async def test_an_answer_without_a_resource_fails_the_pod_and_leaks_its_devices(
    tmp_path: Path,
) -> None:
    """The ids stay taken until a known pod ends and the kubelet checks (rule 7)."""
    plugin = FakePlugin(GPU, devices("a b c"))
    known = pod("known", ("main", 1))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(known)
        plugin.answers = 0
        with pytest.raises(AdmissionError) as caught:
            await kubelet.admit(pod("unlucky", ("main", 2)))
        assert "no containers return in allocation response" in caught.value.message
        plugin.answers = 1
        with pytest.raises(AdmissionError, match="Requested: 1, Available: 0"):
            await kubelet.admit(pod("next", ("main", 1)))
        await kubelet.delete(known)
        await kubelet.admit(pod("last", ("main", 3)))


async def test_devices_of_a_deleted_pod_are_free_for_the_next(tmp_path: Path) -> None:
    """No call frees devices; the next admission finds them free."""
    plugin = FakePlugin(GPU, devices("a"))
    first, second = pod("first", ("main", 1)), pod("second", ("main", 1))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(first)
        await kubelet.delete(first)
        assert kubelet.devices(first) == {"main": {GPU: {"a"}}}
        await kubelet.admit(second)
        assert kubelet.devices(first) == {}
        assert kubelet.devices(second) == {"main": {GPU: {"a"}}}


async def test_admissions_wait_for_each_other(tmp_path: Path) -> None:
    """A slow Allocate holds up every other pod of the node (rule 6)."""
    plugin = FakePlugin(GPU, devices("a b"))
    asked, go = anyio.Event(), anyio.Event()

    async def wait() -> None:
        asked.set()
        await go.wait()

    plugin.before_answer = wait
    async with (
        SimKubelet(tmp_path).running() as kubelet,
        plugin.registered(kubelet),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(kubelet.admit(pod("one", ("main", 1))))
        tasks.create_task(kubelet.admit(pod("two", ("main", 1))))
        await asked.wait()
        assert len(plugin.allocations) == 1
        go.set()
    assert len(plugin.allocations) == 2


async def test_a_plugin_that_dies_during_allocate_fails_the_pod(tmp_path: Path) -> None:
    """A lost connection fails the pod with either of two texts, by chance (case 44)."""
    plugin = FakePlugin(GPU, devices("a"))
    asked = anyio.Event()

    async def hang() -> None:
        asked.set()
        await anyio.sleep_forever()

    plugin.before_answer = hang
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet) as door:
        admission = asyncio.create_task(kubelet.admit(pod("p", ("main", 1))))
        await asked.wait()
        await door.abort()
        with pytest.raises(AdmissionError, match=r"code = (Unavailable|Canceled)"):
            await admission


async def test_an_allocate_answer_over_four_mebibytes_is_refused(tmp_path: Path) -> None:
    """The receive limit holds for every answer (§1.2)."""
    plugin = FakePlugin(GPU, devices("a"))
    plugin.padding = "x" * 4 * 1024 * 1024
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        with pytest.raises(AdmissionError, match="code = ResourceExhausted desc = grpc: received"):
            await kubelet.admit(pod("p", ("main", 1)))


def test_a_pods_request_is_the_peak_of_its_start_and_its_running() -> None:
    """Sidecars stay in the sum; ordinary init containers do not add up."""
    init = (
        SimContainer("i", {GPU: 5}),
        SimContainer("s", {GPU: 1}, restartable=True),
        SimContainer("j", {GPU: 2}),
    )
    assert pod("p", ("m", 1), ("n", 2), init=init).request(GPU) == 5
    assert pod("p", ("m", 1), ("n", 4), init=init).request(GPU) == 6
