"""Writes the tables of `docs/events.md`: what users meet, by the reasons in the code.

`python docs/reasons.py` adds and removes rows, `--check` compares. The first cells of a row are the
code's; the others are sentences of people, which stay, and stand on that page alone.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from metagpu.core.config.errors import ConfigReason
from metagpu.core.errors import MetagpuError, reason_of
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import Fault
from metagpu.core.reports.remarks import RemarkReason
from metagpu.kubectl.pod_reasons import PodReason
from metagpu.plugins.cluster import node_object
from metagpu.plugins.cluster.event_recorder import EventReason
from metagpu.translation import warnings
from metagpu.translation.values import TranslationSettings

DOCS: Final = Path(__file__).parent
PAGE: Final = DOCS / "events.md"
PACKAGE: Final = DOCS.parent / "metagpu"
CLUSTER: Final = PACKAGE / "plugins" / "cluster"
WARNINGS: Final = PACKAGE / "translation" / "warnings.py"
_OUTSIDE: Final = ("sim", "testing")
"""Packages that no daemon of a node logs from."""
_LOGS: Final = re.compile(r"log(ger\(\))?\.(warning|error|exception|critical)\(")
_CLASS: Final = re.compile(
    r'^class (\w+)\((\w+)\):\n    """Raised when (.*?)[;.]', re.MULTILINE | re.DOTALL
)
"""A class of errors: its name, its base, and the first sentence about it."""
_CAUGHT: Final = (
    "ClaimCheckpointUnreadable",
    "FaultNoteUnusable",
    "LeftoverInUse",
    "RelayFailed",
    "UsageError",
)
"""Errors whose text alone people see: in the log, in a report, or from `mgctl` in a container."""
_LEVELS: Final = ("warning", "error", "exception", "critical")
_ERRORS: Final = {"error", "critical"}

Cells = tuple[str, ...]


class Table(NamedTuple):
    """A table of the page.

    Attributes:
        heading: the heading above it.
        rows: returns the cells of the code, in order; the first names the row.
        sentences: how many cells people write.
    """

    heading: str
    rows: Callable[[], Sequence[Cells]]
    sentences: int


class UnknownReasonError(Exception):
    """Raised where the code names no constant reason."""


def events() -> Sequence[Cells]:
    """Return reason and type of each Event, as the calls that record it give them.

    Raises:
        UnknownReasonError: a reason is never recorded.
    """
    types: dict[str, set[str]] = defaultdict(set)
    for function in _functions(CLUSTER):
        calls = [other for other in ast.walk(function) if isinstance(other, ast.Call)]
        for call in calls:
            for argument in call.args:
                for reason in () if isinstance(argument, ast.Call) else _reasons(argument):
                    types[reason] |= _types(call)
        for node in ast.walk(function):  # a reason with a name has the types of the calls with that
            if isinstance(node, ast.Assign):
                taking = [call for call in calls if _names(node.targets[0]) & _names(*call.args)]
                for reason in _reasons(node.value):
                    types[reason].update(*map(_types, taking))
    if silent := [event_reason for event_reason in EventReason if event_reason.name not in types]:
        raise UnknownReasonError(f"no Event has the reason {', '.join(silent)}")
    return sorted(
        (f"`{event_reason}`", " or ".join(sorted(types[event_reason.name])))
        for event_reason in EventReason
    )


def conditions() -> Sequence[Cells]:
    """Return reason, condition and status of the Node's conditions."""
    found = []
    for call in _calls((CLUSTER / "node_object.py").read_text(encoding="utf-8")):
        if ast.unparse(call.func) == "_condition":
            status, reason = (ast.literal_eval(node) for node in call.args[:2])
            kind = ast.unparse(call.args[4]) if len(call.args) > 4 else "PROBLEM_CONDITION"  # noqa: PLR2004 - its place
            found.append((f"`{reason}`", f"`{getattr(node_object, kind)}`", f"`{status}`"))
    return sorted(found)


def errors() -> Sequence[Cells]:
    """Return each event of the log with the level error, but for bugs."""
    return sorted((event,) for event, found in _logged().items() if found & _ERRORS)


