"""Two daemons, one after the other, at one kubelet that sees no gap between them."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from metagpu.core.config.config import parse
from metagpu.core.contracts.backend import installed_backends
from metagpu.core.errors import TakeoverFailed
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import build_layout
from metagpu.core.model.shares import ResourceName
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import GpusFound
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet.call_gate import CallGate
from metagpu.plugins.kubelet.directory import KubeletDirectory
from metagpu.plugins.kubelet.endpoints import serve_offers
from metagpu.plugins.kubelet.succession import Succession
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.kubelet.kubelet import SimKubelet
from tests.plugins.kubelet.rig import FOUR_RESOURCES, RESOURCES, gpu, pod, simulated_kubelet

TIMING = KubeletTiming(linger=0.05)
NAMES = frozenset(map(ResourceName, RESOURCES))


@dataclass
class Daemon:
    """The kubelet's side of one daemon."""

    kubelet: SimKubelet
    registry: Registry = field(default_factory=Registry)
    record: KubeletCallStats = field(default_factory=KubeletCallStats)
    gate: CallGate = field(default_factory=CallGate)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def serve(self, succession: Succession | None = None) -> None:
        """Serve four resources until `scope` is cancelled."""
        gpus = [gpu(index) for index in range(4)]
        self.registry.apply(GpusFound(tuple(gpus), at=0))
        layout = build_layout(parse(FOUR_RESOURCES, "t", installed_backends()), gpus, Injection())
        self.registry.apply(layout.offer_fact)
        with self.scope:
            await serve_offers(
                self.registry,
                KubeletDirectory(self.kubelet.directory),
                layout.backends.__getitem__,
                self.record,
                gate=self.gate,
                succession=succession,
                timing=TIMING,
            )

    async def expect_detach(self) -> None:
        """Expect that the kubelet forgets this daemon."""
        self.gate.expect_detach()

    async def end_lists(self, sockets: Mapping[ResourceName, Path]) -> None:
        """Forward all calls to a successor, then end the lists."""
        await self.gate.hand_over(sockets, 1, TIMING.list_end)

    async def listed(self) -> None:
        """Wait until the kubelet has the lists of all resources: a list is opened, then read."""
        with anyio.fail_after(30):
            while not all(  # noqa: ASYNC110 - the record has no event
                self.record.of_resource(name).listed for name in NAMES
            ):
                await anyio.sleep(0.005)
        await self.kubelet.wait_for(
            lambda: self.kubelet.allocatable() == dict.fromkeys(RESOURCES, 100)
        )

    def held(self) -> set[str]:
        """Return the ids of all leases."""
        return {i for state in self.registry.snapshot.gpus.values() for i in state.leases}


@dataclass
class Observed:
    """The least of each resource's allocatable devices that was seen."""

    least: dict[str, int] = field(default_factory=dict)


@asynccontextmanager
async def observed(kubelet: SimKubelet) -> AsyncIterator[Observed]:
    """Look at the kubelet's numbers at each turn of the loop while the block lasts."""
    seen = Observed()

    async def look() -> None:
        while True:
            for name in RESOURCES:
                now = kubelet.allocatable().get(name, 0)
                seen.least[name] = min(now, seen.least.get(name, now))
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(look)
        yield seen
        group.cancel_scope.cancel()


@pytest.mark.parametrize("fixed_clashes", [False, True])
async def test_kubelet_sees_no_gap(tmp_path: Path, *, fixed_clashes: bool) -> None:
    """The kubelet counts all devices at each moment of an exchange, and every pod is admitted.

    A kubelet that knows plugins by name and socket marks the devices of an ended list unhealthy
    at once: it counts none for the milliseconds until the new list.
    """
    (tmp_path / "device-plugins").mkdir()
    kubelet = simulated_kubelet(tmp_path, fixed_clashes=fixed_clashes)
    old, new = Daemon(kubelet), Daemon(kubelet)

    async with kubelet.running(), anyio.create_task_group() as group:
        group.start_soon(old.serve)
        await old.listed()
        async with observed(kubelet) as seen:
            assert await old.gate.close(1)
            group.start_soon(new.serve, Succession(NAMES, old))
            await new.listed()
            old.scope.cancel()
            await anyio.sleep(2 * TIMING.linger)

        assert fixed_clashes or seen.least == dict.fromkeys(RESOURCES, 100)
        assert kubelet.allocatable() == dict.fromkeys(RESOURCES, 100)
        assert kubelet.open_streams[RESOURCES[0]] == 1
        await kubelet.admit(pod("after", 3, RESOURCES[0]))
        assert len(new.held()) == 3
        new.scope.cancel()
        await kubelet.wait_for(lambda: kubelet.allocatable() == dict.fromkeys(RESOURCES, 0))
        group.cancel_scope.cancel()


