"""Metrics of the daemon itself."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from metagpu import __version__
from metagpu.core.config.profiles import ConfigStatus
from metagpu.core.contracts.sensors import DetailedSensors
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.request_errors import (
    DeviceOccupied,
    FractionSplit,
    ProvisioningLasts,
    RequestError,
)
from metagpu.core.model.shares import Fault, ResourceClaimRef, ResourceName
from metagpu.core.model.snapshot import Versions
from metagpu.core.reports.schema.daemon import ClusterReport, DraReport
from metagpu.core.state.call_stats import BUCKET_BOUNDS, CallOutcome, KubeletCall, KubeletCallStats
from metagpu.core.state.events import (
    AnnotationRejected,
    MemoryErrorReported,
    ResourceClaimRefused,
    XidReported,
)
from metagpu.core.state.facts import (
    CompetingPluginFound,
    DriverRead,
    GpusFound,
    InstanceFaulted,
    SharesOffered,
)
from metagpu.core.state.registry import Registry
from metagpu.core.usage.collector import NodeUsage
from metagpu.plugins.metrics import families as f
from metagpu.plugins.metrics.daemon import EventCounters, daemon_samples
from metagpu.plugins.metrics.samples import HistogramValue, MetricType
from metagpu.plugins.metrics.sources import MetricSources, NvmlStatus
from tests.core.usage.test_report import RULES
from tests.plugins.metrics.rig import valued
from tests.rigs.build import METAGPU, gpu, layout_of
from tests.rigs.reported import complete

A = gpu(0)
ON_A, NOWHERE = ("0", A.id), ("", "")
GOOD = ConfigStatus(
    *("metagpu.yaml", (), (), "0a1b2c3d4e5f", 0),
    is_current=True,
    accepted=1,
    accepted_at=5.0,
    rejected=0,
    rejected_at=0.0,
)


QUIET_CLUSTER = {
    "connected": True,
    "nodeDifferences": {},
    "features": {},
    "eventsDropped": 0,
    "podEventsDropped": 0,
}


async def find_no_usage() -> NodeUsage:
    """Return the usage of no container."""
    return NodeUsage()


async def find_no_instances(_: GpuId) -> tuple[()]:
    """Return no MIG instance."""
    return ()


async def find_no_sensors(gpu: GpuId, *, costly: bool) -> DetailedSensors:  # noqa: ARG001
    """Return no reading."""
    return DetailedSensors()


def sources(**changes: Any) -> MetricSources:  # noqa: ANN401 - of any source
    """Return the sources of a node of one GPU on which nothing has happened."""
    registry = Registry()
    registry.apply(GpusFound((A,), at=0))
    registry.apply(layout_of(A).offer_fact)
    record = KubeletCallStats()
    record.of_resource(METAGPU)
    quiet = MetricSources(
        node="gpu-1",
        registry=registry,
        kubelet=record,
        kinds=(),
        rules=RULES,
        layout=lambda: layout_of(A),
        has_node=lambda: True,
        problems=tuple,
        usage=find_no_usage,
        sensors=find_no_sensors,
        instance_sensors=find_no_instances,
        configuration=lambda: GOOD,
        driver=lambda: NvmlStatus("", 0),
        driver_limits=lambda: 2,
        lease_differences=dict,
        cluster=lambda: None,
        claims=lambda: None,
        ended=dict,
    )
    return replace(quiet, **changes)


def measured(
    metric_sources: MetricSources | None = None, counts: EventCounters | None = None
) -> Mapping[tuple[str, ...], float]:
    """Collect the metrics of these sources."""
    return valued(daemon_samples(metric_sources or sources(), counts or EventCounters(), 0.25, 3))


def test_the_dra_driver_is_measured_like_a_resource() -> None:
    """The driver's registration, its claims, its calls and slices; none without a pool of it."""
    report = complete({"driver": "gpu.metagpu.io", "claims": 3}, DraReport)
    slices = {"problem": "slices are forbidden", "dropped": ""}
    cluster = complete({**QUIET_CLUSTER, "resourceSlices": slices}, ClusterReport)
    metric_sources = sources(claims=lambda: report, cluster=lambda: cluster)
    metric_sources.kubelet.prepares.record(CallOutcome.REFUSED, 0.002)
    values = measured(metric_sources)

    assert values["metagpu_resource_registered", "gpu.metagpu.io"] == 0
    assert values["metagpu_prepared_claims",] == 3
    call = "metagpu_kubelet_calls_total", "gpu.metagpu.io", "NodePrepareResources"
    assert [values[*call, outcome] for outcome in CallOutcome] == [0, 1, 0, 0]
    durations = [
        s for s in daemon_samples(metric_sources, EventCounters(), 0, 0) if s.family is f.DURATION
    ]
    assert [duration.labels for duration in durations] == [("NodePrepareResources",)]
    assert values["metagpu_api_server_feature_healthy", "resource-slices"] == 0

    slices["dropped"] = slices["problem"]  # an earlier Kubernetes: no fault
    cluster = complete({**QUIET_CLUSTER, "resourceSlices": slices}, ClusterReport)
    assert measured(metric_sources)["metagpu_api_server_feature_healthy", "resource-slices"] == 1
    assert ("metagpu_prepared_claims",) not in measured()


