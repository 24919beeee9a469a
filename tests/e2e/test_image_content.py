"""The content of the image of metagpu, which is built alike elsewhere."""

import csv
import hashlib
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.image import debian, layer
from tests.e2e.rig.images import IMAGE_EPOCH, metagpu_image

LIMIT = 95e6
"""Bytes beside the base; 14 MB are CEL's library, which `explain --claim` loads."""
UNCHECKED = b"\x01\0\0\0"
"""The flags of a compiled module by PEP 552: a hash of the source, which nobody compares."""
_MACHINE = re.compile(r"x86_64|aarch64")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the unpacked image of this machine's processor."""
    folder = tmp_path_factory.mktemp("image")
    with tarfile.open(metagpu_image()) as image:
        manifest = json.load(image.extractfile("manifest.json"))  # type: ignore[arg-type]
        for name in manifest[0]["Layers"]:
            with tarfile.open(fileobj=image.extractfile(name)) as part:
                part.extractall(folder, filter="fully_trusted")  # noqa: S202 - our own archive
    return folder


def modules(root: Path) -> Iterator[Path]:
    """Return the modules of the environment and of the standard library."""
    for folder in (layer.PACKAGES, f"usr/lib/python{layer.PYTHON}"):
        yield from (root / folder).rglob("*.py")


def content(root: Path) -> dict[str, str]:
    """Return path -> digest of a folder's files, and the target of its links."""
    return {
        str(path.relative_to(root)): str(path.readlink())
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_every_module_is_compiled(root: Path) -> None:
    """Each module of metagpu, its libraries and Python is there compiled, for any time of files."""
    found = list(modules(root))
    compiled = [path.parent / "__pycache__" / f"{path.stem}.cpython-313.pyc" for path in found]

    assert len(found) > 2000
    assert [path for path in compiled if not path.exists()] == []
    assert [path for path in compiled if path.read_bytes()[4:8] != UNCHECKED] == []


def test_a_command_writes_nothing_into_the_image(root: Path) -> None:
    """No command writes a module into the image, where the root may be written."""
    before = content(root)
    run = ("chroot", root, "metagpu", "explain", "--simulate", "a100-40gb:2")
    shown = subprocess.run(run, check=True, capture_output=True, text=True).stdout

    assert "cnvrg.io/metagpu" in shown
    assert content(root) == before


def test_the_image_is_small_and_has_no_installer(root: Path) -> None:
    """The layer is below its limit; no pip, no compiler, no rights of another user."""
    ours = (root / layer.ENVIRONMENT, root / layer.DOCUMENTS)
    files = [file for folder in ours for file in folder.rglob("*") if file.is_file()]

    assert sum(file.lstat().st_size for file in files) < LIMIT
    assert list((root / layer.PACKAGES).glob("pip*")) == []
    for folder in ("usr/bin", "usr/sbin", "usr/local/bin"):
        names = {file.name for file in (root / folder).iterdir()}
        assert not names & {"pip", "pip3", "gcc", "cc", "apt-get"}
    assert [
        file for file in root.rglob("*") if file.is_file() and file.stat().st_mode & 0o6000
    ] == []


def test_the_image_lists_itself(root: Path) -> None:
    """The inventory in the image names each installed package, with its version."""
    listed = json.loads((root / layer.DOCUMENTS / "sbom.cdx.json").read_text())
    names = {
        f"{component['name']}-{component.get('version')}".lower()
        for component in listed["components"]
    }
    installed = {
        file.name.removesuffix(".dist-info").lower()
        for file in (root / layer.PACKAGES).glob("*.dist-info")
    }

    normal = {re.sub(r"[-_.]+", "-", name) for name in names}
    missing = {name for name in installed if re.sub(r"[-_.]+", "-", name) not in normal}
    assert {name.partition("-")[0] for name in missing} == {"metagpu"}, (
        "which is the root component"
    )
    assert listed["metadata"]["component"]["name"] == "metagpu"


def test_each_package_lists_the_files_that_are_there(root: Path) -> None:
    """No list of files names a program that pip wrote, which has a path of the builder in it."""
    packages = root / layer.PACKAGES
    listed = [
        packages / row[0]
        for record in packages.glob("*.dist-info/RECORD")
        for row in csv.reader(record.read_text().splitlines())
    ]

    assert len(listed) > 2000
    assert [path for path in listed if not path.exists()] == []


@pytest.mark.long
def test_the_layer_is_built_alike_elsewhere(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer, built again in another folder, has the same files with the same bytes."""
    for name, value in IMAGE_EPOCH.items():
        monkeypatch.setenv(name, value)
    layer.lay(tmp_path, debian.own_architecture(), debian.interpreter(root))
    again = content(tmp_path)
    first = content(root)

    assert [path for path in again if first.get(path) != again[path]] == []
    assert {text for text in first if text.startswith(layer.ENVIRONMENT)} <= set(again)


@pytest.mark.long
def test_the_other_processor_has_the_same_files(root: Path, tmp_path: Path) -> None:
    """For arm64 and amd64 the same packages are installed, with libraries of their own."""
    [other] = set(layer.MACHINES) - {debian.own_architecture()}
    layer.install(tmp_path, other)
    packages = root / layer.PACKAGES
    theirs, ours = (
        {
            _MACHINE.sub("", str(file.relative_to(folder)))
            for file in folder.rglob("*")
            if file.is_file()
        }
        for folder in (tmp_path, packages)
    )
    libraries = list(tmp_path.rglob("*.so"))

    assert {name for name in ours if "__pycache__" not in name} == theirs
    assert {library.read_bytes()[18] for library in libraries} == {
        0xB7 if other == "arm64" else 0x3E
    }
