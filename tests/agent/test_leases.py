"""Leases of running pods in odd hours: a kubelet that errs, or that lost its checkpoint."""

import threading
from pathlib import Path

import anyio
import anyio.lowlevel
import pynvml
import pytest
from anyio import to_thread
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from msgspec.structs import replace

from metagpu.agent.timing import AgentTiming
from metagpu.core.availability.reasons import count_free
from metagpu.core.model.shares import Holder, ResourceName
from metagpu.core.state.facts import LeasesObserved
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.cluster.settings import ALL_FEATURES, ClusterSettings
from metagpu.plugins.kubelet import pod_resources
from metagpu.plugins.kubelet.checkpoint import AllocatedIds, read_allocated_ids
from metagpu.plugins.kubelet.paths import CHECKPOINT_FILE
from metagpu.plugins.kubelet.pod_list import read_leases
from metagpu.plugins.kubelet.timing import TIMING
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import AdmissionError, SimKubelet, SimPod
from metagpu.sim.kubelet.pod_resources import PodResourcesSource
from metagpu.sim.kubelet.pods import SimContainer
from metagpu.sim.machine.containers import SimHost
from tests.rigs.agent import METAGPU, QUICK, Scene, agent_at_work
from tests.rigs.nvml_library import NvmlLibrary
from tests.rigs.waiting import becomes, skip

NODE = "gpu-1"
WHOLE = "nvidia.com/gpu"
ALONE = QUICK.replace("fraction, sharesPerGpu: 10", "whole")
MIXED = QUICK.replace("sharesPerGpu: 10}]", "sharesPerGpu: 10}, {backend: whole}]")


async def run(scene: Scene, name: str, shares: int) -> frozenset[str]:
    """Run a pod; return the ids of its shares."""
    pod = SimPod.single(name, {METAGPU: shares})
    await scene.kubelet.admit(pod)
    await scene.kubelet.start_container(pod, "main")
    return scene.kubelet.devices(pod)["main"][METAGPU]


def unconfirmed(scene: Scene) -> set[str]:
    """Return the shares that the present kubelet does not know as held."""
    gpus = scene.agent.registry.snapshot.gpus.values()
    return {i for gpu in gpus for i, lease in gpu.leases.items() if lease.unconfirmed}


