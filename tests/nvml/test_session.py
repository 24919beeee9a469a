"""Connections of GPUs: read once, symmetric, and no pair spoils another."""

import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pynvml
import pytest

from metagpu.core.contracts.driver import Survey
from metagpu.core.model.gpu import Connection, PciPath
from metagpu.nvml.driver import NvmlDriver
from metagpu.sim.machine.gpu_models import CUBE_MESH
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.base import read_address
from metagpu.sim.nvml.library import SimLibrary
from tests.nvml.rig import DEADLINE, opened, skip_deadlines

PAIRS_OF_FOUR = list(combinations(range(4), 2))


def between(survey: Survey, a: int, b: int) -> Connection:
    """Return the connection of two GPUs, named by their indices."""
    return survey.topology.between(survey.gpus[a].id, survey.gpus[b].id)


def index_of(node: SimNode, library: SimLibrary, handle: object) -> int:
    """Return the index of a handle's GPU."""
    return node.gpus.index(library._gpu_at(read_address(handle)))


def replace_functions(library: SimLibrary, **functions: Callable[..., int]) -> None:
    """Replace some of a library's C functions."""
    for name, function in functions.items():
        setattr(library, name, function)


async def surveyed(library: SimLibrary, deadline: float = DEADLINE) -> Survey:
    """Survey once on this library."""
    nvml = NvmlDriver(library, deadline)
    async with nvml.session():
        return await nvml.survey()


class Counted:
    """A C function that counts its calls, and may answer otherwise.

    Args:
        real: the function that is called otherwise.
        answer: gives a code instead, or `None`.
    """

    def __init__(
        self, real: Callable[..., int], answer: Callable[..., int | None] = lambda *_: None
    ) -> None:
        self.calls = 0
        self._real = real
        self._answer = answer

    def __call__(self, *args: object) -> int:
        """Count the call; return the answer or call the function."""
        self.calls += 1
        code = self._answer(*args)
        return self._real(*args) if code is None else code


async def test_nvswitches_connect_every_gpu() -> None:
    """GPUs with links to NVSwitches reach each other over all links, by any switch."""
    async with opened("h100-80gb:8") as (_, _, survey):
        for a, b in combinations(range(8), 2):
            found = between(survey, a, b)
            assert (found.nvlinks, found.switched) == (18, True)

        assert between(survey, 0, 1).pci == PciPath.SWITCH
        assert between(survey, 0, 3).pci == PciPath.NUMA_NODE
        assert between(survey, 3, 4).pci == PciPath.SYSTEM


async def test_direct_links_are_counted() -> None:
    """In a mesh each pair has as many links as lead from one to the other."""
    async with opened("v100-16gb:8") as (_, _, survey):
        for a, b in combinations(range(8), 2):
            found = between(survey, a, b)
            assert (found.nvlinks, found.switched) == (CUBE_MESH[a][b], False)


async def test_gpus_without_nvlinks_have_none() -> None:
    """A GPU that does not support NVLinks has zero links, and not unknown ones."""
    async with opened("t4:2") as (_, _, survey):
        assert between(survey, 0, 1) == Connection(PciPath.SWITCH, 0)


async def test_one_gpu_is_asked_nothing() -> None:
    """A single GPU has no connections, and NVML is not asked for its links."""
    library = SimLibrary(build_node("h100-80gb:1"))
    state = Counted(library.nvmlDeviceGetNvLinkState)
    replace_functions(library, nvmlDeviceGetNvLinkState=state)

    assert (await surveyed(library)).topology.connections == {}
    assert state.calls == 0


async def test_connections_are_read_once_for_each_set_of_gpus() -> None:
    """A second survey reads nothing again, but for a GPU that was away."""
    node = build_node("h100-80gb:4")
    library = SimLibrary(node)
    path = Counted(library.nvmlDeviceGetTopologyCommonAncestor)
    state = Counted(library.nvmlDeviceGetNvLinkState)
    replace_functions(
        library, nvmlDeviceGetNvLinkState=state, nvmlDeviceGetTopologyCommonAncestor=path
    )
    nvml = NvmlDriver(library, DEADLINE)

    async with nvml.session():
        first = await nvml.survey()
        assert (path.calls, state.calls) == (2 * 6, 4 * pynvml.NVML_NVLINK_MAX_LINKS)
        assert (await nvml.survey()).topology == first.topology
        assert path.calls == 2 * 6

        node.lose_gpu(node.gpu(3))
        assert len((await nvml.survey()).topology.connections) == 3
        assert path.calls == 2 * 6

        node.reset_gpu(node.gpu(3))
        assert (await nvml.survey()).topology == first.topology
        assert (path.calls, state.calls) == (2 * 9, 5 * pynvml.NVML_NVLINK_MAX_LINKS)


