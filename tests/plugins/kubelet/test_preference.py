"""Preferred allocations: cases 45 to 49 of the contract."""

import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder, ResourceName, Share
from metagpu.core.state.events import Event, PreferenceMissed
from metagpu.core.state.facts import (
    GpusFound,
    KubeletStarted,
    LeasesObserved,
    PodsListed,
    SharesClaimed,
)
from metagpu.core.state.registry import Registry, Subscription
from metagpu.plugins.kubelet import preference
from metagpu.plugins.kubelet.fast_codec import PreferredAllocation
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.plugins.kubelet.preference import PreferenceMatcher, ShareChooser
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.kubelet.pods import SimContainer, SimPod
from tests.plugins.kubelet.rig import (
    METAGPU,
    OFFER_ALL,
    VISIBLE,
    Node,
    endpoint_of,
    gpu,
    ids,
    node,
    pod,
    simulated_kubelet,
)
from tests.rigs.build import layout_of
from tests.rigs.waiting import skip, stop_clock


async def test_kubelet_follows_our_choice(tmp_path: Path) -> None:
    """The kubelet gives the preferred shares: one GPU, the fullest first (case 45)."""
    async with node(tmp_path, config=OFFER_ALL) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        visible = []
        for name, shares in (("a", 4), ("b", 7), ("c", 3), ("d", 3)):
            options = await live_node.kubelet.admit(pod(name, shares))
            visible.append(options["main"].envs[VISIBLE])

        # 4 | 7 opens the second GPU | 3 fills it up | 3 goes beside the 4
        assert visible == [gpu(0).id, gpu(1).id, gpu(1).id, gpu(0).id]


@pytest.mark.parametrize("size", [6, 7])
async def test_shares_that_an_earlier_pod_may_hold_are_the_last_choice(size: int) -> None:
    """A kubelet that lost its checkpoint takes them for free, and Allocate would refuse them."""
    layout, registry = layout_of(gpu(0)), Registry()
    for fact in (
        GpusFound((gpu(0),), at=0),
        layout.offer_fact,
        SharesClaimed(layout.shares[:4], at=1),
        KubeletStarted((1, 2, 3)),
    ):
        registry.apply(fact)
    chooser = ShareChooser(
        ResourceName(METAGPU), registry, layout.backends.__getitem__, anyio.current_time
    )
    available = [share.id for share in layout.shares]
    chosen = chooser.choose(PreferredAllocation(available, (), size))
    assert len(set(chosen)) == size
    assert set(chosen).issubset(available[4:]) == (size <= 6)


