"""Ledgers of a GPU, with some facts and looks behind them."""

from collections.abc import Iterable

from metagpu.backends.mig.ledger import Ledger, Terms
from metagpu.core.facts import Fact, GpusFound, LeasesObserved
from metagpu.core.model import Holder, Share
from metagpu.core.snapshot import GpuState
from tests.backends.mig.gpus import instance, mig_gpu
from tests.backends.mig.test_mig import backend
from tests.build import after, offer

GPU = mig_gpu()
SHARES = backend().shares(GPU)
POD = Holder("default", "pod", "main")
TWO = instance(GPU, "2g.10gb@4", 5)
NOBODY: dict[int | None, list[int]] = {}


def share(slot: str) -> Share:
    """Find a share by its profile and slice."""
    return next(it for it in SHARES if it.id.endswith(f"::{slot}"))


def state(*facts: Fact) -> GpuState:
    """Give what is known of the GPU after some facts."""
    return after(GpusFound((GPU,), at=0), offer(*SHARES), *facts).gpus[GPU.id]


def observed(*slots: str, others: Iterable[str] = ()) -> LeasesObserved:
    """Let the kubelet tell of pods that hold these, and of what others hold elsewhere."""
    held = [share(slot).id for slot in slots] + [type(share("1g.5gb@0").id)(it) for it in others]
    return LeasesObserved(dict.fromkeys(held, POD), at=5)


def ledger_of(*facts: Fact, looked: bool = True, keep_warm: float = 10) -> Ledger:
    """Begin a ledger, with the first look at an empty GPU behind it."""
    terms = Terms(frozenset(("1g.5gb", "2g.10gb", "3g.20gb")), keep_warm, 10)
    made = Ledger(terms, "mig", state(*facts))
    if looked:
        made.take_in([], 0)
    return made


def ours(it: Ledger) -> None:
    """Take an instance of ours in."""
    it.ours.add(it_uuid())
    it.take_in([TWO], 1)


def it_uuid() -> str:
    """Give the uuid of the instance that most tests are about."""
    return TWO.computes[0].uuid
