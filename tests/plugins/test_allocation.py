"""How pods get shares: cases 28 to 49 of the contract, as far as they concern a plugin."""

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import grpclib
import pytest
from grpclib.client import Channel
from grpclib.const import Status

from metagpu.backends.fraction import FractionBackend
from metagpu.core.errors import RequestError
from metagpu.core.facts import SharesOffered
from metagpu.core.grant import Grant
from metagpu.core.model import ResourceName, Share
from metagpu.core.snapshot import Snapshot
from metagpu.plugins import service, serving
from metagpu.plugins.pb import v1, v1alpha1, v1beta1
from metagpu.sim.kubelet import AdmissionError, Container, ContainerStartError, Pod
from tests.plugins.rig import (
    CONFIG,
    FOUR_RESOURCES,
    METAGPU,
    RESOURCES,
    allocate,
    endpoint_of,
    gpu,
    ids,
    node,
    pod,
    simulated_kubelet,
)
from tests.waiting import skip

VISIBLE = "NVIDIA_VISIBLE_DEVICES"


async def test_pod_gets_its_gpu(tmp_path: Path) -> None:
    """A pod of one share gets one GPU, and both PodResources services name it (case 28)."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        running = pod("train", 1)
        options = await it.kubelet.admit(running)

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
    """Two resources of a container are merged; what is too much fails, the rest is to be had.

    (case 30) By mounts, both GPUs are told; an environment variable could name only one of them.
    """
    gpus = [gpu(n) for n in range(4)]
    config = "deviceListStrategy: volume-mounts\n" + FOUR_RESOURCES
    one, two = RESOURCES[:2]

    async with node(tmp_path, *gpus, config=config) as it, it.kubelet.running():
        await it.until(100, 100, one)
        await it.until(100, 100, two)
        both = Pod("both", containers=(Container("main", {one: 2, two: 1}),))
        options = await it.kubelet.admit(both)

        assert {mount.container_path for mount in options["main"].mounts} == {
            f"/var/run/nvidia-container-devices/{gpu(n).id}" for n in (0, 1)
        }

        with pytest.raises(AdmissionError, match=r"Requested: 99, Available: 98"):
            await it.kubelet.admit(pod("greedy", 99, one))
        await it.kubelet.admit(pod("rest", 98, one))
        await it.kubelet.admit(pod("other", 99, two))


async def test_the_three_refusals_of_the_kubelet(tmp_path: Path) -> None:
    """Held but broken, nothing healthy, and unregistered are told apart (case 31)."""
    now = [1000.0]
    kubelet = simulated_kubelet(tmp_path, clock=lambda: now[0])

    async with kubelet.running(), node(tmp_path, kubelet=kubelet) as it:
        await it.until(20, 20)
        held, kept = pod("held", 3), pod("kept", 10)
        await kubelet.admit(held)
        await kubelet.admit(kept)
        await kubelet.start_container(kept, "main")
        it.fault(0)
        await it.until(20, 10)
        await kubelet.restart()
        await it.until(20, 10)
        lost = await kubelet.readmit()

        assert list(lost) == [held.uid]
        assert "previously allocated devices are no longer healthy" in lost[held.uid].message

        it.fault(1)
        await it.until(20, 0)

        with pytest.raises(AdmissionError, match="no healthy devices present"):
            await kubelet.admit(pod("late", 1))

    async with kubelet.running():
        now[0] += 301
        await kubelet.tick()

        with pytest.raises(AdmissionError, match="cannot allocate unregistered device"):
            await kubelet.admit(pod("later", 1))


class Preparing(FractionBackend):
    """Fractions that want to be called before a container starts."""

    prepares = True

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.prepared: list[list[str]] = []
        self.refusal: RequestError | None = None
        self.begin: Callable[[], None] = lambda: None
        self.wait = anyio.Event()
        self.wait.set()

    async def prepare(self, shares: Sequence[Share], snapshot: Snapshot) -> None:
        """Note the call."""
        del snapshot
        self.begin()
        await self.wait.wait()
        self.prepared.append([share.id for share in shares])
        if self.refusal is not None:
            raise self.refusal


def preparing(monkeypatch: pytest.MonkeyPatch) -> list[Preparing]:
    """Let `fraction` prepare; give the backends made."""
    made: list[Preparing] = []

    def configured(options: object, injection: object) -> Preparing:
        made.append(Preparing(options, injection))
        return made[-1]

    monkeypatch.setattr(FractionBackend, "configured", staticmethod(configured))
    return made


async def test_prepare_is_called_with_the_pods_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that prepares is called at each start with exactly the pod's ids (case 36)."""
    made = preparing(monkeypatch)

    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        running = pod("train", 2)
        await it.kubelet.admit(running)
        await it.kubelet.start_container(running, "main")
        await it.kubelet.start_container(running, "main")

        nothing = pod("nothing", 0)
        await it.kubelet.admit(nothing)
        await it.kubelet.start_container(nothing, "main")

        held = sorted(it.kubelet.devices(running)["main"][METAGPU])
        assert [sorted(call) for call in made[-1].prepared] == [held, held]


