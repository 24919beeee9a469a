"""What has passed between the kubelet and us, counted: kept where it happens, for who asks.

The kubelet waits while a call is counted: that is two additions and a search among a few bounds.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from metagpu.core.errors import RequestError
from metagpu.core.model import ResourceName

BOUNDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Seconds. An answer from memory takes 0.1 ms, a MIG instance a second or more; in
PreStartContainer the kubelet waits 30."""


class Call(StrEnum):
    """What the kubelet calls, of what is counted."""

    ALLOCATE = "Allocate"
    PREFERRED = "GetPreferredAllocation"
    PRE_START = "PreStartContainer"


class Outcome(StrEnum):
    """What became of a call.

    - answered: the kubelet got what it asked for.
    - refused: the pod cannot have it, and was told why.
    - failed: for a reason of ours, or NVML's.
    - abandoned: the caller, or this daemon, ended before there was an answer.
    """

    ANSWERED = "answered"
    REFUSED = "refused"
    FAILED = "failed"
    ABANDONED = "abandoned"


@dataclass(slots=True)
class CallRecord:
    """One kind of call: how often, with what outcome, how long it took.

    Attributes:
        buckets: calls by the first of `BOUNDS` that they do not exceed; the last is of the rest.
        seconds: of all calls together.
    """

    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    seconds: float = 0.0

    def note(self, outcome: Outcome, seconds: float) -> None:
        """Count one call."""
        self.outcomes[outcome] += 1
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds


@dataclass(slots=True)
class ResourceRecord:
    """One resource at the kubelet.

    Attributes:
        listed: whether the kubelet holds a list of ours now.
        registrations: how often the kubelet accepted it.
        lists: how many lists were sent.
        refusals: refused calls, by why.
    """

    listed: bool = False
    registrations: int = 0
    lists: int = 0
    calls: dict[Call, CallRecord] = field(
        default_factory=lambda: {call: CallRecord() for call in Call}
    )
    refusals: Counter[type[RequestError]] = field(default_factory=Counter)

    def note_failure(self, call: Call, seconds: float, error: BaseException) -> None:
        """Count a call that got no answer, by the error that ended it."""
        if isinstance(error, RequestError):
            self.refusals[type(error)] += 1
            outcome = Outcome.REFUSED
        else:
            outcome = Outcome.FAILED if isinstance(error, Exception) else Outcome.ABANDONED
        self.calls[call].note(outcome, seconds)


@dataclass(slots=True)
class KubeletRecord:
    """All resources, also those that are on offer no more: counts only ever rise.

    Attributes:
        restarts: how often another kubelet was met than the one before.
    """

    resources: dict[ResourceName, ResourceRecord] = field(default_factory=dict)
    restarts: int = 0
    _met: object = None

    def of(self, resource: ResourceName) -> ResourceRecord:
        """Give the record of a resource."""
        return self.resources.setdefault(resource, ResourceRecord())

    def meet(self, kubelet: object) -> None:
        """Take in which kubelet has just accepted a resource; `None` if nobody knows."""
        if kubelet is None:
            return
        self.restarts += self._met not in (None, kubelet)
        self._met = kubelet