@pytest.mark.parametrize("shares", [10, 15, 20])
async def test_large_request_keeps_to_its_numa_node(tmp_path: Path, shares: int) -> None:
    """A request larger than a GPU takes whole GPUs and a part, all NUMA-aligned (case 46)."""
    gpus = [gpu(n, numa_node=n // 2) for n in range(4)]
    kubelet = simulated_kubelet(tmp_path, numa_nodes=(0, 1), topology_policy="single-numa-node")

    async with node(tmp_path, *gpus, kubelet=kubelet) as live_node, kubelet.running():
        await live_node.until(40, 40)
        options = await kubelet.admit(pod("train", shares))
        visible = options["main"].envs[VISIBLE].split(",")

        assert len(visible) == -(-shares // 10)
        assert {index // 2 for index in range(4) if gpu(index).id in visible} == {0}


async def test_no_numa_node_is_no_topology(tmp_path: Path) -> None:
    """Shares of a GPU without a NUMA node carry no topology, and are allocatable (cases 47, 48)."""
    async with (
        node(tmp_path, gpu(0), gpu(1, numa_node=0)) as live_node,
        live_node.kubelet.running(),
    ):
        await live_node.until(20, 20)

        async with endpoint_of(live_node) as stub:
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

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        live_node.fault(0)

        async with endpoint_of(live_node) as stub:
            [chosen] = await preferred(stub, everything, must, size)
            [strange] = await preferred(stub, ["a", "b", "c"], [], 2)

        assert len(set(chosen)) == len(chosen) == size
        assert set(must) <= set(chosen)
        assert len(strange) == 2


async def test_preference_survives_a_broken_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a backend's failure the kubelet gets its own order back (case 49)."""

    def broken(*_: object) -> Sequence[Share]:
        raise ZeroDivisionError

    monkeypatch.setattr(FractionBackend, "prefer", broken)

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)

        async with endpoint_of(live_node) as stub:
            [chosen] = await preferred(stub, ids((0, 3), (0, 1)), ids((0, 1)), 2)

        assert chosen == ids((0, 1), (0, 3))
        await live_node.kubelet.admit(pod("train", 1))


async def preferred(
    stub: v1beta1.DevicePluginStub, available: list[str], must: list[str], size: int
) -> list[list[str]]:
    """Return the ids that we prefer."""
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


UUID, PARTS = "nvidia.com/use-gpuuuid", "gpus.metagpu.io/main"
POLICY = "hami.io/gpu-scheduler-policy"
RESOURCE = ResourceName(METAGPU)
GPUS = [gpu(n) for n in range(4)]


def pool(backend: str) -> str:
    """Write a configuration of one pool of a backend, all of whose shares are on offer."""
    return (
        "version: metagpu/v1\npools:\n  - name: all\n    backends:\n"
        f"      - {{resource: {METAGPU}, {backend}}}\n"
    )


FRACTIONS = pool("backend: fraction, sharesPerGpu: 10, offer: all")
SPLIT = pool("backend: fraction, sharesPerGpu: 10, split: accept")
TIMESLICES = pool("backend: timeslice, replicas: 10, allocationPolicy: packed")
WHOLE = pool("backend: whole")


def known(name: str, size: int, annotations: Mapping[str, str]) -> KnownPod:
    """Return a pod that is bound to the node and has still to be admitted."""
    return KnownPod(
        f"uid-{name}",
        "default",
        name,
        "Pending",
        arriving=True,
        gpu_annotations=annotations,
        containers={"main": {METAGPU: size}},
    )


class Pods:
    """The pods of a node as the API server lists them, and those that the kubelet admits."""

    def __init__(self, live_node: Node, missed: Subscription[Event]) -> None:
        self.node = live_node
        self._missed = missed
        self._known: dict[str, KnownPod] = {}

    def list(self, pods: Iterable[KnownPod]) -> None:
        """Report these pods beside the earlier ones."""
        self._known |= {known_pod.uid: known_pod for known_pod in pods}
        self.node.registry.apply(PodsListed(tuple(self._known.values())))

    def end(self, name: str) -> None:
        """Report that a pod is gone."""
        del self._known[f"uid-{name}"]
        self.list(())

    async def admit(self, name: str, size: int) -> dict[int, int]:
        """Admit a pod at the kubelet; return the number of its shares on each GPU's index."""
        admitted = pod(name, size)
        await self.node.kubelet.admit(admitted)
        ids = self.node.kubelet.devices(admitted)["main"][METAGPU]
        indices = {other.id: other.index for other in GPUS}
        return dict(Counter(indices[GpuId(share.partition("::")[0])] for share in ids))

    async def run(self, name: str, size: int, **annotations: str) -> dict[int, int]:
        """List a pod with annotations, given by their short names, and admit it."""
        keys = {"uuid": UUID, "parts": PARTS, "policy": POLICY}
        self.list([known(name, size, {keys[each]: text for each, text in annotations.items()})])
        return await self.admit(name, size)

    async def missed(self) -> PreferenceMissed:
        """Return the next report of a preference that is not followed."""
        with anyio.fail_after(30):
            event = await anext(aiter(self._missed))
        assert isinstance(event, PreferenceMissed)
        return event


@asynccontextmanager
async def pods_of(tmp_path: Path, config: str = FRACTIONS) -> AsyncIterator[Pods]:
    """Serve a node of four GPUs whose pods the API server lists."""
    async with node(tmp_path, *GPUS, config=config) as live_node, live_node.kubelet.running():
        amount = 4 if config == WHOLE else 40
        await live_node.until(amount, amount)
        with live_node.registry.events.subscribe(PreferenceMissed) as missed:
            pods = Pods(live_node, missed)
            pods.list(())
            yield pods


@pytest.mark.parametrize("config", [FRACTIONS, TIMESLICES, pool("backend: mps, replicas: 10")])
async def test_pods_run_on_the_gpus_that_they_name(tmp_path: Path, config: str) -> None:
    """Each pod gets its shares of the GPU that it names, which the pool would not choose."""
    async with pods_of(tmp_path, config) as pods:
        for n, index in enumerate((3, 1, 2, 3, 0, 2)):
            assert await pods.run(f"p{n}", 1, uuid=gpu(index).id) == {index: 1}


async def test_whole_gpus_are_those_that_are_named(tmp_path: Path) -> None:
    """Two whole GPUs of three that are named are two of these."""
    async with pods_of(tmp_path, WHOLE) as pods:
        named = ",".join(gpu(n).id for n in (1, 2, 3))
        assert 0 not in await pods.run("first", 2, uuid=named)


@pytest.mark.parametrize(("policy", "index"), [("binpack", 1), ("spread", 3)])
async def test_a_pod_chooses_the_policy(tmp_path: Path, policy: str, index: int) -> None:
    """Binpack takes the fullest GPU with enough, spread the emptiest; the pool would do else."""
    async with pods_of(tmp_path, TIMESLICES) as pods:
        for n, size in enumerate((9, 5, 2)):
            assert await pods.run(f"earlier-{n}", size, uuid=gpu(n).id) == {n: size}
        assert await pods.run("later", 3, policy=policy) == {index: 3}
        assert await pods.run("without", 1) == {0: 1}


async def test_a_request_is_parted_equally_where_the_pool_allows_it(tmp_path: Path) -> None:
    """40 of 100 shares from two GPUs are 20 of each; GPUs without so many are left out."""
    async with pods_of(tmp_path, SPLIT) as pods:
        assert await pods.run("neighbour", 8, uuid=gpu(0).id) == {0: 8}
        assert await pods.run("train", 6, parts="2") == {1: 3, 2: 3}
        assert await pods.run("named", 6, parts="3", uuid=f"{gpu(1).id},{gpu(2).id}") == {1: 6}
        assert "fewer than 3 of these GPUs" in (await pods.missed()).reason
        assert await pods.run("odd", 5, parts="2") == {2: 5}
        assert "5 shares have no 2 equal parts" in (await pods.missed()).reason


async def test_parts_that_a_pool_refuses_fail_no_pod(tmp_path: Path) -> None:
    """With `split: refuse` the shares come from one GPU, and the reason names the setting."""
    async with pods_of(tmp_path) as pods:
        assert await pods.run("train", 4, parts="2") == {0: 4}
        missed = await pods.missed()
    assert missed.containers == (("uid-train", "main"),)
    assert "split: accept" in missed.reason


async def test_timeslices_of_a_packed_pool_are_parted(tmp_path: Path) -> None:
    """Equal parts are taken from the GPUs one after another, whichever way a backend orders."""
    async with pods_of(tmp_path, TIMESLICES) as pods:
        assert await pods.run("two", 4, parts="2") == {0: 2, 1: 2}
        assert await pods.run("spread", 4, parts="2", policy="spread") == {2: 2, 3: 2}


async def test_a_full_gpu_is_named_in_vain(tmp_path: Path) -> None:
    """A pod whose GPU has too few shares runs elsewhere; the reason says what would help."""
    async with pods_of(tmp_path) as pods:
        await pods.run("earlier", 8, uuid=gpu(2).id)
        assert await pods.run("later", 3, uuid=gpu(2).id) == {0: 3}
        assert "have 2 of 3 shares on offer" in (await pods.missed()).reason
        assert await pods.run("nowhere", 3, uuid="GPU-of-another-node") == {0: 3}
        assert "no GPU of this node" in (await pods.missed()).reason


async def test_pods_that_prefer_the_same_need_not_be_told_apart(tmp_path: Path) -> None:
    """Replicas of one controller that arrive together all get the GPU that they name."""
    async with pods_of(tmp_path) as pods:
        pods.list(known(f"p{n}", 2, {UUID: gpu(2).id}) for n in range(4))
        assert [await pods.admit(f"p{n}", 2) for n in (2, 0, 3, 1)] == [{2: 2}] * 4


async def test_pods_that_cannot_be_told_apart_have_no_preference(tmp_path: Path) -> None:
    """Two requests of one size with different annotations: none is followed, both are reported."""
    async with pods_of(tmp_path) as pods:
        pods.list(known(f"p{n}", 2, {UUID: gpu(n).id}) for n in (2, 3))
        pods.list([known("another", 3, {UUID: gpu(1).id})])
        assert await pods.admit("p3", 2) == {0: 2}
        missed = await pods.missed()
        assert await pods.admit("another", 3) == {1: 3}
    assert missed.containers == (("uid-p2", "main"), ("uid-p3", "main"))
    assert "does not say for which" in missed.reason


async def test_a_request_waits_for_a_pod_that_the_kubelet_knows_sooner() -> None:
    """Once a pod has named a GPU, requests wait for their pods, up to a deadline."""
    registry = Registry()
    matcher = PreferenceMatcher(RESOURCE, registry, anyio.current_time, KubeletTiming(pod_wait=1e9))
    hasty = PreferenceMatcher(RESOURCE, registry, lambda: 0.0, KubeletTiming(pod_wait=0.0))
    registry.apply(PodsListed((known("earlier", 1, {UUID: "GPU-1"}),)))
    for preference_matcher in (matcher, hasty):
        await preference_matcher.wait_known([1])
    registry.apply(PodsListed(()))
    done = anyio.Event()

    async def wait() -> None:
        await matcher.wait_known([3])
        done.set()

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert not done.is_set()
        await hasty.wait_known([3])
        assert hasty.match(3, registry.snapshot) is None
        registry.apply(PodsListed((known("late", 3, {UUID: "GPU-3"}),)))
        with anyio.fail_after(30):
            await done.wait()
    found = matcher.match(3, registry.snapshot)
    assert found is not None
    assert (found.uid, found.preference.use_uuids) == ("uid-late", ("GPU-3",))


async def test_the_wait_for_an_unknown_pod_ends_after_20_ms() -> None:
    """By the clock of the loop, which stands still here but for what the test adds."""
    registry = Registry()
    matcher = PreferenceMatcher(RESOURCE, registry, anyio.current_time)
    registry.apply(PodsListed((known("other", 1, {UUID: "GPU-1"}),)))
    done = anyio.Event()
    stop_clock()

    async def wait() -> None:
        await matcher.wait_known([3])
        done.set()

    async def passes(seconds: float) -> None:
        skip(seconds)
        for _ in range(20):  # turns of the loop: more than an end takes
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await passes(0)
        await passes(0.0199)
        assert not done.is_set()
        await passes(0.0002)
        assert done.is_set()


async def test_a_pod_that_had_its_answer_is_not_asked_for_again() -> None:
    """The next request of its size waits for its own pod, while the kubelet admits the first."""
    registry = Registry()
    matcher = PreferenceMatcher(
        RESOURCE, registry, anyio.current_time, KubeletTiming(pod_wait=30.0)
    )
    first, second = (known(f"p{n}", 3, {UUID: f"GPU-{n}"}) for n in (1, 2))
    registry.apply(PodsListed((first,)))
    answered = matcher.match(3, registry.snapshot)

    done = anyio.Event()

    async def wait() -> None:
        await matcher.wait_known([3])
        done.set()

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert not done.is_set()
        registry.apply(PodsListed((first, second)))
    found = matcher.match(3, registry.snapshot)
    again = matcher.match(3, registry.snapshot)

    assert answered is not None
    assert found is not None
    assert (answered.uid, found.uid) == ("uid-p1", "uid-p2")
    assert again is None  # any of both may be meant, and they differ


async def test_containers_of_a_pod_are_asked_for_in_their_order() -> None:
    """Containers of one size are distinguished by the answers that they had."""
    registry = Registry()
    annotations = {"gpus.metagpu.io/a": "1", "gpus.metagpu.io/b": "2"}
    containers = {"a": {METAGPU: 2}, "b": {METAGPU: 2}}
    registry.apply(PodsListed((replace(known("p", 2, annotations), containers=containers),)))
    matcher = PreferenceMatcher(RESOURCE, registry, anyio.current_time)
    found = [matcher.match(2, registry.snapshot) for _ in range(2)]
    assert [container and (container.name, container.preference.parts) for container in found] == [
        ("a", 1),
        ("b", 2),
    ]


@pytest.mark.parametrize("policy", ["", "binpack"])
@pytest.mark.parametrize("config", [FRACTIONS, pool("backend: mps, replicas: 10")])
async def test_an_init_container_leaves_room_for_the_main_one(
    tmp_path: Path, config: str, policy: str
) -> None:
    """The main container, which gets the init container's shares again, has them on one GPU."""
    async with pods_of(tmp_path, config) as pods:
        assert await pods.run("neighbour", 7) == {0: 7}
        sizes = {"prepare": {METAGPU: 1}, "main": {METAGPU: 6}}
        prepare, main = (SimContainer(name, sizes[name]) for name in ("prepare", "main"))
        admitted = SimPod("train", containers=(main,), init_containers=(prepare,))
        annotations = {POLICY: policy} if policy else {}
        listed = replace(known("train", 6, annotations), containers=sizes, requests={METAGPU: 6})
        pods.list([replace(listed, handing_on=frozenset({"prepare"}))])
        await pods.node.kubelet.admit(admitted)
        held = pods.node.kubelet.devices(admitted)["main"][METAGPU]
        assert {name.partition("::")[0] for name in held} == {gpu(1).id}


async def test_the_room_is_that_of_one_gpu_if_the_whole_pod_needs_more(tmp_path: Path) -> None:
    """Of two containers that no GPU holds together, the first has its shares on one GPU."""
    async with pods_of(tmp_path) as pods:
        assert await pods.run("neighbour", 7) == {0: 7}
        sizes = {name: {METAGPU: n} for name, n in (("prepare", 1), ("a", 6), ("b", 6))}
        prepare, a, b = (SimContainer(name, limits) for name, limits in sizes.items())
        admitted = SimPod("train", containers=(a, b), init_containers=(prepare,))
        listed = replace(known("train", 6, {}), containers=sizes, requests={METAGPU: 12})
        pods.list([replace(listed, handing_on=frozenset({"prepare"}))])
        await pods.node.kubelet.admit(admitted)
        devices = pods.node.kubelet.devices(admitted)
        held = [
            {device.partition("::")[0] for device in devices[name][METAGPU]} for name in ("a", "b")
        ]
        assert held == [{gpu(1).id}, {gpu(2).id}]


async def test_a_request_waits_where_init_containers_hand_on_shares() -> None:
    """A pod that the kubelet knows sooner than metagpu gets its room too."""
    registry = Registry()
    matcher = PreferenceMatcher(RESOURCE, registry, anyio.current_time, KubeletTiming(pod_wait=1e9))

    def with_init(name: str) -> KnownPod:
        sizes = {"prepare": {METAGPU: 1}, "main": {METAGPU: 6}}
        return replace(
            known(name, 6, {}),
            containers=sizes,
            requests={METAGPU: 6},
            handing_on=frozenset({"prepare"}),
        )

    registry.apply(PodsListed((with_init("earlier"),)))
    assert matcher.rooms(1, registry.snapshot) == (6,)
    assert matcher.rooms(6, registry.snapshot) == ()
    await matcher.wait_known([1])
    registry.apply(PodsListed(()))
    async with anyio.create_task_group() as group:
        group.start_soon(matcher.wait_known, [1])
        await anyio.wait_all_tasks_blocked()
        assert matcher.rooms(1, registry.snapshot) == ()
        registry.apply(PodsListed((with_init("late"),)))
    assert matcher.rooms(1, registry.snapshot) == (6,)


async def test_a_recreated_pod_is_asked_for_while_its_predecessor_holds_shares(
    tmp_path: Path,
) -> None:
    """A pod of a StatefulSet has the name of the one before, whose shares are not released yet."""
    async with pods_of(tmp_path) as pods:
        assert await pods.run("db-0", 2, uuid=gpu(3).id) == {3: 2}
        holder = Holder("default", "db-0", "main")
        ids = dict.fromkeys(pods.node.registry.snapshot.gpus[gpu(3).id].leases, holder)
        pods.node.registry.apply(LeasesObserved(ids, at=anyio.current_time()))
        pods.end("db-0")
        pods.list([replace(known("db-0", 2, {UUID: gpu(1).id}), uid="uid-later")])
        await pods.node.kubelet.admit(later := pod("later", 2))
        [one, _] = pods.node.kubelet.devices(later)["main"][METAGPU]
        assert one.startswith(gpu(1).id)


async def test_nobody_waits_where_no_pod_names_a_gpu(tmp_path: Path) -> None:
    """Without annotations in the cluster, a pod that is unknown is admitted at once."""
    endless = KubeletTiming(pod_wait=math.inf)
    async with (
        node(tmp_path, *GPUS, config=FRACTIONS, timing=endless) as live_node,
        live_node.kubelet.running(),
    ):
        await live_node.until(40, 40)
        with anyio.fail_after(30):
            await live_node.kubelet.admit(pod("without-an-api-server", 1))
            live_node.registry.apply(PodsListed((known("other", 5, {}),)))
            await live_node.kubelet.admit(pod("unknown", 1))


async def test_a_fault_of_a_preference_fails_no_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error, the pod has the shares that it would have without a preference."""

    def broken(*_: object) -> object:
        raise ZeroDivisionError

    async with pods_of(tmp_path) as pods:
        monkeypatch.setattr(preference, "prefer_by_annotations", broken)
        assert await pods.run("train", 4, uuid=gpu(3).id) == {0: 4}
