"""The webhook put together: nodes, certificate, reviews, metrics and Events.

Metrics and probes are served over HTTP without TLS: they name no pod.
"""

from bisect import bisect_left
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from socket import gethostname
from typing import Any, Final

import anyio
import msgspec
import structlog
from anyio import to_thread

from metagpu.core.contracts.programs import RunCommand
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.core.runtime.tasks import run_with_restart, serve
from metagpu.core.state.call_stats import BUCKET_BOUNDS
from metagpu.host.processes import raise_file_limit
from metagpu.plugins.cluster.client import open_client
from metagpu.plugins.cluster.event_recorder import (
    NOTE_LIMIT,
    PER_POD,
    EventData,
    EventRecorder,
    ObjectReference,
)
from metagpu.plugins.cluster.refusals import impossible_request_event
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
from metagpu.webhook.reviews import ReviewRequest
from metagpu.webhook.server import ReviewServer, ServingCertificate
from metagpu.webhook.settings import WebhookSettings, WebhookTiming
from metagpu.webhook.translator import NodeOffers, Outcome, Translator

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


BURST: Final = 50
"""Events that may follow each other at once, of all namespaces together."""
RATE: Final = 1.0
"""Events a second after a burst: clients may invent namespaces."""
_LONGEST: Final = 253
"""Characters of a name in Kubernetes. Nobody has checked those of a pod under review yet."""


class _Owner(msgspec.Struct):
    apiVersion: str = "v1"  # noqa: N815 - Kubernetes' key
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class _OwnedMetadata(msgspec.Struct):
    name: str = ""
    ownerReferences: list[_Owner] | None = None  # noqa: N815 - as above


class _OwnedPod(msgspec.Struct):
    metadata: _OwnedMetadata


_decode: Final = msgspec.json.Decoder(_OwnedPod).decode


class ImpossibleRequests:
    """Hands an Event of each pod that was admitted in vain to a recorder.

    A pod under review is not stored yet, so its controller is what people can look at.
    """

    def __init__(self, record: Callable[[EventData], None]) -> None:
        self._record = record

    def report(self, request: ReviewRequest, reason: str) -> None:
        """Record why no node could serve the pod of a request; a dry run creates none."""
        if request.dry_run or not request.namespace:
            return
        subject = subject_of(request)
        if subject is not None:
            self._record(impossible_request_event(subject, reason[:NOTE_LIMIT]))


def subject_of(request: ReviewRequest) -> ObjectReference | None:
    """Return the controller of a pod, or the pod.

    `None` where neither has a name yet, or one that Kubernetes refuses.
    """
    try:
        metadata = _decode(request.object).metadata
    except msgspec.DecodeError:
        return None
    # The API server makes a name of generateName later.
    subject = ObjectReference("Pod", metadata.name, namespace=request.namespace)
    for reference in metadata.ownerReferences or ():
        if reference.controller and reference.name:
            subject = ObjectReference(
                reference.kind,
                reference.name,
                reference.uid,
                request.namespace,
                reference.apiVersion,
            )
    fits = all(len(text) <= _LONGEST for text in msgspec.structs.astuple(subject))
    return subject if subject.name and fits else None


log = structlog.get_logger()


class Webhook:
    """A webhook that runs until a signal.

    Attributes:
        server: the server of the reviews.
        exporter: the server of metrics and probes, `None` without an address.
    """

    server: ReviewServer
    exporter: WebhookExporter | None
    _nodes: NodeOffers

    def __init__(self, settings: WebhookSettings, run_command: RunCommand) -> None:
        self._settings = settings
        self._run_command = run_command
        self._certificate = ServingCertificate(settings.certificate)
        self._stats = ReviewStats()
        self._started = anyio.Event()

    async def run(self) -> None:
        """Serve until a signal; SIGHUP reads the certificate again.

        Raises:
            MetagpuError: the port cannot be bound.
        """
        raise_file_limit()
        settings, timing = self._settings, self._settings.timing
        async with open_client(settings.kubeconfig, self._run_command, timing.cluster) as client:
            self._nodes = nodes = NodeOffers(client)
            recorder = EventRecorder(
                gethostname(), timing.cluster, per_subject=PER_POD, overall=TokenBucket(BURST, RATE)
            )
            impossible = ImpossibleRequests(recorder.record)
            answers = Translator(nodes, settings.translation)
            if settings.events:
                answers = Translator(nodes, settings.translation, impossible.report)
            self.server = ReviewServer(
                settings.address,
                self._certificate.context,
                answers.answer,
                record=self._stats.record,
                timing=timing,
                limits=settings.limits,
            )
            self.exporter = None
            tasks: list[Callable[[], Coroutine[Any, Any, None]]] = [
                partial(run_with_restart, nodes.run, "watch of nodes"),
                partial(run_with_restart, self._certificate.run, "watch of the certificate"),
                self.server.run,
            ]
            if settings.events:
                tasks.append(partial(run_with_restart, partial(recorder.run, client), "events"))
            if settings.metrics is not None:
                self.exporter = WebhookExporter(
                    settings.metrics, self._stats, self._gauges, self.problems, timing
                )
                tasks.append(partial(run_with_restart, self.exporter.run, "metrics server"))
            self._started.set()
            await serve(*tasks, reload=self._certificate.reload)

    async def started(self) -> None:
        """Wait until the parts exist."""
        await self._started.wait()

    def problems(self) -> list[str]:
        """Return what keeps the webhook from answering, nothing while it is ready."""
        found = [problem for problem in (self._certificate.problem,) if problem]
        if not self._nodes.known:
            reason = f": {self._nodes.problem}" if self._nodes.problem else ""
            found.append(f"the nodes have not been read yet{reason}")
        return found

    def _gauges(self) -> Iterator[Sample]:
        yield Sample(NODES, (), len(self._nodes.groups.nodes))
        yield Sample(NODES_KNOWN, (), float(self._nodes.known and not self._nodes.problem))
        yield Sample(EXPIRES, (), self._certificate.expires)
        yield Sample(CONNECTIONS, (), self.server.connections)
