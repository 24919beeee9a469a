"""The exchange of daemons: one prepares and waits, the old one withdraws, the first one takes.

Whatever happens to either at any step, it ends with one daemon that serves all resources, and no
two pods ever hold what excludes each other.
"""

import json
import signal
import socket
import urllib.error
import urllib.request
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from anyio.abc import TaskGroup, TaskStatus

from metagpu.agent.exchange import read_standby
from metagpu.core.model.shares import ResourceClaimRef
from metagpu.plugins.control.client import send_request
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimKubelet, SimPod
from metagpu.sim.machine.spec import build_node
from tests.agent.test_daemon import daemon
from tests.agent.test_mps import MIXED, MPS, control_of
from tests.plugins.dra.rig import DRIVER, KubeletCalls
from tests.plugins.dra.rig import NODE as CLAIM_NODE
from tests.rigs.cdi import host
from tests.rigs.exchange import (
    CONFIG,
    FRACTION,
    SLICED,
    WHOLE,
    Daemon,
    Exchanges,
    at,
    exchanges,
    pid_of_lock,
    until,
)
from tests.rigs.exchange import NODE as GPUS

pytestmark = pytest.mark.long

KILL, TERM, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP


async def assert_served(live_exchanges: Exchanges, *daemons: Daemon) -> Daemon:
    """Assert that one of these daemons has the node and serves it, and return it."""
    await live_exchanges.until_served()
    [server] = [each for each in daemons if each.process.pid == pid_of_lock(live_exchanges.folder)]
    assert server.alive
    live_exchanges.checks += 1
    await live_exchanges.kubelet.admit(
        SimPod.single(f"check-{live_exchanges.checks}", {FRACTION: 2})
    )
    assert live_exchanges.twice == []
    return server


@pytest.mark.parametrize("number", [KILL, TERM, STOP])
@pytest.mark.parametrize("step", ["prepare", "standby"])
async def test_a_new_daemon_that_fails_before_it_has_the_node(
    tmp_path: Path, step: str, number: signal.Signals
) -> None:
    """The old daemon serves on, whether the new one ends or hangs, and no pod notices."""
    async with (
        exchanges(tmp_path) as (live_exchanges, old),
        live_exchanges.daemon(at(step, number)) as new,
    ):
        await new.halted()
        before = live_exchanges.admitted
        await until(lambda: live_exchanges.admitted > before + 3)
        assert live_exchanges.failed == []
        assert await assert_served(live_exchanges, old, new) is old

        async with live_exchanges.daemon() as third:  # that one which hangs keeps no slot
            await new.end()
            await live_exchanges.until_ready()
            assert await old.end() == 0
            assert await assert_served(live_exchanges, third) is third


@pytest.mark.parametrize("number", [KILL, TERM, STOP])
@pytest.mark.parametrize("step", ["take", "registered"])
async def test_a_new_daemon_that_fails_when_it_has_the_node(
    tmp_path: Path, step: str, number: signal.Signals
) -> None:
    """A container that is started again serves, as after any crash."""
    async with (
        exchanges(tmp_path) as (live_exchanges, old),
        live_exchanges.daemon(at(step, number)) as new,
    ):
        await live_exchanges.until_ready()
        assert await old.end() == 0
        await new.halted()
        async with live_exchanges.daemon() as again:
            await new.end()
            assert await assert_served(live_exchanges, again) is again


@pytest.mark.parametrize("number", [KILL, TERM, STOP])
@pytest.mark.parametrize("step", ["withdraw", "released"])
async def test_an_old_daemon_that_fails_at_its_end(
    tmp_path: Path, step: str, number: signal.Signals
) -> None:
    """The new daemon takes the node; an old one that hangs ends by its kubelet's SIGKILL."""
    async with (
        exchanges(tmp_path, first=at(step, number)) as (live_exchanges, old),
        live_exchanges.daemon() as new,
    ):
        await live_exchanges.until_ready()
        old.signal(TERM)
        await old.halted()
        if step == "withdraw" and old.stopped:
            assert pid_of_lock(tmp_path) == old.process.pid  # no second daemon beside it
            await old.end()
        assert await assert_served(live_exchanges, new) is new
        await old.end()
        assert await assert_served(live_exchanges, new) is new


