"""A pod that is created again under its name is another holder of its shares."""

from collections.abc import Collection

import pytest
from msgspec.structs import replace

from metagpu.core.model.offers import Api
from metagpu.core.model.shares import Holder, ResourceClaimRef
from metagpu.core.state.facts import GpusFound, LeasesObserved, SharesClaimed, SharesReleased
from metagpu.core.state.registry import Registry
from metagpu.core.usage.lease_differences import AbsentContainerWatch, MixedRequestWatch
from metagpu.core.usage.timing import UsageTiming
from tests.rigs.build import gpu, layout_of, offer, share

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


ONE, OTHER = gpu(0), gpu(1)
SHARES = (share(ONE, 0), share(OTHER, 0, resource="x.y/other"))

HOLDERS = dict.fromkeys((other.id for other in SHARES), HOLDER)
CLAIM = ResourceClaimRef("team", "whole", "uid-1")


def test_a_pod_created_again_is_reported_again() -> None:
    """A pod that takes over name and shares between two checks is reported, and then no more."""
    registry = Registry()
    watch = MixedRequestWatch(registry, lambda: True)
    for fact in (GpusFound((ONE, OTHER), at=0), offer(*SHARES), LeasesObserved(HOLDERS, at=1)):
        registry.apply(fact)
    watch._check()
    [first] = watch.found.values()

    registry.apply(SharesReleased(SHARES, at=2))
    registry.apply(LeasesObserved(HOLDERS, at=3))
    watch._check()
    [second] = watch.found.values()
    assert second is not first

    watch._check()
    assert list(watch.found.values()) == [second]
    assert watch.found[second.holder] is second


@pytest.mark.parametrize(
    ("by_cdi", "claimed", "reported"),
    [
        ((0, 1), (), False),
        ((0, 1), (0,), False),
        ((0, 1), (0, 1), False),
        ((0,), (), True),
        ((0,), (0,), True),
    ],
)
def test_a_container_with_all_gpus_by_cdi_is_not_reported(
    by_cdi: tuple[int, ...], claimed: tuple[int, ...], *, reported: bool
) -> None:
    """A pool with DRA gives its GPUs by CDI; beside it, a variable may be lost."""
    registry = Registry()
    watch = MixedRequestWatch(registry, lambda: True)
    registry.apply(GpusFound((ONE, OTHER), at=0))
    apis = {SHARES[number].resource: Api.DRA for number in by_cdi}
    registry.apply(replace(offer(*SHARES), apis=apis))
    claims = [SHARES[number] for number in claimed]
    if claims:
        registry.apply(SharesClaimed(tuple(claims), at=1, resource_claim=CLAIM))
    holders = {other.id: HOLDER for other in SHARES if other not in claims}
    of_claims = {(CLAIM.uid, claim.id): (HOLDER,) for claim in claims}
    registry.apply(LeasesObserved(holders, at=2, of_claims=of_claims))
    watch._check()

    leases = [lease for state in registry.snapshot.gpus.values() for lease in state.leases.values()]
    assert [lease.holder for lease in leases] == [HOLDER, HOLDER]
    assert bool(watch.found) == reported
