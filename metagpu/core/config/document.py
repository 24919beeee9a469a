"""YAML documents as typed values; errors name the file, the line and the path.

A `Document` knows the line of each value, so that any later check can report in the same form:
`FILE: LINE: PATH: problem, allowed values`.
"""

import json
from collections.abc import Iterable, Iterator
from copy import copy, deepcopy
from typing import Any, Final, TypeVar

import msgspec
import yaml

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.config.paths import join_path, renumber, split_path, value_at
from metagpu.core.config.units import decode_unit

ValueT = TypeVar("ValueT")

MAX_TEXT: Final = 1024 * 1024
"""Characters of a document: the size of the largest ConfigMap. The author of a ConfigMap must not
stop a node's daemon; the other limits have the same reason."""
_MAX_VALUES: Final = 50_000
"""The values of a document, with each alias written out: a few lines of aliases of aliases expand
to billions of values."""
_MAX_ENTRIES: Final = 1000
"""The entries of one list or mapping: some checks compare every entry with every other."""
_MAX_DEPTH: Final = 100
"""Lists and mappings inside each other. Thousands would end the process: libyaml's composer, which
is thirty times as fast as PyYAML's own, recurses without a limit."""
_MAX_NUMBER: Final = 100
"""Characters of a number or a date: YAML's numbers to the base of 60 cost quadratic time."""
_NUMBERS: Final = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader, or PyYAML's own where PyYAML was built without libyaml."""
_FIXES: Final = {
    "found character '\\t' that cannot start any token": "indent with spaces, not with tabs",
    "found another document": "keep one document in a file, without `---` between",
}
"""The fix for problems whose description by PyYAML does not name it."""


class Document:
    """One YAML (or JSON) file, parsed.

    Attributes:
        file: its name in messages.
        data: its plain value.
        is_json: whether the text is in braces, as JSON is.

    Args:
        text: the content.
        file: its name in messages.
        first_line: the line of `file` at which `text` begins, for a part of a file; 0 for a text
            of one line, whose messages name no line.

    Raises:
        ConfigError: the text is no YAML, a value contains itself, the text has too many values,
            or a mapping has a key twice.
    """

    def __init__(self, text: str, file: str, first_line: int = 1) -> None:
        self.file = file
        self._above = first_line - 1
        self._removed: dict[str, frozenset[int]] = {}

        self.is_json = text.lstrip().startswith("{")
        text = self._text = _without_tabs(text)
        self._loader = _LOADER
        try:
            if problem := _excess(text):
                raise ConfigError(f"no usable YAML: {problem}", ConfigReason.TOO_LARGE, file=file)
            self._root: yaml.Node | None = _compose(text)
            if _count_values(self._root, {}) > _MAX_VALUES:
                raise ConfigError(
                    f"no usable YAML: with its aliases written out it has more than {_MAX_VALUES} "
                    "values; write less",
                    ConfigReason.TOO_LARGE,
                    file=file,
                )
            self.data: Any = yaml.load(text, Loader=_LOADER)  # noqa: S506 - a safe loader
            repeated = list(_repeated(self._root))
        except yaml.MarkedYAMLError as error:
            line = self._above + error.problem_mark.line + 1 if error.problem_mark else 0
            problem = str(error.problem).removeprefix("but ")
            if fix := _FIXES.get(problem):
                problem = f"{problem}; {fix}"
            raise ConfigError(
                f"no valid YAML: {problem}", ConfigReason.NO_YAML, file=file, line=line
            ) from error
        except RecursionError:
            problem = "no usable YAML: a value contains itself, or values are nested too deeply"
            raise ConfigError(problem, ConfigReason.NO_YAML, file=file) from None
        except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # PyYAML does not wrap the errors of its types, for example of a date of February 31st.
            problem = " ".join(str(error).split())
            raise ConfigError(
                f"no valid YAML: {problem}", ConfigReason.NO_YAML, file=file
            ) from error

        for key, first, again in repeated:
            raise ConfigError(
                f"the key is there twice, first in line {self._above + first}; keep one of them",
                ConfigReason.GIVEN_TWICE,
                file=file,
                line=self._above + again,
                path=key,
            )

    def read_by(self, loader: Any) -> None:  # noqa: ANN401 - a loader of PyYAML
        """Read the text again as another program reads it, unless that is done.

        Raises:
            ConfigError: that program reads no YAML in it.
        """
        if self._loader is loader:
            return
        self._loader = loader
        try:
            self.data = yaml.load(self._text, Loader=loader)  # noqa: S506 - a safe loader
        except yaml.MarkedYAMLError as error:
            line = self._above + error.problem_mark.line + 1 if error.problem_mark else 0
            problem = f"no valid YAML: {error.problem}"
            raise ConfigError(problem, ConfigReason.NO_YAML, file=self.file, line=line) from error
        except (yaml.YAMLError, ValueError, LookupError) as error:
            problem = f"no valid YAML: {error}"
            raise ConfigError(problem, ConfigReason.NO_YAML, file=self.file) from error

    def error(self, path: str, problem: str, reason: ConfigReason) -> ConfigError:
        """Return the error for a problem at `path`."""
        file, line, whole = self.place(path)
        return ConfigError(problem, reason, file=file, line=line, path=whole)

    def place(self, path: str) -> tuple[str, int, str]:
        """Return file, line and path; the line is that of the nearest existing value."""
        whole = renumber(path, self._removed, restore=True) if self._removed else path
        return self.file, self.line(path), whole

    def without(self, path: str) -> "Document | None":
        """Return this document without a value, `None` if it is not there.

        Errors about the rest keep the lines and the paths of the whole document.
        """
        if not path:
            return None
        *parents, last = split_path(renumber(path, self._removed, restore=False))
        smaller = copy(self)
        smaller.data = deepcopy(self.data)
        try:
            parent = smaller.data
            for step in parents:
                parent = parent[step]
            del parent[last]
        except (LookupError, TypeError):
            return None
        if isinstance(last, int):
            place, _, index = path.rpartition("[")
            gone = self._removed.get(place, frozenset())
            smaller._removed = {**self._removed, place: gone | {int(index.rstrip("]"))}}  # noqa: SLF001 - of this class
        return smaller

    def at(self, path: str) -> Any:  # noqa: ANN401 - YAML holds anything
        """Return the plain value at a path such as `pools[0].backends[1]`."""
        return value_at(self.data, path)

    def decode(self, wanted: type[ValueT], path: str = "") -> ValueT:
        """Return the value at `path`, converted to the type `wanted`.

        Raises:
            ConfigError: the value does not fit; for an unknown key, with the known keys.
        """
        value = self.at(path)

        try:
            return msgspec.convert(value, wanted, dec_hook=decode_unit)
        except msgspec.ValidationError as error:
            from metagpu.core.config.decode_errors import describe_mismatch  # noqa: PLC0415 - only for a wrong file

            inner, problem, reason = describe_mismatch(value, wanted, str(error))
            raise self.error(join_path(path, inner), problem, reason) from None

    def rename_key(self, path: str, old: str, new: str) -> None:
        """Rename a key of the mapping at `path`; its value keeps its line."""
        mapping, node = self.at(path), self._root
        renamed = {new if key == old else key: value for key, value in mapping.items()}
        mapping.clear()
        mapping.update(renamed)

        for step in split_path(path):
            node = found[0] if (found := _child(node, step)) else None
        for name, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if name.value == old:
                name.value = new

    def line(self, path: str) -> int:
        """Return the line of the value at `path`, or of the nearest existing value."""
        node, line = self._root, self._root.start_mark.line + 1 if self._root else 0
        if self._removed:
            path = renumber(path, self._removed, restore=True)

        for step in split_path(path):
            found = _child(node, step)
            if found is None:
                break
            node, line = found
        return self._above + line if line else 0


