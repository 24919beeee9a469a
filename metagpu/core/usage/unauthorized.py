"""Detection of pods that use a GPU without a share: a bypass of the kubelet.

A container that sets `NVIDIA_VISIBLE_DEVICES` by itself, or is privileged, sees GPUs that the
kubelet did not allocate to it. The use is reported once for each container and GPU; the daemon does
nothing about it.
"""

import os
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from time import time

import anyio
import structlog

from metagpu.core.contracts.host import Container, HostProcesses
from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.state.events import UnauthorizedUseFound
from metagpu.core.state.registry import Registry
from metagpu.core.usage.accounting import UnauthorizedProcess
from metagpu.core.usage.collector import UsageCollector
from metagpu.core.usage.timing import DEFAULT_TIMING, UsageTiming

log = structlog.get_logger()

ContainerOnGpu = tuple[GpuId, Container]


def by_container(
    processes: Iterable[UnauthorizedProcess],
) -> Mapping[ContainerOnGpu, UnauthorizedProcess]:
    """Return the first unauthorized process of each container on each GPU.

    A process outside of pods is left out: programs of the host beside Kubernetes are allowed.
    """
    found: dict[ContainerOnGpu, UnauthorizedProcess] = {}
    for unauthorized in processes:
        identity = unauthorized.process.identity
        if identity is not None and identity.container is not None:
            found.setdefault((unauthorized.gpu, identity.container), unauthorized)
    return found


class UnauthorizedUseWatch:
    """A watch on all GPUs for processes of containers that hold no share.

    Attributes:
        found: the use that was reported and lasts, by GPU and container.
    """

    def __init__(
        self,
        collector: UsageCollector,
        host: HostProcesses,
        registry: Registry,
        timing: UsageTiming = DEFAULT_TIMING,
    ) -> None:
        self.found: dict[ContainerOnGpu, UnauthorizedUseFound] = {}
        self._collector = collector
        self._host = host
        self._registry = registry
        self._timing = timing

    async def run(self) -> None:
        """Check all GPUs periodically, until cancelled."""
        since: dict[ContainerOnGpu, float] = {}
        own_identities = await self._host.identify([os.getpid()])
        # The MPS servers that the daemon starts run in the daemon's own container.
        own = {identity.container for identity in own_identities.values()}

        while True:
            await anyio.sleep(self._timing.unauthorized_period)
            seen, unknown = await self._check()
            now = anyio.current_time()

            # A process on a GPU that NVML cannot read now is not taken for gone: no second report.
            since = {
                place: since.get(place, now)
                for place in {*since, *seen}
                if place in seen or place[0] in unknown
            }
            self.found = {place: use for place, use in self.found.items() if place in since}
            for place in seen.keys() - self.found.keys():
                admitted = now - since[place] >= self._timing.admission_window
                if place[1] not in own and admitted:
                    self.found[place] = self._report_use(seen[place], place[1])

    async def _check(
        self,
    ) -> tuple[Mapping[ContainerOnGpu, UnauthorizedProcess], AbstractSet[GpuId]]:
        """Return the unauthorized processes in pods, and the GPUs that cannot be read."""
        seen: dict[ContainerOnGpu, UnauthorizedProcess] = {}
        unknown: set[GpuId] = set()

        async def ask(gpu: GpuId) -> None:
            try:
                usage = await self._collector.collect_gpu(gpu)
            except DriverError:
                unknown.add(gpu)  # the health watch reports the error
            else:
                seen.update(by_container(usage.unauthorized))

        async with anyio.create_task_group() as group:
            for gpu, state in self._registry.snapshot.gpus.items():
                if state.mig_devices_of_other_plugins is None:
                    unknown.add(gpu)  # the kubelet has not listed its pods yet: no holder is known
                else:
                    group.start_soon(ask, gpu)
        return seen, unknown

    def _report_use(
        self, unauthorized: UnauthorizedProcess, container: Container
    ) -> UnauthorizedUseFound:
        log.warning(
            "unauthorized gpu use",
            gpu=str(self._registry.snapshot.gpus[unauthorized.gpu].gpu),
            container=container.id[:12],
            pod_uid=container.pod_uid,
            pid=unauthorized.process.pid,
            used_mib=(unauthorized.process.memory or 0) // MIB,
            reason=unauthorized.reason,
        )
        use = UnauthorizedUseFound(
            unauthorized.gpu,
            unauthorized.holder,
            container.id,
            container.pod_uid,
            unauthorized.process.pid,
            unauthorized.process.memory,
            at=time(),
        )
        self._registry.events.publish(use)
        return use
