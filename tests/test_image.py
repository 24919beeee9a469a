"""The container image: its Dockerfile, and the archive that is written without an engine."""

import json
import os
import re
import tarfile
from pathlib import Path

import pytest

from deploy.image import archive, debian
from deploy.image.__main__ import DOCKERFILE

VARIABLES = {"VERSION": "1.2.3", "REVISION": "abc"}


def write(folder: Path, *layers: Path, moment: int = 1_000) -> Path:
    """Write an image of these layers; return its archive."""
    target = folder / "image.tar"
    config = {"architecture": "amd64", "config": archive.read_config(DOCKERFILE, VARIABLES)}
    archive.write(target, "metagpu:1.2.3", layers, config, moment)
    return target


def folder_with(path: Path, text: str, *, seconds: int, mode: int) -> Path:
    """Return a new folder with a program and a link, changed at a time."""
    (path / "bin").mkdir(parents=True)
    program = path / "bin" / "program"
    program.write_text(text)
    program.chmod(mode)
    (path / "sh").symlink_to("bin/program")
    os.utime(program, (seconds, seconds))
    return path


def test_every_base_is_pinned() -> None:
    """Each stage starts from a digest, from another stage, or from nothing."""
    text = DOCKERFILE.read_text()
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    stages = re.findall(r"^FROM (?:--platform=\S+ )?(\S+)", text, re.MULTILINE)
    bases = [defaults.get(stage.strip("${}"), stage) for stage in stages]

    assert len(bases) > 1
    assert all(base == "scratch" or re.search(r"@sha256:[0-9a-f]{64}$", base) for base in bases)


def test_the_archive_runs_what_the_dockerfile_says() -> None:
    """Without an engine, programs, variables and labels are those of the last stage."""
    config = archive.read_config(DOCKERFILE, VARIABLES)

    assert (config["Entrypoint"], config["Cmd"]) == (["metagpu"], ["run"])
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in config["Env"]
    assert config["Labels"]["org.opencontainers.image.version"] == "1.2.3"
    assert config["Labels"]["org.opencontainers.image.revision"] == "abc"
    assert config["Labels"]["org.opencontainers.image.description"].endswith("NVIDIA GPUs")
    assert "User" not in config


def test_an_archive_depends_on_content_alone(tmp_path: Path) -> None:
    """The same files are the same bytes, whenever they were written; other files are others."""
    (first, second, other), outputs = (
        [
            folder_with(tmp_path / "first", "exit 0", seconds=5, mode=0o755),
            folder_with(tmp_path / "second", "exit 0", seconds=9, mode=0o755),
            folder_with(tmp_path / "other", "exit 1", seconds=5, mode=0o755),
        ],
        [tmp_path / name for name in ("a", "b", "c")],
    )
    for output in outputs:
        output.mkdir()
    written = [
        write(output, layer).read_bytes()
        for output, layer in zip(outputs, (first, second, other), strict=True)
    ]

    assert written[0] == written[1] != written[2]


@pytest.mark.parametrize(
    ("sources", "named", "archive"),
    [
        (["http://mirror.example/debian-security/", "http://mirror.example/debian/"], "", True),
        (["http://mirror.example/ubuntu/"], "http://mirror.example/", True),
        (["http://mirror.example/ubuntu/"], "", False),
        ([], "", False),
    ],
)
def test_the_archive_is_that_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, sources: list[str], named: str, *, archive: bool
) -> None:
    """Debian's packages come from where apt's sources say, or the variable; else an error."""
    monkeypatch.setenv("DEBIAN_ARCHIVE", named)
    monkeypatch.setattr(debian, "run", lambda *_: "\n".join(sources))
    if archive:
        assert debian.find_archive() == "http://mirror.example"
    else:
        with pytest.raises(SystemExit, match="in DEBIAN_ARCHIVE"):
            debian.find_archive()


def test_files_belong_to_root_and_give_nobodys_rights(tmp_path: Path) -> None:
    """In a layer, no file has the builder's user, and no program the rights of its owner."""
    layer = folder_with(tmp_path / "layer", "exit 0", seconds=5, mode=0o4755)
    with tarfile.open(write(tmp_path, layer)) as image:
        manifest = json.load(image.extractfile("manifest.json"))  # type: ignore[arg-type]
        inner = image.extractfile(manifest[0]["Layers"][0])
        with tarfile.open(fileobj=inner) as packed:
            entries = {tar_info.name: tar_info for tar_info in packed}

    assert {(tar_info.uid, tar_info.gid, tar_info.mtime) for tar_info in entries.values()} == {
        (0, 0, 1_000)
    }
    assert entries["bin/program"].mode == 0o755
    assert entries["sh"].linkname == "bin/program"
