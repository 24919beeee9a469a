"""The NVML contract: MIG. A real GPU is only read, and its mode is left alone."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import combinations

import pytest

from metagpu.core.contracts.driver import Driver
from metagpu.core.errors import InsufficientResources, InUse, Unsupported
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.mig import MigProfile, Placement
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.nvml.rig import DEADLINE

NAME = re.compile(r"\d+g\.\d+gb(\+me|\+me\.all|\+gfx|-me)?")
UUID = re.compile(r"MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
BOARDS = ("a30", "a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200", "rtx-pro-6000")


async def test_profiles_are_listed_where_there_is_mig(driver: Driver) -> None:
    """A GPU with MIG lists its profiles in either mode; other GPUs list none."""
    async with driver.session():
        for gpu in (await driver.survey()).gpus:
            assert bool(gpu.mig_profiles) == (gpu.mig_enabled is not None)


async def test_profiles_have_names_and_numbers_of_their_own(driver: Driver) -> None:
    """No two profiles of a board have a name or a number in common."""
    async with driver.session():
        for gpu in (await driver.survey()).gpus:
            names = [profile.name for profile in gpu.mig_profiles]
            assert all(NAME.fullmatch(name) for name in names)
            assert len(set(names)) == len(names)
            assert len({profile.number for profile in gpu.mig_profiles}) == len(names)


async def test_placements_of_a_profile_lie_side_by_side(driver: Driver) -> None:
    """The placements of one profile have one size and no slice in common."""
    async with driver.session():
        for gpu in (await driver.survey()).gpus:
            for profile in gpu.mig_profiles:
                slices = [number for place in profile.placements for number in place.slices]
                assert profile.placements == tuple(sorted(profile.placements))
                assert len({place.size for place in profile.placements}) == 1
                assert len(set(slices)) == len(slices)
                assert 1 <= profile.max_instances <= len(profile.placements)
                assert 0 < profile.memory <= (gpu.memory or 0)


async def test_instances_are_where_a_profile_may_be(driver: Driver) -> None:
    """Every instance has a profile of its GPU and one of its placements, and overlaps no other."""
    async with driver.session():
        for gpu in (await driver.survey()).gpus:
            instances = await driver.mig.instances(gpu.id)
            assert gpu.mig_enabled or not instances
            places = {profile.number: profile.placements for profile in gpu.mig_profiles}
            assert all(instance.placement in places[instance.profile] for instance in instances)
            for one, other in combinations(instances, 2):
                assert set(one.placement.slices).isdisjoint(other.placement.slices)


@asynccontextmanager
async def mig_session(board: str) -> AsyncIterator[tuple[Driver, SimNode, Gpu]]:
    """Open a session on a simulated GPU in MIG mode."""
    node = build_node(f"{board}:1")
    node.gpu(0).mig.enabled = node.gpu(0).mig.pending = True
    driver: Driver = NvmlDriver(SimLibrary(node), DEADLINE)
    async with driver.session():
        yield driver, node, (await driver.survey()).gpus[0]


def named(gpu: Gpu, name: str) -> MigProfile:
    """Find a profile by its name."""
    return next(profile for profile in gpu.mig_profiles if profile.name == name)


@pytest.mark.parametrize("board", BOARDS)
async def test_an_instance_is_created_at_its_placement(board: str) -> None:
    """Each profile is created at each placement, listed there with a device, and removed."""
    async with mig_session(board) as (driver, _, gpu):
        for profile in gpu.mig_profiles:
            for place in profile.placements:
                made = await driver.mig.create(gpu.id, profile.number, place, DEADLINE)
                assert (made.profile, made.placement) == (profile.number, place)
                [compute] = made.compute_instances
                assert UUID.fullmatch(compute.uuid)
                assert await driver.mig.instances(gpu.id) == (made,)
                assert (await driver.mig.usage(gpu.id, compute.uuid)).memory == profile.memory
                await driver.mig.destroy(gpu.id, made.number)
                assert not await driver.mig.instances(gpu.id)


@pytest.mark.parametrize("board", BOARDS)
async def test_an_empty_gpu_takes_as_many_as_its_maximum(board: str) -> None:
    """`most` instances of each profile are created side by side, and the next one fails."""
    async with mig_session(board) as (driver, _, gpu):
        for profile in gpu.mig_profiles:
            for place in profile.placements[: profile.max_instances]:
                await driver.mig.create(gpu.id, profile.number, place, DEADLINE)
            with pytest.raises(InsufficientResources):
                await driver.mig.create(gpu.id, profile.number, profile.placements[-1], DEADLINE)
            for made in await driver.mig.instances(gpu.id):
                await driver.mig.destroy(gpu.id, made.number)


async def test_overlapping_instances_are_refused() -> None:
    """An instance blocks its slices, and the only engines of a kind for a second."""
    async with mig_session("a100-40gb") as (driver, _, gpu):
        two, me = named(gpu, "2g.10gb"), named(gpu, "1g.5gb+me")
        await driver.mig.create(gpu.id, two.number, Placement(4, 2), DEADLINE)
        await driver.mig.create(gpu.id, me.number, Placement(0, 1), DEADLINE)

        for profile, place in (
            (named(gpu, "3g.20gb"), Placement(4, 4)),
            (named(gpu, "1g.10gb"), Placement(4, 2)),
            (me, Placement(1, 1)),
        ):
            with pytest.raises(InsufficientResources):
                await driver.mig.create(gpu.id, profile.number, place, DEADLINE)


async def test_a_used_instance_is_not_destroyed() -> None:
    """An instance with a process stays, and the error names the process."""
    async with mig_session("h100-80gb") as (driver, node, gpu):
        made = await driver.mig.create(
            gpu.id, named(gpu, "2g.20gb").number, Placement(0, 2), DEADLINE
        )
        where = made.number, made.compute_instances[0].number
        node.start_process(node.gpu(0), SimProcess(4242, 1 << 30, *where))

        with pytest.raises(InUse):
            await driver.mig.destroy(gpu.id, made.number)
        [process] = await driver.processes(gpu.id)
        assert (process.pid, process.gpu_instance, process.compute_instance) == (4242, *where)
        usage = await driver.mig.usage(gpu.id, made.compute_instances[0].uuid)
        assert (usage.memory_used, [p.pid for p in usage.processes]) == (1 << 30, [4242])

        node.end_process(node.gpu(0), 4242)
        await driver.mig.destroy(gpu.id, made.number)


async def test_destroying_a_missing_instance_is_no_error() -> None:
    """Destroying an instance a second time changes nothing."""
    async with mig_session("a30") as (driver, _, gpu):
        await driver.mig.destroy(gpu.id, 5)


async def test_an_instance_created_again_has_another_uuid() -> None:
    """A uuid is never used twice, so an old one finds nothing."""
    async with mig_session("a100-40gb") as (driver, _, gpu):
        uuids = set()
        for _ in range(3):
            made = await driver.mig.create(
                gpu.id, named(gpu, "7g.40gb").number, Placement(0, 8), DEADLINE
            )
            uuids.add(made.compute_instances[0].uuid)
            await driver.mig.destroy(gpu.id, made.number)

        assert len(uuids) == 3


async def test_nothing_is_created_while_mig_is_off() -> None:
    """Without MIG mode there are no instances, and none can be created."""
    async with mig_session("h100-80gb") as (driver, _, gpu):
        await driver.mig.set_mode(gpu.id, enabled=False)

        assert not await driver.mig.instances(gpu.id)
        with pytest.raises(Unsupported):
            await driver.mig.create(gpu.id, gpu.mig_profiles[0].number, Placement(0, 1), DEADLINE)


@pytest.mark.parametrize(
    ("board", "now"), [("a100-40gb", False), ("h100-80gb", True), ("b200", True)]
)
async def test_mode_waits_for_a_reset_before_hopper(board: str, *, now: bool) -> None:
    """Ampere takes the new mode at its reset, later GPUs at once; the survey has the mode."""
    node = build_node(f"{board}:1")
    driver: Driver = NvmlDriver(SimLibrary(node), DEADLINE)
    async with driver.session():
        [gpu] = (await driver.survey()).gpus
        mode = await driver.mig.set_mode(gpu.id, enabled=True)

        assert (mode.enabled, mode.pending) == (now, True)
        assert bool(mode.reason) == (not now)
        assert (await driver.survey()).gpus[0].mig_enabled == now
        node.reset_gpu(node.gpu(0))
        assert (await driver.survey()).gpus[0].mig_enabled


async def test_mode_does_not_change_under_a_program() -> None:
    """A GPU in use keeps its mode, and NVML's error is that programs use it."""
    async with mig_session("h100-80gb") as (driver, node, gpu):
        node.start_process(node.gpu(0), SimProcess(1, 1, 7, 0))
        mode = await driver.mig.set_mode(gpu.id, enabled=False)

    assert mode.enabled
    assert mode.reason == "programs use the GPU"


async def test_a_board_without_mig_is_unsupported() -> None:
    """Turning MIG on where there is none is not supported."""
    driver: Driver = NvmlDriver(SimLibrary(build_node("t4:1")), DEADLINE)
    async with driver.session():
        [gpu] = (await driver.survey()).gpus
        with pytest.raises(Unsupported):
            await driver.mig.set_mode(gpu.id, enabled=True)


async def test_a_reset_takes_all_instances() -> None:
    """After a reset the GPU is empty, and its mode is as before."""
    async with mig_session("h100-80gb") as (driver, node, gpu):
        await driver.mig.create(gpu.id, gpu.mig_profiles[0].number, Placement(0, 1), DEADLINE)
        node.reset_gpu(node.gpu(0))

        assert not await driver.mig.instances(gpu.id)
        assert (await driver.survey()).gpus[0].mig_enabled
