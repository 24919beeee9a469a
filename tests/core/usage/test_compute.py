"""Containers that take more of a GPU's time than their shares give, and for how long."""

import os
import time
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from metagpu.core.config.config import parse
from metagpu.core.config.errors import ConfigError
from metagpu.core.config.memory import ComputeEnforcement, ComputePolicy, EnforcementPolicy
from metagpu.core.config.units import Duration
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import Holder
from metagpu.core.state.events import TimeExceeded
from metagpu.core.state.facts import GpusFound, LeasesObserved, SharesClaimed
from metagpu.core.usage.accounting import ContainerUsage, GpuUsage, ProcessUsage
from metagpu.core.usage.collector import UsageCollector
from metagpu.core.usage.compute import (
    REPEAT,
    ComputeWatch,
    Overuse,
    TimeUse,
    excess,
    time_uses,
)
from metagpu.core.usage.timing import UsageTiming
from metagpu.sim.machine.gpu import SimProcess
from tests.core.usage.enforcer_rig import ALICE, BOB, Ground, ground, terms
from tests.rigs.build import BACKENDS, after, gpu, layout_of
from tests.rigs.waiting import skip, stop_clock

CAROL = Holder("default", "carol", "main")


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        pytest.param({ALICE: (0.1, 100, 1)}, {}, id="alone"),
        pytest.param({ALICE: (0.1, 100, 1), BOB: (0.9, 0, 0)}, {}, id="beside-an-idle-one"),
        pytest.param({ALICE: (0.25, 50, 1), BOB: (0.75, 50, 1)}, {ALICE: 25}, id="equal-slices"),
        pytest.param({ALICE: (0.5, 50, 1), BOB: (0.5, 50, 1)}, {}, id="equal-shares"),
        pytest.param({ALICE: (0.5, 75, 3), BOB: (0.5, 25, 1)}, {ALICE: 25}, id="three-processes"),
        pytest.param({ALICE: (0.5, 75, 1), BOB: (0.5, 25, 1)}, {}, id="the-other-asks-for-less"),
        pytest.param({ALICE: (0.1, 35, 1), BOB: (0.9, 65, 1)}, {ALICE: 25}, id="few-shares"),
        pytest.param({ALICE: (0.25, 40, 1), BOB: (0.75, 40, 1)}, {}, id="a-gpu-with-time-left"),
        pytest.param({ALICE: (0.45, 52, 1), BOB: (0.5, 48, 1)}, {}, id="within-the-tolerance"),
        pytest.param(
            {ALICE: (0.2, 45, 1), BOB: (0.2, 10, 1), CAROL: (0.6, 45, 1)},
            {ALICE: 22.5},
            id="what-a-modest-one-leaves-is-divided",
        ),
        pytest.param(
            {ALICE: (0.2, 80, 1), BOB: (0.1, 15, 1), CAROL: (0.7, 5, 1)}, {}, id="nobody-else-wants"
        ),
        pytest.param(
            {ALICE: (0.5, 50, 1), None: (0, 50, 1)}, {}, id="a-process-without-a-share-takes-it"
        ),
        pytest.param({None: (0, 95, 1), ALICE: (0.5, 5, 1)}, {}, id="no-share-at-all"),
        pytest.param({}, {}, id="nothing"),
    ],
)
def test_who_takes_more_than_the_shares_give(
    uses: dict[Holder | None, tuple[float, int, int]], expected: dict[Holder, float]
) -> None:
    """Weights are shares; nobody is named unless others want more and the GPU has no time left."""
    found = excess({holder: TimeUse(*use) for holder, use in uses.items()})
    assert found == pytest.approx(expected)


def test_the_shares_of_an_init_container_are_its_part() -> None:
    """No lease names it, or the main container of its pod has the lease."""
    layout = layout_of(gpu(0))
    share = layout.shares[0]
    for fact in (SharesClaimed((share,), at=1), LeasesObserved({share.id: ALICE}, at=1)):
        [state] = after(GpusFound((gpu(0),), at=0), layout.offer_fact, fact).gpus.values()
        prepare = replace(ALICE, container="prepare")
        processes = (ProcessUsage(7, MIB, None),)
        usage = ContainerUsage(share.gpu, prepare, "uid", (share,), processes)
        account, guards = GpuUsage(share.gpu, (usage,)), {"fraction": MemoryGuard.ENFORCER}
        assert time_uses(state, account, {7: 50}, guards)[prepare] == (0.1, 50, 1)


