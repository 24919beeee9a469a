"""Kubernetes Events: records, counts repetitions, and limits the rate.

New data become an Event at once; data of the same key within `DEDUP_WINDOW` become a count on it.
Limits count for a namespace: what its tenant repeats hides no Event of another tenant.
"""

import math
import re
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import anyio
import msgspec
import structlog
from msgspec.structs import replace

from metagpu.core.errors import ClusterError
from metagpu.core.runtime.rate_limit import LogOnce, TokenBucket
from metagpu.plugins.cluster.node_object import CONFLICT, MERGE_PATCH
from metagpu.plugins.cluster.reconciler import Reconciler
from metagpu.plugins.cluster.settings import ClusterTiming

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient


CONTROLLER: Final = "metagpu.io/agent"
DEDUP_WINDOW: Final = 600.0
"""Seconds during which repetitions are counted on their Event."""
BURST: Final = 25
"""Events of one namespace that may follow each other at once."""
REFILL: Final = 10.0
"""Seconds for each Event of a namespace after a burst."""
MINOR: Final = 0.5
"""The part of each limit that minor Events may use."""
PER_POD: Final = 8
"""Events of one pod within `DEDUP_WINDOW`: it must not use up the limits of its namespace."""
QUEUE_LIMIT: Final = 256
"""Events that may wait for an API server that does not answer: more than a node has pods."""
NOTE_LIMIT: Final = 1024
"""Bytes of UTF-8."""
_NAME_LIMIT: Final = 230
"""Of the 253 characters of an object's name, those before what makes it unique."""
_FORBIDDEN: Final = 403
_NOT_FOUND: Final = 404
_HOPELESS: Final = frozenset((400, 404, 422))
_PATH: Final = "/apis/events.k8s.io/v1/namespaces/{}/events"

log = structlog.get_logger()


class EventReason(StrEnum):
    """The reason of an Event, by which people filter: it never changes.

    docs/events.md has the meaning of each.
    """

    COMPETING_PLUGIN = "CompetingDevicePlugin"
    CONFIG_APPLIED = "ConfigApplied"
    CONFIG_REJECTED = "ConfigRejected"
    DAEMON_NOT_READY = "DaemonNotReady"
    DRIVER_UPGRADE_ENDED = "DriverUpgradeEnded"
    DRIVER_UPGRADE_UNDER_WAY = "DriverUpgradeUnderWay"
    GPU_CLAIM_REFUSED = "GPUClaimRefused"
    GPU_CORDONED = "GPUCordoned"
    GPU_DEVICE_LOST = "GPUDeviceLost"
    GPU_DRIVER_UPGRADE = "GPUDriverUpgrade"
    GPU_EVENTS_UNAVAILABLE = "GPUEventsUnavailable"
    GPU_MEMORY_ANNOTATION_REJECTED = "GPUMemoryAnnotationRejected"
    GPU_MEMORY_EXCEEDED = "GPUMemoryExceeded"
    GPU_MEMORY_NEEDED = "GPUMemoryNeeded"
    GPU_NOT_VISIBLE = "GPUNotVisible"
    GPU_PREFERENCE_NOT_MET = "GPUPreferenceNotMet"
    GPU_PROCESS_SIGNALED = "GPUProcessSignaled"
    GPU_RECOVERED = "GPURecovered"
    GPU_REQUEST_IMPOSSIBLE = "GPURequestImpossible"
    GPU_REQUEST_REFUSED = "GPURequestRefused"
    GPU_REQUEST_TOO_LARGE = "GPURequestTooLarge"
    GPU_RESET_NEEDED = "GPUResetNeeded"
    GPU_SHARE_WITHOUT_CONTAINER = "GPUShareWithoutContainer"
    GPU_TIME_EXCEEDED = "GPUTimeExceeded"
    GPU_UNCORDONED = "GPUUncordoned"
    GPU_UNHEALTHY = "GPUUnhealthy"
    GPU_UNREADABLE = "GPUUnreadable"
    GPU_USED_WITHOUT_SHARE = "GPUUsedWithoutShare"
    MIG_DEVICE_RECOVERED = "MIGDeviceRecovered"
    MIG_DEVICE_UNHEALTHY = "MIGDeviceUnhealthy"
    MIG_LAYOUT_REJECTED = "MIGLayoutRejected"
    NODE_AMOUNT_DIFFERS = "NodeAmountDiffers"
    REGISTRATION_PROBLEM = "RegistrationProblem"
    REJECTED_POD_DELETED = "RejectedPodDeleted"
    REJECTED_POD_FOUND = "RejectedPodFound"
    RESOURCE_EMPTY = "ResourceEmpty"
    RESOURCE_SLICE_FIELDS_DROPPED = "ResourceSliceFieldsDropped"


SEVERE: Final = frozenset(
    (
        *(EventReason.GPU_UNHEALTHY, EventReason.GPU_UNREADABLE, EventReason.GPU_RESET_NEEDED),
        *(EventReason.MIG_DEVICE_UNHEALTHY, EventReason.GPU_DEVICE_LOST),
    )
)
"""Reasons of a fault of hardware: errors where others are warnings."""


