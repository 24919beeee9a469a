"""Whom the enforcer leaves alone."""

import signal
from pathlib import Path

import anyio
import pytest

from metagpu.core import enforcer
from metagpu.core.enforcement import Enforcement, Policy
from metagpu.core.facts import LeasesObserved
from metagpu.core.host import Identity
from metagpu.core.model import Holder
from tests.build import laid_out, pool
from tests.core.enforcer_rig import ALICE, BOB, SOON, ground, terms
from tests.heard import heard
from tests.host_rig import running
from tests.waiting import becomes


async def test_neighbours_and_strangers_are_left_alone(tmp_path: Path) -> None:
    """Only the container that uses too much loses a process, whatever others have on the GPU."""
    async with (
        ground(tmp_path) as it,
        running() as greedy,
        running() as neighbour,
        running() as of_the_host,
        running() as of_another_pod,
        running() as unknown,
    ):
        it.hold(ALICE, 25)
        it.hold(BOB, 25)
        it.put(neighbour, 20, of=BOB)
        it.put(of_the_host, 26, of=None)
        it.put(of_another_pod, 10, of=Holder("default", "carol", "main"))
        it.put(unknown, None, of=BOB)
        await it.looked()
        it.put(greedy, 35)

        assert await greedy.wait() == -signal.SIGTERM
        await it.looked()
        for other in (neighbour, of_the_host, of_another_pod, unknown):
            assert other.returncode is None


async def test_unknown_memory_is_never_a_reason(tmp_path: Path) -> None:
    """A process of which the driver does not say how much it has is left alone."""
    async with ground(tmp_path) as it, running() as unknown:
        it.hold(ALICE, 1)
        it.put(unknown, None)
        await it.looked()

        assert unknown.returncode is None
        assert it.enforcer.tally.warnings == 0


async def test_who_exits_between_decision_and_signal_harms_nobody(tmp_path: Path) -> None:
    """A process that goes by itself just then is told as such, and nobody is signalled."""
    async with ground(tmp_path) as it, running() as greedy:
        it.hold(ALICE, 25)

        async def leave() -> None:
            greedy.kill()
            await greedy.wait()

        it.host.before = lambda _: leave()
        with heard(enforcer) as entries:
            it.put(greedy, 50)
            await becomes(lambda: len(entries) > 1)

        assert entries[1]["event"] == "a process that was to be ended has gone by itself"
        assert [who.pid for who in it.host.refused] == [greedy.pid]
        assert it.enforcer.tally.signals[signal.SIGTERM] == 0


async def test_a_pid_that_was_given_away_is_not_signalled(tmp_path: Path) -> None:
    """If the pid is another's by the time of the signal, that other does not notice."""
    async with ground(tmp_path) as it, running() as process:
        it.hold(ALICE, 25)
        stat = anyio.Path(it.machine.proc / str(process.pid) / "stat")

        async def reuse(who: Identity) -> None:
            now = await stat.read_text()
            await stat.unlink()
            await stat.write_text(now.replace(f" {who.started} ", f" {who.started + 1} ", 1))

        it.host.before = reuse
        it.put(process, 50)
        await becomes(lambda: bool(it.host.refused))
        it.host.before = lambda _: None
        it.node.end_process(it.node.gpu(0), process.pid)
        await it.looked()

        assert process.returncode is None


async def test_a_dry_run_only_tells(tmp_path: Path) -> None:
    """With `dryRun` the log says who would be ended by which signal, and nobody is."""
    with heard(enforcer) as entries:
        async with (
            ground(tmp_path, terms(dry_run=True)) as it,
            running() as greedy,
        ):
            it.hold(ALICE, 25)
            it.put(greedy, 50)
            await becomes(lambda: len(entries) == 3)
            await it.looked()

            assert greedy.returncode is None
            assert it.enforcer.tally.signals[signal.SIGTERM] == 0

    assert [(entry["event"], entry.get("signal")) for entry in entries] == [
        ("a container uses more GPU memory than it may", None),
        ("dry run: a process would be ended, its container uses too much", "SIGTERM"),
        ("dry run: a process would be ended, its container uses too much", "SIGKILL"),
    ]


async def test_by_default_an_excess_is_only_told(tmp_path: Path) -> None:
    """Without settings there is a warning, and no signal."""
    with heard(enforcer) as entries:
        async with ground(tmp_path, Enforcement(period=SOON)) as it, running() as greedy:
            it.hold(ALICE, 25)
            it.put(greedy, 50)
            await becomes(lambda: bool(entries))
            await it.looked()

            assert greedy.returncode is None
    assert [entry["policy"] for entry in entries] == ["warn"]


@pytest.mark.parametrize("policy", [Policy.OFF, Policy.REPORT])
async def test_who_is_not_to_be_warned_is_not_watched(tmp_path: Path, policy: Policy) -> None:
    """`off` and `report` cost nothing: nobody looks, until the policy is another."""
    async with ground(tmp_path, terms(policy)) as it, running() as greedy:
        it.hold(ALICE, 25)
        it.put(greedy, 50)
        await anyio.wait_all_tasks_blocked()
        assert it.host.looks == 0

        it.terms = terms()
        assert await greedy.wait() == -signal.SIGTERM


async def test_who_is_guarded_otherwise_is_not_watched(tmp_path: Path) -> None:
    """Who has a GPU alone, or is kept within its share by the hardware, needs no enforcer."""
    async with ground(tmp_path) as it, running() as greedy:
        whole = laid_out(
            it.gpus[0], text=pool().replace("fraction", "whole").replace(", sharesPerGpu: 10", "")
        )
        it.registry.apply(whole.offered)
        it.registry.apply(LeasesObserved({whole.shares[0].id: ALICE}, at=1))
        it.put(greedy, 90)
        await anyio.wait_all_tasks_blocked()

        assert it.host.looks == 0
        assert greedy.returncode is None
