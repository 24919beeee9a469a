"""Who holds what, read from the kubelet: what it tells, and what it refuses to tell."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Server
from msgspec.structs import replace

from metagpu.core.facts import Fact, LeasesObserved, PodsTold
from metagpu.core.model import Holder
from metagpu.core.pods import KnownPod
from metagpu.plugins import podresources, settling
from metagpu.plugins.checkpoint import FILE
from metagpu.plugins.pb import v1
from metagpu.plugins.podresources import follow_leases, observed
from metagpu.sim.kubelet import Container, Pod
from metagpu.sim.kubelet.podresources import RateLimit
from tests.heard import heard
from tests.plugins.rig import METAGPU, Node, gpu, ids, node, pod

SHARED_POOL = f"""
version: metagpu/v1
pools:
  - name: all
    backends:
      - {{backend: fraction, resource: {METAGPU}, sharesPerGpu: 10}}
      - {{backend: whole}}
"""


@asynccontextmanager
async def following(it: Node, tmp_path: Path) -> AsyncIterator[None]:
    """Follow the leases while the block lasts."""
    async with anyio.create_task_group() as group:
        socket, directory = tmp_path / "pod-resources.sock", tmp_path / "device-plugins"
        follow = partial(follow_leases, directory=directory, node="node-1")
        group.start_soon(follow, it.registry, socket)
        yield
        group.cancel_scope.cancel()


async def held(it: Node, count: int) -> None:
    """Wait until so many shares have a holder."""
    with anyio.fail_after(30):
        async for snapshot in it.registry.watch(lambda now: now):
            leases = [i for state in snapshot.gpus.values() for i in state.leases.values()]
            if len(leases) == count and all(lease.holder for lease in leases):
                return


async def test_tells_every_container(tmp_path: Path) -> None:
    """Each share is told with namespace, pod and container of its holder."""
    two = Pod(
        "two",
        namespace="research",
        containers=(Container("a", {METAGPU: 1}), Container("b", {METAGPU: 2})),
    )

    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        await it.kubelet.admit(two)
        seen, _ = await observed(tmp_path / "pod-resources.sock")

    assert set(seen.resources.values()) == {METAGPU}
    assert seen.holders == {
        ids((0, 0))[0]: Holder("research", "two", "a"),
        ids((0, 1))[0]: Holder("research", "two", "b"),
        ids((0, 2))[0]: Holder("research", "two", "b"),
    }


async def test_grant_wakes_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grant is looked up soon, not at the next slow look."""
    monkeypatch.setattr(podresources, "PERIOD", 1e9)
    monkeypatch.setattr(podresources, "SETTLE", 0.01)

    async with node(tmp_path) as it, it.kubelet.running(), following(it, tmp_path):
        await it.until(20, 20)
        await anyio.wait_all_tasks_blocked()
        await it.kubelet.admit(pod("train", 3))
        await held(it, 3)

        assert it.registry.snapshot.gpus[gpu(0).id].owner == "fraction"


async def test_released_when_the_pod_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet never says that a share is free again: it only stops listing it."""
    monkeypatch.setattr(podresources, "PERIOD", 0.01)
    monkeypatch.setattr(podresources, "SETTLE", 0.01)

    async with node(tmp_path) as it, it.kubelet.running(), following(it, tmp_path):
        await it.until(20, 20)
        train = pod("train", 3)
        await it.kubelet.admit(train)
        await held(it, 3)
        await it.kubelet.delete(train)
        await held(it, 0)


async def test_released_soon_where_others_want_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a lease withholds shares from others, its end is looked for more often."""
    monkeypatch.setattr(podresources, "PERIOD", 1e9)
    monkeypatch.setattr(podresources, "SOUGHT_PERIOD", 0.01)
    monkeypatch.setattr(podresources, "SETTLE", 0.01)

    async with (
        node(tmp_path, config=SHARED_POOL) as it,
        it.kubelet.running(),
        following(it, tmp_path),
    ):
        await it.until(20, 20)
        train = pod("train", 3)
        await it.kubelet.admit(train)
        await held(it, 3)
        await anyio.wait_all_tasks_blocked()
        await it.kubelet.delete(train)
        await held(it, 0)


