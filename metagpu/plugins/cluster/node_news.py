"""What happened to the node's GPUs, as Events of the node: pure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from metagpu.core.facts import (
    BackendSuspended,
    GpuCordoned,
    GpuFaulted,
    GpuRecovered,
    GpuUncordoned,
    InstanceFaulted,
    InstanceRecovered,
    RivalMet,
)
from metagpu.core.gpu import GpuId
from metagpu.core.model import ResourceName
from metagpu.core.news import ConfigurationRefused, Event, StrangerFound
from metagpu.core.snapshot import Snapshot
from metagpu.plugins.cluster import pod_news
from metagpu.plugins.cluster.events import News, Subject

KINDS = (
    *(GpuFaulted, GpuRecovered, InstanceFaulted, InstanceRecovered),
    *(GpuCordoned, GpuUncordoned, RivalMet, BackendSuspended, StrangerFound),
    ConfigurationRefused,
)
"""What is told."""


def news_of(
    event: Event,
    snapshot: Snapshot,
    node: Subject,
    server_of: Callable[[ResourceName], str] = lambda _: "another device plugin",
) -> News | None:
    """Say it to who looks after the node; `None` for what is no matter of theirs.

    `server_of` names who serves a resource in our stead.
    """
    match event:
        case ConfigurationRefused(why):
            note = f"{why}; the last good configuration stays"
            return News(node, "ConfigurationRefused", note, "Configure", warning=True)
        case RivalMet(resource, where):
            note = f"{resource} is served by {server_of(resource)} on {where}, not by us"
            return News(node, "RivalPlugin", note, "Serve", warning=True)
        case StrangerFound() if pod_news.news_of(event, snapshot) is None:
            note = f"{pod_news.note_of(event, snapshot)}; its pod has the uid {event.pod_uid}"
            return News(node, pod_news.BYPASS, note, "Look", warning=True)

    about = _about_gpu(event)
    if about is None:
        return None
    known = snapshot.gpus.get(about.gpu)
    note = f"GPU {known.gpu if known else about.gpu}: {about.why}"
    return News(node, about.reason, note, "Judge", warning=about.warning)


class _About(NamedTuple):
    """What happened to one GPU."""

    reason: str
    gpu: GpuId
    why: str
    warning: bool = False


def _about_gpu(event: Event) -> _About | None:
    about: _About | None = None

    match event:
        case GpuFaulted(gpu, reason):
            about = _About("GPUOutOfService", gpu, reason, warning=True)
        case GpuRecovered(gpu, reason):
            about = _About("GPUBackInService", gpu, reason)
        case InstanceFaulted(gpu, device, reason):
            why = f"MIG device {device} alone: {reason}"
            about = _About("MIGDeviceOutOfService", gpu, why, warning=True)
        case InstanceRecovered(gpu, device, reason):
            about = _About("MIGDeviceFaultOver", gpu, f"MIG device {device}: {reason}")
        case GpuCordoned(gpu, reason):
            about = _About("GPUCordoned", gpu, reason)
        case GpuUncordoned(gpu):
            about = _About("GPUUncordoned", gpu, "gives new shares again")
        case BackendSuspended(gpu, reason=reason, reset=True):
            about = _About("GPUResetNeeded", gpu, reason, warning=True)
    return about


def resets(snapshot: Snapshot, node: Subject) -> Sequence[News]:
    """Tell of GPUs that wait for a reset already: MIG mode is turned on as a daemon starts."""
    found = (
        news_of(
            BackendSuspended(gpu, backend, pause.reason, pause.since, reset=True), snapshot, node
        )
        for gpu, state in snapshot.gpus.items()
        for backend, pause in state.suspended.items()
        if pause.reset
    )
    return [news for news in found if news is not None]
