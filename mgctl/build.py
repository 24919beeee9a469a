"""The build of `mgctl` for containers: one static program for each kind of processor.

python mgctl/build.py [--check | --verify]     needs the package ziglang: requirements/build.lock
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCE = Path(__file__).with_name("mgctl.c")
PROGRAMS = SOURCE.parents[1] / "metagpu" / "programs"
MACHINES = ("x86_64", "aarch64")
FLAGS = ("-static", "-Os", "-s", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


def program(machine: str) -> Path:
    """Return the path of the program for a machine."""
    return PROGRAMS / f"mgctl-{machine}"


def is_fresh(machine: str) -> bool:
    """Return whether the program was built after the last change."""
    built = program(machine)
    newest = max(SOURCE.stat().st_mtime, Path(__file__).stat().st_mtime)
    return built.exists() and built.stat().st_mtime >= newest


def build(machine: str) -> None:
    """Build the program for a machine; a half-built one never has its name."""
    PROGRAMS.mkdir(exist_ok=True)
    half = program(machine).with_suffix(".new")
    compile_to(half, machine, SOURCE)
    half.replace(program(machine))


def compile_to(output: Path, machine: str, source: Path, **environment: str) -> None:
    """Compile the source for a machine, with further variables of the environment."""
    target = ("-target", f"{machine}-linux-musl")
    command = [sys.executable, "-m", "ziglang", "cc", *target, *FLAGS, source, "-o", output]
    subprocess.run(command, check=True, env={**os.environ, **environment})  # noqa: S603 - our own compiler, our own source


def differs(machine: str) -> bool:
    """Return whether a build elsewhere, which shares nothing with the first, has other bytes."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        source, output = folder / SOURCE.name, folder / "mgctl"
        shutil.copy(SOURCE, source)
        # The compiler keeps what it has built, its libc too: from there it would only copy.
        caches = {f"ZIG_{it}_CACHE_DIR": str(folder / it) for it in ("GLOBAL", "LOCAL")}
        compile_to(output, machine, source, **caches)
        return output.read_bytes() != program(machine).read_bytes()


def main() -> int:
    """Build stale programs; with an option only look, and return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="build nothing, fail if stale")
    only.add_argument("--verify", action="store_true", help="build again elsewhere and compare")
    options = parser.parse_args()
    if options.verify:
        return report_differences()
    stale = [machine for machine in MACHINES if not is_fresh(machine)]

    for machine in stale:
        if not options.check:
            print(f"building mgctl for {machine}; the first time takes minutes")  # noqa: T201
            build(machine)
    return 1 if options.check and stale else 0


def report_differences() -> int:
    """Print for each machine whether its program is reproducible; return 1 if one is not."""
    different = {machine: differs(machine) for machine in MACHINES}
    for machine, it in different.items():
        print(f"mgctl-{machine}: {'OTHER BYTES' if it else 'the same bytes'} when built again")  # noqa: T201
    return int(any(different.values()))


if __name__ == "__main__":
    sys.exit(main())