async def test_a_pods_end_wakes_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pod held is free soon after the API server tells its end; other pods wake nobody."""
    monkeypatch.setattr(podresources, "PERIOD", 1e9)
    monkeypatch.setattr(podresources, "SETTLE", 0.01)
    looks: list[Fact] = []

    async with node(tmp_path) as it, it.kubelet.running(), following(it, tmp_path):
        await it.until(20, 20)
        train = pod("train", 3)
        await it.kubelet.admit(train)
        await held(it, 3)
        known = KnownPod("t", "default", "train", "Running")
        others = KnownPod("o", "default", "other", "Running")
        it.registry.apply(PodsTold((known, others)))
        apply = it.registry.apply

        def look(fact: Fact) -> bool:
            looks.append(fact)
            return apply(fact)

        async def looked() -> int:
            await anyio.sleep(0.05)
            await anyio.wait_all_tasks_blocked()
            return len(looks)

        monkeypatch.setattr(it.registry, "apply", look)
        before = -1
        while before < (before := await looked()):
            pass  # the pod's own grant may be looked up once more
        apply(PodsTold((known,)))
        assert await looked() == before

        await it.kubelet.delete(train)
        apply(PodsTold((replace(known, phase="Succeeded"),)))
        await held(it, 0)


async def test_throttled_reader_keeps_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 100 questions a second the kubelet refuses; the leases stay and are read later."""
    monkeypatch.setattr(podresources, "PERIOD", 0.01)
    monkeypatch.setattr(podresources, "SETTLE", 0.01)
    take, refused, refusing = RateLimit.take, 0, False

    def throttle(limit: RateLimit) -> None:
        nonlocal refused
        if refusing:  # others ask it more than a hundred times a second
            refused += 1
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        take(limit)

    monkeypatch.setattr(RateLimit, "take", throttle)
    async with node(tmp_path) as it, it.kubelet.running(), following(it, tmp_path):
        await it.until(20, 20)
        train = pod("train", 3)
        await it.kubelet.admit(train)
        await held(it, 3)

        refusing = True
        await it.kubelet.delete(train)
        with anyio.fail_after(30):
            while refused < 3:
                await anyio.lowlevel.checkpoint()
        assert len(it.registry.snapshot.gpus[gpu(0).id].leases) == 3

        refusing = False
        await held(it, 0)


async def test_absent_kubelet_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the kubelet is down what was known stays; afterwards it is read again."""
    monkeypatch.setattr(podresources, "PERIOD", 0.01)
    monkeypatch.setattr(podresources, "SETTLE", 0.01)
    looks: list[Fact] = []

    async with node(tmp_path) as it, following(it, tmp_path):
        async with it.kubelet.running():
            await it.until(20, 20)
            await it.kubelet.admit(pod("train", 3))
            await held(it, 3)

        apply = it.registry.apply

        def look(fact: Fact) -> bool:
            looks.append(fact)
            return apply(fact)

        monkeypatch.setattr(it.registry, "apply", look)
        await anyio.sleep(0.05)

        assert not any(isinstance(fact, LeasesObserved) for fact in looks)
        assert len(it.registry.snapshot.gpus[gpu(0).id].leases) == 3


@dataclass
class Answering:
    """A kubelet that names these pods, of which none holds anything, and may be mute or mad."""

    socket: Path
    pods: tuple[str, ...] = ()
    answers: int = 0
    fails: Exception | None = None

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
                pods = [v1.PodResources(name=name, namespace="n") for name in outer.pods]
                return v1.ListPodResourcesResponse(pod_resources=pods)

        server = Server([Lister()])
        await server.start(path=str(self.socket))
        try:
            yield
        finally:
            server.close()
            await server.wait_closed()

    async def asked(self, times: int = 3) -> None:
        """Wait until it was asked so often from now on, and its answers were heard."""
        until = self.answers + times + 1
        with anyio.fail_after(30):
            while self.answers < until:
                await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def restarted(it: Node, tmp_path: Path, *pods: str) -> AsyncIterator[Answering]:
    """Have a pod hold three shares, and another kubelet in the place of the one that told of it."""
    async with following(it, tmp_path):
        async with it.kubelet.running():
            await it.until(20, 20)
            await it.kubelet.admit(pod("train", 3))
            await held(it, 3)
        new = Answering(tmp_path / "pod-resources.sock", pods)
        async with new.running():
            yield new


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody wait for the next look."""
    monkeypatch.setattr(podresources, "PERIOD", 0.01)
    monkeypatch.setattr(podresources, "SETTLE", 0.01)


