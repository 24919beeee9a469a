"""A pod that is created again under its name is another holder of its shares."""

from collections.abc import Collection

import pytest

from metagpu.core.model.shares import Holder
from metagpu.core.state.facts import GpusFound, LeasesObserved, SharesReleased
from metagpu.core.state.registry import Registry
from metagpu.core.usage.absent_containers import AbsentContainerWatch
from metagpu.core.usage.timing import UsageTiming
from tests.rigs.build import gpu, layout_of

GPU = gpu(0)
HOLDER = Holder("team", "web-0", "main")


@pytest.mark.parametrize("share", [0, 3], ids=["same share", "other share"])
@pytest.mark.parametrize("while_asked", [False, True])
async def test_a_pod_created_again_was_never_seen(share: int, *, while_asked: bool) -> None:
    """A StatefulSet's new pod, whose image is pulled, does not inherit the time of the old one."""
    registry, alive, again_while_asked = Registry(), True, False
    for fact in (GpusFound((GPU,), at=0), layout_of(GPU).offer_fact):
        registry.apply(fact)
    shares = registry.snapshot.gpus[GPU.id].shares

    def create_again() -> None:
        registry.apply(SharesReleased((shares[0],), at=2))
        registry.apply(LeasesObserved({shares[share].id: HOLDER}, at=3))

    async def running(holders: Collection[Holder]) -> Collection[Holder]:
        if again_while_asked:
            create_again()
        return list(holders) if alive else ()

    watch = AbsentContainerWatch(registry, running, UsageTiming(absent_after=0))
    registry.apply(LeasesObserved({shares[0].id: HOLDER}, at=1))
    await watch._check()
    assert HOLDER in watch.last_seen

    if while_asked:
        again_while_asked = True
        await watch._check()
        again_while_asked = False
    else:
        create_again()
    alive = False
    await watch._check()
    assert watch.found == {}

    alive = True
    await watch._check()
    alive = False
    await watch._check()
    assert HOLDER in watch.found
