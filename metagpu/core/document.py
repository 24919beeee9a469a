"""YAML into typed values, with errors that name the file, the line and the path.

A `Document` remembers where each value stands, so that any later check can complain in the same
words: `FILE: LINE: PATH: what is wrong, what is allowed`.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

import msgspec
import yaml

from metagpu.core.errors import ConfigError
from metagpu.core.spelling import allowed
from metagpu.core.units import decode_unit

ValueT = TypeVar("ValueT")

_MOST_VALUES: Final = 100_000
"""Values of a document, each alias counted as what it stands for: some lines of aliases of aliases
stand for thousands of millions, and whoever may write a ConfigMap must not stop a node's daemon."""
_MENDS: Final = {
    "found character '\\t' that cannot start any token": "indent with spaces, not with tabs",
    "found another document": "keep one document in a file, without `---` between",
}
"""What to do about a problem that PyYAML names, where its words alone do not say it."""
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]|\[\"([^\"]*)\"\]")
"""A key, a place in a list, or in quotes a key that has dots or brackets in it."""
_PLACE = re.compile(r"(.*?)(?: - at (`key` in )?`\$\.?([^`]*)`)?", re.DOTALL)
"""How msgspec ends a message: where it was, and whether it means a key there."""
_ABOUT_KEY = re.compile(r"(\w+) (?:is|must) .*", re.DOTALL)
"""How a struct complains of one of its keys."""
_PLAIN = {
    "object": "a mapping",
    "array": "a list",
    "str": "a text",
    "int": "a whole number",
    "bool": "true or false",
    "float": "a number",
    "null": "nothing",
}


class Document:
    """One YAML (or JSON) file, parsed.

    Attributes:
        file: what messages call it.
        data: its plain value.

    Args:
        text: what it says.
        file: what messages call it.
        first_line: the line of `file` at which `text` begins, when it is a part of it; 0 for a
            text of one line, of which nobody has to be told the line.

    Raises:
        ConfigError: if it is no YAML, holds itself or too much, or a key stands twice in one
            mapping.
    """

    def __init__(self, text: str, file: str, first_line: int = 1) -> None:
        self.file = file
        self._above = first_line - 1

        try:
            # libyaml's loader is faster, and ends the process when lists are nested deeply.
            self._root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
            if (values := _weight(self._root, {})) > _MOST_VALUES:
                raise ConfigError(
                    f"no usable YAML: it has {values} values, those that aliases stand for "
                    f"included; allowed: {_MOST_VALUES} at most",
                    file=file,
                )
            self.data: Any = yaml.safe_load(text)
            repeated = list(_repeated(self._root))
        except yaml.MarkedYAMLError as error:
            line = self._above + error.problem_mark.line + 1 if error.problem_mark else 0
            told = str(error.problem).removeprefix("but ")
            mend = _MENDS.get(told)
            problem = f"{told}; {mend}" if mend else told
            raise ConfigError(f"no valid YAML: {problem}", file=file, line=line) from error
        except RecursionError:
            problem = "no usable YAML: a value holds itself, or too many others in each other"
            raise ConfigError(problem, file=file) from None
        except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # PyYAML lets the errors of its types through: of a date of February 31st, for one.
            problem = " ".join(str(error).split())
            raise ConfigError(f"no valid YAML: {problem}", file=file) from error

        for key, first, again in repeated:
            raise ConfigError(
                f"the key stands twice, first in line {self._above + first}; keep one of them",
                file=file,
                line=self._above + again,
                path=key,
            )

    def error(self, path: str, problem: str) -> ConfigError:
        """Make the error for a problem with the value at `path`, or as near to it as exists."""
        return ConfigError(problem, file=self.file, line=self.line(path), path=path)

    def at(self, path: str) -> Any:  # noqa: ANN401 - YAML holds anything
        """Give the plain value at a path such as `pools[0].backends[1]`."""
        value = self.data
        for key, index, quoted in _STEP.findall(path):
            value = value[int(index)] if index else value[quoted or key]
        return value

    def decode(self, wanted: type[ValueT], path: str = "") -> ValueT:
        """Give the value at `path` as a `wanted`.

        Raises:
            ConfigError: if it does not fit; unknown keys come with those that are known.
        """
        value = self.at(path)

        try:
            return msgspec.convert(value, wanted, dec_hook=decode_unit)
        except msgspec.ValidationError as error:
            raise self._misfit(str(error), wanted, path) from None

    def _misfit(self, message: str, wanted: type, path: str) -> ConfigError:
        """Say what msgspec says of the value at `path`, in the words of whoever wrote the file."""
        problem, is_key, inner = _parts(message)
        # msgspec does not tell which of a mapping's own keys it was, so the mapping is named.
        full = ".".join(part for part in (path, inner.partition("[...]")[0]) if part)
        full = full.replace(".[", "[")
        expected = _types_at(wanted, inner)

        if unknown := re.search(r"unknown field `(.*)`", problem, re.DOTALL):
            full = f"{full}.{unknown[1]}".removeprefix(".")
            problem = _unknown_key(unknown[1], expected)
        elif unknown := re.search(r"nvalid enum value (.*)", problem, re.DOTALL):
            problem = _unknown_value(unknown[1], expected)
        elif (about := _ABOUT_KEY.fullmatch(problem)) and about[1] in _keys(self.at(full)):
            full = f"{full}.{about[1]}".removeprefix(".")
        elif is_key:
            problem = f"one of its keys: {_plain(problem)}"
        return self.error(full, _plain(problem))

    def line(self, path: str) -> int:
        """Tell the line of the value at `path`, or of what is as near to it as exists."""
        node, line = self._root, self._root.start_mark.line + 1 if self._root else 0

        for key, index, quoted in _STEP.findall(path):
            step = _child(node, quoted or key, int(index) if index else None)
            if step is None:
                break
            node, line = step
        return self._above + line if line else 0