async def test_what_the_checkpoint_names_is_held_before_the_kubelet_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that starts while PodResources errs offers no held GPU to another backend."""
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")

    def fail(_: PodResourcesSource) -> None:
        raise GRPCError(Status.UNAVAILABLE, "not now")

    async with kubelet.running():
        async with agent_at_work(tmp_path, config=MIXED, kubelet=kubelet) as scene:
            await scene.until(20, 20)
            await scene.until(2, 2, WHOLE)
            await kubelet.admit(SimPod.single("train", {METAGPU: 5}))
        monkeypatch.setattr(PodResourcesSource, "check_rate", fail)
        before = kubelet.lists[WHOLE]
        async with agent_at_work(tmp_path, config=MIXED, kubelet=kubelet) as scene:
            await kubelet.wait_for(lambda: kubelet.lists[WHOLE] > before)
            assert kubelet.allocatable()[WHOLE] == 1

            monkeypatch.undo()
            await scene.wait_holders()
            assert kubelet.allocatable()[WHOLE] == 1


class Lateness:
    """A kubelet whose PodResources service hangs, and whose checkpoint may be damaged."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kubelet: SimKubelet, tmp_path: Path
    ) -> None:
        self.kubelet = kubelet
        self.checkpoint = tmp_path / "device-plugins" / CHECKPOINT_FILE
        self.asked = 0
        self._answers = anyio.Event()
        self._monkeypatch = monkeypatch

    def hang(self) -> None:
        """Answer no request of PodResources until `answer`."""

        async def wait(socket: Path, asked: float, deadline: float) -> LeasesObserved:
            self.asked += 1
            with anyio.fail_after(deadline):
                await self._answers.wait()
            return await read_leases(socket, asked, deadline)

        self._monkeypatch.setattr(pod_resources, "read_leases", wait)

    async def wait_asked(self, times: int) -> None:
        """Wait until the daemon has asked so often."""
        await becomes(lambda: self.asked >= times)

    def answer(self) -> None:
        """Answer all requests, those that wait too."""
        self._answers.set()

    def damage(self, how: str) -> None:
        """Leave the checkpoint as it is, cut it off, or remove it."""
        if how == "half":
            text = self.checkpoint.read_bytes()
            self.checkpoint.write_bytes(text[: len(text) // 2])
        elif how == "missing":
            self.checkpoint.unlink()


@pytest.mark.parametrize("config", [MIXED, ALONE], ids=["mixed", "another"])
@pytest.mark.parametrize("how", ["good", "half", "missing"])
async def test_no_deadline_offers_what_a_late_kubelet_may_have_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, config: str
) -> None:
    """Shares that the checkpoint names are held at once; without it, all shares wait.

    The daemon's longest waits for the kubelet pass before it answers.
    """
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    late = Lateness(monkeypatch, kubelet, tmp_path)
    train = SimPod.single("train", {METAGPU: 5})

    async with kubelet.running():
        async with agent_at_work(tmp_path, config=MIXED, kubelet=kubelet) as scene:
            await scene.until(20, 20)
            await scene.until(2, 2, WHOLE)
            await kubelet.admit(train)
            await kubelet.start_container(train, "main")
        late.hang()
        late.damage(how)
        before, offered = kubelet.lists[WHOLE], list[int]()

        def is_right() -> bool:
            if kubelet.lists[WHOLE] > before:
                offered.append(kubelet.allocatable()[WHOLE])
            return offered[-1:] == [1]

        async with agent_at_work(
            tmp_path, config=config, kubelet=kubelet, timing=AgentTiming()
        ) as scene:
            await late.wait_asked(1)
            if how != "good":
                reason = scene.state(0).kubelet.unknown_leases
                assert reason.startswith("the kubelet's checkpoint and its list")
            skip(60)
            await kubelet.wait_for(lambda: is_right() or bool(offered))
            late.answer()
            await kubelet.wait_for(is_right)
            await scene.wait_holders()

    assert 2 not in offered


@pytest.mark.parametrize("how", ["half", "missing"])
async def test_the_kubelets_list_alone_says_what_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Without a good checkpoint, all is offered that does not conflict with the kubelet's list."""
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    late = Lateness(monkeypatch, kubelet, tmp_path)

    async with kubelet.running():
        async with agent_at_work(tmp_path, kubelet=kubelet) as scene:
            await scene.until(20, 20)
            await run(scene, "train", 5)
        late.damage(how)
        offered = set[int]()

        def is_right() -> bool:
            if kubelet.lists[WHOLE]:
                offered.add(kubelet.allocatable()[WHOLE])
            return 1 in offered

        async with agent_at_work(tmp_path, config=ALONE, kubelet=kubelet):
            await kubelet.wait_for(is_right)

    assert 2 not in offered


@pytest.mark.parametrize("container", ["main", "init"])
async def test_a_gpu_that_is_found_late_is_offered_once_the_kubelet_said_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: str
) -> None:
    """A GPU that could not be read at the start has leases before it has an offer.

    PodResources hangs when the GPU is found, and never lists init containers.
    """
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    late, library = Lateness(monkeypatch, kubelet, tmp_path), NvmlLibrary(tmp_path / "nvml")
    uses = SimContainer(container, {METAGPU: 10})
    train = SimPod("train", containers=(uses,))
    if container == "init":
        train = SimPod("train", containers=(SimContainer("main", {}),), init_containers=(uses,))

    async with kubelet.running():
        driver = NvmlDriver(library.load())
        async with agent_at_work(tmp_path, config=MIXED, kubelet=kubelet, driver=driver) as scene:
            await scene.until(20, 20)
            await scene.until(2, 2, WHOLE)
            await kubelet.admit(SimPod.single("other", {METAGPU: 10}))
            await kubelet.admit(train)
            await kubelet.start_container(train, container)
        library.fail("nvmlDeviceGetUUID", 1, pynvml.NVML_ERROR_GPU_IS_LOST)
        driver, offered = NvmlDriver(library.load()), set[int]()
        async with agent_at_work(tmp_path, config=MIXED, kubelet=kubelet, driver=driver) as scene:
            await scene.until(10, 10)
            await scene.until(1, 0, WHOLE)
            late.hang()
            library.work()

            def is_right() -> bool:
                offered.add(kubelet.allocatable()[WHOLE])
                return kubelet.capacity()[WHOLE] == 2

            await kubelet.wait_for(is_right)
            await late.wait_asked(1)
            late.answer()
            await scene.wait_snapshot(lambda now: all(gpu.leases for gpu in now.gpus.values()))

    assert offered == {0}


