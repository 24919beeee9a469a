"""Reports for tests: of a GPU after some facts, and completed from a few fields."""

from collections.abc import Mapping
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT

from metagpu.core.layout.layout import Layout, PoolAssignment
from metagpu.core.reports.reading import ReportPart, plain_report
from metagpu.core.reports.status import explain_report
from metagpu.core.state.facts import (
    BackendAttached,
    BackendSuspended,
    Fact,
    GpuCordoned,
    GpusFound,
    SharesClaimed,
    SharesReleased,
)
from tests.rigs.build import after, gpu, offer, share

A = gpu(0)
FRACTIONS = tuple(share(A, number) for number in range(4))
UNITS = tuple(share(A, number, backend="mps", resource="x.y/mps") for number in range(2))


def gpu_report(*facts: Fact) -> dict[str, Any]:
    """Return the report of a GPU after some facts."""
    kept = BackendAttached(A.id, "mps", needs_setup=False, needs_cleanup=True, at=0)
    snapshot = after(GpusFound((A,), at=0), kept, offer(*FRACTIONS, *UNITS), *facts)
    pool = PoolAssignment(A, "all", "all GPUs")
    [gpu] = explain_report(snapshot, Layout((pool,), {}, ())).gpus
    return plain_report(gpu)


T = TypeVar("T", bound=ReportPart)


def complete(partial: Mapping[str, Any], kind: type[T]) -> T:
    """Return a report with some fields, given as plain data; all others are empty, 0 or null."""
    return msgspec.convert(_complete(partial, kind), kind)


def _complete(value: Any, kind: Any) -> Any:  # noqa: ANN401 - any field of a report
    for argument in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        if (
            isinstance(value, Mapping)
            and isinstance(argument, type)
            and issubclass(argument, ReportPart)
        ):
            fields = {field.encode_name: field for field in msgspec.structs.fields(argument)}
            return {
                **{name: _empty(each.type) for name, each in fields.items() if _required(each)},
                **{name: _complete(part, fields[name].type) for name, part in value.items()},
            }
        if isinstance(value, Mapping) and get_origin(argument) is dict:
            return {name: _complete(part, get_args(argument)[1]) for name, part in value.items()}
        if isinstance(value, (list, tuple)) and get_origin(argument) is list:
            return [_complete(part, *get_args(argument)) for part in value]
    return value


def _required(field: msgspec.structs.FieldInfo) -> bool:
    return field.default is NODEFAULT and field.default_factory is NODEFAULT


def _empty(kind: Any) -> Any:  # noqa: ANN401 - any field of a report
    """Return a value of a type that says nothing."""
    if get_origin(kind) in (Union, UnionType):
        return None if type(None) in get_args(kind) else _empty(get_args(kind)[0])
    if get_origin(kind) is not None:
        return get_origin(kind)()
    if issubclass(kind, Enum):
        return next(iter(kind)).value
    return _complete({}, kind) if issubclass(kind, ReportPart) else kind()


CORDON = GpuCordoned(A.id, "riser", at=60)
SUSPENDED = BackendSuspended(A.id, "mps", "no daemon", at=120)
HELD = SharesClaimed(UNITS[:1], at=30)
ENDED = SharesReleased(UNITS[:1], at=180)
