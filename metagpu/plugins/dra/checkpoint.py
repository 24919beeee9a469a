"""The kubelet's checkpoint of prepared ResourceClaims; read-only here.

The kubelet writes what a driver answered, and never asks again for a claim that it lists: after a
restart of this daemon, or of the node, this file has the leases of claims.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import structlog

from metagpu.core.errors import ClaimCheckpointUnreadable, describe_error
from metagpu.core.model.claim_device import ClaimDevice
from metagpu.core.model.shares import ResourceClaimRef
from metagpu.plugins.dra.prepared_claim import PreparedDevice

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
            name: tuple(map(_prepared, state.devices or ()))
            for name, state in (claim.driver_state or {}).items()
        }
        if own := by_driver.get(driver):
            prepared[ref] = own
        names = (it.claimed for devices in by_driver.values() for it in devices)
        held[ref] = tuple(it for it in names if it is not None)
    return ClaimCheckpoint(prepared, held, frozenset(claim.claim_uid for claim in claims))


def _prepared(device: _Device) -> PreparedDevice:
    return PreparedDevice(
        device.request_names or (),
        device.pool_name,
        device.device_name,
        device.cdi_device_ids or (),
        device.share_id,
    )