async def test_an_init_container_that_waits_keeps_its_shares(tmp_path: Path) -> None:
    """Without an API server nobody but the host tells that its pod is there, for any time."""
    machine, uses = SimHost(tmp_path), SimContainer("init", {METAGPU: 10})
    pod = SimPod("train", containers=(SimContainer("main", {}),), init_containers=(uses,))

    async with agent_at_work(tmp_path, config=MIXED, host=machine.host) as scene:
        await scene.until(20, 20)
        await scene.until(2, 2, WHOLE)
        await scene.kubelet.admit(pod)
        await scene.kubelet.start_container(pod, "init")
        machine.start(Holder(pod.namespace, pod.name, "init"), uid=pod.uid)
        follower = scene.agent._offering.lease_follower
        await follower.refresh()
        for _ in range(3):
            skip(LeasesObserved({}, 0).longest_admission)
            await follower.refresh()
        assert sum(len(gpu.leases) for gpu in scene.agent.registry.snapshot.gpus.values()) == 10

        machine.end(pod.uid)
        await follower.refresh()
        assert not any(gpu.leases for gpu in scene.agent.registry.snapshot.gpus.values())


async def test_where_no_kubelet_has_been_everything_is_offered(tmp_path: Path) -> None:
    """Without a checkpoint and without a kubelet, no pod holds anything."""
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")

    async with agent_at_work(tmp_path, kubelet=kubelet) as scene:
        await scene.wait_snapshot(lambda now: bool(now.offers) and not now.unknown_leases)
        assert [count_free(scene.state(index), ResourceName(METAGPU)) for index in (0, 1)] == [
            10,
            10,
        ]


