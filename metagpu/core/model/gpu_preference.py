"""Annotations by which a pod names the GPUs that it prefers. Pure.

nvidia.com/use-gpuuuid: GPU-8f2a...,GPU-77c0...   one of these GPUs
nvidia.com/use-gputype: A100,H100                 a model with one of these words in its name
hami.io/gpu-scheduler-policy: binpack             the fullest GPU; `spread`: the emptiest
gpus.metagpu.io/CONTAINER: "2"                    equal parts of exactly two GPUs

The first five keys are HAMi's. A preference chooses among shares that a pod may get anyhow.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Final

import msgspec

from metagpu.core.model.gpu import Gpu, GpuId

USE_UUID: Final = "nvidia.com/use-gpuuuid"
NOUSE_UUID: Final = "nvidia.com/nouse-gpuuuid"
USE_TYPE: Final = "nvidia.com/use-gputype"
NOUSE_TYPE: Final = "nvidia.com/nouse-gputype"
POLICY: Final = "hami.io/gpu-scheduler-policy"
PARTS_PREFIX: Final = "gpus.metagpu.io/"
"""Prefix of the annotation for equal parts; the container's name follows."""
MAX_ANNOTATIONS: Final = 24
MAX_LENGTH: Final = 1024
"""Annotations of one pod that are read, and characters of each: the UUIDs of 24 GPUs."""
_CUT: Final = "…"
"""The last character of a value that was longer, which no value of a meaning ends with."""
_KEYS: Final = frozenset((USE_UUID, NOUSE_UUID, USE_TYPE, NOUSE_TYPE, POLICY))
_MOST_GPUS: Final = 64


class GpuPolicy(StrEnum):
    """The GPU to take when several would do: the fullest, or the emptiest."""

    BINPACK = "binpack"
    SPREAD = "spread"


class GpuPreference(msgspec.Struct, frozen=True):
    """The preference of one container.

    Attributes:
        use_uuids: the GPUs to choose from; empty for all. `nouse_uuids` are not to be used.
        use_types: words, one of which the model's name contains; empty for all models. The name
            contains none of `nouse_types`.
        policy: the GPU to take when several would do; `None` for the pool's own policy.
        parts: the number of GPUs that give equal parts; `None` for the pool's rule.
        problems: a sentence for each annotation that is not followed.
    """

    use_uuids: tuple[str, ...] = ()
    nouse_uuids: tuple[str, ...] = ()
    use_types: tuple[str, ...] = ()
    nouse_types: tuple[str, ...] = ()
    policy: GpuPolicy | None = None
    parts: int | None = None
    problems: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether the preference changes any choice."""
        return bool(self.names_gpus or self.policy or self.parts)

    @property
    def names_gpus(self) -> bool:
        """True if some GPUs are preferred to others, whatever their state."""
        return bool(self.use_uuids or self.nouse_uuids or self.use_types or self.nouse_types)

    def misfit(self, gpu: Gpu) -> str:
        """Return how a GPU misses the annotations, as a clause after its name; else empty."""
        model = f"NVIDIA-{gpu.name}".replace(" ", "-").upper()  # HAMi's name of a model
        if self.use_uuids and gpu.id not in self.use_uuids:
            return f"which {USE_UUID} does not name"
        if gpu.id in self.nouse_uuids:
            return f"which {NOUSE_UUID} names"
        if self.use_types and not any(kind in model for kind in self.use_types):
            return f"whose model {gpu.name} {USE_TYPE} does not name"
        if any(kind in model for kind in self.nouse_types):
            return f"whose model {gpu.name} {NOUSE_TYPE} names"
        return ""


def gpu_annotations(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """Return a pod's annotations about its GPUs, cut to the length that is read."""
    names = [
        annotation
        for annotation in annotations
        if annotation in _KEYS or annotation.startswith(PARTS_PREFIX)
    ]
    if not names:
        return {}
    names.sort(key=lambda name: (name not in _KEYS, name))
    kept = {name: str(annotations[name]) for name in names[:MAX_ANNOTATIONS]}
    return {
        name: text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - 1] + _CUT
        for name, text in kept.items()
    }


