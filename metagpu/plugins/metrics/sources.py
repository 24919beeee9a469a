"""The sources of the metrics, and the times of monitoring."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import msgspec

from metagpu.core.config.profiles import ConfigStatus
from metagpu.core.contracts.sensors import DetailedSensors, InstanceSensors
from metagpu.core.layout.layout import Layout
from metagpu.core.model.backend_reports import MetricKind
from metagpu.core.model.gpu import GpuId
from metagpu.core.reports.schema.daemon import ClusterReport, DraReport
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.registry import Registry
from metagpu.core.usage.collector import NodeUsage
from metagpu.core.usage.lease_differences import LeaseDifferenceKind
from metagpu.core.usage.report import ReportRules


class ReadSensors(Protocol):
    """Reads one GPU, with its costly sensors or without."""

    async def __call__(self, gpu: GpuId, *, costly: bool) -> DetailedSensors:
        """Return the reading.

        Raises:
            DriverError: the GPU cannot be read.
        """
        ...


ReadInstances: TypeAlias = Callable[[GpuId], Awaitable[Sequence[InstanceSensors]]]
"""Reads the MIG instances of one GPU; a `DriverError` says that they cannot be read."""


class NvmlStatus(msgspec.Struct, frozen=True):
    """The state of NVML: its problem, empty without one, and its overdue calls."""

    problem: str
    overdue: int


class MetricsTiming(msgspec.Struct, frozen=True):
    """Times of monitoring, all in seconds.

    Attributes:
        nvml_timeout: for NVML to answer for all GPUs; a page without the answers has older ones.
        late_loop: the delay of the event loop that makes the daemon unhealthy.
    """

    nvml_timeout: float = 3.0
    late_loop: float = 5.0


class MetricSources(msgspec.Struct, frozen=True):
    """The sources of each page: sensors and `usage` wait, the rest is in memory.

    Attributes:
        kinds: the metrics of the installed backends.
        node: the node's name.
        usage: the usage of the GPUs with their sensors; callers within one second share one
            collection.
        sensors: all sensors of a GPU; `instance_sensors` those of its MIG instances.
        driver_limits: the number of memory limits that the driver enforces.
        lease_differences: containers whose leases differ from processes, cgroups or MIG devices.
        cluster: the report of `Cluster`, `None` where no API server is used.
        claims: the report of the DRA driver, `None` where no pool has it.
        has_node: whether this daemon has the node; one that waits for it serves probes alone.
        problems: what keeps the daemon from being ready for the node, or from an offer.
        ended: why main tasks of the daemon have ended, though the daemon runs, by task.
    """

    node: str
    registry: Registry
    kubelet: KubeletCallStats
    kinds: Sequence[MetricKind]
    rules: ReportRules
    layout: Callable[[], Layout]
    usage: Callable[[], Awaitable[NodeUsage]]
    sensors: ReadSensors
    instance_sensors: ReadInstances
    configuration: Callable[[], ConfigStatus]
    driver: Callable[[], NvmlStatus]
    driver_limits: Callable[[], int]
    lease_differences: Callable[[], Mapping[LeaseDifferenceKind, int]]
    cluster: Callable[[], ClusterReport | None]
    claims: Callable[[], DraReport | None]
    has_node: Callable[[], bool]
    problems: Callable[[], Sequence[str]]
    ended: Callable[[], Mapping[str, str]]