async def test_calls_during_an_exchange_are_answered_by_the_successor(tmp_path: Path) -> None:
    """A call to the old daemon after the hand-over waits, and is granted by the new one alone."""
    (tmp_path / "device-plugins").mkdir()
    kubelet = simulated_kubelet(tmp_path)
    old, new = Daemon(kubelet), Daemon(kubelet)

    async with kubelet.running(), anyio.create_task_group() as group:
        group.start_soon(old.serve)
        await old.listed()
        assert await old.gate.close(1)
        admitted = anyio.Event()

        async def admit() -> None:
            await kubelet.admit(pod("meanwhile", 3, RESOURCES[0]))
            admitted.set()

        group.start_soon(admit)
        await anyio.sleep(0.05)
        assert not admitted.is_set()
        assert not old.held()

        group.start_soon(new.serve, Succession(NAMES, old))
        with anyio.fail_after(30):
            await admitted.wait()
        assert len(new.held()) == 3
        assert old.held() == new.held()  # for the case that the new one fails
        group.cancel_scope.cancel()


@pytest.mark.parametrize("ended", ["before it serves", "before the lists end", "after them"])
async def test_old_daemon_goes_on_after_a_failed_exchange(tmp_path: Path, ended: str) -> None:
    """The old daemon serves again, without a gap, whenever the new one ends unregistered."""
    (tmp_path / "device-plugins").mkdir()
    kubelet = simulated_kubelet(tmp_path)
    reached = anyio.Event()

    class Hanging(Daemon):
        async def end_lists(self, sockets: Mapping[ResourceName, Path]) -> None:
            if ended == "after them":
                await super().end_lists(sockets)
            reached.set()
            await anyio.sleep_forever()

    old, new = Hanging(kubelet), Daemon(kubelet)
    async with kubelet.running(), anyio.create_task_group() as group:
        group.start_soon(old.serve)
        await old.listed()
        async with observed(kubelet) as seen:
            assert await old.gate.close(1)
            group.start_soon(partial(kubelet.admit, pod("meanwhile", 3, RESOURCES[0])))
            if ended != "before it serves":
                group.start_soon(new.serve, Succession(NAMES, old))
                await reached.wait()
            new.scope.cancel()
            await anyio.sleep(2 * TIMING.linger)
            await old.gate.reopen(TIMING.list_end)
            await old.listed()
            await kubelet.wait_for(lambda: bool(old.held()))

        assert seen.least == dict.fromkeys(RESOURCES, 100)
        assert len(old.held()) == 3
        await kubelet.admit(pod("after", 3, RESOURCES[1]))
        assert len(old.held()) == 6
        old.scope.cancel()  # the kubelet knows whose end that is
        await kubelet.wait_for(lambda: kubelet.allocatable() == dict.fromkeys(RESOURCES, 0))
        group.cancel_scope.cancel()


async def test_step_that_failed_is_not_repeated(tmp_path: Path) -> None:
    """An old daemon that goes on is left alone: nothing is registered, and it is asked no more."""
    asked = 0

    class GoesOn(Daemon):
        async def expect_detach(self) -> None:
            nonlocal asked
            asked += 1
            raise TakeoverFailed("it goes on")

    (tmp_path / "device-plugins").mkdir()
    kubelet = simulated_kubelet(tmp_path)
    async with kubelet.running(), anyio.create_task_group() as group:
        succession = Succession(NAMES, GoesOn(kubelet))
        group.start_soon(Daemon(kubelet).serve, succession)
        with anyio.fail_after(30):
            while succession.failure is None:  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.005)
        await anyio.sleep(1.5)  # a task that failed would begin again after a second
        group.cancel_scope.cancel()

        assert asked == 1
        assert not any(kubelet.registrations.values())


async def test_gate_does_not_close_over_a_call_that_lasts() -> None:
    """A call that was let in, as one that waits for an instance, ends before the exchange."""
    gate, go_on = CallGate(), anyio.Event()

    async def own(request: bytes) -> bytes:
        await go_on.wait()
        return request

    async with anyio.create_task_group() as group:
        group.start_soon(gate.answer, ResourceName("a/b"), "/x", b"1", own)
        await anyio.sleep(0.01)

        assert not await gate.close(0.01)
        assert not gate.closed

        go_on.set()
        assert await gate.close(1)


async def test_calls_are_answered_until_the_old_daemon_is_registered_again(tmp_path: Path) -> None:
    """After a failed exchange, the connection of before answers until the next one is there."""
    (tmp_path / "device-plugins").mkdir()
    kubelet = simulated_kubelet(tmp_path)
    old = Daemon(kubelet)

    async with kubelet.running(), anyio.create_task_group() as group:
        group.start_soon(old.serve)
        await old.listed()
        assert await old.gate.close(1)
        old.gate.expect_detach()
        assert kubelet._process is not None
        kubelet._process.registration._clients.clear()  # as a registration that fails does
        await old.gate.reopen(TIMING.list_end)
        for number in range(30):
            await kubelet.admit(pod(f"pod-{number}", 1, RESOURCES[0]))
            await anyio.sleep(0.002)
        await old.listed()
        await kubelet.wait_for(lambda: kubelet.registrations[RESOURCES[0]] == 2)
        group.cancel_scope.cancel()
