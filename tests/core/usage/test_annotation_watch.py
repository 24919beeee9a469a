"""Rejected annotations of pods are reported, once for each reason."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import anyio

from metagpu.core.config.memory import AnnotationKind, MemoryEnforcement
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder
from metagpu.core.state.events import AnnotationRejected
from metagpu.core.state.facts import GpusFound, LeasesObserved, PodsListed
from metagpu.core.state.registry import Registry
from metagpu.core.usage import annotations as wishing
from metagpu.core.usage.annotations import AnnotationWatch
from tests.rigs.build import gpu, layout_of
from tests.rigs.logs import capture_module_logs

ALICE = Holder("team", "alice", "main")
KEY = "gpu-mem-limit.cnvrg.io/metagpu"
TERMS = MemoryEnforcement(allow_annotations=tuple(AnnotationKind))


@asynccontextmanager
async def watched(guard: MemoryGuard = MemoryGuard.ENFORCER) -> AsyncIterator[Registry]:
    """Watch a node where alice holds one share of each of two GPUs."""
    registry = Registry()
    layout = layout_of(gpu(0), gpu(1))
    registry.apply(GpusFound((gpu(0), gpu(1)), at=0))
    registry.apply(layout.offer_fact)
    async with anyio.create_task_group() as group:
        group.start_soon(AnnotationWatch(registry, lambda _: TERMS, {"fraction": guard}).run)
        await anyio.wait_all_tasks_blocked()
        yield registry
        group.cancel_scope.cancel()


def annotate(registry: Registry, annotations: Mapping[str, str], uid: str = "u") -> None:
    """Report alice with these annotations, as the API server does."""
    registry.apply(
        PodsListed((KnownPod(uid, "team", "alice", "Running", memory_annotations=annotations),))
    )


def hold(registry: Registry) -> None:
    """Report that alice holds a share of each GPU, as the kubelet does."""
    first = {state.shares[0].id: ALICE for state in registry.snapshot.gpus.values()}
    registry.apply(LeasesObserved(first, at=1))


async def test_a_rejection_is_reported_once_when_the_pod_holds_shares() -> None:
    """A rejection is reported when the pod is known, once for all GPUs and changes."""
    with capture_module_logs(wishing) as entries:
        async with watched() as registry:
            with registry.events.subscribe(AnnotationRejected) as news:
                annotate(registry, {KEY: "many"})
                await anyio.wait_all_tasks_blocked()
                assert entries == []
                hold(registry)
                with anyio.fail_after(30):
                    refused = await anext(aiter(news))
            annotate(registry, {KEY: "many", "metagpu.io/memory-policy": "warn"})
            await anyio.wait_all_tasks_blocked()

    assert isinstance(refused, AnnotationRejected)
    assert str(refused.pod) == "team/alice"
    [entry] = entries
    assert (entry["event"], entry["pod"]) == ("annotation rejected", "team/alice")
    assert "'many' is neither a number of shares" in entry["reason"]


async def test_another_wrong_value_is_reported_and_so_is_a_new_pod() -> None:
    """Each reason of each pod is reported."""
    with capture_module_logs(wishing) as entries:
        async with watched() as registry:
            hold(registry)
            for value, uid in (("many", "u"), ("more", "u"), ("more", "v")):
                annotate(registry, {KEY: value}, uid)
                await anyio.wait_all_tasks_blocked()

    assert len(entries) == 3


async def test_only_present_rejections_are_remembered() -> None:
    """An annotation that was removed and returns is reported again, and fills no memory."""
    with capture_module_logs(wishing) as entries:
        async with watched() as registry:
            hold(registry)
            for value in ("many", "50", "many"):
                annotate(registry, {KEY: value})
                await anyio.wait_all_tasks_blocked()

    assert len(entries) == 2


async def test_annotations_without_effect_are_reported() -> None:
    """Annotations of resources without a lease or with another guard are reported."""
    with capture_module_logs(wishing) as entries:
        async with watched(MemoryGuard.MPS) as registry:
            hold(registry)
            annotate(registry, {KEY: "50", "gpu-mem-limit.cnvrg.io/metagpus": "50"})
            await anyio.wait_all_tasks_blocked()

    assert [entry["reason"] for entry in entries] == [
        "cnvrg.io/metagpu is shared by fraction, whose limits no annotation changes",
        "gpu-mem-limit.cnvrg.io/metagpus: the pod holds no cnvrg.io/metagpus",
    ]
