"""The fields that the page's JavaScript reads, against the schema of the reports."""

import re
from pathlib import Path
from typing import Final

import metagpu.plugins.web
from metagpu.core.reports.reading import ReportPart
from metagpu.core.reports.schema import daemon, gpus, status, usage

ASSETS: Final = Path(metagpu.plugins.web.__file__).parent / "assets"
_STRINGS: Final = re.compile(r"//[^\n]*|/\*.*?\*/|'[^'\n]*'", re.DOTALL)
_READ: Final = re.compile(r"(?<!\.)\.([a-z]\w*)\b(?!\s*\()")
"""A property that is read, and no method that is called."""
_OWN: Final = re.compile(r"(?<![.\w])([a-z]\w*)")
"""A name that the script gives itself: of a variable, or of a field of its own objects."""
_BROWSER: Final = frozenset(
    ("children", "classList", "firstElementChild", "hintText", "length", "tabIndex", "tagName")
)
_READERS: Final = ("reading.js", "reasons.js", "gpu.js", "node.js")
"""The scripts that read the reports of a view."""


def schema_fields() -> frozenset[str]:
    """Return the names in JSON of all fields of all reports."""
    kinds = [
        variable
        for module in (daemon, gpus, status, usage)
        for variable in vars(module).values()
        if isinstance(variable, type)
    ]
    return frozenset(
        name
        for kind in kinds
        if issubclass(kind, ReportPart)
        for name in kind.__struct_encode_fields__
    )


def unknown_fields(readers: str, scripts: str = "") -> set[str]:
    """Return properties that are read, and that scripts, browsers and the schema lack."""
    read, own = (_STRINGS.sub("", text) for text in (readers, readers + scripts))
    return set(_READ.findall(read)) - set(_OWN.findall(own)) - _BROWSER - schema_fields()


def test_the_page_reads_fields_of_the_schema() -> None:
    """Each field that the page reads of a report is in the schema."""
    scripts = {file.name: file.read_text() for file in sorted(ASSETS.glob("*.js"))}
    readers = "\n".join(scripts[name] for name in _READERS)
    assert unknown_fields(readers, "\n".join(scripts.values())) == set()
    assert {"freeCapacity", "overLimit", "nodeDifferences"} <= set(_READ.findall(readers))
    assert unknown_fields("gpu.usedMib + gpu.usedMiB") == {"usedMib"}
