"""MIG instances of another program: an administrator's, or another plugin's."""

import re
from typing import Final

from metagpu.sim.machine import mig_driver
from metagpu.sim.machine.gpu import SimError, SimGpu
from metagpu.sim.machine.mig_state import SimGpuInstance
from metagpu.sim.machine.node import SimNode

_PLACE: Final = re.compile(r"(\d+g\.[^@]+)@(\d+)")


def create_instance(node: SimNode, gpu: SimGpu, place: str) -> int:
    """Create a GPU instance with one compute instance of full size; return its ID.

    Args:
        node: the machine.
        gpu: a GPU in MIG mode.
        place: PROFILE@START, such as `2g.10gb@4`.

    Raises:
        SimError: the driver refuses; the error lists the possible placements.
    """
    name, start = _parsed(place)
    named = {gpu.model.profile_name(profile): profile for profile in gpu.mig.profiles}
    if name not in named:
        has = ", ".join(named) or "no MIG"
        raise SimError(f"{gpu.id} has no profile {name}; it has: {has}")

    profile = named[name]
    with node.changed:
        if not gpu.mig.enabled:
            raise SimError(f"no {place} on {gpu.id}: its MIG mode is off")
        try:
            made = mig_driver.create_gpu_instance(
                node, gpu, profile.number, start, profile.memory_slices
            )
            kind = next(
                k for k, c in mig_driver.COMPUTE_SLICES.items() if c == profile.compute_slices
            )
            mig_driver.create_compute_instance(node, gpu, made, kind)
        except mig_driver.MigDriverError as refusal:
            starts = ", ".join(map(str, profile.starts))
            raise SimError(
                f"no {place} on {gpu.id}: {refusal}; {name} starts at: {starts}"
            ) from None
        return made.number


def destroy_instance(node: SimNode, gpu: SimGpu, place: str) -> None:
    """Destroy a GPU instance and its compute instances.

    Raises:
        SimError: no such instance exists, or a process runs on it.
    """
    with node.changed:
        here = {placement_name(gpu, instance): instance for instance in gpu.mig.instances.values()}
        if place not in here:
            raise SimError(f"no {place} on {gpu.id}; there: {', '.join(here) or 'none'}")
        try:
            for compute in list(here[place].compute_instances.values()):
                mig_driver.destroy_compute_instance(gpu, here[place], compute)
            mig_driver.destroy_gpu_instance(gpu, here[place])
        except mig_driver.MigDriverError as refusal:
            raise SimError(f"{place} on {gpu.id} stays: {refusal}") from None
        node.changed.notify_all()


def placement_name(gpu: SimGpu, instance: SimGpuInstance) -> str:
    """Return an instance's placement, such as `2g.10gb@4`."""
    return f"{gpu.model.profile_name(instance.profile)}@{instance.start}"


def _parsed(place: str) -> tuple[str, int]:
    found = _PLACE.fullmatch(place)
    if found is None:
        raise SimError(f"{place!r} is not a PROFILE@START such as 2g.10gb@4")
    return found[1], int(found[2])
