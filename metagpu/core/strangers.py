"""Tells of pods that use a GPU of which they hold no share: a bypass of the kubelet.

A container that sets `NVIDIA_VISIBLE_DEVICES` by itself, or is privileged, sees GPUs that nobody
gave it. Nothing is done about it here; it is told, once for each container and GPU.
"""

import os
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from time import time
from typing import Final

import anyio
import structlog

from metagpu.core.census import Census
from metagpu.core.errors import DriverError
from metagpu.core.gpu import MIB, GpuId
from metagpu.core.host import Container, Host
from metagpu.core.news import StrangerFound
from metagpu.core.registry import Registry
from metagpu.core.usage import Stranger

PERIOD: Final = 10.0
"""Seconds between two looks at all GPUs."""
PATIENCE: Final = 15.0
"""Seconds in which the kubelet has surely told of a pod that it has just admitted."""

log = structlog.get_logger()

Place = tuple[GpuId, Container]


def in_pods(strangers: Iterable[Stranger]) -> Mapping[Place, Stranger]:
    """Give the strangers that run in pods, the first of each container on each GPU.

    What the host runs beside Kubernetes is its own matter.
    """
    found: dict[Place, Stranger] = {}
    for stranger in strangers:
        if stranger.process.who is not None and stranger.process.who.container is not None:
            found.setdefault((stranger.gpu, stranger.process.who.container), stranger)
    return found


class StrangerWatch:
    """Looks at all GPUs, now and then."""

    def __init__(
        self,
        census: Census,
        host: Host,
        registry: Registry,
        *,
        period: float = PERIOD,
        patience: float = PATIENCE,
    ) -> None:
        self._census = census
        self._host = host
        self._registry = registry
        self._period = period
        self._patience = patience

    async def run(self) -> None:
        """Look until cancelled."""
        since: dict[Place, float] = {}
        told: set[Place] = set()
        ours = await self._host.identify([os.getpid()])
        own = {who.container for who in ours.values()}  # MPS servers that we start run in it

        while True:
            await anyio.sleep(self._period)
            seen, unasked = await self._look()
            now = anyio.current_time()

            # Who was on a GPU that cannot be asked now is not taken for gone: no news again.
            since = {
                place: since.get(place, now)
                for place in {*since, *seen}
                if place in seen or place[0] in unasked
            }
            told &= since.keys()
            for place in seen.keys() - told:
                if place[1] not in own and now - since[place] >= self._patience:
                    told.add(place)
                    self._tell(seen[place], place[1])

    async def _look(self) -> tuple[Mapping[Place, Stranger], AbstractSet[GpuId]]:
        """Find the strangers in pods, and the GPUs that could not be asked."""
        seen: dict[Place, Stranger] = {}
        unasked: set[GpuId] = set()

        async def ask(gpu: GpuId) -> None:
            try:
                account = await self._census.account(gpu)
            except DriverError:
                unasked.add(gpu)  # health tells
            else:
                seen.update(in_pods(account.strangers))

        async with anyio.create_task_group() as group:
            for gpu, state in self._registry.snapshot.gpus.items():
                if state.elsewhere is None:
                    unasked.add(gpu)  # the kubelet has told of nobody yet: all would be strangers
                else:
                    group.start_soon(ask, gpu)
        return seen, unasked

    def _tell(self, stranger: Stranger, container: Container) -> None:
        log.warning(
            "a pod uses a GPU of which it holds no share",
            gpu=str(self._registry.snapshot.gpus[stranger.gpu].gpu),
            container=container.id[:12],
            pod_uid=container.pod_uid,
            pid=stranger.process.pid,
            used_mib=(stranger.process.memory or 0) // MIB,
            why=stranger.why,
        )
        self._registry.news.publish(
            StrangerFound(
                stranger.gpu,
                stranger.holder,
                container.id,
                container.pod_uid,
                stranger.process.pid,
                stranger.process.memory,
                at=time(),
            )
        )
