"""The images of both processors in one archive of OCI's layout, under one name.

`skopeo copy --all oci-archive:…`, `ctr images import`, `podman load` and `docker load` take it.
"""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

_OCI: Final = "application/vnd.oci.image"
_LABELS: Final = "org.opencontainers.image."


def write(archive: Path, name: str, images: Mapping[str, Path], moment: int) -> str:
    """Write the archive; return the digest of the index, by which all processors pull.

    Args:
        archive: the file.
        name: the full name of the image, with its tag.
        images: archives of docker's format, as `deploy.image` writes them, by processor.
        moment: seconds since 1970, the time of every file.
    """
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as tar:
        layout = _Layout(tar, moment)
        layout.add_file("oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        manifests = [
            layout.add_image(path) | {"platform": {"architecture": architecture, "os": "linux"}}
            for architecture, path in images.items()
        ]
        annotations = manifests[0].pop("annotations")
        for manifest in manifests[1:]:
            del manifest["annotations"]
        index = layout.add_document("index.v1", manifests=manifests, annotations=annotations)
        names = {f"{_LABELS}ref.name": name.rpartition(":")[2], "io.containerd.image.name": name}
        document = _document("index.v1", manifests=[index | {"annotations": names}])
        layout.add_file("index.json", json.dumps(document, sort_keys=True).encode())
    return str(index["digest"])


def read(archive: Path, path: str) -> bytes:
    """Return a file of an image; of several layers, the uppermost that has it.

    Raises:
        KeyError: the image does not have it.
    """
    with tarfile.open(archive) as image:
        for name in reversed(_manifest(image)["Layers"]):
            with tarfile.open(fileobj=image.extractfile(name)) as layer:
                if path in layer.getnames():
                    return _content(layer, path)
    raise KeyError(path)


def debian_packages(archive: Path) -> Sequence[tuple[str, str]]:
    """Return name and version of the packages that the image's base was made of."""
    found = []
    with (
        tarfile.open(archive) as image,
        tarfile.open(fileobj=image.extractfile(_manifest(image)["Layers"][0])) as base,
    ):
        for entry in base:
            if entry.name.startswith("var/lib/dpkg/status.d/") and entry.isfile():
                text = _content(base, entry.name).decode()
                fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
                found.append((fields["Package"], fields["Version"]))
    return found


class _Layout:
    """A layout that is written into an archive, each blob once."""

    def __init__(self, tar: tarfile.TarFile, moment: int) -> None:
        self._tar, self._moment = tar, moment
        self._written: set[str] = set()

    def add_file(self, name: str, content: bytes) -> None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mtime = len(content), self._moment
        self._tar.addfile(entry, io.BytesIO(content))

    def add_blob(self, content: bytes, kind: str) -> dict[str, Any]:
        """Write a blob; return its descriptor."""
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._written:
            self.add_file(f"blobs/sha256/{digest}", content)
            self._written.add(digest)
        return {"mediaType": f"{_OCI}.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    def add_document(self, kind: str, **fields: object) -> dict[str, Any]:
        content = json.dumps(_document(kind, **fields), sort_keys=True).encode()
        return self.add_blob(content, f"{kind}+json")

    def add_image(self, archive: Path) -> dict[str, Any]:
        """Write an image; return its manifest's descriptor, with the labels as annotations."""
        with tarfile.open(archive) as image:
            manifest = _manifest(image)
            content = _content(image, manifest["Config"])
            layers = [
                # Level 6 is gzip's own: 9 takes three times as long for one part in a hundred.
                self.add_blob(gzip.compress(_content(image, name), 6, mtime=0), "layer.v1.tar+gzip")
                for name in manifest["Layers"]
            ]
        labels = json.loads(content)["config"]["Labels"]
        created = datetime.fromtimestamp(self._moment, UTC).isoformat()
        annotations = labels | {f"{_LABELS}created": created}
        config = self.add_blob(content, "config.v1+json")
        written = self.add_document(
            "manifest.v1", config=config, layers=layers, annotations=annotations
        )
        return written | {"annotations": annotations}


def _document(kind: str, **fields: object) -> dict[str, object]:
    return {"schemaVersion": 2, "mediaType": f"{_OCI}.{kind}+json", **fields}


def _manifest(image: tarfile.TarFile) -> dict[str, Any]:
    [manifest] = json.loads(_content(image, "manifest.json"))
    return dict(manifest)


def _content(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read()
