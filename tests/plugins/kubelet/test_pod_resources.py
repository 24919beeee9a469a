"""Holders of shares, read from the kubelet, and the kubelet's refusals."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from msgspec.structs import replace

from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder
from metagpu.core.state.facts import (
    Fact,
    KubeletStarted,
    LeasesObserved,
    PodsListed,
    SharesReleased,
)
from metagpu.plugins.kubelet import pod_list, pod_resources
from metagpu.plugins.kubelet.paths import CHECKPOINT_FILE, KUBELET_SOCKET, KubeletFiles, find_files
from metagpu.plugins.kubelet.pb import v1
from metagpu.plugins.kubelet.pod_list import parse_leases, read_leases
from metagpu.plugins.kubelet.pod_resources import LeaseFollower
from metagpu.plugins.kubelet.restart_guard import KubeletReadiness
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.kubelet.kubelet import SimContainer, SimPod
from metagpu.sim.kubelet.pod_resources import PodResourcesSource
from metagpu.sim.kubelet.transport import AbortableServer
from tests.plugins.kubelet.rig import METAGPU, Node, gpu, ids, node, pod
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes, skip

CHECKPOINT = f"device-plugins/{CHECKPOINT_FILE}"
SHARED_POOL = f"""
version: metagpu/v1
pools:
  - name: all
    backends:
      - {{backend: fraction, resource: {METAGPU}, sharesPerGpu: 10}}
      - {{backend: whole}}
