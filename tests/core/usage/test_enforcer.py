"""The enforcer at work, on real processes of this machine that use simulated GPUs."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest
from anyio.lowlevel import checkpoint

from metagpu.core.config.memory import EnforcementPolicy
from metagpu.core.config.units import Duration
from metagpu.core.contracts.host import ProcessIdentity
from metagpu.core.errors import HostError
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder
from metagpu.core.runtime import tasks
from metagpu.core.state.events import MemoryExceeded, ProcessSignalled
from metagpu.core.state.facts import PodsListed
from metagpu.core.usage import collector, enforcer
from metagpu.core.usage.accounting import ContainerUsage, GpuUsage
from metagpu.core.usage.enforcer import CheckMoments
from metagpu.sim.kubelet.kubelet import SimContainer, SimKubelet, SimPod
from metagpu.sim.machine.containers import SimHost, container_of
from metagpu.sim.machine.gpu import SimProcess
from tests.core.usage.enforcer_rig import (
    ALICE,
    BOB,
    LIMIT_OF_25,
    LONG,
    PERCENT,
    SOON,
    Ground,
    Watched,
    ground,
    terms,
)
from tests.rigs.agent import METAGPU, agent_at_work
from tests.rigs.host import running
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes, until

STUBBORN: Final = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print(flush=True)\n"
    "time.sleep(60)"
)

NEGLECTFUL: Final = (
    "import subprocess, time\n"
    "child = subprocess.Popen(['sleep', '60'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)"
)
"""A parent that never asks how its child has ended: the child stays in the process table."""
NO_PID: Final = 2**22 + 1
"""No process has it: PID_MAX_LIMIT of linux/threads.h is less."""


# --- who is ended ---------------------------------------------------------------------------------


async def test_two_processes_that_are_too_large_together_are_caught(tmp_path: Path) -> None:
    """Of two processes of 15 % in a container of 25 %, one is ended, and the log has numbers."""
    with capture_module_logs(enforcer) as entries:
        async with ground(tmp_path) as live_ground, running() as one, running() as other:
            live_ground.hold(ALICE, 25)
            live_ground.put(one, 15)
            await live_ground.looked()
            assert one.returncode is None
            assert entries == []

            live_ground.put(other, 15)
            await becomes(lambda: any(entry["event"] == "process signalled" for entry in entries))
            ended = one if entries[1]["pid"] == one.pid else other
            assert await ended.wait() == -signal.SIGTERM
            await live_ground.looked()
            assert {one, other} - {ended} == {p for p in (one, other) if p.returncode is None}
            assert live_ground.enforcer.record.warnings == 1
            assert live_ground.enforcer.record.signals == {signal.SIGTERM: 1, signal.SIGKILL: 0}

    common = {
        "container": "default/alice (main)",
        "gpu": str(live_ground.gpus[0]),
        "share_mib": 10240,
        "limit_mib": LIMIT_OF_25,
        "used_mib": 12287,
        "log_level": "warning",
    }
    assert entries[0] == {
        "event": "gpu memory limit exceeded",
        "policy": "kill",
        **common,
    }
    assert entries[1] == {
        "event": "process signalled",
        "pid": ended.pid,
        "process_mib": 6143,
        "signal": "SIGTERM",
        **common,
    }


async def test_names_that_the_kubelet_cuts_hide_no_excess(tmp_path: Path) -> None:
    """A container whose link is another's by its length is ended for its excess, and alone."""
    idle, greedy = (Holder("n" * 63, "p" * 150, "c" * 62 + end) for end in "ab")
    async with (
        ground(tmp_path) as live_ground,
        running() as one,
        running() as other,
        running() as neighbour,
    ):
        live_ground.hold(greedy, 1)
        live_ground.hold(BOB, 25)
        live_ground.put(one, 1, of=idle)
        live_ground.put(neighbour, 20, of=BOB)
        with capture_module_logs(collector) as entries:
            live_ground.put(other, 22, of=greedy)

            assert await other.wait() == -signal.SIGTERM
        live_ground.node.end_process(live_ground.node.gpu(0), other.pid)
        await live_ground.looked()
        assert (one.returncode, neighbour.returncode) == (None, None)

    containers = {container_of(holder).id[:12] for holder in (idle, greedy)}
    assert {entry["container"] for entry in entries} == containers


