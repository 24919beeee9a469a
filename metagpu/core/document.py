"""YAML into typed values, with errors that name the file, the line and the path.

A `Document` remembers where each value stands, so that any later check can complain in the same
words: `FILE: LINE: PATH: what is wrong, what is allowed`.
"""

import difflib
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import yaml

from metagpu.core.errors import ConfigError
from metagpu.core.units import decode_unit

ValueT = TypeVar("ValueT")

_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


class Document:
    """One YAML (or JSON) file, parsed.

    Raises:
        ConfigError: if it is no YAML, or a key stands twice in one mapping.
    """

    def __init__(self, text: str, file: str) -> None:
        self.file = file

        try:
            self._root: yaml.Node | None = yaml.compose(text, Loader=_Loader)
            self.data: Any = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 0
            raise ConfigError(f"no valid YAML: {error.problem}", file=file, line=line) from error
        except yaml.YAMLError as error:
            raise ConfigError(f"no valid YAML: {error}", file=file) from error

        for key, first, again in _repeated(self._root):
            raise ConfigError(
                f"the key stands twice, first in line {first}; keep one of them",
                file=file,
                line=again,
                path=key,
            )

    def error(self, path: str, problem: str) -> ConfigError:
        """Make the error for a problem with the value at `path`, or as near to it as exists."""
        return ConfigError(problem, file=self.file, line=self._line(path), path=path)

    def at(self, path: str) -> Any:  # noqa: ANN401 - YAML holds anything
        """Give the plain value at a path such as `pools[0].backends[1]`."""
        value = self.data
        for key, index in _STEP.findall(path):
            value = value[int(index)] if index else value[key]
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
            problem, _, where = str(error).partition(" - at `")
            inner = where.rstrip("`").removeprefix("$").removeprefix(".")
            full = ".".join(part for part in (path, inner) if part).replace(".[", "[")
            expected = _type_at(wanted, value, inner)

            if unknown := re.search(r"unknown field `(.*)`", problem):
                full = f"{full}.{unknown[1]}".removeprefix(".")
                problem = _unknown_key(unknown[1], expected)
            elif "nvalid enum value" in problem:
                problem = _unknown_value(self.at(full), expected)
            raise self.error(full, _plain(problem)) from None

    def _line(self, path: str) -> int:
        node, line = self._root, self._root.start_mark.line + 1 if self._root else 0

        for key, index in _STEP.findall(path):
            step = _child(node, key, int(index) if index else None)
            if step is None:
                break
            node, line = step
        return line


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


def _type_at(wanted: Any, value: Any, inner: str) -> msgspec.inspect.Type:  # noqa: ANN401
    """Find what msgspec expects at `inner` below a value of type `wanted`."""
    info = _struct_in(msgspec.inspect.type_info(wanted))

    for key, index in _STEP.findall(inner):
        if index:
            info = getattr(info, "item_type", info)
        elif isinstance(info, msgspec.inspect.StructType):
            info = next((f.type for f in info.fields if f.encode_name == key), info)
        info = _struct_in(info)
        value = value[int(index)] if index else value[key]

    return info


def _struct_in(info: msgspec.inspect.Type) -> msgspec.inspect.Type:
    """Look through a union: what we can say more about is the struct or the enum in it."""
    telling = (msgspec.inspect.StructType, msgspec.inspect.EnumType, msgspec.inspect.LiteralType)

    if isinstance(info, msgspec.inspect.UnionType):
        return next((member for member in info.types if isinstance(member, telling)), info)
    return info


def _unknown_key(key: str, expected: msgspec.inspect.Type) -> str:
    fields = expected.fields if isinstance(expected, msgspec.inspect.StructType) else ()
    return f"unknown key; {_allowed(key, [field.encode_name for field in fields])}"


def _unknown_value(value: Any, expected: msgspec.inspect.Type) -> str:  # noqa: ANN401
    values: list[str] = []
    if isinstance(expected, msgspec.inspect.LiteralType):
        values = [str(member) for member in expected.values]
    elif isinstance(expected, msgspec.inspect.EnumType):
        values = [str(member.value) for member in expected.cls]

    return f"{value!r} is not known here; {_allowed(str(value), values)}"


def _allowed(given: str, known: list[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""

    return f"allowed: {', '.join(sorted(known))}{hint}"


def _plain(problem: str) -> str:
    """Say msgspec's message in YAML's words rather than Python's."""
    for python, plain in {
        "`object`": "a mapping",
        "`array`": "a list",
        "`str`": "a text",
        "`int`": "a whole number",
        "`bool`": "true or false",
        "`float`": "a number",
        "`null`": "nothing",
        "Object missing required field": "missing key",
    }.items():
        problem = problem.replace(python, plain)
    return problem[:1].lower() + problem[1:]
