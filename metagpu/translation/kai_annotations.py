"""Requests in annotations: those of KAI Scheduler, and of its gpu-fractioning.

Such a pod names no resource. Facts of KAI Scheduler 0.18 and gpu-fractioning of November 2026.
"""

import re
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Final

from metagpu.core.model.quantities import quantity_value
from metagpu.translation.hami_annotations import annotations_of
from metagpu.translation.node_offers import MPS
from metagpu.translation.requests import GpuRequest, amounts_of, containers_of, runs_alone
from metagpu.translation.values import Object, TranslationSettings

_FRACTION: Final = "gpu-fraction"
_MEMORY: Final = "gpu-memory"
_DEVICES: Final = "gpu-fraction-num-devices"
_CONTAINER: Final = "gpu-fraction-container-name"
_MODE: Final = "kai.scheduler/gpu-compute-sharing-mode"
_OF_POD: Final = frozenset((_FRACTION, _MEMORY, _DEVICES, _CONTAINER, _MODE))
_PREFIX: Final = "nvidia.com/container."
_OF_CONTAINER: Final = re.compile(
    r"nvidia\.com/container\.([a-z0-9-]{1,63})\.(gpu-memory\.(?:request|limit)|"
    r"gpu-compute\.(?:mode|portion))"
)
_WHOLE_POD: Final = "of the pod"
_SIZES: Final = (_WHOLE_POD, "gpu-memory.request", "gpu-memory.limit")
_TECHNIQUES: Final = {"time-slicing": "", "sm-sharing": MPS}
_MIB: Final = 1024**2
_SHOWN: Final = 40
"""Characters of a value in a sentence."""


def is_request(key: str) -> bool:
    """Return whether the annotation of a key is part of a request."""
    return key in _OF_POD or bool(_OF_CONTAINER.fullmatch(key))


def requests_in_annotations(
    pod: Object, settings: TranslationSettings, _: frozenset[str], problems: list[str]
) -> Iterator[GpuRequest]:
    """Yield the requests of a pod's annotations; what is wrong is one problem."""
    texts = {key: str(value or "") for key, value in annotations_of(pod).items() if is_request(key)}
    try:
        if texts:
            yield from _requests(pod, texts, settings)
    except ValueError as error:
        problems.append(str(error))


def _requests(
    pod: Object, texts: Mapping[str, str], settings: TranslationSettings
) -> Iterator[GpuRequest]:
    containers = {
        str(document.get("name") or ""): (path, document) for path, document in containers_of(pod)
    }
    first = next((name for name, (path, _) in containers.items() if "/containers/" in path), "")
    target = texts.get(_CONTAINER) or first
    own: dict[str, dict[str, str]] = {}
    for key in texts:
        if found := _OF_CONTAINER.fullmatch(key):
            own.setdefault(found[1], {})[found[2]] = key
    if sizes := [key for key in (_FRACTION, _MEMORY) if key in texts]:
        own.setdefault(target, {})[_WHOLE_POD] = sizes[0]
    if len(sizes) > 1:
        raise ValueError(f"{_FRACTION} and {_MEMORY} both say how much; give one of them")
    if _DEVICES in texts and not own:
        raise ValueError(f"{_DEVICES} says no size; add {_FRACTION} or {_MEMORY}")
    for name, keys in own.items():
        if name not in containers:
            key = _CONTAINER if _WHOLE_POD in keys else next(iter(keys.values()))
            raise ValueError(f"{key} names no container of the pod: {name[:_SHOWN]!r}")
        path, container = containers[name]
        if named := sorted(amounts_of(container).keys() & {*settings.names}):
            key = next(iter(keys.values()))
            raise ValueError(f"container {name} asks by {key} and by {named[0]}; ask by one")
        yield _request(path, container, keys, texts)


def _request(
    path: str, container: Object, keys: Mapping[str, str], texts: Mapping[str, str]
) -> GpuRequest:
    """Return the request of a container, by the keys of its annotations.

    Raises:
        ValueError: a value is none that its program takes, or two of them exclude each other.
    """
    name = str(container.get("name") or "")
    sizes = [keys[size] for size in _SIZES if size in keys]
    if not sizes:
        key = next(iter(keys.values()))
        raise ValueError(f"{key} says no memory; add {_PREFIX}{name}.gpu-memory.request")
    if _WHOLE_POD in keys and len(sizes) > 1:
        raise ValueError(f"container {name} asks by {sizes[0]} and by {sizes[1]}; ask by one")
    percentage = _percentage(sizes[0], texts) if sizes[0] == _FRACTION else 0
    memory = 0 if percentage else _mib(sizes[0], texts)
    limit = _mib(sizes[-1], texts) if len(sizes) > 1 else 0
    if limit and limit < memory:
        raise ValueError(f"{sizes[-1]}: {_shown(sizes[-1], texts)} is less than the request")
    portion = keys.get("gpu-compute.portion")
    cores = _percentage(portion, texts, whole=True) % 100 if portion else 0  # all are no limit
    mode = keys.get("gpu-compute.mode", _MODE)
    technique = texts.get(mode, "time-slicing")
    if technique not in _TECHNIQUES:
        raise ValueError(f"{mode}: {_shown(mode, texts)} is not time-slicing or sm-sharing")
    count = _number(_DEVICES, texts) if _DEVICES in texts else 1
    return GpuRequest(
        path,
        name,
        count,
        memory,
        percentage,
        cores,
        {},
        alone=runs_alone(path, container),
        others=frozenset(amounts_of(container)),
        annotations={key: texts[key] for key in texts if key in _OF_POD or key in keys.values()},
        technique=_TECHNIQUES[technique],
        limit=limit if limit > memory else 0,
    )


def _shown(key: str, texts: Mapping[str, str]) -> str:
    return repr(texts[key][:_SHOWN])


def _number(key: str, texts: Mapping[str, str]) -> int:
    text = texts[key]
    if not (text.isascii() and text.isdecimal() and len(text) <= _SHOWN and int(text)):
        raise ValueError(f"{key}: {_shown(key, texts)} is not a whole number above 0")
    return int(text)


def _mib(key: str, texts: Mapping[str, str]) -> int:
    """Return the MiB of a Quantity, rounded up; `gpu-memory` counts MiB itself."""
    if key == _MEMORY:
        return _number(key, texts)
    value = quantity_value(texts[key])
    if value is None or value < _MIB:
        raise ValueError(f"{key}: {_shown(key, texts)} is not an amount of 1Mi or more")
    return ceil(value / _MIB)


def _percentage(key: str, texts: Mapping[str, str], *, whole: bool = False) -> int:
    """Return the percents of a part of a GPU, rounded up; KAI counts in percents too."""
    text = texts[key]
    value = quantity_value(text) if text[-1:].isdecimal() or text.endswith(".") else None
    if value is None or not 0 < value <= 1 or (value == 1 and not whole):
        most = "1 at most" if whole else "less than 1"
        raise ValueError(f"{key}: {_shown(key, texts)} is not a number above 0 and {most}")
    return ceil(value * 100)