async def test_the_api_servers_pods_name_those_of_unknown_containers(tmp_path: Path) -> None:
    """Without the kubelet's links, a container is charged to the pod that has its uid."""
    async with ground(tmp_path) as live_ground, running() as greedy:
        live_ground.hold(ALICE, 1)
        live_ground.put(greedy, 50)
        live_ground.machine.remove_log_links()
        await live_ground.looked()
        assert greedy.returncode is None

        pod = KnownPod(container_of(ALICE).pod_uid, ALICE.namespace, ALICE.pod)
        live_ground.registry.apply(PodsListed((pod,)))
        assert await greedy.wait() == -signal.SIGTERM


async def test_a_zombie_that_is_still_listed_protects_no_other(tmp_path: Path) -> None:
    """The container's next process ends where the first has ended and its parent ignores it."""
    async with (
        ground(tmp_path, terms(stop_timeout=SOON)) as live_ground,
        running(sys.executable, "-c", NEGLECTFUL) as parent,
        running() as rest,
    ):
        assert parent.stdout is not None
        child = int(await parent.stdout.receive())
        live_ground.hold(ALICE, 25)
        live_ground.put_pid(child, 40)
        live_ground.put(rest, 30)

        assert await rest.wait() == -signal.SIGTERM

        async def is_zombie() -> bool:
            return " Z " in await anyio.Path(f"/proc/{child}/stat").read_text()

        await until(is_zombie)


async def test_a_process_with_the_pid_of_a_listed_one_is_left_alone(tmp_path: Path) -> None:
    """A process that gets the pid of an ended process is not charged with its memory."""
    async with ground(tmp_path) as live_ground:
        live_ground.hold(ALICE, 25)
        live_ground.hold(BOB, 25)
        await reuse_pid(live_ground, of=BOB)
        await live_ground.looked()

        assert live_ground.enforcer.record.warnings == 0
        assert not live_ground.host.refused


async def test_a_pod_gains_nothing_by_the_pid_of_its_own_ended_process(tmp_path: Path) -> None:
    """A process with the pid of an earlier one of its pod is judged like any other."""
    async with ground(tmp_path) as live_ground:
        live_ground.hold(ALICE, 25)
        await reuse_pid(live_ground, of=ALICE)

        await becomes(lambda: bool(live_ground.host.refused))
        assert live_ground.enforcer.record.warnings == 1


async def reuse_pid(node: Ground, *, of: Holder) -> None:
    """Put a process over its limit on the GPU, by the pid of an ended one of `ALICE` there.

    The pid is a number that no process has, so that none is signalled.
    """
    async with running() as process:
        node.machine.add_container_process(NO_PID, ALICE, real=process.pid)
        node.node.start_process(node.node.gpu(0), SimProcess(NO_PID, 20 * PERCENT))
        await node.looked()
    async with running() as process:
        copy = anyio.Path(node.machine.folder / "stat")
        await copy.write_bytes(await anyio.Path(f"/proc/{process.pid}/stat").read_bytes())
        shown = anyio.Path(node.machine.proc / str(NO_PID) / "stat")
        await shown.unlink()
        await shown.symlink_to(copy)
        node.machine.add_container_process(NO_PID, of)
        node.node.start_process(node.node.gpu(0), SimProcess(NO_PID, 50 * PERCENT))


async def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """A process that ignores SIGTERM gets SIGKILL after the stop timeout."""
    async with (
        ground(tmp_path, terms(stop_timeout=SOON)) as live_ground,
        running(sys.executable, "-c", STUBBORN) as stubborn,
    ):
        assert stubborn.stdout is not None
        await stubborn.stdout.receive()
        live_ground.hold(ALICE, 25)
        live_ground.put(stubborn, 50)

        assert await stubborn.wait() == -signal.SIGKILL
        await live_ground.looked()
        assert live_ground.enforcer.record.signals == {signal.SIGTERM: 1, signal.SIGKILL: 1}


