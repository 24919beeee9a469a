"""One object of the API server, followed: listed once, then watched, and again when that ends."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
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
GONE: Final = 410

log = structlog.get_logger()


@dataclass(eq=False)
class Followed:
    """What the API server told last of one object.

    Attributes:
        path: of the collection that it is in.
        stir: called at each change.
        object: as it was told, `None` while it does not exist or nothing was told yet.
        known: whether anything was told yet.
        problem: why nothing is heard now.
    """

    client: "Client"
    path: str
    name: str
    stir: Callable[[], None]
    object: "Object | None" = None
    known: bool = False
    problem: str = ""

    async def run(self) -> None:
        """Follow it until cancelled; what was told stays while nothing is heard."""
        pauses = Pauses()

        while True:
            try:
                version = await self._list()
                pauses.reset()
                while True:
                    began = anyio.current_time()
                    version = await self._watch(version)
                    if anyio.current_time() - began < SHORT:
                        await anyio.sleep(SHORT)
            except ClusterError as error:
                if error.status != GONE:
                    self._trouble(str(error))
                await anyio.sleep(pauses.next(error.retry_after))

    @property
    def _query(self) -> dict[str, str]:
        return {"fieldSelector": f"metadata.name={self.name}"}

    async def _list(self) -> str:
        answer = await self.client.call("GET", self.path, query=self._query)
        items = answer.get("items") or ()
        self._take(items[0] if items else None)
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

        async with aclosing(self.client.watch(self.path, query)) as events:
            async for event in events:
                it: Any = event["object"]
                if event["type"] == "ERROR":
                    problem = f"the watch of {self.path} ended: {it.get('message', '')}"
                    raise ClusterError(problem, status=int(it.get("code", 0)))
                version = str(it["metadata"]["resourceVersion"])
                if event["type"] == "DELETED":
                    self._take(None)
                elif event["type"] != "BOOKMARK":
                    self._take(it)
        return version

    def _take(self, told: "Object | None") -> None:
        if self.problem:
            log.info("the API server answers again", about=f"{self.path}/{self.name}")
        self.problem = ""
        changed = not self.known or told != self.object
        self.object, self.known = told, True
        if changed:
            self.stir()

    def _trouble(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            log.warning("what is known stays", about=f"{self.path}/{self.name}", error=problem)
