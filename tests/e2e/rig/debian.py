"""Programs of Debian's packages: those in PATH, or unpacked into the cache, not installed."""

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.go_programs import cache_root
from tests.e2e.rig.tools import distribution_path

DOWNLOAD_S = 180


def provide(program: str, package: str, *more: str) -> str:
    """Return the path of a program; download Debian's packages of it if need be.

    Raises:
        RigError: this machine has neither the program nor Debian's archive.
    """
    if there := shutil.which(program):
        return there
    root = cache_root() / package
    if not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=root.parent) as folder:
            _unpack((package, *more), Path(folder)).rename(root)
    return str(distribution_path(root, program))


def _unpack(packages: Sequence[str], work: Path) -> Path:
    if shutil.which("apt-get") is None:
        raise RigError(f"there is no apt-get here to download Debian's {packages[0]}")
    _run(["apt-get", "update", "-q"], work)
    # The download runs as root: apt's own download user may not enter a home folder.
    _run(["apt-get", "-o", "APT::Sandbox::User=root", "download", "-q", *packages], work)
    for archive in work.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(archive), str(work / "root")], work)
    return work / "root"


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=DOWNLOAD_S
    )
    if done.returncode != 0:
        raise RigError(f"`{' '.join(command)}` failed: {(done.stdout + done.stderr)[-500:]}")
