"""Schedules of reloads and kubelet restarts, judged by what the kubelet has afterwards.

The observer sees the kubelet's side alone. What mends a loss later (deadlines of calls, the restart
of main tasks, the watch on registrations) is switched off: nothing may be lost in the first place.
What is registered again by itself has a second for that, counted in ticks: a busy machine delays
them as it delays the daemon. The longest wait is printed:

$ python -m pytest tests/fuzz/test_schedules.py -s --hypothesis-seed 7
"""

import random
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import settings
from msgspec.structs import replace

from metagpu.agent.timing import AgentTiming
from metagpu.core.runtime.tasks import RestartTiming
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.sim.kubelet.kubelet import SimKubelet
from metagpu.sim.kubelet.registration import RegistrationService
from tests.rigs.agent import TIMING, Scene, agent_at_work
from tests.rigs.waiting import TICK, within

SECOND, DIAL = 100, 50
"""The ticks in which all is registered and listed, and those in which a kubelet dials in vain."""
UNBOUNDED = 600.0
RESOURCES = tuple(f"example.com/{letter}" for letter in "abcd")
UNMENDED = AgentTiming(main_tasks=RestartTiming(first_delay=1e6))
QUICK = replace(
    TIMING,
    connect_deadline=1e6,
    register_deadline=1e6,
    list_deadline=1e6,
    poll_deadline=1e6,
    refusal_delay=0.05,
    longest_delay=0.2,
    linger=0.2,
    unlisted=1e6,
    comparison_period=1e6,
)


def config_of(resources: frozenset[str]) -> str:
    """Write a configuration that offers these resources, of a GPU each."""
    pools = "".join(
        f"  - name: p{n}\n    gpus: {{index: {n}}}\n"
        f"    backends: [{{backend: fraction, resource: {name}, sharesPerGpu: 10}}]\n"
        for n, name in enumerate(RESOURCES)
        if name in resources
    )
    return f"version: metagpu/v1\npools:\n{pools}"


class Schedule:
    """The next disturbances of a scene, drawn from a seed."""

    def __init__(self, scene: Scene, chance: random.Random) -> None:
        self._scene = scene
        self._chance = chance
        self._restarting, self._writing = anyio.Lock(), anyio.Lock()
        self.resources = frozenset(RESOURCES)
        self.longest_wait = 0

    async def delay_loop(self) -> None:
        """Keep the loop from running for up to 20 ms, at moments of chance, as a busy node does."""
        while True:
            await anyio.sleep(self._chance.uniform(0, 0.03))
            time.sleep(self._chance.choice((0, 0.001, 0.005, 0.02)))  # noqa: ASYNC251 - its purpose

    async def disturb(self) -> None:
        """Do some of everything, at moments near each other."""
        async with anyio.create_task_group() as group:
            for _ in range(self._chance.randint(2, 6)):
                group.start_soon(self._chance.choice(self._disturbances))

    @property
    def _disturbances(self) -> Sequence[Callable[[], Coroutine[Any, Any, None]]]:
        return self._reload, self._reload, self._restart, self._restart, self._unlink

    async def _wait(self) -> None:
        """Wait for some iterations of the loop, or for some milliseconds."""
        if self._chance.random() < 0.5:
            for _ in range(self._chance.randint(0, 30)):
                await checkpoint()
        else:
            await anyio.sleep(self._chance.uniform(0, 0.05))

    async def _reload(self) -> None:
        await self._wait()
        async with self._writing:
            self.resources = frozenset(self._chance.sample(RESOURCES, self._chance.randint(1, 4)))
            await anyio.Path(self._scene.config_file).write_text(config_of(self.resources))
        await self._scene.agent.reload()

    async def _restart(self) -> None:
        async with self._restarting:
            await self._wait()
            await self._scene.kubelet.crash()
            await self._wait()
            await self._scene.kubelet.restart()

    async def _unlink(self) -> None:
        await self._wait()
        sockets = sorted(self._scene.kubelet.directory.glob("metagpu-*.sock"))
        if sockets:
            await anyio.Path(self._chance.choice(sockets)).unlink(missing_ok=True)

    async def until_quiet(self) -> None:
        """Wait until the kubelet has what the configuration names, and no other list."""
        kubelet = self._scene.kubelet
        expected = dict.fromkeys(self.resources, (10, 1))

        def found() -> dict[str, tuple[int, int]]:
            allocatable, lists = kubelet.allocatable(), kubelet.open_streams
            return {
                name: (allocatable.get(name, 0), lists[name])
                for name in RESOURCES
                if allocatable.get(name) or lists[name]
            }

        refused = len(kubelet.refusals)

        def limit() -> int:
            return SECOND + DIAL * (len(kubelet.refusals) - refused)

        async with within(limit, lambda: f"the kubelet has {found()}, not {expected}") as ticks:
            await kubelet.wait_for(lambda: found() == expected, within=UNBOUNDED)
        self.longest_wait = max(self.longest_wait, ticks.count)


@pytest.mark.timeout(900)  # a piece of a hundred rounds, on a busy machine
async def test_nothing_is_lost_in_a_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """After any schedule of reloads and restarts, the kubelet has every resource."""
    chance = random.Random(pytestconfig.getoption("--hypothesis-seed") or 0)  # noqa: S311 - repeatable
    register = RegistrationService.register

    async def register_slowly(
        self: RegistrationService, message: v1beta1.RegisterRequest
    ) -> v1beta1.Empty:
        await anyio.sleep(chance.choice((0, 0, 0.01, 0.05)))
        answer = await register(self, message)
        await anyio.sleep(chance.choice((0, 0, 0.01, 0.05)))
        return answer

    monkeypatch.setattr(RegistrationService, "register", register_slowly)
    kubelet = SimKubelet(
        tmp_path / "device-plugins",
        pod_resources=tmp_path / "pod-resources.sock",
        dial_timeout=DIAL * TICK,
    )
    async with (
        kubelet.running(),
        agent_at_work(
            tmp_path,
            "a100-40gb:4",
            config_of(frozenset(RESOURCES)),
            kubelet=kubelet,
            timing=UNMENDED,
            kubelet_timing=QUICK,
        ) as scene,
    ):
        schedule = Schedule(scene, chance)
        await schedule.until_quiet()
        async with anyio.create_task_group() as group:
            group.start_soon(schedule.delay_loop)
            for _ in range(settings().max_examples // 12):
                await schedule.disturb()
                await schedule.until_quiet()
            group.cancel_scope.cancel()
    print(f"quiet after {schedule.longest_wait} ticks at most")  # noqa: T201 - for who runs it with -s