async def test_prepare_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that takes too long or is refused fails with our text; the next works (case 37)."""
    made = preparing(monkeypatch)
    kubelet = simulated_kubelet(tmp_path)

    async with node(tmp_path, kubelet=kubelet) as it, kubelet.running():
        await it.until(20, 20)
        running = pod("train", 2)
        await kubelet.admit(running)

        made[-1].wait, made[-1].begin = anyio.Event(), lambda: skip(30)
        with pytest.raises(ContainerStartError):
            await kubelet.start_container(running, "main")
        made[-1].wait.set()
        made[-1].begin = lambda: None

        made[-1].refusal = RequestError("the GPU is being cleaned")
        with pytest.raises(ContainerStartError, match="the GPU is being cleaned"):
            await kubelet.start_container(running, "main")

        made[-1].refusal = None
        await kubelet.start_container(running, "main")


async def test_held_pod_comes_back_with_no_capacity_left(tmp_path: Path) -> None:
    """A pod that holds everything is admitted again after a restart (case 39)."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        everything = pod("all", 20)
        await it.kubelet.admit(everything)
        await it.kubelet.start_container(everything, "main")
        await it.kubelet.restart()

        assert await it.kubelet.readmit() == {}


async def test_unknown_share_is_refused_after_a_list(tmp_path: Path) -> None:
    """An id we do not offer is refused in words, and the list is sent before (case 40)."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)

        async with endpoint_of(it) as stub:
            with pytest.raises(grpclib.GRPCError) as refused:
                await allocate(stub, ["GPU-gone::m01"])

        assert it.record.of(ResourceName(METAGPU)).lists == 2  # sent before the refusal came
        assert refused.value.status is Status.NOT_FOUND
        assert "no share has the id 'GPU-gone::m01'" in str(refused.value.message)
        await it.kubelet.wait_for(lambda: it.kubelet.lists[METAGPU] == 2)


async def test_slow_reader_gets_whole_lists_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal while a list is stuck behind a slow reader leaves the stream whole (case 40)."""
    monkeypatch.setattr(service, "TELL_DEADLINE", 0.05)
    lists: list[int] = []

    many = CONFIG.replace("10", "9000")

    async with node(tmp_path, gpu(0), config=many) as it, it.kubelet.running():
        await it.until(9000, 9000)

        async with endpoint_of(it) as stub, endpoint_of(it) as other:
            async for answer in stub.list_and_watch(v1beta1.Empty()):
                lists.append(len(answer.devices))
                if len(lists) == 1:
                    # Nobody reads this stream now, and a list is larger than its window.
                    for _ in range(3):
                        with pytest.raises(grpclib.GRPCError):
                            await allocate(other, ["GPU-gone::m01"])
                if len(lists) == 4:
                    break

    assert lists == [9000] * 4


async def test_broken_share_is_refused_with_the_reason(tmp_path: Path) -> None:
    """A share of a broken GPU is refused with the fault's own words (case 40)."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        it.fault(0, "XID 79: GPU has fallen off the bus")

        async with endpoint_of(it) as stub:
            with pytest.raises(grpclib.GRPCError, match="fallen off the bus") as refused:
                await allocate(stub, ids((0, 1)))

        assert refused.value.status is Status.FAILED_PRECONDITION
        assert it.counts() == (20, 10)


async def test_refused_pod_is_told_what_is_free_where(tmp_path: Path) -> None:
    """A fraction that fits on no GPU fails with a message that says what is free where."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        await it.kubelet.admit(pod("one", 6))
        await it.kubelet.admit(pod("two", 6))

        with pytest.raises(AdmissionError) as refused:
            await it.kubelet.admit(pod("three", 8))

        assert refused.value.reason == "UnexpectedAdmissionError"
        assert "8 shares do not fit" in refused.value.message
        assert "free now: GPU 0: 4, GPU 1: 4" in refused.value.message

        await it.kubelet.admit(pod("small", 4))


