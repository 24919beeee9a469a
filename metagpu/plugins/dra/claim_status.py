"""The writer of `status.devices`: the devices of prepared ResourceClaims.

They say what the allocation does not: the shares, their memory, and the uuid of a MIG device that
was made on demand. Prepare never waits for it: a claim is written once its answer is out, and again
when a MIG device of it is created again. Server-side apply keeps the entries of other drivers.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import anyio
import msgspec
import structlog

from metagpu.core.devices.devices import GPU_GONE
from metagpu.core.errors import ClusterError
from metagpu.core.grants.injection import memory_mib
from metagpu.core.model.mig import is_mig
from metagpu.core.model.resource_claims import ClaimDevice
from metagpu.core.model.shares import ResourceClaimRef
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.runtime.rate_limit import Backoff, LogOnce
from metagpu.core.state.gpu_state import NOT_READY
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.allocation import ReadResourceClaim
from metagpu.plugins.dra.prepared_claim import PreparedClaims, PreparedDevice, monitored_gpu

READY: Final = "Ready"
_PREPARED: Final = "Prepared"
_MISSING: Final = "MIGDeviceMissing"
_GONE: Final = "GPUGone"
_MESSAGES: Final = {
    _PREPARED: "",
    _MISSING: "the MIG device is gone, and is made again",
    _GONE: f"{GPU_GONE}: delete the pods of this claim",
}
_IDENTITY: Final = ("driver", "pool", "device", "shareID")
"""The keys of the list at the API server."""

Entry = Mapping[str, Any]
"""One entry of `status.devices`."""


class DeviceStatus(msgspec.Struct, frozen=True):
    """The state of one device of a prepared claim.

    Attributes:
        share_id: tells allocations of one device apart, `None` where there is one alone.
        reason: `Prepared` while the device exists. A MIG device may be lost, and is made again; the
            GPU of an earlier daemon's claim may be gone.
    """

    pool: str
    device: str
    share_id: str | None
    reason: str
    data: Mapping[str, Any]

    @property
    def ready(self) -> bool:
        """True if the device exists."""
        return self.reason == _PREPARED

    def entry(self, driver: str, since: str) -> Entry:
        """Return the entry of this device, ready or not since a time."""
        condition = {
            "type": READY,
            "status": str(self.ready),
            "reason": self.reason,
            "message": _MESSAGES.get(self.reason, ""),
            "lastTransitionTime": since,
        }
        share = {"shareID": self.share_id} if self.share_id else {}
        place = {"driver": driver, "pool": self.pool, "device": self.device, **share}
        return {**place, "conditions": [condition], "data": self.data}


def device_statuses(
    devices: Sequence[PreparedDevice], snapshot: Snapshot
) -> tuple[DeviceStatus, ...]:
    """Return the state of each device of a claim; of one that is named twice, once.

    Nothing while it is unknown whether a GPU or MIG device exists, as after the daemon's start.
    """
    if any(_is_unknown(device, snapshot) for device in devices):
        return ()
    found: dict[tuple[str, str, str | None], DeviceStatus] = {}
    for device in devices:
        key = device.pool, device.device, device.share_id
        if (own := device.claimed) is not None:
            found.setdefault(key, _status(device, own, snapshot))
        elif (gpu := monitored_gpu(device)) is not None:
            reason = _GONE if snapshot.lacks(gpu) else _PREPARED
            found.setdefault(key, DeviceStatus(*key, reason, data={"gpu": gpu}))
    return tuple(found.values())


def identity_of(entry: Entry) -> tuple[object, ...]:
    """Return what tells an entry from the others of its claim."""
    return tuple(entry.get(key) for key in _IDENTITY)


def _is_unknown(device: PreparedDevice, snapshot: Snapshot) -> bool:
    """Return whether it is unknown yet if the GPU, or the MIG device, exists."""
    own = device.claimed
    gpu = monitored_gpu(device) if own is None else own.gpu
    if gpu is None or (state := snapshot.gpus.get(gpu)) is None:
        return gpu is not None and not snapshot.lacks(gpu)
    if own is None or not any(map(is_mig, own.share_ids)):
        return False
    suspended = state.suspended.get(own.backend)
    starts = suspended is not None and suspended.reason == NOT_READY
    return starts or own.backend not in state.backends


def _status(prepared: PreparedDevice, own: ClaimDevice, snapshot: Snapshot) -> DeviceStatus:
    state = snapshot.gpus.get(own.gpu)
    leases = state.leases if state is not None else {}
    shares = [leases[share_id].share for share_id in own.share_ids if share_id in leases]
    data: dict[str, Any] = {
        "gpu": own.gpu,
        "backend": own.backend,
        "shares": len(own.slots),
        "slots": list(own.ranges),
    }
    # Replicas have all of the memory in turns.
    if memory := memory_mib([share for share in shares if not share.replica]):
        data["memoryMiB"] = memory
    reason = _GONE if state is None else _PREPARED
    if state is not None and any(map(is_mig, own.share_ids)):
        made = state.provisioned.get(own.backend)
        known = (
            [made.devices.get(share_id) for share_id in own.share_ids] if made is not None else []
        )
        uuids = list(dict.fromkeys(device.device for device in known if device is not None))
        if uuids:
            data["migDevice"] = uuids[0]
        else:
            reason = _MISSING
    return DeviceStatus(prepared.pool, prepared.device, prepared.share_id, reason, data)


ApplyClaimStatus = Callable[[ResourceClaimRef, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Applies a status to a ResourceClaim, and returns the claim as it is then; raises ClusterError."""

