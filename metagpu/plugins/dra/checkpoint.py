"""The kubelet's checkpoint of prepared ResourceClaims: read, and followed.

The kubelet writes what a driver answered, and never asks again for a claim that it lists. So the
checkpoint alone tells a daemon that starts, or a node, which claims are prepared. What their
containers get is written again from it where it is missing, as after a reboot.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import msgspec
import structlog
from anyio import to_thread
from msgspec.structs import replace

from metagpu.core.availability.conflict import orphaned_leases
from metagpu.core.contracts.backend import Backend
from metagpu.core.errors import ClaimCheckpointUnreadable, MetagpuError, describe_error
from metagpu.core.model.resource_claims import ClaimDevice
from metagpu.core.model.shares import ResourceClaimRef, ResourceName, Share, ShareId, gpu_of
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.state.facts import ResourceClaimsRead
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.claim_leases import leased_shares, with_settings
from metagpu.plugins.dra.prepared_claim import (
    ClaimFiles,
    EnsureMonitored,
    PreparedDevice,
    all_monitored,
    with_joint_variables,
)
from metagpu.plugins.dra.preparer import ClaimPreparer

if TYPE_CHECKING:
    from metagpu.core.grants.grant import Grant

CHECKPOINT_FILE: Final = "dra_manager_state"
_PODS: Final = "pods"
"""A folder that every kubelet makes in its own."""

log = structlog.get_logger()


class _Device(msgspec.Struct, frozen=True, rename="pascal"):
    pool_name: str
    device_name: str
    share_id: str | None = msgspec.field(default=None, name="ShareID")
    request_names: tuple[str, ...] | None = None
    cdi_device_ids: tuple[str, ...] | None = msgspec.field(default=None, name="CDIDeviceIDs")


class _Driver(msgspec.Struct, frozen=True, rename="pascal"):
    devices: tuple[_Device, ...] | None = None


class _Claim(msgspec.Struct, frozen=True, rename="pascal"):
    claim_uid: str = msgspec.field(name="ClaimUID")
    claim_name: str
    namespace: str
    driver_state: dict[str, _Driver] | None = None


class _ClaimList(msgspec.Struct, frozen=True):
    claims: tuple[_Claim, ...] | None = msgspec.field(default=None, name="ClaimInfoStateList")


class _File(msgspec.Struct, frozen=True):
    data: str = msgspec.field(name="Data")


class ClaimCheckpoint(msgspec.Struct, frozen=True):
    """The claims in the kubelet's checkpoint.

    Attributes:
        prepared: the devices of this driver, of each claim that has some.
        devices: the meaning of each claim's CDI names of ours, also those that the driver gave
            under an earlier name: containers have them.
        known: the uids of all claims, also of those that are being prepared.
    """

    prepared: Mapping[ResourceClaimRef, tuple[PreparedDevice, ...]]
    devices: Mapping[ResourceClaimRef, tuple[ClaimDevice, ...]]
    known: frozenset[str]

    @property
    def has_claims_of_ours(self) -> bool:
        """True if the driver has prepared any of them, under this name or an earlier one."""
        return bool(self.prepared) or any(self.devices.values())


def read_checkpoint(kubelet_root: Path, driver: str) -> ClaimCheckpoint | None:
    """Read the kubelet's checkpoint; `None` where there is none. Blocks.

    A kubelet that never had a claim has no such file, and neither has a container in which the
    kubelet's folder is not mounted: both end no lease.

    Raises:
        ClaimCheckpointUnreadable: there is one, and it cannot be read now.
    """
    path = kubelet_root / CHECKPOINT_FILE
    try:
        text = msgspec.json.decode(path.read_bytes(), type=_File).data
        claims = msgspec.json.decode(text, type=_ClaimList).claims or ()
    except FileNotFoundError:
        if not (kubelet_root / _PODS).is_dir():
            log.warning(
                "kubelet folder not here",
                folder=str(kubelet_root),
                effect="a restart of metagpu forgets which resource claims are prepared",
                fix="mount the kubelet's folder at the same place, or name it by --kubelet-root",
            )
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ClaimCheckpointUnreadable(f"{path}: {describe_error(error)}") from error
    prepared, held = {}, {}
    for claim in claims:
        ref = ResourceClaimRef(claim.namespace, claim.claim_name, claim.claim_uid)
        by_driver = {
            # A kubelet that has started adds the devices of its next call to those of the first.
            name: tuple(dict.fromkeys(map(_prepared, state.devices or ())))
            for name, state in (claim.driver_state or {}).items()
        }
        if of_driver := by_driver.get(driver):
            prepared[ref] = of_driver
        held[ref] = tuple(
            own for name, devices in by_driver.items() for own in _meanings(name, devices)
        )
    return ClaimCheckpoint(prepared, held, frozenset(claim.claim_uid for claim in claims))


def _prepared(device: _Device) -> PreparedDevice:
    return PreparedDevice(
        device.request_names or (),
        device.pool_name,
        device.device_name,
        device.cdi_device_ids or (),
        device.share_id,
    )


def _meanings(driver: str, devices: Iterable[PreparedDevice]) -> tuple[ClaimDevice, ...]:
    """Return the meaning of a driver's CDI names, each with its pool."""
    return tuple(
        replace(own, pool=f"{driver}/{device.pool}")
        for device in devices
        if (own := device.claimed) is not None
    )


