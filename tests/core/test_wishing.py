"""Pods that do not get what they wish are told, once for each reason."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import anyio

from metagpu.core import wishing
from metagpu.core.backend import Guard
from metagpu.core.enforcement import Annotation, Enforcement
from metagpu.core.facts import GpusFound, LeasesObserved, PodsTold
from metagpu.core.model import Holder
from metagpu.core.news import WishRefused
from metagpu.core.pods import KnownPod
from metagpu.core.registry import Registry
from metagpu.core.wishing import WishWatch
from tests.build import gpu, laid_out
from tests.heard import heard

ALICE = Holder("team", "alice", "main")
KEY = "gpu-mem-limit.cnvrg.io/metagpu"
TERMS = Enforcement(allow_annotations=tuple(Annotation))


@asynccontextmanager
async def watched(guard: Guard = Guard.ENFORCER) -> AsyncIterator[Registry]:
    """Watch a node where alice holds one share of each of two GPUs."""
    registry = Registry()
    layout = laid_out(gpu(0), gpu(1))
    registry.apply(GpusFound((gpu(0), gpu(1)), at=0))
    registry.apply(layout.offered)
    async with anyio.create_task_group() as group:
        group.start_soon(WishWatch(registry, lambda _: TERMS, {"fraction": guard}).run)
        await anyio.wait_all_tasks_blocked()
        yield registry
        group.cancel_scope.cancel()


def wish(registry: Registry, wishes: Mapping[str, str], uid: str = "u") -> None:
    """Let the API server tell of alice with these annotations."""
    registry.apply(PodsTold((KnownPod(uid, "team", "alice", "Running", wishes=wishes),)))


def hold(registry: Registry) -> None:
    """Let the kubelet tell that alice holds a share of each GPU."""
    first = {state.shares[0].id: ALICE for state in registry.snapshot.gpus.values()}
    registry.apply(LeasesObserved(first, at=1))


async def test_a_refusal_is_told_once_when_the_pod_holds_shares() -> None:
    """Not before the pool is known, not for each GPU, and not again at the next change."""
    with heard(wishing) as entries:
        async with watched() as registry:
            with registry.news.subscribe(WishRefused) as news:
                wish(registry, {KEY: "many"})
                await anyio.wait_all_tasks_blocked()
                assert entries == []
                hold(registry)
                with anyio.fail_after(30):
                    refused = await anext(aiter(news))
            wish(registry, {KEY: "many", "metagpu.io/memory-policy": "warn"})
            await anyio.wait_all_tasks_blocked()

    assert isinstance(refused, WishRefused)
    assert str(refused.pod) == "team/alice"
    [entry] = entries
    assert (entry["event"], entry["pod"]) == ("a pod does not get what it wishes", "team/alice")
    assert "'many' is neither a number of shares" in entry["why"]


async def test_another_wrong_value_is_news_and_so_is_a_new_pod() -> None:
    """Each reason and each pod is told by itself."""
    with heard(wishing) as entries:
        async with watched() as registry:
            hold(registry)
            for value, uid in (("many", "u"), ("more", "u"), ("more", "v")):
                wish(registry, {KEY: value}, uid)
                await anyio.wait_all_tasks_blocked()

    assert len(entries) == 3


async def test_only_what_is_refused_now_is_remembered() -> None:
    """A wish that was taken back and comes again is news: who changes it often fills no memory."""
    with heard(wishing) as entries:
        async with watched() as registry:
            hold(registry)
            for value in ("many", "50", "many"):
                wish(registry, {KEY: value})
                await anyio.wait_all_tasks_blocked()

    assert len(entries) == 2


async def test_wishes_that_change_nothing_are_told() -> None:
    """A resource that the pod does not hold, or that something else guards, is said."""
    with heard(wishing) as entries:
        async with watched(Guard.MPS) as registry:
            hold(registry)
            wish(registry, {KEY: "50", "gpu-mem-limit.cnvrg.io/metagpus": "50"})
            await anyio.wait_all_tasks_blocked()

    assert [entry["why"] for entry in entries] == [
        "cnvrg.io/metagpu is cut by fraction, whose limits no annotation changes",
        "gpu-mem-limit.cnvrg.io/metagpus: the pod holds no cnvrg.io/metagpus",
    ]