def warned() -> Sequence[Cells]:
    """Return each event of the log with the level warning."""
    return sorted((event,) for event, found in _logged().items() if found == {"warning"})


def bugs() -> Sequence[Cells]:
    """Return each event of the log that always has a traceback: a fault of metagpu's own."""
    return sorted((event,) for event, found in _logged().items() if found == {"exception"})


def _logged() -> Mapping[str, set[str]]:
    """Return each event of the log from `warning` on, with the methods that write it.

    Raises:
        UnknownReasonError: an event is no constant text.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if file.relative_to(PACKAGE).parts[0] in _OUTSIDE or not _LOGS.search(text):
            continue
        for call in _calls(text):
            function = call.func
            if not isinstance(function, ast.Attribute) or function.attr not in _LEVELS:
                continue
            if not re.search(r"\b_?log$|get_logger\(\)$", ast.unparse(function.value)):
                continue
            if not call.args or not isinstance(call.args[0], ast.Constant):
                place = f"{file.relative_to(PACKAGE)}:{call.lineno}"
                raise UnknownReasonError(f"{place}: the event of the log is no constant text")
            found[str(call.args[0].value)].add(function.attr)
    return found


def _members(kinds: type[StrEnum]) -> Sequence[Cells]:
    """Return each member of an enum, with the meaning that its docstring has."""
    said = dict(re.findall(r"- (\w+): (.*)", kinds.__doc__ or ""))
    return [(f"`{kind}`", said[kind]) for kind in kinds]


def faults() -> Sequence[Cells]:
    """Return each kind of a GPU's fault."""
    return _members(Fault)


def remarks() -> Sequence[Cells]:
    """Return the reason of each remark of `metagpu status`."""
    return _members(RemarkReason)


def answers() -> Sequence[Cells]:
    """Return the reason of each answer about a pod."""
    return _members(PodReason)


def config_errors() -> Sequence[Cells]:
    """Return the reason of each error of a configuration."""
    return _members(ConfigReason)


def refusals() -> Sequence[Cells]:
    """Return the label `reason` of each kind of refused request, with its meaning."""
    return _classes(RequestError)


def command_errors() -> Sequence[Cells]:
    """Return the reason of each error that ends a command, with its meaning.

    Raises:
        UnknownReasonError: an error has no class of its own.
    """
    for file in sorted(PACKAGE.rglob("*.py")):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(r"\b(raise|return) MetagpuError\(", line):
                place = f"{file.relative_to(PACKAGE)}:{number}"
                raise UnknownReasonError(f"{place}: no class names the cause of the error")
    return _classes(MetagpuError, without=("ConfigError", "RequestError", *_CAUGHT))


