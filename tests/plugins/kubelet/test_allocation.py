"""Pods that get shares: cases 28 to 44 of the contract, as far as they concern a plugin."""

from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import grpclib
import pytest
from grpclib.client import Channel
from hyperframe.frame import DataFrame

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.core.contracts.backend import Backend
from metagpu.core.grants.grant import Grant
from metagpu.core.model.shares import ResourceName, Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import SharesOffered
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet.device_plugin import DevicePluginService
from metagpu.plugins.kubelet.pb import v1, v1alpha1, v1beta1
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.kubelet.kubelet import AdmissionError, SimContainer, SimPod
from tests.plugins.kubelet.rig import (
    CONFIG,
    FOUR_RESOURCES,
    METAGPU,
    RESOURCES,
    VISIBLE,
    allocate,
    endpoint_of,
    gpu,
    ids,
    node,
    pod,
    simulated_kubelet,
)
from tests.rigs.waiting import becomes


async def test_pod_gets_its_gpu(tmp_path: Path) -> None:
    """A pod of one share gets one GPU, and both PodResources services name it (case 28)."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        running = pod("train", 1)
        options = await live_node.kubelet.admit(running)

        assert options["main"].envs[VISIBLE] == gpu(0).id
        assert options["main"].envs["METAGPU_MAX_MEM"] == "4096"

        async with Channel(path=str(tmp_path / "pod-resources.sock")) as channel:
            answer = await v1.PodResourcesListerStub(channel).list(v1.ListPodResourcesRequest())
            alpha = await v1alpha1.PodResourcesListerStub(channel).list(
                v1alpha1.ListPodResourcesRequest()
            )

        assert [
            (p.name, d.resource_name, d.device_ids)
            for p in answer.pod_resources
            for c in p.containers
            for d in c.devices
        ] == [("train", METAGPU, ids((0, 0)))]
        assert alpha.pod_resources[0].containers[0].devices[0].device_ids == ids((0, 0))


async def test_two_resources_in_one_container(tmp_path: Path) -> None:
    """Two resources of a container are merged; a request beyond the free shares fails.

    Mounts name both GPUs (case 30); an environment variable can name only one of them.
    """
    gpus = [gpu(n) for n in range(4)]
    config = "deviceListStrategy: volume-mounts\n" + FOUR_RESOURCES
    one, two = RESOURCES[:2]

    async with node(tmp_path, *gpus, config=config) as live_node, live_node.kubelet.running():
        await live_node.until(100, 100, one)
        await live_node.until(100, 100, two)
        both = SimPod("both", containers=(SimContainer("main", {one: 2, two: 1}),))
        options = await live_node.kubelet.admit(both)

        assert {mount.container_path for mount in options["main"].mounts} == {
            f"/var/run/nvidia-container-devices/{gpu(n).id}" for n in (0, 1)
        }

        with pytest.raises(AdmissionError, match=r"Requested: 99, Available: 98"):
            await live_node.kubelet.admit(pod("greedy", 99, one))
        await live_node.kubelet.admit(pod("rest", 98, one))
        await live_node.kubelet.admit(pod("other", 99, two))


async def test_held_pod_comes_back_with_no_capacity_left(tmp_path: Path) -> None:
    """A pod that holds everything is admitted again after a restart (case 39)."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        everything = pod("all", 20)
        await live_node.kubelet.admit(everything)
        await live_node.kubelet.start_container(everything, "main")
        await live_node.kubelet.restart()

        assert await live_node.kubelet.readmit() == {}


async def test_slow_reader_gets_whole_lists_only(tmp_path: Path) -> None:
    """A refusal while a list waits for a slow reader leaves the stream whole (case 40)."""
    timing = KubeletTiming(flush_deadline=0.05)
    lists: list[int] = []

    many = CONFIG.replace("10", "9000")

    async with (
        node(tmp_path, gpu(0), config=many, timing=timing) as live_node,
        live_node.kubelet.running(),
    ):
        await live_node.until(9000, 9000)

        async with endpoint_of(live_node) as stub, endpoint_of(live_node) as other:
            async for answer in stub.list_and_watch(v1beta1.Empty()):
                lists.append(len(answer.devices))
                if len(lists) == 1:
                    # Nobody reads this stream now, and a list is larger than its window.
                    for _ in range(3):
                        with pytest.raises(grpclib.GRPCError):
                            await allocate(other, ["GPU-gone::m01"])
                if len(lists) == 2:
                    break

    assert lists == [9000] * 2


def never_asked(resource: ResourceName) -> Backend:
    """Fail the test, as it has no backend."""
    raise AssertionError(resource)


