"""GPUs with the MIG profiles of the simulated models, as NVML reports them."""

from msgspec.structs import replace

from metagpu.core.model.gpu import MIB, Gpu
from metagpu.core.model.mig import (
    ComputeInstance,
    MigEngines,
    MigInstance,
    MigProfile,
    Placement,
)
from metagpu.sim.machine.gpu_models import GPU_MODELS
from tests.rigs.build import gpu


def mig_gpu(index: int = 0, model: str = "a100-40gb") -> Gpu:
    """Create a GPU in MIG mode."""
    its = GPU_MODELS[model]
    profiles = tuple(
        MigProfile(
            its.profile_name(profile),
            profile.number,
            profile.compute_slices,
            profile.memory * MIB,
            profile.max_count,
            tuple(Placement(start, profile.memory_slices) for start in profile.starts),
            profile.multiprocessors,
            MigEngines(profile.copy_engines, *profile.engines),
        )
        for profile in its.mig_profiles
    )
    made = gpu(index, memory_mib=its.memory, name=its.product)
    pci = {"pci_device": its.pci_device_id, "pci_subsystem": its.pci_subsystem_id or None}
    return replace(made, mig_enabled=True, mig_profiles=profiles, **pci)


def instance(of: Gpu, slot: str, number: int = 5, *, computes: int = 1) -> MigInstance:
    """Create an instance at a slot such as `2g.10gb@4`; its uuid follows from GPU and slot."""
    name, _, start = slot.rpartition("@")
    profile = next(mig_profile for mig_profile in of.mig_profiles if mig_profile.name == name)
    place = next(placement for placement in profile.placements if placement.start == int(start))
    parts = tuple(ComputeInstance(n, f"MIG-{slot}-{number}-{n}") for n in range(computes))
    return MigInstance(number, profile.number, place, parts)
