"""What is told of one GPU's instances: which shares they stand for, what they are in the way of."""

from collections.abc import Mapping
from typing import Final

from metagpu.backends.mig.board import share_id
from metagpu.backends.mig.ledger import Ledger, identity
from metagpu.core.cdi import device_name
from metagpu.core.mig import MigInstance
from metagpu.core.model import Made, ShareId, Stock

_NOT_YET: Final = "its MPS control daemon is not there yet"


def stock(known: Ledger, *, alone: bool) -> Stock:
    """Say all of it; the ledger is settled for that."""
    made: dict[ShareId, Made] = {}
    blocked: dict[str, str] = {}
    named: dict[str, Made] = {}
    paused: dict[ShareId, str] = {}
    known.settle()

    for slot, instance in known.present.items():
        if slot in known.busy:
            continue
        if why := why_blocked(known, slot):
            blocked |= dict.fromkeys(known.taken(slot), why)
        if not instance.computes:
            continue
        named |= _names(known, slot, instance)
        if known.is_ours(slot):
            made |= _made(known, slot, instance)
            uuid = instance.computes[0].uuid
            if known.through_mps(slot) and (why := known.control.get(uuid, _NOT_YET)):
                paused |= dict.fromkeys(known.shares(slot), f"instance {slot}: {why}")

    blocked |= known.missing()
    making = frozenset(known.making)
    return Stock(made, dict(known.failed), blocked, paused, alone, named, making=making)


def why_blocked(known: Ledger, slot: str) -> str:
    """Say why an instance is in the way of all shares on its slots, empty if it is not."""
    if slot in known.found:
        return f"instance {slot} was found here; it is taken over if nobody uses it for a while"
    if not known.is_ours(slot):
        return f"instance {slot} is there, which metagpu did not make"
    return _why_not_idle(known, slot) if known.is_loose(slot) else ""


def _why_not_idle(known: Ledger, slot: str) -> str:
    if known.is_broken(slot):
        whose = f"; {known.users[slot]} still runs on it" if slot in known.users else ""
        stays = f"; it cannot be removed: {known.stuck[slot].why}" if slot in known.stuck else ""
        fault = known.state.faults[identity(known.present[slot])].reason
        return f"instance {slot} is out of service ({fault}) and is made anew{whose}{stays}"
    if slot in known.users:
        return f"instance {slot} was given back, and {known.users[slot]} still runs on it"
    if slot in known.stuck:
        return f"instance {slot} cannot be removed: {known.stuck[slot].why}"
    return ""


def _made(known: Ledger, slot: str, instance: MigInstance) -> Mapping[ShareId, Made]:
    """Give what an instance is for each of its shares."""
    first, broken = instance.computes[0], known.is_broken(slot)
    # Who gets another replica of a held instance shares it anyway.
    free = not broken and (slot in known.held or slot in known.idle)
    again = not broken and slot in known.left
    return {
        share: Made(
            *(first.uuid, instance.number, first.number),
            idle=free and share not in known.state.leases,
            again=again,
        )
        for share in known.shares(slot)
    }


def _names(known: Ledger, slot: str, instance: MigInstance) -> Mapping[str, Made]:
    """Give the names by which CDI knows an instance; by its place only ours.

    Of a layout only what a pod holds, which may have been told the place before.
    """
    first = instance.computes[0]
    there = Made(first.uuid, instance.number, first.number)
    by_place = known.is_ours(slot) and (known.terms.fixed is None or slot in known.held)
    place = device_name(share_id(known.state.gpu.id, slot))
    return {first.uuid: there, **({place: there} if by_place else {})}
