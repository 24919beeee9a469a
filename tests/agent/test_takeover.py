"""The exchange of the daemon: a second one takes the node over, and no pod notices."""

import json
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from anyio.abc import Process

from metagpu.core.model.shares import ResourceClaimRef
from metagpu.plugins.control.client import send_request
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimKubelet, SimPod
from metagpu.sim.machine.spec import build_node
from tests.agent.test_daemon import command_line, daemon
from tests.agent.test_mps import MIXED, MPS, control_of
from tests.plugins.dra.rig import DRIVER, KubeletCalls
from tests.plugins.dra.rig import NODE as CLAIM_NODE
from tests.rigs.agent import METAGPU, QUICK
from tests.rigs.cdi import host

pytestmark = pytest.mark.long

SHARES = 200
CONFIG = QUICK.replace("10}", "100, offer: all}")
"""Every share is on offer at each moment: a number that falls is a gap."""


@dataclass
class Exchanges:
    """A kubelet with pods that arrive all the time, and the daemons that serve it in turn.

    Attributes:
        least: the least number of allocatable devices since the first daemon served.
        failed: the reasons of the pods that the kubelet did not admit.
        admitted: the number of pods that it did.
    """

    folder: Path
    kubelet: SimKubelet
    least: int = SHARES
    failed: list[str] = field(default_factory=list)
    admitted: int = 0

    @asynccontextmanager
    async def daemon(self, first: str = "", *options: str) -> AsyncIterator["Daemon"]:
        """Run a daemon that takes over, while the block lasts; `first` is Python to run first."""
        program = ("-c", f"{first}\nfrom metagpu.cli.metagpu import main; exit(main())")
        command = [*command_line(self.folder, program), "--take-over", *options]
        async with await anyio.open_process(command) as process:
            it = Daemon(process)
            async with anyio.create_task_group() as group:
                group.start_soon(it.read)
                try:
                    yield it
                finally:
                    if process.returncode is None:
                        process.kill()
                    with anyio.CancelScope(shield=True):
                        await process.wait()
                group.cancel_scope.cancel()

    async def look(self) -> None:
        """Look at the kubelet's numbers at each change of them, until cancelled."""

        def look() -> bool:
            self.least = min(self.least, self.kubelet.allocatable().get(METAGPU, 0))
            return False

        await self.kubelet.wait_for(look, within=float("inf"))

    async def arrive(self, period: float) -> None:
        """Admit pods of two shares, one each period, until cancelled; the older ones end."""
        pods: list[SimPod] = []
        while True:
            pod = SimPod.single(f"pod-{self.admitted + len(self.failed)}", {METAGPU: 2})
            try:
                await self.kubelet.admit(pod)
            except Exception as error:  # noqa: BLE001 - counted
                self.failed.append(str(error))
            else:
                self.admitted += 1
                pods.append(pod)
            if len(pods) > 20:
                await self.kubelet.delete(pods.pop(0))
            await anyio.sleep(period)


@dataclass
class Daemon:
    """One daemon, as a process."""

    process: Process
    log: str = ""
    seen: anyio.Event = field(default_factory=anyio.Event)

    async def read(self) -> None:
        """Read its log until it ends."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log += line.decode()
            self.seen.set()
            self.seen = anyio.Event()

    async def logged(self, *texts: str) -> None:
        """Wait until its log has all these texts."""
        with anyio.fail_after(90):
            while not all(text in self.log for text in texts):
                await self.seen.wait()


@asynccontextmanager
async def exchanges(
    folder: Path,
    period: float | None = 0.2,
    first: str = "",
    config: str = CONFIG,
    *options: str,
) -> AsyncIterator[tuple[Exchanges, Daemon]]:
    """Run a kubelet with a daemon and, with a period, arriving pods while the block lasts."""
    await anyio.Path(folder / "metagpu.yaml").write_text(config)
    kubelet = SimKubelet(folder / "dp", pod_resources=folder / "pr.sock")
    it = Exchanges(folder, kubelet)
    async with (
        kubelet.running(),
        it.daemon(first, *options) as old,
        anyio.create_task_group() as group,
    ):
        await kubelet.wait_for(lambda: kubelet.allocatable().get(METAGPU) == SHARES)
        group.start_soon(it.look)
        if period is not None:
            group.start_soon(it.arrive, period)
        yield it, old
        group.cancel_scope.cancel()


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    with anyio.fail_after(30):
        while not is_so():  # noqa: ASYNC110 - of several causes
            await anyio.sleep(0.01)


async def test_pods_do_not_notice_an_exchange(tmp_path: Path) -> None:
    """Three daemons in turn: the kubelet counts all devices all the time, and no pod fails."""
    async with exchanges(tmp_path, 0.05) as (it, _), it.daemon() as second:
        await second.logged("node taken over")
        async with it.daemon() as third:
            await third.logged("node taken over")
            before = it.admitted
            await until(lambda: it.admitted > before + 5)

            assert it.failed == []
            assert it.least == SHARES
            assert it.kubelet.registrations[METAGPU] == 3
            await it.kubelet.wait_for(lambda: it.kubelet.open_streams[METAGPU] == 1)


SHORT = """
from metagpu.agent import exchange, predecessor

