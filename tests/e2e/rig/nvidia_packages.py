"""NVIDIA's programs and libraries out of Debian's archive, unpacked into the cache, not installed.

The archive is the one that this machine's apt uses, with the component `non-free` and the suites
that have the packages. apt works in a folder of its own: the machine's lists and sources stay.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.e2e.rig.errors import RigError
from tests.e2e.rig.go_programs import cache_root

MPS, NVML, CUDA = "nvidia-cuda-mps", "libnvidia-ml1", "libcuda1"
SUITES = ("bookworm", "trixie", "sid", "experimental")
"""535 is in bookworm, 550 in trixie; what is newer comes to sid or experimental first."""
NEWEST = "newest"
DRIVERS = ("535", "550", NEWEST)
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def provide(package: str, driver: str) -> Path:
    """Return the folder with a package of a driver, as `535`; download it if need be.

    Raises:
        RigError: the archive does not have it, or this machine does not reach it.
    """
    target = cache_root() / package / driver
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=target.parent) as folder:
            _unpack(package, driver, Path(folder)).rename(target)
    return target


def _unpack(package: str, driver: str, work: Path) -> Path:
    if shutil.which("apt-get") is None or platform.machine() not in {"x86_64", "aarch64"}:
        raise RigError("there is no apt-get here")
    settings = _write_settings(work, _mirror())
    _run(["apt-get", "update", "-q"], settings, work)
    listing = _run(["apt-cache", "madison", package], settings, work)
    chosen = f"{package}={_version(package, driver, listing)}"
    _run(["apt-get", "download", "-q", chosen], settings, work)
    root = work / "root"
    for file in work.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(file), str(root)], settings, work)
    return root


def _mirror() -> str:
    """Return the address of Debian's archive that this machine's apt uses."""
    listing = _run(["apt-get", "indextargets", "Created-By: Packages"])
    for stanza in listing.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line)
        address = fields.get("Repo-URI", "")
        if fields.get("Label") == "Debian" or address.rstrip("/").endswith("/debian"):
            return address
    raise RigError("this machine's apt has no source of Debian's archive")


def _write_settings(work: Path, mirror: str) -> Path:
    """Write apt's settings for a state of its own; return their file."""
    sources = work / "sources"
    for folder in (sources, work / "lists" / "partial", work / "cache" / "archives" / "partial"):
        folder.mkdir(parents=True)
    signed = f"Signed-By: {_KEYRING}\n" if _KEYRING.exists() else ""
    (sources / "nvidia.sources").write_text(
        f"Types: deb\nURIs: {mirror}\nSuites: {' '.join(SUITES)}\nComponents: non-free\n{signed}"
    )
    settings = work / "apt.conf"
    settings.write_text(
        'Dir::Etc::sourcelist "/dev/null";\n'
        f'Dir::Etc::sourceparts "{sources}";\n'
        'Dir::Etc::preferencesparts "/dev/null";\n'
        f'Dir::State::lists "{work}/lists";\n'
        f'Dir::Cache "{work}/cache";\n'
        # apt's own download user may not enter a home folder.
        'APT::Sandbox::User "root";\n'
        # An archive that is not reached is an error, and not an empty one.
        'APT::Update::Error-Mode "any";\n'
        "#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n"
    )
    return settings


def _version(package: str, driver: str, listing: str) -> str:
    """Choose the newest version of a driver from the lines `package | version | source`."""
    versions = [line.split("|")[1].strip() for line in listing.splitlines() if "|" in line]
    matching = [
        version for version in versions if driver == NEWEST or version.startswith(f"{driver}.")
    ]
    if not matching:
        found = ", ".join(versions) or "none"
        raise RigError(f"Debian's archive has no {package} of driver {driver}; it has {found}")
    return max(matching, key=lambda text: [int(part) for part in text.partition("-")[0].split(".")])


def _run(command: list[str], settings: Path | None = None, folder: Path | None = None) -> str:
    env = os.environ | ({"APT_CONFIG": str(settings)} if settings else {}) | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120
        )
    except subprocess.TimeoutExpired as error:
        raise RigError(f"`{' '.join(command)}` did not end within 120 s") from error
    if done.returncode != 0:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["it printed nothing"]
        raise RigError(f"`{' '.join(command)}` failed: {last[0]}")
    return done.stdout
