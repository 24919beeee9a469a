"""Metrics of the daemon: counters, configuration, NVML, API server, kubelet."""

import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from msgspec import UNSET

from metagpu import __version__
from metagpu.core.config.profiles import ConfigStatus
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import Fault
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.model.xid_severity import Severity, rule_for
from metagpu.core.reports.schema.daemon import ClusterReport, DraReport
from metagpu.core.state.call_stats import (
    BUCKET_BOUNDS,
    PREPARE,
    CallOutcome,
    CallStats,
    KubeletCall,
    KubeletCallStats,
    ResourceCallStats,
)
from metagpu.core.state.events import (
    AnnotationRejected,
    Event,
    MemoryErrorReported,
    MemoryExceeded,
    ProcessSignalled,
    ResourceClaimRefused,
    UnauthorizedUseFound,
    XidReported,
)
from metagpu.core.state.facts import GpuFaulted, GpuRecovered, InstanceFaulted
from metagpu.core.state.registry import EventBus
from metagpu.plugins.metrics import families as f
from metagpu.plugins.metrics.gpus import gpu_label_values
from metagpu.plugins.metrics.samples import HistogramValue, MetricFamily, Sample
from metagpu.plugins.metrics.sources import MetricSources, NvmlStatus


@dataclass(slots=True)
class EventCounters:
    """The counters; a GPU is `None` where NVML named none.

    Attributes:
        last_xids: the last XID of each GPU, until the GPU is back in service.
        memory_errors: by GPU and whether the error was corrected.
        warnings: containers above their memory limit, by GPU.
        signals: by GPU and the signal's name.
        unauthorized_containers: containers that used a GPU without a share, by GPU.
        mig_device_faults: faults of MIG devices, by their GPU.
        rejected_annotations: rejected annotations of pods about their memory.
        refused_claims: calls to prepare a ResourceClaim that were refused, by the error's class.
    """

    faults: Counter[tuple[GpuId, Fault | None]] = field(default_factory=Counter)
    recoveries: Counter[GpuId] = field(default_factory=Counter)
    xids: Counter[tuple[GpuId | None, int]] = field(default_factory=Counter)
    last_xids: dict[GpuId | None, XidReported] = field(default_factory=dict)
    memory_errors: Counter[tuple[GpuId | None, bool]] = field(default_factory=Counter)
    warnings: Counter[GpuId] = field(default_factory=Counter)
    signals: Counter[tuple[GpuId, str]] = field(default_factory=Counter)
    unauthorized_containers: Counter[GpuId] = field(default_factory=Counter)
    mig_device_faults: Counter[GpuId] = field(default_factory=Counter)
    rejected_annotations: int = 0
    refused_claims: Counter[type[RequestError]] = field(default_factory=Counter)

    async def run(self, events: EventBus[Event]) -> None:
        """Count until cancelled."""
        kinds = (
            *(GpuFaulted, GpuRecovered, XidReported, MemoryErrorReported),
            *(
                MemoryExceeded,
                ProcessSignalled,
                UnauthorizedUseFound,
                InstanceFaulted,
                AnnotationRejected,
                ResourceClaimRefused,
            ),
        )
        with events.subscribe(*kinds) as subscription:
            async for event in subscription:
                self.count(event)

    def count(self, event: Event) -> None:  # noqa: C901 - one case for each kind
        """Count one event."""
        match event:
            case GpuFaulted():
                self.faults[event.gpu, event.fault] += 1
            case GpuRecovered():
                self.recoveries[event.gpu] += 1
                self.last_xids.pop(event.gpu, None)
            case XidReported():
                self.xids[event.gpu, event.code] += 1
                self.last_xids[event.gpu] = event
            case MemoryErrorReported():
                self.memory_errors[event.gpu, event.corrected] += 1
            case MemoryExceeded():
                self.warnings[event.gpu] += 1
            case ProcessSignalled():
                self.signals[event.gpu, event.signal] += 1
            case UnauthorizedUseFound():
                self.unauthorized_containers[event.gpu] += 1
            case InstanceFaulted():
                self.mig_device_faults[event.gpu] += 1
            case AnnotationRejected():
                self.rejected_annotations += 1
            case ResourceClaimRefused():
                self.refused_claims[event.cause] += 1


