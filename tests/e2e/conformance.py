"""Evidence for the CNCF's AI conformance, from the junit file of an end-to-end run.

`python -m tests.e2e.conformance` reads `dist/e2e.xml`, which `make e2e` writes, and the table in
`conformance.yaml`; it writes `dist/conformance.md` and `dist/conformance.json`.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

import yaml

from metagpu import __version__

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = Path(__file__).with_name("conformance.yaml")
_WORST: Final = ("failed", "not run", "passed")


def versions(junit: ET.Element) -> Mapping[str, str]:
    """Return the Kubernetes and the commit of a run, which `conftest.py` records."""
    known = {each.get("name"): each.get("value", "") for each in junit.iter("property")}
    return {name: known.get(name) or "unknown" for name in ("kubernetes", "commit")}


def outcomes(junit: ET.Element) -> Mapping[str, str]:
    """Return the outcome of each test of a junit file, the worst of its cases."""
    found: dict[str, str] = {}
    for case in junit.iter("testcase"):
        name = case.get("name", "").partition("[")[0]
        test = f"{case.get('classname', '').replace('.', '/')}.py::{name}"
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        if "skipped" in kinds:
            outcome = "not run"
        found[test] = min(outcome, found.get(test, "passed"), key=_WORST.index)
    return found


def evidence(table: Mapping[str, Any], ran: Mapping[str, str]) -> Sequence[Mapping[str, Any]]:
    """Return a row for each requirement; one without tests has no outcome of its own."""
    rows = []
    for name, row in table["requirements"].items():
        tests = {test: ran.get(test, "not run") for test in row.get("tests", ())}
        outcome = min(tests.values(), key=_WORST.index) if tests else "no tests"
        rows.append(
            {
                "id": name,
                "level": row["level"],
                "asks": row["asks"],
                "outcome": outcome,
                "tests": tests,
                "says": row.get("says", ""),
            }
        )
    return rows


def page(kubernetes: str, run: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        f"# AI conformance {kubernetes}: evidence of metagpu {__version__}",
        "",
        "From end-to-end tests on a real one-node Kubernetes with simulated GPUs.",
        f"The tests ran on Kubernetes {run['kubernetes']}, at commit {run['commit']}.",
        "metagpu is a part of a platform, and not certified.",
        "",
        "| Requirement | Level | Asks | Outcome | Tests | Says |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        tests = "<br>".join(f"`{test}`: {outcome}" for test, outcome in row["tests"].items())
        lines.append(
            f"| `{row['id']}` | {row['level']} | {row['asks']} | {row['outcome']} | {tests} "
            f"| {row['says']} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files; return 1 if a test failed or did not run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--junit", type=Path, default=ROOT / "dist" / "e2e.xml")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="a folder")
    args = parser.parse_args(arguments)
    if not args.junit.is_file():
        print(f"there is no {args.junit}: run `make e2e` first", file=sys.stderr)
        return 1
    try:
        junit = ET.parse(args.junit).getroot()  # noqa: S314 - our own file
    except ET.ParseError as error:
        print(f"{args.junit} is incomplete: run `make e2e` again ({error})", file=sys.stderr)
        return 1

    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    rows, run = evidence(table, outcomes(junit)), versions(junit)
    args.output.mkdir(parents=True, exist_ok=True)
    found = {
        "kubernetes": table["kubernetes"],
        "metagpu": __version__,
        "run": run,
        "requirements": rows,
    }
    (args.output / "conformance.json").write_text(json.dumps(found, indent=2) + "\n")
    (args.output / "conformance.md").write_text(page(table["kubernetes"], run, rows))
    for row in rows:
        print(f"{row['outcome']:9} {row['level']:7} {row['id']}")
    return int(any(row["outcome"] in ("failed", "not run") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
