"""Lay the image of metagpu, or a part of it.

python -m deploy.image archive                  writes dist/metagpu-VERSION-ARCHITECTURE.tar
python -m deploy.image layer FOLDER             metagpu's layer alone, for deploy/Dockerfile
python -m deploy.image strip FOLDER             removes pip from a base, and compiles its modules
python -m deploy.image inventory FOLDER         writes sbom.cdx.json and licenses.md of the layer

The programs of mgctl/ have to be built (`make mgctl`); `archive` needs apt-get and dpkg-deb.
"""

import argparse
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from deploy.image import archive, debian, layer
from metagpu import __version__

NAME = f"metagpu:{__version__}"
DOCKERFILE = layer.REPOSITORY / "deploy" / "Dockerfile"
_STANDARD_LIBRARY = f"usr/lib/python{layer.PYTHON}"
_LOCAL = f"usr/local/lib/python{layer.PYTHON}"
_UNUSED = (
    *(f"{_LOCAL}/site-packages", f"{_LOCAL}/ensurepip", f"{_LOCAL}/idlelib"),
    *(f"{_LOCAL}/turtledemo", "usr/local/include"),
)


def write_archive(target: Path, architecture: str) -> None:
    """Write an image of Debian's packages and metagpu's layer, and print the sizes."""
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="metagpu-image-") as name:
        work = Path(name)
        bases = {architecture, debian.own_architecture()}
        for other in sorted(bases):
            (work / other).mkdir()
            debian.lay(work / other, other, work / f"apt-{other}")
        python = debian.interpreter(work / debian.own_architecture())
        base, ours = work / architecture, work / "layer"
        python.compile(base, _STANDARD_LIBRARY)
        layer.lay(ours, architecture, python)
        config = {
            "architecture": architecture,
            "config": archive.read_config(DOCKERFILE, variables()),
        }
        archive.write(
            target, NAME, [base, ours], config, int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
        )
        print(sizes(base, ours))


def variables() -> dict[str, str]:
    """Return the variables of deploy/Dockerfile's last stage."""
    return {"VERSION": __version__, "REVISION": os.environ.get("REVISION", "")}


def strip(root: Path) -> None:
    """Remove pip and what only people use from a registry's Python; compile its modules."""
    for folder in _UNUSED:
        shutil.rmtree(root / folder, ignore_errors=True)
    for program in (root / "usr" / "local" / "bin").glob("pip*"):
        program.unlink()
    layer.Interpreter.current().compile(root, _LOCAL)


def sizes(base: Path, ours: Path) -> str:
    """Return a table of the image's parts, by the bytes of their files."""
    packages = ours / layer.PACKAGES
    parts: Counter[str] = Counter()
    for path in files(ours):
        inside = path.is_relative_to(packages)
        parts[path.relative_to(packages).parts[0] if inside else "programs"] += size(path)
    largest = parts.most_common(6)
    rows = [
        ("base: Debian's packages", sum(map(size, files(base)))),
        ("metagpu's layer", parts.total()),
        *((f"  {name}", amount) for name, amount in largest),
        ("  everything else", parts.total() - sum(amount for _, amount in largest)),
    ]
    return "\n".join(f"{name:24} {amount / 1e6:6.1f} MB" for name, amount in rows)


def files(root: Path) -> Iterator[Path]:
    """Return the files of a folder, at any depth."""
    return (path for path in root.rglob("*") if not path.is_dir())


def size(path: Path) -> int:
    """Return the bytes of a file, and of a link those of its text."""
    return path.lstat().st_size


def write_inventory(folder: Path, architecture: str) -> None:
    """Write the list of what the layer contains, and its licences."""
    with tempfile.TemporaryDirectory() as name:
        layer.install(Path(name), architecture)
        layer.write_inventory(Path(name), folder)


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="python -m deploy.image", description=__doc__)
    parser.add_argument("command", choices=("archive", "inventory", "layer", "strip"))
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--architecture", choices=sorted(layer.MACHINES), default=None)
    given = parser.parse_args()
    architecture = given.architecture or debian.own_architecture()
    match given.command:
        case "archive":
            default = layer.REPOSITORY / "dist" / f"metagpu-{__version__}-{architecture}.tar"
            write_archive(given.folder or default, architecture)
        case "layer":
            layer.lay(given.folder, architecture, layer.Interpreter.current())
        case "inventory":
            write_inventory(given.folder, architecture)
        case "strip":
            strip(given.folder)


if __name__ == "__main__":
    main()