greet = predecessor.Predecessor.greet

async def short(self):
    whole, self._timing = self._timing, exchange.ExchangeTiming(answer=2.0)
    await greet(self)
    self._timing = whole

predecessor.Predecessor.greet = short
"""
"""Python that has a daemon wait two seconds for the first answer, and long for the others.

An exchange that has begun and then fails may leave a gap: no step of it has a short deadline.
"""
DIES = "import os; from metagpu.agent import {module} as it; it.{name} = lambda *_: os._exit(9)"
"""Python that has a daemon end, as by `kill -9`, where it calls a function."""


@pytest.mark.parametrize(
    "place",
    [
        "takeover/Takeover._apply",
        "predecessor/Predecessor.expect_detach",
        "predecessor/Predecessor.end_lists",
    ],
)
async def test_old_daemon_goes_on_if_the_new_one_ends(tmp_path: Path, place: str) -> None:
    """Whatever the new daemon was doing, no pod notices that it came and went."""
    module, _, name = place.partition("/")
    async with exchanges(tmp_path, 0.05) as (it, old):
        async with it.daemon(DIES.format(module=module, name=name)) as new:
            assert await new.process.wait() == 9
        await old.logged("successor failed")
        before = it.admitted
        await until(lambda: it.admitted > before + 5)

        await until(lambda: it.kubelet.open_streams[METAGPU] == 1)
        assert it.failed == []
        assert it.least == SHARES


async def test_old_daemon_serves_again_after_a_new_one_that_registered(tmp_path: Path) -> None:
    """A new daemon that ends between its registration and the end of the old one is replaced."""
    first = DIES.format(module="predecessor", name="Predecessor.finish")
    async with exchanges(tmp_path, 60) as (it, old):
        async with it.daemon(first) as new:
            assert await new.process.wait() == 9
        await old.logged("successor failed")
        await it.kubelet.wait_for(lambda: it.kubelet.registrations[METAGPU] == 3)
        await it.kubelet.wait_for(lambda: it.kubelet.allocatable().get(METAGPU) == SHARES)
        await it.kubelet.admit(SimPod.single("after", {METAGPU: 2}))


WHOLE = "nvidia.com/gpu"
BOTH = """
version: metagpu/v1
health: {quietPeriod: 100ms, rescanPeriod: 100ms}
pools: [{name: all, backends: [{backend: fraction, sharesPerGpu: 100}, {backend: whole}]}]
"""
"""All of a GPU, or a part of it: never both."""
DIES_LATE = """
import os, anyio
from metagpu.agent import predecessor

async def finish(self):
    while not os.path.exists({mark!r}):
        await anyio.sleep(0.01)
    os._exit(9)

