"""Differences between leases and processes or cgroups: values and sentences."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.shares import Holder, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.events import ContainerAbsent, UnauthorizedUseFound


class LeaseDifferenceKind(StrEnum):
    """Kinds of differences: the side that lacks the other."""

    USE_WITHOUT_LEASE = "use_without_lease"
    LEASE_WITHOUT_CONTAINER = "lease_without_container"
    LEASE_WITHOUT_DEVICE = "lease_without_device"


class LeaseDifference(msgspec.Struct, frozen=True):
    """A difference that stays.

    Attributes:
        container: the holder, or the pod's uid where the container's names are unknown.
        pod_uid: the uid of its pod, `None` where it is unknown.
        reason: a sentence without the pod's name.
    """

    kind: LeaseDifferenceKind
    container: str
    pod_uid: str | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain data."""
        return {
            "difference": self.kind,
            "holder": self.container,
            "podUid": self.pod_uid,
            "reason": self.reason,
        }


def difference_of(
    event: UnauthorizedUseFound | ContainerAbsent, snapshot: Snapshot
) -> LeaseDifference:
    """Return the difference that an event has reported."""
    if isinstance(event, ContainerAbsent):
        return LeaseDifference(
            LeaseDifferenceKind.LEASE_WITHOUT_CONTAINER,
            str(event.holder),
            event.pod_uid,
            describe_absence(event, snapshot),
        )
    return LeaseDifference(
        LeaseDifferenceKind.USE_WITHOUT_LEASE,
        str(event.holder or f"pod {event.pod_uid}"),
        event.pod_uid,
        describe_unauthorized_use(event, snapshot),
    )


def describe_unauthorized_use(event: UnauthorizedUseFound, snapshot: Snapshot) -> str:
    """Describe the use of a GPU by a container that holds no share of the GPU."""
    name = (event.holder.container if event.holder else "") or event.container_id[:12]
    uses = "some memory" if event.memory is None else f"{event.memory // MIB} MiB"
    return (
        f"container {name} uses {uses} of {describe_gpu(event.gpu, snapshot)} and holds no share "
        "of it: Kubernetes did not allocate this GPU to it"
    )


def describe_absence(event: ContainerAbsent, snapshot: Snapshot) -> str:
    """Describe shares of which no container runs."""
    held = " and ".join(
        f"{count} {'share' if count == 1 else 'shares'} of {describe_gpu(gpu, snapshot)}"
        for gpu, count in event.shares.items()
    )
    return (
        f"container {event.holder.container or 'of unknown name'} holds {held}, and no process of "
        f"it has run for {event.seconds / 60:.0f} min: the kubelet lists it as the holder still"
    )


def describe_gpu(gpu: GpuId, snapshot: Snapshot) -> str:
    """Return the name of a GPU in sentences."""
    known = snapshot.gpus.get(gpu)
    return f"GPU {known.gpu if known else gpu}"


def shares_of_holders(snapshot: Snapshot) -> Mapping[Holder, Mapping[GpuId, int]]:
    """Count the shares of each holder on each GPU."""
    found: dict[Holder, dict[GpuId, int]] = {}
    for gpu, state in snapshot.gpus.items():
        for lease in state.leases.values():
            if lease.holder is not None:
                counts = found.setdefault(lease.holder, {})
                counts[gpu] = counts.get(gpu, 0) + 1
    return found


def claims_of_holders(snapshot: Snapshot) -> Mapping[Holder, frozenset[tuple[ShareId, float]]]:
    """Return the shares of each holder with the times of their claims.

    A pod that is created again under its name has other claims than the pod before.
    """
    found: dict[Holder, set[tuple[ShareId, float]]] = {}
    for state in snapshot.gpus.values():
        for share, lease in state.leases.items():
            if lease.holder is not None:
                found.setdefault(lease.holder, set()).add((share, lease.since))
    return {holder: frozenset(claims) for holder, claims in found.items()}
