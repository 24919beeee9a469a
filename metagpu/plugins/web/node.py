"""The page of one node: its view, and when that changes."""

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

import anyio
from msgspec.structs import replace

from metagpu.core.model.quantities import iso_time
from metagpu.core.reports.schema.usage import NodeReports
from metagpu.core.state.registry import Registry
from metagpu.plugins.http.address import HttpTiming, ListenAddress
from metagpu.plugins.http.server import SingleFlight
from metagpu.plugins.web.access import TokenCheck
from metagpu.plugins.web.server import WebServer

USAGE_TIMEOUT: Final = 0.5
"""Seconds to wait for NVML: a view without its answers has older ones, or none."""

ELSEWHERE: Final = (
    "This page has the pods of its node. `kubectl metagpu why POD` says why a pod waits for one, "
    "and `kubectl metagpu web` lists all that wait."
)


class NodeWeb:
    """Serves the page of this node.

    Args:
        reports: the reports of this node.

    Attributes:
        server: the server of the page.
    """

    def __init__(
        self,
        address: ListenAddress,
        registry: Registry,
        node: str,
        reports: NodeReports,
        *,
        tokens: TokenCheck | None,
        timing: HttpTiming = HttpTiming(),  # noqa: B008 - frozen
    ) -> None:
        self._registry = registry
        self._node = node
        self._reports = reports
        self._usage = SingleFlight("GPU usage", reports.usage, age=0)
        self.server = WebServer(address, self._view, self._changes, tokens, timing)

    async def run(self) -> None:
        """Serve until cancelled; a failure here ends nothing else."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._usage.run)
            group.start_soon(self.server.run)

    async def _view(self) -> Mapping[str, Any]:
        usage = await self._usage.get(USAGE_TIMEOUT)
        report = await self._reports.status()
        events, status = report.events, replace(report, events=None)
        node = {"name": self._node, "problem": "", "labels": {}, "status": status, "usage": usage}
        return {
            "kind": "node",
            "at": iso_time(time.time()),
            "nodes": [node],
            "events": events,
            "waiting": [],
            "lacking": ELSEWHERE,
        }

    async def _changes(self) -> AsyncGenerator[object, None]:
        """Yield when the snapshot has changed; a browser asks for memory in use."""
        seen = self._registry.snapshot
        while True:
            yield (seen := await self._registry.changed_since(seen))