@pytest.mark.parametrize("number", [KILL, STOP])
@pytest.mark.parametrize("step", ["prepare", "standby"])
async def test_an_old_daemon_that_fails_while_the_new_one_waits(
    tmp_path: Path, step: str, number: signal.Signals
) -> None:
    """Whatever the new one does at that moment, it has the node in the end."""
    async with exchanges(tmp_path) as (live_exchanges, old), live_exchanges.daemon() as new:
        if step == "standby":
            await live_exchanges.until_ready()
        else:
            await new.logged("agent started")
        old.signal(number)
        await old.halted()
        if number is STOP:
            await live_exchanges.until_ready()
            assert pid_of_lock(tmp_path) == old.process.pid
        await old.end()
        assert await assert_served(live_exchanges, new) is new


@pytest.mark.parametrize("number", [KILL, TERM])
@pytest.mark.parametrize("when", ["restarted", "forgets", "silent"])
async def test_an_exchange_beside_a_kubelet_that_changes(
    tmp_path: Path, when: str, number: signal.Signals
) -> None:
    """The kubelet starts, loses its checkpoint, or lists no pods while the node changes hands."""
    async with exchanges(tmp_path, None) as (live_exchanges, old), live_exchanges.daemon() as new:
        held = SimPod.single("held", {WHOLE: 1})
        await live_exchanges.kubelet.admit(held)
        await live_exchanges.until_ready()
        old.signal(number)
        if when == "silent":  # its socket is away for a while
            pods = anyio.Path(tmp_path / "pr.sock")
            await pods.rename(tmp_path / "pr.away")
            await new.logged("node taken")
            await anyio.Path(tmp_path / "pr.away").rename(pods)
        else:
            await live_exchanges.kubelet.restart(forget=when == "forgets")
        assert await assert_served(live_exchanges, new) is new
        gpu = [
            share.partition("::")[0]
            for share in live_exchanges.kubelet.devices(held)["main"][WHOLE]
        ]
        other = SimPod.single("other", {WHOLE: 1})
        if when != "forgets":
            await live_exchanges.kubelet.admit(other)
            assert live_exchanges.kubelet.devices(other)["main"][WHOLE].isdisjoint(gpu)


async def test_each_daemon_gives_its_node_to_the_next_one(tmp_path: Path) -> None:
    """A daemon that has ended, and one that waits in its place: five times."""
    async with exchanges(tmp_path) as (live_exchanges, old), AsyncExitStack() as stack:
        last = old
        for _ in range(5):
            following = await stack.enter_async_context(live_exchanges.daemon())
            await live_exchanges.until_ready()
            assert await last.end() == 0
            assert await assert_served(live_exchanges, following) is following
            last = following


# ---- situations in which two daemons that conversed failed -------------------------------------

SYNTAX = "version: metagpu/v1\npools: [{name: all, backends: [{backend: fracton}]}]\n"
MISFIT = """
version: metagpu/v1
pools: [{name: all, backends: [{backend: mig, profiles: [9g.99gb]}]}]
"""


NEWER = f"{CONFIG}keyOfAnotherVersion: true\n"
"""A file that one daemon understands, and the older one of a rollback does not."""


@pytest.mark.parametrize(
    ("text", "problem"),
    [(SYNTAX, "fracton"), (MISFIT, "9g.99gb"), (NEWER, "keyOfAnotherVersion")],
    ids=["unknown backend", "profile of no GPU", "rollback to an older version"],
)
async def test_a_wrong_configuration_takes_nothing_over(
    tmp_path: Path, text: str, problem: str
) -> None:
    """The new daemon is not ready and says why; corrected, it is ready, and takes the node."""
    address = f"127.0.0.1:{free_port()}"
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text)
    options = ("--metrics", address)
    async with (
        exchanges(tmp_path) as (live_exchanges, old),
        live_exchanges.daemon("", *options, config=wrong) as new,
    ):
        await new.logged("daemon not ready", problem)
        assert "last good" not in new.log
        await until_probe(address, "readyz", 503)
        assert await probe(address, "healthz") == 200
        await until(
            lambda: (
                (standby := read_standby(tmp_path)) is not None and problem in standby.problems[0]
            )
        )
        status = await to_thread.run_sync(send_request, tmp_path, {"command": "status"})
        assert problem in status["standby"]["problems"][0]
        assert live_exchanges.failed == []
        assert await assert_served(live_exchanges, old, new) is old

        await anyio.Path(wrong).write_text(CONFIG)
        await until_probe(address, "readyz", 200)
        assert await old.end() == 0
        assert await assert_served(live_exchanges, new) is new


