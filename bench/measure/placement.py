"""The placement of MIG instances: placed pods, and the duration of a choice."""

import itertools
import time
from typing import Final

from bench import arrivals
from bench.arrivals import Node, Rule
from bench.figures import Figure, Samples
from bench.optimum import Process
from bench.plan import Plan
from metagpu.backends.mig.placement import choose_placements
from metagpu.core.model.shares import Share
from tests.backends.mig.tables import A100_40, only

GPUS: Final = 4
LOADS: Final = (0.5, 0.7, 0.9, 1.2)
_MANY: Final = 16
_SEED: Final = 2026
_RULES: Final[dict[str, Rule]] = {
    "planner": arrivals.planned,
    "first fit": arrivals.first_fit,
    "lowest start": arrivals.lowest_start,
    "no preference": arrivals.by_chance(_SEED),
}


def placement(plan: Plan) -> list[Figure]:
    """Measure the planner beside simpler rules, on the same pods."""
    return [
        *itertools.chain(*[_placed(plan, load) for load in LOADS]),
        _of_the_best(plan),
        _time(plan),
    ]


def _placed(plan: Plan, load: float) -> list[Figure]:
    count = plan.count(20_000, 5000)
    mix = arrivals.inverse(A100_40)
    pods = arrivals.trace(A100_40, gpus=GPUS, mix=mix, load=load, count=count, seed=_SEED)
    rates = {
        name: 100 * sum(arrivals.placed(arrivals.node(A100_40, GPUS), pods, rule)) / count
        for name, rule in _RULES.items()
    }

    summary = ", ".join(f"{name} {rate:.2f} %" for name, rate in rates.items())
    plan.report(f"placement: at load {load} {summary}")
    best = max(rate for name, rate in rates.items() if name != "planner")
    return [
        Figure(
            name=f"MIG pods placed at load {load}: {name}",
            unit="%",
            measured=rate,
            target=best if name == "planner" else None,
            better="higher",
            calls=count,
        )
        for name, rate in rates.items()
    ]


def _of_the_best(plan: Plan) -> Figure:
    """Compare the planner with the best possible rule, on one GPU with five profiles."""
    plan.report("placement: the best of all rules")
    geometry = only(A100_40, "1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")
    one = Process(geometry, arrivals.inverse(geometry), load=0.7)
    return Figure(
        name="MIG memory placed on one GPU: planner to the best rule",
        unit="%",
        measured=100 * one.by(arrivals.planned) / one.best(),
        target=99.9,
        better="higher",
        calls=1,
    )


def _time(plan: Plan) -> Figure:
    """Time the choice among 16 GPUs while pods come and go."""
    on = arrivals.node(A100_40, _MANY)
    samples = Samples()

    def timed(node: Node, profile: str) -> Share | None:
        candidates = arrivals.candidates(node, profile)
        began = time.perf_counter()
        chosen = choose_placements(1, candidates)
        samples.seconds.append(time.perf_counter() - began)
        return chosen[0] if chosen else None

    mix = arrivals.inverse(A100_40)
    count = plan.count(20_000, 2000)
    pods = arrivals.trace(A100_40, gpus=_MANY, mix=mix, load=0.9, count=count, seed=_SEED)
    sum(arrivals.placed(on, pods, timed))
    return samples.figure(f"MIG: choice among {_MANY} GPUs", target=2000, unit="us")