async def test_split_may_be_accepted(tmp_path: Path) -> None:
    """Where the configuration accepts splits, such a pod gets both GPUs."""
    config = CONFIG + "        split: accept\n"

    async with node(tmp_path, config=config) as it, it.kubelet.running():
        await it.until(20, 20)
        await it.kubelet.admit(pod("one", 6))
        await it.kubelet.admit(pod("two", 6))
        options = await it.kubelet.admit(pod("three", 8))

        assert options["main"].envs[VISIBLE] == f"{gpu(0).id},{gpu(1).id}"
        assert options["main"].envs["METAGPU_MAX_MEM"] == str(8 * 4096)


async def test_one_response_for_each_container(tmp_path: Path) -> None:
    """Several container requests in one call get as many answers, in order (case 41)."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)

        async with endpoint_of(it) as stub:
            answers = await allocate(stub, ids((1, 0)), ids((0, 0), (0, 1)), ids((1, 1)))

        assert [answer.envs[VISIBLE] for answer in answers] == [
            gpu(1).id,
            gpu(0).id,
            gpu(1).id,
        ]


async def test_refused_container_gives_the_others_back(tmp_path: Path) -> None:
    """When one container of a call is refused, none of them holds anything."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)

        async with endpoint_of(it) as stub:
            with pytest.raises(grpclib.GRPCError):
                await allocate(stub, ids((0, 0)), ["GPU-gone::m01"])

        assert it.registry.snapshot.gpus[gpu(0).id].leases == {}


async def test_order_of_ids_does_not_matter(tmp_path: Path) -> None:
    """The same set gives the same answer, in whatever order it comes (case 42)."""
    wanted = ids(
        (1, 3), (0, 0), (0, 1), *((1, n) for n in (9, 0, 4)), *((0, n) for n in range(2, 10))
    )

    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)

        async with endpoint_of(it) as stub:
            [one] = await allocate(stub, wanted)
            [other] = await allocate(stub, list(reversed(wanted)))

        assert bytes(one) == bytes(other)
        assert one.envs[VISIBLE] == f"{gpu(0).id},{gpu(1).id}"


async def test_same_share_twice_for_one_pod(tmp_path: Path) -> None:
    """A share that an init container hands on to its app is granted again (case 43)."""
    handing = Pod(
        "train",
        containers=(Container("main", {METAGPU: 3}),),
        init_containers=(Container("fetch", {METAGPU: 3}),),
    )

    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        options = await it.kubelet.admit(handing)

        assert options["main"].envs[VISIBLE] == options["fetch"].envs[VISIBLE]
        assert len(it.registry.snapshot.gpus[gpu(0).id].leases) == 3


async def test_stopping_answers_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that stops in the middle of a grant leaves nobody waiting, or holding (case 44)."""
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
        async with node(tmp_path, kubelet=kubelet) as it:
            await it.until(20, 20)
            group.start_soon(admit)
            await asked.wait()
        with anyio.fail_after(30):
            while not failed:
                await anyio.lowlevel.checkpoint()

    assert it.registry.snapshot.gpus[gpu(0).id].leases == {}


async def test_kubelet_follows_our_choice(tmp_path: Path) -> None:
    """What the kubelet hands out is what we preferred: one GPU, the fullest first (case 45)."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        visible = []
        for name, shares in (("a", 4), ("b", 7), ("c", 3), ("d", 3)):
            options = await it.kubelet.admit(pod(name, shares))
            visible.append(options["main"].envs[VISIBLE])

        # 4 | 7 opens the second GPU | 3 fills it up | 3 goes beside the 4
        assert visible == [gpu(0).id, gpu(1).id, gpu(1).id, gpu(0).id]


