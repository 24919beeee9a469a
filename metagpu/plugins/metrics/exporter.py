"""The exporter: serves metrics and probes, and namespaces for showback.

Sensors of all GPUs are read together: one that hangs costs no other its values.
"""

import gzip
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

import anyio
from anyio import to_thread

from metagpu.core.contracts.sensors import DetailedSensors, InstanceSensors
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Lease, ResourceName, ShareId
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.runtime.loop import long_turns
from metagpu.core.runtime.tasks import run_with_restart, start_together
from metagpu.core.state.registry import Registry
from metagpu.core.usage.accounting import HeldParts
from metagpu.core.usage.collector import NodeUsage
from metagpu.core.usage.timing import DEFAULT_TIMING
from metagpu.core.usage.utilization import SensorTurns
from metagpu.plugins.http.address import HttpTiming, ListenAddress
from metagpu.plugins.http.messages import HttpRequest, HttpResponse
from metagpu.plugins.http.server import Page, PageServer, SingleFlight
from metagpu.plugins.metrics import dcgm
from metagpu.plugins.metrics import families as f
from metagpu.plugins.metrics.daemon import EventCounters, daemon_samples
from metagpu.plugins.metrics.dcgm import dcgm_samples
from metagpu.plugins.metrics.exposition import CONTENT_TYPE, PageRenderer, render_process
from metagpu.plugins.metrics.families import FAMILIES, backend_families
from metagpu.plugins.metrics.gpus import (
    rules_for_thread,
    sensor_samples,
    snapshot_samples,
    usage_samples,
)
from metagpu.plugins.metrics.probes import LoopLagProbe, liveness_problems, readiness_problems
from metagpu.plugins.metrics.samples import Sample
from metagpu.plugins.metrics.sources import MetricSources, MetricsTiming, ReadSensors

KEPT: Final = 3600.0
"""Seconds for which a namespace without shares keeps its counters: short-lived ones add up."""


class _Held(NamedTuple):
    """Holdings of namespaces on one GPU: shares of a resource, and parts of the GPU."""

    leases: Mapping[ShareId, Lease]
    shares: Mapping[tuple[str, ResourceName], int]
    parts: Mapping[str, float]


_Holdings: TypeAlias = dict[GpuId, _Held]


class NamespaceMeter:
    """Share-seconds and GPU-seconds of each namespace since the start of the daemon.

    Time is counted from lease to lease, and not from scrape to scrape: a container that comes and
    goes between two scrapes counts. It begins when the kubelet names the container.
    """

    def __init__(self) -> None:
        self._held: _Holdings = {}
        self._share_seconds: dict[tuple[str, ResourceName], float] = {}
        self._gpu_seconds: dict[str, float] = {}
        self._held_at: dict[str, float] = {}
        self._published: Collection[tuple[str, tuple[str, ...]]] = ()
        self._at = 0.0

    async def run(self, registry: Registry) -> None:
        """Count from each change of the leases to the next, until cancelled."""
        view = lambda now: tuple(state.leases for state in now.gpus.values())  # noqa: E731
        async for _ in registry.watch(view):
            self.observe(registry.snapshot, anyio.current_time())

    def observe(self, snapshot: Snapshot, now: float) -> None:
        """Count the time since the last change, then take over the leases that changed."""
        self.advance(now)
        before, held = self._held, _Holdings()
        for gpu, state in snapshot.gpus.items():
            known = before.get(gpu)
            # The kubelet may wait for its next answer: a GPU without a change costs nothing.
            held[gpu] = known if known and known.leases is state.leases else _held_of(state)
        self._held = held

    def advance(self, now: float) -> None:
        """Count the time until now; drop namespaces that have had no share for long."""
        elapsed, self._at = max(0.0, now - self._at), now
        for held in self._held.values():
            for key, count in held.shares.items():
                self._share_seconds[key] = self._share_seconds.get(key, 0.0) + count * elapsed
            for namespace, part in held.parts.items():
                self._gpu_seconds[namespace] = (
                    self._gpu_seconds.get(namespace, 0.0) + part * elapsed
                )
                self._held_at[namespace] = now
        for namespace in [name for name, at in self._held_at.items() if now - at > KEPT]:
            del self._held_at[namespace], self._gpu_seconds[namespace]
            for key in [
                share_second for share_second in self._share_seconds if share_second[0] == namespace
            ]:
                del self._share_seconds[key]

    def samples(self) -> list[Sample]:
        """Return the counters for a page; a new one is 0 on its first page.

        Prometheus counts what is added to the first value that it sees.
        """
        shares = (Sample(f.NAMESPACE_SHARE_SECONDS, k, v) for k, v in self._share_seconds.items())
        gpus = (Sample(f.NAMESPACE_GPU_SECONDS, (k,), v) for k, v in self._gpu_seconds.items())
        present = {(share.family.name, share.labels): share for share in (*shares, *gpus)}
        before, self._published = self._published, present.keys()
        return [
            value if key in before else value._replace(value=0) for key, value in present.items()
        ]


