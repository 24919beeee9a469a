"""The enforcer at work, on real processes of this machine that use simulated GPUs."""

import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import anyio

from metagpu.core import endurance, enforcer
from metagpu.core.enforcement import Policy
from metagpu.core.errors import HostError
from metagpu.core.gpu import MIB
from metagpu.core.host import Identity
from metagpu.core.news import MemoryExceeded, ProcessSignalled
from metagpu.sim.gpu import SimProcess
from metagpu.sim.host import SimHost, container_of
from metagpu.sim.kubelet import Container, Pod, SimKubelet
from tests.agent_rig import METAGPU, agent_at_work
from tests.core.enforcer_rig import ALICE, BOB, LIMIT_OF_25, PERCENT, Watched, ground, terms
from tests.heard import heard
from tests.host_rig import running
from tests.waiting import becomes

STUBBORN: Final = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print(flush=True)\n"
    "time.sleep(60)"
)


# --- who is ended ---------------------------------------------------------------------------------


async def test_two_processes_that_are_too_large_together_are_caught(tmp_path: Path) -> None:
    """Two of 15 % each in a container of 25 %: one is ended, and the log says why in figures."""
    with heard(enforcer) as entries:
        async with ground(tmp_path) as it, running() as one, running() as other:
            it.hold(ALICE, 25)
            it.put(one, 15)
            await it.looked()
            assert one.returncode is None
            assert entries == []

            it.put(other, 15)
            await becomes(lambda: any("being ended" in entry["event"] for entry in entries))
            ended = one if entries[1]["pid"] == one.pid else other
            assert await ended.wait() == -signal.SIGTERM
            await it.looked()
            assert {one, other} - {ended} == {p for p in (one, other) if p.returncode is None}
            assert it.enforcer.tally.warnings == 1
            assert it.enforcer.tally.signals == {signal.SIGTERM: 1, signal.SIGKILL: 0}

    told = {
        "container": "default/alice (main)",
        "gpu": str(it.gpus[0]),
        "share_mib": 10240,
        "limit_mib": LIMIT_OF_25,
        "used_mib": 12287,
        "log_level": "warning",
    }
    assert entries[0] == {
        "event": "a container uses more GPU memory than it may",
        "policy": "kill",
        **told,
    }
    assert entries[1] == {
        "event": "a process is being ended: its container uses more GPU memory than it may",
        "pid": ended.pid,
        "process_mib": 6143,
        "signal": "SIGTERM",
        **told,
    }


async def test_who_does_not_go_is_killed(tmp_path: Path) -> None:
    """A process that ignores SIGTERM gets SIGKILL after the stop timeout."""
    async with ground(tmp_path) as it, running(sys.executable, "-c", STUBBORN) as stubborn:
        assert stubborn.stdout is not None
        await stubborn.stdout.receive()
        it.hold(ALICE, 25)
        it.put(stubborn, 50)

        assert await stubborn.wait() == -signal.SIGKILL
        await it.looked()
        assert it.enforcer.tally.signals == {signal.SIGTERM: 1, signal.SIGKILL: 1}


async def test_the_bus_tells_of_warning_and_end(tmp_path: Path) -> None:
    """Who listens hears which container used how much of what it may, and which process ends."""
    async with ground(tmp_path) as it, running() as greedy:
        news = it.registry.news
        with news.subscribe(MemoryExceeded, ProcessSignalled) as events:
            it.hold(ALICE, 25)
            it.put(greedy, 50)
            heard_of = [event async for event, _ in _numbered(events, 2)]

    exceeded, signalled = heard_of
    assert isinstance(exceeded, MemoryExceeded)
    assert isinstance(signalled, ProcessSignalled)
    assert exceeded.holder == signalled.holder == ALICE
    assert (exceeded.used, exceeded.share) == (50 * PERCENT, 10240 * MIB)
    assert exceeded.limit // MIB == LIMIT_OF_25
    assert exceeded.will_end
    assert (signalled.pid, signalled.signal) == (greedy.pid, "SIGTERM")


async def _numbered(events: Any, count: int) -> AsyncIterator[tuple[Any, int]]:  # noqa: ANN401
    with anyio.fail_after(30):
        number = 0
        async for event in events:
            number += 1
            yield event, number
            if number == count:
                return


async def test_a_hanging_gpu_delays_no_other(tmp_path: Path) -> None:
    """While NVML hangs over one GPU, a container of another is kept within its limit."""
    async with ground(tmp_path) as it, running() as greedy:
        it.node.hang(it.node.gpu(0), 4)
        it.hold(ALICE, 25, gpu=0)
        it.hold(BOB, 25, gpu=1)
        it.put(greedy, 90, gpu=1, of=BOB)

        assert await greedy.wait() == -signal.SIGTERM
        it.node.recover(it.node.gpu(0))


async def test_a_fault_over_one_gpu_ends_nothing_for_another(tmp_path: Path) -> None:
    """What nobody thought of costs one GPU its watch for a while, and nobody else anything."""
    with heard(endurance) as entries:
        async with ground(tmp_path) as it, running() as process:
            account = it.enforcer._census.account

            async def faulty(gpu: Any) -> Any:  # noqa: ANN401 - as the census' own
                if gpu == it.gpus[0].id:
                    raise KeyError("a fault of ours")
                return await account(gpu)

            it.enforcer._census.account = faulty  # type: ignore[method-assign]
            it.hold(BOB, 1, gpu=0)
            it.hold(ALICE, 1, gpu=1)
            it.put(process, 50, gpu=1)
            with anyio.fail_after(30):
                await process.wait()

    assert [entry["part"] for entry in entries] == [f"memory enforcement of {it.gpus[0].id}"]