predecessor.Predecessor.finish = finish
"""
"""Python that has a new daemon end before its last step, once a file is there."""


async def test_grants_of_a_new_daemon_that_failed_are_known(tmp_path: Path) -> None:
    """A GPU that the kubelet got from the new daemon is no other pod's after that one's end."""
    mark = tmp_path / "die"
    async with exchanges(tmp_path, None, config=BOTH) as (it, old):
        async with it.daemon(DIES_LATE.format(mark=str(mark))) as new:
            await it.kubelet.wait_for(lambda: it.kubelet.registrations[WHOLE] == 2)
            await it.kubelet.wait_for(lambda: it.kubelet.open_streams[WHOLE] == 1)
            pod = SimPod.single("whole", {WHOLE: 1})
            await it.kubelet.admit(pod)
            mark.touch()
            assert await new.process.wait() == 9
        await old.logged("successor failed")
        await it.kubelet.wait_for(lambda: it.kubelet.registrations[METAGPU] == 3)
        await it.kubelet.wait_for(lambda: it.kubelet.allocatable().get(METAGPU, 0) > 0)

        assert it.kubelet.allocatable()[METAGPU] == 100
        taken = {share.partition("::")[0] for share in it.kubelet.devices(pod)["main"][WHOLE]}
        other = SimPod.single("part", {METAGPU: 90})
        await it.kubelet.admit(other)
        given = {share.partition("::")[0] for share in it.kubelet.devices(other)["main"][METAGPU]}
        assert not given & taken


SLOW = """
import os, anyio
from metagpu.plugins.kubelet import device_plugin

grant = device_plugin.DevicePluginService._grant

async def slow(self, *arguments):
    answer = await grant(self, *arguments)
    while not os.path.exists({mark!r}):
        await anyio.sleep(0.01)
    return answer

