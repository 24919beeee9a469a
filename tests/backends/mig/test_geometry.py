"""NVML's profiles as the planner's geometry: both must exclude the same placements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.mig.geometry import geometry_of, profile_resource, share_id, slot_of_instance
from metagpu.core.model.mig import profile_of, slot_of
from metagpu.sim.machine.gpu_models import GPU_MODELS
from metagpu.sim.machine.mig_driver import MigDriverError, create_gpu_instance
from metagpu.sim.machine.spec import build_node
from tests.backends.mig.gpus import instance, mig_gpu

MIG_MODELS = [key for key, model in GPU_MODELS.items() if model.has_mig]


@pytest.mark.parametrize(
    ("profile", "resource"),
    [
        ("1g.5gb", "nvidia.com/mig-1g.5gb"),
        ("1g.5gb+me", "nvidia.com/mig-1g.5gb.me"),
        ("1g.24gb+me.all", "nvidia.com/mig-1g.24gb.me.all"),
        ("1g.24gb-me", "nvidia.com/mig-1g.24gb-me"),
    ],
)
def test_resources_are_named_as_by_nvidia(profile: str, resource: str) -> None:
    """A plus, which Kubernetes refuses, becomes a point."""
    assert profile_resource(profile) == resource


def test_an_id_has_profile_and_slice() -> None:
    """Profile and slice are read from the id alone, and from an instance that NVML lists."""
    gpu = mig_gpu()
    share = share_id(gpu.id, "1g.5gb+me@6")

    assert (slot_of(share), profile_of(share)) == ("1g.5gb+me@6", "1g.5gb+me")
    assert slot_of_instance(gpu.mig_profiles, instance(gpu, "3g.20gb@4")) == "3g.20gb@4"
    assert slot_of_instance((), instance(gpu, "3g.20gb@4")) == "profile 9@4"


def test_gpus_of_a_model_have_one_geometry() -> None:
    """The planner computes a geometry once for a model and its allowed profiles."""
    one, other = mig_gpu(0), mig_gpu(1)
    allowed = frozenset(("1g.5gb",))

    assert geometry_of(one.mig_profiles) is geometry_of(other.mig_profiles)
    assert [it.name for it in geometry_of(one.mig_profiles, allowed).profiles] == ["1g.5gb"]


@pytest.mark.parametrize("key", MIG_MODELS)
def test_slots_are_sufficient(key: str) -> None:
    """No set of placements without a common slot exceeds the geometry."""
    assert geometry_of(mig_gpu(model=key).mig_profiles).overcommitted() is None


@given(st.sampled_from(MIG_MODELS), st.lists(st.integers(0, 200), max_size=12))
def test_the_driver_refuses_overlapping_placements_alone(key: str, picks: list[int]) -> None:
    """The driver accepts a placement exactly if no slot of it is taken."""
    node = build_node(f"{key}:1")
    gpu, profiles = node.gpu(0), mig_gpu(model=key).mig_profiles
    gpu.mig.enabled = True
    numbers = {profile.name: profile.number for profile in profiles}
    spots, taken = geometry_of(profiles).placed_profiles, set[str]()

    for pick in picks:
        spot = spots[pick % len(spots)]
        place, number = spot.placement, numbers[spot.profile.name]
        with node.changed:
            try:
                create_gpu_instance(node, gpu, number, place.start, place.size)
            except MigDriverError:
                assert not spot.footprint.isdisjoint(taken)
            else:
                assert spot.footprint.isdisjoint(taken)
                taken |= spot.footprint
