"""Devices that are not free yet, and will be without the end of a lease. Pure.

The scheduler has a device back as soon as its claim is unprepared: its GPU may still be cleaned.
"""

from collections.abc import Iterable

from metagpu.core.availability.conflict import without_conflict
from metagpu.core.devices.devices import Device
from metagpu.core.model.shares import ResourceClaimRef
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.gpu_state import NOT_READY


def becomes_free_soon(
    claim: ResourceClaimRef, wanted: Iterable[tuple[Device, int]], now: Snapshot
) -> bool:
    """Return whether all devices have so many shares soon that no other lease is on."""
    soon = False
    for device, count in wanted:
        state = now.gpus[device.gpu]
        others = (it.share for it in state.leases.values() if it.resource_claim != claim)
        if len(without_conflict(device.shares, others)) < count:
            return False
        soon = soon or _changes_soon(state)
    return soon


def _changes_soon(state: GpuState) -> bool:
    """Return whether a GPU is being cleaned, made ready, or checked."""
    if not state.verdict.healthy or state.cordon is not None:
        return False
    return (
        bool(state.cleaning)
        or any(it.reason == NOT_READY for it in state.suspended.values())
        or any(it.delayed for it in state.provisioned.values())
        or any(
            not device.idle and share not in state.leases
            for it in state.provisioned.values()
            for share, device in it.devices.items()
        )
    )