_SIGNALS: Final = ("SIGTERM", "SIGKILL")
_KINDS: Final = {True: "corrected", False: "uncorrected"}
_NO_GPU: Final = ("", "")
_OF_A_REQUEST: Final = frozenset(CallOutcome) - {CallOutcome.ABANDONED}
_OUTCOMES_FROM_ZERO: Final = MappingProxyType(
    {
        KubeletCall.ALLOCATE: _OF_A_REQUEST,
        KubeletCall.PREFERRED: {CallOutcome.ANSWERED},  # at worst by the kubelet's own order
        KubeletCall.PRE_START: _OF_A_REQUEST,
    }
)
"""Outcomes that have a series before their first call: `increase` misses the first of others."""


def daemon_samples(
    sources: MetricSources, counts: EventCounters, lag: float, long_turns: int
) -> list[Sample]:
    """Return the samples of the daemon's parts.

    Call it on the event loop, where nothing changes meanwhile.
    """
    snapshot = sources.registry.snapshot

    return [
        Sample(f.BUILD, (__version__, platform.python_version()), 1),
        Sample(f.BUS_EVENTS_LOST, (), sources.registry.events.lost),
        Sample(f.LAG, (), lag),
        Sample(f.LONG_TURNS, (), long_turns),
        Sample(f.DRIVER_LIMITS, (), sources.driver_limits()),
        *(
            Sample(f.LEASE_DIFFERENCES, (kind,), n)
            for kind, n in sources.lease_differences().items()
        ),
        *_driver(sources.driver(), snapshot),
        *_configuration(sources.configuration()),
        *_cluster(sources.cluster()),
        *_kubelet(sources.kubelet, snapshot),
        *_claims(sources.claims(), sources.kubelet.prepares, sources.cluster()),
        *_counted(counts, snapshot),
    ]


def _driver(driver: NvmlStatus, snapshot: Snapshot) -> Iterator[Sample]:
    versions = snapshot.versions
    cuda = ".".join(map(str, versions.cuda)) if versions.cuda else ""

    yield Sample(f.NVML_UP, (), not driver.problem)
    yield Sample(f.NVML_OVERDUE, (), driver.overdue)
    yield Sample(f.NVML_INFO, (versions.driver, cuda), 1)


def _configuration(status: ConfigStatus) -> Iterator[Sample]:
    formats, profiles = ", ".join(status.formats) or "default", ", ".join(status.profiles)

    yield Sample(f.CONFIG_INFO, (status.file, formats, profiles, status.hash), 1)
    yield Sample(f.CONFIG_GENERATION, (), status.accepted)
    yield Sample(f.CONFIG_RELOAD_SUCCESSFUL, (), status.is_current)
    yield Sample(f.CONFIG_ACCEPTED_AT, (), status.accepted_at)
    yield Sample(f.CONFIG_REJECTED_AT, (), status.rejected_at)
    yield Sample(f.CONFIG_RELOADS, ("accepted",), status.accepted)
    yield Sample(f.CONFIG_RELOADS, ("rejected",), status.rejected)
    yield Sample(f.CONFIG_IGNORED_SETTINGS, (), status.ignored_settings)


def _cluster(report: ClusterReport | None) -> Iterator[Sample]:
    if report is None:
        return
    yield Sample(f.API_CONNECTED, (), report.connected)
    yield Sample(f.NODE_AMOUNTS_DIFFERING, (), len(report.node_differences))
    if report.driver_upgrade is not UNSET:
        pods = report.driver_upgrade.pods if report.driver_upgrade else ()
        yield Sample(f.UPGRADE_HOLDING_PODS, (), len(pods))
    yield Sample(f.EVENTS_DROPPED, ("node",), report.events_dropped)
    yield Sample(f.EVENTS_DROPPED, ("pod",), report.pod_events_dropped)
    for feature, problem in report.features.items():
        yield Sample(f.API_FEATURE, (str(feature),), not problem)


def _kubelet(kubelet: KubeletCallStats, snapshot: Snapshot) -> Iterator[Sample]:
    yield Sample(f.RESTARTS, (), kubelet.restarts)
    for resource, stats in kubelet.resources.items():
        if resource in snapshot.offers:
            yield Sample(f.RESOURCE_REGISTERED, (resource,), stats.listed)
        yield Sample(f.REGISTRATIONS, (resource,), stats.registrations)
        yield Sample(f.LISTS, (resource,), stats.lists)
        yield from _calls(resource, stats)
    for call in KubeletCall:
        yield from _durations(
            call,
            [resource_call_stats.calls[call] for resource_call_stats in kubelet.resources.values()],
        )


