"""GetPreferredAllocation as the simulated kubelet calls it (§1.5; cases 45, 49)."""

from pathlib import Path

import pytest

from metagpu.sim.kubelet.kubelet import SimKubelet
from tests.sim.kubelet.rig import GPU, FakePlugin, devices, dice, pod


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