"""


SLOW = KubeletTiming(poll_period=1e9, contended_period=1e9, settle=0.01)
"""The kubelet is asked after a trigger alone."""
QUICK = KubeletTiming(poll_period=0.01, contended_period=0.01, settle=0.01)


@asynccontextmanager
async def following(
    live_node: Node, tmp_path: Path, timing: KubeletTiming = QUICK
) -> AsyncIterator[LeaseFollower]:
    """Follow the leases while the block lasts."""
    async with anyio.create_task_group() as group:
        socket, directory = tmp_path / "pod-resources.sock", tmp_path / "device-plugins"
        follower = LeaseFollower(
            live_node.registry, socket, directory=directory, node="node-1", timing=timing
        )
        group.start_soon(follower.run)
        yield follower
        group.cancel_scope.cancel()


async def held(live_node: Node, count: int) -> None:
    """Wait until so many shares have a holder."""
    with anyio.fail_after(30):
        async for snapshot in live_node.registry.watch(lambda now: now):
            leases = [i for state in snapshot.gpus.values() for i in state.leases.values()]
            if len(leases) == count and all(lease.holder for lease in leases):
                return


async def start(live_node: Node, follower: LeaseFollower | None = None) -> SimPod:
    """Start a pod with three shares; return it once they have their holder."""
    if follower is not None:
        with anyio.fail_after(30):  # before it has read the leases, nothing is granted
            await follower.known.wait()
    await live_node.until(20, 20)
    train = pod("train", 3)
    await live_node.kubelet.admit(train)
    await held(live_node, 3)
    return train


async def rest(follower: LeaseFollower) -> None:
    """Wait until the kubelet has been asked for all that has happened so far."""
    looked = None
    while looked != follower._looked_at:
        looked = follower._looked_at
        await anyio.sleep(0.05)  # longer than it settles
        await anyio.wait_all_tasks_blocked()
        async with follower._looking:  # until the kubelet has answered
            pass


async def test_every_share_has_its_holder(tmp_path: Path) -> None:
    """Each held share has namespace, pod and container of its holder."""
    two = SimPod(
        "two",
        namespace="research",
        containers=(SimContainer("a", {METAGPU: 1}), SimContainer("b", {METAGPU: 2})),
    )

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        await live_node.kubelet.admit(two)
        seen = await read_leases(tmp_path / "pod-resources.sock", 1.0)

    assert set(seen.resources.values()) == {METAGPU}
    assert seen.holders == {
        ids((0, 0))[0]: Holder("research", "two", "a"),
        ids((0, 1))[0]: Holder("research", "two", "b"),
        ids((0, 2))[0]: Holder("research", "two", "b"),
    }


async def test_grant_wakes_the_reader(tmp_path: Path) -> None:
    """A grant triggers a query soon, before the next periodic one."""
    async with (
        node(tmp_path) as live_node,
        live_node.kubelet.running(),
        following(live_node, tmp_path, SLOW),
    ):
        await live_node.until(20, 20)
        await anyio.wait_all_tasks_blocked()
        await live_node.kubelet.admit(pod("train", 3))
        await held(live_node, 3)

        assert live_node.registry.snapshot.gpus[gpu(0).id].owner == "fraction"


def test_containers_of_resource_claims_are_read_with_their_shares() -> None:
    """A claim that two pods share names both; a device counts once, and one of others not."""
    name = f"metagpu.io/claim=uid-1.{gpu(0).id}.fraction.m00-m01"
    listed = v1.ListPodResourcesResponse(
        pod_resources=[
            v1.PodResources(
                name=pod_name,
                namespace="default",
                containers=[
                    v1.ContainerResources(
                        name="main",
                        dynamic_resources=[
                            v1.DynamicResource(
                                claim_name="c",
                                claim_namespace="default",
                                claim_resources=[
                                    v1.ClaimResource(
                                        driver_name="gpu.metagpu.io",
                                        cdi_devices=[
                                            v1.CdiDevice(name=text)
                                            for text in ("metagpu.io/gpu=GPU-0", name, "a.io/b=c")
                                        ],
                                    )
                                ]
                                * 2,  # as after a restart of the kubelet
                            )
                        ],
                    )
                ],
            )
            for pod_name in ("a", "b")
        ]
    )
    found = parse_leases(bytes(listed), 0).of_claims
    holders = Holder("default", "a", "main"), Holder("default", "b", "main")
    shares = [f"{gpu(0).id}::m00", f"{gpu(0).id}::m01"]
    assert found == {("uid-1", share): holders for share in shares}


async def test_released_when_the_pod_is_gone(tmp_path: Path) -> None:
    """A share is free again once the kubelet no longer lists it."""
    async with (
        node(tmp_path) as live_node,
        live_node.kubelet.running(),
        following(live_node, tmp_path),
    ):
        train = await start(live_node)
        await live_node.kubelet.delete(train)
        await held(live_node, 0)


async def test_released_soon_where_others_want_the_gpu(tmp_path: Path) -> None:
    """While a lease makes other shares unavailable, its end is polled more often."""
    timing = KubeletTiming(poll_period=1e9, contended_period=0.01, settle=0.01)

    async with (
        node(tmp_path, config=SHARED_POOL) as live_node,
        live_node.kubelet.running(),
        following(live_node, tmp_path, timing),
    ):
        train = await start(live_node)
        await anyio.wait_all_tasks_blocked()
        await live_node.kubelet.delete(train)
        await held(live_node, 0)


async def test_a_pods_end_wakes_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's end at the API server triggers a query, if the pod held a share."""
    looks: list[Fact] = []

    async with (
        node(tmp_path) as live_node,
        live_node.kubelet.running(),
        following(live_node, tmp_path, SLOW) as follower,
    ):
        train = await start(live_node)
        known = KnownPod("t", "default", "train", "Running")
        others = KnownPod("o", "default", "other", "Running")
        live_node.registry.apply(PodsListed((known, others)))
        apply = live_node.registry.apply

        def look(fact: Fact) -> bool:
            looks.append(fact)
            return apply(fact)

        await rest(follower)  # the pod's own grant may trigger one more query
        monkeypatch.setattr(live_node.registry, "apply", look)
        apply(PodsListed((known,)))
        await rest(follower)
        assert looks == []

        await live_node.kubelet.delete(train)
        apply(PodsListed((replace(known, phase="Succeeded"),)))
        await held(live_node, 0)