_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
"""The claim has another uid, or somebody else wrote it at this moment."""
_FORBIDDEN: Final = 403
_INVALID: Final = 422
_SYNTHETIC: Final = "resourceclaims/driver"
"""The right that the API server looks at from 1.36 on; a missing one is a field's error."""
_RIGHTS: Final = (
    "the right to patch resourceclaims/status is missing, or from Kubernetes 1.36 on that to "
    "associated-node:patch (for a daemon outside a pod arbitrary-node:patch) "
    "resourceclaims/driver; docs/permissions.md has both"
)
_DROPPED: Final = (
    "the API server drops status.devices of ResourceClaims: its feature gate "
    "DRAResourceClaimDeviceStatus is off"
)

log = structlog.get_logger()


class ClaimStatusTiming(msgspec.Struct, frozen=True):
    """The delays of the writer, in seconds.

    Attributes:
        rest: from the last claim that was prepared to the writing of all: each takes as long as the
            answer to the kubelet for another claim, and answers go out first.
        longest_rest: the longest of these delays, while the kubelet asks for one after the other.
        first_retry: after the first failure; the delay doubles with each further one.
        longest_retry: the longest of these delays.
    """

    rest: float = 0.2
    longest_rest: float = 2.0
    first_retry: float = 1.0
    longest_retry: float = 300.0


class _WrittenStatus(msgspec.Struct, frozen=True):
    """The status of a claim at the API server, with the times of its conditions."""

    statuses: tuple[DeviceStatus, ...]
    since: Mapping[tuple[object, ...], tuple[bool, str]]


