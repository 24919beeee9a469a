"""Selectors of metagpu for the GPUs that a foreign file names."""

import re
from collections.abc import Sequence
from typing import Final

from metagpu.compat.contract import Data, Origin
from metagpu.core.config.errors import ConfigReason

_GPU_UUID: Final = re.compile(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_MIG_DEVICE: Final = re.compile(r"\d+:\d+|MIG-[0-9a-fA-F-]{36}|MIG-GPU-[0-9a-fA-F-]{36}/\d+/\d+")
_WRITE: Final = 'write "all", a number of GPUs, or a list of indices and uuids'


def by_index(numbers: Sequence[int]) -> Data:
    """Select GPUs by index."""
    return {"index": ",".join(str(number) for number in sorted(set(numbers)))}


def by_model(models: Sequence[str]) -> Data:
    """Select GPUs whose product name has a model as a whole word: not H20 in H200."""
    patterns = [f"*{re.sub(r'[][?*]', '?', model)}" for model in dict.fromkeys(models)]
    return {"product": [text for it in patterns for text in (it, f"{it}[!0-9A-Za-z]*")]}


def check_devices(value: str | int | Sequence[str | int], origin: Origin) -> None:
    """Check NVIDIA's `devices`: `all`, a number, or a list of devices.

    Raises:
        ConfigError: the value is none of these.
    """
    if isinstance(value, str):
        if value != "all":
            problem = f"{value!r} is not known here; {_WRITE}"
            raise origin.document.error(origin.path, problem, ConfigReason.UNKNOWN_VALUE)
        return
    if isinstance(value, int):
        if value < 1:
            problem = f"{value} GPUs are none; {_WRITE}"
            raise origin.document.error(origin.path, problem, ConfigReason.INVALID_VALUE)
        return
    if not value:
        problem = f"no device is named; {_WRITE}"
        raise origin.document.error(origin.path, problem, ConfigReason.MISSING)
    for place, reference in enumerate(value):
        text = str(reference)
        if not (text.isdecimal() or _GPU_UUID.fullmatch(text) or _MIG_DEVICE.fullmatch(text)):
            raise origin.document.error(
                f"{origin.path}[{place}]",
                f"{reference!r} is no device; write an index such as 0, or a uuid such as "
                "GPU-5f2e1a3c-0000-0000-0000-00000000beef",
                ConfigReason.INVALID_VALUE,
            )