async def test_a_pods_end_is_asked_for_at_once(tmp_path: Path) -> None:
    """At an end nothing settles: the scheduler tries waiting pods in this very moment."""
    never = replace(SLOW, settle=1e9)

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        train = pod("train", 3)
        await live_node.kubelet.admit(train)
        async with following(live_node, tmp_path, never):
            await held(live_node, 3)
            known = KnownPod("t", "default", "train", "Running")
            live_node.registry.apply(PodsListed((known,)))
            await live_node.kubelet.delete(train)
            live_node.registry.apply(PodsListed((replace(known, phase="Succeeded"),)))
            await held(live_node, 0)


async def test_an_ended_pod_that_is_still_listed_is_asked_for_again(tmp_path: Path) -> None:
    """The API server may report an end that the kubelet does not know yet: soon it does."""
    never = replace(SLOW, settle=1e9)

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        train = pod("train", 3)
        await live_node.kubelet.admit(train)
        async with following(live_node, tmp_path, never):
            await held(live_node, 3)
            known = KnownPod("t", "default", "train", "Running")
            live_node.registry.apply(PodsListed((known,)))
            live_node.registry.apply(PodsListed((replace(known, phase="Succeeded"),)))
            await anyio.sleep(0.1)
            await held(live_node, 3)
            await live_node.kubelet.delete(train)
            await held(live_node, 0)


async def test_throttled_reader_keeps_its_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leases stay while the kubelet refuses queries, over 100 a second, until it answers."""
    take, refused, refusing = PodResourcesSource.check_rate, 0, False

    def throttle(source: PodResourcesSource) -> None:
        nonlocal refused
        if refusing:  # others ask it more than a hundred times a second
            refused += 1
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        take(source)

    monkeypatch.setattr(PodResourcesSource, "check_rate", throttle)
    async with (
        node(tmp_path) as live_node,
        live_node.kubelet.running(),
        following(live_node, tmp_path),
    ):
        train = await start(live_node)

        refusing = True
        await live_node.kubelet.delete(train)
        with anyio.fail_after(30):
            while refused < 3:
                await anyio.lowlevel.checkpoint()
        assert len(live_node.registry.snapshot.gpus[gpu(0).id].leases) == 3

        refusing = False
        await held(live_node, 0)


async def test_containers_that_start_share_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All callers of one moment wait until the kubelet answers, and ask it once."""
    asked: list[float] = []

    async def read(socket: Path, at: float, deadline: float) -> LeasesObserved:
        asked.append(at)
        if len(asked) <= 3:
            raise FileNotFoundError
        return await read_leases(socket, at, deadline)

    async with (
        node(tmp_path) as live_node,
        live_node.kubelet.running(),
        following(live_node, tmp_path, SLOW) as follower,
    ):
        await start(live_node, follower)
        await rest(follower)
        monkeypatch.setattr(pod_resources, "read_leases", read)
        async with anyio.create_task_group() as group:
            for _ in range(40):
                group.start_soon(follower.refresh)
    assert len(asked) == 4


