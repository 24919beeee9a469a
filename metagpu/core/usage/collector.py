"""Collection of usage: processes from NVML, their containers from the host."""

from collections.abc import Collection, Mapping, Sequence
from time import time

import anyio
import msgspec
import structlog

from metagpu.core.contracts.driver import Driver, GpuProcess
from metagpu.core.contracts.host import Container, Host, ProcessDetails, ProcessIdentity
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Holder
from metagpu.core.state.registry import Registry
from metagpu.core.usage.accounting import (
    NO_PROMISED_MEMORY,
    GpuUsage,
    PromisedMemory,
    attribute_processes,
)
from metagpu.core.usage.timing import DEFAULT_TIMING

log = structlog.get_logger()


class NodeUsage(msgspec.Struct):
    """Usage of all GPUs at about one moment.

    Attributes:
        at: the moment, in seconds since the epoch.
        gpus: usage in the order of the GPUs; a GPU that NVML could not read has its holders alone.
        failures: why NVML could not read a GPU.
        utilization: percent of each GPU that each process uses, by pid. A GPU whose driver does not
            report it is not in the mapping.
        process_details: user, command and memory of each process, once they are described.
        warnings: why processes cannot be attributed to containers.
    """

    at: float = 0.0
    gpus: Mapping[GpuId, GpuUsage] = msgspec.field(default_factory=dict)
    failures: dict[GpuId, str] = msgspec.field(default_factory=dict)
    utilization: dict[GpuId, Mapping[int, int]] = msgspec.field(default_factory=dict)
    process_details: Mapping[ProcessIdentity, ProcessDetails] = msgspec.field(default_factory=dict)
    warnings: Sequence[str] = ()


class UsageCollector:
    """The collector of processes and of their containers.

    Attributes:
        promised_memory: memory promised to containers that are older than this daemon.
    """

    def __init__(self, driver: Driver, host: Host, registry: Registry) -> None:
        self.promised_memory: PromisedMemory = NO_PROMISED_MEMORY
        self._driver = driver
        self._host = host
        self._registry = registry
        self._listed: dict[GpuId, Mapping[int, int]] = {}
        self._unknown: dict[GpuId, set[Container]] = {}

    async def collect_gpu(self, gpu: GpuId) -> GpuUsage:
        """Return the present usage of one GPU.

        Raises:
            DriverError: NVML cannot read the processes.
        """
        return await self._attribute(gpu, await self._driver.processes(gpu))

    async def _attribute(self, gpu: GpuId, processes: Sequence[GpuProcess]) -> GpuUsage:
        pids = {process.pid for process in processes}
        listed = self._listed_since(gpu, pids)
        identities = {
            pid: identity
            for pid, identity in (await self._host.identify(pids)).items()
            if identity.started <= listed[pid]
        }
        containers = {identity.container for identity in identities.values() if identity.container}
        names = dict(await self._host.holders(containers))
        snapshot = self._registry.snapshot
        for container in containers - names.keys():
            if pod := snapshot.pods.by_uid.get(container.pod_uid):
                names[container] = Holder(pod.namespace, pod.name, "")
        self._log_unknown(gpu, names)
        return attribute_processes(
            snapshot.gpus[gpu], processes, identities, names, self.promised_memory
        )

    async def collect(self) -> NodeUsage:
        """Collect the usage of all GPUs concurrently."""
        gpus = tuple(self._registry.snapshot.gpus)
        usage = NodeUsage(at=time(), warnings=await self._host.hints())
        gpu_usages = {gpu: GpuUsage(gpu) for gpu in gpus}

        async def collect_one(gpu: GpuId) -> None:
            try:
                activity = await self._driver.activity(gpu)
                gpu_usages[gpu] = await self._attribute(gpu, activity.processes)
            except DriverError as error:
                usage.failures[gpu] = str(error)
                if (state := self._registry.snapshot.gpus.get(gpu)) is not None:
                    gpu_usages[gpu] = attribute_processes(state, (), {}, {})
            else:
                if activity.utilization is not None:
                    usage.utilization[gpu] = activity.utilization

        async with anyio.create_task_group() as group:
            for gpu in gpus:
                group.start_soon(collect_one, gpu)

        usage.gpus = gpu_usages
        return usage

    async def describe(self, usage: NodeUsage) -> NodeUsage:
        """Add the details of the processes, which cost more than all other files of /proc."""
        if not usage.process_details:
            usage.process_details = await self._host.describe(_identities(usage.gpus.values()))
        return usage

    def _listed_since(self, gpu: GpuId, pids: Collection[int]) -> Mapping[int, int]:
        """Return since when the driver lists each pid, in the host's ticks.

        The driver may list a pid after its process has ended. A process that is younger than the
        listing is another one, which has got the pid since.
        """
        now, before = self._host.clock(), self._listed.get(gpu, {})
        self._listed[gpu] = {pid: before.get(pid, now) for pid in pids}
        return self._listed[gpu]

    def _log_unknown(self, gpu: GpuId, names: Mapping[Container, Holder]) -> None:
        """Log each container once that is charged to its pod, its own name being unknown."""
        unknown = {container for container, holder in names.items() if not holder.container}
        for container in unknown - self._unknown.get(gpu, set()):
            log.warning(
                "container name unknown",
                container=container.id[:12],
                pod=f"{names[container].namespace}/{names[container].pod}",
                gpu=str(gpu),
                effect="its pod is judged as one: all processes against all shares of the GPU",
            )
        self._unknown[gpu] = unknown


class CachedUsage:
    """A cache of the last collection, shared by any number of callers.

    A caller waits for the collection that is running, or gets the last one: the node's work does
    not grow with the number of callers.

    Args:
        age: seconds for which a collection is returned again.
    """

    def __init__(self, collector: UsageCollector, age: float = DEFAULT_TIMING.cache_age) -> None:
        self._collector = collector
        self._age = age
        self._usage: NodeUsage | None = None
        self._until = 0.0
        self._collecting = anyio.Lock()

    async def latest(self) -> NodeUsage:
        """Return a collection that is not older than `age`."""
        async with self._collecting:
            if self._usage is None or anyio.current_time() >= self._until:
                self._usage = await self._collector.collect()
                self._until = anyio.current_time() + self._age
            return self._usage


def _identities(usages: Collection[GpuUsage]) -> Collection[ProcessIdentity]:
    attributed = (
        process for gpu in usages for usage in gpu.containers for process in usage.processes
    )
    unauthorized = (it.process for gpu in usages for it in gpu.unauthorized)
    return {it.identity for it in (*attributed, *unauthorized) if it.identity}
