"""GPUs with the MIG profiles of the simulated boards, as NVML would tell them."""

from msgspec.structs import replace

from metagpu.core.gpu import MIB, Gpu
from metagpu.core.mig import ComputeInstance, MigEngines, MigInstance, MigProfile, Placement
from metagpu.sim.boards import BOARDS
from tests.build import gpu


def mig_gpu(index: int = 0, board: str = "a100-40gb") -> Gpu:
    """Make a GPU in MIG mode."""
    its = BOARDS[board]
    profiles = tuple(
        MigProfile(
            its.mig_name(profile),
            profile.number,
            profile.slices,
            profile.memory * MIB,
            profile.most,
            tuple(Placement(start, profile.size) for start in profile.starts),
            profile.processors,
            MigEngines(profile.copies, *profile.engines),
        )
        for profile in its.mig_profiles
    )
    made = gpu(index, memory_mib=its.memory, name=its.product)
    return replace(made, mig_enabled=True, mig_profiles=profiles)


def instance(of: Gpu, slot: str, number: int = 5, *, computes: int = 1) -> MigInstance:
    """Make an instance of a GPU at a slot such as `2g.10gb@4`; its uuid follows from both."""
    name, _, start = slot.rpartition("@")
    profile = next(it for it in of.mig_profiles if it.name == name)
    place = next(it for it in profile.placements if it.start == int(start))
    parts = tuple(ComputeInstance(n, f"MIG-{slot}-{number}-{n}") for n in range(computes))
    return MigInstance(number, profile.number, place, parts)
