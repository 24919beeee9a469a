"""Kubernetes Events: what happened, told to people, and never so often that it hurts."""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import msgspec
import structlog
from msgspec.structs import replace

from metagpu.core.errors import ClusterError
from metagpu.plugins.cluster.chore import Chore

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import Client

CONTROLLER: Final = "metagpu.io/agent"
MEMORY: Final = 600.0
"""Seconds for which the same news is counted on its Event instead of making another."""
COUNT_EVERY: Final = 30.0
"""Seconds between two writings of a count."""
BURST: Final = 25
REFILL: Final = 10.0
"""Events that may follow each other at once, and seconds for each one more."""
EACH_POD: Final = 8
"""Different news of one pod within `MEMORY`: its owner must not use up what all pods have."""
WAITING: Final = 64
"""News that may wait for an API server that does not answer; the oldest are dropped."""
NOTE_LIMIT: Final = 1024
"""Bytes of UTF-8."""
_NAME_LIMIT: Final = 230
_FORBIDDEN: Final = 403
_NOT_FOUND: Final = 404
_HOPELESS: Final = frozenset((400, 404, 422))
_PATH: Final = "/apis/events.k8s.io/v1/namespaces/{}/events"

log = structlog.get_logger()


class Subject(msgspec.Struct, frozen=True):
    """What an Event is about: a Node, which is in no namespace, or a Pod."""

    kind: str
    name: str
    uid: str = ""
    namespace: str = ""

    @property
    def known(self) -> "Subject":
        """Itself by what is always known: the uid of a Node is told later, and its name is one."""
        return self if self.namespace else replace(self, uid="")


Sameness = tuple[Subject, str, str]


class News(msgspec.Struct, frozen=True):
    """Something to tell.

    Attributes:
        reason: one word of it in CamelCase, by which people select.
        note: the sentence.
        action: what was done.
        warning: whether somebody should look.
        key: tells it from other news of this reason; the note does, where it is empty.
    """

    subject: Subject
    reason: str
    note: str
    action: str
    warning: bool = False
    key: str = ""

    @property
    def sameness(self) -> Sameness:
        """What news have in common that are one Event and its count."""
        return self.subject.known, self.reason, self.key or self.note


@dataclass(slots=True)
class _Told:
    name: str
    first: float
    written: float
    count: int = 1


@dataclass(eq=False)
class Recorder:
    """Tells news to the API server: new ones at once, repeated ones as a count.

    Attributes:
        name: of the use that it is.
        each: different news that one subject may have within `MEMORY`.
        dropped: news that were not told because there were too many.
    """

    client: "Client"
    instance: str
    clock: Callable[[], float] = time.time
    name: str = "events"
    each: float = math.inf
    dropped: int = 0
    _waiting: deque[News] = field(default_factory=lambda: deque(maxlen=WAITING))
    _told: "OrderedDict[Sameness, _Told]" = field(default_factory=OrderedDict)
    _tokens: float = BURST
    _refilled: float = 0.0

    def __post_init__(self) -> None:
        self.chore = Chore(self.name, self._send)
        self._refilled = self.clock()

    def tell(self, news: News) -> None:
        """Have it told soon; never waits."""
        if len(self._waiting) == WAITING:
            self.dropped += 1
        self._waiting.append(news)
        self.chore.stir()

    async def _send(self) -> None:
        """Tell what waits; what fails is tried again, unless it can never be told.

        A namespace that is ending, or has no quota left, takes no Events: others' go on.
        """
        shut: dict[str, ClusterError] = {}

        while (news := self._next(shut)) is not None:
            try:
                await self._write(news)
            except ClusterError as error:
                if error.status == _FORBIDDEN:
                    shut[news.subject.namespace] = error
                    continue
                if error.status not in _HOPELESS:
                    raise
                log.warning("an Event was refused", reason=news.reason, error=str(error))
            self._drop(news)
        if shut:
            raise next(iter(shut.values()))

    def _next(self, shut: Container[str]) -> News | None:
        return next((it for it in self._waiting if it.subject.namespace not in shut), None)

    def _drop(self, news: News) -> None:
        """Let one wait no more, unless it was dropped meanwhile."""
        for at, it in enumerate(self._waiting):
            if it is news:
                del self._waiting[at]
                return

    async def _write(self, news: News) -> None:
        now = self.clock()
        self._forget(now)
        told = self._told.get(news.sameness)

        if told is None:
            if self._may(news.subject, now):
                await self._create(news, now)
            else:
                self.dropped += 1
            return

        told.count += 1
        if now - told.written >= COUNT_EVERY:
            try:
                await self._count(news, told, now)
            except ClusterError as error:
                told.count -= 1
                if error.status != _NOT_FOUND:
                    raise
                await self._create(news, now)  # Events are deleted after an hour

    def _may(self, subject: Subject, now: float) -> bool:
        its = sum(about == subject.known for about, _, _ in self._told)
        self._tokens = min(BURST, self._tokens + (now - self._refilled) / REFILL)
        self._refilled = now
        return self._tokens >= 1 and its < self.each

    def _forget(self, now: float) -> None:
        while self._told:
            oldest, told = next(iter(self._told.items()))
            if now - told.first < MEMORY:
                return
            del self._told[oldest]

    async def _create(self, news: News, now: float) -> None:
        subject = news.subject
        name = f"{subject.name[:_NAME_LIMIT].rstrip('-.')}.{uuid4().hex[:16]}"
        namespace = subject.namespace or "default"
        body: dict[str, Any] = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": _moment(now),
            "reportingController": CONTROLLER,
            "reportingInstance": self.instance[:128],
            "action": news.action,
            "reason": news.reason,
            "type": "Warning" if news.warning else "Normal",
            "note": news.note.encode(errors="replace")[:NOTE_LIMIT].decode(errors="ignore"),
            "regarding": {
                "apiVersion": "v1",
                "kind": subject.kind,
                "name": subject.name,
                **({"uid": subject.uid} if subject.uid else {}),
                **({"namespace": subject.namespace} if subject.namespace else {}),
            },
        }
        await self.client.call("POST", _PATH.format(namespace), body=body)
        self._tokens -= 1
        self._told.pop(news.sameness, None)
        self._told[news.sameness] = _Told(name, now, now)

    async def _count(self, news: News, told: _Told, now: float) -> None:
        path = f"{_PATH.format(news.subject.namespace or 'default')}/{told.name}"
        series = {"count": told.count, "lastObservedTime": _moment(now)}
        await self.client.call(
            "PATCH", path, body={"series": series}, content="application/merge-patch+json"
        )
        told.written = now


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
