"""Metrics and probes of the webhook, over HTTP without TLS: they name no pod."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from metagpu.core.state.call_stats import BUCKET_BOUNDS
from metagpu.plugins.http.address import HttpTiming, ListenAddress
from metagpu.plugins.http.messages import HttpRequest, HttpResponse
from metagpu.plugins.http.server import Page, PageServer, SingleFlight
from metagpu.plugins.metrics.exposition import CONTENT_TYPE, PageRenderer, render_process
from metagpu.plugins.metrics.probes import LoopLagProbe, liveness_problems
from metagpu.plugins.metrics.samples import (
    FamilyFactory,
    HistogramValue,
    MetricType,
    Sample,
    families_in,
)
from metagpu.webhook.settings import WebhookTiming
from metagpu.webhook.translator import Outcome

REVIEWS: Final = FamilyFactory(MetricType.COUNTER)(
    "webhook_reviews_total", "Reviews of the API server, by outcome, dry runs included.", "outcome"
)
SECONDS: Final = FamilyFactory(MetricType.HISTOGRAM)(
    "webhook_review_duration_seconds",
    "Time from the headers of a review to metagpu's answer, the arrival of the body included.",
)
NODES: Final = FamilyFactory(MetricType.GAUGE)(
    "webhook_nodes", "Nodes with extended resources that translations choose from."
)
NODES_KNOWN: Final = FamilyFactory(MetricType.GAUGE)(
    "webhook_nodes_watched", "Whether the watch of the Nodes works, 1 or 0."
)
EXPIRES: Final = FamilyFactory(MetricType.GAUGE)(
    "webhook_certificate_expiry_timestamp_seconds",
    "End of the certificate in force, in seconds since the epoch, 0 without one.",
)
CONNECTIONS: Final = FamilyFactory(MetricType.GAUGE)(
    "webhook_connections", "Open connections, handshakes included."
)
FAMILIES: Final = families_in(globals())


class ReviewStats(msgspec.Struct):
    """Counters of reviews.

    Attributes:
        buckets: reviews by the first of `BUCKET_BOUNDS` that they do not exceed; the last bucket
            has the rest.
        seconds: the duration of all reviews together.
    """

    outcomes: dict[Outcome, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKET_BOUNDS) + 1))
    seconds: float = 0.0

    def record(self, outcome: Outcome, seconds: float) -> None:
        """Count one review."""
        self.outcomes[outcome] += 1
        self.buckets[bisect_left(BUCKET_BOUNDS, seconds)] += 1
        self.seconds += seconds

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of all reviews."""
        for outcome, count in self.outcomes.items():
            yield Sample(REVIEWS, (outcome.value,), count)
        value = HistogramValue(BUCKET_BOUNDS, tuple(self.buckets), self.seconds)
        yield Sample(SECONDS, (), value)


class WebhookExporter:
    """Serves the metrics and the probes `/healthz` and `/readyz`.

    Args:
        gauges: the samples of the moment.
        problems: what keeps the webhook from answering, nothing while it is ready.

    Attributes:
        server: the HTTP server of the pages.
    """

    def __init__(
        self,
        address: ListenAddress,
        stats: ReviewStats,
        gauges: Callable[[], Iterator[Sample]],
        problems: Callable[[], list[str]],
        timing: WebhookTiming,
    ) -> None:
        self._renderer = PageRenderer(FAMILIES)
        self._stats = stats
        self._gauges = gauges
        self._problems = problems
        self._late = timing.late_loop
        self._lag_probe = LoopLagProbe()
        http = HttpTiming()
        self._page = SingleFlight[HttpResponse]("metrics page", self._render, http.page_age)
        pages: Mapping[str, Page] = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
        }
        self.server = PageServer(address, pages, http)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with anyio.create_task_group() as group:
            for part in (self._lag_probe, self._page, self.server):
                group.start_soon(part.run)

    async def _render(self) -> HttpResponse:
        text = self._renderer.render([*self._stats.samples(), *self._gauges()])
        process = await to_thread.run_sync(render_process)
        return HttpResponse(HTTPStatus.OK, text + process, CONTENT_TYPE)

    async def _metrics(self, _: HttpRequest) -> HttpResponse:
        page = await self._page.get()
        return page or HttpResponse(HTTPStatus.INTERNAL_SERVER_ERROR, b"metagpu failed\n")

    async def _healthz(self, _: HttpRequest) -> HttpResponse:
        return _probe(liveness_problems(self._lag_probe.lag, {}, self._late))

    async def _readyz(self, _: HttpRequest) -> HttpResponse:
        return _probe(self._problems())


def _probe(problems: list[str]) -> HttpResponse:
    status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
    return HttpResponse(status, "".join(f"{line}\n" for line in problems or ["ok"]).encode())
