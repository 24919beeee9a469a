"""The comparison of wanted slices with those that the API server has. Pure.

The API server writes quantities in a form of its own and adds times to taints. It drops fields of
features that are off, without an error.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from metagpu.core.model.quantities import quantity_value

_OF_THE_SERVER: Final = frozenset(("timeAdded", "generation"))
"""Fields that differ without a difference: the time of a taint, and the pool's generation."""


def comparable(spec: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return a spec in which equal contents are equal values."""
    if isinstance(spec, Mapping):
        return {key: comparable(it) for key, it in spec.items() if key not in _OF_THE_SERVER}
    if isinstance(spec, list | tuple):
        return [comparable(it) for it in spec]
    if isinstance(spec, str) and "." not in spec:  # 12.8 and 12.80 are versions
        return spec if (amount := quantity_value(spec)) is None else amount
    return spec


def dropped_fields(sent: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str]:
    """Return the paths of fields that were sent and are not in the answer."""
    return list(dict.fromkeys(_missing(sent, answer, "")))


def sent_fields(sent: Mapping[str, Any]) -> frozenset[str]:
    """Return the paths of all fields that `dropped_fields` could name."""
    return frozenset(_fields(sent, ""))


def _fields(sent: Any, path: str) -> Iterator[str]:  # noqa: ANN401 - any JSON
    if isinstance(sent, Mapping):
        for key, it in sent.items():
            if it:
                yield (place := f"{path}.{key}" if path else key)
                yield from _fields(it, place)
    elif isinstance(sent, list | tuple):
        for it in sent:
            yield from _fields(it, f"{path}[]")


def _missing(sent: Any, answer: Any, path: str) -> Iterator[str]:  # noqa: ANN401 - any JSON
    if isinstance(sent, Mapping) and isinstance(answer, Mapping):
        for key, it in sent.items():
            place = f"{path}.{key}" if path else key
            if it and not answer.get(key):
                yield place
            else:
                yield from _missing(it, answer.get(key), place)
    elif isinstance(sent, list | tuple) and isinstance(answer, list | tuple):
        for one, other in zip(sent, answer, strict=False):
            yield from _missing(one, other, f"{path}[]")
