"""MIG through NVML: creations that fail halfway, and facts that NVML does not report."""

import threading

import anyio
import pynvml
import pytest

from metagpu.core.contracts.driver import Xid
from metagpu.core.errors import DriverError, DriverTimeout, InUse
from metagpu.core.model.mig import MigEngines, Placement
from metagpu.nvml import session
from metagpu.nvml.driver import NvmlDriver
from metagpu.nvml.mig import _SUFFIXES
from metagpu.sim.machine.gpu_models import GPU_MODELS
from metagpu.sim.machine.mig_state import SimProvisioning
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.base import read_address
from metagpu.sim.nvml.library import SimLibrary
from tests.nvml.rig import DEADLINE, altered_library, skip_deadlines
from tests.rigs.logs import capture_module_logs

TWO = 14
"""The number of 2g on boards of seven compute slices."""
PLACE = Placement(0, 2)


def node_in_mig(gpu_models: str = "a100-40gb:2") -> SimNode:
    """Build a node whose GPUs are in MIG mode."""
    node = build_node(gpu_models)
    for gpu in node.gpus:
        gpu.mig.enabled = gpu.mig.pending = True
    return node


async def test_a_gpu_instance_without_its_compute_instance_does_not_stay() -> None:
    """A GPU instance is removed when its compute instance cannot be created."""
    node = node_in_mig()
    node.gpu(0).mig.provisioning = SimProvisioning(compute_failures=1)
    nvml = NvmlDriver(SimLibrary(node), DEADLINE)

    async with nvml.session():
        [gpu, _] = (await nvml.survey()).gpus
        with pytest.raises(DriverError, match=r"GPU 0.*CreateComputeInstance.*Unknown"):
            await nvml.mig.create(gpu.id, TWO, PLACE, DEADLINE)
        assert not await nvml.mig.instances(gpu.id)
        assert (await nvml.mig.create(gpu.id, TWO, PLACE, DEADLINE)).compute_instances


async def test_an_instance_without_a_name_does_not_stay() -> None:
    """An instance whose MIG device NVML does not list is removed."""
    node = node_in_mig()

    def none(_device: object, _index: object, _handle: object) -> int:
        return int(pynvml.NVML_ERROR_NOT_FOUND)

    nvml = NvmlDriver(altered_library(node, nvmlDeviceGetMigDeviceHandleByIndex=none), DEADLINE)
    async with nvml.session():
        [gpu, _] = (await nvml.survey()).gpus
        with pytest.raises(DriverError, match="has no uuid for the MIG device"):
            await nvml.mig.create(gpu.id, TWO, PLACE, DEADLINE)

    assert not node.gpu(0).mig.instances


async def test_a_slow_creation_is_late_and_found_later() -> None:
    """The caller continues at the deadline; an instance created later is in the list."""
    node, released = node_in_mig(), threading.Event()
    library = SimLibrary(node)
    create = library.nvmlDeviceCreateGpuInstanceWithPlacement

    def slow(device: object, *rest: object) -> int:
        if read_address(device) == node.gpu(0).handle:
            released.wait()
        return create(device, *rest)

    library.nvmlDeviceCreateGpuInstanceWithPlacement = slow  # type: ignore[method-assign, assignment]
    nvml = NvmlDriver(library, DEADLINE)

    async with nvml.session():
        [gpu, other] = (await nvml.survey()).gpus
        async with skip_deadlines(nvml, "GPU 0"):
            with pytest.raises(DriverTimeout, match=r"GPU 0.* within 30 s"):
                await nvml.mig.create(gpu.id, TWO, PLACE, DEADLINE)
        assert (await nvml.mig.create(other.id, TWO, PLACE, DEADLINE)).placement == PLACE

        released.set()
        with anyio.fail_after(30):
            while nvml.unanswered_calls:  # noqa: ASYNC110 - no event when a thread returns
                await anyio.sleep(0.01)
        [found] = await nvml.mig.instances(gpu.id)
        assert found.placement == PLACE


async def test_a_busy_driver_is_in_use() -> None:
    """Creating and destroying while the driver is busy with the GPU raise `InUse`."""
    node = node_in_mig()
    nvml = NvmlDriver(SimLibrary(node), DEADLINE)

    async with nvml.session():
        [gpu, _] = (await nvml.survey()).gpus
        made = await nvml.mig.create(gpu.id, TWO, PLACE, DEADLINE)
        node.gpu(0).mig.provisioning = SimProvisioning(in_use_until=float("inf"))

        with pytest.raises(InUse, match=r"GPU 0.*In use by another client"):
            await nvml.mig.create(gpu.id, TWO, Placement(2, 2), DEADLINE)
        with pytest.raises(InUse):
            await nvml.mig.destroy(gpu.id, made.number)


