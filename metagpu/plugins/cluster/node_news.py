"""What is told of the node in Events: pure, from what is heard and known."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from metagpu.core.facts import (
    BackendSuspended,
    ConfigurationRefused,
    Event,
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
from metagpu.core.snapshot import Snapshot

KINDS: Final = (
    *(GpuFaulted, GpuRecovered, InstanceFaulted, InstanceRecovered),
    *(GpuCordoned, GpuUncordoned, RivalMet, BackendSuspended, ConfigurationRefused),
)


@dataclass(frozen=True, slots=True)
class Tidings:
    """What an Event says: as `News`, without whom it is about."""

    reason: str
    note: str
    action: str
    warning: bool = False


def tidings_of(
    event: Event, snapshot: Snapshot, server_of: Callable[[ResourceName], str]
) -> Tidings | None:
    """Say of the node what happened, `None` where that is no matter of the node's.

    `server_of` names the other device plugin that serves a resource.
    """
    told = None
    match event:
        case GpuFaulted(gpu, reason):
            told = _of_gpu("GPUOutOfService", gpu, reason, snapshot, warning=True)
        case GpuRecovered(gpu, reason):
            told = _of_gpu("GPUBackInService", gpu, reason, snapshot)
        case InstanceFaulted(gpu, device, reason):
            why = f"MIG device {device} alone: {reason}"
            told = _of_gpu("MIGDeviceOutOfService", gpu, why, snapshot, warning=True)
        case InstanceRecovered(gpu, device, reason):
            told = _of_gpu("MIGDeviceFaultOver", gpu, f"MIG device {device}: {reason}", snapshot)
        case BackendSuspended(gpu, reason=reason, reset=True):
            told = _of_gpu("GPUResetNeeded", gpu, reason, snapshot, warning=True)
        case GpuCordoned(gpu, reason):
            told = _of_gpu("GPUCordoned", gpu, reason, snapshot)
        case GpuUncordoned(gpu):
            told = _of_gpu("GPUUncordoned", gpu, "gives new shares again", snapshot)
        case RivalMet(resource, where):
            note = f"{resource} is served by {server_of(resource)} on {where}, not by us"
            told = Tidings("RivalPlugin", note, "Serve", warning=True)
        case ConfigurationRefused(why):
            note = f"{why}; the last good configuration stays"
            told = Tidings("ConfigurationRefused", note, "Configure", warning=True)
    return told


def resets_needed(snapshot: Snapshot) -> Iterator[Tidings]:
    """Tell of GPUs that wait for a reset already: MIG mode is turned on as a daemon starts."""
    for gpu, state in snapshot.gpus.items():
        for pause in state.suspended.values():
            if pause.reset:
                yield _of_gpu("GPUResetNeeded", gpu, pause.reason, snapshot, warning=True)


def _of_gpu(
    reason: str, gpu: GpuId, why: str, snapshot: Snapshot, *, warning: bool = False
) -> Tidings:
    known = snapshot.gpus.get(gpu)
    name = str(known.gpu) if known else gpu
    return Tidings(reason, f"GPU {name}: {why}", "Judge", warning=warning)
