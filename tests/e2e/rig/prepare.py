"""Gather the programs of a node, or print a line for each that is missing.

The runtime's programs come out of the distribution's packages, which are
downloaded and unpacked into the cache but never installed: no service of theirs
starts, and a container engine that the machine already has stays as it is.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.rig.build import build_programs, find_go, missing_go_hint
from tests.e2e.rig.errors import MissingError, RigError
from tests.e2e.rig.tools import DISTRIBUTION_PROGRAMS, Tools, distribution_path

PACKAGES = ("runc", "etcd-server", "containernetworking-plugins", "busybox-static")
"""Debian's and Ubuntu's names of the unpacked packages."""

HOST_PROGRAMS = {
    "ip": "iproute2",
    "openssl": "openssl",
    "mount": "mount",
    "umount": "mount",
    "gcc": "gcc libc6-dev",
}
"""Programs that the machine itself must have -> their packages."""


def prepare() -> Tools:
    """Provide every program of the node; return their folders.

    Raises:
        MissingError: this machine lacks parts that the rig cannot provide.
        RigError: a download or a build failed.
    """
    tools = Tools.cached()
    lacking = _lacking(tools)
    if lacking:
        raise MissingError(lacking)
    _install_host_programs()
    unpack_distribution(tools)
    for number, programs in enumerate(tools.built, start=1):
        if programs.missing():
            print(
                f"{programs.name} {programs.version} ({number} of {len(tools.built)})", flush=True
            )
            build_programs(programs)
    return tools


def _lacking(tools: Tools) -> list[str]:
    """Return a line for each part that only the user can provide."""
    lines = []
    if sys.platform != "linux":
        lines.append("linux: a node runs on nothing else; use a virtual machine")
    elif os.geteuid() != 0:
        lines.append("root: a kubelet mounts and makes cgroups; run it with sudo")
    missing = tools.missing()
    absent = [name for name in HOST_PROGRAMS if shutil.which(name) is None]
    if (set(missing) & set(DISTRIBUTION_PROGRAMS) or absent) and not shutil.which("apt-get"):
        wanted = ", ".join(
            [*(PACKAGES if missing else ()), *sorted({HOST_PROGRAMS[a] for a in absent})]
        )
        lines.append(f"apt-get: run on Debian 12 or newer, or Ubuntu; it provides {wanted}")
    if set(missing) - set(DISTRIBUTION_PROGRAMS) and find_go() is None:
        lines.append(missing_go_hint())
    return lines


def _install_host_programs() -> None:
    absent = [package for name, package in HOST_PROGRAMS.items() if not shutil.which(name)]
    if absent:
        packages = sorted({name for package in absent for name in package.split()})
        _apt("update", "-q")
        _apt("install", "-q", "-y", "--no-install-recommends", *packages)


def unpack_distribution(tools: Tools) -> None:
    """Fill `tools.distribution`, or leave it as it was."""
    target = tools.distribution
    if not set(tools.missing()) & set(DISTRIBUTION_PROGRAMS):
        return
    print(f"unpacking {', '.join(PACKAGES)} ...", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    _apt("update", "-q")
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=target.parent) as folder:
        downloads, fresh = Path(folder) / "packages", Path(folder) / "root"
        downloads.mkdir()
        # The download runs as root: apt's own download user may not enter a home folder.
        _apt("-o", "APT::Sandbox::User=root", "download", "-q", *PACKAGES, cwd=downloads)
        for package in sorted(downloads.glob("*.deb")):
            _run(["dpkg-deb", "-x", str(package), str(fresh)])
        _require_runnable(fresh)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)


def _require_runnable(root: Path) -> None:
    """Raise unless the unpacked programs start: a missing library shows here."""
    for name in ("runc", "etcd"):
        command = [str(distribution_path(root, name)), "--version"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise RigError(f"{name} does not start on this machine: {answer.stderr.strip()}")


def _apt(*arguments: str, cwd: Path | None = None) -> None:
    _run(["apt-get", *arguments], cwd=cwd)


def _run(command: list[str], cwd: Path | None = None) -> None:
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, cwd=cwd, env=quiet, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RigError(f"`{' '.join(command)}` failed:\n{(done.stdout + done.stderr)[-2000:]}")