@pytest.mark.parametrize("shares", [10, 15, 20])
async def test_large_request_keeps_to_its_numa_node(tmp_path: Path, shares: int) -> None:
    """A request for more than a GPU takes whole ones and one part, all NUMA-aligned (case 46)."""
    gpus = [gpu(n, numa_node=n // 2) for n in range(4)]
    kubelet = simulated_kubelet(tmp_path, numa_nodes=(0, 1), topology_policy="single-numa-node")

    async with node(tmp_path, *gpus, kubelet=kubelet) as it, kubelet.running():
        await it.until(40, 40)
        options = await kubelet.admit(pod("train", shares))
        visible = options["main"].envs[VISIBLE].split(",")

        assert len(visible) == -(-shares // 10)
        assert {index // 2 for index in range(4) if gpu(index).id in visible} == {0}


async def test_no_numa_node_is_no_topology(tmp_path: Path) -> None:
    """Shares of a GPU without a NUMA node carry no topology, and are allocatable (cases 47, 48)."""
    async with node(tmp_path, gpu(0), gpu(1, numa_node=0)) as it, it.kubelet.running():
        await it.until(20, 20)

        async with endpoint_of(it) as stub:
            async for answer in stub.list_and_watch(v1beta1.Empty()):
                nodes = {
                    device.id.partition("::")[0]: device.topology and device.topology.nodes
                    for device in answer.devices
                }
                break

        assert nodes == {gpu(0).id: None, gpu(1).id: [v1beta1.NumaNode(id=0)]}


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20])
async def test_preference_is_exact(tmp_path: Path, size: int) -> None:
    """A preference is exactly as many ids as asked for, and never an error (case 49)."""
    everything = ids(*((g, n) for g in (0, 1) for n in range(10)))
    must = ids((1, 5), (1, 2))[:size]

    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        it.fault(0)

        async with endpoint_of(it) as stub:
            [chosen] = await preferred(stub, everything, must, size)
            [strange] = await preferred(stub, ["a", "b", "c"], [], 2)

        assert len(set(chosen)) == len(chosen) == size
        assert set(must) <= set(chosen)
        assert len(strange) == 2


async def test_preference_survives_a_broken_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the backend fails, the kubelet gets its own order back (case 49)."""

    def broken(*_: object) -> Sequence[Share]:
        raise ZeroDivisionError

    monkeypatch.setattr(FractionBackend, "prefer", broken)

    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)

        async with endpoint_of(it) as stub:
            [chosen] = await preferred(stub, ids((0, 3), (0, 1)), ids((0, 1)), 2)

        assert chosen == ids((0, 1), (0, 3))
        await it.kubelet.admit(pod("train", 1))


async def test_what_is_being_answered_is_answered_before_the_list_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resource that is withdrawn meanwhile costs no pod its answer: its list waits for that."""
    monkeypatch.setattr(serving, "LINGER", 60.0)
    asked, go_on = anyio.Event(), anyio.Event()
    grant = FractionBackend.grant

    async def slow(it: FractionBackend, shares: Sequence[Share], now: Snapshot) -> Grant:
        asked.set()
        await go_on.wait()
        return await grant(it, shares, now)

    monkeypatch.setattr(FractionBackend, "grant", slow)
    async with node(tmp_path) as it, it.kubelet.running(), anyio.create_task_group() as group:
        await it.until(20, 20)
        group.start_soon(it.kubelet.admit, pod("train", 1))
        await asked.wait()
        [socket] = it.sockets()
        it.registry.apply(SharesOffered((), ()))
        with anyio.fail_after(30):
            while socket.exists():  # noqa: ASYNC110 - a file tells nobody
                await anyio.sleep(0.01)
        go_on.set()


async def test_foreign_error_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is not ours reaches the pod with its name, not as Internal Server Error."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(FractionBackend, "check", broken)

    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)

        with pytest.raises(AdmissionError, match="ZeroDivisionError: a bug"):
            await it.kubelet.admit(pod("train", 2))


async def preferred(
    stub: v1beta1.DevicePluginStub, available: list[str], must: list[str], size: int
) -> list[list[str]]:
    """Ask which ids we would take."""
    answer = await stub.get_preferred_allocation(
        v1beta1.PreferredAllocationRequest(
            container_requests=[
                v1beta1.ContainerPreferredAllocationRequest(
                    available_deviceIDs=available,
                    must_include_deviceIDs=must,
                    allocation_size=size,
                )
            ]
        )
    )
    return [response.device_i_ds for response in answer.container_responses]
