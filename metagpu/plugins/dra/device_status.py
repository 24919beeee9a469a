"""Devices of a prepared ResourceClaim, for `status.devices` of the claim. Pure.

They say what the allocation does not: the shares, their memory, and the uuid of a MIG device that
was made on demand.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from metagpu.core.grants.injection import memory_mib
from metagpu.core.model.claim_device import ClaimDevice
from metagpu.core.model.mig import is_mig
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.gpu_state import NOT_READY
from metagpu.plugins.dra.admin_access import monitored_gpu
from metagpu.plugins.dra.answer import PreparedDevice

READY: Final = "Ready"
_PREPARED: Final = "Prepared"
_MISSING: Final = "MIGDeviceMissing"
_IDENTITY: Final = ("driver", "pool", "device", "shareID")
"""The keys of the list at the API server."""

Entry = Mapping[str, Any]
"""One entry of `status.devices`."""


class DeviceStatus(msgspec.Struct, frozen=True):
    """The state of one device of a prepared claim.

    Attributes:
        share_id: tells allocations of one device apart, `None` where there is one alone.
        ready: whether the device exists: a MIG device may be lost, and is made again.
    """

    pool: str
    device: str
    share_id: str | None
    ready: bool
    data: Mapping[str, Any]

    def entry(self, driver: str, since: str) -> Entry:
        """Return the entry of this device, ready or not since a time."""
        condition = {
            "type": READY,
            "status": str(self.ready),
            "reason": _PREPARED if self.ready else _MISSING,
            "message": "" if self.ready else "the MIG device is gone, and is made again",
            "lastTransitionTime": since,
        }
        share = {"shareID": self.share_id} if self.share_id else {}
        place = {"driver": driver, "pool": self.pool, "device": self.device, **share}
        return {**place, "conditions": [condition], "data": self.data}


def device_statuses(
    devices: Sequence[PreparedDevice], snapshot: Snapshot
) -> tuple[DeviceStatus, ...]:
    """Return the state of each device of a claim; of one that is named twice, once.

    Nothing while it is unknown whether a MIG device exists, as after a start of the daemon.
    """
    if any(_is_unknown(own, snapshot) for it in devices if (own := it.claimed) is not None):
        return ()
    found: dict[tuple[str, str, str | None], DeviceStatus] = {}
    for it in devices:
        key = it.pool, it.device, it.share_id
        if (own := it.claimed) is not None:
            found.setdefault(key, _status(it, own, snapshot))
        elif (gpu := monitored_gpu(it)) is not None:
            found.setdefault(key, DeviceStatus(*key, ready=True, data={"gpu": gpu}))
    return tuple(found.values())


def identity_of(entry: Entry) -> tuple[object, ...]:
    """Return what tells an entry from the others of its claim."""
    return tuple(entry.get(key) for key in _IDENTITY)


def _is_unknown(own: ClaimDevice, snapshot: Snapshot) -> bool:
    """Return whether a MIG device's backend has not said yet what exists."""
    if not any(map(is_mig, own.share_ids)) or (state := snapshot.gpus.get(own.gpu)) is None:
        return False
    suspended = state.suspended.get(own.backend)
    starts = suspended is not None and suspended.reason == NOT_READY
    return starts or own.backend not in state.backends


def _status(prepared: PreparedDevice, own: ClaimDevice, snapshot: Snapshot) -> DeviceStatus:
    state = snapshot.gpus.get(own.gpu)
    leases = state.leases if state is not None else {}
    shares = [leases[it].share for it in own.share_ids if it in leases]
    data: dict[str, Any] = {
        "gpu": own.gpu,
        "backend": own.backend,
        "shares": len(own.slots),
        "slots": list(own.ranges),
    }
    # Replicas have all of the memory in turns.
    if memory := memory_mib([it for it in shares if not it.replica]):
        data["memoryMiB"] = memory
    ready = True
    if any(map(is_mig, own.share_ids)):
        made = state.provisioned.get(own.backend) if state is not None else None
        known = [made.devices.get(it) for it in own.share_ids] if made is not None else []
        uuids = list(dict.fromkeys(it.device for it in known if it is not None))
        ready = bool(uuids)
        if ready:
            data["migDevice"] = uuids[0]
    return DeviceStatus(prepared.pool, prepared.device, prepared.share_id, ready, data)