class ClaimStatuses:
    """Keeps `status.devices` of the prepared claims as the snapshot has them.

    Attributes:
        problem: why claims are not written, empty while they are.

    Args:
        registry: has the leases, and the MIG devices.
        driver: the name of this driver: no other's entries are written.
        prepared: the devices of each prepared claim.
        read: reads a claim, to see what an earlier daemon wrote.
        apply: applies a status.
    """

    def __init__(
        self,
        registry: Registry,
        driver: str,
        prepared: PreparedClaims,
        *,
        read: ReadResourceClaim,
        apply: ApplyClaimStatus,
        timing: ClaimStatusTiming | None = None,
    ) -> None:
        self.problem = ""
        self._registry = registry
        self._driver = driver
        self._prepared = prepared
        self._read = read
        self._apply = apply
        self._timing = timing or ClaimStatusTiming()
        self._written: dict[ResourceClaimRef, _WrittenStatus] = {}
        self._unread = set[ResourceClaimRef]()
        self._gone = set[ResourceClaimRef]()
        # Claims that the API server refuses by themselves, each with what it refused.
        self._refused: dict[ResourceClaimRef, tuple[DeviceStatus, ...]] = {}
        self._dropped = False
        self._failures = LogOnce()
        self._changed = anyio.Event()

    def note(self, claim: ResourceClaimRef, *, restored: bool = False) -> None:
        """Note a claim that is prepared; an earlier one may have its status already."""
        if restored:
            self._unread.add(claim)
        self._changed.set()

    async def run(self) -> None:
        """Write what differs, until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow_devices)
            timing = self._timing
            backoff = Backoff(timing.first_retry, timing.longest_retry, jitter=True)
            while True:
                await self._changed.wait()
                with anyio.move_on_after(timing.longest_rest):
                    await self._rest()
                self._changed = anyio.Event()
                failure = await self._write_changed()
                if failure is None:
                    backoff.reset()
                else:
                    await anyio.sleep(backoff.next(failure.retry_after))
                    self._changed.set()

    async def _rest(self) -> None:
        """Wait until no claim has been prepared for a moment."""
        while self._changed.is_set():
            self._changed = anyio.Event()
            await anyio.sleep(self._timing.rest)

    async def _follow_devices(self) -> None:
        """Write claims again whose MIG devices or GPUs have changed."""
        async for _ in self._registry.watch(
            lambda now: (
                now.unreadable_gpus,
                tuple((gpu.provisioned, gpu.suspended) for gpu in now.gpus.values()),
            )
        ):
            self._changed.set()

    async def _write_changed(self) -> ClusterError | None:
        """Write each claim that differs; return the last failure.

        One that is not the claim's own ends the round: it would be the same for the others.
        """
        failure = None
        self._forget_unprepared()
        for claim, devices in list(self._prepared.items()):
            if self._dropped:
                return None
            statuses = device_statuses(devices, self._registry.snapshot)
            ended = claim not in self._prepared or claim in self._gone
            if ended or not statuses or statuses == self._refused.get(claim):
                continue
            try:
                await self._write(claim, statuses)
            except ClusterError as error:
                if await self._is_gone(claim, error):
                    self._gone.add(claim)
                    continue
                if self._note_failure(claim, error):
                    return error
                if error.status == _INVALID:  # so would be the same devices again
                    self._refused[claim] = statuses
                else:
                    failure = error
            else:
                self._refused.pop(claim, None)
        if failure is None and not self._dropped and not self._refused:
            self._recovered()
        return failure

    def _forget_unprepared(self) -> None:
        for known in (self._written, self._refused):
            for claim in known.keys() - self._prepared.keys():
                del known[claim]
        self._gone &= self._prepared.keys()
        self._unread &= self._prepared.keys()

    async def _is_gone(self, claim: ResourceClaimRef, error: ClusterError) -> bool:
        """Return whether the API server has no such claim any more."""
        if error.status != _CONFLICT:
            return error.status == _NOT_FOUND
        try:
            found = await self._read(claim)
        except ClusterError as unread:
            return unread.status == _NOT_FOUND
        return bool(found["metadata"]["uid"] != claim.uid)

    async def _write(self, claim: ResourceClaimRef, statuses: tuple[DeviceStatus, ...]) -> None:
        """Write one claim, unless the API server has this state of it already."""
        if claim in self._unread:
            self._take(claim, (await self._read(claim)).get("status", {}).get("devices") or ())
        written = self._written.get(claim)
        if written is not None and written.statuses == statuses:
            return
        before, now = (written.since if written else {}), _now()
        entries, since = [], {}
        for status in statuses:
            key = identity_of(status.entry(self._driver, now))
            known = before.get(key)
            since[key] = known if known and known[0] == status.ready else (status.ready, now)
            entries.append(status.entry(self._driver, since[key][1]))
        answer = await self._apply(claim, {"devices": entries})
        found = {identity_of(device) for device in answer.get("status", {}).get("devices") or ()}
        if since.keys() <= found:
            self._written[claim] = _WrittenStatus(statuses, since)
        else:
            self._dropped, self.problem = True, _DROPPED
            log.warning("api server drops the status of claims' devices", reason=_DROPPED)

    def _take(self, claim: ResourceClaimRef, entries: Sequence[Entry]) -> None:
        """Take in what an earlier daemon wrote."""
        since: dict[tuple[object, ...], tuple[bool, str]] = {}
        statuses = []
        for entry in entries:
            conditions = entry.get("conditions") or ()
            if entry.get("driver") == self._driver and conditions:
                place = entry["pool"], entry["device"], entry.get("shareID")
                reason = conditions[0].get("reason", "")
                statuses.append(DeviceStatus(*place, reason, entry.get("data") or {}))
                time = conditions[0]["lastTransitionTime"]
                since[identity_of(entry)] = statuses[-1].ready, time
        self._unread.discard(claim)
        self._written[claim] = _WrittenStatus(tuple(statuses), since)

    def _note_failure(self, claim: ResourceClaimRef, error: ClusterError) -> bool:
        """Report a new problem; return whether it is one of all claims."""
        refused = error.status == _INVALID and _SYNTHETIC in error.message
        missing = error.status == _FORBIDDEN or refused
        self.problem = f"{_RIGHTS} ({error.message})" if missing else str(error)
        # Texts name the claim, and are another one for each.
        alike = _RIGHTS if missing else error.status and f"{error.status} {error.message}"
        if self._failures.is_new(_SYNTHETIC, alike or self.problem):
            log.warning(
                "status of a claim's devices not written",
                claim=str(claim),
                error=self.problem,
                effect="pods are not concerned; status.devices of claims stays empty",
            )
        return missing or error.status not in {_INVALID, _CONFLICT}

    def _recovered(self) -> None:
        self.problem = ""
        if self._failures.clear(_SYNTHETIC):
            log.info("status of claims' devices written")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
