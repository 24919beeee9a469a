"""Kubernetes Events of pods whose GPU or MIG device leaves service or returns.

By level: what the pods of a snapshot hold and cannot use is compared with the snapshot before. So a
pod in admission gets its Event when the kubelet names it, and a later pod of the GPU none.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec.structs import replace

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import CordonSource, Fault, Holder, Lease, ShareId, holders_of
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.plugins.cluster.event_recorder import EventData, EventReason, ObjectReference

_GPU: Final = "gpu"
_CORDON: Final = "cordon"
_DRIVER: Final = "driver"
_ANOTHER: Final = "The pod must be created again, to get another GPU"
_FAILED: Final = (
    "Programs on it have probably failed, and the pod keeps it: create the pod again to get "
    "another GPU, and if the GPU has to be reset"
)
_ADVICE: Final[Mapping[Fault, str]] = {
    Fault.RECOVERY_ACTION: "The pod must be created again: nobody may use the GPU meanwhile",
    Fault.NO_ANSWER: _ANOTHER,
    Fault.NOT_LISTED: _ANOTHER,
    Fault.DRIVER: (
        "The pod need not be created again: restart its containers once the driver is back"
    ),
}
_UPGRADE: Final = (
    "The pod holds the driver through its GPU, and the upgrade waits for the pod's end, or fails: "
    "delete the pod, or drain the node"
)
_RESTART: Final = (
    "The pod need not be created again; programs that failed must be started again, as by a "
    "restart of their container"
)
_RESET: Final = (
    "If it was reset, the pod's MIG device is gone and the pod must be created again, as an Event "
    "GPUDeviceLost says; otherwise programs that failed must be started again"
)


class HeldPart(msgspec.Struct, frozen=True):
    """Something that a pod holds, and why it is not as it should be.

    Attributes:
        gpu: empty for the driver, which all GPUs have in common.
        about: `gpu` for a GPU out of service, `cordon`, `driver` for a driver upgrade, or the uuid
            of a MIG device.
    """

    namespace: str
    pod: str
    gpu: GpuId
    about: str


class Trouble(msgspec.Struct, frozen=True):
    """The reason of a fault or cordon, and the kind of the fault."""

    reason: str
    fault: Fault | None = None


Troubles = Mapping[HeldPart, Trouble]
_NONE: Final[Troubles] = MappingProxyType({})


def troubles_of(snapshot: Snapshot) -> Troubles:
    """Return what pods hold and cannot use as before; cheap while all is well."""
    states = [
        state
        for state in snapshot.gpus.values()
        if not state.verdict.healthy or state.cordon is not None or state.mig_faults
    ]
    if not states:
        return _NONE
    return {part: trouble for state in states for part, trouble in _troubles_of(state)}


def _troubles_of(state: GpuState) -> Iterator[tuple[HeldPart, Trouble]]:
    for share, lease in state.leases.items():
        for holder in holders_of(lease):
            yield from _troubles_of_holder(state, share, holder)


def _troubles_of_holder(
    state: GpuState, share: ShareId, holder: Holder
) -> Iterator[tuple[HeldPart, Trouble]]:
    if not state.verdict.healthy:
        trouble = Trouble(state.verdict.reason, state.verdict.fault)
        yield _part(holder, state, _GPU), trouble
    for source, pause in state.cordons.items():
        part = _part(holder, state, _CORDON)
        if source is CordonSource.DRIVER_UPGRADE:
            part = replace(part, gpu=GpuId(""), about=_DRIVER)
        yield part, Trouble(pause.reason)
    for provisioned in state.provisioned.values():
        device = provisioned.devices.get(share)
        if device is not None and (fault := state.mig_faults.get(device.device)) is not None:
            yield _part(holder, state, device.device), Trouble(fault.reason)


def _part(holder: Holder, state: GpuState, about: str) -> HeldPart:
    return HeldPart(holder.namespace, holder.pod, state.gpu.id, about)


def gpu_events_between(before: Troubles, after: Troubles, snapshot: Snapshot) -> list[EventData]:
    """Return the Events of pods for what began and what ended, as of a snapshot.

    A fault that replaces another has an Event of its own where the remedy differs.
    """
    begun = [
        _begun(part, trouble, snapshot)
        for part, trouble in after.items()
        if part not in before or _advice(before[part]) != _advice(trouble)
    ]
    ended = [
        _ended(part, snapshot)
        for part in before
        if part not in after and _still_holds(part, snapshot)
    ]
    return begun + ended


def _advice(trouble: Trouble) -> str:
    return _ADVICE.get(trouble.fault, _FAILED) if trouble.fault else _FAILED


def _still_holds(part: HeldPart, snapshot: Snapshot) -> bool:
    """Return whether the pod holds the GPU still, or the very MIG device."""
    if part.about == _DRIVER:
        return False  # what follows depends on the new driver, and the Node's Event says it
    held = {lease.share.id for lease in _leases(part, snapshot)}
    if part.about in (_GPU, _CORDON):
        return bool(held)
    return any(
        share in held and device.device == part.about
        for provisioned in snapshot.gpus[part.gpu].provisioned.values()
        for share, device in provisioned.devices.items()
    )


def _leases(part: HeldPart, snapshot: Snapshot) -> Iterator[Lease]:
    """Yield the leases of the GPU that the pod holds."""
    pod = part.namespace, part.pod
    for lease in snapshot.gpus[part.gpu].leases.values():
        if pod in ((holder.namespace, holder.pod) for holder in holders_of(lease)):
            yield lease


def _begun(part: HeldPart, trouble: Trouble, snapshot: Snapshot) -> EventData:
    if part.about == _DRIVER:
        note = f"{trouble.reason}. {_UPGRADE}"
        return _event(part, EventReason.GPU_DRIVER_UPGRADE, note, snapshot, warning=True)
    gpu = f"GPU {snapshot.gpus[part.gpu].gpu}"
    if part.about == _CORDON:
        note = (
            f"{gpu} gets no new pods: {trouble.reason}. The pod keeps it and need not be created "
            "again"
        )
        return _event(part, EventReason.GPU_CORDONED, note, snapshot)
    if part.about == _GPU:
        advice = _advice(trouble)
        note = f"{gpu} is out of service: {trouble.reason}. {advice}"
        return _event(part, EventReason.GPU_UNHEALTHY, note, snapshot, warning=True, remedy=advice)
    note = (
        f"MIG device {part.about} of {gpu} is out of service: {trouble.reason}. The pod must be "
        "created again: the device is made again once no pod holds it"
    )
    return _event(part, EventReason.MIG_DEVICE_UNHEALTHY, note, snapshot, warning=True)


def _ended(part: HeldPart, snapshot: Snapshot) -> EventData:
    gpu = f"GPU {snapshot.gpus[part.gpu].gpu}"
    if part.about == _CORDON:
        return _event(part, EventReason.GPU_UNCORDONED, f"{gpu} accepts new pods again", snapshot)
    if part.about == _GPU:
        created = snapshot.gpus[part.gpu].provisioned.keys()
        on_device = any(lease.share.backend in created for lease in _leases(part, snapshot))
        advice = _RESET if on_device else _RESTART
        return _event(
            part, EventReason.GPU_RECOVERED, f"{gpu} is in service again. {advice}", snapshot
        )
    note = f"MIG device {part.about} of {gpu} is in service again. {_RESTART}"
    return _event(part, EventReason.MIG_DEVICE_RECOVERED, note, snapshot)


def _event(
    part: HeldPart,
    reason: EventReason,
    note: str,
    snapshot: Snapshot,
    *,
    warning: bool = False,
    remedy: str = "",
) -> EventData:
    known = snapshot.pods.by_name.get((part.namespace, part.pod))
    return EventData(
        ObjectReference("Pod", part.pod, known.uid if known else "", part.namespace),
        reason,
        note,
        "CheckHealth",
        warning=warning,
        # A repeated Event keeps its first note: with another remedy it is another Event.
        key=f"{part.gpu} {part.about} {remedy}",
        # A program may break its own MIG device again and again, and no other pod's.
        unlimited=part.about in (_GPU, _CORDON, _DRIVER),
    )