def _held_of(state: GpuState) -> _Held:
    shares: Counter[tuple[str, ResourceName]] = Counter()
    parts: dict[str, float] = {}
    measure = HeldParts(state)
    for namespace, lease in _named_leases(state):
        shares[namespace, lease.share.resource] += 1
        parts[namespace] = parts.get(namespace, 0.0) + measure.of_share(lease.share)
    return _Held(state.leases, shares, parts)


def namespace_samples(snapshot: Snapshot, usage: NodeUsage | None) -> Iterator[Sample]:
    """Yield what each namespace holds now, and the memory that its containers use."""
    shares: Counter[tuple[str, ResourceName]] = Counter()
    held: Counter[str] = Counter()
    for state in snapshot.gpus.values():
        for namespace, lease in _named_leases(state):
            shares[namespace, lease.share.resource] += 1
            held[namespace] += lease.share.memory
    for (namespace, resource), count in shares.items():
        yield Sample(f.NAMESPACE_SHARES, (namespace, resource), count)
    for namespace, memory in held.items():
        yield Sample(f.NAMESPACE_HELD_MEMORY, (namespace,), memory)

    used: Counter[str] = Counter()
    for gpu, gpu_usage in (usage.gpus if usage else {}).items():
        if usage and gpu not in usage.failures:
            for container in gpu_usage.containers:
                used[container.holder.namespace] += container.memory
    for namespace, memory in used.items():
        yield Sample(f.NAMESPACE_USED_MEMORY, (namespace,), memory)


def _named_leases(state: GpuState) -> Iterator[tuple[str, Lease]]:
    """Yield the leases of a GPU whose holder is known, each with its namespace."""
    for lease in state.leases.values():
        if lease.holder is not None:
            yield lease.holder.namespace, lease


ReadingT = TypeVar("ReadingT")


class SensorReader(Generic[ReadingT]):
    """Reads the sensors of all GPUs, or of their MIG instances.

    A GPU that hangs ends at NVML's deadline once, and fails at once while that call is out. No
    reading is cancelled: NVML's worker would not count a call as overdue that nobody waits for.
    """

    def __init__(self, registry: Registry, sensors: Callable[[GpuId], Awaitable[ReadingT]]) -> None:
        self._registry = registry
        self._sensors = sensors

    async def read(self) -> Mapping[GpuId, ReadingT]:
        """Return the reading of each GPU that answers, in the order of the GPUs."""
        gpus = tuple(self._registry.snapshot.gpus)
        found: dict[GpuId, ReadingT] = {}

        async def read_one(gpu: GpuId) -> None:
            with suppress(DriverError):  # the health watch reports it
                found[gpu] = await self._sensors(gpu)

        async with anyio.create_task_group() as group:
            await start_together(
                group, (partial(read_one, gpu) for gpu in gpus), DEFAULT_TIMING.turn
            )
        return {gpu: found[gpu] for gpu in gpus if gpu in found}


class DetailedSensorReader:
    """Reads the detailed sensors of all GPUs, the costly ones of one in turns."""

    def __init__(self, registry: Registry, sensors: ReadSensors) -> None:
        self._registry = registry
        self._sensors = sensors
        self._turns = SensorTurns(DEFAULT_TIMING.costly_age)

    async def read(self) -> Mapping[GpuId, DetailedSensors]:
        """Return the reading of each GPU that answers, in the order of the GPUs."""
        gpus = tuple(self._registry.snapshot.gpus)
        due = self._turns.due(gpus, anyio.current_time())

        async def read_one(gpu: GpuId) -> DetailedSensors:
            began, costly = anyio.current_time(), gpu in due
            found = await self._sensors(gpu, costly=costly)
            return self._turns.complete(gpu, found, began, was_read=costly)[gpu]

        readings = await SensorReader(self._registry, read_one).read()
        self._turns.retain(readings)  # a GPU that may be lost has no earlier value
        return readings


_FAILED: Final = "metagpu failed to render the page; its log has the details\n"
_WAITS: Final = "standby: another daemon has the node, and serves its metrics\n"
_STANDBY: Final = "standby"
_INDEX: Final = "metagpu: see /metrics, /dcgm, /healthz, /readyz\n"

Readings: TypeAlias = Mapping[GpuId, DetailedSensors]
InstanceReadings: TypeAlias = Mapping[GpuId, Sequence[InstanceSensors]]


