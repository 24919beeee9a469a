"""Processes that the enforcer does not end."""

import signal
from pathlib import Path

import anyio
import pytest

from metagpu.core.config.memory import EnforcementPolicy, MemoryEnforcement
from metagpu.core.contracts.host import ProcessIdentity
from metagpu.core.model.shares import Holder
from metagpu.core.state.facts import LeasesObserved
from metagpu.core.usage import enforcer
from metagpu.core.usage.timing import DEFAULT_TIMING
from tests.core.usage.enforcer_rig import ALICE, BOB, SOON, ground, terms
from tests.rigs.build import layout_of
from tests.rigs.host import running
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes, skip


async def test_neighbours_and_unauthorized_processes_are_left_alone(tmp_path: Path) -> None:
    """Only the container that uses too much loses a process, whatever others have on the GPU."""
    async with (
        ground(tmp_path) as live_ground,
        running() as greedy,
        running() as neighbour,
        running() as of_the_host,
        running() as of_another_pod,
        running() as unknown,
    ):
        live_ground.hold(ALICE, 25)
        live_ground.hold(BOB, 25)
        live_ground.put(neighbour, 20, of=BOB)
        live_ground.put(of_the_host, 26, of=None)
        live_ground.put(of_another_pod, 10, of=Holder("default", "carol", "main"))
        live_ground.put(unknown, None, of=BOB)
        await live_ground.looked()
        live_ground.put(greedy, 35)

        assert await greedy.wait() == -signal.SIGTERM
        await live_ground.looked()
        for other in (neighbour, of_the_host, of_another_pod, unknown):
            assert other.returncode is None


async def test_unknown_memory_is_never_a_reason(tmp_path: Path) -> None:
    """A process of unknown memory is left alone."""
    async with ground(tmp_path) as live_ground, running() as unknown:
        live_ground.hold(ALICE, 1)
        live_ground.put(unknown, None)
        await live_ground.looked()

        assert unknown.returncode is None
        assert live_ground.enforcer.record.warnings == 0


async def test_an_exit_between_decision_and_signal_harms_no_other(tmp_path: Path) -> None:
    """A process that exits before its signal is logged, and no process is signalled."""
    async with ground(tmp_path) as live_ground, running() as greedy:
        live_ground.hold(ALICE, 25)

        async def leave() -> None:
            greedy.kill()
            await greedy.wait()

        live_ground.host.before = lambda _: leave()
        with capture_module_logs(enforcer) as entries:
            live_ground.put(greedy, 50)
            await becomes(lambda: len(entries) > 1)

        assert entries[1]["event"] == "process already gone"
        assert [who.pid for who in live_ground.host.refused] == [greedy.pid]
        assert live_ground.enforcer.record.signals[signal.SIGTERM] == 0


async def test_a_reused_pid_is_not_signalled(tmp_path: Path) -> None:
    """A process that has the pid of an ended one gets no signal."""
    async with ground(tmp_path) as live_ground, running() as process:
        live_ground.hold(ALICE, 25)
        stat = anyio.Path(live_ground.machine.proc / str(process.pid) / "stat")

        async def reuse(who: ProcessIdentity) -> None:
            now = await stat.read_text()
            await stat.unlink()
            await stat.write_text(now.replace(f" {who.started} ", f" {who.started + 1} ", 1))

        live_ground.host.before = reuse
        live_ground.put(process, 50)
        await becomes(lambda: bool(live_ground.host.refused))
        live_ground.host.before = lambda _: None
        live_ground.node.end_process(live_ground.node.gpu(0), process.pid)
        await live_ground.looked()

        assert process.returncode is None


async def test_a_dry_run_sends_no_signal(tmp_path: Path) -> None:
    """With `dryRun` the log has the processes and signals, and none is sent."""
    with capture_module_logs(enforcer) as entries:
        async with (
            ground(tmp_path, terms(stop_timeout=SOON, dry_run=True)) as live_ground,
            running() as greedy,
        ):
            live_ground.hold(ALICE, 25)
            live_ground.put(greedy, 50)
            await becomes(lambda: len(entries) == 3)
            await live_ground.looked()

            assert greedy.returncode is None
            assert live_ground.enforcer.record.signals[signal.SIGTERM] == 0

    assert [(entry["event"], entry.get("signal")) for entry in entries] == [
        ("gpu memory limit exceeded", None),
        ("process not signalled in a dry run", "SIGTERM"),
        ("process not signalled in a dry run", "SIGKILL"),
    ]


async def test_by_default_an_excess_is_only_logged(tmp_path: Path) -> None:
    """The default settings log a warning, and send no signal."""
    with capture_module_logs(enforcer) as entries:
        async with (
            ground(tmp_path, MemoryEnforcement(period=SOON)) as live_ground,
            running() as greedy,
        ):
            live_ground.hold(ALICE, 25)
            live_ground.put(greedy, 50)
            await becomes(lambda: bool(entries))
            await live_ground.looked()

            assert greedy.returncode is None
    assert [entry["policy"] for entry in entries] == ["warn"]


@pytest.mark.parametrize("policy", [EnforcementPolicy.OFF, EnforcementPolicy.REPORT])
async def test_policies_without_warnings_watch_nothing(
    tmp_path: Path, policy: EnforcementPolicy
) -> None:
    """Under `off` and `report` the enforcer does not check the GPUs."""
    async with ground(tmp_path, terms(policy)) as live_ground, running() as greedy:
        live_ground.hold(ALICE, 25)
        live_ground.put(greedy, 50)
        await anyio.wait_all_tasks_blocked()
        assert live_ground.host.looks == 0

        live_ground.terms = terms()
        assert await greedy.wait() == -signal.SIGTERM


SIDE_BY_SIDE = """
version: metagpu/v1
pools:
  - {{name: limited, gpus: {{index: 0}}, backends: [{{backend: {}}}]}}
  - {{name: enforced, gpus: {{index: 1}}, backends: [{{backend: fraction, sharesPerGpu: 100}}]}}
"""


@pytest.mark.parametrize("backend", ["whole", "mps"])
async def test_containers_that_others_limit_are_not_watched(backend: str, tmp_path: Path) -> None:
    """Containers of whole GPUs, and clients of MPS, are left alone: none is killed amid work."""
    async with ground(tmp_path) as live_ground, running() as greedy, running() as enforced:
        layout = layout_of(*live_ground.gpus, text=SIDE_BY_SIDE.format(backend))
        live_ground.registry.apply(layout.offer_fact)
        holders = {layout.shares[0].id: ALICE, layout.shares[-1].id: BOB}
        live_ground.registry.apply(LeasesObserved(holders, at=1))
        live_ground.put(greedy, 90)
        skip(2 * DEFAULT_TIMING.idle_period)  # until then a GPU without leases is not looked at
        live_ground.put(enforced, 90, gpu=1, of=BOB)

        assert await enforced.wait() == -signal.SIGTERM
        await live_ground.looked()
        assert greedy.returncode is None
