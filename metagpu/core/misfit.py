"""What msgspec says of a value that does not fit, in the words of whoever wrote the file."""

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from metagpu.core.paths import below, steps, value_at
from metagpu.core.spelling import allowed
from metagpu.core.units import decode_unit

_MOST_TRIES: Final = 200
"""Keys that are tried to find the one that is wrong; in a larger mapping none is named."""
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


def misfit(value: object, wanted: type, message: str) -> tuple[str, str]:
    """Say what msgspec says of a value, in the words of whoever wrote the file.

    Args:
        value: which is no `wanted`.
        wanted: what it should be.
        message: of msgspec's error.

    Returns:
        The path of what is wrong in the value, and the problem with it.
    """
    problem, is_key, inner = _parts(message)
    expected = _types_at(wanted, inner)
    # msgspec does not tell which of a mapping's own keys it was.
    head, of_a_key, rest = inner.partition("[...]")
    key = _culprit(value, wanted, message, head) if of_a_key or is_key else None
    place = head if key is None else below(head, key) + rest.partition("[...]")[0]

    if unknown := re.search(r"unknown field `(.*)`", problem, re.DOTALL):
        place = f"{place}.{unknown[1]}".removeprefix(".")
        problem = _unknown_key(unknown[1], expected)
    elif unknown := re.search(r"nvalid enum value (.*)", problem, re.DOTALL):
        problem = _unknown_value(unknown[1], expected)
    elif key is None and (about := _ABOUT_KEY.fullmatch(problem)):
        if about[1] in _keys(value_at(value, place)):
            place = f"{place}.{about[1]}".removeprefix(".")
    elif is_key:
        whose = "one of its keys" if key is None else "the key"
        problem = f"{whose}: {_plain(problem)}"
    return place, _plain(problem)


def _culprit(value: object, wanted: type, message: str, head: str) -> object:
    """Find the key of the mapping at `head` that msgspec complains of, by giving it each alone."""
    try:
        mapping = value_at(value, head)
    except LookupError:
        return None

    for key in islice(_keys(mapping), _MOST_TRIES):
        try:
            alone = _with(value, steps(head), {key: mapping[key]})
            msgspec.convert(alone, wanted, dec_hook=decode_unit)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return key
    return None


def _with(value: Any, way: Sequence[int | str], other: object) -> object:  # noqa: ANN401 - YAML
    """Copy a value with another one at the end of a way into it."""
    if not way:
        return other
    copy: Any = list(value) if isinstance(value, list) else dict(value)
    copy[way[0]] = _with(value[way[0]], way[1:], other)
    return copy


def _keys(value: object) -> Iterable[object]:
    return value.keys() if isinstance(value, dict) else ()


def _parts(message: str) -> tuple[str, bool, str]:
    """Take msgspec's message apart: the problem, whether it is about a key, and where."""
    found = _PLACE.fullmatch(message)
    return (found[1], bool(found[2]), found[3] or "") if found else (message, False, "")


def _types_at(wanted: type, inner: str) -> list[msgspec.inspect.Type]:
    """Find what msgspec would take at `inner` below a value of type `wanted`."""
    types = _members(msgspec.inspect.type_info(wanted))

    for step in steps(inner.replace("[...]", "[0]")):
        under = [_below(info, step) for info in types]
        types = [member for info in under if info for member in _members(info)]
    return types


def _below(info: msgspec.inspect.Type, step: int | str) -> msgspec.inspect.Type | None:
    if isinstance(step, int):
        found: msgspec.inspect.Type | None = getattr(info, "item_type", None)
        return found or getattr(info, "value_type", None)
    if isinstance(info, msgspec.inspect.StructType):
        return next((field.type for field in info.fields if field.encode_name == step), None)
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
