"""Every possible rule for a small set of profiles, at both measures of `mig_placement`.

Shows what no rule can have: for each rule, the orders of arrival that it places in full, and the
memory that it places in the long run at its worst mix and load, each as a part of what the best
rule for this measure alone gets. A rule sees the present instances alone.

$ python -m bench.every_rule 2g.10gb 3g.20gb 4g.20gb
"""

import argparse
import sys
from typing import Final

from bench.mig_placement import LOADS, MIXES, boards
from bench.optimum import Process
from bench.orders import best_orders
from tests.backends.mig.tables import only

MOST: Final = 10_000
"""The most rules that are tried: some minutes."""


def main() -> int:
    """Print a table of the rules that no other rule beats at both measures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("profiles", nargs="+", help="of an A100-40GB, such as 2g.10gb")
    profiles = parser.parse_args().profiles

    geometry = only(next(iter(boards().values())), *profiles)
    processes = [Process(geometry, mix(geometry), load) for mix in MIXES for load in LOADS]
    process = processes[0]  # all have the same rules
    if (count := process.count_rules()) > MOST:
        parser.error(f"{count} rules are more than {MOST}: name fewer profiles")

    orders = best_orders(geometry)
    best = [process.best() for process in processes]
    found = {
        (
            process.orders_by(rule) / orders,
            min(other.by_choices(rule) / most for other, most in zip(processes, best, strict=True)),
        )
        for rule in process.rules()
    }
    print(f"{count} rules; those that none beats at both:\n")
    print("| orders | churn, at worst |\n|---|---|")
    for placed, memory in sorted(found, reverse=True):
        if not any(a >= placed and b >= memory for a, b in found - {(placed, memory)}):
            print(f"| {placed:.2%} | {memory:.2%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
