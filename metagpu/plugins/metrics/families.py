"""Metric families: all names, types, help texts and labels.

A family is a name, a type, a help text and labels.

docs/metrics.md has the same list; a test compares the two, and others check the names against
Prometheus' conventions.
"""

from collections.abc import Iterable
from typing import Final

from metagpu.core.model.backend_reports import MetricKind
from metagpu.plugins.metrics.samples import (
    GPU_LABELS,
    FamilyFactory,
    MetricFamily,
    MetricType,
    families_in,
)

CONTAINER: Final = ("namespace", "pod", "container", *GPU_LABELS)


_gauge: Final = FamilyFactory(MetricType.GAUGE)
_gpu_gauge: Final = FamilyFactory(MetricType.GAUGE, GPU_LABELS)
_resource_gauge: Final = FamilyFactory(MetricType.GAUGE, ("resource",))
_container_gauge: Final = FamilyFactory(MetricType.GAUGE, CONTAINER)
_container_counter: Final = FamilyFactory(MetricType.COUNTER, CONTAINER)
_namespace_gauge: Final = FamilyFactory(MetricType.GAUGE, ("namespace",))
_namespace_counter: Final = FamilyFactory(MetricType.COUNTER, ("namespace",))
_counter: Final = FamilyFactory(MetricType.COUNTER)
_resource_counter: Final = FamilyFactory(MetricType.COUNTER, ("resource",))
_gpu_counter: Final = FamilyFactory(MetricType.COUNTER, GPU_LABELS)

# --- GPUs ---------------------------------------------------------------------------------------

GPU_INFO: Final = _gpu_gauge(
    "gpu_info",
    "GPU known to metagpu, with its product, PCI address and pool; always 1.",
    *("product", "pci_bus_id", "pool"),
)
GPU_MEMORY: Final = _gpu_gauge("gpu_memory_bytes", "Total memory of the GPU.")
GPU_MEMORY_RESERVED: Final = _gpu_gauge(
    "gpu_memory_reserved_bytes", "Memory of the GPU that the driver and firmware reserve."
)
GPU_HEALTHY: Final = _gpu_gauge("gpu_healthy", "Whether the GPU is in service, 1 or 0.")
GPU_FAULT: Final = _gpu_gauge(
    "gpu_fault", "Kind of the fault for which the GPU is out of service; always 1.", "fault"
)
GPU_FAULTS: Final = _gpu_counter(
    "gpu_faults_total", "Times that the GPU went out of service, by the kind of fault.", "fault"
)
GPU_RECOVERIES: Final = _gpu_counter(
    "gpu_recoveries_total", "Times that the GPU returned to service."
)
GPU_XIDS: Final = _gpu_counter(
    "gpu_xid_errors_total",
    "XID errors that NVML reported, by number; without a GPU where NVML named none.",
    "xid",
)
GPU_XIDS_BY_SEVERITY: Final = _gpu_counter(
    "gpu_xid_events_total",
    "XID errors that NVML reported, by their severity in metagpu's table.",
    "severity",
)
GPU_MEMORY_ERRORS: Final = _gpu_counter(
    "gpu_memory_errors_total",
    "Memory error events that NVML reported, corrected or uncorrected.",
    "kind",
)
GPU_REPORTS_XIDS: Final = _gpu_gauge(
    "gpu_reports_xids", "Whether NVML delivers the GPU's XIDs to metagpu, 1 or 0."
)
GPU_UNHEALTHY_MIG_DEVICES: Final = _gpu_gauge(
    "gpu_unhealthy_mig_devices",
    "MIG devices of the GPU that are out of service because of their own faults.",
)
MIG_DEVICE_FAULTS: Final = _gpu_counter(
    "gpu_mig_device_faults_total", "Times that a MIG device of the GPU went out of service."
)
GPU_PAUSED: Final = _gpu_gauge(
    "gpu_paused_shares",
    "Shares unavailable for now, for example while the MPS daemon of a MIG instance is down.",
)
GPU_CORDONED: Final = _gpu_gauge(
    "gpu_cordoned",
    "Whether the GPU is cordoned, so that it gives no new shares, 1 or 0: by an operator, or for a "
    "driver upgrade.",
)
GPU_OWNED: Final = _gpu_gauge(
    "gpu_owned",
    "Backend that owns the GPU, while containers hold its shares or its cleanup runs; always 1.",
    "backend",
)
GPU_READY: Final = _gpu_gauge(
    "gpu_backend_ready",
    "Whether the backend can allocate shares of the GPU, 1 or 0: it is not suspended there.",
    "backend",
)
GPU_ORPHANED: Final = _gpu_gauge(
    "gpu_orphaned_leases",
    "Held shares no longer offered as they were granted; the GPU, or a part of it, waits for "
    "their release.",
)
UNREADABLE_GPUS: Final = _gauge(
    "unreadable_gpus",
    "GPUs that NVML counts and metagpu could never read; they have no series of their own.",
)
GPU_FREE: Final = _gpu_gauge(
    "gpu_resource_free_shares",
    "Shares of the resource on the GPU that could be allocated now.",
    "resource",
)
GPU_HELD_BACK: Final = _gpu_gauge(
    "gpu_resource_held_back_shares",
    "Free shares of the resource on the GPU that are held back: no request could take them too.",
    "resource",
)