def parse_preference(annotations: Mapping[str, str], container: str) -> GpuPreference:
    """Return the preference of a container, by its pod's annotations.

    Types are compared in any case, and a blank in a name like a hyphen.
    """
    problems = [
        f"{key}: what follows its first {MAX_LENGTH} characters is not read"
        for key in sorted(_KEYS & annotations.keys())
        if annotations[key].endswith(_CUT)
    ]
    policy, parts = annotations.get(POLICY), annotations.get(f"{PARTS_PREFIX}{container}")
    return GpuPreference(
        _words(annotations.get(USE_UUID)),
        _words(annotations.get(NOUSE_UUID)),
        tuple(word.replace(" ", "-").upper() for word in _words(annotations.get(USE_TYPE))),
        tuple(word.replace(" ", "-").upper() for word in _words(annotations.get(NOUSE_TYPE))),
        None if policy is None else _policy(policy, problems),
        None if parts is None else _parts(parts, container, problems),
        tuple(problems),
    )


def by_fullness(
    free: Mapping[GpuId, tuple[int, int]], policy: GpuPolicy
) -> Iterator[frozenset[GpuId]]:
    """Yield the GPUs in the order of a policy, equally full ones together.

    Args:
        free: for each GPU, its free shares and all its shares.
        policy: which of the GPUs come first.
    """
    levels: dict[float, set[GpuId]] = {}
    for gpu, (count, total) in free.items():
        levels.setdefault(count / total, set()).add(gpu)
    for level in sorted(levels, reverse=policy is GpuPolicy.SPREAD):
        yield frozenset(levels[level])


def are_equal_parts(counts: Iterable[int], parts: int) -> bool:
    """Return whether shares, counted by GPU, are equal parts of so many GPUs."""
    known = list(counts)
    return len(known) == parts and len(set(known)) == 1


def unmet(
    preference: GpuPreference, container: str, held: Mapping[GpuId, int], gpus: Mapping[GpuId, Gpu]
) -> str:
    """Return how the shares of a container differ from its preference; else empty.

    A policy compares GPUs at one moment, of which nothing is known later.

    Args:
        preference: the preference of the container.
        container: the container's name.
        held: the number of its shares on each GPU.
        gpus: all GPUs of the node.
    """
    for gpu in held:
        if gpu in gpus and (words := preference.misfit(gpus[gpu])):
            return f"holds {_shares(held[gpu])} of GPU {gpus[gpu]}, {words}"
    if preference.parts is None or are_equal_parts(held.values(), preference.parts):
        return ""
    on = ", ".join(f"GPU {gpus[gpu_id].index}: {held[gpu_id]}" for gpu_id in held if gpu_id in gpus)
    wanted = f"equal parts of {preference.parts} GPUs" if preference.parts > 1 else "one GPU"
    return (
        f"holds {_shares(sum(held.values()))} ({on}), and {PARTS_PREFIX}{container} "
        f"asks for {wanted}"
    )


def _shares(count: int) -> str:
    return "1 share" if count == 1 else f"{count} shares"


def _words(value: str | None) -> tuple[str, ...]:
    words = tuple(filter(None, map(str.strip, (value or "").split(","))))
    return tuple(
        word for word in words if not word.endswith(_CUT)
    )  # part of a word is another word


def _policy(value: str, problems: list[str]) -> GpuPolicy | None:
    """Return the first known policy of a list: HAMi takes several since 2.10."""
    known, given = frozenset(GpuPolicy), _words(value.lower())
    found = next((GpuPolicy(word) for word in given if word in known), None)
    if others := [word for word in given if word not in known]:
        problems.append(
            f"{POLICY}: {', '.join(others)[:64]} is not followed; {' and '.join(GpuPolicy)} are"
        )
    return found


def _parts(value: str, container: str, problems: list[str]) -> int | None:
    text = value.strip()
    if text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST_GPUS)):
        count = int(text)
        if 1 <= count <= _MOST_GPUS:
            return count
    problems.append(
        f"{PARTS_PREFIX}{container}: {text[:64]!r} is not a number of GPUs from 1 to {_MOST_GPUS}"
    )
    return None