def test_every_counter_begins_at_zero() -> None:
    """A counter exists from the start, so its first increase is visible."""
    samples = daemon_samples(sources(), EventCounters(), 0.0, 0)
    there = {sample.family for sample in samples if sample.family.type is MetricType.COUNTER}
    absent = {family for family in f.FAMILIES if family.type is MetricType.COUNTER} - there

    assert absent == {
        f.MIG_DEVICE_FAULTS,  # where a GPU is in MIG mode
        # By reason: from the first one on; calls that were refused begin at zero.
        *(f.CLAIM_REFUSALS, f.REFUSALS),
        f.EVENTS_DROPPED,  # where no API server is used
        f.GPU_XIDS,  # by number: from the first one on
        *(f.ENERGY, f.ECC_ERRORS, f.NVLINK_ERRORS, f.PCIE_REPLAYS),  # where sensors are read
        f.CONTAINER_OVER_SHARE,  # where a pool asks for it
        *(f.NAMESPACE_SHARE_SECONDS, f.NAMESPACE_GPU_SECONDS),  # from the first lease on
    } & {family for family in f.FAMILIES if family.type is MetricType.COUNTER}
    values = measured()
    assert values["metagpu_gpu_xid_events_total", *ON_A, "fatal"] == 0
    assert values["metagpu_gpu_faults_total", *ON_A, Fault.DRIVER] == 0
    assert values["metagpu_enforcement_signals_total", *ON_A, "SIGKILL"] == 0
    assert values["metagpu_kubelet_calls_total", METAGPU, "Allocate", "answered"] == 0
    calls = [value[2:] for value in values if value[0] == "metagpu_kubelet_calls_total"]
    assert calls == [("Allocate", name) for name in ("answered", "refused", "failed")]
    assert not any(name[0] == "metagpu_gpu_mig_device_faults_total" for name in values)


def test_version_and_loop() -> None:
    """The page has the version, and the delay and the long turns of the event loop."""
    values = measured()

    assert [name[1] for name in values if name[0] == "metagpu_build_info"] == [__version__]
    assert values["metagpu_event_loop_lag_seconds",] == 0.25
    assert values["metagpu_event_loop_long_turns_total",] == 3


def test_nvml() -> None:
    """The page has NVML's availability, versions and unanswered calls."""
    metric_sources = sources(driver=lambda: NvmlStatus("no driver", 2))
    metric_sources.registry.apply(DriverRead(Versions("580.65.06", (13, 0))))
    values = measured(metric_sources)

    assert values["metagpu_nvml_up",] == 0
    assert values["metagpu_nvml_overdue_calls",] == 2
    assert values["metagpu_nvml_info", "580.65.06", "13.0"] == 1
    assert measured()["metagpu_nvml_info", "", ""] == 1


def test_configuration() -> None:
    """The page has the configuration's format, profile and reload outcomes."""
    bad = replace(
        GOOD,
        formats=("HAMi",),
        profiles=("a", "b"),
        is_current=False,
        rejected=3,
        rejected_at=9.0,
        ignored_settings=2,
    )
    values = measured(sources(configuration=lambda: bad))

    assert values["metagpu_config_info", "metagpu.yaml", "HAMi", "a, b", "0a1b2c3d4e5f"] == 1
    assert values["metagpu_config_last_reload_successful",] == 0
    assert values["metagpu_config_last_reload_success_timestamp_seconds",] == 5
    assert values["metagpu_config_last_reload_failure_timestamp_seconds",] == 9
    assert values["metagpu_config_reloads_total", "accepted"] == 1
    assert values["metagpu_config_reloads_total", "rejected"] == 3
    assert values["metagpu_config_ignored_settings",] == 2
    assert measured()["metagpu_config_info", "metagpu.yaml", "default", "", "0a1b2c3d4e5f"] == 1
    assert values["metagpu_config_generation",] == 1


