"""Reading of reports of other releases.

A command that reads a field says so where a report lacks it.
A field whose value has another type is as one that is missing. Unknown fields are ignored.
"""

from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, UNSET
from msgspec.structs import FieldInfo

from metagpu.core.errors import MetagpuError

T = TypeVar("T", bound="ReportPart")


class FieldMissing(MetagpuError):
    """Raised when a report lacks a field that a command reads."""


def json_name(field: str) -> str:
    """Return the name of a field in JSON: `used_mib` is `usedMiB`."""
    first, *more = field.split("_")
    return first + "".join("MiB" if word == "mib" else word.capitalize() for word in more)


class ReportPart(msgspec.Struct, frozen=True, rename=json_name):
    """A report, or an object in it."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Refuse a field that the report lacks; Python asks here for no other field."""
            if name not in self.__struct_fields__:
                raise AttributeError(name)
            kind = type(self)
            encoded = kind.__struct_encode_fields__[kind.__struct_fields__.index(name)]
            raise FieldMissing(
                f"its daemon does not report the field {encoded} of {kind.__name__} "
                "(docs/status.md): update metagpu there, or this program"
            )


def decode_report(body: bytes, kind: type[T]) -> T:
    """Decode a report that a daemon has sent.

    Raises:
        msgspec.DecodeError: the text is no JSON object.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        return read_report(msgspec.json.decode(body, type=dict[str, Any]), kind)


def read_report(plain: Mapping[str, Any], kind: type[T]) -> T:
    """Return a report that is given as plain data."""
    report: T = _read(plain, kind)
    return report


def plain_report(report: ReportPart) -> dict[str, Any]:
    """Return a report as plain data, without the fields that it lacks."""
    try:
        plain: dict[str, Any] = msgspec.to_builtins(report)
    except AttributeError:  # an unset field
        plain = _plain(report)
    return plain


def _plain(value: Any) -> Any:  # noqa: ANN401 - any field of a report
    if isinstance(value, ReportPart):
        shown = (field for field in _fields(type(value)) if _is_shown(value, field))
        return {field.encode_name: _plain(getattr(value, field.name)) for field in shown}
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return value


def _is_shown(part: ReportPart, field: FieldInfo) -> bool:
    """Return whether JSON has a field: not one that is missing, or left out."""
    try:
        value = getattr(part, field.name)
    except FieldMissing:
        return False
    is_left_out = part.__struct_config__.omit_defaults and value == field.default
    return value is not UNSET and not is_left_out


def _read(value: Any, kind: Any) -> Any:  # noqa: ANN401 - any field of a report
    """Return a value of a field's type; where it is none, the parts of it that are.

    Raises:
        msgspec.ValidationError: nothing of the value can be used.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        for member in kinds:
            if isinstance(value, list) and get_origin(member) is list:
                return [_read(part, *get_args(member)) for part in value]
            if isinstance(value, Mapping) and get_origin(member) is dict:
                _, inner = get_args(member)
                return {name: _read(part, inner) for name, part in value.items()}
            if (
                isinstance(value, Mapping)
                and isinstance(member, type)
                and issubclass(member, ReportPart)
            ):
                return _read_part(value, member)
        raise


def _read_part(value: Mapping[str, Any], kind: type[T]) -> T:
    """Return an object of a report without the fields that it lacks."""
    found: dict[str, Any] = {}
    missing = []
    for field in _fields(kind):
        try:
            found[field.name] = _read(value[field.encode_name], field.type)
        except (KeyError, msgspec.ValidationError):
            if _is_required(field):
                missing.append(field.name)
    part = kind(**found, **dict.fromkeys(missing))
    for name in missing:
        getattr(kind, name).__delete__(part)
    return part


@cache
def _fields(kind: type[ReportPart]) -> tuple[FieldInfo, ...]:
    """Return the fields of a report: reading 500 of an older release asks often."""
    return msgspec.structs.fields(kind)


def _is_required(field: FieldInfo) -> bool:
    return field.default is NODEFAULT and field.default_factory is NODEFAULT