class ObjectReference(msgspec.Struct, frozen=True):
    """The object that an Event is about: a Node, a Pod, or its controller.

    A Node has no namespace.
    """

    kind: str
    name: str
    uid: str = ""
    namespace: str = ""
    api_version: str = "v1"

    @property
    def identity(self) -> "ObjectReference":
        """The reference without a Node's uid: it arrives later, and the name is unique."""
        return self if self.namespace else replace(self, uid="")


DedupKey = tuple[ObjectReference, str, str]


class EventData(msgspec.Struct, frozen=True):
    """The content of an Event.

    Attributes:
        subject: the object that the Event is about.
        reason: by which people filter.
        note: the message.
        action: the action that was taken, in CamelCase.
        warning: whether the type is Warning, not Normal.
        key: distinguishes data of one reason; the note does, where the key is empty.
        minor: whether the author of a pod may repeat it at will, in ever new words. All others are
            written first, and have a part of the limits for themselves.
        once_for: an object for which one subject alone gets this Event, without a count: of many
            pods of one controller the first.
        unlimited: whether the rates do not apply: each pod of a GPU hears of its fault. Only for
            what hardware and operators cause, and no pod can.
        name: the name of the Event, which the recorder gives.
    """

    subject: ObjectReference
    reason: EventReason
    note: str
    action: str
    warning: bool = False
    key: str = ""
    minor: bool = False
    once_for: ObjectReference | None = None
    unlimited: bool = False
    name: str = ""

    @property
    def dedup_key(self) -> DedupKey:
        """The key of data that become one Event with a count."""
        return (self.once_for or self.subject).identity, self.reason, self.key or self.note


@dataclass(slots=True)
class _EventSeries:
    """An Event and its repetitions; without a name the API server does not accept it."""

    name: str
    first: float
    written: float
    unlimited: bool
    count: int = 1


@dataclass(slots=True)
class _NamespaceRate:
    """The rates of one namespace: of all its Events, and of the minor ones among them."""

    every: TokenBucket = field(default_factory=lambda: TokenBucket(BURST, 1 / REFILL))
    minor: TokenBucket = field(default_factory=lambda: TokenBucket(BURST * MINOR, MINOR / REFILL))

    def of(self, data: EventData) -> tuple[TokenBucket, ...]:
        """Return the buckets from which an Event takes a token."""
        return (self.every, self.minor) if data.minor else (self.every,)