def _without_tabs(text: str) -> str:
    """Return JSON with spaces for tabs, which YAML does not take as indentation.

    A tab is never part of a value in JSON. Other texts are returned as they are.
    """
    if "\t" not in text or len(text) > MAX_TEXT:
        return text
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text.replace("\t", " ")


def _excess(text: str) -> str:
    """Return the limit that a text exceeds, empty for none, at little cost."""
    if len(text) > MAX_TEXT:
        return f"it has {len(text)} characters; allowed: {MAX_TEXT} at most"

    values = 0
    depth: list[int] = [0]
    """The number of entries so far, of every list and mapping around the event."""
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            if isinstance(event, yaml.CollectionEndEvent):
                depth.pop()
                continue
            if not isinstance(event, yaml.NodeEvent):
                continue
            values += 1
            depth[-1] += 1
            if isinstance(event, yaml.CollectionStartEvent):
                depth.append(0)
            if len(depth) > _MAX_DEPTH:
                return "a value contains itself, or values are nested too deeply"
            if depth[-1] > 2 * _MAX_ENTRIES or values > _MAX_VALUES:  # a key is a value too
                line = event.start_mark.line + 1 if event.start_mark else 0
                return (
                    f"in line {line} there are too many values; allowed: {_MAX_ENTRIES} in a list, "
                    f"{_MAX_VALUES} in a file"
                )
    except (yaml.YAMLError, ValueError):
        return ""  # the next reader words it
    return ""


def _compose(text: str) -> yaml.Node | None:
    """Return the nodes of a text; PyYAML words its mistakes better than libyaml does."""
    try:
        root: yaml.Node | None = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    return root


def _child(node: yaml.Node | None, step: int | str) -> tuple[yaml.Node, int] | None:
    """Return the value node under a key or index, and the line of the key or item."""
    if isinstance(node, yaml.MappingNode) and isinstance(step, str):
        for name, value in node.value:
            if name.value == step:
                return value, name.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        value = node.value[step]
        return value, value.start_mark.line + 1
    return None


def _count_values(node: yaml.Node | None, known: dict[yaml.Node, int]) -> int:
    """Count the values of a node with each alias written out, without expansion."""
    if node is None:
        return 0
    if node not in known:
        inner: Iterable[yaml.Node] = ()
        if isinstance(node, yaml.MappingNode):
            inner = (part for pair in node.value for part in pair)
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif node.tag in _NUMBERS and len(node.value) > _MAX_NUMBER:
            raise ValueError(f"a number of {len(node.value)} digits; put a text in quotes")
        known[node] = 1 + sum(_count_values(part, known) for part in inner)
    return known[node]


def _repeated(node: yaml.Node | None, path: str = "") -> Iterator[tuple[str, int, int]]:
    """Find keys that a mapping has twice; PyYAML would silently keep the last."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for name, value in node.value:
            here = f"{path}.{name.value}".removeprefix(".")
            if name.value in seen:
                yield here, seen[name.value], name.start_mark.line + 1
            seen[str(name.value)] = name.start_mark.line + 1
            yield from _repeated(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _repeated(value, f"{path}[{number}]")
