"""Compare the placement of MIG instances with first fit and with the best possible rule.

For every set of profiles of every board: the orders of arrival that are placed in full
(`orders.py`), and the memory that is placed while pods come and go for ever (`optimum.py`). All
results are exact. It takes some ten minutes; `--every 20` takes one of twenty sets.

$ python -m bench.mig_placement
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Final, NamedTuple

from bench import arrivals
from bench.optimum import Process
from bench.orders import best_orders, placed_orders
from metagpu.backends.mig.profiles import MigGeometry
from tests.backends.mig.tables import GEOMETRIES, only

LOADS: Final = (0.3, 0.7, 1.2)
MIXES: Final = (arrivals.even, arrivals.inverse)
TOLERANCE: Final = 0.0005
"""Of the best rule's result: how far apart two results are that count as equal."""


class Comparison(NamedTuple):
    """The planner and first fit, each as a part of the best rule's result.

    Attributes:
        case: the profiles, and how pods arrive.
    """

    case: str
    planner: float
    first_fit: float


def boards() -> Mapping[str, MigGeometry]:
    """Return one geometry for the boards that differ in names alone, by the boards' names."""
    found: dict[tuple[tuple[int, ...], ...], tuple[list[str], MigGeometry]] = {}
    for name, geometry in GEOMETRIES.items():
        masks = tuple(
            tuple(geometry.masks[placed] for placed in profile.placed_profiles)
            for profile in geometry.profiles
        )
        found.setdefault(masks, ([], geometry))[0].append(name)
    return {", ".join(names): geometry for names, geometry in found.values()}


def profile_sets(geometry: MigGeometry) -> Iterator[MigGeometry]:
    """Yield the geometry with each set of its profiles; of equal profiles with the first alone."""
    kinds = {
        frozenset(geometry.masks[placed] for placed in profile.placed_profiles): profile.name
        for profile in reversed(geometry.profiles)
    }
    names = [profile.name for profile in geometry.profiles if profile.name in kinds.values()]
    for count in range(1, len(names) + 1):
        for chosen in combinations(names, count):
            yield only(geometry, *chosen)


def orders(geometry: MigGeometry) -> Comparison:
    """Compare the orders of arrival that are placed in full."""
    best = best_orders(geometry)
    return Comparison(
        _names(geometry),
        placed_orders(geometry, arrivals.planned) / best,
        placed_orders(geometry, arrivals.first_fit) / best,
    )


def churn(geometry: MigGeometry) -> Iterator[Comparison]:
    """Compare the memory placed in the long run, for each mix and load."""
    for mix in MIXES:
        for load in LOADS:
            process = Process(geometry, mix(geometry), load)
            best = process.best()
            yield Comparison(
                f"{_names(geometry)}, {mix.__name__}, load {load}",
                process.by(arrivals.planned) / best,
                process.by(arrivals.first_fit) / best,
            )


def main() -> int:
    """Print a table of all boards, with the lowest results and the cases below first fit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="one of so many sets of profiles")
    every = parser.parse_args().every

    print(
        "| boards | sets of profiles | | planner: lowest, mean | first fit: lowest, mean | below |"
    )
    print("|---|---|---|---|---|---|")
    for name, geometry in boards().items():
        chosen = list(profile_sets(geometry))[::every]
        _report(name, len(chosen), "orders", [orders(mig_geometry) for mig_geometry in chosen])
        _report(
            name,
            len(chosen),
            "churn",
            [found for mig_geometry in chosen for found in churn(mig_geometry)],
        )
    return 0


def _report(name: str, count: int, what: str, found: Sequence[Comparison]) -> None:
    below = [other for other in found if other.planner < other.first_fit - TOLERANCE]
    planner = _row([other.planner for other in found])
    first_fit = _row([other.first_fit for other in found])
    print(f"| {name} | {count} | {what} | {planner} | {first_fit} | {len(below)} |", flush=True)
    for comparison in sorted(found, key=lambda one: one.planner)[:3] + below:
        print(
            f"  {comparison.case}: {comparison.planner:.4f}, first fit {comparison.first_fit:.4f}",
            file=sys.stderr,
        )


def _row(parts: Sequence[float]) -> str:
    return f"{100 * min(parts):.2f} %, {100 * fmean(parts):.2f} %"


def _names(geometry: MigGeometry) -> str:
    return " ".join(profile.name for profile in geometry.profiles)


if __name__ == "__main__":
    sys.exit(main())
