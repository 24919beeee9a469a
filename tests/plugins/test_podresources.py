"""Who holds what, read from the kubelet: what it tells, and what it refuses to tell."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from grpclib.client import Channel
from grpclib.exceptions import GRPCError
from grpclib.server import Server

from metagpu.core.facts import Fact, LeasesObserved, PodsTold
from metagpu.core.model import Holder
from metagpu.core.pods import KnownPod
from metagpu.plugins import podresources
from metagpu.plugins.pb import v1
from metagpu.plugins.podresources import follow_leases, observed
from metagpu.sim.kubelet import Container, Pod
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
        group.start_soon(follow_leases, it.registry, tmp_path / "pod-resources.sock")
        yield
        group.cancel_scope.cancel()


async def held(it: Node, count: int) -> None:
    """Wait until so many shares have a holder."""
    with anyio.fail_after(10):
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
        seen = await observed(tmp_path / "pod-resources.sock")

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

        await anyio.wait_all_tasks_blocked()
        monkeypatch.setattr(it.registry, "apply", look)
        apply(PodsTold((known,)))
        await anyio.sleep(0.05)
        await anyio.wait_all_tasks_blocked()
        assert looks == []

        await it.kubelet.delete(train)
        apply(PodsTold((replace(known, phase="Succeeded"),)))
        await held(it, 0)


async def test_throttled_reader_keeps_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 100 questions a second the kubelet refuses; the leases stay and are read later."""
    monkeypatch.setattr(podresources, "PERIOD", 0.01)
    monkeypatch.setattr(podresources, "SETTLE", 0.01)
    socket = tmp_path / "pod-resources.sock"

    async with node(tmp_path) as it, it.kubelet.running(), following(it, tmp_path):
        await it.until(20, 20)
        train = pod("train", 3)
        await it.kubelet.admit(train)
        await held(it, 3)

        answers: list[bool] = []

        async def ask(stub: v1.PodResourcesListerStub) -> None:
            try:
                await stub.list(v1.ListPodResourcesRequest())
                answers.append(True)
            except GRPCError:
                answers.append(False)

        async with (
            Channel(path=str(socket)) as channel,
            anyio.create_task_group() as group,
        ):
            for _ in range(60):
                group.start_soon(ask, v1.PodResourcesListerStub(channel))

        assert False in answers
        assert len(it.registry.snapshot.gpus[gpu(0).id].leases) == 3

        await it.kubelet.delete(train)
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


@pytest.mark.parametrize("doubt", [1e9, 0.0])
async def test_a_new_kubelet_that_knows_no_pods_yet_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doubt: float
) -> None:
    """A restarted kubelet answers before it has its pods; only later is it believed."""
    monkeypatch.setattr(podresources, "PERIOD", 0.01)
    monkeypatch.setattr(podresources, "SETTLE", 0.01)
    monkeypatch.setattr(podresources, "UNSETTLED", doubt)
    answers = 0

    class Unknowing(v1.PodResourcesListerBase):
        async def list(self, message: v1.ListPodResourcesRequest) -> v1.ListPodResourcesResponse:  # noqa: ARG002  it is empty
            nonlocal answers
            answers += 1
            return v1.ListPodResourcesResponse()

    async with node(tmp_path) as it, following(it, tmp_path):
        async with it.kubelet.running():
            await it.until(20, 20)
            await it.kubelet.admit(pod("train", 3))
            await held(it, 3)

        server = Server([Unknowing()])
        await server.start(path=str(tmp_path / "pod-resources.sock"))
        try:
            with anyio.fail_after(10):
                while answers < 3:
                    await anyio.lowlevel.checkpoint()
            await held(it, 3 if doubt else 0)
        finally:
            server.close()
            await server.wait_closed()