# --- resources ----------------------------------------------------------------------------------

RESOURCE_CAPACITY: Final = _resource_gauge(
    "resource_capacity_shares", "Shares of the resource on this node."
)
RESOURCE_ALLOCATABLE: Final = _resource_gauge(
    "resource_allocatable_shares",
    "Shares of the resource that the kubelet sees as healthy, held or free.",
)
RESOURCE_HELD: Final = _resource_gauge(
    "resource_held_shares", "Shares of the resource that containers hold."
)
RESOURCE_FREE: Final = _resource_gauge(
    "resource_free_shares", "Shares of the resource that could be allocated now."
)
RESOURCE_HELD_BACK: Final = _resource_gauge(
    "resource_held_back_shares",
    "Free shares of the resource that are held back: no request could take them too.",
)
RESOURCE_LARGEST_REQUEST: Final = _resource_gauge(
    "resource_largest_request_shares", "Shares of the largest request that could be placed now."
)
RESOURCE_REGISTERED: Final = _resource_gauge(
    "resource_registered", "Whether the kubelet reads metagpu's list of the resource, 1 or 0."
)
RESOURCE_OF_OTHER_PLUGIN: Final = _resource_gauge(
    "resource_served_by_other_plugin",
    "Resource that a competing device plugin serves in place of metagpu; always 1.",
)
RESOURCE_REGISTRATION_PROBLEM: Final = _resource_gauge(
    "resource_registration_problem",
    "Resource that the kubelet lacks for 5 s or counts otherwise than listed; always 1.",
)

# --- containers ---------------------------------------------------------------------------------

CONTAINER_SHARES: Final = _container_gauge(
    "container_shares", "Shares of the GPU that the container holds.", "resource"
)
CONTAINER_INFO: Final = _container_gauge(
    "container_info",
    "Guard that keeps the container within its share, and the pool's policy; always 1.",
    *("backend", "guard", "policy"),
)
CONTAINER_SHARE: Final = _container_gauge(
    "container_memory_share_bytes", "Memory of the GPU that the container's shares promise."
)
CONTAINER_LIMIT: Final = _container_gauge(
    "container_memory_limit_bytes",
    "Memory limit of the container on the GPU, where metagpu enforces memory.",
)
CONTAINER_USED: Final = _container_gauge(
    "container_memory_used_bytes",
    "Memory of the GPU that all processes of the container use, 0 without processes.",
)
CONTAINER_UTILIZATION: Final = _container_gauge(
    "container_utilization_ratio",
    "Recent utilization of the GPU by the container, from 0 to 1.",
)
CONTAINER_OVER_SHARE: Final = _container_counter(
    "container_over_share_seconds_total",
    "Time that the container took beyond its shares while others wanted more, in seconds of a "
    "whole GPU.",
)
CONTAINER_PROCESSES: Final = _container_gauge(
    "container_processes", "Processes of the container on the GPU."
)

CONTAINER_MIG: Final = _container_gauge(
    "container_mig_info",
    "MIG device that the container holds, with its GPU instance and profile; always 1.",
    *("mig_uuid", "gpu_instance", "profile"),
)

# --- namespaces ---------------------------------------------------------------------------------

NAMESPACE_SHARES: Final = _namespace_gauge(
    "namespace_shares", "Shares that containers of the namespace hold.", "resource"
)
NAMESPACE_HELD_MEMORY: Final = _namespace_gauge(
    "namespace_memory_held_bytes", "GPU memory that the held shares of the namespace stand for."
)
NAMESPACE_USED_MEMORY: Final = _namespace_gauge(
    "namespace_memory_used_bytes", "GPU memory that containers of the namespace use."
)
NAMESPACE_SHARE_SECONDS: Final = _namespace_counter(
    "namespace_share_seconds_total",
    "Time for which containers of the namespace held shares, times the number of shares.",
    "resource",
)
NAMESPACE_GPU_SECONDS: Final = _namespace_counter(
    "namespace_gpu_seconds_total",
    "Time for which containers of the namespace held parts of GPUs, in seconds of a whole GPU.",
)

