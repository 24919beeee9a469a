"""Compare rules of what a node offers: how many pods fail, and how much of the GPUs is used.

Pods come and go by chance, in bursts, on a model of scheduler and kubelet (`cluster_model.py`):
fractions of mixed sizes (`fraction_offers.py`), then a pool of three backends (`mixed_offers.py`).

$ python -m bench.offers
"""

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from bench import fraction_offers, mixed_offers
from bench.cluster_model import POLLED_RELEASE_S, RELEASE_S, Cluster, Node, Outcome, Pod

GPUS: Final = (1, 2, 8)
LOADS: Final = (0.3, 0.8, 1.1)
DELAYS: Final = (0.02, 0.1, None)
SIZES: Final = tuple(range(10, 151, 10))
STAY_S: Final = 60.0
BURST: Final = 4
_SEED: Final = 7
_HEAD: Final = f"{'rule':22}{'refusals/placed':>16}{'use %':>8}{'wait s':>8}{'95 % s':>8}"

Draw = Callable[[random.Random], tuple[str, int, float]]
"""Returns the resource and size of a random request, and the GPUs that it takes."""


def main() -> int:
    """Print a table for each load, number of GPUs and delay of the Node's numbers."""
    parser = argparse.ArgumentParser(prog="python -m bench.offers", description=__doc__)
    parser.add_argument("--pods", type=int, default=600, help="pods of each run")
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--doubles", type=float, default=0.0, metavar="PART",
                        help="the part of the requests of whole GPUs that are for two")  # fmt: skip
    args = parser.parse_args()

    for gpus, load, delay in itertools.product(args.gpus, args.loads, DELAYS):
        where = f"{gpus} GPUs, load {load}, Node {_delay_text(delay)}"
        for announced in (False, True) if delay else (False,):
            ends = ", ends are known before" if announced else ""
            print(f"\nfractions, {where}{ends}\n{_HEAD}")
            pods = arrivals(args.pods, fraction_request(gpus), gpus, load)
            for name, rule in fraction_offers.RULES.items():
                node = fraction_offers.Fractions(gpus, rule)
                release = RELEASE_S if announced else POLLED_RELEASE_S
                print(_row(name, run(node, pods, delay, release, announced=announced)), flush=True)
        print(f"\nthree backends, {where}\n{_HEAD}")
        pods = arrivals(args.pods, mixed_request(gpus, args.doubles), gpus, load)
        for name, make in mixed_offers.RULES.items():
            some = [mixed_offers.Gpu(index) for index in range(gpus)]
            node_of_three = mixed_offers.Mixed(some, make(), by_kubelet=delay is None)
            print(_row(name, run(node_of_three, pods, delay)), flush=True)
    return 0


def run(
    node: Node,
    pods: Callable[[], Sequence[Pod]],
    delay: float | None,
    release: float = RELEASE_S,
    *,
    announced: bool = False,
) -> Outcome:
    """Run the pods against a node; the first tenth of the time is not counted."""
    arriving = pods()
    ends = arriving[-1].arrives
    cluster = Cluster(node, delay, announced=announced, release=release)
    return cluster.run(arriving, ends / 10, ends)


def fraction_request(gpus: int) -> Draw:
    """Return the requests of fractions that a node of some GPUs can serve."""
    sizes = [size for size in SIZES if size <= gpus * fraction_offers.WHOLE]

    def draw(chance: random.Random) -> tuple[str, int, float]:
        size = chance.choice(sizes)
        return fraction_offers.RESOURCE, size, size / fraction_offers.WHOLE

    return draw


def mixed_request(gpus: int, doubles: float) -> Draw:
    """Return the requests of three backends, `doubles` of the whole GPUs in pairs."""

    def draw(chance: random.Random) -> tuple[str, int, float]:
        name = chance.choice(list(mixed_offers.EACH))
        size = mixed_offers.REQUESTS[name]
        if name == "whole" and gpus > 1 and chance.random() < doubles:
            size = 2
        return name, size, size / mixed_offers.EACH[name]

    return draw


def arrivals(count: int, draw: Draw, gpus: int, load: float) -> Callable[[], Sequence[Pod]]:
    """Return what makes the same random pods again, in bursts, for a load of the GPUs."""

    def pods(chance: random.Random) -> Iterator[Pod]:
        mean = sum(draw(chance)[2] for _ in range(2000)) / 2000
        gap, now, made = STAY_S * mean / (load * gpus), 0.0, 0
        while made < count:
            burst = chance.randint(1, 2 * BURST - 1)
            now += chance.expovariate(1 / (gap * burst))
            for number in range(burst):
                resource, size, _ = draw(chance)
                stays = chance.expovariate(1 / STAY_S)
                yield Pod(resource, size, now + 0.005 * number, stays, chance.random() < 1 / 2)
            made += burst

    return lambda: list(pods(random.Random(_SEED)))  # noqa: S311 - the same pods every time


def _delay_text(delay: float | None) -> str:
    return "by the kubelet" if delay is None else f"{delay:g} s late"


def _row(name: str, outcome: Outcome) -> str:
    return (
        f"{name:22}{outcome.refusals:>16.3f}{100 * outcome.use:>8.1f}{outcome.wait:>8.1f}"
        f"{outcome.late:>8.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
