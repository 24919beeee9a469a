"""Objects of the API server: informers follow them, and our Node is patched.

An informer lists, watches, and lists again after a gap.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar, Final

import anyio
import msgspec
import structlog

from metagpu.core.errors import ClusterError
from metagpu.core.runtime.rate_limit import LogOnce, random_between
from metagpu.plugins.cluster.node_object import (
    APPLY_PATCH,
    FIELD_MANAGER,
    MERGE_PATCH,
    KubeObject,
)
from metagpu.plugins.cluster.reconciler import backoff_of

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

WATCH_TIMEOUT: Final = 240.0, 480.0
"""Seconds between which the API server ends a watch, so that no dead watch stays unnoticed; at
random, so that nodes that started together do not renew theirs together."""
STABLE: Final = 10.0
"""Seconds after which the end of a watch counts as a first failure again."""
GONE: Final = 410

log = structlog.get_logger()


class Informer(ABC):
    """The objects of a collection that a field selector names, all with an empty one.

    Attributes:
        path: the path of the collection.
        problem: the error that keeps the informer from receiving events, empty without one.
        asked: the event loop's time at which the last complete list was requested.
        asking: the same of the newest one, answered or not.
        spread: over how many seconds at most lost watches begin again.
    """

    spread: ClassVar[float] = math.inf

    def __init__(self, client: "KubeClient", path: str, selector: str, about: str) -> None:
        self.path = path
        self.problem = ""
        self.asked = self.asking = -math.inf
        self._client = client
        self._query = {"fieldSelector": selector} if selector else {}
        self._about = about
        self._logged = LogOnce()
        self._watching = anyio.CancelScope()
        self._list_is_due = False

    async def run(self) -> None:
        """Follow the objects until cancelled; on errors the last known state stays."""
        backoff = backoff_of(self._client.timing)
        spread = min(self._client.timing.spread, self.spread)

        while True:
            began = math.inf
            try:
                version = await self._list()
                while not self._list_is_due:
                    began, lasts = anyio.current_time(), round(random_between(*WATCH_TIMEOUT))
                    with anyio.CancelScope() as self._watching:
                        version = await self._watch(version, lasts)
                        if anyio.current_time() < began + lasts - 1:
                            # An API server that restarts ends the watches of all nodes.
                            await anyio.sleep(random_between(0, spread))
                    backoff.reset()
            except ClusterError as error:
                if error.status != GONE:
                    self._record_failure(str(error))
                # A good list proves nothing: where watches fail, lists alone would be many.
                if lost := anyio.current_time() - began >= STABLE:
                    backoff.reset()
                delay = backoff.next(error.retry_after)
                await anyio.sleep(delay + random_between(0, spread) if lost else delay)

    def list_again(self) -> None:
        """Request the complete list again: what it lacks is gone."""
        self._list_is_due = True
        self._watching.cancel()

    @abstractmethod
    def on_list(self, items: Sequence[KubeObject]) -> None:
        """Take in the complete list of objects."""

    @abstractmethod
    def on_update(self, item: KubeObject) -> None:
        """Take in an object that is new or changed."""

    @abstractmethod
    def on_delete(self, item: KubeObject) -> None:
        """Take in the deletion of an object."""

    async def _list(self) -> str:
        self._list_is_due, self.asking = False, anyio.current_time()
        answer = await self._client.call("GET", self.path, query=self._query)
        self._record_success()
        self.asked = self.asking
        self.on_list(answer.get("items") or ())
        return str(answer["metadata"]["resourceVersion"])

    async def _watch(self, version: str, lasts: int) -> str:
        """Watch from a version on for `lasts` seconds; return the last version at the end."""
        query = {
            **self._query,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(lasts),
        }

        async with aclosing(self._client.watch(self.path, query)) as events:
            async for event in events:
                item: Any = event["object"]
                if event["type"] == "ERROR":
                    problem = f"the watch of {self.path} ended: {item.get('message', '')}"
                    raise ClusterError(problem, status=int(item.get("code", 0)))
                version = str(item["metadata"]["resourceVersion"])
                self._record_success()
                if event["type"] == "DELETED":
                    self.on_delete(item)
                elif event["type"] != "BOOKMARK":
                    self.on_update(item)
        return version

    def _record_success(self) -> None:
        self.problem = ""
        if self._logged.clear(self._about):
            log.info("watch recovered", about=self._about)

    def _record_failure(self, problem: str) -> None:
        self.problem = problem
        if self._logged.is_new(self._about, problem):
            log.warning(
                "watch failed; the last known state stays", about=self._about, error=problem
            )


class WatchedObject(Informer):
    """One object as the API server reported it last.

    Args:
        trigger: a function that runs at each change.

    Attributes:
        object: the object, `None` before the first answer and while the object does not exist.
        known: whether the API server has answered yet.
    """

    def __init__(
        self, client: "KubeClient", path: str, name: str, trigger: Callable[[], None]
    ) -> None:
        super().__init__(client, path, f"metadata.name={name}", f"{path}/{name}")
        self.name = name
        self.object: KubeObject | None = None
        self.known = False
        self._trigger = trigger

    def on_list(self, items: Sequence[KubeObject]) -> None:
        """Take in the object, or its absence."""
        self._set(items[0] if items else None)

    def on_update(self, item: KubeObject) -> None:
        """Take in the changed object."""
        self._set(item)

    def on_delete(self, item: KubeObject) -> None:  # noqa: ARG002 - there is only one
        """Take in the deletion of the object."""
        self._set(None)

    def _set(self, current: KubeObject | None) -> None:
        changed = not self.known or current != self.object
        self.object, self.known = current, True
        if changed:
            self._trigger()


class NodePatcher(msgspec.Struct, frozen=True):
    """Writes the given fields of the Node, and no others."""

    client: "KubeClient"
    node: WatchedObject

    async def patch(self, subresource: str, body: KubeObject) -> None:
        """Merge fields into the Node, or into a subresource such as `/status`.

        Raises:
            ClusterError: the API server refuses the patch, or does not answer in time.
        """
        await self.client.call("PATCH", self._path + subresource, body=body, content=MERGE_PATCH)

    async def apply(
        self, subresource: str, fields: Mapping[str, Any], *, force: bool = False
    ) -> None:
        """Apply fields as our field manager.

        A field of an earlier apply that is left out now is removed.

        Raises:
            ClusterError: as `patch`; status 409 and `fields` where others manage the fields.
        """
        metadata = {"name": self.node.name, **fields.get("metadata", {})}
        if self.node.object is not None:
            # Without the uid, the API server would create a Node that is missing.
            metadata["uid"] = self.node.object["metadata"].get("uid")
        body = {"apiVersion": "v1", "kind": "Node", **fields, "metadata": metadata}
        query = {"fieldManager": FIELD_MANAGER, "force": "true" if force else "false"}
        await self.client.call(
            "PATCH", self._path + subresource, query=query, body=body, content=APPLY_PATCH
        )

    @property
    def _path(self) -> str:
        return f"{self.node.path}/{self.node.name}"