async def test_a_gpu_that_pods_hold_by_another_configuration_is_offered_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon with one backend waits for the checkpoint too, which takes long to read."""
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    ready = threading.Event()

    def read_late(directory: Path) -> AllocatedIds | None:
        ready.wait(30)
        return read_allocated_ids(directory)

    async with kubelet.running():
        async with agent_at_work(tmp_path, kubelet=kubelet) as scene:
            await scene.until(20, 20)
            await run(scene, "train", 20)
        monkeypatch.setattr(pod_resources, "read_allocated_ids", read_late)
        async with agent_at_work(tmp_path, config=ALONE, kubelet=kubelet) as scene:
            await scene.wait_snapshot(lambda now: bool(now.offers))
            for _ in range(2000):  # more than an offer takes
                await anyio.lowlevel.checkpoint()
            offered = kubelet.allocatable().get(WHOLE, 0)  # after a second, in a list of none
            ready.set()
            await scene.until(2, 0, WHOLE)

    assert offered == 0


async def test_shares_of_an_ended_pod_are_granted_by_a_daemon_that_has_just_started(
    tmp_path: Path,
) -> None:
    """The present kubelet wrote the checkpoint: it knows which ids are free.

    The pod comes between the first look at the kubelet and the second.
    """
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    once = replace(TIMING, settle=60.0, contended_period=60.0)

    async with kubelet.running():
        async with agent_at_work(tmp_path, config=MIXED, kubelet=kubelet) as agent:
            await agent.until(20, 20)
            await run(agent, "train", 20)
            await agent.wait_holders()
        await kubelet.delete(*kubelet.pods)
        before = kubelet.lists[METAGPU]
        async with agent_at_work(
            tmp_path, config=MIXED, kubelet=kubelet, kubelet_timing=once
        ) as scene:
            await kubelet.wait_for(lambda: kubelet.lists[METAGPU] > before)
            assert len(await run(scene, "next", 20)) == 20


async def test_a_kubelet_that_lost_its_checkpoint_takes_nothing_from_running_pods(
    tmp_path: Path,
) -> None:
    """The shares of running pods are preferred last, refused with the reason, and stay held."""
    async with agent_at_work(tmp_path, config=MIXED) as scene:
        await scene.until(20, 20)
        await scene.until(2, 2, WHOLE)
        held = await run(scene, "train", 5)
        await scene.wait_holders()

        await scene.kubelet.restart(forget=True)
        await scene.until(20, 20)
        await scene.wait_snapshot(lambda _: unconfirmed(scene) == held)
        await scene.until(2, 1, WHOLE)

        others = await run(scene, "other", 15)
        assert not others & held
        with pytest.raises(AdmissionError, match=r"default/train \(main\) still runs with it"):
            await run(scene, "late", 1)
        await scene.wait_holders()
        assert unconfirmed(scene) == held


async def test_a_share_that_a_kubelet_forgot_is_free_when_its_pod_is_gone(tmp_path: Path) -> None:
    """The lease of a forgotten pod ends with the pod."""
    async with agent_at_work(tmp_path, config=MIXED) as scene:
        await scene.until(20, 20)
        await scene.until(2, 2, WHOLE)
        await run(scene, "train", 5)
        await scene.wait_holders()
        await scene.kubelet.restart(forget=True)
        await scene.until(2, 1, WHOLE)
        await scene.until(20, 20)
        await run(scene, "other", 1)

        [train, other] = scene.kubelet.pods
        await scene.wait_holders()
        await scene.kubelet.delete(train)
        await scene.wait_snapshot(
            lambda now: sum(len(gpu.leases) for gpu in now.gpus.values()) == 1
        )
        await scene.kubelet.delete(other)
        await scene.until(2, 2, WHOLE)


async def test_a_pod_deleted_while_the_kubelet_restarts_freezes_no_lease(tmp_path: Path) -> None:
    """The kubelet never lists the pod again, and the API server's complete list lacks it."""
    server = SimApiServer()
    server.add_node(NODE)
    pods = [SimPod.single(name, {METAGPU: 5}) for name in ("gone", "later")]
    for pod in pods:
        server.add_pod("default", pod.name, NODE, uid=pod.uid)

    async with server.running():
        settings = ClusterSettings(NODE, server.kubeconfig(tmp_path), features=ALL_FEATURES)
        async with agent_at_work(tmp_path, config=MIXED, cluster_settings=settings) as scene:
            await scene.until(20, 20)
            for pod in pods:
                await scene.kubelet.admit(pod)
                await scene.kubelet.start_container(pod, "main")
            await scene.wait_holders()

            await scene.kubelet.delete(pods[0])
            server.delete_pod("default", "gone")
            await scene.kubelet.restart()
            await scene.kubelet.delete(pods[1])
            server.delete_pod("default", "later")

            await scene.wait_snapshot(lambda now: not any(gpu.leases for gpu in now.gpus.values()))


async def test_what_an_ended_pod_left_in_the_checkpoint_is_held_by_nobody(tmp_path: Path) -> None:
    """Nothing makes a kubelet without device plugins write its checkpoint again."""
    server = SimApiServer()
    server.add_node(NODE)
    pod = SimPod.single("train", {METAGPU: 5})
    server.add_pod("default", pod.name, NODE, uid=pod.uid)
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")

    async with server.running(), kubelet.running():
        async with agent_at_work(tmp_path, kubelet=kubelet) as scene:
            await scene.until(20, 20)
            await kubelet.admit(pod)
            await scene.wait_holders()
        await kubelet.delete(pod)
        server.delete_pod("default", pod.name)
        left = await to_thread.run_sync(read_allocated_ids, tmp_path / "device-plugins")
        assert left is not None
        assert len(left.resources) == 5

        settings = ClusterSettings(NODE, server.kubeconfig(tmp_path), features=ALL_FEATURES)
        claims = QUICK.replace("    backends:", "    api: dra\n    backends:")
        async with agent_at_work(
            tmp_path, config=claims, kubelet=kubelet, cluster_settings=settings
        ) as scene:
            await scene.wait_snapshot(lambda now: any(gpu.leases for gpu in now.gpus.values()))
            await scene.wait_snapshot(lambda now: not any(gpu.leases for gpu in now.gpus.values()))