async def test_the_bus_has_warning_and_end(tmp_path: Path) -> None:
    """Subscribers learn which container used how much of its limit, and which process ends."""
    async with ground(tmp_path) as live_ground, running() as greedy:
        news = live_ground.registry.events
        with news.subscribe(MemoryExceeded, ProcessSignalled) as events:
            live_ground.hold(ALICE, 25)
            live_ground.put(greedy, 50)
            heard_of = [event async for event, _ in _take_numbered(events, 2)]

    exceeded, signalled = heard_of
    assert isinstance(exceeded, MemoryExceeded)
    assert isinstance(signalled, ProcessSignalled)
    assert exceeded.holder == signalled.holder == ALICE
    assert (exceeded.used, exceeded.share) == (50 * PERCENT, 10240 * MIB)
    assert exceeded.limit // MIB == LIMIT_OF_25
    assert exceeded.will_end
    assert (signalled.pid, signalled.signal) == (greedy.pid, "SIGTERM")


async def _take_numbered(events: Any, count: int) -> AsyncIterator[tuple[Any, int]]:  # noqa: ANN401
    with anyio.fail_after(30):
        number = 0
        async for event in events:
            number += 1
            yield event, number
            if number == count:
                return


async def test_a_hanging_gpu_delays_no_other(tmp_path: Path) -> None:
    """While NVML hangs over one GPU, a container of another is kept within its limit."""
    async with ground(tmp_path) as live_ground, running() as greedy:
        live_ground.node.hang_gpu(live_ground.node.gpu(0), 4)
        live_ground.hold(ALICE, 25, gpu=0)
        live_ground.hold(BOB, 25, gpu=1)
        live_ground.put(greedy, 90, gpu=1, of=BOB)

        assert await greedy.wait() == -signal.SIGTERM
        live_ground.node.reset_gpu(live_ground.node.gpu(0))


async def test_the_end_of_a_grace_is_one_check(tmp_path: Path) -> None:
    """A container above its limit is checked when that begins, and when the grace ends."""
    checks = 0

    async with ground(tmp_path) as live_ground, running() as greedy:
        collect = live_ground.enforcer._collector.collect_gpu

        async def count(gpu: GpuId) -> GpuUsage:
            nonlocal checks
            checks += gpu == live_ground.gpus[1].id
            return await collect(gpu)

        live_ground.enforcer._collector.collect_gpu = count  # type: ignore[method-assign]
        live_ground.terms = msgspec.structs.replace(
            terms(), period=Duration(1e9), grace=Duration(0.2)
        )
        live_ground.put(greedy, 90, gpu=1, of=BOB)
        live_ground.hold(BOB, 25, gpu=1)
        assert await greedy.wait() == -signal.SIGTERM
    assert checks == 2


async def test_checks_of_all_gpus_come_at_the_same_moments() -> None:
    """Checks share threads so: the next moment is one for all GPUs, and in its period."""
    moments = CheckMoments()
    with turned_clock() as clock:
        for now in (0.0, 7.3, 7.49, 7.5, 1e6 + 0.1):
            clock.now = now
            pause = moments.seconds_to_next(0.5)
            assert 0.01 <= pause <= 1.01
            clock.now += pause / 2  # another GPU's check took longer
            assert moments.seconds_to_next(0.5) == pytest.approx(pause / 2, abs=1e-6) or (
                pause / 2 < 0.01
            )


async def test_no_container_can_be_within_its_limit_at_each_check() -> None:
    """A container that is within its limit around each multiple of the period is seen above it."""
    moments, checks, above = CheckMoments(), 0, 0
    with turned_clock() as clock:
        while clock.now < 200:
            clock.now += moments.seconds_to_next(0.5)
            checks += 1
            above += 0.06 < clock.now % 0.5 < 0.46

    assert 380 <= checks <= 401  # on average, as many as there are periods
    assert above > 200


async def test_the_enforcer_waits_for_common_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each GPU is checked again at the moment of its period, with a container or without."""
    monkeypatch.setattr(CheckMoments, "seconds_to_next", lambda *_: 0.01)
    async with ground(tmp_path, msgspec.structs.replace(terms(), period=LONG)) as live_ground:
        live_ground.hold(ALICE, 25, gpu=0)
        await live_ground.looked()


class Clock:
    """The time of the loop in a test."""

    now = 0.0


@contextmanager
def turned_clock() -> Iterator[Clock]:
    """Set the loop's time by the test while the block lasts; nothing may wait in it."""
    clock, loop = Clock(), asyncio.get_running_loop()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "time", lambda: clock.now)
        yield clock


