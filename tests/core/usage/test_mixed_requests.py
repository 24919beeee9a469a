"""Each pod with a mixed request is reported, also of one name with an earlier pod."""

import pytest
from msgspec.structs import replace

from metagpu.core.model.offers import Api
from metagpu.core.model.shares import Holder, ResourceClaimRef
from metagpu.core.state.facts import GpusFound, LeasesObserved, SharesClaimed, SharesReleased
from metagpu.core.state.registry import Registry
from metagpu.core.usage.mixed_requests import MixedRequestWatch
from tests.rigs.build import gpu, offer, share

ONE, OTHER = gpu(0), gpu(1)
SHARES = (share(ONE, 0), share(OTHER, 0, resource="x.y/other"))
HOLDER = Holder("team", "web-0", "main")
HOLDERS = dict.fromkeys((it.id for it in SHARES), HOLDER)
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
    apis = {SHARES[it].resource: Api.DRA for it in by_cdi}
    registry.apply(replace(offer(*SHARES), apis=apis))
    claims = [SHARES[it] for it in claimed]
    if claims:
        registry.apply(SharesClaimed(tuple(claims), at=1, resource_claim=CLAIM))
    holders = {it.id: HOLDER for it in SHARES if it not in claims}
    of_claims = {(CLAIM.uid, it.id): (HOLDER,) for it in claims}
    registry.apply(LeasesObserved(holders, at=2, of_claims=of_claims))
    watch._check()

    leases = [it for state in registry.snapshot.gpus.values() for it in state.leases.values()]
    assert [it.holder for it in leases] == [HOLDER, HOLDER]
    assert bool(watch.found) == reported
