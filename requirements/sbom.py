"""The list of what an image of metagpu contains, and under which licences.

python requirements/sbom.py PACKAGES FOLDER

PACKAGES is a site-packages folder with what requirements/run.lock names and metagpu's wheel, of
any Python. The script writes FOLDER/sbom.cdx.json (CycloneDX 1.6) and FOLDER/licenses.md.
"""

import json
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from metagpu import __version__

REPOSITORY = Path(__file__).parents[1]
MUSL = {
    "type": "library",
    "bom-ref": "musl",
    "name": "musl",
    "description": "the C library that is linked into mgctl, of the ziglang in build.lock",
    "licenses": [{"license": {"id": "MIT"}}],
    "purl": "pkg:generic/musl",
}
"""No package metadata names it: the compiler brings it."""


def inventory(packages: Path) -> dict[str, Any]:
    """Return the components of a site-packages folder, and of the programs in the wheel."""
    command = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible")
    project = ("--pyproject", REPOSITORY / "pyproject.toml")
    with TemporaryDirectory() as environment:  # whose own packages are those
        venv.create(environment, symlinks=True)
        (own,) = Path(environment).glob("lib/python*/site-packages")
        own.rmdir()
        own.symlink_to(packages.resolve())
        listed = subprocess.run((*command, *project, environment), check=True, capture_output=True)
    found: dict[str, Any] = json.loads(listed.stdout)
    found["components"].append(MUSL)
    found["metadata"]["component"]["version"] = __version__  # pyproject.toml reads it from there
    if problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(found)):
        raise SystemExit(f"the inventory is no valid CycloneDX 1.6: {problem}")
    return found


def licenses(component: dict[str, Any]) -> str:
    """Return the licences that a component declares: identifiers first, else its own words.

    Raises:
        SystemExit: the component declares none; a person must look.
    """
    entries = component.get("licenses", [])
    known = {entry.get("expression") or entry["license"].get("id") for entry in entries} - {None}
    named = known or {entry["license"]["name"].rpartition(" :: ")[2] for entry in entries}
    if not named:
        raise SystemExit(f"{component['name']} {component.get('version')} declares no licence")
    return ", ".join(sorted(named))


def main(packages: Path, folder: Path) -> None:
    """Write both files."""
    found = inventory(packages)
    (folder / "sbom.cdx.json").write_text(json.dumps(found, indent=1) + "\n")
    ours = found["metadata"]["component"]
    rows = [
        f"| {it['name']} | {it.get('version', '')} | {licenses(it)} |"
        for it in sorted([ours, *found["components"]], key=lambda it: str(it["name"]).lower())
    ]
    text = "\n".join(("| Component | Version | Licence |", "|---|---|---|", *rows))
    (folder / "licenses.md").write_text(text + "\n")
    print(f"{folder}/sbom.cdx.json and {folder}/licenses.md: {len(rows)} components")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