# --- usage of a GPU ----------------------------------------------------------------------------

USAGE_TIME: Final = _gauge(
    "usage_timestamp_seconds",
    "Time of the last collection of GPU usage, in seconds since the epoch.",
)
GPU_USAGE_KNOWN: Final = _gpu_gauge(
    "gpu_usage_known",
    "Whether NVML listed the processes on the GPU, 1 or 0; without them its usage is absent.",
)
GPU_MEMORY_USED: Final = _gpu_gauge(
    "gpu_memory_used_bytes", "Memory that all processes on the GPU use."
)
GPU_UTILIZATION: Final = _gpu_gauge(
    "gpu_utilization_ratio", "Recent utilization of the GPU, from 0 to 1."
)
LEASE_DIFFERENCES: Final = _gauge(
    "lease_differences",
    "Containers that use a GPU without a lease, hold leases and do not run, or hold devices "
    "that are gone.",
    "difference",
)
GPU_UNAUTHORIZED: Final = _gpu_gauge(
    "gpu_unauthorized_processes",
    "Processes on the GPU that belong to no container with a share of the GPU.",
)
GPU_UNAUTHORIZED_MEMORY: Final = _gpu_gauge(
    "gpu_unauthorized_memory_bytes", "Memory that unauthorized processes use on the GPU."
)
UNAUTHORIZED_CONTAINERS: Final = _gpu_counter(
    "gpu_unauthorized_containers_total",
    "Containers found to use the GPU without a share of it.",
)
WARNINGS: Final = _gpu_counter(
    "enforcement_warnings_total",
    "Times that a container was warned of its memory on the GPU.",
)
SIGNALS: Final = _gpu_counter(
    "enforcement_signals_total",
    "Signals sent to processes because of their container's memory on the GPU.",
    "signal",
)

DRIVER_LIMITS: Final = _gauge(
    "enforcement_driver_limits", "Container memory limits that the driver itself enforces."
)
ANNOTATIONS_REJECTED: Final = _counter(
    "enforcement_annotations_rejected_total",
    "Pod annotations about GPU memory that were rejected.",
)

# --- sensors and error counters of a GPU, as NVML reports them ----------------------------------

TEMPERATURE: Final = _gpu_gauge("gpu_temperature_celsius", "Temperature of the GPU.")
MEMORY_TEMPERATURE: Final = _gpu_gauge(
    "gpu_memory_temperature_celsius", "Temperature of the GPU's memory."
)
POWER: Final = _gpu_gauge("gpu_power_watts", "Power that the GPU draws.")
POWER_LIMIT: Final = _gpu_gauge("gpu_power_limit_watts", "Power limit in force.")
ENERGY: Final = _gpu_counter(
    "gpu_energy_joules_total", "Energy that the GPU has used since the driver was loaded."
)
CLOCK: Final = _gpu_gauge(
    "gpu_clock_hertz", "Clock of the multiprocessors (sm) and of the memory.", "clock"
)
THROTTLED: Final = _gpu_gauge(
    "gpu_clocks_throttled", "Whether this reason lowers the GPU's clocks now, 1 or 0.", "reason"
)
ECC_ERRORS: Final = _gpu_counter(
    "gpu_ecc_errors_total",
    "Memory errors since the driver was loaded, corrected or uncorrected.",
    "kind",
)
NVLINK_ERRORS: Final = _gpu_counter(
    "gpu_nvlink_errors_total",
    "Errors of all NVLinks of the GPU since the driver was loaded, by kind.",
    "kind",
)
PCIE_REPLAYS: Final = _gpu_counter(
    "gpu_pcie_replays_total", "PCIe packets of the GPU that were sent again."
)

# --- the kubelet --------------------------------------------------------------------------------

