"""Run random schedules against real daemons, judged from outside; stop at the first with a fault.

A schedule is a list of steps that is drawn from a seed (`steps`). The rig (`rig`) makes them happen
to daemons that run as an operator starts them, beside a simulated kubelet, API server and driver.
The account (`account`) computes from those alone who holds what, and what must be on offer.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import anyio

from tests.chaos.kept import KEPT
from tests.chaos.rig import chaos
from tests.chaos.shrink import shrink
from tests.chaos.steps import Step, draw, story
from tests.fuzz.__main__ import commits


def faults(steps: Sequence[Step], plant: str = "", *, verbose: bool = False) -> list[str]:
    """Run a schedule; return what must not be."""

    async def run(folder: Path) -> list[str]:
        async with chaos(folder, plant) as live_chaos:
            await live_chaos.run(steps)
            if verbose or live_chaos.account.broken:
                print("\n".join(live_chaos.log), flush=True)  # noqa: T201 - a command line speaks so
            if live_chaos.account.broken:
                (Path(tempfile.gettempdir()) / "chaos-daemons.log").write_text(
                    "\n\n=====\n".join(each.log for each in live_chaos.daemons)
                )
            return live_chaos.account.broken

    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        return anyio.run(run, Path(folder))


def main() -> int:
    """Run schedules; return 1 after a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--piece", type=int, help="in place of a seed (default: number of commits)")
    parser.add_argument("--seed", type=int, help="of the first schedule; kept ones are left out")
    parser.add_argument("--minutes", type=float, default=1.0, help="no schedule begins later")
    parser.add_argument("--plant", type=Path, help="Python that every daemon runs first: a fault")
    parser.add_argument("--shrink", action="store_true", help="leave out steps")
    parser.add_argument("--verbose", action="store_true", help="print the story of each schedule")
    logging.disable()  # grpclib's, of connections that are cut on purpose
    asked = parser.parse_args()
    piece = commits() if asked.piece is None else asked.piece
    seed = piece * 1000 if asked.seed is None else asked.seed
    plant = asked.plant.read_text() if asked.plant else ""
    for name, steps in KEPT.items() if asked.seed is None else ():
        if not _passes(name, steps, asked, plant):
            return 1
    began = time.monotonic()
    while time.monotonic() - began < asked.minutes * 60:
        if not _passes(f"seed {seed}", draw(seed), asked, plant):
            return 1
        seed += 1
    return 0


def _passes(name: str, steps: Sequence[Step], asked: argparse.Namespace, plant: str) -> bool:
    """Run a schedule and print the outcome; return whether there is no fault."""
    began = time.monotonic()
    found = faults(steps, plant, verbose=asked.verbose)
    took = time.monotonic() - began
    print(f"{name}: {took:.0f} s, {len(found)} faults", flush=True)  # noqa: T201
    if found and asked.shrink:
        steps = shrink(steps, lambda shorter: bool(faults(shorter, plant)))
    if found:
        print(story(steps), *found, sep="\n")  # noqa: T201
    return not found


if __name__ == "__main__":
    sys.exit(main())