class Exporter:
    """Counts events, and serves the pages of monitoring.

    Attributes:
        server: the HTTP server of the pages.
    """

    def __init__(
        self,
        address: ListenAddress,
        sources: MetricSources,
        timing: MetricsTiming = MetricsTiming(),  # noqa: B008 - frozen
        http_timing: HttpTiming = HttpTiming(),  # noqa: B008 - frozen
    ) -> None:
        self._address = address
        self._sources = sources
        self._timing = timing
        self._http_timing = http_timing
        self._renderer = PageRenderer((*FAMILIES, *backend_families(sources.kinds)))
        self._dcgm_renderer = PageRenderer(dcgm.FAMILIES)
        self._counters = EventCounters()
        self._namespaces = NamespaceMeter()
        self._lag_probe = LoopLagProbe()
        # The collector caches usage already: this lets a collection outlive the client that asked.
        self._usage = SingleFlight[NodeUsage]("GPU usage", sources.usage, age=0)
        reader = DetailedSensorReader(sources.registry, sources.sensors)
        self._sensors = SingleFlight[Readings]("GPU sensors", reader.read, http_timing.page_age)
        instances = SensorReader(sources.registry, sources.instance_sensors)
        self._instances = SingleFlight[InstanceReadings](
            "sensors of MIG instances", instances.read, http_timing.page_age
        )
        self._page = SingleFlight[HttpResponse]("metrics page", self._render, http_timing.page_age)
        self._dcgm_page = SingleFlight[HttpResponse](
            "page of dcgm-exporter", self._render_dcgm, http_timing.page_age
        )
        pages: dict[str, Page] = {
            "/metrics": partial(self._rendered, self._page),
            "/dcgm": partial(self._rendered, self._dcgm_page),
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/": self._index,
        }
        self.server = PageServer(address, pages, http_timing)

    async def run(self) -> None:
        """Count and serve until cancelled; a failure here ends nothing else."""
        count = partial(self._counters.run, self._sources.registry.events)
        meter = partial(self._namespaces.run, self._sources.registry)
        async with anyio.create_task_group() as group:
            group.start_soon(partial(run_with_restart, count, "event counters"))
            group.start_soon(partial(run_with_restart, meter, "time of namespaces"))
            group.start_soon(partial(run_with_restart, self._serve, "metrics server"))

    async def _serve(self) -> None:
        async with anyio.create_task_group() as group:
            for part in (
                *(self._lag_probe, self._usage, self._sensors, self._instances),
                *(self._page, self._dcgm_page, self.server),
            ):
                group.start_soon(part.run)

    async def _render(self) -> HttpResponse:
        """Render a page: read mutable state here, and immutable state in a thread."""
        usage = await self._usage.get(self._timing.nvml_timeout)
        sources = self._sources
        snapshot, layout = sources.registry.snapshot, sources.layout()
        self._namespaces.advance(anyio.current_time())
        own = [
            *daemon_samples(sources, self._counters, self._lag_probe.lag, long_turns()),
            *self._namespaces.samples(),
        ]
        rules = rules_for_thread(sources.rules, usage) if usage else sources.rules

        def render() -> HttpResponse:
            samples = [*own, *snapshot_samples(snapshot, layout)]
            samples += namespace_samples(snapshot, usage)
            if usage is not None:
                samples += sensor_samples(snapshot, usage.sensors or {})
                samples += usage_samples(snapshot, usage, rules)
            return _page(self._renderer.render(samples) + render_process())

        return await to_thread.run_sync(render)

    async def _render_dcgm(self) -> HttpResponse:
        """Render the page of dcgm-exporter, in the same way."""
        readings = await self._sensors.get(self._timing.nvml_timeout)
        instances = await self._instances.get(self._timing.nvml_timeout)
        snapshot, last_xids = self._sources.registry.snapshot, dict(self._counters.last_xids)

        def render() -> HttpResponse:
            samples = dcgm_samples(
                *(snapshot, readings or {}, instances or {}, last_xids),
                node=self._sources.node,
                now=time.time(),
            )
            return _page(self._dcgm_renderer.render(samples))

        return await to_thread.run_sync(render)

    async def _rendered(self, page: SingleFlight[HttpResponse], _: HttpRequest) -> HttpResponse:
        if not self._sources.has_node():  # two daemons of a node would count everything twice
            return HttpResponse(HTTPStatus.SERVICE_UNAVAILABLE, _WAITS.encode())
        response = await page.get()
        if response is None:
            return HttpResponse(HTTPStatus.INTERNAL_SERVER_ERROR, _FAILED.encode())
        return response

    async def _healthz(self, _: HttpRequest) -> HttpResponse:
        late = self._timing.late_loop
        return _probe_response(liveness_problems(self._lag_probe.lag, self._sources.ended(), late))

    async def _readyz(self, _: HttpRequest) -> HttpResponse:
        sources = self._sources
        if not sources.has_node():
            return _probe_response(list(sources.problems()), _STANDBY)
        problems = list(sources.problems()) if not sources.registry.snapshot.offers else []
        return _probe_response(
            problems
            or readiness_problems(sources.registry.snapshot, sources.kubelet, sources.claims())
        )

    async def _index(self, _: HttpRequest) -> HttpResponse:
        return HttpResponse(HTTPStatus.OK, _INDEX.encode())


def _page(text: bytes) -> HttpResponse:
    """Return a page with its compressed form; blocks for a millisecond.

    Level 1 has most of the gain at a fifth of the cost.
    """
    return HttpResponse(HTTPStatus.OK, text, CONTENT_TYPE, gzip.compress(text, 1, mtime=0))


def _probe_response(problems: list[str], fine: str = "ok") -> HttpResponse:
    status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
    return HttpResponse(status, "".join(f"{line}\n" for line in problems or [fine]).encode())