CALLS: Final = _counter(
    "kubelet_calls_total",
    "Calls of the kubelet, by outcome.",
    *("resource", "call", "outcome"),
)
REFUSALS: Final = _counter(
    "kubelet_refusals_total",
    "Calls for pods that metagpu refused, by reason.",
    *("resource", "reason"),
)
CLAIM_REFUSALS: Final = _counter(
    "kubelet_claim_refusals_total",
    "Calls for ResourceClaims that metagpu refused, by reason.",
    "reason",
)
PREPARED_CLAIMS: Final = _gauge("prepared_claims", "ResourceClaims that are prepared on this node.")
REGISTRATIONS: Final = _resource_counter(
    "kubelet_registrations_total", "Registrations of the resource that the kubelet accepted."
)
LISTS: Final = _resource_counter("kubelet_lists_total", "Lists of shares sent to the kubelet.")
RESTARTS: Final = _counter(
    "kubelet_restarts_total", "Restarts of the kubelet that metagpu observed."
)
DURATION: Final = FamilyFactory(MetricType.HISTOGRAM)(
    "kubelet_call_duration_seconds",
    "Time from a call of the kubelet to metagpu's answer, without the transport over the socket.",
    "call",
)

# --- the daemon ---------------------------------------------------------------------------------

BUILD: Final = _gauge(
    "build_info", "Versions of metagpu and of Python; always 1.", "version", "python_version"
)
NVML_UP: Final = _gauge("nvml_up", "Whether NVML can be used, 1 or 0.")
NVML_INFO: Final = _gauge(
    "nvml_info",
    "Versions of the driver and of the CUDA that the driver supports; always 1.",
    "driver_version",
    "cuda_version",
)
NVML_OVERDUE: Final = _gauge(
    "nvml_overdue_calls", "Calls of NVML that timed out and have not returned yet."
)
CONFIG_INFO: Final = _gauge(
    "config_info",
    "Configuration in force: its file, format, chosen profiles and hash; always 1.",
    *("file", "format", "profile", "hash"),
)
CONFIG_GENERATION: Final = _gauge(
    "config_generation", "Number of the configuration in force, from 1 at the daemon's start."
)
CONFIG_RELOAD_SUCCESSFUL: Final = _gauge(
    "config_last_reload_successful",
    "Whether the last reload of the configuration succeeded, 1 or 0.",
)
CONFIG_ACCEPTED_AT: Final = _gauge(
    "config_last_reload_success_timestamp_seconds",
    "Time of the last successful reload, in seconds since the epoch.",
)
CONFIG_REJECTED_AT: Final = _gauge(
    "config_last_reload_failure_timestamp_seconds",
    "Time of the last failed reload, in seconds since the epoch, 0 without one.",
)
CONFIG_RELOADS: Final = _counter(
    "config_reloads_total", "Reloads of the configuration, by outcome.", "outcome"
)
CONFIG_IGNORED_SETTINGS: Final = _gauge(
    "config_ignored_settings",
    "Settings of other projects' files that have no effect, each a warning in the log.",
)
API_CONNECTED: Final = _gauge(
    "api_server_connected", "Whether the API server answers, 1 or 0; absent where none is used."
)
API_FEATURE: Final = _gauge(
    "api_server_feature_healthy",
    "Whether the last run of a feature of the API server succeeded, 1 or 0.",
    "feature",
)
NODE_AMOUNTS_DIFFERING: Final = _gauge(
    "api_server_node_amounts_differing",
    "Resources of which the Node shows another allocatable amount than metagpu, for a minute.",
)
UPGRADE_HOLDING_PODS: Final = _gauge(
    "driver_upgrade_holding_pods",
    "Pods that hold shares of GPUs while the GPU operator upgrades the driver; 0 at other times.",
)
EVENTS_DROPPED: Final = _counter(
    "api_server_events_dropped_total",
    "Kubernetes Events of the node or its pods that were dropped because there were too many.",
    "regarding",
)
BUS_EVENTS_LOST: Final = _counter(
    "event_bus_lost_events_total", "Internal events that a slow subscriber of the event bus lost."
)
LAG: Final = _gauge("event_loop_lag_seconds", "Delay of the event loop at its last measurement.")
LONG_TURNS: Final = _counter(
    "event_loop_long_turns_total",
    "Turns of the event loop that lasted more than 50 ms; a call of the kubelet waits for each.",
)

FAMILIES: Final = families_in(vars())
"""All families, in this order; those of backends and `process_*` follow them."""


def backend_family(kind: MetricKind) -> MetricFamily:
    """Return the metric family of a backend's metric."""
    return _gpu_gauge(kind.name, kind.meaning, *kind.labels)


def backend_families(kinds: Iterable[MetricKind]) -> tuple[MetricFamily, ...]:
    """Return the metric families of all backends, each once."""
    return tuple(dict.fromkeys(map(backend_family, kinds)))