async def test_absent_kubelet_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the kubelet is down the leases stay; afterwards they are read again."""
    looks: list[Fact] = []

    async with node(tmp_path) as live_node, following(live_node, tmp_path) as follower:
        async with live_node.kubelet.running():
            await start(live_node, follower)

        async with follower._looking:  # an answer may be under way
            apply = live_node.registry.apply

        def look(fact: Fact) -> bool:
            looks.append(fact)
            return apply(fact)

        monkeypatch.setattr(live_node.registry, "apply", look)
        await anyio.sleep(0.05)

        assert not any(isinstance(fact, LeasesObserved) for fact in looks)
        assert len(live_node.registry.snapshot.gpus[gpu(0).id].leases) == 3


@pytest.mark.parametrize(
    "changed", [CHECKPOINT, f"device-plugins/{KUBELET_SOCKET}", "pods", "pods listed"]
)
async def test_a_kubelet_that_never_answers_is_asked_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """A silent kubelet is asked when its files change, or a pod has ended."""
    asked = looked = 0

    async def refuse(*_: object) -> LeasesObserved:
        nonlocal asked
        asked += 1
        raise FileNotFoundError

    def look(socket: Path, directory: Path) -> KubeletFiles:
        nonlocal looked
        looked += 1
        return find_files(socket, directory)

    monkeypatch.setattr(pod_resources, "read_leases", refuse)
    monkeypatch.setattr(pod_resources, "find_files", look)
    async with (
        node(tmp_path) as live_node,
        following(live_node, tmp_path, replace(SLOW, settle=0.001)),
    ):
        known = KnownPod("t", "default", "train", "Running")
        if changed == "pods":
            live_node.registry.apply(PodsListed((known,)))

        async def watch() -> None:
            until = looked + 6
            await becomes(lambda: looked > until)

        while asked < 50:
            skip(SLOW.poll_period)
            await watch()
        before = asked
        await watch()
        assert asked == before

        if changed.startswith("pods"):
            live_node.registry.apply(PodsListed((replace(known, phase="Succeeded"),)))
        else:
            await anyio.Path(tmp_path / changed).parent.mkdir(exist_ok=True)
            await anyio.Path(tmp_path / changed).write_text("{}")
        await becomes(lambda: asked > before)


@dataclass
class Answering:
    """A kubelet with these pods, none with a share, that may hang or send wrong answers."""

    socket: Path
    pods: tuple[str, ...] = ()
    namespace: str = "n"
    answers: int = 0
    fails: Exception | None = None
    follower: LeaseFollower | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer while the block lasts."""
        outer = self

        class Lister(v1.PodResourcesListerBase):
            async def list(
                self,
                message: v1.ListPodResourcesRequest,  # noqa: ARG002 - it is empty
            ) -> v1.ListPodResourcesResponse:
                outer.answers += 1
                if outer.fails is not None:
                    raise outer.fails
                pods = [
                    v1.PodResources(name=name, namespace=outer.namespace) for name in outer.pods
                ]
                return v1.ListPodResourcesResponse(pod_resources=pods)

        server = AbortableServer([Lister()])
        await server.open(self.socket)
        try:
            yield
        finally:
            await server.abort()  # grpclib's own end leaves connections to the collector

    async def asked(self, times: int = 3) -> None:
        """Wait until the kubelet has answered so many more queries."""
        until = self.answers + times + 1
        with anyio.fail_after(30):
            while self.answers < until:
                await anyio.lowlevel.checkpoint()

    async def skip(self, seconds: float) -> None:
        """Turn the clock between two looks: a query under way would miss its deadline."""
        assert self.follower
        async with self.follower._looking:
            skip(seconds)


@asynccontextmanager
async def restarted(
    live_node: Node,
    tmp_path: Path,
    *pods: str,
    timing: KubeletTiming = QUICK,
) -> AsyncIterator[Answering]:
    """Grant a pod three shares, then replace the kubelet by another one."""
    async with following(live_node, tmp_path, timing) as follower:
        async with live_node.kubelet.running():
            await start(live_node, follower)
        new = Answering(tmp_path / "pod-resources.sock", pods, follower=follower)
        async with new.running():
            yield new


@pytest.mark.parametrize("pods", [(), ("kube-proxy-node-1",)], ids=["none", "static"])
async def test_a_new_kubelet_that_knows_no_pods_yet_ends_nothing(
    tmp_path: Path, pods: tuple[str, ...]
) -> None:
    """Leases last while a new kubelet's checkpoint names pods that it does not list."""
    timing = replace(QUICK, readiness=0.0)
    async with (
        node(tmp_path) as live_node,
        restarted(live_node, tmp_path, *pods, timing=timing) as new,
    ):
        await new.asked()
        await held(live_node, 3)


