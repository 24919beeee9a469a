"""The papers of a release: chart, notes, checksums, and where everything comes from."""

import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.image.layer import REPOSITORY
from metagpu import __version__

CHART: Final = REPOSITORY / "deploy" / "chart"
LOCKS: Final = ("run.lock", "package.lock", "build.lock")
SUMS: Final = "SHA256SUMS"
_KINDS: Final = {"Added": "added", "Changed": "changed", "Fixed": "fixed", "Removed": "removed"}
"""A heading of the changelog -> Artifact Hub's kind of a change."""


def addresses() -> Mapping[str, str]:
    """Return the addresses of the project in pyproject.toml; none before it is published."""
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        found: dict[str, str] = tomllib.load(file)["project"].get("urls", {})
    return found


@dataclass(frozen=True)
class Changelog:
    """The section of the changelog about this version."""

    text: str

    @classmethod
    def read(cls, text: str, *, rehearsal: bool = False) -> "Changelog":
        """Return the section of a changelog; a rehearsal does not mind later changes.

        Raises:
            SystemExit: there is none, or changes of this version stand above it.
        """
        sections = re.findall(
            r"^## \[([^\]]+)\][^\n]*\n(.*?)(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL
        )
        found = dict(sections)
        if __version__ not in found:
            raise SystemExit(
                f"CHANGELOG.md has no section [{__version__}]: move what stands under [Unreleased]"
            )
        if (left := found.get("Unreleased", "").strip()) and not rehearsal:
            raise SystemExit(
                f"CHANGELOG.md: [Unreleased] is not empty; move it to [{__version__}]: {left[:80]}"
            )
        return cls(found[__version__].strip() + "\n")

    def changes(self) -> Sequence[Mapping[str, str]]:
        """Return the changes as Artifact Hub shows them: kind and first sentence, plain text."""
        kind, found = "added", []
        for line in self.text.splitlines():
            if line.startswith("### "):
                kind = _KINDS.get(line.removeprefix("### "), "security" if "Sec" in line else "")
            elif line.startswith("- ") and kind:
                plain = re.sub(r"\s*\(\[[^\]]*\]\([^)]*\)\)", "", line.removeprefix("- "))
                plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|\*\*|`", r"\1", plain)
                found.append({"kind": kind, "description": plain})
        return found

    def write(self, file: Path) -> None:
        """Write the notes of the release; links of pages lead to those of this version.

        Without an address of the source they stay relative to it.
        """
        source = addresses().get("Source")
        base = f"{source}/blob/v{__version__}/" if source else ""
        linked = re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({base}\1)", self.text)
        file.write_text(f"# metagpu {__version__}\n\n{linked}", encoding="utf-8")


def write_chart(target: Path, registry: str, notes: Changelog, moment: int) -> None:
    """Write the chart as `helm package` names it, the same bytes for the same files.

    With a registry, `image.repository` has a default, and Artifact Hub the images to scan.
    """
    files = {
        f"metagpu/{file.relative_to(CHART)}": (file.read_bytes(), 0o644)
        for folder, _, names in os.walk(CHART, followlinks=True)  # to deploy/monitoring
        for file in (Path(folder) / name for name in names)
    }
    chart = yaml.safe_load(files["metagpu/Chart.yaml"][0])
    annotations = {"artifacthub.io/changes": yaml.safe_dump([*notes.changes()], sort_keys=False)}
    if urls := addresses():
        chart |= {"home": urls["Homepage"], "sources": [urls["Source"]]}
        links = [{"name": name, "url": url} for name, url in urls.items()]
        annotations["artifacthub.io/links"] = yaml.safe_dump(links, sort_keys=False)
    if registry:
        image = {"name": "metagpu", "image": f"{registry}/metagpu:{__version__}"}
        platforms = {"platforms": ["linux/amd64", "linux/arm64"]}
        annotations["artifacthub.io/images"] = yaml.safe_dump([image | platforms], sort_keys=False)
        values = files["metagpu/values.yaml"][0].decode()
        named = values.replace('  repository: ""', f"  repository: {registry}/metagpu", 1)
        if named == values:
            raise SystemExit("deploy/chart/values.yaml has no empty image.repository")
        files["metagpu/values.yaml"] = (named.encode(), 0o644)
    chart["annotations"] = chart.get("annotations", {}) | annotations
    text = yaml.safe_dump(chart, sort_keys=False, width=100)
    files["metagpu/Chart.yaml"] = (text.encode(), 0o644)
    files["metagpu/LICENSE"] = ((REPOSITORY / "LICENSE").read_bytes(), 0o644)
    # Not metagpu-VERSION.tgz: so `helm pull` names the chart, and the sdist is metagpu-VERSION too.
    (target / f"metagpu-{__version__}.tgz").write_bytes(tar_gz(files, moment))


def write_provenance(
    target: Path,
    image: str,
    registry: str,
    commit: str,
    packages: Mapping[str, Sequence[tuple[str, str]]],
) -> None:
    """Write an in-toto statement with SLSA's predicate, not signed: what was made of what."""
    address = addresses().get("Source")
    subjects = [
        {"name": file.name, "digest": {"sha256": sha256(file)}} for file in sorted(target.iterdir())
    ]
    name = f"{registry}/metagpu" if registry else "metagpu"
    subjects.append({"name": name, "digest": {"sha256": image.partition(":")[2]}})
    source = {"uri": f"git+{address}@refs/tags/v{__version__}"} if address else {"name": "metagpu"}
    # SLSA asks for URIs here. Without an address, a package URL names a file of this version.
    base = f"{address}/blob/v{__version__}/" if address else f"pkg:generic/metagpu@{__version__}#"
    locks = [REPOSITORY / "requirements" / lock for lock in LOCKS]
    dependencies: list[dict[str, Any]] = [
        {**source, "digest": {"gitCommit": commit}},
        *(
            {"name": f"requirements/{lock.name}", "digest": {"sha256": sha256(lock)}}
            for lock in locks
        ),
        *(
            {"uri": f"pkg:deb/debian/{package}@{version}?arch={architecture}"}
            for architecture, found in packages.items()
            for package, version in found
        ),
    ]
    definition = {
        "buildType": f"{base}CONTRIBUTING.md",
        "externalParameters": {"command": "make release", "REGISTRY": registry},
        "resolvedDependencies": dependencies,
    }
    builder = {"id": f"{base}Makefile"}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {"buildDefinition": definition, "runDetails": {"builder": builder}},
    }
    file = target / f"metagpu-{__version__}-provenance.json"
    file.write_text(json.dumps(statement, indent=1) + "\n", encoding="utf-8")


def write_checksums(target: Path) -> None:
    """Write what `sha256sum --check SHA256SUMS` compares."""
    lines = [f"{sha256(file)}  {file.name}\n" for file in sorted(target.iterdir())]
    (target / SUMS).write_text("".join(lines), encoding="utf-8")


def tar_gz(files: Mapping[str, tuple[bytes, int]], moment: int) -> bytes:
    """Return an archive of files, each with its mode, that belong to root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, (content, mode) in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(content), mode, moment
            tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), mtime=0)


def sha256(file: Path) -> str:
    """Return the digest of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
