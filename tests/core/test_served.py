"""What a backend may say and do about a GPU that it keeps."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

from metagpu.backends.fraction import FractionBackend
from metagpu.core import keeper as keeper_module
from metagpu.core.driver import ComputeMode
from metagpu.core.errors import DriverError
from metagpu.core.gpu import MIB
from metagpu.core.model import ResourceName
from metagpu.core.served import ServedGpu
from metagpu.sim.gpu import SimProcess
from tests.build import METAGPU, pool
from tests.heard import heard
from tests.served import Care, in_care

MIXED = pool().rstrip() + "\n      - {backend: timeslice, replicas: 4}\n"
TIMESLICE = MIXED.replace("- {backend: fraction, sharesPerGpu: 10}\n      ", "")


@dataclass
class Hands:
    """Fractions that make their GPUs ready and clean them, when a test says so.

    Attributes:
        served: what each `serve` was given, in order; `ended` those that were cancelled.
        failure: raised by every serve that begins.
    """

    served: list[ServedGpu] = field(default_factory=list)
    ended: list[ServedGpu] = field(default_factory=list)
    failure: Exception | None = None
    returns: bool = False
    leaving: anyio.Event = field(default_factory=anyio.Event)

    async def serve(self, served: ServedGpu) -> None:
        """Do as the test says."""
        self.served.append(served)
        if self.failure is not None:
            raise self.failure
        if self.returns:
            return
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await self.leaving.wait()
            self.ended.append(served)


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    """Let fractions ready and clean their GPUs."""
    made = Hands()
    made.leaving.set()

    async def serve(_: FractionBackend, served: ServedGpu) -> None:
        await made.serve(served)

    monkeypatch.setattr(FractionBackend, "serve", serve)
    monkeypatch.setattr(FractionBackend, "readies", True)
    monkeypatch.setattr(FractionBackend, "cleans", True)
    return made


@asynccontextmanager
async def dirty(hands: Hands, text: str = MIXED) -> AsyncIterator[tuple[Care, ServedGpu]]:
    """Keep a GPU whose last lease has just ended, while the block lasts."""
    async with in_care(text, boards="t4:1") as care:
        [served] = hands.served
        served.resume()
        part = care.share("fraction")
        care.grant(part)
        care.release(part)
        yield care, served


# --- readiness ------------------------------------------------------------------------------------


async def test_there_is_no_moment_before_it_is_ready(hands: Hands) -> None:
    """A backend that readies its GPU is suspended in the turn that puts its shares on offer."""
    async with in_care(MIXED.replace("sharesPerGpu: 10", "sharesPerGpu: 5")) as care:
        for served in hands.served:
            served.resume()
        assert care.state().suspended == {}

        with care.registry.news.subscribe() as news:
            care.keep(MIXED)
            assert list(care.state().suspended) == ["fraction"]
            told = news.__aiter__()
            kinds = [type(await anext(told)).__name__ for _ in range(3)]
        assert kinds == ["GpuKept", "GpuKept", "SharesOffered"]


async def test_a_gpu_that_stays_as_it_is_stays_ready(hands: Hands) -> None:
    """A layout that leaves a GPU and its options alone suspends nobody."""
    async with in_care(MIXED) as care:
        for served in hands.served:
            served.resume()
        care.keep(MIXED.replace("replicas: 4", "replicas: 5"))
        await care.settled()

        assert care.state().suspended == {}
        assert len(hands.served) == 2


async def test_a_backend_says_that_it_is_not_ready(hands: Hands) -> None:
    """It may suspend and resume as often as it needs; only its own shares are shut."""
    async with in_care(MIXED, boards="t4:1") as care:
        [served] = hands.served
        served.resume()
        assert care.state().shut == frozenset()

        served.suspend("its daemon died")
        assert care.state().suspended["fraction"].reason == "its daemon died"
        assert care.state().free(METAGPU) == 0
        assert {share.id for share in care.state().shares if share.id in care.state().shut} == {
            share.id for share in care.state().shares if share.backend == "fraction"
        }


async def test_who_is_replaced_is_not_heard(hands: Hands) -> None:
    """What an old serve says after its options changed says nothing of the new one."""
    async with in_care(MIXED, boards="t4:1") as care:
        [old] = hands.served
        old.resume()
        hands.leaving = anyio.Event()
        care.keep(MIXED.replace("sharesPerGpu: 10", "sharesPerGpu: 5"))
        await care.settled()
        old.resume()

        assert list(care.state().suspended) == ["fraction"]
        assert len(hands.served) == 1

        hands.leaving.set()
        await care.settled()
        old.suspend("gone")
        [_, new] = hands.served
        new.resume()
        assert care.state().suspended == {}
        old.suspend("gone")
        assert care.state().suspended == {}
        assert not old.returned(0)


async def test_a_failure_suspends_until_it_is_mended(hands: Hands) -> None:
    """Shares of a backend that failed are not on offer, and status says why."""
    hands.failure = ZeroDivisionError("no daemon")

    with heard(keeper_module):
        async with in_care(MIXED, boards="t4:1") as care:
            reason = care.state().suspended["fraction"].reason

    assert reason == "it failed (ZeroDivisionError: no daemon); it is tried again in 1 s"


async def test_who_readies_may_not_leave(hands: Hands) -> None:
    """A backend that ends by itself is told, and tried again: nobody else would clean the GPU."""
    hands.returns = True

    with heard(keeper_module) as logs:
        async with in_care(MIXED, boards="t4:1") as care:
            reason = care.state().suspended["fraction"].reason

    assert reason == "it left the GPU alone; it is tried again in 1 s"
    assert "a backend left its GPU alone" in [line["event"] for line in logs]


# --- cleaning -------------------------------------------------------------------------------------


async def test_a_backend_hears_that_its_gpu_is_dirty(hands: Hands) -> None:
    """It can wait for its last lease to end, and says when the GPU is anyone's again."""
    async with in_care(MIXED, boards="t4:1") as care, anyio.create_task_group() as group:
        [served] = hands.served
        served.resume()
        part = care.share("fraction")
        heard_at: list[float | None] = []

        async def wait() -> None:
            state = await served.until(lambda state: "fraction" in state.cleaning)
            assert state is care.state()
            heard_at.append(served.since_last_lease)

        group.start_soon(wait)
        care.grant(part)
        assert served.leased
        await care.settled()
        assert heard_at == []
        care.release(part)
        await care.settled()

        assert heard_at == [served.since_last_lease]
        assert care.state().free(ResourceName("nvidia.com/gpu.shared")) == 0
        assert served.since_last_lease is not None
        assert served.returned(served.since_last_lease)
        assert care.state().owner is None
        assert not served.returned(heard_at[0] or 0)