@dataclass(eq=False)
class EventRecorder:
    """Writes Events to the API server: new ones at once, repetitions as a count.

    Attributes:
        instance: the writer's name, for people.
        clock: returns the event loop's time, by which Events are counted and limited.
        time_of_day: returns the time that Events carry.
        name: the name of the feature that records these Events.
        per_subject: different Events that one subject may have within `DEDUP_WINDOW`.
        overall: limits the Events of all namespaces together, where clients may invent some.
        dropped: Events that were dropped because there were too many.
    """

    instance: str
    timing: ClusterTiming
    clock: Callable[[], float] = anyio.current_time
    time_of_day: Callable[[], float] = time.time
    name: str = "events"
    per_subject: float = math.inf
    overall: TokenBucket = field(default_factory=lambda: TokenBucket(math.inf, 1))
    dropped: int = 0
    _queue: deque[EventData] = field(default_factory=deque)
    _series: "OrderedDict[DedupKey, _EventSeries]" = field(default_factory=OrderedDict)
    _rates: defaultdict[str, _NamespaceRate] = field(
        default_factory=lambda: defaultdict(_NamespaceRate)
    )

    _logged: LogOnce = field(default_factory=LogOnce)
    _client: "KubeClient | None" = None

    def __post_init__(self) -> None:
        self._reconciler = Reconciler(self.name, self._send, self.timing)

    @property
    def problem(self) -> str:
        """The error of the last request, empty after a success."""
        return self._reconciler.problem

    @property
    def client(self) -> "KubeClient":
        """The client that writes now."""
        assert self._client is not None  # noqa: S101 - nothing is written before `run`
        return self._client

    async def run(self, client: "KubeClient") -> None:
        """Write what waits by this client until cancelled; what was written stays known."""
        self._client = client
        self._reconciler.trigger()
        await self._reconciler.run()

    def record(self, data: EventData) -> None:
        """Queue data for an Event; never waits."""
        name = f"{_name_part(data.subject.name)}.{uuid4().hex[:16]}"
        self._queue.append(replace(data, name=name))
        if len(self._queue) > QUEUE_LIMIT:
            self._drop_one()
        self._reconciler.trigger()

    async def _send(self) -> None:
        """Send the queue; a failure is retried.

        A namespace that is ending, or has no quota left, accepts no Events: others go on.
        """
        closed: dict[str, ClusterError] = {}

        while (data := self._next(closed)) is not None:
            try:
                await self._write(data)
            except ClusterError as error:
                if error.status != _FORBIDDEN:
                    raise
                closed[data.subject.namespace] = error
                continue
            except Exception:
                self._remove(data)  # a fault of ours must not come back with the same data
                raise
            self._remove(data)
        if closed:
            raise next(iter(closed.values()))

    def _next(self, closed: Container[str]) -> EventData | None:
        """Return the oldest data, minor ones last."""
        waiting = (event for event in self._queue if event.subject.namespace not in closed)
        return min(waiting, key=lambda event_data: event_data.minor, default=None)

    def _drop_one(self) -> None:
        """Drop the oldest data of the namespace with most of them, minor ones first."""
        waiting = Counter(event.subject.namespace for event in self._queue)
        loudest = max(waiting, key=waiting.__getitem__)
        its = (event for event in self._queue if event.subject.namespace == loudest)
        self._remove(min(its, key=lambda event_data: not event_data.minor))
        self.dropped += 1

    def _remove(self, data: EventData) -> None:
        """Remove data from the queue, unless they were dropped meanwhile."""
        for index, queued in enumerate(self._queue):
            if queued is data:
                del self._queue[index]
                return

    async def _write(self, data: EventData) -> None:
        now = self.clock()
        self._forget_old(now)
        series = self._series.get(data.dedup_key)

        if series is None:
            if self._may_create(data, now):
                await self._create(data, now)
            else:
                self.dropped += 1
            return

        if data.once_for is not None or not series.name:
            return
        series.count += 1
        if now - series.written >= self.timing.count_interval:
            try:
                await self._update_count(data, series, now)
            except ClusterError as error:
                series.count -= 1
                if error.status == _NOT_FOUND:
                    await self._create(data, now)  # Kubernetes deletes Events after an hour
                else:
                    self._give_up(data, error)
                    series.name = ""

    def _may_create(self, data: EventData, now: float) -> bool:
        if data.unlimited:
            return True
        about = data.dedup_key[0]
        existing = sum(
            key[0] == about and not series.unlimited for key, series in self._series.items()
        )
        limit = self.per_subject * (MINOR if data.minor else 1)
        return existing < limit and all(rate.wait(now) == 0 for rate in self._rates_of(data))

    def _rates_of(self, data: EventData) -> tuple[TokenBucket, ...]:
        return (*self._rates[data.subject.namespace].of(data), self.overall)

    def _forget_old(self, now: float) -> None:
        for namespace in [name for name, rate in self._rates.items() if rate.every.is_full(now)]:
            del self._rates[namespace]
        while self._series:
            oldest, series = next(iter(self._series.items()))
            if now - series.first < DEDUP_WINDOW:
                return
            del self._series[oldest]

    def _give_up(self, data: EventData, error: ClusterError) -> None:
        """Log that the API server can never accept an Event; raise every other error."""
        if error.status not in _HOPELESS:
            raise error
        if self._logged.is_new(data.reason, str(error.status)):
            log.warning("event rejected", reason=data.reason, error=str(error))

    async def _create(self, data: EventData, now: float) -> None:
        """Write an Event, at the same cost if it can never be accepted."""
        subject = data.subject
        name, namespace = data.name, subject.namespace or "default"
        body: dict[str, Any] = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": _timestamp(self.time_of_day()),
            "reportingController": CONTROLLER,
            "reportingInstance": self.instance[:128],
            "action": data.action,
            "reason": data.reason,
            "type": "Warning" if data.warning else "Normal",
            "note": data.note.encode(errors="replace")[:NOTE_LIMIT].decode(errors="ignore"),
            "regarding": {
                "apiVersion": subject.api_version,
                "kind": subject.kind,
                "name": subject.name,
                **({"uid": subject.uid} if subject.uid else {}),
                **({"namespace": subject.namespace} if subject.namespace else {}),
            },
        }
        try:
            await self.client.call("POST", _PATH.format(namespace), body=body)
        except ClusterError as error:
            if error.status != CONFLICT:  # it was written, and its answer was lost
                self._give_up(data, error)
                name = ""
        if not data.unlimited:
            for rate in self._rates_of(data):
                rate.reserve(now)
        self._series.pop(data.dedup_key, None)
        self._series[data.dedup_key] = _EventSeries(name, now, now, data.unlimited)

    async def _update_count(self, data: EventData, series: _EventSeries, now: float) -> None:
        path = f"{_PATH.format(data.subject.namespace or 'default')}/{series.name}"
        observed = _timestamp(self.time_of_day())
        body = {"series": {"count": series.count, "lastObservedTime": observed}}
        await self.client.call("PATCH", path, body=body, content=MERGE_PATCH)
        series.written = now


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _name_part(text: str) -> str:
    """Convert a text to the first part of an object's name.

    The name of an owner, for instance, is free text.
    """
    labels = re.sub(r"[^a-z0-9.-]+", "-", text.lower())[:_NAME_LIMIT].split(".")
    return ".".join(filter(None, (label.strip("-") for label in labels))) or "unnamed"