def test_what_was_done_about_memory() -> None:
    """The page counts the driver's limits and the rejected annotations."""
    counts = EventCounters()
    counts.count(AnnotationRejected(KnownPod("uid", "team", "alice"), "too much", at=1))
    values = measured(counts=counts)

    assert values["metagpu_enforcement_driver_limits",] == 2
    assert values["metagpu_enforcement_annotations_rejected_total",] == 1


def test_refused_claims_are_counted_by_reason() -> None:
    """A reason has a series from the first refusal on."""
    counts, name = EventCounters(), "metagpu_kubelet_claim_refusals_total"
    for cause in (DeviceOccupied, ProvisioningLasts):
        counts.count(ResourceClaimRefused(ResourceClaimRef("team", "half", "u"), cause))
    values = measured(counts=counts)

    assert values[name, "device_occupied"] == 1
    assert values[name, "provisioning_lasts"] == 1
    assert not any(name in pair for pair in measured())


def test_api_server() -> None:
    """Without an API server there are no series; else connection, features and dropped Events."""
    report = {
        "connected": True,
        "nodeDifferences": {"x/y": "the Node shows 0 allocatable, and metagpu lists 4"},
        "eventsDropped": 4,
        "podEventsDropped": 5,
        "features": {"labels": "", "taint": "forbidden"},
    }
    values = measured(sources(cluster=lambda: complete(report, ClusterReport)))

    assert values["metagpu_api_server_connected",] == 1
    assert values["metagpu_api_server_feature_healthy", "labels"] == 1
    assert values["metagpu_api_server_feature_healthy", "taint"] == 0
    assert values["metagpu_api_server_events_dropped_total", "node"] == 4
    assert values["metagpu_api_server_events_dropped_total", "pod"] == 5
    assert not any("api_server" in name[0] for name in measured())


@pytest.mark.parametrize(
    ("upgrade", "value"),
    [
        ({"driverUpgrade": {"pods": [{"pod": "a"}, {"pod": "b"}]}}, 2),
        ({"driverUpgrade": None}, 0),
        ({}, None),
    ],
)
def test_a_driver_upgrade_counts_the_pods_in_its_way(
    upgrade: Mapping[str, object], value: int | None
) -> None:
    """The pods that hold the driver are counted where upgrades are followed."""
    values = measured(
        sources(cluster=lambda: complete({**QUIET_CLUSTER, **upgrade}, ClusterReport))
    )
    assert values.get(("metagpu_driver_upgrade_holding_pods",)) == value


def test_calls_of_the_kubelet() -> None:
    """Calls are counted by outcome, refusals by reason, durations of all resources together."""
    metric_sources = sources()
    other = ResourceName("example.com/other")
    metric_sources.kubelet.of_resource(other).calls[KubeletCall.ALLOCATE].record(
        CallOutcome.ANSWERED, 0.2
    )
    record = metric_sources.kubelet.of_resource(METAGPU)
    record.calls[KubeletCall.ALLOCATE].record(CallOutcome.ANSWERED, 0.0002)
    record.record_failure(KubeletCall.ALLOCATE, 1.5, FractionSplit("r", 1, "c", "f"))
    record.listed, record.registrations, record.lists, metric_sources.kubelet.restarts = (
        True,
        2,
        7,
        1,
    )
    values = measured(metric_sources)

    assert values["metagpu_kubelet_calls_total", METAGPU, "Allocate", "answered"] == 1
    assert values["metagpu_kubelet_calls_total", METAGPU, "Allocate", "refused"] == 1
    assert values["metagpu_kubelet_refusals_total", METAGPU, "fraction_split"] == 1
    assert values["metagpu_kubelet_calls_total", other, "Allocate", "answered"] == 1
    assert values["metagpu_resource_registered", METAGPU] == 1
    assert values["metagpu_kubelet_registrations_total", METAGPU] == 2
    assert values["metagpu_kubelet_lists_total", METAGPU] == 7
    assert values["metagpu_kubelet_restarts_total",] == 1

    [spread] = [  # the other calls, which were never made, have no histogram
        sample.value
        for sample in daemon_samples(metric_sources, EventCounters(), 0.0, 0)
        if sample.family is f.DURATION
    ]
    assert isinstance(spread, HistogramValue)
    assert (sum(spread.counts), spread.bounds) == (3, BUCKET_BOUNDS)
    assert spread.total == pytest.approx(1.7002)