async def test_a_new_kubelet_is_believed_once_it_knows_its_pods(tmp_path: Path) -> None:
    """A new kubelet that lists the API server's pods, and had time for all, ends other leases."""
    async with node(tmp_path) as live_node, restarted(live_node, tmp_path, "web-7f9c") as new:
        await new.asked()
        await held(live_node, 3)
        await new.skip(QUICK.readiness)
        await held(live_node, 0)


EMPTY = json.dumps({"Data": {"PodDeviceEntries": [], "RegisteredDevices": {}}, "Checksum": 1})


async def test_on_a_node_whose_kubelet_has_never_run_nothing_is_held(tmp_path: Path) -> None:
    """Shares can be granted as soon as a first kubelet asks for them."""
    async with node(tmp_path) as live_node, following(live_node, tmp_path) as follower:
        with anyio.fail_after(30):
            await follower.known.wait()
        assert not live_node.registry.snapshot.unknown_leases


async def test_each_time_that_the_kubelet_forgets_a_pod_is_logged_once(tmp_path: Path) -> None:
    """The pod may have ended meanwhile, and another one of its name may be forgotten."""
    with capture_module_logs(pod_resources) as logs:
        async with node(tmp_path) as live_node, restarted(live_node, tmp_path, "train") as new:
            registry, new.namespace = live_node.registry, "default"
            held_leases = registry.snapshot.gpus[gpu(0).id].leases.values()
            shares = tuple(lease.share for lease in held_leases)
            holders = {lease.share.id: lease.holder for lease in held_leases if lease.holder}

            def times() -> int:
                return [line["event"] for line in logs].count("kubelet forgot devices")

            await anyio.Path(tmp_path / CHECKPOINT).unlink()
            await new.asked()
            await new.skip(QUICK.readiness)
            for identity in (1, 2):
                registry.apply(SharesReleased(shares, at=anyio.current_time()))
                await new.asked()
                registry.apply(LeasesObserved(holders, anyio.current_time()))
                registry.apply(KubeletStarted((0, 0, (1 << 60) + identity)))
                await becomes(lambda: times() == identity)  # noqa: B023 - awaited here
                await new.asked()
                assert times() == identity


async def test_a_checkpoint_without_a_pod_does_not_end_its_leases(tmp_path: Path) -> None:
    """A kubelet that lost its checkpoint, and waits for the API server, ends no lease."""
    async with node(tmp_path) as live_node, restarted(live_node, tmp_path, "etcd-node-1") as new:
        await anyio.Path(tmp_path / CHECKPOINT).write_text(EMPTY)
        await new.asked()
        await new.skip(1000)
        await new.asked()
        await held(live_node, 3)


@pytest.mark.parametrize("socket", ["kept", "removed"])
async def test_a_kubelet_that_lost_its_checkpoint_is_heard_once_its_socket_is_there(
    tmp_path: Path, socket: str
) -> None:
    """The list before that has the pods, without the shares that they hold."""
    async with node(tmp_path) as live_node, restarted(live_node, tmp_path, "train") as new:
        file = tmp_path / "device-plugins" / KUBELET_SOCKET
        new.namespace = "default"
        await anyio.Path(tmp_path / CHECKPOINT).unlink(missing_ok=True)
        if socket == "removed":
            await anyio.Path(file).unlink()
        await new.asked()
        await held(live_node, 3)

        await anyio.Path(file).unlink(missing_ok=True)
        await anyio.Path(file).touch()
        await new.asked()
        await held(live_node, 3)
        (lease, *_) = live_node.registry.snapshot.gpus[gpu(0).id].leases.values()
        assert lease.unconfirmed


