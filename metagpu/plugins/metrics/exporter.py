"""Metrics and probes of this node, served: what the other modules here make, put together."""

from functools import partial
from http import HTTPStatus
from typing import Final

import anyio
from anyio import to_thread

from metagpu.core.census import Findings
from metagpu.core.endurance import enduring
from metagpu.plugins.metrics.address import Address
from metagpu.plugins.metrics.counts import Counts
from metagpu.plugins.metrics.daemon import of_daemon
from metagpu.plugins.metrics.exposition import CONTENT_TYPE, page_of
from metagpu.plugins.metrics.families import FAMILIES, families_of
from metagpu.plugins.metrics.gpus import of_snapshot
from metagpu.plugins.metrics.http import PageServer, Response
from metagpu.plugins.metrics.probes import Pulse, ills, lacks
from metagpu.plugins.metrics.shared import Shared
from metagpu.plugins.metrics.sources import Sources
from metagpu.plugins.metrics.usage import fixed, of_findings

PAGE_AGE: Final = 1.0
"""Seconds for which a page is as good as another."""
LOOK_PATIENCE: Final = 3.0
"""Seconds that a page waits for NVML; with one that hangs, it has what was known before."""

_FAILED: Final = "metagpu failed to make the page; its log has the details\n"
_INDEX: Final = "metagpu: see /metrics, /healthz, /readyz\n"


class Exporter:
    """Counts what happens, and serves what monitoring asks.

    Attributes:
        server: where it listens.
    """

    def __init__(self, address: Address, sources: Sources) -> None:
        self._sources = sources
        self._families = (*FAMILIES, *families_of(sources.kinds))
        self._counts = Counts()
        self._pulse = Pulse()
        # Findings are shared already; here it is their making that goes on without who asked.
        self._findings = Shared[Findings]("who is on the GPUs", sources.findings, age=0)
        self._page = Shared[bytes]("the page", self._made, PAGE_AGE)
        pages = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/": self._index,
        }
        self.server = PageServer(address, pages)

    async def run(self) -> None:
        """Count and serve until cancelled; a fault in it ends nothing else."""
        listen = partial(self._counts.listen, self._sources.registry.news)
        async with anyio.create_task_group() as group:
            group.start_soon(partial(enduring, listen, "counting of news"))
            group.start_soon(partial(enduring, self._serve, "serving of metrics"))

    async def _serve(self) -> None:
        async with anyio.create_task_group() as group:
            for part in (self._pulse, self._findings, self._page, self.server):
                group.start_soon(part.run)

    async def _made(self) -> bytes:
        """Make a page: what changes is read here, what does not is measured in a thread."""
        findings = await self._findings.get(LOOK_PATIENCE)
        sources = self._sources
        snapshot, layout = sources.registry.snapshot, sources.layout()
        own = of_daemon(sources, self._counts, self._pulse.lag)
        rules = fixed(sources.rules, findings) if findings else sources.rules

        def written() -> bytes:
            samples = [*own, *of_snapshot(snapshot, layout)]
            if findings is not None:
                samples += of_findings(snapshot, findings, rules)
            return page_of(self._families, samples)

        return await to_thread.run_sync(written)

    async def _metrics(self) -> Response:
        page = await self._page.get()
        if page is None:
            return Response(HTTPStatus.INTERNAL_SERVER_ERROR, _FAILED.encode())
        return Response(HTTPStatus.OK, page, CONTENT_TYPE)

    async def _healthz(self) -> Response:
        return _verdict(ills(self._pulse.lag, self._sources.ended()))

    async def _readyz(self) -> Response:
        return _verdict(lacks(self._sources.registry.snapshot, self._sources.kubelet))

    async def _index(self) -> Response:
        return Response(HTTPStatus.OK, _INDEX.encode())


def _verdict(problems: list[str]) -> Response:
    status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
    return Response(status, "".join(f"{line}\n" for line in problems or ["ok"]).encode())