async def test_a_wrong_configuration_gives_way_after_a_crash(tmp_path: Path) -> None:
    """The new daemon does not take the node of an old one that crashes and is started again."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(SYNTAX)
    async with (
        exchanges(tmp_path) as (live_exchanges, old),
        live_exchanges.daemon(config=wrong) as new,
    ):
        await new.logged("daemon not ready")
        old.signal(KILL)
        await old.process.wait()
        async with live_exchanges.daemon() as again:
            assert await assert_served(live_exchanges, again, new) is again
            assert new.alive


async def test_a_wrong_configuration_alone_on_a_node_is_reported(tmp_path: Path) -> None:
    """The daemon offers nothing, says why in its status, and gives the node to a ready one."""
    await anyio.Path(tmp_path / "metagpu.yaml").write_text(SYNTAX)
    address = f"127.0.0.1:{free_port()}"
    live_exchanges = Exchanges(tmp_path, SimKubelet(tmp_path / "dp"))  # which does not run
    async with live_exchanges.daemon("", "--metrics", address) as alone:
        await alone.logged("node taken")
        status = await to_thread.run_sync(send_request, tmp_path, {"command": "status"})
        assert "fracton" in status["configuration"]["error"]
        assert status["configuration"]["effect"] == "nothing is offered until it is corrected"
        assert "last good" not in alone.log
        await until_probe(address, "readyz", 503)

        good = tmp_path / "good.yaml"
        good.write_text(CONFIG)
        async with live_exchanges.daemon(config=good) as ready:
            await ready.logged("resource offered")
            assert await alone.process.wait() == 0


async def test_two_daemons_never_serve_at_once(tmp_path: Path) -> None:
    """The old daemon takes no lock back, however slow the new one is on a loaded node."""
    slow = at("take", STOP)
    async with (
        exchanges(tmp_path, None) as (live_exchanges, old),
        live_exchanges.daemon(slow) as new,
    ):
        await live_exchanges.until_ready()
        assert await old.end() == 0
        await new.halted()
        assert pid_of_lock(tmp_path) == new.process.pid
        new.signal(signal.SIGCONT)
        assert await assert_served(live_exchanges, new) is new


SLOW = """
import anyio, os
from metagpu.plugins.kubelet import device_plugin

grant = device_plugin.DevicePluginService._grant

async def slow(self, *arguments):
    answer = await grant(self, *arguments)
    open({mark!r} + ".asked", "x").close()
    while not os.path.exists({mark!r}):
        await anyio.sleep(0.01)
    return answer

device_plugin.DevicePluginService._grant = slow
"""
"""Python that has a daemon answer an Allocate late, as for a MIG instance: once a file is there.

