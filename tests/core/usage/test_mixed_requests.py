"""Each pod with a mixed request is reported, also of one name with an earlier pod."""

from metagpu.core.model.shares import Holder
from metagpu.core.state.facts import GpusFound, LeasesObserved, SharesReleased
from metagpu.core.state.registry import Registry
from metagpu.core.usage.mixed_requests import MixedRequestWatch
from tests.rigs.build import gpu, offer, share

ONE, OTHER = gpu(0), gpu(1)
SHARES = (share(ONE, 0), share(OTHER, 0, resource="x.y/other"))
HOLDERS = dict.fromkeys((it.id for it in SHARES), Holder("team", "web-0", "main"))


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
