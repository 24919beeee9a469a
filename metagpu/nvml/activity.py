"""How busy processes keep a GPU.

These functions block, and raise what pynvml does.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import pynvml

from metagpu.nvml.codes import FAILURES, UNSAID, code_of
from metagpu.nvml.reading import Handle

WINDOW: Final = 3.0
"""Seconds to look back: the driver takes several samples of a busy process in each."""

_IDLE: Final = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS})
"""How NVML says that there are no samples; pynvml raises a success that fills nothing."""


def read_utilisation(handle: Handle) -> Mapping[int, int] | None:
    """Tell each process's mean share of the multiprocessors' time, in percent, by its pid.

    `None` when the driver does not say.
    """
    since = int((time.time() - WINDOW) * 1e6)

    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since)
    except FAILURES as failure:
        if code_of(failure) in _IDLE:
            return {}
        # Another process came between the two halves of the call: the next look will tell.
        if code_of(failure) in UNSAID | {pynvml.NVML_ERROR_INSUFFICIENT_SIZE}:
            return None
        raise

    taken: defaultdict[int, list[int]] = defaultdict(list)
    for sample in samples:
        if sample.timeStamp >= since:  # the rest of the buffer is not filled
            taken[sample.pid].append(sample.smUtil)
    return {pid: round(sum(percents) / len(percents)) for pid, percents in taken.items()}
