"""MIG through NVML: what goes wrong halfway, and what NVML does not say."""

import threading

import anyio
import pynvml
import pytest

from metagpu.core.driver import Xid
from metagpu.core.errors import DriverError, DriverTimeout, InUse
from metagpu.core.mig import MigEngines, Placement
from metagpu.nvml import Nvml, session
from metagpu.nvml.mig import _SUFFIXES
from metagpu.sim.boards import BOARDS
from metagpu.sim.instances import Making
from metagpu.sim.library import Library
from metagpu.sim.library_base import address_in
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated
from tests.heard import heard
from tests.nvml.rig import DEADLINE, altered, hurried

TWO = 14
"""The number of 2g on boards of seven compute slices."""
PLACE = Placement(0, 2)


def node_in_mig(boards: str = "a100-40gb:2") -> SimNode:
    """Make a node whose GPUs are in MIG mode."""
    node = simulated(boards)
    for gpu in node.gpus:
        gpu.mig.enabled = gpu.mig.pending = True
    return node


async def test_a_gpu_instance_without_its_compute_instance_does_not_stay() -> None:
    """If the second half of making an instance fails, the first is undone."""
    node = node_in_mig()
    node.gpu(0).mig.making = Making(compute_failures=1)
    nvml = Nvml(Library(node))

    async with nvml.session():
        [gpu, _] = (await nvml.survey()).gpus
        with pytest.raises(DriverError, match=r"GPU 0.*CreateComputeInstance.*Unknown"):
            await nvml.mig.create(gpu.id, TWO, PLACE, 5)
        assert not await nvml.mig.instances(gpu.id)
        assert (await nvml.mig.create(gpu.id, TWO, PLACE, 5)).computes


async def test_an_instance_without_a_name_does_not_stay() -> None:
    """A MIG device that NVML does not list can be given to nobody, and is undone."""
    node = node_in_mig()

    def none(_device: object, _index: object, _handle: object) -> int:
        return int(pynvml.NVML_ERROR_NOT_FOUND)

    nvml = Nvml(altered(node, nvmlDeviceGetMigDeviceHandleByIndex=none))
    async with nvml.session():
        [gpu, _] = (await nvml.survey()).gpus
        with pytest.raises(DriverError, match="does not name the MIG device"):
            await nvml.mig.create(gpu.id, TWO, PLACE, 5)

    assert not node.gpu(0).mig.present


async def test_a_slow_creation_is_late_and_found_later() -> None:
    """At the deadline the caller goes on; what NVML made after all is in the list then."""
    node, released = node_in_mig(), threading.Event()
    library = Library(node)
    create = library.nvmlDeviceCreateGpuInstanceWithPlacement

    def slow(device: object, *rest: object) -> int:
        if address_in(device) == node.gpu(0).handle:
            released.wait()
        return create(device, *rest)

    library.nvmlDeviceCreateGpuInstanceWithPlacement = slow  # type: ignore[method-assign, assignment]
    nvml = Nvml(library)

    async with nvml.session():
        [gpu, other] = (await nvml.survey()).gpus
        async with hurried(nvml, "GPU 0"):
            with pytest.raises(DriverTimeout, match=r"GPU 0.* within 30 s"):
                await nvml.mig.create(gpu.id, TWO, PLACE, DEADLINE)
        assert (await nvml.mig.create(other.id, TWO, PLACE, DEADLINE)).placement == PLACE

        released.set()
        with anyio.fail_after(30):
            while nvml.overdue:  # noqa: ASYNC110 - nothing tells that a thread came back
                await anyio.sleep(0.01)
        [found] = await nvml.mig.instances(gpu.id)
        assert found.placement == PLACE


async def test_a_busy_driver_says_so() -> None:
    """Making and destroying while the driver is busy with the GPU are `InUse`."""
    node = node_in_mig()
    nvml = Nvml(Library(node))

    async with nvml.session():
        [gpu, _] = (await nvml.survey()).gpus
        made = await nvml.mig.create(gpu.id, TWO, PLACE, 5)
        node.gpu(0).mig.making = Making(in_use_until=float("inf"))

        with pytest.raises(InUse, match=r"GPU 0.*In use by another client"):
            await nvml.mig.create(gpu.id, TWO, Placement(2, 2), 5)
        with pytest.raises(InUse):
            await nvml.mig.destroy(gpu.id, made.number)


