"""Collection of usage: processes from NVML, their containers from the host."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import time
from typing import NamedTuple

import anyio
import msgspec
import structlog
from msgspec.structs import replace

from metagpu.core.contracts.driver import GpuProcess, UsageDriver
from metagpu.core.contracts.host import Container, HostProcesses, ProcessDetails, ProcessIdentity
from metagpu.core.contracts.sensors import GpuSensors
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Holder
from metagpu.core.runtime.tasks import start_together
from metagpu.core.state.registry import Registry
from metagpu.core.usage.accounting import (
    NO_PROMISED_MEMORY,
    GpuUsage,
    PromisedMemory,
    attribute_processes,
    shares_of_claims,
)
from metagpu.core.usage.timing import DEFAULT_TIMING, UsageTiming
from metagpu.core.usage.utilization import SensorTurns, UtilizationReader

log = structlog.get_logger()


class NodeUsage(msgspec.Struct):
    """Usage of all GPUs at about one moment.

    Attributes:
        at: the moment, in seconds since the epoch.
        gpus: usage in the order of the GPUs; a GPU that NVML could not read has its holders alone.
        failures: why NVML could not read a GPU.
        utilization: percent of each GPU that each process uses, by pid. A GPU whose driver does not
            report it is not in the mapping.
        sensors: of each GPU that answers; `None` where nobody has asked for them.
        process_details: user, command and memory of each process, once they are described.
        warnings: why processes cannot be attributed to containers, once they are described.
    """

    at: float = 0.0
    gpus: Mapping[GpuId, GpuUsage] = msgspec.field(default_factory=dict)
    failures: dict[GpuId, str] = msgspec.field(default_factory=dict)
    utilization: dict[GpuId, Mapping[int, int]] = msgspec.field(default_factory=dict)
    sensors: dict[GpuId, GpuSensors] | None = None
    process_details: Mapping[ProcessIdentity, ProcessDetails] = msgspec.field(default_factory=dict)
    warnings: Sequence[str] = ()


class _Listed(NamedTuple):
    """A pid that the driver lists: since when, and the pod of its first process."""

    since: int
    pod: str | None = None

    def has(self, process: ProcessIdentity) -> bool:
        """Return whether the pid is charged to this process.

        The driver may list a pid after its process has ended. A process younger than the listing
        is another one that has got the pid since, and uses nothing that is known of; but a pod
        that lets its own next process have the pid gains nothing.
        """
        pod = process.container and process.container.pod_uid
        return process.started <= self.since or (pod is not None and pod == self.pod)


class _Listing(NamedTuple):
    """The processes on a GPU, and what is known of each pid."""

    processes: Sequence[GpuProcess]
    pids: dict[int, _Listed]

    def own(self, identities: Mapping[int, ProcessIdentity]) -> Mapping[int, ProcessIdentity]:
        """Return the identities of the listed processes, and note the pods of new ones."""
        own = {
            pid: identities[pid]
            for pid, listed in self.pids.items()
            if pid in identities and listed.has(identities[pid])
        }
        for pid, process in own.items():
            if process.container and self.pids[pid].pod is None:
                self.pids[pid] = self.pids[pid]._replace(pod=process.container.pod_uid)
        return own


class UsageCollector:
    """The collector of processes and of their containers.

    Attributes:
        promised_memory: memory promised to containers that are older than this daemon.
    """

    def __init__(
        self,
        driver: UsageDriver,
        host: HostProcesses,
        registry: Registry,
        timing: UsageTiming = DEFAULT_TIMING,
    ) -> None:
        self.promised_memory: PromisedMemory = NO_PROMISED_MEMORY
        self._driver = driver
        self._host = host
        self._registry = registry
        self._timing = timing
        self._listed: dict[GpuId, dict[int, _Listed]] = {}
        self._unknown: dict[GpuId, set[Container]] = {}
        self._checked: dict[GpuId, tuple[float, GpuUsage]] = {}
        self._utilization = UtilizationReader(driver, registry, timing)
        self._sensor_turns = SensorTurns(timing.costly_age)

    def set_promised_memory(self, promised: PromisedMemory) -> None:
        """Take in the memory promised to containers that are older than this daemon."""
        self.promised_memory = promised

    async def collect_gpu(self, gpu: GpuId) -> GpuUsage:
        """Return the present usage of one GPU.

        Raises:
            DriverError: NVML cannot read the processes.
        """
        listing = self._list(gpu, await self._driver.processes(gpu))
        return (await self._attribute({gpu: listing}))[gpu]

    async def free_memory(self, gpu: GpuId) -> int | None:
        """Return the free bytes of a GPU, `None` if unknown; errors as of `collect_gpu`."""
        return await self._driver.free_memory(gpu)

    async def collect(self, *, sensors: bool = False) -> NodeUsage:
        """Collect the usage of all GPUs, and their sensors where they are wanted.

        The GPUs are read in turn, and one that does not answer soon delays no other. With sensors,
        which are for scrapes, the processes of a GPU are those of its last listing, if it is
        recent, and what costs much is read of one GPU: the others have their last value.
        """
        gpus = tuple(self._registry.snapshot.gpus)
        usage = NodeUsage(at=time(), sensors={} if sensors else None)
        since = anyio.current_time() - (self._timing.recent if sensors else 0)
        recent = {gpu: found for gpu, (at, found) in self._checked.items() if at > since}
        gpu_usages = {gpu: recent.get(gpu) or GpuUsage(gpu) for gpu in gpus}
        listings: dict[GpuId, _Listing] = {}
        read_gpus: list[GpuId] = []
        late = False
        self._utilization.retain(gpus)
        self._sensor_turns.retain(gpus)
        due = self._sensor_turns.due(gpus, anyio.current_time()) if sensors else frozenset()

        async def read(gpu: GpuId) -> None:
            began, costly = anyio.current_time(), gpu in due
            try:
                activity = await self._driver.activity(
                    gpu, processes=gpu not in recent, sensors=sensors, costly=costly
                )
            except DriverError as error:
                usage.failures[gpu] = str(error)
                if (state := self._registry.snapshot.gpus.get(gpu)) is not None:
                    gpu_usages[gpu] = attribute_processes(state, (), {}, {})
                await self._read_sensors(gpu, usage)
                return
            if gpu not in recent:
                listings[gpu] = self._list(gpu, activity.processes)
            if usage.sensors is not None:
                usage.sensors |= self._sensor_turns.complete(
                    gpu, activity.sensors, began, was_read=costly
                )
            read_gpus.append(gpu)
            if late:
                await attribute()
                await measure((gpu,))

        async def attribute() -> None:
            """Attribute what is listed by now.

            A process may end while another GPU is awaited.
            """
            found = dict(listings)
            listings.clear()
            if found:
                gpu_usages.update(await self._attribute(found))

        async def measure(gpus: Collection[GpuId]) -> None:
            usage.utilization |= await self._measure(gpus, max_age=None if sensors else 0)

        async with anyio.create_task_group() as group:
            await start_together(group, (partial(read, gpu) for gpu in gpus), self._timing.turn)
            late = True
            await attribute()
            await measure(tuple(read_gpus))

        usage.gpus = gpu_usages
        return usage

    async def with_utilization(self, usage: NodeUsage, max_age: float) -> NodeUsage:
        """Return the usage with utilization that is younger than `max_age` seconds."""
        gpus = [gpu for gpu in usage.gpus if gpu not in usage.failures]
        return replace(usage, utilization=await self._measure(gpus, max_age))

    async def _measure(
        self, gpus: Collection[GpuId], max_age: float | None
    ) -> dict[GpuId, Mapping[int, int]]:
        """Read how busy the processes keep these GPUs, `None` for turns."""
        pids = {gpu: self._listed.get(gpu, {}).keys() for gpu in gpus}
        return await self._utilization.read(pids, max_age)

    async def _read_sensors(self, gpu: GpuId, usage: NodeUsage) -> None:
        """Read the sensors alone, if they are wanted: a GPU without a list may have some.

        A GPU that may be lost has no earlier value.
        """
        self._sensor_turns.forget(gpu)
        if usage.sensors is not None:
            with suppress(DriverError):
                usage.sensors[gpu] = await self._driver.sensors(gpu)

    async def _attribute(self, listings: Mapping[GpuId, _Listing]) -> Mapping[GpuId, GpuUsage]:
        """Attribute the processes of some GPUs: all are identified at once."""
        pids = {pid for listing in listings.values() for pid in listing.pids}
        identities = await self._host.identify(pids)
        containers = {
            identity.container
            for listing in listings.values()
            for identity in listing.own(identities).values()
            if identity.container
        }
        names = dict(await self._host.holders(containers))
        snapshot = self._registry.snapshot
        for container in containers - names.keys():
            if pod := snapshot.pods.by_uid.get(container.pod_uid):
                names[container] = Holder(pod.namespace, pod.name, "")
        found = {}

        for gpu, listing in listings.items():
            own = listing.own(identities)
            its = {
                identity.container: names[identity.container]
                for identity in own.values()
                if identity.container in names
            }
            self._log_unknown(gpu, its)
            found[gpu] = attribute_processes(
                *(snapshot.gpus[gpu], listing.processes, own, its, self.promised_memory),
                of_claims=shares_of_claims(snapshot, its),
            )
            self._checked[gpu] = anyio.current_time(), found[gpu]
        return found

    async def describe(self, usage: NodeUsage) -> NodeUsage:
        """Add warnings, and details of the processes.

        Details cost more than all other files of /proc.
        """
        if not usage.process_details:
            usage.warnings = await self._host.hints()
            usage.process_details = await self._host.describe(_identities(usage.gpus.values()))
        return usage

    def _list(self, gpu: GpuId, processes: Sequence[GpuProcess]) -> _Listing:
        """Note since when the driver lists each pid, in the host's ticks."""
        new, before = _Listed(self._host.clock()), self._listed.get(gpu, {})
        self._listed[gpu] = {process.pid: before.get(process.pid, new) for process in processes}
        return _Listing(processes, self._listed[gpu])

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

    async def latest(self, *, sensors: bool = False) -> NodeUsage:
        """Return a collection not older than `age`, with sensors if wanted.

        Scrapes and others share the processes. Sensors and utilization are read when they are first
        wanted: a scrape, which has sensors, takes the utilization of most GPUs from earlier ones.
        """
        async with self._collecting:
            known = self._usage
            is_old = anyio.current_time() >= self._until
            if known is None or is_old or (sensors and known.sensors is None):
                known = await self._collector.collect(sensors=sensors)
                self._until = anyio.current_time() + self._age
            elif known.sensors is not None and not sensors:
                known = await self._collector.with_utilization(known, self._age)
            self._usage = known
            return known


def _identities(usages: Collection[GpuUsage]) -> Collection[ProcessIdentity]:
    attributed = (
        process for gpu in usages for usage in gpu.containers for process in usage.processes
    )
    unauthorized = (process.process for gpu in usages for process in gpu.unauthorized)
    return {usage.identity for usage in (*attributed, *unauthorized) if usage.identity}