Another one is there once the daemon has got the call.
"""


async def test_a_call_of_the_last_moment_is_answered_by_the_daemon_that_got_it(
    tmp_path: Path,
) -> None:
    """Nobody forwards a call: the old daemon ends once it has answered."""
    mark = tmp_path / "answer"
    async with exchanges(tmp_path, None, SLOW.format(mark=str(mark))) as (live_exchanges, old):
        async with live_exchanges.daemon() as new, anyio.create_task_group() as group:
            await live_exchanges.until_ready()
            group.start_soon(live_exchanges.kubelet.admit, SimPod.single("slow", {FRACTION: 2}))
            await until((tmp_path / "answer.asked").exists)
            old.signal(TERM)
            await old.logged("stopping")
            assert old.alive
            mark.touch()
            assert await old.process.wait() == 0
            await new.logged("node taken")
        assert live_exchanges.failed == []


async def test_a_daemon_killed_during_a_slow_call_leaves_no_gap(tmp_path: Path) -> None:
    """The pod of that call fails, and the new daemon serves all others at once."""
    slow = SLOW.format(mark=str(tmp_path / "never"))
    async with (
        exchanges(tmp_path, None, slow) as (live_exchanges, old),
        live_exchanges.daemon() as new,
        anyio.create_task_group() as group,
    ):
        await live_exchanges.until_ready()
        group.start_soon(admit_or_fail, live_exchanges, "slow")
        await until((tmp_path / "never.asked").exists)
        old.signal(TERM)
        await old.logged("stopping")
        old.signal(KILL)
        await new.logged("node taken")
        assert await assert_served(live_exchanges, new) is new


async def test_a_daemon_stopped_at_its_end_is_waited_for(tmp_path: Path) -> None:
    """The new daemon does not give up: it serves as soon as the stopped one is killed."""
    slow = SLOW.format(mark=str(tmp_path / "never"))
    async with (
        exchanges(tmp_path, None, slow) as (live_exchanges, old),
        live_exchanges.daemon() as new,
        anyio.create_task_group() as group,
    ):
        await live_exchanges.until_ready()
        group.start_soon(admit_or_fail, live_exchanges, "slow")
        await until((tmp_path / "never.asked").exists)
        old.signal(TERM)
        await old.logged("stopping")
        old.signal(STOP)
        await old.halted()
        await live_exchanges.until_ready()
        assert new.alive
        assert pid_of_lock(tmp_path) == old.process.pid
        await old.end()
        assert await assert_served(live_exchanges, new) is new


@pytest.mark.parametrize("step", ["prepare", "standby"])
async def test_a_new_daemon_that_hangs_keeps_the_old_one_from_nothing(
    tmp_path: Path, step: str
) -> None:
    """The old daemon registers with a kubelet that starts again, and answers each call."""
    async with (
        exchanges(tmp_path) as (live_exchanges, old),
        live_exchanges.daemon(at(step, STOP)) as new,
    ):
        await new.halted()
        await live_exchanges.kubelet.restart()
        assert await assert_served(live_exchanges, old, new) is old
        assert "competing" not in old.log


async def test_new_daemons_that_hang_keep_no_slot(tmp_path: Path) -> None:
    """A third new daemon takes the node beside one that hangs early and one that hangs late."""
    async with (
        exchanges(tmp_path) as (live_exchanges, old),
        live_exchanges.daemon(at("prepare", STOP)) as early,
        live_exchanges.daemon(at("standby", STOP)) as late,
    ):
        await early.halted()
        await late.halted()
        async with live_exchanges.daemon() as third:
            await third.logged("waiting for the node")
            assert await old.end() == 0
            assert await assert_served(live_exchanges, third) is third


async def test_no_amount_falls_when_a_new_daemon_is_killed(tmp_path: Path) -> None:
    """The lists of the old daemon last, from before the new one waits until after its end."""
    async with (
        exchanges(tmp_path, None) as (live_exchanges, old),
        anyio.create_task_group() as group,
    ):
        lowest = dict(live_exchanges.kubelet.allocatable())

        async def watch() -> None:
            while True:
                shown = live_exchanges.kubelet.allocatable()
                lowest.update(
                    {name: min(number, shown.get(name, 0)) for name, number in lowest.items()}
                )
                await anyio.sleep(0.005)

        group.start_soon(watch)
        before = dict(lowest)
        async with live_exchanges.daemon() as new:
            await live_exchanges.until_ready()
            new.signal(KILL)
            await new.halted()
            await until(lambda: read_standby(tmp_path) is None)
            assert lowest == before
            assert await assert_served(live_exchanges, old) is old
        group.cancel_scope.cancel()


async def admit_or_fail(live_exchanges: Exchanges, name: str) -> None:
    """Admit a pod whose daemon may end meanwhile."""
    with suppress(Exception):
        await live_exchanges.kubelet.admit(SimPod.single(name, {FRACTION: 2}))


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """An operator who cannot wait for an answer need not."""
    mark = tmp_path / "answer"
    async with (
        exchanges(tmp_path, None, SLOW.format(mark=str(mark))) as (live_exchanges, old),
        anyio.create_task_group() as group,
    ):
        group.start_soon(admit_or_fail, live_exchanges, "slow")
        await until((tmp_path / "answer.asked").exists)
        old.signal(TERM)
        await old.logged("stopping")
        old.signal(signal.SIGINT)
        assert await old.process.wait() == 0


# ---- what survives ------------------------------------------------------------------------------


async def test_faults_and_cordons_survive(tmp_path: Path) -> None:
    """The new daemon reads the old one's last note, as after a crash."""

    async def states() -> dict[int, dict[str, Any]]:
        status = await to_thread.run_sync(send_request, tmp_path, {"command": "status"})
        return {gpu["index"]: gpu for gpu in status["gpus"]}

    config = CONFIG.replace("100ms", "1h")  # the simulated GPU of the new daemon passes its checks
    async with (
        exchanges(tmp_path, None, config=config) as (live_exchanges, old),
        live_exchanges.daemon() as new,
    ):
        await live_exchanges.until_ready()
        for request in (
            {"command": "cordon", "gpu": "0", "reason": "fan"},
            {"command": "sim", "change": {"do": "xid", "gpu": "1", "code": 79}},
        ):
            await to_thread.run_sync(send_request, tmp_path, request)
        shown = live_exchanges.kubelet.allocatable  # the XID comes by an event of its own
        await live_exchanges.kubelet.wait_for(lambda: shown()[FRACTION] == shown()[SLICED] == 0)
        before = await states()
        assert await old.end() == 0
        await new.logged("node taken", "resource registered")
        after = await states()

    assert "XID 79" in before[1]["reason"]
    for index, part in ((0, "cordon"), (1, "healthy"), (1, "reason"), (1, "since")):
        assert after[index][part] == before[index][part]


