"""The page of one node: its view, and when that changes."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from metagpu.core.model.reasons import iso_time
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.registry import Registry
from metagpu.plugins.metrics.address import ListenAddress
from metagpu.plugins.metrics.sources import MetricsTiming
from metagpu.plugins.metrics.viewer_access import TokenCheck
from metagpu.plugins.web.server import WebServer

STATUS = "/api/v1/status"
USAGE = "/api/v1/usage"

Reports = Mapping[str, Callable[[], Awaitable[Mapping[str, Any]]]]


class NodeWeb:
    """Serves the page of this node.

    Args:
        reports: the reports of the status API, by path.

    Attributes:
        server: the server of the page.
    """

    def __init__(
        self,
        address: ListenAddress,
        registry: Registry,
        reports: Reports,
        tokens: TokenCheck | None,
        timing: MetricsTiming = MetricsTiming(),  # noqa: B008 - frozen
    ) -> None:
        self._registry = registry
        self._reports = reports
        self.server = WebServer(address, self._view, self._changes, tokens, timing)

    async def run(self) -> None:
        """Serve until cancelled; a failure here ends nothing else."""
        await self.server.run()

    async def _view(self) -> Mapping[str, Any]:
        status, usage = await self._reports[STATUS](), await self._reports[USAGE]()
        return {
            "kind": "node",
            "at": iso_time(time.time()),
            "nodes": [
                {
                    "name": status["node"],
                    "problem": "",
                    "labels": {},
                    "status": status,
                    "usage": usage,
                }
            ],
            "events": [],
            "waiting": [],
        }

    def _changes(self) -> AsyncGenerator[object, None]:
        return self._registry.watch(_Identity)


class _Identity:
    """A snapshot that equals itself alone: to compare two by value takes long."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._snapshot is self._snapshot

    __hash__ = None  # type: ignore[assignment]