_UNREADABLE: Final = 1.0
"""Seconds between two attempts to read the first checkpoint."""


class CheckpointFollower:
    """Keeps leases and CDI files of claims as the kubelet's checkpoint has them.

    Attributes:
        problem: why the first checkpoint cannot be read, empty once it is.

    Args:
        registry: has the leases.
        preparer: has the states of claims, and ends them.
        kubelet_root: the kubelet's own folder.
        driver: the name of the driver.
        backend: finds the backend of a resource.
        files: the CDI specifications of claims.
        ensure_monitored: makes GPUs for monitoring known to the container runtime.
        note_restored: gets each claim that was prepared before.
        period: seconds between two looks.
    """

    def __init__(
        self,
        registry: Registry,
        preparer: ClaimPreparer,
        kubelet_root: Path,
        driver: str,
        *,
        backend: Callable[[ResourceName], Backend],
        files: ClaimFiles,
        ensure_monitored: EnsureMonitored,
        note_restored: Callable[[ResourceClaimRef], None],
        period: float,
    ) -> None:
        self.problem = ""
        self.period = period
        self._registry = registry
        self._preparer = preparer
        self._states = preparer.states
        self._kubelet_root = kubelet_root
        self._driver = driver
        self._backend = backend
        self._files = files
        self._ensure_monitored = ensure_monitored
        self._note_restored = note_restored
        self._logged = LogOnce()

    async def read_leases(self) -> ClaimCheckpoint | None:
        """Begin the leases in the kubelet's checkpoint, once it can be read.

        Nothing is known of what claims hold before. It is returned, `None` where there is none.
        """
        while True:
            try:
                checkpoint = await self._read_checkpoint()
            except ClaimCheckpointUnreadable as error:
                self.problem = str(error)
                if self._logged.is_new("checkpoint", self.problem):
                    log.error(
                        "checkpoint of resource claims unreadable",
                        error=self.problem,
                        effect="no claim is prepared, and nothing is offered",
                    )
                await anyio.sleep(_UNREADABLE)
            else:
                self.problem = ""
                if checkpoint is not None:
                    self._begin_leases({**checkpoint.devices, **await self._answered(checkpoint)})
                return checkpoint

    async def restore(self) -> None:
        """Take the leases of claims from the checkpoint; end those that it lacks."""
        checkpoint = await self.read_leases()
        if checkpoint is None:
            return
        await self._release_others(checkpoint)
        self._states.prepared.update(checkpoint.prepared)
        for ref in checkpoint.prepared:
            self._note_restored(ref)
        await self._write_missing(checkpoint.prepared)
        try:
            await self._ensure_monitored(all_monitored(self._states.prepared))
        except MetagpuError as error:
            log.error("cdi names of monitored gpus not written again", error=str(error))
        # The kubelet may not have written the last answers yet: their files stay.
        leased = {claim.uid for claim in self._leased_claims()}
        await self._files.remove_others(checkpoint.known | leased)

    async def follow(self) -> None:
        """End leases of claims that the kubelet has forgotten: it unprepares none of them.

        Claims that are reserved for pods keep theirs: these run on with what they have.
        Those of a GPU that is found only after the start begin.
        """
        suspected = frozenset[ResourceClaimRef]()
        while True:
            await anyio.sleep(self.period)
            # Before the checkpoint: the kubelet writes a claim there before it asks for it again.
            left = {claim for claim in suspected if not await self._preparer.may_be_in_use(claim)}
            held = self._leased_claims() | self._states.prepared.keys()
            if not held:
                continue
            try:
                checkpoint = await self._read_checkpoint()
            except ClaimCheckpointUnreadable:
                continue
            if checkpoint is None:
                continue
            await self._take_written(checkpoint)
            await self._begin_missing()
            missing = {ref for ref in held if ref.uid not in checkpoint.known}
            for claim in missing & left:  # twice: the kubelet may have been writing the file
                log.warning("resource claim forgotten by the kubelet", claim=str(claim))
                await self._preparer.unprepare(claim)
            suspected = frozenset(missing)

    async def _read_checkpoint(self) -> ClaimCheckpoint | None:
        return await to_thread.run_sync(read_checkpoint, self._kubelet_root, self._driver)

    async def _answered(
        self, checkpoint: ClaimCheckpoint
    ) -> Mapping[ResourceClaimRef, tuple[ClaimDevice, ...]]:
        """Return the devices of claims that the kubelet has not written, by their files.

        It writes the answers for a pod once it has those of all drivers, and for all claims.
        """
        unwritten = [ref for ref, devices in checkpoint.devices.items() if not devices]
        return {ref: await self._files.read(ref.uid) for ref in unwritten}

    async def _take_written(self, checkpoint: ClaimCheckpoint) -> None:
        """Take in claims of an earlier daemon that the kubelet has now written.

        They have exactly these shares: since the checkpoint was read, none was unprepared.
        """
        written = checkpoint.prepared.keys() & self._leased_claims()
        for ref in written - self._states.prepared.keys():
            async with self._states.lock_of(ref):
                held = {share.id for share in leased_shares(ref.uid, self._registry.snapshot)}
                named = {i for device in checkpoint.devices[ref] for i in device.share_ids}
                if held == named and ref not in self._states.prepared:
                    self._states.prepared[ref] = checkpoint.prepared[ref]
                    self._note_restored(ref)

    async def _begin_missing(self) -> None:
        """Begin the leases, and write the files, that prepared claims lack."""
        prepared = dict(self._states.prepared)
        self._begin_leases(
            {ref: _meanings(self._driver, devices) for ref, devices in prepared.items()}
        )
        await self._write_missing(prepared)

    def _begin_leases(self, claims: Mapping[ResourceClaimRef, tuple[ClaimDevice, ...]]) -> None:
        """Begin the leases of claims; report shares that others have by now."""
        self._registry.apply(ResourceClaimsRead(claims, anyio.current_time()))
        gpus = self._registry.snapshot.gpus
        for claim, devices in claims.items():
            shares = (
                share for device in devices if device.gpu in gpus for share in device.share_ids
            )
            leases = (gpus[gpu_of(share)].leases[share] for share in shares)
            taken = [lease for lease in leases if lease.resource_claim != claim]
            if not taken:
                continue
            holder = str(taken[0].resource_claim or taken[0].holder or "a running container")
            if self._logged.is_new(claim, holder):
                log.error(
                    "share of a resource claim held by others too",
                    claim=str(claim),
                    share=taken[0].share.id,
                    holder=holder,
                    effect="containers of both use it",
                    fix="delete the pods of one of them",
                )

    def _leased_claims(self) -> set[ResourceClaimRef]:
        return {claim for claim, _ in self._registry.snapshot.claim_leases}

    async def _release_others(self, checkpoint: ClaimCheckpoint) -> None:
        """End the leases of claims that the kubelet does not know, and that no pod has."""
        for claim in self._leased_claims():
            unknown = claim.uid not in checkpoint.known
            if unknown and not await self._preparer.may_be_in_use(claim):
                await self._preparer.unprepare(claim)

    async def _write_missing(
        self, prepared: Mapping[ResourceClaimRef, tuple[PreparedDevice, ...]]
    ) -> None:
        """Write the CDI specifications of claims that have none."""
        offered = self._shares_of_claims()
        for ref, devices in prepared.items():
            held = any(device.claimed for device in devices) and ref in self._states.prepared
            if held and not await self._files.exists(ref.uid):
                try:
                    await self._write_again(ref, devices, offered)
                except MetagpuError as error:
                    if self._logged.is_new(("file", ref), str(error)):
                        log.error(
                            "cdi specification of a resource claim not written again",
                            claim=str(ref),
                            error=str(error),
                            effect="its containers do not start again",
                        )

    def _shares_of_claims(self) -> Mapping[ShareId, Share]:
        """Return the shares that claims hold, and that are on offer as they were."""
        return {
            lease.share.id: lease.share
            for state in self._registry.snapshot.gpus.values()
            for lease in state.leases.values()
            if lease.resource_claim is not None
            and lease not in orphaned_leases(state.shares, state.leases)
        }

    async def _write_again(
        self,
        claim: ResourceClaimRef,
        devices: tuple[PreparedDevice, ...],
        offered: Mapping[ShareId, Share],
    ) -> None:
        """Write the CDI specification of a claim from its names alone.

        As at its preparation, all devices of one request have one grant.
        """
        requests: dict[tuple[tuple[str, ...], str], list[ClaimDevice]] = defaultdict(list)
        names: dict[str, str] = {}
        for prepared in devices:
            if (own := prepared.claimed) is not None:
                requests[prepared.requests, own.backend].append(own)
                names[own.name] = prepared.requests[0] if prepared.requests else ""
        grants: dict[str, Grant] = {}
        for together in requests.values():
            shares = [offered.get(share_id) for device in together for share_id in device.share_ids]
            held = [share for share in shares if share is not None]
            if len(held) < len(shares):
                if self._logged.is_new(("shares", claim), ""):
                    log.error(
                        "resource claim without its shares",
                        claim=str(claim),
                        effect="its containers do not start again",
                        fix="offer the earlier shares again, or delete the pods of this claim",
                    )
                return
            backend = self._backend(held[0].resource)
            grant = await backend.grant(held, self._registry.snapshot)
            grant = with_settings(grant, backend, together[0].settings)
            grants.update((device.name, grant) for device in together)
        await self._files.write(claim.uid, with_joint_variables(claim.uid, grants, names))
