"""Time on a simulated GPU: its processes' shares of it, and NVML's samples.

Times are microseconds since the epoch, as in NVML. The caller holds `SimNode.changed`.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

import msgspec

SAMPLE_PERIOD: Final = 167_000
"""Microseconds between two samples: the sixth of a second of NVML's documentation."""
SAMPLES_KEPT: Final = 30
"""Samples of each process that the driver keeps: five seconds."""


class SimWork(msgspec.Struct, kw_only=True):
    """The work of one process on a GPU: a constant load, until the process is frozen.

    Attributes:
        sm: percent of the GPU's time that the process asks for.
        queue: seconds of the GPU's time that the process has submitted ahead. The GPU goes on with
            them while the process is frozen.
        frozen: whether the process submits no work.
        samples: time and percent of the moments with use.
        is_new: whether the driver has not sampled the process. One that is not frozen counts as
            one that has had its load for as long as samples are kept.
    """

    sm: int = 0
    queue: float = 0.0
    frozen: bool = False
    samples: deque[tuple[int, int]] = msgspec.field(
        default_factory=lambda: deque(maxlen=SAMPLES_KEPT)
    )
    is_new: bool = True

    def run(self, share: float, until: int, duration: int) -> None:
        """Use a share of the GPU, in percent, for some microseconds, and sample it."""
        if self.frozen:
            used = min(share * duration / 1e8, self.queue)
            self.queue -= used
            share = used * 1e8 / duration
        if percent := round(share):
            self.samples.append((until, percent))


def share_time(works: Sequence[SimWork]) -> Sequence[float]:
    """Return the percent of the GPU's time that each work gets.

    Each gets what it asks for, at most an equal part of what those who ask for less leave.
    """
    wanted = {
        number: work.sm
        for number, work in enumerate(works)
        if work.sm and (work.queue or not work.frozen)
    }
    shares, left = [0.0] * len(works), 100.0
    for rank, number in enumerate(sorted(wanted, key=wanted.__getitem__)):
        shares[number] = min(wanted[number], left / (len(wanted) - rank))
        left -= shares[number]
    return shares


class SimSampler(msgspec.Struct):
    """The driver's sampling of one GPU.

    Attributes:
        at: the time of the last sample.
    """

    at: int | None = None

    def advance(self, works: Sequence[SimWork], now: int) -> None:
        """Advance the GPU's work until now, and sample the processes."""
        self.at = now if self.at is None else self.at
        self._fill_samples(works, self.at)

        periods = (now - self.at) // SAMPLE_PERIOD
        if periods > SAMPLES_KEPT:  # what no sample is kept of is one step
            self._step(works, self.at, (periods - SAMPLES_KEPT) * SAMPLE_PERIOD)
        while self.at + SAMPLE_PERIOD <= now:
            self._step(works, self.at, SAMPLE_PERIOD)

    def sum_samples(self, works: Sequence[SimWork]) -> Sequence[tuple[int, int]]:
        """Return time and percent of all moments that samples are kept of, idle ones too."""
        sums = Counter[int]()
        for work in works:
            sums.update(dict(work.samples))
        last = self.at or 0
        times = range(last - (SAMPLES_KEPT - 1) * SAMPLE_PERIOD, last + 1, SAMPLE_PERIOD)
        return [(at, min(100, sums[at])) for at in times]

    def _step(self, works: Sequence[SimWork], start: int, duration: int) -> None:
        self.at = start + duration
        for work, share in zip(works, share_time(works), strict=True):
            work.run(share, self.at, duration)

    @staticmethod
    def _fill_samples(works: Sequence[SimWork], at: int) -> None:
        """Add the samples of new processes: those of a load that has always been there."""
        for work, share in zip(works, share_time(works), strict=True):
            if work.is_new and share and not work.frozen:
                past = (at - ago * SAMPLE_PERIOD for ago in reversed(range(SAMPLES_KEPT)))
                work.samples.extend((then, round(share)) for then in past)
            work.is_new = False
