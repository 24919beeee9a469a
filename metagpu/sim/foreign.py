"""MIG instances that somebody else makes and destroys: an administrator, another plugin."""

import re
from typing import Final

from metagpu.sim import cutting
from metagpu.sim.gpu import SimError, SimGpu
from metagpu.sim.instances import SimInstance
from metagpu.sim.node import SimNode

_PLACE: Final = re.compile(r"(\d+g\.[^@]+)@(\d+)")


def make(node: SimNode, gpu: SimGpu, place: str) -> int:
    """Make a GPU instance with one compute instance on all of it; give its number.

    Args:
        node: the machine.
        gpu: which MIG is on.
        place: PROFILE@START, such as `2g.10gb@4`.

    Raises:
        SimError: if the driver refuses; says what there is.
    """
    name, start = _parsed(place)
    named = {gpu.board.mig_name(profile): profile for profile in gpu.mig.profiles}
    if name not in named:
        has = ", ".join(named) or "no MIG"
        raise SimError(f"GPU {gpu.id} has no profile {name}; it has: {has}")

    profile = named[name]
    with node.changed:
        if not gpu.mig.enabled:
            raise SimError(f"no {place} on GPU {gpu.id}: its MIG mode is off")
        try:
            made = cutting.make(node, gpu, profile.number, start, profile.size)
            kind = next(k for k, c in cutting.COMPUTES.items() if c == profile.slices)
            cutting.make_compute(node, gpu, made, kind)
        except cutting.Refusal as refusal:
            starts = ", ".join(map(str, profile.starts))
            raise SimError(
                f"no {place} on GPU {gpu.id}: {refusal}; {name} starts at: {starts}"
            ) from None
        return made.number


def end(node: SimNode, gpu: SimGpu, place: str) -> None:
    """Destroy a GPU instance and what is in it.

    Raises:
        SimError: if it is not there; says what is. If processes run on it.
    """
    with node.changed:
        here = {place_of(gpu, it): it for it in gpu.mig.present.values()}
        if place not in here:
            raise SimError(f"no {place} on GPU {gpu.id}; there: {', '.join(here) or 'none'}")
        try:
            for compute in list(here[place].computes.values()):
                cutting.end_compute(gpu, here[place], compute)
            cutting.end(gpu, here[place])
        except cutting.Refusal as refusal:
            raise SimError(f"{place} on GPU {gpu.id} stays: {refusal}") from None
        node.changed.notify_all()


def place_of(gpu: SimGpu, instance: SimInstance) -> str:
    """Name an instance by what it is and where."""
    return f"{gpu.board.mig_name(instance.profile)}@{instance.start}"


def _parsed(place: str) -> tuple[str, int]:
    found = _PLACE.fullmatch(place)
    if found is None:
        raise SimError(f"{place!r} is no PROFILE@START such as 2g.10gb@4")
    return found[1], int(found[2])
