"""Metrics of the daemon: counters, configuration, NVML, API server, kubelet."""

import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from metagpu import __version__
from metagpu.core.config.profiles import ConfigStatus
from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.shares import Fault
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.model.xid_severity import Severity, rule_for
from metagpu.core.state.call_stats import (
    BUCKET_BOUNDS,
    PREPARE,
    CallOutcome,
    CallStats,
    KubeletCall,
    KubeletCallStats,
    ResourceCallStats,
)
from metagpu.plugins.metrics import daemon_families as d
from metagpu.plugins.metrics import families as f
from metagpu.plugins.metrics.event_counters import EventCounters
from metagpu.plugins.metrics.gpus import gpu_label_values
from metagpu.plugins.metrics.samples import HistogramValue, MetricFamily, Sample
from metagpu.plugins.metrics.sources import MetricSources, NvmlStatus

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


def daemon_samples(sources: MetricSources, counts: EventCounters, lag: float) -> list[Sample]:
    """Return the samples of the daemon's parts.

    Call it on the event loop, where nothing changes meanwhile.
    """
    snapshot = sources.registry.snapshot

    return [
        Sample(d.BUILD, (__version__, platform.python_version()), 1),
        Sample(d.BUS_EVENTS_LOST, (), sources.registry.events.lost),
        Sample(d.LAG, (), lag),
        Sample(f.DRIVER_LIMITS, (), sources.driver_limits()),
        *(Sample(f.LEASE_DIFFERENCES, (it,), n) for it, n in sources.lease_differences().items()),
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

    yield Sample(d.NVML_UP, (), not driver.problem)
    yield Sample(d.NVML_OVERDUE, (), driver.overdue)
    yield Sample(d.NVML_INFO, (versions.driver, cuda), 1)


def _configuration(status: ConfigStatus) -> Iterator[Sample]:
    formats, profiles = ", ".join(status.formats) or "default", ", ".join(status.profiles)

    yield Sample(d.CONFIG_INFO, (status.file, formats, profiles, status.hash), 1)
    yield Sample(d.CONFIG_GENERATION, (), status.accepted)
    yield Sample(d.CONFIG_RELOAD_SUCCESSFUL, (), status.is_current)
    yield Sample(d.CONFIG_ACCEPTED_AT, (), status.accepted_at)
    yield Sample(d.CONFIG_REJECTED_AT, (), status.rejected_at)
    yield Sample(d.CONFIG_RELOADS, ("accepted",), status.accepted)
    yield Sample(d.CONFIG_RELOADS, ("rejected",), status.rejected)
    yield Sample(d.CONFIG_IGNORED_SETTINGS, (), status.ignored_settings)


def _cluster(report: Mapping[str, Any] | None) -> Iterator[Sample]:
    if report is None:
        return
    yield Sample(d.API_CONNECTED, (), report["connected"])
    yield Sample(d.NODE_AMOUNTS_DIFFERING, (), len(report["nodeDifferences"]))
    if "driverUpgrade" in report:
        upgrade = report["driverUpgrade"]
        yield Sample(d.UPGRADE_HOLDING_PODS, (), len(upgrade["pods"]) if upgrade else 0)
    yield Sample(d.EVENTS_DROPPED, ("node",), report["eventsDropped"])
    yield Sample(d.EVENTS_DROPPED, ("pod",), report["podEventsDropped"])
    for feature, problem in report["features"].items():
        yield Sample(d.API_FEATURE, (str(feature),), not problem)


def _kubelet(kubelet: KubeletCallStats, snapshot: Snapshot) -> Iterator[Sample]:
    yield Sample(d.RESTARTS, (), kubelet.restarts)
    for resource, stats in kubelet.resources.items():
        if resource in snapshot.offers:
            yield Sample(f.RESOURCE_REGISTERED, (resource,), stats.listed)
        yield Sample(d.REGISTRATIONS, (resource,), stats.registrations)
        yield Sample(d.LISTS, (resource,), stats.lists)
        yield from _calls(resource, stats)
    for call in KubeletCall:
        yield from _durations(call, [it.calls[call] for it in kubelet.resources.values()])


def _claims(
    front: Mapping[str, Any] | None, prepares: CallStats, cluster: Mapping[str, Any] | None
) -> Iterator[Sample]:
    """Yield the samples of the front DRA; its driver stands for a resource."""
    if front is None:
        return
    driver = front["driver"]
    yield Sample(f.RESOURCE_REGISTERED, (driver,), front["registered"])
    yield Sample(d.PREPARED_CLAIMS, (), front["claims"])
    for outcome, count in prepares.outcomes.items():
        yield Sample(d.CALLS, (driver, PREPARE, outcome), count)
    yield from _durations(PREPARE, [prepares])
    if slices := (cluster or {}).get("resourceSlices"):
        is_expected = slices["problem"] == slices["dropped"]  # an earlier Kubernetes
        yield Sample(d.API_FEATURE, ("resource-slices",), is_expected or not slices["problem"])


def _calls(resource: str, stats: ResourceCallStats) -> Iterator[Sample]:
    for call, it in stats.calls.items():
        if it.seconds or call is KubeletCall.ALLOCATE:  # the others are made of few backends
            for outcome, count in it.outcomes.items():
                if count or outcome in _OUTCOMES_FROM_ZERO[call]:
                    yield Sample(d.CALLS, (resource, call, outcome), count)
    for kind, count in stats.refusals.items():
        yield Sample(d.REFUSALS, (resource, kind.reason), count)


def _durations(call: str, stats: Sequence[CallStats]) -> Iterator[Sample]:
    """Yield the histogram of a call; by resource, the kubelet itself has one."""
    if seconds := sum(it.seconds for it in stats):
        counts = tuple(map(sum, zip(*(it.buckets for it in stats), strict=True)))
        yield Sample(d.DURATION, (call,), HistogramValue(BUCKET_BOUNDS, counts, seconds))


def _counted(counts: EventCounters, snapshot: Snapshot) -> Iterator[Sample]:
    """Yield the counters of all GPUs, also those at 0: `increase` needs a first value."""
    gpu_labels = _all_gpu_labels(snapshot)
    for kind, count in counts.refused_claims.items():
        yield Sample(d.CLAIM_REFUSALS, (kind.reason,), count)
    yield Sample(f.ANNOTATIONS_REJECTED, (), counts.rejected_annotations)
    for gpu, labels in gpu_labels.items():
        for fault in Fault:
            yield Sample(f.GPU_FAULTS, (*labels, fault), counts.faults[gpu, fault])
        yield Sample(f.GPU_RECOVERIES, labels, counts.recoveries[gpu])
        yield Sample(f.UNAUTHORIZED_CONTAINERS, labels, counts.unauthorized_containers[gpu])
        for family, further, count in _of_mode(counts, snapshot.gpus[gpu].gpu):
            yield Sample(family, (*labels, *further), count)

    severities = Counter(
        {(*labels, str(it)): 0 for labels in gpu_labels.values() for it in Severity}
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
        *((f.SIGNALS, (it,), counts.signals[gpu.id, it]) for it in _SIGNALS),
    ]
    present, past = (of_mig, of_limits) if gpu.mig_enabled else (of_limits, of_mig)
    yield from present
    yield from (it for it in past if it[-1])


def _all_gpu_labels(snapshot: Snapshot) -> Mapping[GpuId, tuple[str, str]]:
    return {gpu: gpu_label_values(state.gpu) for gpu, state in snapshot.gpus.items()}


def _labels_of(gpu: GpuId | None, gpu_labels: Mapping[GpuId, tuple[str, str]]) -> tuple[str, str]:
    """Return a GPU's labels: empty for none, without an index for an unknown GPU."""
    return _NO_GPU if gpu is None else gpu_labels.get(gpu, ("", gpu))