def test_it_is_due_after_the_window_and_once_in_an_hour() -> None:
    """A break begins the window anew, and adds nothing to the seconds."""
    state, reports = Overuse(0), []
    readings = [(10, 25), (20, 25), (30, 0), *((now, 25) for now in range(40, 8000, 10))]
    for now, more in readings:
        state = state.after(more, now, window=60, gap=20)
        if state.is_due:
            reports.append((now, state.lasting))
            state = Overuse(state.at, state.seconds, state.since, state.lasting, reported=now)
    assert reports == [(100, 60), (100 + REPEAT, 60 + REPEAT), (100 + 2 * REPEAT, 60 + 2 * REPEAT)]
    assert state.seconds == pytest.approx((7990 - 10) * 0.25)
    assert state.after(25, 9000, 60, gap=20).seconds - state.seconds == pytest.approx(5)


def compute(live: Ground, pid: int, of: Holder, load: int = 100) -> None:
    """Start a process of a container that computes."""
    live.machine.add_container_process(pid, of, real=os.getpid())
    live.node.start_process(live.node.gpu(0), SimProcess(pid, MIB, sm=load))


async def later(live: Ground, watch: ComputeWatch) -> None:
    """Read the use a period later, by the loop's clock and the GPU's."""
    skip(10)
    live.node.turn_clock(10)
    await watch._check()


async def test_a_container_is_reported_while_others_want_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alice has a quarter of the GPU and half of its time while Bob computes too."""
    settings = ComputeEnforcement(policy=ComputePolicy.REPORT, window=Duration(30))
    guards = {"fraction": MemoryGuard.ENFORCER}
    async with ground(tmp_path, terms(EnforcementPolicy.OFF)) as live:
        monkeypatch.setattr(time, "time", lambda: live.node.now / 1e6)
        collector = UsageCollector(live.enforcer._collector._driver, live.host, live.registry)
        watch = ComputeWatch(
            live.registry, collector.collect, lambda _: settings, guards, UsageTiming()
        )
        live.hold(ALICE, 25)
        live.hold(BOB, 75)
        gpu = live.gpus[0].id
        compute(live, 7001, ALICE)
        stop_clock()
        with live.registry.events.subscribe(TimeExceeded) as news:
            for _ in range(5):
                await later(live, watch)
            assert (watch.found[gpu, ALICE].seconds, watch.found[gpu, ALICE].since) == (0, None)

            compute(live, 7002, BOB)
            for _ in range(5):
                await later(live, watch)
            with anyio.fail_after(30):
                event = await anext(aiter(news))
            assert isinstance(event, TimeExceeded)
        assert watch.found[gpu, BOB].seconds == 0
        assert watch.found[gpu, ALICE].seconds == pytest.approx(12.5, abs=1.5)
        assert event.holder == ALICE
        assert (event.used, event.given, event.seconds) == pytest.approx((50, 25, 30), abs=3)

        settings = ComputeEnforcement()
        await watch._check()
        assert watch.found == {}


@pytest.mark.parametrize(
    ("backends", "problem"),
    [
        ("{backend: mps}", "with mps each container has its own compute; remove it"),
        (
            "{backend: mig, existing: true}, {backend: whole}",
            "with mig and whole each container has its own compute; remove it",
        ),
        ("{backend: mps}, {backend: fraction}", ""),
        ("", ""),
    ],
)
def test_a_pool_that_gives_compute_by_itself_refuses_it(backends: str, problem: str) -> None:
    """One line says that the key has no effect; one backend that shares time is enough."""
    text = (
        "version: metagpu/v1\npools:\n  - name: all\n"
        "    computeEnforcement: {policy: report}\n"
        f"    backends: [{backends}]\n"
    )
    if not problem:
        parse(text, "metagpu.yaml", BACKENDS)
        return
    with pytest.raises(ConfigError, match=f"pools\\[0\\].computeEnforcement: {problem}"):
        parse(text, "metagpu.yaml", BACKENDS)