CHECKPOINT = f"device-plugins/{FILE}"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("pods", [(), ("kube-proxy-node-1",)], ids=["none", "static"])
async def test_a_new_kubelet_that_knows_no_pods_yet_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pods: tuple[str, ...]
) -> None:
    """However long that lasts: its checkpoint names whom it does not list."""
    monkeypatch.setattr(settling, "UNSETTLED", 0.0)
    async with node(tmp_path) as it, restarted(it, tmp_path, *pods) as new:
        await new.asked()
        await held(it, 3)


@pytest.mark.usefixtures("quick")
async def test_a_new_kubelet_is_believed_once_it_knows_its_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lists pods of the API server's, and had the time to list all: who is not there is gone."""
    async with node(tmp_path) as it, restarted(it, tmp_path, "web-7f9c") as new:
        await new.asked()
        await held(it, 3)
        monkeypatch.setattr(settling, "UNSETTLED", 0.0)
        await held(it, 0)


@pytest.mark.usefixtures("quick")
async def test_a_kubelet_that_has_forgotten_them_is_believed(tmp_path: Path) -> None:
    """What its checkpoint does not name any more nobody holds."""
    async with node(tmp_path) as it, restarted(it, tmp_path) as new:
        await new.asked()
        empty = {"Data": {"PodDeviceEntries": [], "RegisteredDevices": {}}, "Checksum": 1}
        await anyio.Path(tmp_path / CHECKPOINT).write_text(json.dumps(empty))
        await held(it, 0)


@pytest.mark.usefixtures("quick")
async def test_without_a_checkpoint_only_unbroken_answers_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet that does not answer says nothing: the time begins anew when it does."""
    now = 0.0
    monkeypatch.setattr(settling, "_now", lambda: now)
    async with node(tmp_path) as it, restarted(it, tmp_path) as new:
        await anyio.Path(tmp_path / CHECKPOINT).write_text("damaged")
        await new.asked()
        new.fails = GRPCError(Status.UNAVAILABLE, "not now")
        await new.asked()
        now = 1000.0
        new.fails = None
        await new.asked()
        await held(it, 3)
        now = 1059.0
        await new.asked()
        await held(it, 3)
        now = 1060.0
        await held(it, 0)


@pytest.mark.usefixtures("quick")
async def test_an_answer_that_nobody_foresaw_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once, with where it came from, and the kubelet is asked again."""
    async with node(tmp_path) as it, it.kubelet.running(), following(it, tmp_path):
        await it.until(20, 20)
        await it.kubelet.admit(pod("train", 3))
        await held(it, 3)

        parse = v1.ListPodResourcesResponse.parse
        asked = 0

        def mad(data: bytes) -> v1.ListPodResourcesResponse:
            nonlocal asked
            asked += 1
            if asked > 3:
                return parse(data)
            raise ValueError("garbage")

        with heard(podresources) as logs:
            monkeypatch.setattr(v1.ListPodResourcesResponse, "parse", mad)
            with anyio.fail_after(30):
                while asked <= 3:
                    await anyio.lowlevel.checkpoint()
            await held(it, 3)
        [entry] = logs
        assert entry["why"] == "garbage"
        assert isinstance(entry["exc_info"], ValueError)


@pytest.mark.usefixtures("quick")
async def test_a_daemon_that_starts_beside_a_new_kubelet_takes_nothing_for_free(
    tmp_path: Path,
) -> None:
    """Both have just started and the API server is away: what the checkpoint names stays held."""
    async with node(tmp_path) as it:
        async with it.kubelet.running():
            await it.until(20, 20)
            await it.kubelet.admit(pod("train", 3))
        new = Answering(tmp_path / "pod-resources.sock")
        async with new.running(), following(it, tmp_path):
            await new.asked()
            assert it.registry.snapshot.gpus[gpu(0).id].elsewhere is None
            empty = {"Data": {"PodDeviceEntries": None}, "Checksum": 1}
            await anyio.Path(tmp_path / CHECKPOINT).write_text(json.dumps(empty))
            with anyio.fail_after(30):
                async for told in it.registry.watch(lambda now: now.gpus[gpu(0).id].elsewhere):
                    if told is not None:
                        break