def _claims(
    dra: DraReport | None, prepares: CallStats, cluster: ClusterReport | None
) -> Iterator[Sample]:
    """Yield the samples of the DRA driver; it stands for a resource."""
    if dra is None:
        return
    driver = dra.driver
    yield Sample(f.RESOURCE_REGISTERED, (driver,), dra.registered)
    yield Sample(f.PREPARED_CLAIMS, (), dra.claims)
    for outcome, count in prepares.outcomes.items():
        yield Sample(f.CALLS, (driver, PREPARE, outcome), count)
    yield from _durations(PREPARE, [prepares])
    if cluster is not None and (slices := cluster.resource_slices) is not None:
        is_expected = slices.problem == slices.dropped  # an earlier Kubernetes
        yield Sample(f.API_FEATURE, ("resource-slices",), is_expected or not slices.problem)


def _calls(resource: str, stats: ResourceCallStats) -> Iterator[Sample]:
    for call, call_stats in stats.calls.items():
        # The others than Allocate are made of few backends.
        if call_stats.seconds or call is KubeletCall.ALLOCATE:
            for outcome, count in call_stats.outcomes.items():
                if count or outcome in _OUTCOMES_FROM_ZERO[call]:
                    yield Sample(f.CALLS, (resource, call, outcome), count)
    for kind, count in stats.refusals.items():
        yield Sample(f.REFUSALS, (resource, kind.reason), count)


def _durations(call: str, stats: Sequence[CallStats]) -> Iterator[Sample]:
    """Yield the histogram of a call; by resource, the kubelet itself has one."""
    if seconds := sum(stat.seconds for stat in stats):
        counts = tuple(map(sum, zip(*(stat.buckets for stat in stats), strict=True)))
        yield Sample(f.DURATION, (call,), HistogramValue(BUCKET_BOUNDS, counts, seconds))


def _counted(counts: EventCounters, snapshot: Snapshot) -> Iterator[Sample]:
    """Yield the counters of all GPUs, also those at 0: `increase` needs a first value."""
    gpu_labels = _all_gpu_labels(snapshot)
    for kind, count in counts.refused_claims.items():
        yield Sample(f.CLAIM_REFUSALS, (kind.reason,), count)
    yield Sample(f.ANNOTATIONS_REJECTED, (), counts.rejected_annotations)
    for gpu, labels in gpu_labels.items():
        for fault in Fault:
            yield Sample(f.GPU_FAULTS, (*labels, fault), counts.faults[gpu, fault])
        yield Sample(f.GPU_RECOVERIES, labels, counts.recoveries[gpu])
        yield Sample(f.UNAUTHORIZED_CONTAINERS, labels, counts.unauthorized_containers[gpu])
        for family, further, count in _of_mode(counts, snapshot.gpus[gpu].gpu):
            yield Sample(family, (*labels, *further), count)

    severities = Counter(
        {(*labels, str(severity)): 0 for labels in gpu_labels.values() for severity in Severity}
    )
    for (where, code), count in counts.xids.items():
        labels = _labels_of(where, gpu_labels)
        yield Sample(f.GPU_XIDS, (*labels, str(code)), count)
        severities[(*labels, str(rule_for(code, {}).severity))] += count
    yield from (Sample(f.GPU_XIDS_BY_SEVERITY, key, count) for key, count in severities.items())

    errors = Counter(
        {(*labels, kind): 0 for labels in gpu_labels.values() for kind in _KINDS.values()}
    )
    for (where, corrected), count in counts.memory_errors.items():
        errors[(*_labels_of(where, gpu_labels), _KINDS[corrected])] += count
    yield from (Sample(f.GPU_MEMORY_ERRORS, labels, count) for labels, count in errors.items())


def _of_mode(
    counts: EventCounters, gpu: Gpu
) -> Iterator[tuple[MetricFamily, tuple[str, ...], int]]:
    """Yield the counters of one MIG mode: of the other one, those above 0."""
    of_mig = [(f.MIG_DEVICE_FAULTS, (), counts.mig_device_faults[gpu.id])]
    of_limits = [
        (f.WARNINGS, (), counts.warnings[gpu.id]),
        *((f.SIGNALS, (signal,), counts.signals[gpu.id, signal]) for signal in _SIGNALS),
    ]
    present, past = (of_mig, of_limits) if gpu.mig_enabled else (of_limits, of_mig)
    yield from present
    yield from (families for families in past if families[-1])


def _all_gpu_labels(snapshot: Snapshot) -> Mapping[GpuId, tuple[str, str]]:
    return {gpu: gpu_label_values(state.gpu) for gpu, state in snapshot.gpus.items()}


def _labels_of(gpu: GpuId | None, gpu_labels: Mapping[GpuId, tuple[str, str]]) -> tuple[str, str]:
    """Return a GPU's labels: empty for none, without an index for an unknown GPU."""
    return _NO_GPU if gpu is None else gpu_labels.get(gpu, ("", gpu))