async def test_a_cut_that_is_gone_is_cleaned_first(hands: Hands) -> None:
    """A backend that leaves the layout keeps its GPU until it is clean; then others may have it."""
    async with dirty(hands) as (care, served):
        care.keep(TIMESLICE)
        await care.settled()
        assert hands.ended == []
        assert care.state().owner == "fraction"
        assert care.state().shut == {share.id for share in care.state().shares}

        assert served.since_last_lease is not None
        served.returned(served.since_last_lease)
        await care.settled()
        assert hands.ended == [served]
        assert care.state().owner is None
        assert care.state().cleans == frozenset()


async def test_a_cut_that_is_gone_waits_for_its_pods(hands: Hands) -> None:
    """While pods hold its shares a backend that left the layout goes on keeping the GPU."""
    async with in_care(MIXED, boards="t4:1") as care:
        [served] = hands.served
        served.resume()
        part = care.share("fraction")
        care.grant(part)
        care.keep(TIMESLICE)
        await care.settled()
        assert hands.ended == []

        care.release(part)
        assert care.state().owner == "fraction"
        served.returned(care.state().cleaning["fraction"])
        await care.settled()
        assert hands.ended == [served]


async def test_a_cut_that_comes_back_was_never_gone(hands: Hands) -> None:
    """A layout that is taken back while a GPU is being cleaned disturbs nobody."""
    async with dirty(hands) as (care, served):
        care.keep(TIMESLICE)
        await care.settled()
        care.keep(MIXED)
        await care.settled()
        assert served.since_last_lease is not None
        served.returned(served.since_last_lease)
        await care.settled()

        assert hands.served == [served]
        assert hands.ended == []
        assert care.state().owner is None
        assert care.state().suspended == {}


