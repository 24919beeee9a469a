"""Messages of msgspec, translated into paths, keys and types of the YAML file."""

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from metagpu.core.config.errors import ConfigReason, allowed_values
from metagpu.core.config.paths import key_path, split_path, value_at
from metagpu.core.config.units import decode_unit

_MAX_TRIES: Final = 200
"""The keys that are tried to find the wrong one; a larger mapping is reported as a whole."""
_LOCATION = re.compile(r"(.*?)(?: - at (`key` in )?`\$\.?([^`]*)`)?", re.DOTALL)
"""The end of msgspec's messages: the location, and whether it is a key there."""
_ABOUT_KEY = re.compile(r"`?([a-z]\w*)\b(?! and ).*", re.DOTALL)
"""The message of a struct's check, which begins with its key; msgspec's begin with a capital."""
_REASONS: Final = {
    "unknown field `": ConfigReason.UNKNOWN_KEY,
    "^Invalid enum value ": ConfigReason.UNKNOWN_VALUE,
    "^Object missing required field": ConfigReason.MISSING,
    "^Expected `.*`, got `": ConfigReason.WRONG_TYPE,
}
_YAML_TYPES = {
    "object": "a mapping",
    "array": "a list",
    "str": "a text",
    "int": "a whole number",
    "bool": "true or false",
    "float": "a number",
    "null": "nothing",
}


def describe_mismatch(value: object, wanted: type, message: str) -> tuple[str, str, ConfigReason]:
    """Translate msgspec's error about a value: path, problem and reason.

    Args:
        value: the value that could not be converted.
        wanted: the type that it should have.
        message: the message of msgspec's error.

    Returns:
        The path of the wrong part inside the value, the problem with it, and the reason.
    """
    problem, is_key, inner = _parts(message)
    expected = _types_at(wanted, inner)
    # msgspec does not name the key of a mapping without fixed keys.
    head, of_a_key, rest = inner.partition("[...]")
    key = _culprit(value, wanted, message, head) if of_a_key or is_key else None
    place = head if key is None else key_path(head, key) + rest.partition("[...]")[0]

    reason = _reason(problem)
    if unknown := re.search(r"unknown field `(.*)`", problem, re.DOTALL):
        place = f"{place}.{unknown[1]}".removeprefix(".")
        problem = _unknown_key(unknown[1], expected)
    elif unknown := re.search(r"nvalid enum value (.*)", problem, re.DOTALL):
        problem = _unknown_value(unknown[1], expected)
    elif key is None and (about := _ABOUT_KEY.fullmatch(problem)):
        if about[1] in _keys(value_at(value, place)):
            place = f"{place}.{about[1]}".removeprefix(".")
    elif is_key:
        subject = "one of its keys" if key is None else "the key"
        problem = f"{subject}: {_plain(problem)}"
    return place, _plain(problem), reason


def _reason(problem: str) -> ConfigReason:
    """Return the reason of a problem; a struct's own words mean an invalid value."""
    return next(
        (reason for form, reason in _REASONS.items() if re.search(form, problem)),
        ConfigReason.INVALID_VALUE,
    )


def _culprit(value: object, wanted: type, message: str, head: str) -> object:
    """Find the wrong key of the mapping at `head`: convert each key alone."""
    try:
        mapping = value_at(value, head)
    except LookupError:
        return None

    for key in islice(_keys(mapping), _MAX_TRIES):
        try:
            alone = _with(value, split_path(head), {key: mapping[key]})
            msgspec.convert(alone, wanted, dec_hook=decode_unit)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return key
    return None


def _with(value: Any, path: Sequence[int | str], other: object) -> object:  # noqa: ANN401 - YAML
    """Return a copy of a value with another value at the end of a path."""
    if not path:
        return other
    copy: Any = list(value) if isinstance(value, list) else dict(value)
    copy[path[0]] = _with(value[path[0]], path[1:], other)
    return copy


def _keys(value: object) -> Iterable[object]:
    return value.keys() if isinstance(value, dict) else ()


def _parts(message: str) -> tuple[str, bool, str]:
    """Split msgspec's message: the problem, whether it is about a key, and the path."""
    found = _LOCATION.fullmatch(message)
    return (found[1], bool(found[2]), found[3] or "") if found else (message, False, "")


def _types_at(wanted: type, inner: str) -> list[msgspec.inspect.Type]:
    """Return the types that msgspec accepts at `inner` in a value of type `wanted`."""
    types = _members(msgspec.inspect.type_info(wanted))

    for step in split_path(inner.replace("[...]", "[0]")):
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

    return f"unknown key; {allowed_values(key, sorted(known))}"


def _unknown_value(given: str, expected: Iterable[msgspec.inspect.Type]) -> str:
    values: list[str] = []
    for info in expected:
        if isinstance(info, msgspec.inspect.LiteralType):
            values += [str(member) for member in info.values]
        elif isinstance(info, msgspec.inspect.EnumType):
            values += [str(member.value) for member in info.cls]

    bare = given.strip("'")
    return f"{given} is unknown; {allowed_values(bare, sorted(values))}"


def _plain(problem: str) -> str:
    """Return msgspec's message with the names of YAML types instead of Python's."""
    problem = re.sub(r"`([a-z |]+)`", _plain_types, problem)
    problem = problem.replace("Object missing required field", "missing key")
    return problem[:1].lower() + problem[1:]


def _plain_types(quoted: re.Match[str]) -> str:
    words = quoted[1].split(" | ")
    return (
        " or ".join(_YAML_TYPES[word] for word in words)
        if set(words) <= _YAML_TYPES.keys()
        else quoted[0]
    )