def below(path: str, key: object) -> str:
    """Give the path of what stands under a key of the mapping at `path`."""
    name = str(key)
    plain = re.fullmatch(r"[^.\[\]\"]+", name)
    return f"{path}.{name}".removeprefix(".") if plain else f'{path}["{name}"]'


def _keys(value: object) -> Iterable[object]:
    return value.keys() if isinstance(value, dict) else ()


def _child(node: yaml.Node | None, key: str, index: int | None) -> tuple[yaml.Node, int] | None:
    """Find the value node under a key or index, and the line a person would look at."""
    if isinstance(node, yaml.MappingNode) and index is None:
        for name, value in node.value:
            if name.value == key:
                return value, name.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode) and index is not None and index < len(node.value):
        value = node.value[index]
        return value, value.start_mark.line + 1
    return None


def _weight(node: yaml.Node | None, known: dict[yaml.Node, int]) -> int:
    """Count the values of a node as if each alias were written out, without doing so."""
    if node is None:
        return 0
    if node not in known:
        inner: Iterable[yaml.Node] = ()
        if isinstance(node, yaml.MappingNode):
            inner = (part for pair in node.value for part in pair)
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        known[node] = 1 + sum(_weight(part, known) for part in inner)
    return known[node]


def _repeated(node: yaml.Node | None, path: str = "") -> Iterator[tuple[str, int, int]]:
    """Find keys that stand twice in one mapping; PyYAML would silently keep the last."""
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


def _parts(message: str) -> tuple[str, bool, str]:
    """Take msgspec's message apart: the problem, whether it is about a key, and where."""
    found = _PLACE.fullmatch(message)
    return (found[1], bool(found[2]), found[3] or "") if found else (message, False, "")


def _types_at(wanted: type, inner: str) -> list[msgspec.inspect.Type]:
    """Find what msgspec would take at `inner` below a value of type `wanted`."""
    types = _members(msgspec.inspect.type_info(wanted))

    for key, index, _ in _STEP.findall(inner.replace("[...]", "[0]")):
        below = [_below(info, key, item=bool(index)) for info in types]
        types = [member for info in below if info for member in _members(info)]
    return types


def _below(info: msgspec.inspect.Type, key: str, *, item: bool) -> msgspec.inspect.Type | None:
    if item:
        found: msgspec.inspect.Type | None = getattr(info, "item_type", None)
        return found or getattr(info, "value_type", None)
    if isinstance(info, msgspec.inspect.StructType):
        return next((field.type for field in info.fields if field.encode_name == key), None)
    return None


def _members(info: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    return list(info.types) if isinstance(info, msgspec.inspect.UnionType) else [info]


def _unknown_key(key: str, expected: Iterable[msgspec.inspect.Type]) -> str:
    structs = [info for info in expected if isinstance(info, msgspec.inspect.StructType)]
    known = [field.encode_name for info in structs for field in info.fields]

    return f"unknown key; {allowed(key, sorted(known))}"


def _unknown_value(given: str, expected: Iterable[msgspec.inspect.Type]) -> str:
    values: list[str] = []
    for info in expected:
        if isinstance(info, msgspec.inspect.LiteralType):
            values += [str(member) for member in info.values]
        elif isinstance(info, msgspec.inspect.EnumType):
            values += [str(member.value) for member in info.cls]

    bare = given.strip("'")
    return f"{given} is not known here; {allowed(bare, sorted(values))}"


def _plain(problem: str) -> str:
    """Say msgspec's message in YAML's words rather than Python's."""
    problem = re.sub(r"`([a-z |]+)`", _plain_types, problem)
    problem = problem.replace("Object missing required field", "missing key")
    return problem[:1].lower() + problem[1:]


def _plain_types(quoted: re.Match[str]) -> str:
    words = quoted[1].split(" | ")
    return " or ".join(_PLAIN[word] for word in words) if set(words) <= _PLAIN.keys() else quoted[0]
