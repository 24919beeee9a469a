"""What happened to a pod's GPU memory, and to its devices, as Events of that pod: pure."""

from typing import Final

from metagpu.core.gpu import MIB, GpuId
from metagpu.core.lost import explained
from metagpu.core.news import (
    DevicesLost,
    Event,
    MemoryExceeded,
    ProcessSignalled,
    StrangerFound,
    WishRefused,
)
from metagpu.core.snapshot import Snapshot
from metagpu.plugins.cluster.events import News, Subject

KINDS = (MemoryExceeded, ProcessSignalled, StrangerFound, WishRefused, DevicesLost)
"""What is told."""
BYPASS: Final = "GPUUsedWithoutShare"


def news_of(event: Event, snapshot: Snapshot) -> News | None:
    """Say it to the pod's owner; `None` where nobody knows what the pod is called.

    News that differ in figures alone are one Event and its count: a container that is restarted
    again and again does the same again and again.
    """
    match event:
        case MemoryExceeded():
            then = "its processes are ended if it stays so" if event.will_end else "it goes on"
            return News(
                _pod(event.holder.namespace, event.holder.pod, event.pod_uid),
                "GPUMemoryExceeded",
                f"container {event.holder.container} uses more memory of {_gpu(event, snapshot)} "
                f"than it may: {_figures(event)}; {then}",
                "Warn",
                warning=True,
                key=f"{event.holder.container} {event.gpu}",
            )
        case ProcessSignalled():
            return News(
                _pod(event.holder.namespace, event.holder.pod, event.pod_uid),
                "GPUMemoryProcessEnded",
                f"process {event.pid} (the node's number) of container {event.holder.container} "
                f"was sent {event.signal}: it had {event.memory // MIB} MiB of "
                f"{_gpu(event, snapshot)}, and the container more than it may: {_figures(event)}",
                "Kill",
                warning=True,
                key=f"{event.holder.container} {event.gpu} {event.signal}",
            )
        case StrangerFound():
            return _stranger(event, snapshot)
        case WishRefused():
            pod = event.pod
            subject = _pod(pod.namespace, pod.name, pod.uid)
            return News(subject, "GPUMemoryWishRefused", event.why, "Configure", warning=True)
        case DevicesLost():
            holder = event.holder
            return News(
                _pod(holder.namespace, holder.pod, event.pod_uid),
                "GPUDeviceLost",
                explained(holder.container, event.devices, event.mend),
                "Look",
                warning=True,
                key=holder.container,
            )
    return None


def _stranger(event: StrangerFound, snapshot: Snapshot) -> News | None:
    known, holder = snapshot.pods.by_uid.get(event.pod_uid), event.holder
    if known is not None:
        subject = _pod(known.namespace, known.name, known.uid)
    elif holder is not None:
        subject = _pod(holder.namespace, holder.pod, event.pod_uid)
    else:
        return None

    return News(
        subject,
        BYPASS,
        note_of(event, snapshot),
        "Look",
        warning=True,
        key=f"{event.container_id} {event.gpu}",
    )


def note_of(event: StrangerFound, snapshot: Snapshot) -> str:
    """Say what a container does with a GPU of which it holds no share."""
    name = event.holder.container if event.holder else event.container_id[:12]
    uses = "some memory" if event.memory is None else f"{event.memory // MIB} MiB"
    return (
        f"container {name} uses {uses} of {_gpu(event, snapshot)} and holds no share of it: it was "
        "not given this GPU by Kubernetes"
    )


def _pod(namespace: str, name: str, uid: str | None) -> Subject:
    return Subject("Pod", name, uid or "", namespace)


def _gpu(event: MemoryExceeded | ProcessSignalled | StrangerFound, snapshot: Snapshot) -> str:
    gpu: GpuId = event.gpu
    known = snapshot.gpus.get(gpu)
    return f"GPU {known.gpu if known else gpu}"


def _figures(event: MemoryExceeded | ProcessSignalled) -> str:
    return (
        f"its share is {event.share // MIB} MiB, its limit {event.limit // MIB} MiB, and all its "
        f"processes together use {event.used // MIB} MiB"
    )