async def test_without_a_checkpoint_only_unbroken_answers_count(tmp_path: Path) -> None:
    """The time of a new kubelet starts again after each answer that fails."""
    async with node(tmp_path) as live_node, restarted(live_node, tmp_path, "web-7f9c") as new:
        await anyio.Path(tmp_path / CHECKPOINT).write_text("damaged")
        await new.asked()
        new.fails = GRPCError(Status.UNAVAILABLE, "not now")
        await new.asked()
        await new.skip(1000)
        new.fails = None
        await new.asked()
        await held(live_node, 3)
        await new.skip(QUICK.readiness)
        await held(live_node, 0)


async def test_an_unexpected_answer_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected answer is logged once, with its traceback, and the kubelet is asked again."""
    async with (
        node(tmp_path) as live_node,
        live_node.kubelet.running(),
        following(live_node, tmp_path),
    ):
        await live_node.until(20, 20)
        await live_node.kubelet.admit(pod("train", 3))
        await held(live_node, 3)

        asked = 0

        def mad(data: bytes, at: float) -> LeasesObserved:
            nonlocal asked
            asked += 1
            if asked > 3:
                return parse_leases(data, at)
            raise ValueError("garbage")

        with capture_module_logs(pod_resources) as logs:
            monkeypatch.setattr(pod_list, "parse_leases", mad)
            with anyio.fail_after(30):
                while asked <= 3:
                    await anyio.lowlevel.checkpoint()
            await held(live_node, 3)
        [entry] = logs
        assert entry["error"] == "garbage"
        assert isinstance(entry["exc_info"], ValueError)


async def test_equal_looks_are_judged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing changes, no look walks the leases; each change is judged at the next look."""
    judged = 0
    judge = KubeletReadiness.judge

    def count(*arguments: Any, **options: Any) -> LeasesObserved:  # noqa: ANN401 - passed on
        nonlocal judged
        judged += 1
        return judge(*arguments, **options)

    monkeypatch.setattr(KubeletReadiness, "judge", count)
    socket, directory = tmp_path / "pod-resources.sock", tmp_path / "device-plugins"
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        follower = LeaseFollower(live_node.registry, socket, directory=directory, node="node-1")

        async def is_judged() -> bool:
            before = judged
            await anyio.sleep(0.02)  # the kubelet answers 100 calls a second
            await follower.look()
            return judged > before

        async def settle() -> None:
            with anyio.fail_after(30):
                while await is_judged():
                    pass

        await follower.look()
        await live_node.until(20, 20)
        first, second = pod("first", 3), pod("second", 2)
        await live_node.kubelet.admit(first)
        await settle()

        await live_node.kubelet.admit(second)
        assert await is_judged()
        await settle()

        await live_node.kubelet.delete(first)
        assert await is_judged()
        await settle()

        (directory / CHECKPOINT_FILE).touch()
        assert await is_judged()
        await settle()

        listed = KnownPod("uid", "default", second.name, "Running")
        live_node.registry.apply(PodsListed((listed,)))
        assert await is_judged()


async def test_a_daemon_that_starts_beside_a_new_kubelet_takes_nothing_for_free(
    tmp_path: Path,
) -> None:
    """Without an API server, pods of a new kubelet's checkpoint keep their shares."""
    async with node(tmp_path) as live_node:
        async with live_node.kubelet.running():
            await live_node.until(20, 20)
            await live_node.kubelet.admit(pod("train", 3))
        new = Answering(tmp_path / "pod-resources.sock")
        async with new.running(), following(live_node, tmp_path):
            await new.asked()
            assert (
                live_node.registry.snapshot.gpus[gpu(0).id].kubelet.mig_devices_of_other_plugins
                is None
            )
            empty = {"Data": {"PodDeviceEntries": None}, "Checksum": 1}
            await anyio.Path(tmp_path / CHECKPOINT).write_text(json.dumps(empty))
            with anyio.fail_after(30):
                async for update in live_node.registry.watch(
                    lambda now: now.gpus[gpu(0).id].kubelet.mig_devices_of_other_plugins
                ):
                    if update is not None:
                        break
