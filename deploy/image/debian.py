"""A base of Debian's packages: Python, and programs for a look into the pod.

Packages are downloaded by apt, which verifies the archive's signature, and unpacked. No script of
theirs runs, so no root is needed. apt works in a folder of its own.
"""

import os
import shutil
from pathlib import Path

from deploy.image.layer import MACHINES, PYTHON, Interpreter, run

RELEASE = "trixie"
PACKAGES = ("base-files", "ca-certificates", "dash", "mount", f"python{PYTHON}", "util-linux")
"""With all that they depend on; metagpu itself needs Python alone."""
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

_UNUSED = (
    *(
        f"usr/share/{name}"
        for name in ("bash-completion", "info", "lintian", "locale", "man", "perl5")
    ),
    *("usr/share/pixmaps", "usr/lib/systemd", "var/cache/debconf"),
    # A hook for Ubuntu's crash reports: a link that leads nowhere outside the image.
    *(f"usr/lib/python{PYTHON}/sitecustomize.py", f"etc/python{PYTHON}"),
)
_USERS = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"
_GROUPS = "root:x:0:\nnogroup:x:65534:\n"


def lay(root: Path, architecture: str, work: Path) -> None:
    """Fill the empty folder ROOT with the base, its modules not compiled.

    Raises:
        SystemExit: apt-get or dpkg-deb is absent, or the archive is not reached.
    """
    if missing := [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]:
        raise SystemExit(
            f"{' and '.join(missing)} missing: build on Debian or Ubuntu, or by docker"
        )
    settings = _write_settings(work, architecture)
    run("apt-get", "update", "-q", APT_CONFIG=str(settings))
    options = ("-q", "--yes", "--download-only", "--no-install-recommends")
    run("apt-get", "install", *options, *PACKAGES, APT_CONFIG=str(settings))
    packages = sorted((work / "cache" / "archives").glob("*.deb"))
    # base-files first: it has the links of /bin and /lib to /usr.
    for package in sorted(packages, key=lambda path: not path.name.startswith("base-files_")):
        run("dpkg-deb", "-x", package, root)
        _record(root, package)
    _strip(root)
    _configure(root)


def interpreter(root: Path) -> Interpreter:
    """Return the Python of a base for this machine's processor, which runs without a chroot."""
    (libraries,) = (root / "usr" / "lib").glob(f"{os.uname().machine}-linux-gnu")
    (loader,) = libraries.glob("ld-linux-*.so.*")
    command = (loader, "--library-path", libraries, root / "usr" / "bin" / f"python{PYTHON}")
    return Interpreter(tuple(map(str, command)), {"PYTHONHOME": str(root / "usr")})


def own_architecture() -> str:
    """Return the image format's name of this machine's processor."""
    names = {machine: name for name, machine in MACHINES.items()}
    return names[os.uname().machine]


def find_archive() -> str:
    """Return the address that has `debian` and `debian-security`, as apt's sources here name it.

    The variable DEBIAN_ARCHIVE names another one.

    Raises:
        SystemExit: apt has no source of Debian's archive.
    """
    if named := os.environ.get("DEBIAN_ARCHIVE"):
        return named.rstrip("/")
    # Without the release's information: apt may never have been updated on this machine.
    targets = run("apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI)")
    for source in targets.splitlines():
        address, _, name = source.rstrip("/").rpartition("/")
        if address and name == "debian":
            return address
    raise SystemExit(
        "apt has no source of Debian's archive on this machine: name the address that has "
        "`debian` and `debian-security` in DEBIAN_ARCHIVE"
    )


def _write_settings(work: Path, architecture: str) -> Path:
    """Write apt's settings for a state of its own; return their file."""
    sources = work / "sources"
    for folder in (sources, work / "lists" / "partial", work / "cache" / "archives" / "partial"):
        folder.mkdir(parents=True)
    archive = find_archive()
    parts = {"debian": f"{RELEASE} {RELEASE}-updates", "debian-security": f"{RELEASE}-security"}
    (sources / "debian.sources").write_text(
        "\n".join(
            f"Types: deb\nURIs: {archive}/{name}\nSuites: {suites}\nComponents: main\n"
            f"Signed-By: {KEYRING}\n"
            for name, suites in parts.items()
        )
    )
    settings = work / "apt.conf"
    settings.write_text(
        'Dir::Etc::sourcelist "/dev/null";\n'
        f'Dir::Etc::sourceparts "{sources}";\n'
        'Dir::Etc::preferencesparts "/dev/null";\n'
        f'Dir::State::lists "{work}/lists";\n'
        'Dir::State::status "/dev/null";\n'
        f'Dir::Cache "{work}/cache";\n'
        f'APT::Architecture "{architecture}";\nAPT::Architectures "{architecture}";\n'
        'Acquire::Languages "none";\nDebug::NoLocking "true";\n'
        # apt's own download user may not enter a home folder.
        'APT::Sandbox::User "";\n'
        # An archive that is not reached is an error, and not an empty one.
        'APT::Update::Error-Mode "any";\n'
        "#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n"
    )
    return settings


def _record(root: Path, package: Path) -> None:
    """Write a package's control file where scanners look for it in images without dpkg."""
    folder = root / "var" / "lib" / "dpkg" / "status.d"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / package.name.partition("_")[0]).write_text(run("dpkg-deb", "-f", package))


def _strip(root: Path) -> None:
    """Remove documentation, but no licence."""
    for name in _UNUSED:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).unlink(missing_ok=True)
    for file in (root / "usr" / "share" / "doc").rglob("*"):
        if file.name != "copyright" and not file.is_dir():
            file.unlink()


def _configure(root: Path) -> None:
    """Write what scripts of packages would: users, certificates, and Python's usual path."""
    (root / "etc" / "passwd").write_text(_USERS)
    (root / "etc" / "group").write_text(_GROUPS)
    certificates = sorted((root / "usr" / "share" / "ca-certificates").rglob("*.crt"))
    bundle = root / "etc" / "ssl" / "certs" / "ca-certificates.crt"
    bundle.write_text("".join(certificate.read_text() for certificate in certificates))
    python = root / "usr" / "local" / "bin" / f"python{PYTHON}"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.symlink_to(f"/usr/bin/python{PYTHON}")