async def test_a_fault_over_one_gpu_ends_nothing_for_another(tmp_path: Path) -> None:
    """An unexpected error over one GPU delays the checks of this GPU alone."""
    with capture_module_logs(tasks) as entries:
        async with ground(tmp_path) as live_ground, running() as process:
            account = live_ground.enforcer._collector.collect_gpu

            async def faulty(gpu: Any) -> Any:  # noqa: ANN401 - as the census' own
                if gpu == live_ground.gpus[0].id:
                    raise KeyError("a fault of ours")
                return await account(gpu)

            live_ground.enforcer._collector.collect_gpu = faulty  # type: ignore[method-assign]
            live_ground.hold(BOB, 1, gpu=0)
            live_ground.hold(ALICE, 1, gpu=1)
            live_ground.put(process, 50, gpu=1)
            with anyio.fail_after(30):
                await process.wait()

    assert [entry["task"] for entry in entries] == [
        f"memory enforcement of {live_ground.gpus[0].id}"
    ]


# --- what changes while it runs -------------------------------------------------------------------


async def test_the_agent_enforces_the_settings_of_its_pool(tmp_path: Path) -> None:
    """The agent enforces the pool's configuration, also after a reload."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - name: all\n    memoryEnforcement: {policy: POLICY, headroom: 1Gi, period: 50ms}\n"
        "    backends: [{backend: fraction, sharesPerGpu: 100}]\n"
    )
    machine = SimHost(tmp_path)
    off, kill = text.replace("POLICY", "off"), text.replace("POLICY", "kill")
    scene = agent_at_work(tmp_path, config=off, host=machine.host)

    async with scene as live_scene, running() as greedy:
        await live_scene.until(200, 200)
        await live_scene.kubelet.admit(SimPod.single("alice", {METAGPU: 25}))
        await live_scene.wait_holders()
        machine.add_container_process(greedy.pid, ALICE)
        [index] = [
            state.gpu.index
            for state in live_scene.agent.registry.snapshot.gpus.values()
            if state.leases
        ]
        live_scene.node.start_process(
            live_scene.node.gpu(index), SimProcess(greedy.pid, 50 * PERCENT)
        )
        asked = await live_scene.usage()
        assert isinstance(asked, dict)
        [container] = asked["containers"]
        [part] = container["gpus"]
        assert (container["pod"], part["usedMiB"], part["policy"]) == ("alice", 20479, "off")
        assert [process["pid"] for process in part["processes"]] == [greedy.pid]

        await anyio.Path(live_scene.config_file).write_text(kill)
        await live_scene.agent.reload()

        assert await greedy.wait() == -signal.SIGTERM


async def test_a_restart_with_other_shares_ends_no_process(tmp_path: Path) -> None:
    """A holder of 5 of 10 shares is not limited to 5 of 100 after a restart with other shares."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - name: all\n    memoryEnforcement: {policy: kill, period: 20ms, grace: 0s}\n"
        "    backends: [{backend: fraction, sharesPerGpu: COUNT}]\n"
    )
    machine = SimHost(tmp_path)
    watched = Watched(machine.host)
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    uid = container_of(ALICE).pod_uid
    pod = SimPod("alice", uid=uid, containers=(SimContainer("main", {METAGPU: 5}),))

    async with kubelet.running(), running() as modest:
        machine.add_container_process(modest.pid, ALICE)
        few, many = (text.replace("COUNT", count) for count in ("10", "100"))
        async with agent_at_work(tmp_path, "a100-40gb:1", few, kubelet=kubelet) as agent:
            await agent.until(10, 10)
            await kubelet.admit(pod)
        again = agent_at_work(tmp_path, "a100-40gb:1", many, kubelet=kubelet, host=watched)
        async with again as scene:
            await scene.wait_snapshot(lambda now: any(state.leases for state in now.gpus.values()))
            scene.node.start_process(scene.node.gpu(0), SimProcess(modest.pid, 40 * PERCENT))
            wanted = watched.looks + 5
            await becomes(lambda: watched.looks >= wanted)
            assert modest.returncode is None

            scene.node.start_process(scene.node.gpu(0), SimProcess(modest.pid, 60 * PERCENT))
            assert await modest.wait() == -signal.SIGTERM


