"""Counters of the kubelet's calls and registrations, for the metrics.

The kubelet waits while a call is counted: two additions and a search among a few bounds.
"""

from bisect import bisect_left
from collections import Counter
from enum import StrEnum
from typing import Final

import anyio
import msgspec

from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import ResourceName

BUCKET_BOUNDS: Final = (0.00025, 0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 30.0)
"""Upper bounds in seconds, each a series. An answer from memory takes 0.1 ms, a MIG instance a
second or more; in PreStartContainer the kubelet waits 30 s."""


class KubeletCall(StrEnum):
    """The kubelet's calls that are counted."""

    ALLOCATE = "Allocate"
    PREFERRED = "GetPreferredAllocation"
    PRE_START = "PreStartContainer"


PREPARE: Final = "NodePrepareResources"
"""The kubelet's call for ResourceClaims, each of which counts once."""


class CallOutcome(StrEnum):
    """The outcome of a call.

    - answered: the kubelet got its answer.
    - refused: the pod's request cannot be met; the answer names the reason.
    - failed: an error of metagpu or NVML.
    - abandoned: the caller or this daemon ended before the answer.
    """

    ANSWERED = "answered"
    REFUSED = "refused"
    FAILED = "failed"
    ABANDONED = "abandoned"


def outcome_of(error: BaseException) -> CallOutcome:
    """Return the outcome of a call that ended with an error."""
    if isinstance(error, RequestError):
        return CallOutcome.REFUSED
    return CallOutcome.FAILED if isinstance(error, Exception) else CallOutcome.ABANDONED


class CallStats(msgspec.Struct):
    """Counters of one kind of call: outcomes and durations.

    Attributes:
        buckets: calls by the first of `BUCKET_BOUNDS` that they do not exceed; the last bucket
            has the rest.
        seconds: the duration of all calls together.
    """

    outcomes: dict[CallOutcome, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(CallOutcome, 0)
    )
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKET_BOUNDS) + 1))
    seconds: float = 0.0

    def record(self, outcome: CallOutcome, seconds: float) -> None:
        """Count one call."""
        self.outcomes[outcome] += 1
        self.buckets[bisect_left(BUCKET_BOUNDS, seconds)] += 1
        self.seconds += seconds


class ResourceCallStats(msgspec.Struct):
    """Counters of one resource at the kubelet.

    Attributes:
        listed: whether the kubelet reads our list of shares now.
        registrations: the registrations that the kubelet accepted.
        lists: the lists that were sent.
        in_flight: the calls that are not answered yet.
        refusals: the refused calls, by the class of the error.
    """

    listed: bool = False
    registrations: int = 0
    lists: int = 0
    in_flight: int = 0
    calls: dict[KubeletCall, CallStats] = msgspec.field(
        default_factory=lambda: {call: CallStats() for call in KubeletCall}
    )
    refusals: Counter[type[RequestError]] = msgspec.field(default_factory=Counter)

    def record_failure(self, call: KubeletCall, seconds: float, error: BaseException) -> None:
        """Count a call that ended with an error."""
        if isinstance(error, RequestError):
            self.refusals[type(error)] += 1
        self.calls[call].record(outcome_of(error), seconds)


class KubeletCallStats(msgspec.Struct):
    """Counters of all resources, former ones included: a counter never falls.

    Attributes:
        prepares: the preparations of ResourceClaims.
        restarts: the restarts of the kubelet that were seen.
        accepted: set once a kubelet has accepted a resource.
    """

    resources: dict[ResourceName, ResourceCallStats] = msgspec.field(default_factory=dict)
    prepares: CallStats = msgspec.field(default_factory=CallStats)
    restarts: int = 0
    accepted: anyio.Event = msgspec.field(default_factory=anyio.Event)
    _kubelet: object = None

    def of_resource(self, resource: ResourceName) -> ResourceCallStats:
        """Return the counters of a resource."""
        return self.resources.setdefault(resource, ResourceCallStats())

    @property
    def in_flight(self) -> int:
        """The calls of the kubelet that are not answered yet."""
        return sum(resource.in_flight for resource in self.resources.values())

    def record_kubelet(self, kubelet: object) -> None:
        """Record the kubelet that accepted a resource; `None` if it is unknown."""
        self.accepted.set()
        if kubelet is None:
            return
        self.restarts += self._kubelet not in (None, kubelet)
        self._kubelet = kubelet
