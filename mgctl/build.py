"""The build of `mgctl` for containers: one static program for each kind of processor.

python mgctl/build.py [--check | --verify]     needs the package ziglang: requirements/build.lock
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parent
SOURCES = ("mgctl.c", "hook.c", "hook.h")
PROGRAMS = FOLDER.parent / "metagpu" / "programs"
MACHINES = ("x86_64", "aarch64")
PACKAGE = PROGRAMS.parent
COMMANDS = PACKAGE / "plugins" / "pod_api" / "command.py"
"""The daemon's side, whose help and commands the program has for the time without a daemon."""
FLAGS = ("-static", "-Os", "-s", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


def program(machine: str) -> Path:
    """Return the path of the program for a machine."""
    return PROGRAMS / f"mgctl-{machine}"


def is_fresh(machine: str) -> bool:
    """Return whether the program was built after the last change."""
    built = program(machine)
    sources = (*map(FOLDER.joinpath, SOURCES), Path(__file__), COMMANDS)
    newest = max(path.stat().st_mtime for path in sources)
    return built.exists() and built.stat().st_mtime >= newest


def build(machine: str) -> None:
    """Build the program for a machine; a half-built one never has its name."""
    PROGRAMS.mkdir(exist_ok=True)
    half = program(machine).with_suffix(".new")
    compile_to(half, machine, FOLDER)
    half.replace(program(machine))


def compile_to(output: Path, machine: str, sources: Path, **environment: str) -> None:
    """Compile the sources for a machine, with further variables of the environment."""
    target = ("-target", f"{machine}-linux-musl")
    with TemporaryDirectory() as folder:
        Path(folder, "usage.h").write_text(usage())
        flags = (*target, *FLAGS, "-I", folder)
        programs = [sources / name for name in SOURCES if name.endswith(".c")]
        command = [sys.executable, "-m", "ziglang", "cc", *flags, *programs, "-o", output]
        subprocess.run(command, check=True, env={**os.environ, **environment})  # noqa: S603 - our own compiler, our own source


def usage() -> str:
    """Return the header with the texts of the daemon's side."""
    texts = {**constants(COMMANDS), **constants(PACKAGE / "__init__.py")}
    words = ", ".join(json.dumps(word) for word in texts["WORDS"])
    return (
        f"#define HELP {json.dumps(texts['HELP'])}\n"
        f"#define VERSION {json.dumps(texts['__version__'])}\n"
        f"#define WORDS {words}\n"
    )


def constants(module: Path) -> dict[str, object]:
    """Return the literals among the constants of a module, which need not be installed."""
    found = {}
    for node in ast.parse(module.read_text()).body:
        match node:
            case ast.AnnAssign(target=ast.Name(name), value=ast.Constant() | ast.Tuple() as value):
                found[name] = ast.literal_eval(value)
            case ast.Assign(targets=[ast.Name(name)], value=ast.Constant() as value):
                found[name] = ast.literal_eval(value)
    return found


def differs(machine: str) -> bool:
    """Return whether a build elsewhere, which shares nothing with the first, has other bytes."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        output = folder / "mgctl"
        for source in SOURCES:
            shutil.copy(FOLDER / source, folder)
        # The compiler keeps what it has built, its libc too: from there it would only copy.
        caches = {f"ZIG_{it}_CACHE_DIR": str(folder / it) for it in ("GLOBAL", "LOCAL")}
        compile_to(output, machine, folder, **caches)
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