@pytest.mark.parametrize("number", [KILL, TERM])
async def test_mps_daemons_go_on(tmp_path: Path, number: signal.Signals) -> None:
    """A control daemon without clients, which any other end would stop, has a new owner."""
    gpus = [gpu.id for gpu in build_node("a100-40gb:2").gpus]
    async with daemon(tmp_path, MIXED) as old:
        await old.kubelet.wait_for(lambda: old.kubelet.allocatable().get(MPS) == 200)
        controls = [control_of(old, gpu) for gpu in gpus]
        before = [await each.process() for each in controls]
        assert None not in before
        live_exchanges = Exchanges(tmp_path, old.kubelet, more=())
        async with live_exchanges.daemon() as new:
            await live_exchanges.until_ready()
            old.process.send_signal(number)
            await old.process.wait()
            await new.logged("node taken", "mps control daemon adopted")

            assert [await each.process() for each in controls] == before
            await old.kubelet.wait_for(lambda: old.kubelet.allocatable()[MPS] == 200)
            assert await new.end() == 0
        for control in controls:
            await control.gone()


SMALL = "nvidia.com/mig-1g.5gb"
INSTANCES = """
version: metagpu/v1
health: {quietPeriod: 100ms, rescanPeriod: 100ms}
pools:
  - name: all
    offer: all
    backends: [{backend: mig, profiles: [1g.5gb], keepWarm: 0s}]
"""


