"""Measure the daemon, and print and store the numbers beside their targets."""

import argparse
import sys
import time
from pathlib import Path
from typing import Final

from bench import machine
from bench.figures import Report
from bench.measure import MEASUREMENTS
from bench.plan import Plan
from bench.table import table, verdict

RESULTS: Final = Path(__file__).parent / "results"
_PIECES: Final = 10


def main() -> int:
    """Run the bench; a missed target is reported and is no failure."""
    args = _arguments()
    chosen = args.only or MEASUREMENTS
    if args.piece is not None:
        args.quick, chosen = True, [*MEASUREMENTS][args.piece % _PIECES :: _PIECES]
    plan = Plan(quick=args.quick, before=args.before)
    out = _out(args)
    compared = args.compare or _newest(out)
    earlier = Report.read(compared) if compared else None  # before minutes are spent
    if machine.busy():
        plan.report("this machine is busy: measured times will be too long")

    described = machine.describe()
    report = Report(machine=described, figures=[], quick=args.quick)
    for name in MEASUREMENTS:
        if name in chosen:
            report.figures.extend(MEASUREMENTS[name](plan))
            if out:  # a run that is ended keeps the groups that it has measured
                report.write(out)

    print(f"\n{_shown(described)}\n")
    print(table(report, earlier))
    print(f"\n{verdict(report)}")
    if compared:
        print(f"Changes are against {compared}.")
    if args.quick:
        print("This was a smoke run of few calls: it only shows that the bench works.")
    if out:
        print(f"Written to {out}.")
    else:
        print("Not written: only a full run writes its results by default; use --out FILE.")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=tuple(MEASUREMENTS),
        metavar="NAME",
        help=f"measure only some of: {', '.join(MEASUREMENTS)}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: few calls, numbers without meaning"
    )
    parser.add_argument(
        "--piece",
        type=int,
        metavar="N",
        help=f"a smoke run of some groups: of all in {_PIECES} runs with successive numbers",
    )
    parser.add_argument(
        "--before",
        type=lambda text: Path(text).resolve(),
        metavar="PATH",
        help="another commit's source tree; `before`, `starts` and `commands` alternate",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the file to write (default for a full run: bench/results/DATE.json)",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="an earlier run to compare with (default: the newest in bench/results)",
    )
    return parser.parse_args()


def _out(args: argparse.Namespace) -> Path | None:
    if args.out or args.quick or args.only:
        return Path(args.out) if args.out else None
    return RESULTS / f"{time.strftime('%Y-%m-%d')}.json"


def _newest(out: Path | None) -> Path | None:
    """Find the newest earlier run; files are named by their dates."""
    others = [file for file in RESULTS.glob("*.json") if not (out and _same(file, out))]
    return max(others, default=None, key=lambda file: file.name)


def _same(file: Path, other: Path) -> bool:
    return file.resolve() == other.resolve()


def _shown(described: dict[str, object]) -> str:
    parts = dict(described)
    versions = parts.pop("versions")
    assert isinstance(versions, dict)
    facts = ", ".join(f"{name} {value}" for name, value in parts.items())
    return f"{facts}\n{', '.join(f'{name} {value}' for name, value in versions.items())}"


if __name__ == "__main__":
    sys.exit(main())
