"""Metric families of the kubelet's calls and of the daemon itself."""

from typing import Final

from metagpu.plugins.metrics.samples import FamilyFactory, MetricType, families_in

_gauge: Final = FamilyFactory(MetricType.GAUGE)
_counter: Final = FamilyFactory(MetricType.COUNTER)
_resource_counter: Final = FamilyFactory(MetricType.COUNTER, ("resource",))

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

FAMILIES: Final = families_in(vars())
