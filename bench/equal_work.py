"""Compare offers by equal work: a few pods always wait, and a refused one comes again as it was.

The same pods come under each rule, as many as it places in the time; what a rule refuses is not
lost, as its controller creates it again. So the use of the GPUs compares the rules alone. It is
that of an hour without its first minutes, and its standard deviation is that of such hours.

$ python -m bench.equal_work
"""

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, stdev
from typing import Final

from bench import fraction_offers, mixed_offers
from bench.cluster_model import BackOff, Cluster, Node, Outcome, Pod, job_back_off
from bench.offers import Draw, fraction_request, mixed_request

GPUS: Final = (1, 2, 8)
WAITING: Final = 3
LONGEST_S: Final = 60
WARM_S: Final = 300.0
HOUR_S: Final = 3600.0
PAUSE_S: Final = 0.1
START_S: Final = 1.0
"""From a pod's admission to its containers."""
AGAIN_S: Final = 0.6
"""From a refusal to the next pod of a Deployment [measured: 100 in 64 s]."""
LATE_S: Final = 0.02

BACK_OFFS: Final[Mapping[str, BackOff]] = {
    "Deployments": lambda _: AGAIN_S,
    "Jobs": job_back_off,
}
_HEAD: Final = f"{'rule':22}{'refusals/placed':>16}{'use %':>8}{'difference':>12}{'deviation':>11}"


@dataclass(eq=False)
class Crowd(Cluster):
    """A cluster in which a few pods wait at any time.

    Attributes:
        draw: chooses the next pod's request.
        chance: of these choices.
        arrived: the pods so far, without those that replace refused ones.
    """

    draw: Draw = field(kw_only=True)
    chance: random.Random = field(kw_only=True)
    arrived: int = 0

    def keep_waiting(self) -> None:
        """Add a pod whenever too few wait."""
        if self.arrived - self.admitted < WAITING:
            resource, size, _ = self.draw(self.chance)
            life = START_S + self.chance.randint(2, LONGEST_S)
            self._enqueue(Pod(resource, size, self.now, life, self.chance.random() < 1 / 2))
            self.arrived += 1
        self._in(PAUSE_S, self.keep_waiting)


def main() -> int:
    """Print a table for each kind of node, of controllers and number of GPUs."""
    parser = argparse.ArgumentParser(prog="python -m bench.equal_work", description=__doc__)
    parser.add_argument("--hours", type=int, default=10, help="hours of each rule, 2 at least")
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    args = parser.parse_args()
    if args.hours < 2:
        parser.error("--hours: 2 at least")

    for gpus, (controllers, back_off) in itertools.product(args.gpus, BACK_OFFS.items()):
        rules = {name: partial(_fractions, name, gpus) for name in ("all", "exact")}
        print(f"\nfractions of {controllers}, {gpus} GPUs\n{_HEAD}")
        _compare(rules, partial(hour, fraction_request(gpus), back_off), args.hours)
        rules = {name: partial(_mixed, name, gpus) for name in ("all", "turns")}
        print(f"\nthree backends, {controllers}, {gpus} GPUs\n{_HEAD}")
        _compare(rules, partial(hour, mixed_request(gpus, 0.0), back_off), args.hours)
    return 0


def _fractions(rule: str, gpus: int) -> Node:
    return fraction_offers.Fractions(gpus, fraction_offers.RULES[rule])


def _mixed(rule: str, gpus: int) -> Node:
    some = [mixed_offers.Gpu(index) for index in range(gpus)]
    return mixed_offers.Mixed(some, mixed_offers.RULES[rule]())


def hour(draw: Draw, back_off: BackOff, node: Node, seed: int) -> Outcome:
    """Return the outcome of one hour, whose pods come by a seed."""
    chance = random.Random(seed)  # noqa: S311 - the same pods every time
    crowd = Crowd(node, LATE_S, announced=True, back_off=back_off, draw=draw, chance=chance)
    crowd.keep_waiting()
    return crowd.run((), WARM_S, HOUR_S)


def _compare(
    rules: Mapping[str, Callable[[], Node]], run: Callable[[Node, int], Outcome], hours: int
) -> None:
    """Print each rule's refusals and use, and the use that it has more than the first."""
    first: Sequence[float] = ()
    for name, make in rules.items():
        outcomes = [run(make(), seed) for seed in range(hours)]
        uses = [100 * outcome.use for outcome in outcomes]
        first = first or uses
        more = [use - other for use, other in zip(uses, first, strict=True)]
        refused = fmean(outcome.refusals for outcome in outcomes)
        compared = f"{fmean(more):>+12.2f}{stdev(more):>11.2f}" if uses is not first else ""
        print(f"{name:22}{refused:>16.3f}{fmean(uses):>8.1f}{compared}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