# --- what changes while it runs -------------------------------------------------------------------


async def test_the_agent_enforces_what_its_pool_says(tmp_path: Path) -> None:
    """From the configuration's key to a pod's process: what a reload says holds from then on."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - name: all\n    memoryEnforcement: {policy: POLICY, headroom: 1Gi, period: 50ms}\n"
        "    backends: [{backend: fraction, sharesPerGpu: 100}]\n"
    )
    machine = SimHost(tmp_path)
    off, kill = text.replace("POLICY", "off"), text.replace("POLICY", "kill")
    scene = agent_at_work(tmp_path, config=off, host=machine.host)

    async with scene as it, running() as greedy:
        await it.until(200, 200)
        await it.kubelet.admit(Pod.single("alice", {METAGPU: 25}))
        await it.told()
        machine.house(greedy.pid, ALICE)
        [index] = [
            state.gpu.index for state in it.agent.registry.snapshot.gpus.values() if state.leases
        ]
        it.node.add_process(it.node.gpu(index), SimProcess(greedy.pid, 50 * PERCENT))
        asked = await it.agent.commands["usage"]({})
        assert isinstance(asked, dict)
        [container] = asked["containers"]
        [part] = container["gpus"]
        assert (container["pod"], part["usedMiB"], part["policy"]) == ("alice", 20479, "off")
        assert [process["pid"] for process in part["processes"]] == [greedy.pid]

        await anyio.Path(it.config_file).write_text(kill)
        await it.agent.reload()

        assert await greedy.wait() == -signal.SIGTERM


async def test_a_restart_with_other_shares_ends_nobody(tmp_path: Path) -> None:
    """Who holds 5 of 10 shares is not held to 5 of 100 by a daemon that starts with other ones."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - name: all\n    memoryEnforcement: {policy: kill, period: 20ms, grace: 0s}\n"
        "    backends: [{backend: fraction, sharesPerGpu: COUNT}]\n"
    )
    machine = SimHost(tmp_path)
    watched = Watched(machine.host)
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    uid = container_of(ALICE).pod_uid
    pod = Pod("alice", uid=uid, containers=(Container("main", {METAGPU: 5}),))

    async with kubelet.running(), running() as modest:
        machine.house(modest.pid, ALICE)
        few, many = (text.replace("COUNT", count) for count in ("10", "100"))
        async with agent_at_work(tmp_path, "a100-40gb:1", few, kubelet=kubelet) as it:
            await it.until(10, 10)
            await kubelet.admit(pod)
        again = agent_at_work(tmp_path, "a100-40gb:1", many, kubelet=kubelet, host=watched)
        async with again as it:
            await it.settles(lambda now: any(state.leases for state in now.gpus.values()))
            it.node.add_process(it.node.gpu(0), SimProcess(modest.pid, 40 * PERCENT))
            wanted = watched.looks + 5
            await becomes(lambda: watched.looks >= wanted)
            assert modest.returncode is None

            it.node.add_process(it.node.gpu(0), SimProcess(modest.pid, 60 * PERCENT))
            assert await modest.wait() == -signal.SIGTERM


async def test_over_is_told_while_it_lasts(tmp_path: Path) -> None:
    """The bytes above the limit are known for as long as a container is above it."""
    async with ground(tmp_path, terms(Policy.WARN)) as it, running() as greedy:
        over = it.enforcer.tally.over
        gpu = it.gpus[0].id
        it.hold(ALICE, 25)
        it.put(greedy, 50)
        await becomes(lambda: bool(over.get(gpu)))
        assert {holder: above // MIB for holder, above in over[gpu].items()} == {
            ALICE: 20480 - LIMIT_OF_25 - 1
        }

        it.put(greedy, 20)
        await becomes(lambda: not over[gpu])


async def test_what_nvml_does_not_say_is_told_once(tmp_path: Path) -> None:
    """A GPU that cannot be asked is not enforced; the log says why, once for each reason."""
    with heard(enforcer) as entries:
        async with ground(tmp_path) as it, running() as process:
            it.hold(ALICE, 25)
            it.node.lose(it.node.gpu(0))
            await becomes(lambda: bool(entries))
            it.node.recover(it.node.gpu(0))
            it.put(process, 1)
            await it.looked()

    [entry] = entries
    assert entry["event"] == ("memory is not enforced on a GPU: NVML does not say who is on it")
    assert "the GPU is lost" in entry["why"]


async def test_a_refusal_of_the_kernel_is_told(tmp_path: Path) -> None:
    """Where we may not signal, the log says so, and the daemon goes on."""

    def refuse(_: Identity) -> None:
        raise HostError("we may not")

    with heard(enforcer) as entries:
        async with ground(tmp_path) as it, running() as greedy:
            it.host.before = refuse
            it.hold(ALICE, 25)
            it.put(greedy, 50)
            await becomes(lambda: len(entries) == 3)
            await it.looked()

            assert greedy.returncode is None
    assert [entry.get("error") for entry in entries] == [None, "we may not", "we may not"]


async def test_what_hinders_us_is_told_once(tmp_path: Path) -> None:
    """If we cannot know whose processes are whose, the log says so at the first look."""
    with heard(enforcer) as entries:
        async with ground(tmp_path) as it, running() as process:
            it.host.advice = ("mount this",)
            it.hold(ALICE, 25)
            it.put(process, 1)
            await it.looked()

    assert [(entry["event"], entry["why"]) for entry in entries] == [
        ("memory cannot be enforced", "mount this")
    ]
