"""What NVML tells of a GPU as the planner's board: the two must exclude the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.mig.board import board_of, resource_of, share_id, slot_in
from metagpu.core.mig import profile_of, slot_of
from metagpu.sim import cutting
from metagpu.sim.boards import BOARDS
from metagpu.sim.spec import simulated
from tests.backends.mig.gpus import instance, mig_gpu

CUT = [key for key, board in BOARDS.items() if board.mig]


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
    """A plus, which Kubernetes does not take, is a point."""
    assert resource_of(profile) == resource


def test_an_id_says_what_and_where() -> None:
    """Profile and slice are read from the id alone, and from an instance that NVML lists."""
    gpu = mig_gpu()
    share = share_id(gpu.id, "1g.5gb+me@6")

    assert (slot_of(share), profile_of(share)) == ("1g.5gb+me@6", "1g.5gb+me")
    assert slot_in(gpu.mig_profiles, instance(gpu, "3g.20gb@4")) == "3g.20gb@4"
    assert slot_in((), instance(gpu, "3g.20gb@4")) == "profile 9@4"


def test_gpus_of_a_kind_have_a_board_in_common() -> None:
    """The planner remembers what it works out: once for a kind and what is allowed of it."""
    one, other = mig_gpu(0), mig_gpu(1)
    allowed = frozenset(("1g.5gb",))

    assert board_of(one.mig_profiles) is board_of(other.mig_profiles)
    assert [it.name for it in board_of(one.mig_profiles, allowed).profiles] == ["1g.5gb"]


@pytest.mark.parametrize("key", CUT)
def test_slots_say_enough(key: str) -> None:
    """No set of spots without a common slot wants more than the board has."""
    assert board_of(mig_gpu(board=key).mig_profiles).overcommitted() is None


@given(st.sampled_from(CUT), st.lists(st.integers(0, 200), max_size=12))
def test_the_driver_refuses_what_overlaps_and_nothing_else(key: str, picks: list[int]) -> None:
    """Whatever is there, the driver has room for a spot exactly if no slot of it is taken."""
    node = simulated(f"{key}:1")
    gpu, profiles = node.gpu(0), mig_gpu(board=key).mig_profiles
    gpu.mig.enabled = True
    numbers = {profile.name: profile.number for profile in profiles}
    spots, taken = board_of(profiles).spots, set[str]()

    for pick in picks:
        spot = spots[pick % len(spots)]
        place, number = spot.placement, numbers[spot.profile.name]
        with node.changed:
            try:
                cutting.make(node, gpu, number, place.start, place.size)
            except cutting.Refusal:
                assert not spot.footprint.isdisjoint(taken)
            else:
                assert spot.footprint.isdisjoint(taken)
                taken |= spot.footprint
