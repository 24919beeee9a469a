"""Write the packages `pb` of metagpu from the .proto files beside this script.

    python proto/generate.py            write
    python proto/generate.py --check    compare only; exit 1 when the files differ

Generated code belongs to one minor version of betterproto2: the compiler and the runtime are
pinned together in pyproject.toml.
"""

# ruff: noqa: INP001  (a script that lives beside what it reads, not a package)

import argparse
import contextlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent
ROOT = PROTO.parent
OF_THE_SIMULATOR = ("cel.proto",)
TARGETS = {
    "metagpu/plugins/kubelet/pb": sorted(
        path.name for path in PROTO.glob("*.proto") if path.name not in OF_THE_SIMULATOR
    ),
    "metagpu/sim/allocation/pb": OF_THE_SIMULATOR,
}
"""The .proto files of each package."""


def generate(target: Path, files: Sequence[str]) -> None:
    """Compile .proto files of this directory into `target`, which must exist.

    Raises:
        SystemExit: protoc or its betterproto2 plugin failed; they print why.
    """
    scripts = sysconfig.get_path("scripts")
    os.environ["PATH"] = os.pathsep.join((scripts, os.environ.get("PATH", os.defpath)))
    with contextlib.chdir(PROTO):  # the plugin formats with the `ruff` on PATH, as set up here
        status = protoc.main(
            [
                "protoc",
                f"--proto_path={PROTO}",
                f"--plugin={scripts}/protoc-gen-python_betterproto2",
                f"--python_betterproto2_out={target}",
                "--python_betterproto2_opt=client_generation=async,server_generation=async",
                *files,
            ]
        )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")


def differences(one: Path, other: Path) -> list[str]:
    """Name the Python files that are not the same, byte for byte, below both directories."""
    ours, theirs = _sources(one), _sources(other)
    return sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )


def _sources(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.py")}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Generate the protocol code from proto/*.proto.")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    check: bool = parser.parse_args(arguments).check
    stale = [path for name, files in TARGETS.items() for path in _write(name, files, check=check)]
    for path in stale:
        sys.stderr.write(f"{path}: not what proto/ generates\n")
    if stale:
        sys.stderr.write("run `python proto/generate.py` and commit the result\n")
    return 1 if stale else 0


def _write(package: str, files: Sequence[str], *, check: bool) -> list[str]:
    """Write a package, or return the files of it that differ."""
    target = ROOT / package
    with tempfile.TemporaryDirectory() as name:
        fresh = Path(name)
        generate(fresh, files)
        if check:
            return [f"{package}/{path}" for path in differences(target, fresh)]
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(fresh, target)
        target.chmod(0o755)  # a temporary folder is its owner's alone, and its mode was copied too
    return []


if __name__ == "__main__":
    sys.exit(main())
