"""An image as one file of docker's format: the same bytes for the same folders.

`docker load`, `podman load` and `ctr images import` take it. What the image runs, and its labels,
are read from the last stage of deploy/Dockerfile.
"""

import hashlib
import io
import json
import shlex
import tarfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import Any

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def write(
    archive: Path, name: str, layers: Iterable[Path], config: Mapping[str, Any], moment: int
) -> None:
    """Write an image.

    Args:
        archive: the file.
        name: name and tag of the image.
        layers: folders, the lowest first; every file belongs to root.
        config: what the image runs, as `read_config` returns it.
        moment: seconds since 1970, the time of every file.
    """
    parts = [archive.with_name(f"{archive.name}.{number}") for number, _ in enumerate(layers)]
    digests = [_pack(folder, part, moment) for folder, part in zip(layers, parts, strict=True)]
    document = dict(config) | {
        "os": "linux",
        "created": datetime.fromtimestamp(moment, UTC).isoformat(),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
    }
    content = json.dumps(document, sort_keys=True).encode()
    config_name = f"{hashlib.sha256(content).hexdigest()}.json"
    names = [f"{digest}.tar" for digest in digests]
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": names}]
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as tar:
        for layer, part in zip(names, parts, strict=True):
            with part.open("rb") as file:
                tar.addfile(_entry(layer, part.stat().st_size, moment), file)
            part.unlink()
        for file_name, text in (
            (config_name, content),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            tar.addfile(_entry(file_name, len(text), moment), io.BytesIO(text))


def read_config(dockerfile: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return what the last stage of a Dockerfile says about programs, variables and labels."""
    text = dockerfile.read_text().replace("\\\n", " ")
    last = text[text.rindex("\nFROM ") :]
    config: dict[str, Any] = {"Env": [PATH], "Labels": {}}
    for line in last.splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction in ("ENTRYPOINT", "CMD"):
            config[instruction.capitalize()] = json.loads(rest)
        elif instruction in ("ENV", "LABEL"):
            words = shlex.split(Template(rest).substitute(variables))
            if instruction == "ENV":
                config["Env"] += words
            else:
                config["Labels"] |= dict(word.split("=", 1) for word in words)
    return config


def _pack(folder: Path, target: Path, moment: int) -> str:
    """Write a folder as a layer; return the layer's digest."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = moment
        entry.mode &= 0o1777  # no program takes another user's rights
        return entry

    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, str(path.relative_to(folder)), recursive=False, filter=plain)
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry(name: str, size: int, moment: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = size, moment
    return entry
