"""Metrics of the daemon itself: what it counted, its configuration, NVML, the API server."""

import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from metagpu import __version__
from metagpu.core.errors import RequestError
from metagpu.core.gpu import GpuId
from metagpu.core.model import Fault
from metagpu.core.snapshot import Snapshot
from metagpu.core.xid import DEFAULT_XIDS
from metagpu.plugins.metrics import families as f
from metagpu.plugins.metrics.counts import Counts
from metagpu.plugins.metrics.gpus import gpu_labels
from metagpu.plugins.metrics.samples import Sample, Spread
from metagpu.plugins.metrics.sources import Configuration, Driver, Sources
from metagpu.plugins.record import BOUNDS, KubeletRecord, ResourceRecord

_SIGNALS: Final = ("SIGTERM", "SIGKILL")
_KINDS: Final = {True: "corrected", False: "uncorrected"}
_NOWHERE: Final = ("", "")


def of_daemon(sources: Sources, counts: Counts, lag: float) -> list[Sample]:
    """Measure what the daemon's parts keep; on the event loop, where nothing changes meanwhile."""
    snapshot = sources.registry.snapshot

    return [
        Sample(f.BUILD, (__version__, platform.python_version()), 1),
        Sample(f.NEWS_LOST, (), sources.registry.news.lost),
        Sample(f.LAG, (), lag),
        Sample(f.DRIVER_LIMITS, (), sources.driver_limits()),
        *_driver(sources.driver(), snapshot),
        *_configuration(sources.configuration()),
        *_cluster(sources.cluster()),
        *_kubelet(sources.kubelet, snapshot),
        *_counted(counts, snapshot),
    ]


def _driver(driver: Driver, snapshot: Snapshot) -> Iterator[Sample]:
    versions = snapshot.versions
    cuda = ".".join(map(str, versions.cuda)) if versions.cuda else ""

    yield Sample(f.NVML_UP, (), not driver.problem)
    yield Sample(f.NVML_OVERDUE, (), driver.overdue)
    yield Sample(f.NVML_INFO, (versions.driver, cuda), 1)


def _configuration(it: Configuration) -> Iterator[Sample]:
    form, profile = ", ".join(it.forms) or "default", ", ".join(it.profiles)

    yield Sample(f.CONFIG_INFO, (it.file, form, profile), 1)
    yield Sample(f.CONFIG_GOOD, (), it.good)
    yield Sample(f.CONFIG_TAKEN_AT, (), it.taken_at)
    yield Sample(f.CONFIG_REFUSED_AT, (), it.refused_at)
    yield Sample(f.CONFIG_READ, ("taken",), it.taken)
    yield Sample(f.CONFIG_READ, ("refused",), it.refused)
    yield Sample(f.CONFIG_NOTES, (), it.notes)


def _cluster(report: Mapping[str, Any] | None) -> Iterator[Sample]:
    if report is None:
        return
    yield Sample(f.API_CONNECTED, (), report["connected"])
    yield Sample(f.EVENTS_DROPPED, ("node",), report["eventsDropped"])
    yield Sample(f.EVENTS_DROPPED, ("pods",), report["podEventsDropped"])
    for use, problem in report["uses"].items():
        yield Sample(f.API_USE, (str(use),), not problem)


def _kubelet(kubelet: KubeletRecord, snapshot: Snapshot) -> Iterator[Sample]:
    yield Sample(f.RESTARTS, (), kubelet.restarts)
    for resource, record in kubelet.resources.items():
        if resource in snapshot.offers:
            yield Sample(f.RESOURCE_REGISTERED, (resource,), record.listed)
        yield Sample(f.REGISTRATIONS, (resource,), record.registrations)
        yield Sample(f.LISTS, (resource,), record.lists)
        yield from _calls(resource, record)


def _calls(resource: str, record: ResourceRecord) -> Iterator[Sample]:
    for call, it in record.calls.items():
        for outcome, count in it.outcomes.items():
            yield Sample(f.CALLS, (resource, call, outcome), count)
        spread = Spread(BOUNDS, tuple(it.buckets), it.seconds)
        yield Sample(f.DURATION, (resource, call), spread)

    refusals = Counter({reason_of(kind): 0 for kind in RequestError.__subclasses__()})
    for kind, count in record.refusals.items():
        refusals[reason_of(kind)] += count
    for reason, count in refusals.items():
        yield Sample(f.REFUSALS, (resource, reason), count)


def reason_of(kind: type[RequestError]) -> str:
    """Name a kind of refusal as labels do: `gpu_unhealthy`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _counted(counts: Counts, snapshot: Snapshot) -> Iterator[Sample]:
    """Give all counts of all GPUs, also those that are still 0: an increase needs a beginning."""
    places = _places(snapshot)
    yield Sample(f.WISHES_REFUSED, (), counts.wishes_refused)
    for gpu, me in places.items():
        for fault in Fault:
            yield Sample(f.GPU_FAULTS, (*me, fault), counts.faults[gpu, fault])
        yield Sample(f.GPU_RECOVERIES, me, counts.recoveries[gpu])
        yield Sample(f.INSTANCE_FAULTS, me, counts.instance_faults[gpu])
        yield Sample(f.WARNINGS, me, counts.warnings[gpu])
        yield Sample(f.STRANGERS_FOUND, me, counts.strangers[gpu])
        for signal in _SIGNALS:
            yield Sample(f.SIGNALS, (*me, signal), counts.signals[gpu, signal])

    xids = Counter({(*me, str(code)): 0 for me in places.values() for code in DEFAULT_XIDS})
    for (where, code), count in counts.xids.items():
        xids[(*_place(where, places), str(code))] += count
    yield from (Sample(f.GPU_XIDS, labels, count) for labels, count in xids.items())

    errors = Counter({(*me, kind): 0 for me in places.values() for kind in _KINDS.values()})
    for (where, corrected), count in counts.memory_errors.items():
        errors[(*_place(where, places), _KINDS[corrected])] += count
    yield from (Sample(f.GPU_MEMORY_ERRORS, labels, count) for labels, count in errors.items())


def _places(snapshot: Snapshot) -> Mapping[GpuId, tuple[str, str]]:
    return {gpu: gpu_labels(state.gpu) for gpu, state in snapshot.gpus.items()}


def _place(gpu: GpuId | None, places: Mapping[GpuId, tuple[str, str]]) -> tuple[str, str]:
    """Name a GPU; one that NVML did not tell has no name, and one that is not known no index."""
    return _NOWHERE if gpu is None else places.get(gpu, ("", gpu))