def test_calls_that_end_early_or_prefer_shares_have_no_zeros() -> None:
    """A preference always has an answer: what else may happen has a series once it has."""
    metric_sources = sources()
    preferred = metric_sources.kubelet.of_resource(METAGPU).calls[KubeletCall.PREFERRED]
    preferred.record(CallOutcome.ANSWERED, 0.2)
    call = "metagpu_kubelet_calls_total", METAGPU, "GetPreferredAllocation"
    assert {name: n for name, n in measured(metric_sources).items() if name[:3] == call} == {
        (*call, "answered"): 1
    }

    preferred.record(CallOutcome.ABANDONED, 0.2)
    assert measured(metric_sources)[*call, "abandoned"] == 1


def test_counters_of_mig_mode_and_of_other_gpus() -> None:
    """MIG devices have faults, other GPUs limits; a count stays when the mode changes."""
    metric_sources, counts = sources(), EventCounters()
    faults = "metagpu_gpu_mig_device_faults_total", *ON_A
    signals = "metagpu_enforcement_signals_total", *ON_A
    counts.signals[A.id, "SIGTERM"] += 1
    metric_sources.registry.apply(GpusFound((replace(A, mig_enabled=True),), at=1))
    values = measured(metric_sources, counts)
    assert values[faults] == 0
    assert values[*signals, "SIGTERM"] == 1
    assert (*signals, "SIGKILL") not in values

    counts.count(InstanceFaulted(A.id, "MIG-x", "XID 94", at=2))
    metric_sources.registry.apply(GpusFound((A,), at=3))
    values = measured(metric_sources, counts)
    assert values[faults] == 1
    assert values[*signals, "SIGKILL"] == 0


def test_a_resource_that_is_on_offer_no_more_keeps_its_counts() -> None:
    """Counters only rise; only offered resources have a registration."""
    metric_sources = sources()
    metric_sources.kubelet.of_resource(METAGPU).registrations = 2
    metric_sources.registry.apply(SharesOffered((), ()))
    values = measured(metric_sources)

    assert values["metagpu_kubelet_registrations_total", METAGPU] == 2
    assert ("metagpu_resource_registered", METAGPU) not in values


def test_errors_of_the_hardware() -> None:
    """XIDs are counted by number; a GPU that is not known yet has its own series, by uuid.

    It may become known: what is counted for no GPU at all would go down then.
    """
    counts = EventCounters()
    for gpu_id, code in ((A.id, 79), (A.id, 9999), (None, 79), (GpuId("GPU-gone"), 79)):
        counts.count(XidReported(gpu_id, code, at=1))
    counts.count(MemoryErrorReported(A.id, corrected=False, at=1))
    counts.count(MemoryErrorReported(None, corrected=True, at=1))
    values = measured(counts=counts)

    xids = {name[1:]: n for name, n in values.items() if name[0] == "metagpu_gpu_xid_errors_total"}
    assert {name: n for name, n in xids.items() if n} == {
        (*ON_A, "79"): 1,
        (*ON_A, "9999"): 1,
        (*NOWHERE, "79"): 1,
        ("", "GPU-gone", "79"): 1,
    }
    severities = {n[1:]: v for n, v in values.items() if n[0] == "metagpu_gpu_xid_events_total"}
    assert {name: n for name, n in severities.items() if n} == {
        (*ON_A, "fatal"): 1,
        (*ON_A, "notice"): 1,
        (*NOWHERE, "fatal"): 1,
        ("", "GPU-gone", "fatal"): 1,
    }
    assert severities[*ON_A, "application"] == 0
    assert values["metagpu_gpu_memory_errors_total", *ON_A, "uncorrected"] == 1
    assert values["metagpu_gpu_memory_errors_total", *ON_A, "corrected"] == 0
    assert values["metagpu_gpu_memory_errors_total", *NOWHERE, "corrected"] == 1


def test_lost_events_are_counted() -> None:
    """Events that a subscriber of the bus lost are counted."""
    metric_sources = sources()
    with metric_sources.registry.events.subscribe(depth=1):
        for name in ("a", "b", "c"):
            metric_sources.registry.apply(CompetingPluginFound(ResourceName(name), "there"))

    assert measured(metric_sources)["metagpu_event_bus_lost_events_total",] == 2


def test_every_kind_of_refusal_has_a_name() -> None:
    """A reason is the name of its error class in snake case."""
    names = [kind.reason for kind in RequestError.__subclasses__()]

    assert {"unknown_share", "gpu_unhealthy", "provisioning_failed", "shares_overlap"} <= set(names)
    assert len(set(names)) == len(names)
