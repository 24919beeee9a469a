"""GetPreferredAllocation as the simulated kubelet calls it (§1.5; cases 45, 49)."""

from pathlib import Path

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from metagpu.sim.kubelet.kubelet import AdmissionError, SimContainer, SimKubelet
from tests.sim.kubelet.rig import GPU, FakePlugin, devices, dice, pod, wrapped


async def test_preference_is_asked_only_when_announced(tmp_path: Path) -> None:
    """Without the option the kubelet chooses alone."""
    plugin = FakePlugin(GPU, devices("a b"))
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(pod("p", ("main", 1)))
        assert (plugin.questions, len(plugin.allocations)) == ([], 1)


async def test_the_preferred_devices_are_used(tmp_path: Path) -> None:
    """All free devices are available, none is required, the size is the request (case 45)."""
    plugin = FakePlugin(GPU, devices("a b c d"), prefer=lambda _: ["c"])
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(pod("p", ("main", 1)))
    (question,) = plugin.questions
    assert sorted(question.available_deviceIDs) == ["a", "b", "c", "d"]
    assert (question.must_include_deviceIDs, question.allocation_size) == ([], 1)
    assert plugin.allocations == [["c"]]


async def test_reused_devices_are_a_must(tmp_path: Path) -> None:
    """With 4 and 2 reusable, both kinds are available and the size is 4 (case 45)."""
    plugin = FakePlugin(GPU, devices("a b c d e f"), prefer=lambda q: sorted(q.available_deviceIDs))
    one = pod("p", ("main", 4), init=[SimContainer("init", {GPU: 2})])
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(one)
        init = kubelet.devices(one)["init"][GPU]
    question = plugin.questions[-1]
    assert set(question.must_include_deviceIDs) == init
    assert sorted(question.available_deviceIDs) == ["a", "b", "c", "d", "e", "f"]
    assert question.allocation_size == 4


async def test_preference_is_not_asked_when_reuse_suffices(tmp_path: Path) -> None:
    """All devices come from the init container."""
    plugin = FakePlugin(GPU, devices("a b"), prefer=lambda q: q.available_deviceIDs)
    one = pod("p", ("main", 1), init=[SimContainer("init", {GPU: 1})])
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(one)
    assert (len(plugin.questions), len(plugin.allocations)) == (1, 2)


async def test_preference_is_asked_even_without_a_choice(tmp_path: Path) -> None:
    """Without topology the call comes also when all devices are needed (§1.5)."""
    plugin = FakePlugin(GPU, devices("a b"), prefer=lambda q: q.available_deviceIDs)
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(pod("p", ("main", 2)))
    assert len(plugin.questions) == 1


@pytest.mark.parametrize("answer", [[], ["zz", "zz"], ["b", "zz"], ["b", "b"]])
async def test_a_short_or_wrong_preference_is_filled_up(tmp_path: Path, answer: list[str]) -> None:
    """Unknown and repeated ids are ignored, random ones are added (§1.5)."""
    plugin = FakePlugin(GPU, devices("a b c"), prefer=lambda _: answer)
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        await kubelet.admit(pod("p", ("main", 2)))
    (ids,) = plugin.allocations
    assert len(ids) == 2
    assert {"b"} & set(answer) <= set(ids)


async def test_of_too_large_a_preference_a_random_part_is_used(tmp_path: Path) -> None:
    """The part is not the first n, so a plugin returns exactly n (case 49)."""
    plugin = FakePlugin(GPU, devices("a b c d"), prefer=lambda _: ["a", "b", "c"])
    kubelet = SimKubelet(tmp_path, rng=dice(0))
    async with kubelet.running(), plugin.registered(kubelet):
        for n in range(12):
            await kubelet.admit(one := pod(f"p{n}", ("main", 1)))
            await kubelet.delete(one)
    assert {ids[0] for ids in plugin.allocations} == {"a", "b", "c"}


async def test_any_error_of_the_preference_fails_the_pod(tmp_path: Path) -> None:
    """UNIMPLEMENTED fails the pod too: a plugin announces only what it serves."""
    plugin = FakePlugin(GPU, devices("a b"), prefer=lambda _: [])
    async with SimKubelet(tmp_path).running() as kubelet, plugin.registered(kubelet):
        plugin.refusal = GRPCError(Status.UNIMPLEMENTED, "no")
        with pytest.raises(AdmissionError) as caught:
            await kubelet.admit(pod("p", ("main", 1)))
    assert caught.value.message == wrapped(
        "device plugin GetPreferredAllocation rpc failed with err: "
        "rpc error: code = Unimplemented desc = no"
    )
