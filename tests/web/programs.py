"""Chromium and axe-core for tests of the page, kept in the cache.

Chromium is this machine's, or Debian's, unpacked with the libraries that this machine lacks; it is
not installed. axe-core finds faults of accessibility; npm downloads its one version.
"""

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import msgspec

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.go_programs import cache_root

PACKAGES = ("chromium-headless-shell", "fonts-inter")
AXE = "axe-core@4.14.1"
AXE_SHA512 = (
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
)
DOWNLOAD_S = 300
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
<dir>/usr/share/fonts</dir><dir>{root}/usr/share/fonts</dir><cachedir>{root}/fonts-cache</cachedir>
</fontconfig>
"""


class Chromium(msgspec.Struct, frozen=True):
    """A browser: its program, and the environment that it starts in."""

    program: str
    environment: dict[str, str]


def provide_chromium() -> Chromium:
    """Return this machine's Chromium or Debian's; download it if need be.

    Raises:
        RigError: this machine has neither, nor Debian's archive.
    """
    if there := shutil.which("chromium"):
        return Chromium(there, dict(os.environ))
    root = cache_root() / "chromium"
    if not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=root.parent) as folder:
            _unpack(Path(folder)).rename(root)
    fonts = root / "fonts.conf"
    fonts.write_text(FONTS.format(root=root))
    libraries = {str(file.parent) for file in (root / "usr" / "lib").rglob("*.so*")}
    return Chromium(
        str(root / "usr" / "lib" / "chromium" / "chromium-headless-shell"),
        {
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join(sorted(libraries)),
            "FONTCONFIG_FILE": str(fonts),
        },
    )


def _unpack(work: Path) -> Path:
    """Unpack the packages, and those that they need and this machine lacks."""
    if shutil.which("apt-get") is None:
        raise RigError("there is no apt-get here to download Debian's chromium")
    (work / "partial").mkdir()
    _run(["apt-get", "update", "-q"], work)
    # The download runs as root: apt's own download user may not enter a home folder.
    options = ["-o", "APT::Sandbox::User=root", "-o", f"Dir::Cache::archives={work}"]
    install = ["install", "-q", "-y", "--download-only", "--no-install-recommends"]
    _run(["apt-get", *options, *install, *PACKAGES], work)
    for package in work.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(work / "root")], work)
    return work / "root"


def provide_axe() -> str:
    """Return the script of axe-core; download it if need be.

    Raises:
        RigError: it is not in the cache, and npm does not bring it.
        ValueError: npm brings another one than is known here.
    """
    target = cache_root() / AXE / "axe.min.js"
    if not target.exists():
        if shutil.which("npm") is None:
            raise RigError(f"there is no npm here to download {AXE}")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=target.parent) as folder:
            work = Path(folder)
            _run(["npm", "pack", "--silent", AXE], work)
            [package] = work.glob("*.tgz")
            found = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
            if found != AXE_SHA512:
                raise ValueError(f"{AXE} has the digest {found}, not {AXE_SHA512}")
            with tarfile.open(package) as archive:
                archive.extract("package/axe.min.js", work, filter="data")
            (work / "package" / "axe.min.js").rename(target)
    return target.read_text(encoding="utf-8")


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=DOWNLOAD_S
        )
    except subprocess.TimeoutExpired as error:
        raise RigError(f"`{command[0]}` did not end within {DOWNLOAD_S} s") from error
    if done.returncode != 0:
        raise RigError(f"`{' '.join(command)}` failed: {(done.stdout + done.stderr)[-500:]}")