async def test_of_two_answers_the_weaker_is_believed() -> None:
    """Of two answers for A to B and B to A, the farther path and fewer links count."""
    node = build_node("v100-16gb:2")
    node.direct_links = {frozenset((0, 1)): 3}
    library = SimLibrary(node)
    real_path = library.nvmlDeviceGetTopologyCommonAncestor
    real_state = library.nvmlDeviceGetNvLinkState

    def path(first: Any, second: Any, level: Any) -> int:  # noqa: ANN401
        code = real_path(first, second, level)
        if index_of(node, library, first) == 1:
            level._obj.value = pynvml.NVML_TOPOLOGY_HOSTBRIDGE
        return code

    def state(device: Any, link: Any, active: Any) -> int:  # noqa: ANN401
        code = real_state(device, link, active)
        if index_of(node, library, device) == 1 and link == 0:
            active._obj.value = 0
        return code

    replace_functions(library, nvmlDeviceGetTopologyCommonAncestor=path)
    replace_functions(library, nvmlDeviceGetNvLinkState=state)

    assert between(await surveyed(library), 0, 1) == Connection(PciPath.HOST_BRIDGE, 2)


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_TIMEOUT]
)
async def test_an_error_for_one_pair_is_unknown_for_that_pair(code: int) -> None:
    """NVML's error for one pair leaves its path unknown until the next survey."""
    node = build_node("t4:4")
    library = SimLibrary(node)
    broken = True

    def answer(first: object, second: object, _: object) -> int | None:
        ends = {index_of(node, library, first), index_of(node, library, second)}
        return code if broken and ends == {0, 2} else None

    path = Counted(library.nvmlDeviceGetTopologyCommonAncestor, answer)
    replace_functions(library, nvmlDeviceGetTopologyCommonAncestor=path)
    nvml = NvmlDriver(library, DEADLINE)

    async with nvml.session():
        survey = await nvml.survey()
        assert not survey.unreadable
        unknown = [pair for pair in PAIRS_OF_FOUR if between(survey, *pair).pci is None]
        assert unknown == [(0, 2)]

        broken = False
        asked = path.calls
        assert between(await nvml.survey(), 0, 2).pci == PciPath.NUMA_NODE
        assert path.calls == asked + 2


async def test_links_that_fail_are_down() -> None:
    """A link with an error is not counted, and the other links are."""
    library = SimLibrary(build_node("h100-80gb:2"))

    def answer(_: object, link: object, __: object) -> int | None:
        return int(pynvml.NVML_ERROR_UNKNOWN) if link == 5 else None

    replace_functions(
        library, nvmlDeviceGetNvLinkState=Counted(library.nvmlDeviceGetNvLinkState, answer)
    )

    assert between(await surveyed(library), 0, 1).nvlinks == 17


async def test_links_of_a_gpu_that_is_lost_meanwhile_are_unknown() -> None:
    """A GPU that is lost between two questions is unknown, and the others are not."""
    node = build_node("h100-80gb:3")
    library = SimLibrary(node)

    def answer(device: object, _: object, __: object) -> int | None:
        lost = index_of(node, library, device) == 1
        return int(pynvml.NVML_ERROR_GPU_IS_LOST) if lost else None

    replace_functions(
        library, nvmlDeviceGetNvLinkState=Counted(library.nvmlDeviceGetNvLinkState, answer)
    )
    survey = await surveyed(library)

    assert between(survey, 0, 1) == Connection(PciPath.SWITCH)
    assert between(survey, 0, 2).nvlinks == 18


async def test_links_that_come_up_late_are_found() -> None:
    """NVLinks that are all down are read again, as the Fabric Manager may start later."""
    node = build_node("h100-80gb:2")
    for gpu in node.gpus:
        gpu.nvswitch_links = 0
    nvml = NvmlDriver(SimLibrary(node), DEADLINE)

    async with nvml.session():
        assert between(await nvml.survey(), 0, 1).nvlinks == 0
        for gpu in node.gpus:
            gpu.nvswitch_links = gpu.model.nvlinks
        assert between(await nvml.survey(), 0, 1).nvlinks == 18


