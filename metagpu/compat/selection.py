"""Which GPUs a foreign file means, as selectors of ours."""

import re
from collections.abc import Sequence
from typing import Final

from metagpu.compat.contract import Data, Origin

_GPU_UUID: Final = re.compile(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_MIG_DEVICE: Final = re.compile(r"\d+:\d+|MIG-[0-9a-fA-F-]{36}|MIG-GPU-[0-9a-fA-F-]{36}/\d+/\d+")
_WRITE: Final = 'write "all", a number of GPUs, or a list of indices and uuids'


def indices(numbers: Sequence[int]) -> Data:
    """Select GPUs by index."""
    return {"index": ",".join(str(number) for number in sorted(set(numbers)))}


def pattern(text: str) -> Data | None:
    """Select GPUs by a pattern in which `*` alone is special; `None` when it takes all."""
    if text == "*":
        return None
    return {"product": re.sub(r"[\[?]", r"[\g<0>]", text)}


def matches(text: str, name: str) -> bool:
    """Tell whether a name matches a pattern in which `*` alone is special."""
    return re.fullmatch(".*".join(map(re.escape, text.split("*"))), name) is not None


def containing(models: Sequence[str]) -> Data:
    """Select GPUs in whose product names one of these stands."""
    return {"product": [f"*{re.sub(r'[][?*]', '?', model)}*" for model in dict.fromkeys(models)]}


def both(one: Data | None, other: Data | None) -> Data | None:
    """Select what two selectors, of different keys or both by index, select; `None` is all.

    An index in both that have none in common gives `{}`, which selects nothing.
    """
    if one is None or other is None:
        return other if one is None else one
    joined = {**one, **other}
    if "index" in one and "index" in other:
        common = set(_numbers(one)) & set(_numbers(other))
        if not common:
            return {}
        joined |= indices(sorted(common))
    return joined


def devices(value: str | int | Sequence[str | int], origin: Origin) -> list[Data | None]:
    """Read NVIDIA's `devices`: `all`, a number of them, or a list of indices and uuids.

    Gives selectors of which any may hold; `None` is all. MIG devices are left out: see `mig_ones`.

    Raises:
        ConfigError: if it is none of these.
    """
    if value == "all":
        return [None]
    if isinstance(value, str):
        raise origin.document.error(origin.path, f"{value!r} is not known here; {_WRITE}")
    if isinstance(value, int):
        if value < 1:
            raise origin.document.error(origin.path, f"{value} GPUs are none; {_WRITE}")
        return [{"index": f"0-{value - 1}"}]

    numbers: list[int] = []
    uuids: list[str] = []
    for place, reference in enumerate(value):
        text = str(reference)
        if text.isdecimal():
            numbers.append(int(text))
        elif _GPU_UUID.fullmatch(text):
            uuids.append(text)
        elif not _MIG_DEVICE.fullmatch(text):
            raise origin.document.error(
                f"{origin.path}[{place}]",
                f"{reference!r} is no device; write an index such as 0, or a uuid such as "
                "GPU-5f2e1a3c-0000-0000-0000-00000000beef",
            )
    if not value:
        raise origin.document.error(origin.path, f"no device is named; {_WRITE}")

    return [*([indices(numbers)] if numbers else []), *([{"uuid": uuids}] if uuids else [])]


def mig_ones(value: str | int | Sequence[str | int]) -> list[str]:
    """Find the MIG devices among NVIDIA's `devices`."""
    listed = [] if isinstance(value, (str, int)) else value
    return [str(reference) for reference in listed if _MIG_DEVICE.fullmatch(str(reference))]


def _numbers(selector: Data) -> list[int]:
    found: list[int] = []
    for part in str(selector["index"]).split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