def _classes(base: type, without: Sequence[str] = ()) -> Sequence[Cells]:
    """Return the reasons of the classes below a class of errors, with their meanings."""
    texts = [file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")]
    found = [word for text in texts for word in _CLASS.findall(text)]
    bases, rows = [base.__name__], []
    for parent in bases:
        for name, below, meaning in found:
            if below == parent and name not in without:
                bases.append(name)
                sentence = " ".join(meaning.split())
                rows.append((f"`{reason_of(name)}`", f"{sentence[0].upper()}{sentence[1:]}."))
    return sorted(rows)


def translation_warnings() -> Sequence[Cells]:
    """Return each sentence about what of a request is not translated, with `…` for what varies.

    Raises:
        UnknownReasonError: a sentence is no text with constant parts.
    """
    found = []
    for function in ast.walk(ast.parse(WARNINGS.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Yield) and node.value is not None:
                    sentence = _template(node.value, function).removeprefix("container …: ")
                    found.append((sentence,))
    return [row for row in found if row != ("…",)]  # a sentence of another function, with its place


def _template(text: ast.expr, function: ast.FunctionDef) -> str:
    """Return a text as people read it by default, with `…` for what varies."""
    if not isinstance(text, ast.JoinedStr):
        raise UnknownReasonError(f"{ast.unparse(text)} is no sentence with constant parts")
    return "".join(
        str(node.value) if isinstance(node, ast.Constant) else _by_default(node, function)
        for node in text.values
    )


def _by_default(hole: ast.expr, function: ast.FunctionDef) -> str:
    """Return a constant, or a name that the settings have by default; `…` for the rest."""
    match getattr(hole, "value", None):
        case ast.Attribute(ast.Name("settings"), name):
            return str(getattr(TranslationSettings(), name))
        case ast.Name(name):
            assigned = [
                node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and _names(node.targets[0]) == {name}
            ]
            if len(assigned) == 1 and isinstance(assigned[0], ast.Constant):
                return str(assigned[0].value)
            if isinstance(found := getattr(warnings, name, None), str):
                return found
    return "…"


TABLES: Final = (
    Table("## Events", events, 3),
    Table("## Conditions of the Node", conditions, 2),
    Table("## Errors in the log", errors, 2),
    Table("## Warnings in the log", warned, 2),
    Table("## Bugs in the log", bugs, 0),
    Table("## Faults of a GPU", faults, 0),
    Table("## Remarks of the status", remarks, 1),
    Table("## Answers about a pod", answers, 1),
    Table("## Refused requests", refusals, 1),
    Table("## Errors of a configuration", config_errors, 1),
    Table("## Errors of commands", command_errors, 1),
    Table("## Warnings of a translation", translation_warnings, 1),
)


def render(page: str) -> str:
    """Return the page with the code's rows, and the sentences that it has."""
    for table in TABLES:
        start = page.index("\n|", page.index(f"\n{table.heading}\n")) + 1
        end = page.index("\n\n", start) if "\n\n" in page[start:] else len(page)
        head, rule, *rows = page[start:end].rstrip("\n").split("\n")
        written = _sentences(rows, table.sentences)
        lines = [
            "| " + " | ".join((*row, *written.get(row[0], ("",) * table.sentences))) + " |"
            for row in table.rows()
        ]
        page = page[:start] + "\n".join([head, rule, *lines]) + (page[end:] or "\n")
    return page


def missing(page: str) -> Sequence[str]:
    """Return the names of rows that lack a sentence."""
    return [line.split(" | ")[0][2:] for line in page.splitlines() if re.search(r"\|\s*\|", line)]


def _sentences(rows: Sequence[str], count: int) -> Mapping[str, Cells]:
    cells = [tuple(part.strip() for part in row.strip("|").split(" | ")) for row in rows]
    return {cell[0]: cell[len(cell) - count :] for cell in cells}


def _functions(folder: Path) -> Iterator[ast.AST]:
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if EventReason.__name__ in text else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def _calls(text: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))


def _reasons(node: ast.AST) -> Iterator[str]:
    """Yield the members of `EventReason` that stand in an expression."""
    for other in ast.walk(node):
        if isinstance(other, ast.Attribute) and ast.unparse(other.value) == EventReason.__name__:
            yield other.attr


def _names(*expressions: ast.AST) -> set[str]:
    return {node.id for at in expressions for node in ast.walk(at) if isinstance(node, ast.Name)}


def _types(call: ast.Call) -> set[str]:
    """Return the types that an Event of a call may have."""
    for keyword in call.keywords:
        if keyword.arg == "warning":
            always = isinstance(keyword.value, ast.Constant)
            return {"Warning"} if always else {"Normal", "Warning"}
    return {"Normal"}


def main(arguments: Sequence[str]) -> int:
    """Write the tables, or compare them; return the exit status."""
    page = PAGE.read_text(encoding="utf-8")
    rendered = render(page)
    if "--check" not in arguments:
        PAGE.write_text(rendered, encoding="utf-8")
    problems = [f"{name}: write its sentences in docs/events.md" for name in missing(rendered)]
    if "--check" in arguments and rendered != page:
        problems.append("docs/events.md is not what the code says: run `python docs/reasons.py`")
    print("\n".join(problems), end="\n" * bool(problems), file=sys.stderr)  # noqa: T201 - a script
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