async def test_reader_that_stalls_delays_one_refusal() -> None:
    """A list that its reader does not take is waited for once, not at each refusal."""
    service = DevicePluginService(ResourceName(METAGPU), Registry(), never_asked)
    started: list[anyio.Event] = []
    idle = anyio.Event()
    idle.set()
    service._list_senders[started.append] = idle

    service._flush_deadline = 0.01
    await service._flush_lists()
    service._flush_deadline = 1e6
    with anyio.fail_after(30):
        await service._flush_lists()
    assert len(started) == 1

    started[0].set()  # the reader goes on
    service._flush_deadline = 0.01
    await service._flush_lists()
    assert len(started) == 2


async def test_a_refusal_waits_no_longer_than_for_its_list(tmp_path: Path) -> None:
    """A refusal leaves as soon as the kubelet has the list, not at the deadline."""
    timing = KubeletTiming(flush_deadline=3600.0)
    async with node(tmp_path, timing=timing) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        async with endpoint_of(live_node) as stub:
            with anyio.fail_after(30), pytest.raises(grpclib.GRPCError):
                await allocate(stub, ["GPU-gone::m01"])
            await allocate(stub, ids((0, 0)))
        # A daemon that ends waits for the calls that are not answered.
        await becomes(lambda: live_node.record.in_flight == 0)


async def test_one_response_for_each_container(tmp_path: Path) -> None:
    """Several container requests in one call get as many answers, in order (case 41)."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)

        async with endpoint_of(live_node) as stub:
            answers = await allocate(stub, ids((1, 0)), ids((0, 0), (0, 1)), ids((1, 1)))

        assert [answer.envs[VISIBLE] for answer in answers] == [
            gpu(1).id,
            gpu(0).id,
            gpu(1).id,
        ]


async def test_order_of_ids_does_not_matter(tmp_path: Path) -> None:
    """The same set gives the same answer, in whatever order it comes (case 42)."""
    wanted = ids(
        (1, 3), (0, 0), (0, 1), *((1, n) for n in (9, 0, 4)), *((0, n) for n in range(2, 10))
    )

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)

        async with endpoint_of(live_node) as stub:
            [one] = await allocate(stub, wanted)
            [other] = await allocate(stub, list(reversed(wanted)))

        assert bytes(one) == bytes(other)
        assert one.envs[VISIBLE] == f"{gpu(0).id},{gpu(1).id}"


async def test_same_share_twice_for_one_pod(tmp_path: Path) -> None:
    """A share that an init container passes on to its app is granted again (case 43)."""
    handing = SimPod(
        "train",
        containers=(SimContainer("main", {METAGPU: 3}),),
        init_containers=(SimContainer("fetch", {METAGPU: 3}),),
    )

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        options = await live_node.kubelet.admit(handing)

        assert options["main"].envs[VISIBLE] == options["fetch"].envs[VISIBLE]
        assert len(live_node.registry.snapshot.gpus[gpu(0).id].leases) == 3


async def test_stopping_answers_waiting_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that stops during a grant leaves no waiting caller and no lease (case 44)."""
    asked = anyio.Event()

    async def never(self: FractionBackend, shares: Sequence[Share], snapshot: Snapshot) -> Grant:
        del self, shares, snapshot
        asked.set()
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(FractionBackend, "grant", never)
    failed: list[AdmissionError] = []

    async def admit() -> None:
        try:
            await kubelet.admit(pod("train", 1))
        except AdmissionError as error:
            failed.append(error)

    async with simulated_kubelet(tmp_path).running() as kubelet, anyio.create_task_group() as group:
        async with node(tmp_path, kubelet=kubelet) as live_node:
            await live_node.until(20, 20)
            group.start_soon(admit)
            await asked.wait()
        with anyio.fail_after(30):
            while not failed:
                await anyio.lowlevel.checkpoint()

    assert live_node.registry.snapshot.gpus[gpu(0).id].leases == {}


async def test_a_pending_allocation_is_answered_before_the_list_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A withdrawn resource ends its list only after the answer to a waiting pod."""
    timing = KubeletTiming(linger=60.0)
    asked, go_on = anyio.Event(), anyio.Event()
    grant = FractionBackend.grant

    async def slow(backend: FractionBackend, shares: Sequence[Share], now: Snapshot) -> Grant:
        asked.set()
        await go_on.wait()
        return await grant(backend, shares, now)

    monkeypatch.setattr(FractionBackend, "grant", slow)
    async with (
        node(tmp_path, timing=timing) as live_node,
        live_node.kubelet.running(),
        anyio.create_task_group() as group,
    ):
        await live_node.until(20, 20)
        group.start_soon(live_node.kubelet.admit, pod("train", 1))
        await asked.wait()
        [socket] = live_node.sockets()
        live_node.registry.apply(SharesOffered((), ()))
        await becomes(lambda: not socket.exists())
        go_on.set()


async def test_frames_are_not_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte of a call is written in hexadecimal for h2's log, which nobody reads."""

    def described(_: DataFrame) -> str:
        raise AssertionError

    monkeypatch.setattr(DataFrame, "_body_repr", described)
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        await live_node.kubelet.admit(pod("train", 4))
