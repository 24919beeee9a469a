"""Run pieces of the campaign one after the other.

A piece is a seed, so it can be run again. Without one it is the number of commits: every change
is tried with inputs that no change before it was tried with.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def commits() -> int:
    """Count the commits of this tree; return 0 without a history."""
    command = ["git", "rev-list", "--count", "HEAD"]
    counted = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)  # noqa: S603 - fixed
    return int(counted.stdout) if counted.returncode == 0 else 0


def main() -> int:
    """Run the pieces; stop at the first with a finding and print how to repeat it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--piece", type=int, help="the first (default: the number of commits)")
    parser.add_argument("--pieces", type=int, default=1, help="how many; 30 are about an hour")
    asked = parser.parse_args()
    first = commits() if asked.piece is None else asked.piece

    for piece in range(first, first + asked.pieces):
        print(f"piece {piece}", flush=True)  # noqa: T201 - a command line speaks so
        seed = ["--hypothesis-profile=piece", f"--hypothesis-seed={piece}"]
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", str(HERE), *seed]
        if status := subprocess.run(command, check=False).returncode:  # noqa: S603 - ourselves
            print(f"found by piece {piece}: make fuzz PIECE={piece}", file=sys.stderr)  # noqa: T201
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