async def test_an_older_library_describes_profiles_in_the_older_way() -> None:
    """Without the versioned function the first one tells the same."""
    node = node_in_mig()
    newer, older = Nvml(Library(node)), Nvml(_without(node))
    found = []

    for nvml in (newer, older):
        async with nvml.session():
            found.append((await nvml.survey()).gpus)

    assert found[0] == found[1]
    assert found[0][0].mig_profiles


async def test_profiles_that_cannot_be_read_cost_no_gpu() -> None:
    """Without the permission to ask for placements a GPU has no instances, told once."""
    node = node_in_mig()

    def refused(*_: object) -> int:
        return int(pynvml.NVML_ERROR_NO_PERMISSION)

    nvml = Nvml(altered(node, nvmlDeviceGetGpuInstancePossiblePlacements_v2=refused))
    with heard(session) as logged:
        async with nvml.session():
            survey = await nvml.survey()
            await nvml.survey()

    assert [gpu.mig_profiles for gpu in survey.gpus] == [(), ()]
    assert not survey.unreadable
    assert [entry["event"] for entry in logged] == ["MIG profiles cannot be read"] * 2


async def test_profiles_are_read_once_for_a_mode() -> None:
    """NVML says that profiles last as long as the mode: they are asked for when it changes."""
    node = simulated("h100-80gb:1")
    asked: list[object] = []

    def counted(*arguments: object) -> int:
        asked.append(arguments)
        return int(ask(*arguments))

    library = altered(node, nvmlDeviceGetGpuInstancePossiblePlacements_v2=counted)
    ask = Library.nvmlDeviceGetGpuInstancePossiblePlacements_v2.__get__(library)
    nvml = Nvml(library)
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        once = len(asked)
        await nvml.survey()
        assert len(asked) == once > 0
        await nvml.mig.set_mode(gpu.id, enabled=True)
        await nvml.survey()
        assert len(asked) == 2 * once


async def test_a_change_of_mode_costs_no_event() -> None:
    """NVML may reset a GPU to change its mode; its next device check listens to it again."""
    node = simulated("h100-80gb:1")
    nvml = Nvml(Library(node))

    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        await nvml.mig.set_mode(gpu.id, enabled=True)
        node.recover(node.gpu(0))  # as the driver does: nobody is registered any more
        await nvml.condition(gpu.id)
        made = await nvml.mig.create(gpu.id, TWO, PLACE, 5)
        node.raise_xid(node.gpu(0), 31, made.number, 0)

        assert await nvml.events() == (Xid(gpu.id, 31, made.number, 0),)


def test_names_end_as_the_simulated_boards_say() -> None:
    """What the driver room adds to names is what the tables of the boards say."""
    ends = {
        profile.kind: profile.suffix for board in BOARDS.values() for profile in board.mig_profiles
    }

    assert {kind: _SUFFIXES.get(kind, "") for kind in ends} == ends


def _without(node: SimNode) -> Library:
    """Make a library that lacks the newer query of profiles."""

    class Older(Library):
        def __getattribute__(self, name: str) -> object:
            if name == "nvmlDeviceGetGpuInstanceProfileInfoV":
                raise AttributeError(name)
            return super().__getattribute__(name)

    return Older(node)


async def test_a_profile_tells_what_an_instance_has() -> None:
    """Multiprocessors and engines are those that NVML names, of each profile."""
    nvml = Nvml(Library(node_in_mig("a100-40gb:1")))

    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
    told = {it.name: (it.multiprocessors, it.engines) for it in gpu.mig_profiles}

    assert told["1g.5gb"] == (14, MigEngines(copy=1))
    assert told["2g.10gb"] == (28, MigEngines(copy=2, decoder=1))
    assert told["7g.40gb"] == (98, MigEngines(copy=7, decoder=5, jpeg=1, ofa=1))