async def test_an_older_library_describes_profiles_in_the_older_way() -> None:
    """Without the versioned function the first version gives the same profiles."""
    node = node_in_mig()
    newer, older = NvmlDriver(SimLibrary(node), DEADLINE), NvmlDriver(_without(node), DEADLINE)
    found = []

    for nvml in (newer, older):
        async with nvml.session():
            found.append((await nvml.survey()).gpus)

    assert found[0] == found[1]
    assert found[0][0].mig_profiles


async def test_profiles_that_cannot_be_read_cost_no_gpu() -> None:
    """Without permission to read placements a GPU has no profiles, with one log event."""
    node = node_in_mig()

    def refused(*_: object) -> int:
        return int(pynvml.NVML_ERROR_NO_PERMISSION)

    nvml = NvmlDriver(
        altered_library(node, nvmlDeviceGetGpuInstancePossiblePlacements_v2=refused), DEADLINE
    )
    with capture_module_logs(session) as logged:
        async with nvml.session():
            survey = await nvml.survey()
            await nvml.survey()

    assert [gpu.mig_profiles for gpu in survey.gpus] == [(), ()]
    assert not survey.unreadable
    assert [entry["event"] for entry in logged] == ["mig profiles unreadable"] * 2


async def test_profiles_are_read_once_for_a_mode() -> None:
    """Profiles are read again only when the MIG mode changes, as NVML documents."""
    node = build_node("h100-80gb:1")
    asked: list[object] = []

    def counted(*arguments: object) -> int:
        asked.append(arguments)
        return int(ask(*arguments))

    library = altered_library(node, nvmlDeviceGetGpuInstancePossiblePlacements_v2=counted)
    ask = SimLibrary.nvmlDeviceGetGpuInstancePossiblePlacements_v2.__get__(library)
    nvml = NvmlDriver(library, DEADLINE)
    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        once = len(asked)
        await nvml.survey()
        assert len(asked) == once > 0
        await nvml.mig.set_mode(gpu.id, enabled=True)
        await nvml.survey()
        assert len(asked) == 2 * once


async def test_a_change_of_mode_costs_no_event() -> None:
    """After a change of mode, which may reset the GPU, the next device check registers it again."""
    node = build_node("h100-80gb:1")
    nvml = NvmlDriver(SimLibrary(node), DEADLINE)

    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
        await nvml.mig.set_mode(gpu.id, enabled=True)
        node.reset_gpu(node.gpu(0))  # as the driver does: no event set is registered any more
        await nvml.condition(gpu.id)
        made = await nvml.mig.create(gpu.id, TWO, PLACE, DEADLINE)
        node.raise_xid(node.gpu(0), 31, made.number, 0)

        assert await nvml.events() == (Xid(gpu.id, 31, made.number, 0),)


def test_profile_names_are_those_of_the_simulated_boards() -> None:
    """Profile names, with the driver's suffixes, are those of the boards' tables."""
    ends = {
        profile.kind: profile.suffix
        for board in GPU_MODELS.values()
        for profile in board.mig_profiles
    }

    assert {kind: _SUFFIXES.get(kind, "") for kind in ends} == ends


def _without(node: SimNode) -> SimLibrary:
    """Build a library that lacks the newer query of profiles."""

    class Older(SimLibrary):
        def __getattribute__(self, name: str) -> object:
            if name == "nvmlDeviceGetGpuInstanceProfileInfoV":
                raise AttributeError(name)
            return super().__getattribute__(name)

    return Older(node)


async def test_a_profile_has_its_engines() -> None:
    """Each profile has the multiprocessors and engines that NVML reports."""
    nvml = NvmlDriver(SimLibrary(node_in_mig("a100-40gb:1")), DEADLINE)

    async with nvml.session():
        [gpu] = (await nvml.survey()).gpus
    profiles = {
        profile.name: (profile.multiprocessors, profile.engines) for profile in gpu.mig_profiles
    }

    assert profiles["1g.5gb"] == (14, MigEngines(copy=1))
    assert profiles["2g.10gb"] == (28, MigEngines(copy=2, decoder=1))
    assert profiles["7g.40gb"] == (98, MigEngines(copy=7, decoder=5, jpeg=1, ofa=1))