async def test_other_options_take_a_dirty_gpu_over(hands: Hands) -> None:
    """A serve that replaces another finds the GPU as it was left, and cleans it."""
    async with dirty(hands) as (care, old):
        care.keep(MIXED.replace("sharesPerGpu: 10", "sharesPerGpu: 5"))
        await care.settled()
        [_, new] = hands.served
        assert hands.ended == [old]
        assert new.since_last_lease is not None
        assert new.returned(new.since_last_lease)


async def test_an_idle_gpu_that_is_cut_no_more_is_left_at_once(hands: Hands) -> None:
    """There is nothing to clean on a GPU that was not its own."""
    async with in_care(MIXED, boards="t4:1") as care:
        care.keep(TIMESLICE)
        await care.settled()

        assert len(hands.ended) == 1
        assert care.state().suspended == {}
        assert care.state().cleans == frozenset()


async def test_a_cleaner_that_fails_after_its_cut_is_gone_keeps_nobody_waiting(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that nobody is left to clean is not its backend's for ever."""
    failing = anyio.Event()

    async def serve(_: FractionBackend, served: ServedGpu) -> None:
        hands.served.append(served)
        await failing.wait()
        raise ZeroDivisionError

    monkeypatch.setattr(FractionBackend, "serve", serve)
    with heard(keeper_module):
        async with dirty(hands) as (care, _):
            care.keep(TIMESLICE)
            await care.settled()
            assert care.state().owner == "fraction"
            failing.set()
            await care.settled()

            assert care.state().owner is None
            assert care.state().shut == frozenset()
            assert len(hands.served) == 1


async def test_a_cleaner_that_fails_is_tried_again(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its cut is in force a GPU stays its own: a dirty GPU is no one else's."""
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 0)
    failing = anyio.Event()

    async def serve(_: FractionBackend, served: ServedGpu) -> None:
        hands.served.append(served)
        if len(hands.served) > 1:
            await anyio.sleep_forever()
        await failing.wait()
        raise ZeroDivisionError

    monkeypatch.setattr(FractionBackend, "serve", serve)
    with heard(keeper_module):
        async with dirty(hands) as (care, _):
            failing.set()
            await care.settled()

            assert care.state().owner == "fraction"
            [_, again] = hands.served
            assert again.since_last_lease is not None
            again.returned(again.since_last_lease)
            assert care.state().owner is None


# --- NVML -----------------------------------------------------------------------------------------


async def test_a_backend_reads_its_gpus_processes_and_mode(hands: Hands) -> None:
    """It sees who is on its GPU, and may say who may be."""
    async with in_care(MIXED) as care:
        _, served = hands.served
        care.node.add_process(care.node.gpu(1), SimProcess(11, 512 * MIB))

        assert [process.pid for process in await served.processes()] == [11]
        assert await served.compute_mode() is ComputeMode.DEFAULT
        await served.set_compute_mode(ComputeMode.EXCLUSIVE_PROCESS)
        assert care.node.gpu(1).compute_mode is ComputeMode.EXCLUSIVE_PROCESS
        assert care.node.gpu(0).compute_mode is ComputeMode.DEFAULT

        care.node.root = False
        with pytest.raises(DriverError, match="only root may"):
            await served.set_compute_mode(ComputeMode.DEFAULT)