async def test_the_excess_is_reported_while_it_lasts(tmp_path: Path) -> None:
    """The stats have the bytes above the limit while a container is above it."""
    async with ground(tmp_path, terms(EnforcementPolicy.WARN)) as live_ground, running() as greedy:
        over = live_ground.enforcer.record.over_limit
        gpu = live_ground.gpus[0].id
        live_ground.hold(ALICE, 25)
        live_ground.put(greedy, 50)
        await becomes(lambda: bool(over.get(gpu)))
        assert {holder: above // MIB for holder, above in over[gpu].items()} == {
            ALICE: 20480 - LIMIT_OF_25 - 1
        }

        live_ground.put(greedy, 20)
        await becomes(lambda: not over[gpu])


async def test_a_gpu_that_does_not_answer_is_logged_once(tmp_path: Path) -> None:
    """A GPU that does not answer is not enforced, and each reason is logged once."""
    with capture_module_logs(enforcer) as entries:
        async with ground(tmp_path) as live_ground, running() as process:
            live_ground.hold(ALICE, 25)
            live_ground.node.lose_gpu(live_ground.node.gpu(0))
            await becomes(lambda: bool(entries))
            live_ground.node.reset_gpu(live_ground.node.gpu(0))
            live_ground.put(process, 1)
            await live_ground.looked()

    [entry] = entries
    assert entry["event"] == "gpu memory not enforced"
    assert "the GPU is lost" in entry["error"]


async def test_a_check_of_many_containers_leaves_others_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tasks run several times while a check judges a hundred containers."""
    turns: list[int] = []

    async with ground(tmp_path, terms(EnforcementPolicy.OFF)) as live_ground:
        first = live_ground.gpus[0].id
        shares = live_ground.registry.snapshot.gpus[first].shares
        many = [
            ContainerUsage(first, Holder("team", f"pod-{number}", "main"), None, (one,))
            for number, one in enumerate(shares)
        ]

        async def collected(gpu: GpuId) -> GpuUsage:
            turns.clear()
            return GpuUsage(gpu, tuple(many))

        async def count() -> None:
            while True:
                turns.append(1)
                await checkpoint()

        monkeypatch.setattr(live_ground.enforcer._collector, "collect_gpu", collected)
        async with anyio.create_task_group() as group:
            group.start_soon(count)
            while not turns:
                await checkpoint()
            await live_ground.enforcer._check(first, terms(), {})
            group.cancel_scope.cancel()

    assert len(turns) >= 4


async def test_a_refusal_of_the_kernel_is_logged(tmp_path: Path) -> None:
    """A signal that the kernel refuses is logged, and the daemon goes on."""

    def refuse(_: ProcessIdentity) -> None:
        raise HostError("we may not")

    with capture_module_logs(enforcer) as entries:
        async with (
            ground(tmp_path, terms(stop_timeout=SOON)) as live_ground,
            running() as greedy,
        ):
            live_ground.host.before = refuse
            live_ground.hold(ALICE, 25)
            live_ground.put(greedy, 50)
            await becomes(lambda: len(entries) == 3)
            await live_ground.looked()

            assert greedy.returncode is None
    assert [entry.get("error") for entry in entries] == [None, "we may not", "we may not"]


async def test_unknown_containers_of_processes_are_logged_once(tmp_path: Path) -> None:
    """If the containers of processes cannot be known, the first check logs the reason."""
    with capture_module_logs(enforcer) as entries:
        async with ground(tmp_path) as live_ground, running() as process:
            live_ground.host.advice = ("mount this",)
            live_ground.hold(ALICE, 25)
            live_ground.put(process, 1)
            await live_ground.looked()

    assert [(entry["event"], entry["reason"]) for entry in entries] == [
        ("gpu memory not enforced", "mount this")
    ]