device_plugin.DevicePluginService._grant = slow
"""
"""Python that has a daemon answer an Allocate late, as for a MIG instance: once a file is there."""


async def test_call_of_the_exchange_may_last(tmp_path: Path) -> None:
    """The old daemon passes an answer on that comes long after a signal says stop."""
    mark = tmp_path / "answer"
    slow = SLOW.format(mark=str(mark))
    async with exchanges(tmp_path, None) as (it, old), it.daemon(slow) as new:
        await old.logged("handing over")
        async with anyio.create_task_group() as group:
            group.start_soon(it.kubelet.admit, SimPod.single("slow", {METAGPU: 2}))
            await new.logged("node taken over")
            old.process.terminate()
            await anyio.sleep(2.5 * KubeletTiming().linger)
            assert old.process.returncode is None
            mark.touch()
        assert await old.process.wait() == 0


async def test_old_daemon_stands_by(tmp_path: Path) -> None:
    """A new daemon that fails after the exchange is replaced by the old one; it is never asked."""
    async with exchanges(tmp_path, 60) as (it, old):
        async with it.daemon() as new:
            await new.logged("node taken over")
            await old.logged("waiting for the node")
            await anyio.sleep(2.5)  # the old daemon tries the locks meanwhile
            assert "node taken over" not in old.log
            assert it.kubelet.registrations[METAGPU] == 2

            new.process.kill()
            await it.kubelet.wait_for(lambda: it.kubelet.registrations[METAGPU] == 3)
            await it.kubelet.wait_for(lambda: it.kubelet.allocatable().get(METAGPU) == SHARES)

        old.process.terminate()
        assert await old.process.wait() == 0


@pytest.mark.parametrize("same_network", [False, True])
async def test_probes_of_a_daemon_that_waits(tmp_path: Path, *, same_network: bool) -> None:
    """A daemon that stands by is alive and not ready, unless the other one needs its port."""
    ports = [free_port(), free_port()]
    if same_network:
        ports[1] = ports[0]
    addresses = [f"127.0.0.1:{port}" for port in ports]

    async with exchanges(tmp_path, None, "", CONFIG, "--metrics", addresses[0]) as (it, old):
        await until_probe(addresses[0], "readyz", 200)
        async with it.daemon("", "--metrics", addresses[1]) as new:
            await new.logged("node taken over", "metrics served")
            await old.logged("waiting for the node")
            await until_probe(addresses[1], "readyz", 200)
            if not same_network:
                await until_probe(addresses[0], "healthz", 200)
                assert await probe(addresses[0], "readyz") == 503
                assert await probe(addresses[0], "metrics") == 503

            new.process.kill()
            await until_probe(addresses[0], "readyz", 200)
            assert await probe(addresses[0], "metrics") == 200


BLIND = """
import anyio
from metagpu.core.health.watch import HealthWatch
HealthWatch.survey = lambda self: anyio.sleep_forever()
"""
"""A daemon whose NVML does not answer."""


async def test_a_daemon_that_cannot_take_over_yet_is_alive(tmp_path: Path) -> None:
    """The kubelet does not restart a new daemon for a driver that is slow."""
    address = f"127.0.0.1:{free_port()}"
    async with exchanges(tmp_path, None) as (it, _), it.daemon(BLIND, "--metrics", address):
        await until_probe(address, "healthz", 200)
        assert await probe(address, "readyz") == 503
        assert it.kubelet.registrations[METAGPU] == 1


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


UNWRITTEN = """
import anyio
from metagpu.agent.fault_note_file import FaultNoteFile
FaultNoteFile.follow = lambda self: anyio.sleep_forever()
"""
"""A daemon whose note of faults is always a moment too old."""


async def test_faults_of_the_last_moment_change_hands(tmp_path: Path) -> None:
    """An exchange forgets no fault and no cordon, whatever their file says."""

    async def states() -> dict[int, dict[str, Any]]:
        status = await to_thread.run_sync(send_request, tmp_path, {"command": "status"})
        return {gpu["index"]: gpu for gpu in status["gpus"]}

    config = CONFIG.replace("100ms", "1h")  # the simulated GPU of the new daemon passes its checks
    async with exchanges(tmp_path, None, UNWRITTEN, config) as (it, _):
        for request in (
            {"command": "cordon", "gpu": "0", "reason": "fan"},
            {"command": "sim", "change": {"do": "xid", "gpu": "1", "code": 79}},
        ):
            await to_thread.run_sync(send_request, tmp_path, request)
        await it.kubelet.wait_for(lambda: it.kubelet.allocatable().get(METAGPU) == 0)
        before = await states()
        assert not (tmp_path / "faults.json").exists()
        async with it.daemon() as new:
            await new.logged("node taken over")
            after = await states()

    assert "XID 79" in before[1]["reason"]
    for index, part in ((0, "cordon"), (1, "healthy"), (1, "reason"), (1, "since")):
        assert after[index][part] == before[index][part]


async def test_hanging_daemon_is_not_killed(tmp_path: Path) -> None:
    """A new daemon waits for one that does not answer, and says so; then it takes over."""
    async with exchanges(tmp_path, 60) as (it, old):
        old.process.send_signal(signal.SIGSTOP)
        async with it.daemon(SHORT) as new:
            await new.logged("waiting for the node", "did not answer within 2 s")
            old.process.send_signal(signal.SIGCONT)
            await new.logged("node taken over")
            assert it.least == SHARES


async def test_daemon_without_the_protocol_is_waited_for(tmp_path: Path) -> None:
    """A new daemon waits for the end of an old one that cannot hand over, and then serves."""
    first = "from metagpu.agent import tenure; tenure.COMMAND = 'none'"
    async with exchanges(tmp_path, 60, first) as (it, old), it.daemon() as new:
        await new.logged("waiting for the node", "no command 'takeover'")
        old.process.terminate()
        await it.kubelet.wait_for(lambda: it.kubelet.registrations[METAGPU] == 2)
        await it.kubelet.wait_for(lambda: it.kubelet.allocatable().get(METAGPU) == SHARES)


async def test_mps_daemons_go_on(tmp_path: Path) -> None:
    """A control daemon without clients, which any other end would stop, has a new owner."""
    gpus = [gpu.id for gpu in build_node("a100-40gb:2").gpus]
    async with daemon(tmp_path, MIXED) as old:
        await old.kubelet.wait_for(lambda: old.kubelet.allocatable().get(MPS) == 200)
        controls = [control_of(old, gpu) for gpu in gpus]
        before = [await it.process() for it in controls]
        assert None not in before
        async with Exchanges(tmp_path, old.kubelet).daemon() as new:
            await new.logged("node taken over", "mps control daemon adopted")
            assert await old.process.wait() == 0  # it has no option to stand by

            assert [await it.process() for it in controls] == before
            assert old.kubelet.allocatable()[MPS] == 200
            new.process.terminate()
            assert await new.process.wait() == 0
        for it in controls:
            await it.gone()


SMALL = "nvidia.com/mig-1g.5gb"
INSTANCES = """
version: metagpu/v1
health: {quietPeriod: 100ms, rescanPeriod: 100ms}
pools:
  - name: all
    offer: all
    backends: [{backend: mig, profiles: [1g.5gb], keepWarm: 0s}]
