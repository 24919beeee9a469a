"""Container images for a node without a registry: of one static busybox, and of metagpu."""

import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from metagpu import __version__
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.go_programs import cache_root
from tests.e2e.rig.tools import REPOSITORY

BUSYBOX_IMAGE = "metagpu.local/busybox:e2e"
PAUSE_IMAGE = "metagpu.local/pause:e2e"

KEPT_IMAGES = 4
"""Archives of 150 MB that the cache keeps, for other checkouts of this repository."""
METAGPU_IMAGE = f"metagpu:{__version__}"
_SOURCES = (
    *("LICENSE", "README.md", "deploy/Dockerfile", "deploy/image", "metagpu"),
    *("docs/wheel_hook.py", "pyproject.toml", "requirements"),
)
"""Files and folders that the image is built of."""
IMAGE_EPOCH = {"SOURCE_DATE_EPOCH": "0"}
"""The moment of every build of the image, whatever commit asks for it."""

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""The kernel's name of the processor -> the image format's name."""

OWN = ARCHITECTURES.get(platform.machine(), platform.machine())
"""The processor of this machine."""

# Process 1 gets no signal without a handler, and sandboxes should stop at once.
PAUSE_COMMAND = ["/bin/sh", "-c", "trap 'exit 0' TERM INT; sleep 1000000000 & wait"]


def write_images(busybox: Path, archive: Path) -> None:
    """Write both images into one archive of docker's format at ARCHIVE."""
    layer = _layer(busybox)
    files = {"layer.tar": layer}
    manifest = []
    for image, command in ((BUSYBOX_IMAGE, ["/bin/sh"]), (PAUSE_IMAGE, PAUSE_COMMAND)):
        config = _config(layer, command)
        name = f"{hashlib.sha256(config).hexdigest()}.json"
        files[name] = config
        manifest.append({"Config": name, "RepoTags": [image], "Layers": ["layer.tar"]})
    files["manifest.json"] = json.dumps(manifest).encode()
    with tarfile.open(archive, "w") as tar:
        for name, content in files.items():
            tar.addfile(_entry(name, size=len(content)), io.BytesIO(content))


def metagpu_image(sources: Path = REPOSITORY, architecture: str = OWN) -> Path:
    """Return the archive of metagpu's image, built of this repository unless the cache has it.

    Raises:
        RigError: the build failed; the text is its own.
    """
    other = "" if architecture == OWN else f"-{architecture}"
    target = cache_root() / "image" / f"{_digest(sources)}{other}.tar"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        kept = sorted(target.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in kept[:-KEPT_IMAGES]:
            old.unlink()
        half = target.with_suffix(".new")
        command = [sys.executable, "-m", "deploy.image", "archive", str(half)]
        command += ["--architecture", architecture]
        # The code of these sources, also where the environment names another checkout.
        run(command, sources, **IMAGE_EPOCH, PYTHONPATH=str(sources))
        half.rename(target)
    return target


def previous_sources(folder: Path) -> str:
    """Put the last commit with another daemon into an empty folder; return the commit.

    The programs of containers are those of this repository, for they take long to build.

    Raises:
        RigError: the history does not have it.
    """
    clean = run(["git", "status", "--porcelain", "metagpu"], REPOSITORY) == ""
    last = run(["git", "log", "-1", "--format=%H", "--", "metagpu"], REPOSITORY).strip()
    commit = run(["git", "rev-parse", f"{last}^" if clean else "HEAD"], REPOSITORY).strip()
    archive = folder / "sources.tar"
    run(["git", "archive", f"--output={archive}", commit], REPOSITORY)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    programs = Path("metagpu/programs")
    shutil.copytree(REPOSITORY / programs, folder / programs, dirs_exist_ok=True)
    return commit


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Run a command in a folder; return its output.

    Raises:
        RigError: the command failed; the text is the end of its own.
    """
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RigError(f"`{' '.join(command)}` failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _digest(sources: Path) -> str:
    digest = hashlib.sha256()
    for source in _SOURCES:
        path = sources / source
        for file in sorted(path.rglob("*")) if path.is_dir() else (path,):
            if file.is_file() and file.suffix != ".pyc":
                digest.update(f"{file.relative_to(sources)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _layer(busybox: Path) -> bytes:
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in ("bin", "dev", "etc", "proc", "root", "sys", "tmp", "var"):
            tar.addfile(_entry(folder, kind=tarfile.DIRTYPE, mode=0o755))
        program = busybox.read_bytes()
        tar.addfile(_entry("bin/busybox", size=len(program), mode=0o755), io.BytesIO(program))
        for applet in applets.stdout.split():
            if applet != "busybox":
                link = _entry(f"bin/{applet}", kind=tarfile.SYMTYPE, mode=0o777)
                link.linkname = "busybox"
                tar.addfile(link)
        # Example pods of others start bash.
        bash = b'#!/bin/sh\nexec sh "$@"\n'
        tar.addfile(_entry("bin/bash", size=len(bash), mode=0o755), io.BytesIO(bash))
        users = b"root:x:0:0:root:/root:/bin/sh\n"
        tar.addfile(_entry("etc/passwd", size=len(users)), io.BytesIO(users))
    return buffer.getvalue()


def _config(layer: bytes, command: list[str]) -> bytes:
    document = {
        "architecture": OWN,
        "os": "linux",
        "config": {
            "Cmd": command,
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    return json.dumps(document).encode()


def _entry(
    name: str, *, kind: bytes = tarfile.REGTYPE, size: int = 0, mode: int = 0o644
) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size, entry.mode = kind, size, mode
    return entry
