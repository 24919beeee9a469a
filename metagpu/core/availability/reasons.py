"""The table of all reasons why a share of a GPU cannot be had, in order.

Lists, the Node's amounts, Allocate, preferences, turns, taints, reports and metrics ask here. A new
reason is a new row. `python docs/availability.py` writes the table into docs/pools.md. Pure.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from metagpu.core.availability.conflict import (
    NONE,
    Conflicts,
    conflicting_shares,
    conflicts_of,
    occupied_text,
    orphaned_text,
    shares_of_moved_nodes,
    shares_on_faulty_devices,
)
from metagpu.core.model.offers import Api
from metagpu.core.model.quantities import iso_time
from metagpu.core.model.request_errors import (
    GpuPaused,
    GpuUnhealthy,
    InstanceUnhealthy,
    RequestError,
    ShareTaken,
)
from metagpu.core.model.shares import CordonSource, ResourceName, Share, ShareId, by_gpu
from metagpu.core.model.snapshot import GpuState, Offer, Snapshot

UNHEALTHY: Final = "metagpu.io/unhealthy"
CORDONED: Final = "metagpu.io/cordoned"
SUSPENDED: Final = "metagpu.io/suspended"
HELD: Final = "metagpu.io/held"
"""The keys of taints; the effect is NoSchedule: metagpu ends no pod."""


_IN_USE: Final = "in-use"


class Listing(StrEnum):
    """The shares of a reason that the kubelet sees as Healthy."""

    YES = "yes"
    NO = "no"
    HELD = "held ones"


class Reason(msgspec.Struct, frozen=True):
    """One row of the table.

    Attributes:
        name: the name that reports show.
        meaning: which shares it is about, and why; for docs/pools.md.
        shares: finds them in a state.
        evidence: the fields of a state of which one says something where it is about any; none for
            a row that always has to look.
        listed: whether they are Healthy in the kubelet's list.
        counted: whether the Node's amount has them, as far as they are listed.
        free: whether reports count them as free, as far as nobody holds them.
        refusal: builds the error that Allocate raises; `None` where the shares are granted.
        taint: the key of the taint of a device of DRA all of whose shares are such.
        together: finds the shares of all rows with these effects at once, where that is faster.
    """

    name: str
    meaning: str
    shares: Callable[[GpuState], frozenset[ShareId]]
    evidence: tuple[str, ...] = ()
    listed: Listing = Listing.NO
    counted: bool = False
    free: bool = False
    refusal: Callable[[GpuState, Share], RequestError] | None = None
    taint: str = ""
    together: Callable[[GpuState], frozenset[ShareId]] | None = None


class Availability:
    """The table applied to one state of a GPU.

    Attributes:
        unlisted: the shares that the kubelet sees as Unhealthy.
        uncounted: the shares that the Node's amount leaves out.
        unfree: the shares that count as free nowhere, whether anybody holds them or not.
        refused: the shares that are not granted.
        parts: the free part of each resource (`core/availability/exact.py`).
    """

    def __init__(self, state: GpuState) -> None:
        self.parts: dict[ResourceName, tuple[Offer, Any]] = {}
        self.unlisted = self.uncounted = self.unfree = self.refused = NONE
        for row, evidence, find in _EFFECTS:
            if any(evidence(state)) and (shares := find(state)):
                hidden = shares.difference(state.leases) if row.listed is Listing.HELD else shares
                if row.listed is not Listing.YES:
                    self.unlisted |= hidden
                if not row.counted:
                    self.uncounted |= hidden
                if not row.free:
                    self.unfree |= shares
                if row.refusal is not None:
                    self.refused |= shares
        # A copy: the state keeps this object, and nobody but the collector frees a circle.
        self._state = replace(state)
        self._state.__dict__.update(state.__dict__)

    @cached_property
    def found(self) -> Sequence[tuple[Reason, frozenset[ShareId]]]:
        """The rows that are about shares of the GPU, in order, with these shares."""
        every = ((row, row.shares(self._state)) for row in REASONS)
        return [(row, shares) for row, shares in every if shares]

    def count_free(self, shares: frozenset[ShareId]) -> int:
        """Count the shares of these that are free, held back or not."""
        return len(shares.difference(self._state.leases, self._state.allocated, self.unfree))

    def reason(self, share: ShareId) -> Reason | None:
        """Return the first reason about a share, `None` for one that can be had."""
        return next((row for row, shares in self.found if share in shares), None)

    def refusal(self, share: Share) -> RequestError | None:
        """Return the error with which a share is refused, `None` for one that is granted."""
        for row, shares in self.found:
            if row.refusal is not None and share.id in shares:
                return row.refusal(self._state, share)
        return None


def availability_of(state: GpuState) -> Availability:
    """Return what the table says of a state, computed once for each."""
    known: Availability | None = state.__dict__.get("availability")
    if known is None:
        known = state.__dict__["availability"] = Availability(state)
    return known


def refuse(shares: Sequence[Share], snapshot: Snapshot) -> None:
    """Refuse shares that cannot be granted; the kubelet may have an older list.

    Raises:
        RequestError: the message names the share or GPU, and the reason.
    """
    for gpu, own in by_gpu(shares).items():
        state = snapshot.gpus[gpu]
        available = availability_of(state)
        if not available.refused or available.refused.isdisjoint([share.id for share in own]):
            continue
        for row, concerned in available.found:
            for share in own:
                if row.refusal is not None and share.id in concerned:
                    raise row.refusal(state, share)


def open_to(state: GpuState, backend: str) -> bool:
    """Return whether a backend may grant shares of a GPU now, if any are free."""
    return (
        state.verdict.healthy
        and state.cordon is None
        and backend not in state.suspended
        and state.owner in (None, backend)
    )


def count_free(state: GpuState, resource: ResourceName) -> int:
    """Count the shares of a resource that are free on a GPU, held back or not."""
    ids = frozenset(share.id for share in state.shares if share.resource == resource)
    return availability_of(state).count_free(ids)


def reason_for_none(state: GpuState, shares: frozenset[ShareId]) -> str | None:
    """Return why the Node has none of these shares; `None` for some, or all leased."""
    available = availability_of(state)
    unleased = shares.difference(state.leases)
    left = unleased.difference(state.allocated)
    if unleased and not left:
        return _IN_USE
    if not left or left - available.uncounted:
        return None
    return next(row.name for row, found in available.found if not left.isdisjoint(found))


def waits_for(state: GpuState) -> str | None:
    """Return which pods of an earlier configuration a GPU waits for, `None` for none."""
    if not conflicts_of(state).orphaned:
        return None
    return orphaned_text(state)


def _every(state: GpuState) -> frozenset[ShareId]:
    return frozenset(share.id for share in state.shares)


def _unhealthy(state: GpuState) -> frozenset[ShareId]:
    if not state.verdict.healthy:
        return _every(state)
    moved = shares_of_moved_nodes(state) if state.kubelet.nodes else NONE
    return moved | shares_on_faulty_devices(state) if state.mig_faults else moved


def _refuse_unhealthy(state: GpuState, share: Share) -> RequestError:
    fault = state.device_fault(share.id)
    if not state.verdict.healthy or fault is None:
        moved = f"the pod of {share.id} would get another GPU's device node"
        reason = moved if state.verdict.healthy else state.verdict.reason
        return GpuUnhealthy(share.resource, str(state.gpu), reason)
    slot = share.id.partition("::")[2]
    return InstanceUnhealthy(share.resource, slot, str(state.gpu), fault.reason)


def _cordoned(state: GpuState) -> frozenset[ShareId]:
    return _every(state) if state.cordons else NONE


def _refuse_cordoned(state: GpuState, share: Share) -> RequestError:
    end = (
        f"`metagpu uncordon {state.gpu.index}` on this node ends that"
        if CordonSource.OPERATOR in state.cordons
        else f"`kubectl metagpu uncordon NODE/{state.gpu.index}` ends that"
        if CordonSource.NODE in state.cordons
        else "shares are given again after that"
    )
    cordon = state.cordon
    reason = (
        f"it is cordoned since {iso_time(cordon.since)} ({cordon.reason}); {end}" if cordon else end
    )
    return GpuPaused(share.resource, str(state.gpu), reason)


def _suspended(state: GpuState) -> frozenset[ShareId]:
    of_backends = (share.id for share in state.shares if share.backend in state.suspended)
    return frozenset(of_backends) | state.paused_shares.keys()


def _refuse_suspended(state: GpuState, share: Share) -> RequestError:
    pause = state.suspended.get(share.backend)
    reason = (
        f"{share.backend} is suspended since {iso_time(pause.since)}: {pause.reason}"
        if pause is not None
        else state.paused_shares[share.id]
    )
    return GpuPaused(share.resource, str(state.gpu), reason)


def _unconfirmed(state: GpuState) -> frozenset[ShareId]:
    return frozenset([i for i, lease in state.leases.items() if lease.unconfirmed])


def _refuse_unconfirmed(state: GpuState, share: Share) -> RequestError:
    holder = state.leases[share.id].holder
    reason = (
        "the kubelet has just started, and an earlier pod may still run with it; try again"
        if holder is None
        else f"{holder} still runs with it, although the kubelet, which started without its "
        "checkpoint, takes it for free; it is free when that pod is gone"
    )
    return ShareTaken(share.id, reason)


def _held_by_claims(state: GpuState) -> frozenset[ShareId]:
    """Find what ResourceClaims hold of a GPU that is shared by limits since a reload."""
    if state.api is not Api.DEVICE_PLUGIN:
        return NONE
    return frozenset([i for i, lease in state.leases.items() if lease.resource_claim is not None])


def _refuse_held_by_claim(state: GpuState, share: Share) -> RequestError:
    holder = state.leases[share.id].resource_claim
    return ShareTaken(share.id, f"the ResourceClaim {holder} holds it")


def _staggered_text(state: GpuState, share: Share) -> str:
    return f"GPU {state.gpu}: {share.id} has just become free and is offered again in a few seconds"


def _cleanup_text(state: GpuState) -> str:
    reserved = (backend for backend, made in state.provisioned.items() if made.exclusive)
    if backend := next(reserved, None):
        return f"GPU {state.gpu} is reserved by {backend}"
    return f"GPU {state.gpu} is being cleaned after its last lease by {state.owner}"


def _out_of_turn(state: GpuState) -> frozenset[ShareId]:
    if (turn := state.present_turn) is None:
        return NONE
    others = (share.id for share in state.shares if share.backend != turn.backend)
    return frozenset(others).difference(state.allocated)


def _withdrawn(state: GpuState) -> frozenset[ShareId]:
    if (turn := state.present_turn) is None or not turn.withdrawn:
        return NONE
    return frozenset(share.id for share in state.shares if share.backend == turn.backend)


def _held_back(state: GpuState) -> frozenset[ShareId]:
    shares = state.hidden.held_back.values() if state.hidden is not None else ()
    return NONE.union(*shares).difference(state.leases, state.allocated)


def _conflict(
    name: str,
    meaning: str,
    cause: Callable[[Conflicts], frozenset[ShareId]],
    text: Callable[[GpuState, Share], str],
) -> Reason:
    """Return the row of one cause of conflicts, with the sentence of its refusal."""
    return Reason(
        name,
        meaning,
        lambda state: cause(conflicts_of(state)),
        ("can_conflict", "cleanup.since", "provisioned", "kubelet.unknown_leases"),
        together=conflicting_shares,
        refusal=lambda state, share: ShareTaken(share.id, text(state, share)),
        taint=HELD,
    )


REASONS: Final = (
    Reason(
        "unhealthy",
        "all shares of a GPU that is out of service, or of a MIG device that is; a share whose pod "
        "would get another GPU's device node",
        _unhealthy,
        refusal=_refuse_unhealthy,
        taint=UNHEALTHY,
    ),
    Reason(
        "cordoned",
        "all shares of a GPU from which an operator or a driver upgrade keeps new pods away",
        _cordoned,
        ("cordons",),
        listed=Listing.HELD,
        refusal=_refuse_cordoned,
        taint=CORDONED,
    ),
    Reason(
        "suspended",
        "the shares of a backend that cannot serve the GPU, or the one whose program has failed",
        _suspended,
        ("suspended", "provisioned"),
        refusal=_refuse_suspended,
        taint=SUSPENDED,
    ),
    Reason(
        "unconfirmed-lease",
        "a share whose pod the present kubelet has not named, and may take for free",
        _unconfirmed,
        listed=Listing.YES,
        counted=True,
        refusal=_refuse_unconfirmed,
    ),
    Reason(
        "resource-claim",
        "a share that a ResourceClaim still holds after a reload from `dra` to `device-plugin`",
        _held_by_claims,
        refusal=_refuse_held_by_claim,
    ),
    _conflict(
        "orphaned-lease",
        "the shares that wait for a pod of an earlier configuration or another plugin, or for the "
        "kubelet, where nobody knows yet [what pods hold](leases.md#before-the-first-offer)",
        lambda found: found.orphaned,
        lambda state, _: orphaned_text(state),
    ),
    _conflict(
        "occupied",
        "a share on whose slots is a device that metagpu does not know, or not yet as idle",
        lambda found: found.occupied,
        occupied_text,
    ),
    _conflict(
        "staggered",
        "a share whose slots have just become free: one MIG profile is offered after the other",
        lambda found: found.staggered,
        _staggered_text,
    ),
    _conflict(
        _IN_USE,
        "the shares that conflict with a lease: of another backend, or on the same slots; in "
        "reports, also those that init containers alone hold",
        lambda found: found.in_use,
        lambda state, _: f"GPU {state.gpu} is in use by {state.owner}",
    ),
    _conflict(
        "cleanup",
        "the shares of all others while a backend cleans the GPU up, or has it for itself",
        lambda found: found.cleanup,
        lambda state, _: _cleanup_text(state),
    ),
    Reason(
        "out-of-turn",
        "the free shares of the backends that do not have [their turn](#turns)",
        _out_of_turn,
        ("turn",),
    ),
    Reason(
        "turn-ends",
        "the free shares of a backend in the last moments of its turn",
        _withdrawn,
        ("turn",),
        listed=Listing.YES,
        free=True,
    ),
    Reason(
        "held-back",
        "the free shares that [no request could take](offers.md) together with those of other GPUs",
        _held_back,
        ("hidden",),
        free=True,
    ),
    Reason(
        "pod-ending",
        "the shares of a pod that is about to end: they come back once they are free",
        lambda state: NONE if state.hidden is None else state.hidden.ending,
        ("hidden",),
        free=True,  # the reducer counts when the pod has ended, before it finds these shares again
    ),
)
"""All reasons; of several about one share the first is shown."""

_EFFECTS: Final = tuple(
    (
        row,
        # Of a single name it would return no tuple; every state has a GPU.
        attrgetter(*row.evidence, *row.evidence) if row.evidence else attrgetter("gpu", "gpu"),
        find,
    )
    for find, row in {row.together or row.shares: row for row in REASONS}.items()
)
"""For each set of shares with the same effects: a row, its evidence, and what finds the shares."""
