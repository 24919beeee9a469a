"""Writes `docs/status.md` from `metagpu/core/reports/schema`.

`python docs/status_schema.py` writes it, `--check` compares.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, UNSET, UnsetType

from metagpu.core.reports.reading import ReportPart
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.reports.schema.usage import UsageReport

PAGE: Final = Path(__file__).parent / "status.md"
_ENTRY: Final = re.compile(r"^(\w+): (.*?)(?=^\w+: |\Z)", re.MULTILINE | re.DOTALL)
_NAMES: Final = {str: "text", int: "number", float: "number", bool: "boolean"}
_HEAD: Final = """# Status and usage as JSON

`metagpu status -o json`, `mgctl get … -o json` and the status API give reports to programs. This
page has each field.

```console
$ metagpu status -o json | jq '.gpus[] | {index, healthy, reason}'
```

`status` is a [StatusReport](#statusreport), `usage` a [UsageReport](#usagereport). Names stay, and
new ones come: ignore what you do not know. A field that *may be absent* is left out where it says
nothing. A field without a type is a text. `python docs/status_schema.py` makes this page of the
schema in the code.
"""


def render() -> str:
    """Return the page that the schema says."""
    kinds = dict.fromkeys([*_kinds(StatusReport), *_kinds(UsageReport)])
    return "\n".join([_HEAD, *(line for kind in kinds for line in _section(kind))])


def _kinds(kind: type[ReportPart]) -> Iterator[type[ReportPart]]:
    """Yield a report and all objects in it, in the order of the fields."""
    yield kind
    for field in msgspec.structs.fields(kind):
        for part in _parts(field.type):
            yield from _kinds(part)


def _parts(kind: Any) -> Iterator[type[ReportPart]]:  # noqa: ANN401 - any field of a report
    if isinstance(kind, type) and issubclass(kind, ReportPart):
        yield kind
    for part in get_args(kind):
        yield from _parts(part)


def _section(kind: type[ReportPart]) -> Iterator[str]:
    meanings = dict(_meanings(kind))
    yield from (f"## {kind.__name__}", "")
    if kind in (StatusReport, UsageReport):
        yield from (inspect.cleandoc(kind.__doc__ or "").split("\n")[0], "")
    for field in msgspec.structs.fields(kind):
        meaning = meanings[field.name]
        shown = _shown(field.type)
        if "`null`" in meaning:  # it says when, so that the type need not name it
            shown = shown.removesuffix(" or `null`")
        may_be_absent = field.default is UNSET or (
            field.default is not NODEFAULT and kind.__struct_config__.omit_defaults
        )
        if may_be_absent or field.default_factory is list:
            shown += ", may be absent"
        kind_shown = f" ({shown})" if shown != "text" else ""
        yield f"- `{field.encode_name}`{kind_shown}: {meaning}"
    yield ""


def _meanings(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the meaning of each field, those of a base class first."""
    for other in reversed(kind.__mro__):
        if issubclass(other, ReportPart) and (text := other.__dict__.get("__doc__")):
            entries = inspect.cleandoc(inspect.cleandoc(text).partition("Attributes:\n")[2])
            for name, meaning in _ENTRY.findall(entries):
                yield name, " ".join(meaning.split()).removesuffix(".")


def _shown(kind: Any) -> str:  # noqa: ANN401 - any field of a report
    arguments = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_shown(argument) for argument in arguments if argument is not UnsetType)
    if get_origin(kind) is list:
        return f"list of {_shown(arguments[0])}"
    if get_origin(kind) is dict:
        return f"object of {_shown(arguments[1])}"
    if kind is NoneType:
        return "`null`"
    if issubclass(kind, ReportPart):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    return next((name for base, name in _NAMES.items() if kind is base), "text")


def main(arguments: Sequence[str]) -> int:
    """Write the page, or compare it; return the exit status."""
    rendered = render()
    if "--check" not in arguments:
        PAGE.write_text(rendered, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != rendered:
        problem = "docs/status.md is not what the schema says: run `python docs/status_schema.py`"
        print(problem, file=sys.stderr)  # noqa: T201 - a script
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