@pytest.mark.parametrize("number", [KILL, TERM])
async def test_mig_instances_go_on(tmp_path: Path, number: signal.Signals) -> None:
    """A new daemon keeps the instances of running pods, and creates and removes others."""
    driver, node = tmp_path / "driver.json", tmp_path / "node.yaml"
    await anyio.Path(node).write_text(
        f"gpus: [{{model: a100-40gb, mig: true}}]\nstateFile: {driver}\n"
    )

    async def instances() -> dict[int, int]:
        """Return the first slice of each instance that the driver has."""
        [gpu] = json.loads(await anyio.Path(driver).read_text())["gpus"].values()
        return {each["number"]: each["start"] for each in gpu["instances"]}

    async with daemon(tmp_path, INSTANCES, "--simulate", str(node)) as old:
        kubelet = old.kubelet
        await kubelet.wait_for(lambda: kubelet.allocatable().get(SMALL) == 7)
        live_exchanges = Exchanges(tmp_path, kubelet, more=())
        async with live_exchanges.daemon("", "--simulate", str(node)) as new:
            await (
                live_exchanges.until_ready()
            )  # the new daemon has read its GPUs before the first instance
            first, second = (SimPod.single(name, {SMALL: 1}) for name in ("first", "second"))
            await kubelet.admit(first)
            before = await instances()
            old.process.send_signal(number)
            await old.process.wait()
            await new.logged("node taken", "resource registered")
            await kubelet.wait_for(lambda: kubelet.allocatable().get(SMALL) == 7)
            assert await instances() == before
            assert len(before) == 1

            await kubelet.admit(second)
            assert before.items() < (await instances()).items()
            await kubelet.delete(first)
            with anyio.fail_after(30):
                while len(await instances()) != 1:  # noqa: ASYNC110 - in a file
                    await anyio.sleep(0.05)
            assert not before.items() & (await instances()).items()


CLAIMS = """
version: metagpu/v1
pools:
  - {name: plugin, gpus: {index: 0}, backends: [{backend: fraction, sharesPerGpu: 200, offer: all}]}
  - name: claims
    gpus: {index: 1}
    api: dra
    backends: [{backend: fraction, resource: metagpu.io/by-claim, sharesPerGpu: 10}]
"""


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("number", [KILL, TERM])
async def test_resource_claims_change_hands(
    tmp_path: Path, number: signal.Signals, *, away: bool
) -> None:
    """A claim that the old daemon prepared is the new one's, also without an API server."""
    kubelet, server = KubeletCalls(tmp_path), SimApiServer()
    host(tmp_path, gpus=2)
    gpu = build_node("a100-40gb:2").gpus[1].id.lower()
    result = {
        "request": "gpu",
        "driver": DRIVER,
        "pool": f"{CLAIM_NODE}/{gpu}",
        "device": f"{gpu}-fraction",
        "consumedCapacity": {"shares": "4"},
    }
    allocation = {"devices": {"results": [result]}}
    claim = ResourceClaimRef("default", "part", "11111111-2222-3333-4444-555555555555")
    content = {"metadata": {"uid": claim.uid}, "status": {"allocation": allocation}}
    server.store.put(("resourceclaims", claim.namespace, claim.name), content)
    server.add_node(CLAIM_NODE)

    async def leases() -> list[int]:
        status = await to_thread.run_sync(send_request, tmp_path, {"command": "status"})
        return [each["shares"] for each in status["leases"]]

    async with anyio.create_task_group() as group:
        serving = anyio.CancelScope()

        async def serve() -> None:
            with serving:
                async with server.running():
                    await anyio.sleep_forever()

        group.start_soon(serve)
        await until(lambda: server.port != 0)
        options = {
            "--kubelet-root": tmp_path,
            "--cdi-dir": tmp_path / "cdi",
            "--dev-root": tmp_path,
            "--node-name": CLAIM_NODE,
            "--kubeconfig": server.kubeconfig(tmp_path),
            "--cluster": "pods",
        }
        given = tuple(str(part) for option in options.items() for part in option)
        async with exchanges(
            tmp_path, None, config=CLAIMS, resources=(FRACTION,), options=given
        ) as (live_exchanges, old):
            await kubelet.wait_registration()
            before = await kubelet.prepare(claim)
            assert not before[claim.uid].error
            kubelet.write_checkpoint({claim: before[claim.uid].devices})
            async with live_exchanges.daemon() as new:
                await live_exchanges.until_ready()
                if away:
                    serving.cancel()
                old.signal(number)
                await old.process.wait()
                await new.logged("node taken", "dra driver served")
                await kubelet.wait_registration()
                assert await leases() == [4]
                assert await kubelet.prepare(claim) == before
                assert await kubelet.unprepare(claim) == {claim.uid: ""}
                assert await leases() == []
        group.cancel_scope.cancel()


# ---- an API server that is away ---------------------------------------------------------------