@pytest.mark.parametrize(
    "names",
    [
        ["nvmlDeviceGetTopologyCommonAncestor"],
        ["nvmlDeviceGetNvLinkState"],
        ["nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo_v2"],
    ],
)
async def test_an_nvml_that_does_not_know_is_silent(names: Sequence[str]) -> None:
    """A function that an older library lacks gives unknown or none, and never an error."""
    library = SimLibrary(build_node("v100-16gb:2"))

    def lacking(*_: object) -> int:
        return int(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    replace_functions(library, **dict.fromkeys(names, lacking))
    survey = await surveyed(library)

    assert len(survey.gpus) == 2
    assert between(survey, 0, 1) == (
        Connection(None, 1) if "Ancestor" in names[0] else Connection(PciPath.SWITCH, 0)
    )


async def test_links_are_resolved_by_address_without_their_kind() -> None:
    """Without the kind of the other end, its PCI address identifies the GPU."""
    library = SimLibrary(build_node("v100-16gb:4"))

    def lacking(*_: object) -> int:
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED)

    replace_functions(library, nvmlDeviceGetNvLinkRemoteDeviceType=lacking)

    assert between(await surveyed(library), 0, 3).nvlinks == 2


async def test_an_address_that_is_none_leads_nowhere() -> None:
    """A link to a device without a PCI address leads to no GPU of this node."""
    library = SimLibrary(build_node("v100-16gb:2"))

    def nameless(*_: object) -> int:
        return 0

    replace_functions(library, nvmlDeviceGetNvLinkRemotePciInfo_v2=nameless)

    assert between(await surveyed(library), 0, 1).nvlinks == 0


async def test_a_level_that_is_new_is_unknown() -> None:
    """A topology level that metagpu does not know is unknown."""
    library = SimLibrary(build_node("t4:2"))

    def level(_: object, __: object, answer: Any) -> int:  # noqa: ANN401
        answer._obj.value = 25
        return 0

    replace_functions(library, nvmlDeviceGetTopologyCommonAncestor=level)

    assert between(await surveyed(library), 0, 1) == Connection(None, 0)


async def test_a_pair_that_hangs_delays_no_other() -> None:
    """A question that hangs costs its deadline once; no other answer is lost or late."""
    node = build_node("h100-80gb:4")
    library = SimLibrary(node)
    real = library.nvmlDeviceGetTopologyCommonAncestor
    released = False

    def answer(first: object, second: object, _: object) -> int | None:
        if {index_of(node, library, first), index_of(node, library, second)} == {0, 1}:
            with node.changed:
                node.changed.wait_for(lambda: released)
        return None

    replace_functions(library, nvmlDeviceGetTopologyCommonAncestor=Counted(real, answer))
    nvml = NvmlDriver(library, DEADLINE)

    async with nvml.session():
        async with skip_deadlines(nvml, "GPU 0 with GPU 1"):
            survey = await nvml.survey()
        assert nvml.unanswered_calls == ["GPU 0 with GPU 1"]
        assert between(survey, 0, 1) == Connection(None, 18, switched=True)
        assert all(between(survey, *pair).pci for pair in [(1, 2), (1, 3), (2, 3)])

        # The GPUs themselves are not kept busy by it.
        for gpu in survey.gpus:
            await nvml.condition(gpu.id)

        began = time.monotonic()
        survey = await nvml.survey()
        assert time.monotonic() - began < DEADLINE
        assert [pair for pair in PAIRS_OF_FOUR if between(survey, *pair).pci is None] == [(0, 1)]
        with node.changed:
            released = True
            node.changed.notify_all()


async def test_a_gpu_that_hangs_is_not_asked_about_the_others() -> None:
    """A GPU that cannot be read has no connections; those of the others are read."""
    node = build_node("h100-80gb:3")
    node.hang_gpu(node.gpu(1), 600)
    nvml = NvmlDriver(SimLibrary(node), DEADLINE)

    async with nvml.session():
        async with skip_deadlines(nvml, "GPU 1"):
            survey = await nvml.survey()
        node.reset_gpu(node.gpu(1))

        assert [unreadable.index for unreadable in survey.unreadable] == [1]
        assert [str(found) for found in survey.topology.connections.values()] == ["NV18"]
