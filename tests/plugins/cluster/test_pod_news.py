"""What is told to a pod of its GPU memory: Events in its namespace, in figures."""

from pathlib import Path
from typing import Final

import pytest

from metagpu.core.facts import GpuFaulted, GpusFound, PodsTold
from metagpu.core.gpu import MIB
from metagpu.core.model import Holder
from metagpu.core.news import Event, MemoryExceeded, ProcessSignalled, StrangerFound, WishRefused
from metagpu.core.pods import KnownPod
from metagpu.plugins.cluster import events
from metagpu.plugins.cluster.pod_news import news_of
from metagpu.plugins.cluster.settings import Feature
from metagpu.sim.apiserver import SimApiServer
from tests.build import after, gpu
from tests.plugins.cluster.rig import cluster_at_work

ALICE: Final = Holder("team", "alice", "main")
GPU: Final = gpu(0)
SNAPSHOT: Final = after(GpusFound((GPU,), at=0))
FIGURES: Final = (
    "its share is 10240 MiB, its limit 10597 MiB, and all its processes together use 12287 MiB"
)
MORE: Final = f"container main uses more memory of GPU {GPU} than it may: {FIGURES}"
ENDED: Final = (
    "process 4242 (the node's number) of container main was sent SIGTERM: it had 6143 MiB of GPU "
    f"{GPU},"
)
BYPASS: Final = (
    f"container main uses 300 MiB of GPU {GPU} and holds no share of it: it was not given this GPU "
    "by Kubernetes"
)
AMOUNTS: Final = {"used": 12287 * MIB, "share": 10240 * MIB, "limit": 10597 * MIB}


def exceeded(*, will_end: bool = True, used: int = 12287, at: float = 1) -> MemoryExceeded:
    """Make the news that alice uses too much."""
    amounts = {**AMOUNTS, "used": used * MIB}
    return MemoryExceeded(GPU.id, ALICE, "u-1", **amounts, will_end=will_end, at=at)


def stranger(holder: Holder | None, memory: int | None = 300 * MIB) -> StrangerFound:
    """Make the news that somebody uses a GPU without a share."""
    return StrangerFound(GPU.id, holder, "ab" * 32, "u-1", 7, memory, at=1)


@pytest.mark.parametrize(
    ("event", "reason", "note"),
    [
        (
            exceeded(),
            "GPUMemoryExceeded",
            f"{MORE}; its processes are ended if it stays so",
        ),
        (
            exceeded(will_end=False),
            "GPUMemoryExceeded",
            f"{MORE}; it goes on",
        ),
        (
            ProcessSignalled(
                GPU.id, ALICE, "u-1", 4242, "SIGTERM", memory=6143 * MIB, **AMOUNTS, at=1
            ),
            "GPUMemoryProcessEnded",
            f"{ENDED} and the container more than it may: {FIGURES}",
        ),
        (
            stranger(ALICE),
            "GPUUsedWithoutShare",
            BYPASS,
        ),
        (
            WishRefused(KnownPod("u-1", "team", "alice"), "gpu-mem-limit.x: no", at=1),
            "GPUMemoryWishRefused",
            "gpu-mem-limit.x: no",
        ),
    ],
)
def test_each_news_is_told_in_figures(event: Event, reason: str, note: str) -> None:
    """Reason and sentence, about the very pod, as a warning."""
    told = news_of(event, SNAPSHOT)

    assert told is not None
    assert (told.reason, told.note, told.warning) == (reason, note, True)
    subject = told.subject
    assert (subject.kind, subject.namespace, subject.name, subject.uid) == (
        ("Pod", "team", "alice", "u-1")
    )


def test_a_stranger_without_a_name_is_found_by_its_pods_uid() -> None:
    """Where the container's name is not known, the API server knows its pod's."""
    assert news_of(stranger(None), SNAPSHOT) is None

    snapshot = after(PodsTold((KnownPod("u-1", "team", "mallory"),)), since=SNAPSHOT)
    told = news_of(stranger(None, None), snapshot)
    assert told is not None
    assert told.subject.name == "mallory"
    assert told.note.startswith(f"container {'ab' * 6} uses some memory of GPU")