class ApiServer:
    """An API server that comes and goes."""

    def __init__(self, group: TaskGroup) -> None:
        self.server = SimApiServer()
        self._group = group
        self._scope = anyio.CancelScope()

    async def come(self) -> None:
        """Serve, at the same port each time."""
        await self._group.start(self._serve)

    def go(self) -> None:
        """Serve no more."""
        self._scope.cancel()

    async def _serve(self, *, task_status: TaskStatus[None]) -> None:
        with anyio.CancelScope() as self._scope:
            async with self.server.running():
                task_status.started()
                await anyio.sleep_forever()


@pytest.mark.parametrize("step", ["prepare", "crash", "withdraw", "take"])
async def test_an_api_server_that_is_away(tmp_path: Path, step: str) -> None:
    """The new daemon waits for it while the old one serves, and not at any later step."""
    async with anyio.create_task_group() as group:
        api = ApiServer(group)
        api.server.add_node(CLAIM_NODE)
        await api.come()
        cluster = ("--node-name", CLAIM_NODE, "--cluster", "pods")
        options = (*GPUS, *cluster, "--kubeconfig", str(api.server.kubeconfig(tmp_path)))
        async with exchanges(tmp_path, None, options=options) as (live_exchanges, old):
            if step in {"prepare", "crash"}:
                api.go()
            async with live_exchanges.daemon(at("take", STOP) if step == "take" else "") as new:
                if step in {"prepare", "crash"}:
                    await new.logged("daemon not ready", "the API server")
                    assert await assert_served(live_exchanges, old, new) is old
                if step == "prepare":
                    await api.come()
                if step != "crash":
                    await live_exchanges.until_ready()
                if step == "withdraw":
                    api.go()
                old.signal(KILL if step == "crash" else TERM)
                await old.process.wait()
                if step == "take":
                    await new.halted()
                    api.go()
                    new.signal(signal.SIGCONT)
                assert await assert_served(live_exchanges, new) is new
        group.cancel_scope.cancel()


# ---- probes -------------------------------------------------------------------------------------


async def test_probes_of_a_daemon_that_waits(tmp_path: Path) -> None:
    """A daemon that waits is alive and ready, and its metrics are the other one's."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    async with exchanges(tmp_path, None, options=(*GPUS, "--metrics", addresses[0])) as (
        live_exchanges,
        old,
    ):
        await until_probe(addresses[0], "readyz", 200)
        async with live_exchanges.daemon("", "--metrics", addresses[1]) as new:
            await until_probe(addresses[1], "readyz", 200)
            assert await probe(addresses[1], "healthz") == 200
            assert await probe(addresses[1], "metrics") == 503
            assert await old.end() == 0
            await assert_served(live_exchanges, new)
            await until_probe(addresses[1], "readyz", 200)
            assert await probe(addresses[1], "metrics") == 200


BLIND = """
import anyio
from metagpu.core.health.watch import HealthWatch
HealthWatch.survey = lambda self: anyio.sleep_forever()
"""
"""A daemon whose NVML does not answer."""


async def test_a_daemon_without_a_driver_takes_nothing_over(tmp_path: Path) -> None:
    """The kubelet does not restart it, and a rollout waits: it is alive and not ready."""
    address = f"127.0.0.1:{free_port()}"
    async with (
        exchanges(tmp_path) as (live_exchanges, old),
        live_exchanges.daemon(BLIND, "--metrics", address) as new,
    ):
        await new.logged("daemon not ready", "the driver")
        await until_probe(address, "healthz", 200)
        assert await probe(address, "readyz") == 503
        assert live_exchanges.failed == []
        assert await assert_served(live_exchanges, old, new) is old


def free_port() -> int:
    """Return a port of this machine that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def probe(address: str, page: str) -> int | None:
    """Return the status of a page, `None` without an answer."""

    def get() -> int | None:
        with suppress(OSError):
            try:
                with urllib.request.urlopen(f"http://{address}/{page}", timeout=30) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code
        return None

    return await to_thread.run_sync(get)


async def until_probe(address: str, page: str, status: int) -> None:
    """Wait until a page answers so."""
    with anyio.fail_after(30):
        while await probe(address, page) != status:  # noqa: ASYNC110 - of another process
            await anyio.sleep(0.05)