"""


async def test_mig_instances_go_on(tmp_path: Path) -> None:
    """A new daemon keeps the instances of running pods, and creates and removes others."""
    driver, node = tmp_path / "driver.json", tmp_path / "node.yaml"
    await anyio.Path(node).write_text(
        f"gpus: [{{model: a100-40gb, mig: true}}]\nstateFile: {driver}\n"
    )

    async def instances() -> dict[int, int]:
        """Return the first slice of each instance that the driver has."""
        [gpu] = json.loads(await anyio.Path(driver).read_text())["gpus"].values()
        return {it["number"]: it["start"] for it in gpu["instances"]}

    async with daemon(tmp_path, INSTANCES, "--simulate", str(node)) as old:
        kubelet = old.kubelet
        await kubelet.wait_for(lambda: kubelet.allocatable().get(SMALL) == 7)
        async with Exchanges(tmp_path, kubelet).daemon("", "--simulate", str(node)) as new:
            # The new daemon reads its GPUs meanwhile, before or after the first instance.
            first, second = (SimPod.single(name, {SMALL: 1}) for name in ("first", "second"))
            await kubelet.admit(first)
            before = await instances()
            await new.logged("node taken over")
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


async def test_resource_claims_change_hands(tmp_path: Path) -> None:
    """A claim that the old daemon prepared is the new one's: the same answer, and its end."""
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

    async with server.running():
        options = {
            "--kubelet-root": tmp_path,
            "--cdi-dir": tmp_path / "cdi",
            "--dev-root": tmp_path,
            "--node-name": CLAIM_NODE,
            "--kubeconfig": server.kubeconfig(tmp_path),
            "--cluster": "pods",
        }
        given = tuple(str(part) for option in options.items() for part in option)
        async with exchanges(tmp_path, None, "", CLAIMS, *given) as (it, _):
            await kubelet.wait_registration()
            before = await kubelet.prepare(claim)
            assert not before[claim.uid].error
            kubelet.write_checkpoint({claim: before[claim.uid].devices})
            async with it.daemon("", *given) as new:
                await new.logged("node taken over", "dra driver served")
                await kubelet.wait_registration()
                status = await to_thread.run_sync(send_request, tmp_path, {"command": "status"})
                assert [it["shares"] for it in status["leases"]] == [4]
                assert await kubelet.prepare(claim) == before
                assert await kubelet.unprepare(claim) == {claim.uid: ""}
                status = await to_thread.run_sync(send_request, tmp_path, {"command": "status"})
                assert status["leases"] == []


async def test_a_resource_changes_its_api_with_the_daemon(tmp_path: Path) -> None:
    """A rollout may bring DRA and the folder that it needs: no list is waited for."""
    host(tmp_path, gpus=2)
    kubelet = KubeletCalls(tmp_path)
    roots = ("--dev-root", str(tmp_path), "--cdi-dir")
    async with exchanges(tmp_path, None, "", CONFIG, *roots, "/proc/cdi") as (it, old):
        text = CONFIG.replace("name: all", "name: all\n    api: dra")
        assert text != CONFIG
        await anyio.Path(tmp_path / "metagpu.yaml").write_text(text)
        await old.logged("configuration rejected")
        async with it.daemon("", *roots, str(tmp_path / "cdi")) as new:
            await new.logged("node taken over", "dra driver served")
            await kubelet.wait_registration()
            await it.kubelet.wait_for(lambda: it.kubelet.allocatable().get(METAGPU, 0) == 0)