def test_what_is_no_pods_matter_is_not_told() -> None:
    """News of the node's are not a pod's."""
    assert news_of(GpusFound((GPU,), at=0), SNAPSHOT) is None


async def test_events_stand_in_the_pods_namespace(tmp_path: Path) -> None:
    """A warning is an Event of the pod, where `kubectl describe pod` finds it."""
    async with cluster_at_work(tmp_path, Feature.POD_EVENTS) as it:
        it.registry.apply(GpusFound((GPU,), at=0))
        await it.server.until(lambda: any("?watch" in each.what for each in it.server.requests))
        it.registry.news.publish(exceeded())
        await it.server.until(it.server.events)

    [told] = it.server.events()
    assert told["metadata"]["namespace"] == "team"
    assert told["regarding"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "alice",
        "uid": "u-1",
        "namespace": "team",
    }
    assert (told["reason"], told["type"]) == ("GPUMemoryExceeded", "Warning")


async def test_the_same_excess_again_is_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that does it again and again, with other figures each time, has one Event."""
    monkeypatch.setattr(events, "COUNT_EVERY", 0.0)
    async with cluster_at_work(tmp_path, Feature.POD_EVENTS) as it:
        await it.server.until(lambda: any("?watch" in each.what for each in it.server.requests))
        for used in (12287, 12300, 12400):
            it.registry.news.publish(exceeded(used=used))
        await it.server.until(
            lambda: [e.get("series", {}).get("count") for e in it.server.events()] == [3]
        )


async def test_pods_that_misbehave_do_not_silence_the_node(tmp_path: Path) -> None:
    """A flood of pods' Events is cut by itself: what is told of the node has its own allowance."""
    async with cluster_at_work(tmp_path, Feature.EVENTS, Feature.POD_EVENTS) as it:
        it.registry.apply(GpusFound((GPU,), at=0))
        await it.server.until(lambda: any("?watch" in each.what for each in it.server.requests))
        for number in range(2 * events.BURST):
            it.registry.news.publish(stranger(Holder("team", f"pod-{number}", "main")))
        await it.server.until(lambda: len(it.server.events()) >= events.BURST)
        it.registry.apply(GpuFaulted(GPU.id, "XID 79", at=1))
        await it.server.until(lambda: "GPUOutOfService" in reasons(it.server))


async def test_a_bypass_of_a_pod_without_a_name_is_told_of_the_node(tmp_path: Path) -> None:
    """Where nobody knows the pod's name, its uid stands in an Event of the node."""
    async with cluster_at_work(tmp_path, Feature.EVENTS, Feature.POD_EVENTS) as it:
        it.registry.apply(GpusFound((GPU,), at=0))
        await it.server.until(lambda: any("?watch" in each.what for each in it.server.requests))
        it.registry.news.publish(stranger(None))
        await it.server.until(it.server.events)

    [told] = it.server.events()
    assert told["regarding"]["kind"] == "Node"
    assert told["note"].startswith(f"container {'ab' * 6} uses 300 MiB of GPU {GPU}")
    assert told["note"].endswith("; its pod has the uid u-1")


def reasons(server: SimApiServer) -> list[str]:
    """Give the reasons of all Events."""
    return [each["reason"] for each in server.events()]


async def test_without_the_use_pods_hear_nothing(tmp_path: Path) -> None:
    """Who takes `pod-events` out of the uses writes nothing into the pods' namespaces."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as it:
        it.registry.apply(GpusFound((GPU,), at=0))
        await it.server.until(lambda: any("?watch" in each.what for each in it.server.requests))
        it.registry.news.publish(exceeded())
        it.registry.apply(GpuFaulted(GPU.id, "XID 79", at=1))
        await it.server.until(it.server.events)

    assert reasons(it.server) == ["GPUOutOfService"]
