"""Builds the `mgctl` of containers: one static program for each kind of processor.

python mgctl/build.py [--check]     needs the package ziglang: `pip install metagpu[build]`
"""

import argparse
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("mgctl.c")
PROGRAMS = SOURCE.parents[1] / "metagpu" / "programs"
MACHINES = ("x86_64", "aarch64")
FLAGS = ("-static", "-Os", "-s", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


def program(machine: str) -> Path:
    """Say where the program for a machine stands."""
    return PROGRAMS / f"mgctl-{machine}"


def is_fresh(machine: str) -> bool:
    """Say whether it was built after the last change."""
    built = program(machine)
    newest = max(SOURCE.stat().st_mtime, Path(__file__).stat().st_mtime)
    return built.exists() and built.stat().st_mtime >= newest


def build(machine: str) -> None:
    """Build the program for a machine; it is there at once or not at all."""
    PROGRAMS.mkdir(exist_ok=True)
    half = program(machine).with_suffix(".new")
    target = ("-target", f"{machine}-linux-musl")
    command = [sys.executable, "-m", "ziglang", "cc", *target, *FLAGS, SOURCE, "-o", half]
    subprocess.run(command, check=True)  # noqa: S603 - our own compiler, our own source
    half.replace(program(machine))


def main() -> int:
    """Build what is not fresh; with `--check`, only say whether that is anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="build nothing, fail if stale")
    check = parser.parse_args().check
    stale = [machine for machine in MACHINES if not is_fresh(machine)]

    for machine in stale:
        if not check:
            print(f"building mgctl for {machine}; the first time takes minutes")  # noqa: T201
            build(machine)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
