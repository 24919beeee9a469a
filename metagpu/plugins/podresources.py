"""Who holds what, as the kubelet tells: its PodResources service, turned into facts.

The kubelet never says that a share was given back; it only stops listing it.
"""

import time
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import Final

import anyio
import structlog
from grpclib.client import Channel
from grpclib.exceptions import GRPCError, StreamTerminatedError

from metagpu.core.errors import why
from metagpu.core.facts import LeasesObserved, SharesGranted, SharesOffered
from metagpu.core.model import Holder, ResourceName, ShareId
from metagpu.core.news import Event, PodEnded
from metagpu.core.registry import Registry
from metagpu.plugins.pb import v1
from metagpu.plugins.settling import Settling

DEFAULT_SOCKET: Final = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
PERIOD: Final = 10.0
"""Seconds between two looks when nothing was granted."""
SOUGHT_PERIOD: Final = 2.0
"""The same while a lease keeps others from shares: somebody may be waiting for its end."""
SETTLE: Final = 0.5
"""Seconds from a grant to the look that finds its pod: the kubelet lists it once it is admitted.
It also keeps a burst of pods far below the kubelet's limit of 100 questions a second."""
DEADLINE: Final = 5.0

log = structlog.get_logger()


async def follow_leases(
    registry: Registry,
    socket: Path = DEFAULT_SOCKET,
    clock: Callable[[], float] = time.time,
    looked: anyio.Event | None = None,
    *,
    directory: Path | None = None,
    node: str = "",
    settle: float | None = None,
) -> None:
    """Keep the registry's leases as the kubelet has them, until cancelled.

    Looks at once, after every grant, change of what is on offer or end of a pod that holds shares
    (where the API server tells it), and every `PERIOD` seconds, more often while shares are
    withheld. A kubelet that cannot be asked changes nothing: what was known
    stays. So it does under a kubelet that does not know its pods yet (`plugins/settling`), and when
    an answer is not understood.

    Args:
        registry: told of what is seen.
        socket: where the kubelet answers.
        clock: gives the time of day.
        looked: is set after the first look, whatever came of it.
        directory: the kubelet's folder for device plugins, where its checkpoint is.
        node: this node's name, this machine's if it is not said.
        settle: seconds, `SETTLE` unless they are given.
    """
    settle = SETTLE if settle is None else settle
    told = ""
    pause = 0.0
    settling = Settling(socket, directory, (node or gethostname()).lower(), clock)

    with registry.news.subscribe(SharesGranted, SharesOffered, PodEnded) as news:
        stirred = anyio.Event()

        async def listen() -> None:
            async for event in news:
                if _concerns_us(event, registry):
                    stirred.set()

        async with anyio.create_task_group() as group:
            group.start_soon(listen)

            while True:
                stirred = anyio.Event()
                try:
                    seen, pods = await observed(socket, clock)
                    registry.apply(await settling.judged(seen, pods, registry.snapshot))
                    told = ""
                except Exception as error:  # noqa: BLE001 - whatever it says, leases stay
                    settling.broken()
                    # A hang has no text.
                    if (reason := why(error)) != told:
                        told = reason
                        _tell_failure(error, socket, told)

                if looked is not None:
                    looked.set()

                # A grant whose pod is not told yet is being admitted: look again soon, then later.
                longest = SOUGHT_PERIOD if _sought(registry) else PERIOD
                pause = min(max(pause * 2, settle), longest) if _untold(registry) else longest
                with anyio.move_on_after(pause) as waiting:
                    await stirred.wait()
                if not waiting.cancelled_caught:
                    await anyio.sleep(settle)
                    pause = 0.0


def _concerns_us(event: Event, registry: Registry) -> bool:
    """Tell whether news may change who holds what: most pods that end held nothing of ours."""
    if not isinstance(event, PodEnded):
        return True
    pod = event.pod
    return any(
        lease.holder is not None
        and (lease.holder.namespace, lease.holder.pod) == (pod.namespace, pod.name)
        for state in registry.snapshot.gpus.values()
        for lease in state.leases.values()
    )


def _untold(registry: Registry) -> bool:
    """Tell whether some lease has no holder yet."""
    return any(
        lease.holder is None
        for state in registry.snapshot.gpus.values()
        for lease in state.leases.values()
    )


def _sought(registry: Registry) -> bool:
    """Tell whether some lease is in the way of other shares."""
    return any(state.withheld for state in registry.snapshot.gpus.values())


def _tell_failure(error: Exception, socket: Path, why: str) -> None:
    """Log why the kubelet does not say it; with a traceback if nobody has foreseen that."""
    # betterproto2 asserts that an answer has a message.
    known = isinstance(error, OSError | GRPCError | StreamTerminatedError | AssertionError)
    log.warning(
        "the kubelet does not say who holds what; leases stay as they are",
        socket=str(socket),
        why=why,
        exc_info=None if known else error,
    )


async def observed(
    socket: Path, clock: Callable[[], float] = time.time
) -> tuple[LeasesObserved, frozenset[str]]:
    """Ask the kubelet who holds what, of every resource: an id says which GPU it is about.

    Gives the names of all pods too: those that hold nothing are told as well.

    Raises:
        OSError: if it cannot be reached.
        GRPCError: if it refuses, as it does above 100 questions a second.
        StreamTerminatedError: if it goes away meanwhile.
    """
    asked = clock()
    async with Channel(path=str(socket)) as channel:
        stub = v1.PodResourcesListerStub(channel)
        answer = await stub.list(v1.ListPodResourcesRequest(), timeout=DEADLINE)

    holders: dict[ShareId, Holder] = {}
    resources: dict[ShareId, ResourceName] = {}
    for pod in answer.pod_resources:
        for container in pod.containers:
            holder = Holder(pod.namespace, pod.name, container.name)
            for devices in container.devices:
                for device in map(ShareId, devices.device_ids):
                    holders[device] = holder
                    resources[device] = ResourceName(devices.resource_name)
    pods = frozenset(pod.name for pod in answer.pod_resources)
    return LeasesObserved(holders, asked, resources=resources), pods
