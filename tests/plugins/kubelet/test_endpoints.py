"""The watch on registrations: refusals, hanging attempts, other plugins."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest
from msgspec.structs import replace

from metagpu.core.model.shares import ResourceName
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import GpusFound
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet import endpoint, endpoints, messages
from metagpu.plugins.kubelet.directory import KubeletDirectory
from metagpu.plugins.kubelet.endpoints import RegistrationWatch
from metagpu.plugins.kubelet.timing import TIMING
from metagpu.sim.kubelet.other_plugin import other_plugin
from tests.plugins.kubelet.rig import METAGPU, Node, node
from tests.rigs.build import gpu, layout_of
from tests.rigs.waiting import becomes, skip

if TYPE_CHECKING:
    from metagpu.plugins.kubelet.endpoint import Endpoint

QUICK = replace(
    TIMING,
    watch_period=0.01,
    unlisted=1.0,
    comparison_period=0.05,
    comparison_retry=0.01,
)
"""A watch that need not be waited for."""
OTHER = ["other-1", "other-2", "other-3"]


async def problem_of(live_node: Node, *, expected: bool) -> str:
    """Wait until the resource has a problem, or none; return it."""
    resource = ResourceName(METAGPU)
    with anyio.fail_after(30):
        async for problems in live_node.registry.watch(lambda now: now.registration_problems):
            if (resource in problems) == expected:
                return problems.get(resource, "")
    raise AssertionError


async def test_second_plugin_of_the_name_that_ends(tmp_path: Path) -> None:
    """After another plugin has registered our name and ended, our shares are back by themselves."""
    async with node(tmp_path, timing=QUICK) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        async with other_plugin(live_node.directory, METAGPU, OTHER):
            await live_node.until(3, 3)
        await live_node.until(20, 20)

        assert live_node.kubelet.open_streams[METAGPU] == 1
        assert await problem_of(live_node, expected=False) == ""


async def test_difference_is_reported(tmp_path: Path) -> None:
    """A kubelet that counts other shares than our list has is reported with both numbers."""
    async with node(tmp_path, timing=QUICK) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        async with other_plugin(live_node.directory, METAGPU, OTHER):
            problem = await problem_of(live_node, expected=True)

        assert problem.startswith(
            "the kubelet counts 3 shares as allocatable, and metagpu lists 20; another plugin"
        )


class Again:
    """An endpoint that counts how often it is to register again."""

    def __init__(self) -> None:
        self.times = 0

    def register_again(self, reason: str) -> None:
        """Count."""
        del reason
        self.times += 1


async def test_a_kubelet_that_reads_lists_late_is_not_registered_with_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each registration refuses pods: a difference counts once the kubelet's shares stay."""
    counted = [{"a"}, {"b"}, {"c"}, {"c"}]
    resource, registered, at = ResourceName(METAGPU), Again(), list[int]()
    served = cast("dict[ResourceName, Endpoint]", {resource: registered})
    registry, stats = Registry(), KubeletCallStats()
    registry.apply(GpusFound((gpu(0),), at=0))
    registry.apply(layout_of(gpu(0)).offer_fact)
    stats.of_resource(resource).listed = True
    watch = RegistrationWatch(registry, stats, served, tmp_path, QUICK)

    async def ask(*_: object) -> bytes:
        at.append(registered.times)
        if not counted:
            await anyio.sleep_forever()
        return b""

    def read(_: bytes) -> dict[str, frozenset[str]]:
        return {METAGPU: frozenset(counted.pop(0))}

    monkeypatch.setattr(endpoints, "call_raw", ask)
    monkeypatch.setattr(endpoints, "decode_allocatable_response", read)
    async with anyio.create_task_group() as group:
        group.start_soon(watch._compare_numbers, tmp_path)
        await becomes(lambda: len(at) == 5)
        group.cancel_scope.cancel()
    assert at == [0, 0, 0, 0, 1]


async def test_plugins_that_both_register_again_do_so_ever_more_seldom() -> None:
    """A difference that comes back at each comparison is registered for later and later."""
    resource, registered = ResourceName(METAGPU), Again()
    served = cast("dict[ResourceName, Endpoint]", {resource: registered})
    watch = RegistrationWatch(Registry(), KubeletCallStats(), served, None)
    times = []

    for _ in range(16):
        watch._register_again(resource, "another plugin")
        times.append(registered.times)
        skip(TIMING.comparison_period)

    assert times == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 5]


async def test_refused_resource_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resource that the kubelet does not take is reported with the kubelet's words."""
    timing = replace(QUICK, refusal_delay=0.01, longest_delay=0.01)
    monkeypatch.setattr(messages, "VERSION", "v1alpha")

    async with node(tmp_path, timing=timing) as live_node, live_node.kubelet.running():
        problem = await problem_of(live_node, expected=True)
        assert 'requested API version "v1alpha" is not supported' in problem

        monkeypatch.undo()
        await live_node.until(20, 20)
        await problem_of(live_node, expected=False)


async def test_attempt_that_hangs_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt to register that waits for ever is ended, and the next one registers."""
    find, hangs = endpoint.find_competing_socket, anyio.Event()

    async def hang_first(directory: KubeletDirectory, resource: str) -> Path | None:
        if not hangs.is_set():
            hangs.set()
            await anyio.sleep_forever()
        return await find(directory, resource)

    monkeypatch.setattr(endpoint, "find_competing_socket", hang_first)
    async with node(tmp_path, timing=QUICK) as live_node, live_node.kubelet.running():
        with anyio.fail_after(30):
            await hangs.wait()
        skip(QUICK.longest_attempt)
        await live_node.until(20, 20)


async def test_absent_kubelet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a kubelet the wait is reported, and nothing is begun again."""
    again: list[str] = []
    looks = 0
    judge = RegistrationWatch._judge_list

    def counted(self: RegistrationWatch, *of: Any) -> str:  # noqa: ANN401 - as it is called
        nonlocal looks
        looks += 1
        return judge(self, *of)

    monkeypatch.setattr(RegistrationWatch, "_judge_list", counted)
    monkeypatch.setattr(endpoint.Endpoint, "register_again", lambda _, why: again.append(why))
    timing = replace(QUICK, longest_attempt=0.0)

    async with node(tmp_path, timing=timing) as live_node:
        problem = await problem_of(live_node, expected=True)
        await becomes(lambda: looks > 10)

    assert problem.endswith("metagpu waits for a kubelet that takes registrations")
    assert again == []
