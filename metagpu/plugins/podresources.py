"""Who holds what, as the kubelet tells: its PodResources service, turned into facts.

The kubelet never says that a share was given back; it only stops listing it.
"""

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import anyio
import structlog
from grpclib.client import Channel
from grpclib.exceptions import GRPCError, StreamTerminatedError

from metagpu.core.facts import LeasesObserved, SharesGranted, SharesOffered
from metagpu.core.model import Holder, ShareId
from metagpu.core.registry import Registry
from metagpu.plugins.pb import v1

DEFAULT_SOCKET: Final = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
PERIOD: Final = 10.0
"""Seconds between two looks when nothing was granted."""
SETTLE: Final = 0.5
"""Seconds from a grant to the look that finds its pod: the kubelet lists it once it is admitted.
It also keeps a burst of pods far below the kubelet's limit of 100 questions a second."""
DEADLINE: Final = 5.0

log = structlog.get_logger()


async def follow_leases(
    registry: Registry, socket: Path = DEFAULT_SOCKET, clock: Callable[[], float] = time.time
) -> None:
    """Keep the registry's leases as the kubelet has them, until cancelled.

    Looks at once, after every grant or change of what is on offer, and every `PERIOD` seconds. A
    kubelet that cannot be asked changes nothing: what was known stays.
    """
    told = ""

    with registry.news.subscribe() as news:
        stirred = anyio.Event()

        async def listen() -> None:
            async for fact in news:
                if isinstance(fact, SharesGranted | SharesOffered):
                    stirred.set()

        async with anyio.create_task_group() as group:
            group.start_soon(listen)

            while True:
                stirred = anyio.Event()
                try:
                    holders = await holders_of(socket, registry.snapshot.offers.keys())
                    registry.apply(LeasesObserved(holders, clock()))
                    told = ""
                except (OSError, GRPCError, StreamTerminatedError) as error:
                    if str(error) != told:
                        told = str(error)
                        log.warning("the kubelet does not say who holds what", error=told)

                with anyio.move_on_after(PERIOD):
                    await stirred.wait()
                    await anyio.sleep(SETTLE)


async def holders_of(socket: Path, resources: Collection[str]) -> dict[ShareId, Holder]:
    """Ask the kubelet who holds the shares of these resources.

    Raises:
        OSError: if it cannot be reached.
        GRPCError: if it refuses, as it does above 100 questions a second.
        StreamTerminatedError: if it goes away meanwhile.
    """
    async with Channel(path=str(socket)) as channel:
        stub = v1.PodResourcesListerStub(channel)
        answer = await stub.list(v1.ListPodResourcesRequest(), timeout=DEADLINE)

    return {
        ShareId(device): Holder(pod.namespace, pod.name, container.name)
        for pod in answer.pod_resources
        for container in pod.containers
        for devices in container.devices
        if devices.resource_name in resources
        for device in devices.device_ids
    }
