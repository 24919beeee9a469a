"""Every metric there is: its name, its kind, what it means, and by what its series are told apart.

docs/metrics.md has the same table; a test holds the two together, and others hold the names to
Prometheus' conventions.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from metagpu.core.figures import FigureKind
from metagpu.plugins.metrics.samples import Family, Kind

GPU: Final = ("gpu", "uuid")
CONTAINER: Final = ("namespace", "pod", "container", *GPU)


class _Rows(NamedTuple):
    """Makes metrics of one kind, whose series are told apart by these labels first."""

    kind: Kind
    first: tuple[str, ...] = ()

    def __call__(self, name: str, meaning: str, *labels: str) -> Family:
        return Family(f"metagpu_{name}", self.kind, meaning, (*self.first, *labels))


_gauge: Final = _Rows(Kind.GAUGE)
_gpu_gauge: Final = _Rows(Kind.GAUGE, GPU)
_resource_gauge: Final = _Rows(Kind.GAUGE, ("resource",))
_container_gauge: Final = _Rows(Kind.GAUGE, CONTAINER)
_counter: Final = _Rows(Kind.COUNTER)
_gpu_counter: Final = _Rows(Kind.COUNTER, GPU)
_resource_counter: Final = _Rows(Kind.COUNTER, ("resource",))

# --- GPUs ---------------------------------------------------------------------------------------

GPU_INFO: Final = _gpu_gauge(
    "gpu_info",
    "A GPU that is known: its product, its PCI address, and the pool that it is in; always 1.",
    *("product", "pci_bus_id", "pool"),
)
GPU_MEMORY: Final = _gpu_gauge("gpu_memory_bytes", "Memory that the GPU has.")
GPU_RESERVED: Final = _gpu_gauge(
    "gpu_reserved_memory_bytes", "Memory that the driver and firmware keep for themselves."
)
GPU_HEALTHY: Final = _gpu_gauge("gpu_healthy", "Whether the GPU is in service, 1 or 0.")
GPU_FAULT: Final = _gpu_gauge(
    "gpu_fault", "Whether the GPU is out of service for a fault of this kind, 1 or 0.", "fault"
)
GPU_FAULTS: Final = _gpu_counter(
    "gpu_faults_total", "How often the GPU went out of service, by the kind of fault.", "fault"
)
GPU_RECOVERIES: Final = _gpu_counter(
    "gpu_recoveries_total", "How often the GPU came back into service."
)
GPU_XIDS: Final = _gpu_counter(
    "gpu_xid_errors_total",
    "XID errors that NVML told, by number; without a GPU where NVML did not say which.",
    "xid",
)
GPU_MEMORY_ERRORS: Final = _gpu_counter(
    "gpu_memory_errors_total",
    "Events of memory errors that NVML told, corrected or uncorrected.",
    "kind",
)
GPU_BROKEN: Final = _gpu_gauge(
    "gpu_broken_instances", "MIG devices of the GPU that are out of service, and it is not."
)
INSTANCE_FAULTS: Final = _gpu_counter(
    "gpu_instance_faults_total", "How often a MIG device of the GPU went out of service."
)
GPU_PAUSED: Final = _gpu_gauge(
    "gpu_paused_shares",
    "Shares that are given to nobody for now, as where MPS of a MIG instance is down.",
)
GPU_CORDONED: Final = _gpu_gauge(
    "gpu_cordoned", "Whether an operator lets no new shares of the GPU be given, 1 or 0."
)
GPU_OWNED: Final = _gpu_gauge(
    "gpu_owned",
    "Whether the backend has the GPU, 1 or 0: its shares are held, or it cleans up after them.",
    "backend",
)
GPU_READY: Final = _gpu_gauge(
    "gpu_backend_ready",
    "Whether the backend can give shares of the GPU, 1 or 0: it is not suspended there.",
    "backend",
)
GPU_STRAY: Final = _gpu_gauge(
    "gpu_stray_shares",
    "Held shares that are not on offer as they were granted; the GPU waits for their end.",
)
GPU_CAPACITY: Final = _gpu_gauge(
    "gpu_resource_capacity_shares", "Shares of the resource that are cut of the GPU.", "resource"
)
GPU_HELD: Final = _gpu_gauge(
    "gpu_resource_held_shares", "Shares of the resource that containers hold.", "resource"
)
GPU_FREE: Final = _gpu_gauge(
    "gpu_resource_free_shares", "Shares of the resource that could be given now.", "resource"
)

# --- resources ----------------------------------------------------------------------------------

RESOURCE_CAPACITY: Final = _resource_gauge(
    "resource_capacity_shares", "Shares of the resource that this node has."
)
RESOURCE_ALLOCATABLE: Final = _resource_gauge(
    "resource_allocatable_shares",
    "Shares that are listed to the kubelet as healthy, held ones too.",
)
RESOURCE_HELD: Final = _resource_gauge(
    "resource_held_shares", "Shares of the resource that containers hold."
)
RESOURCE_FREE: Final = _resource_gauge(
    "resource_free_shares", "Shares of the resource that could be given now."
)
RESOURCE_REGISTERED: Final = _resource_gauge(
    "resource_registered", "Whether the kubelet holds our list of the resource, 1 or 0."
)
RESOURCE_RIVALLED: Final = _resource_gauge(
    "resource_rivalled",
    "Whether another device plugin serves the resource, so that we do not, 1 or 0.",
)

# --- containers ---------------------------------------------------------------------------------

CONTAINER_SHARES: Final = _container_gauge(
    "container_shares", "Shares of the GPU that the container holds.", "resource"
)
CONTAINER_INFO: Final = _container_gauge(
    "container_info",
    "What keeps the container within its share of the GPU, and what its pool wants done; always 1.",
    *("backend", "guard", "policy"),
)
CONTAINER_SHARE: Final = _container_gauge(
    "container_memory_share_bytes", "Memory of the GPU that the container's shares stand for."
)
CONTAINER_LIMIT: Final = _container_gauge(
    "container_memory_limit_bytes",
    "Memory of the GPU above which the container is warned or ended; where memory is enforced.",
)
CONTAINER_USED: Final = _container_gauge(
    "container_memory_used_bytes",
    "Memory of the GPU that all processes of the container have, 0 while it has none.",
)
CONTAINER_EXCESS: Final = _container_gauge(
    "container_memory_excess_bytes",
    "Memory that the container has above its limit now, 0 while it keeps to it.",
)
CONTAINER_BUSY: Final = _container_gauge(
    "container_busy_ratio",
    "How much of the GPU's processors the container kept busy of late, from 0 to 1.",
)
CONTAINER_PROCESSES: Final = _container_gauge(
    "container_processes", "Processes of the container that are on the GPU."
)

# --- who is on a GPU ----------------------------------------------------------------------------

USAGE_TIME: Final = _gauge(
    "usage_timestamp_seconds", "When the GPUs were last asked who is on them."
)
GPU_KNOWN: Final = _gpu_gauge(
    "gpu_usage_known", "Whether NVML said who is on the GPU, 1 or 0; if not, its usage is absent."
)
GPU_USED: Final = _gpu_gauge(
    "gpu_memory_used_bytes", "Memory that all processes on the GPU have together."
)
GPU_BUSY: Final = _gpu_gauge(
    "gpu_busy_ratio", "How much of the GPU's processors was busy of late, from 0 to 1."
)
GPU_STRANGERS: Final = _gpu_gauge(
    "gpu_stranger_processes", "Processes on the GPU that belong to no container with a share."
)
GPU_STRANGERS_MEMORY: Final = _gpu_gauge(
    "gpu_stranger_memory_bytes", "Memory that those processes have."
)
STRANGERS_FOUND: Final = _gpu_counter(
    "gpu_strangers_found_total",
    "Containers that were found to use the GPU without holding a share of it.",
)
WARNINGS: Final = _gpu_counter(
    "enforcement_warnings_total",
    "How often a container was found to have more memory of the GPU than it may.",
)
SIGNALS: Final = _gpu_counter(
    "enforcement_signals_total",
    "Signals sent to processes whose container had too much memory of the GPU.",
    "signal",
)

DRIVER_LIMITS: Final = _gauge(
    "enforcement_driver_limits", "Limits of containers' memory that the driver itself keeps."
)
WISHES_REFUSED: Final = _counter(
    "enforcement_wishes_refused_total",
    "Annotations by which pods wished something about their memory that they do not get.",
)

# --- the kubelet --------------------------------------------------------------------------------

CALLS: Final = _counter(
    "kubelet_calls_total",
    "Calls of the kubelet, by what became of them.",
    *("resource", "call", "outcome"),
)
REFUSALS: Final = _counter(
    "kubelet_refusals_total",
    "Calls that were refused to a pod, by the kind of reason.",
    *("resource", "reason"),
)
REGISTRATIONS: Final = _resource_counter(
    "kubelet_registrations_total", "How often the kubelet accepted the resource."
)
LISTS: Final = _resource_counter(
    "kubelet_lists_total", "Lists of shares that were sent to the kubelet."
)
RESTARTS: Final = _counter(
    "kubelet_restarts_total", "How often a new kubelet took another's place."
)
DURATION: Final = _Rows(Kind.HISTOGRAM)(
    "kubelet_call_duration_seconds",
    "Time from a call of the kubelet to our answer, without its way over the socket.",
    *("resource", "call"),
)

# --- the daemon ---------------------------------------------------------------------------------

BUILD: Final = _gauge(
    "build_info", "The version of metagpu and of Python; always 1.", "version", "python"
)
NVML_UP: Final = _gauge("nvml_up", "Whether NVML can be used, 1 or 0.")
NVML_INFO: Final = _gauge(
    "nvml_info",
    "The driver's version and the CUDA version it supports; always 1.",
    "driver",
    "cuda",
)
NVML_OVERDUE: Final = _gauge(
    "nvml_calls_overdue", "Questions to NVML that were given up and are not answered yet."
)
CONFIG_INFO: Final = _gauge(
    "config_info",
    "The configuration in force: its file, its form, the profiles chosen; always 1.",
    *("file", "form", "profile"),
)
CONFIG_GOOD: Final = _gauge(
    "config_last_reload_successful",
    "Whether the configuration as it was last read is in force, 1 or 0.",
)
CONFIG_TAKEN_AT: Final = _gauge(
    "config_last_reload_success_timestamp_seconds", "When a configuration was last taken."
)
CONFIG_REFUSED_AT: Final = _gauge(
    "config_last_refusal_timestamp_seconds", "When a configuration was last refused, 0 if never."
)
CONFIG_READ: Final = _counter(
    "config_reloads_total", "Configurations that were read, by what became of them.", "outcome"
)
CONFIG_NOTES: Final = _gauge(
    "config_notes", "Settings of foreign files that have no effect here, each a warning in the log."
)
API_CONNECTED: Final = _gauge(
    "api_server_connected", "Whether the API server answers, 1 or 0; absent where none is used."
)
API_USE: Final = _gauge(
    "api_server_use_working",
    "Whether a use of the API server went well when it was last tried, 1 or 0.",
    "use",
)
EVENTS_DROPPED: Final = _counter(
    "api_server_events_dropped_total",
    "Events of the node, or of its pods, that were not told because there were too many.",
    "about",
)
NEWS_LOST: Final = _counter(
    "bus_events_lost_total", "News inside the daemon that a part of it was too slow to hear."
)
LAG: Final = _gauge(
    "event_loop_lag_seconds", "How late the daemon's event loop was when it was last measured."
)

FAMILIES: Final = tuple(it for it in list(vars().values()) if isinstance(it, Family))
"""All of them, in this order; `process_*` and what backends tell come after them."""


def family_of(kind: FigureKind) -> Family:
    """Give the metric of what a backend tells."""
    return _gpu_gauge(kind.name, kind.meaning, *kind.labels)


def families_of(kinds: Iterable[FigureKind]) -> tuple[Family, ...]:
    """Give the metrics of all that backends tell, each once."""
    return tuple(dict.fromkeys(map(family_of, kinds)))
