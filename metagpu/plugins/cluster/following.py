"""Objects of the API server, followed: listed once, then watched, and again when that ends."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import anyio
import structlog

from metagpu.core.errors import ClusterError
from metagpu.plugins.cluster.chore import Pauses

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import Client, Object

WATCH: Final = 240
"""Seconds after which the API server shall end a watch, so that none grows old unseen."""
SHORT: Final = 1.0
"""Seconds that a watch must last for the next to follow at once."""
LASTED: Final = 10.0
"""Seconds after which the break of a watch is the first failure again."""
GONE: Final = 410

log = structlog.get_logger()


class Following(ABC):
    """Those objects of a collection that a field selector names.

    Attributes:
        path: of the collection.
        problem: why nothing is heard now.
    """

    def __init__(self, client: "Client", path: str, selector: str, about: str) -> None:
        self.path = path
        self.problem = ""
        self._client = client
        self._query = {"fieldSelector": selector}
        self._about = about

    async def run(self) -> None:
        """Follow them until cancelled; what was told stays while nothing is heard."""
        pauses = Pauses()

        while True:
            began = math.inf
            try:
                version = await self._list()
                while True:
                    began = anyio.current_time()
                    version = await self._watch(version)
                    pauses.reset()
                    if anyio.current_time() - began < SHORT:
                        await anyio.sleep(SHORT)
            except ClusterError as error:
                if error.status != GONE:
                    self._trouble(str(error))
                # Lists that are good prove nothing: where no watch is, they alone would be many.
                if anyio.current_time() - began >= LASTED:
                    pauses.reset()
                await anyio.sleep(pauses.next(error.retry_after))

    @abstractmethod
    def listed(self, items: "Sequence[Object]") -> None:
        """Take in all of them as they are now."""

    @abstractmethod
    def changed(self, it: "Object") -> None:
        """Take in one that is new or another than before."""

    @abstractmethod
    def deleted(self, it: "Object") -> None:
        """Take in that one is no more."""

    async def _list(self) -> str:
        answer = await self._client.call("GET", self.path, query=self._query)
        self._well()
        self.listed(answer.get("items") or ())
        return str(answer["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> str:
        """Watch from a version on until the API server ends it; give the last version seen."""
        query = {
            **self._query,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH),
        }

        async with aclosing(self._client.watch(self.path, query)) as events:
            async for event in events:
                it: Any = event["object"]
                if event["type"] == "ERROR":
                    problem = f"the watch of {self.path} ended: {it.get('message', '')}"
                    raise ClusterError(problem, status=int(it.get("code", 0)))
                version = str(it["metadata"]["resourceVersion"])
                self._well()
                if event["type"] == "DELETED":
                    self.deleted(it)
                elif event["type"] != "BOOKMARK":
                    self.changed(it)
        return version

    def _well(self) -> None:
        if self.problem:
            log.info("the API server answers again", about=self._about)
        self.problem = ""

    def _trouble(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            log.warning("what is known stays", about=self._about, error=problem)


class Followed(Following):
    """What the API server told last of one object.

    Args:
        stir: called at each change.

    Attributes:
        object: as it was told, `None` while it does not exist or nothing was told yet.
        known: whether anything was told yet.
    """

    def __init__(self, client: "Client", path: str, name: str, stir: Callable[[], None]) -> None:
        super().__init__(client, path, f"metadata.name={name}", f"{path}/{name}")
        self.name = name
        self.object: Object | None = None
        self.known = False
        self._stir = stir

    def listed(self, items: "Sequence[Object]") -> None:
        """Take in what it is now, if it is."""
        self._take(items[0] if items else None)

    def changed(self, it: "Object") -> None:
        """Take in what it is now."""
        self._take(it)

    def deleted(self, it: "Object") -> None:  # noqa: ARG002 - there is only one
        """Take in that it is no more."""
        self._take(None)

    def _take(self, told: "Object | None") -> None:
        new = not self.known or told != self.object
        self.object, self.known = told, True
        if new:
            self._stir()
