"""Pods that run on other GPUs than they name are reported, once, with the reason."""

from collections import UserDict
from collections.abc import AsyncIterator, Mapping, ValuesView
from contextlib import asynccontextmanager
from types import MappingProxyType

import anyio
from msgspec.structs import replace

from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder, Lease, ResourceClaimRef, ShareId
from metagpu.core.model.snapshot import with_states
from metagpu.core.state.events import Event, PreferenceMissed, PreferenceNotMet
from metagpu.core.state.facts import GpusFound, LeasesObserved, PodsListed
from metagpu.core.state.registry import Registry, Subscription
from metagpu.core.usage.annotations import UnmetPreferenceWatch, unmet_preferences
from tests.rigs.build import gpu, layout_of

TRAIN = Holder("team", "train", "main")
NAMED = {"nvidia.com/use-gpuuuid": gpu(1).id}


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Registry, Subscription[Event]]]:
    """Watch a node of two GPUs."""
    registry = Registry()
    registry.apply(GpusFound((gpu(0), gpu(1)), at=0))
    registry.apply(layout_of(gpu(0), gpu(1)).offer_fact)
    with registry.events.subscribe(PreferenceNotMet) as news:
        async with anyio.create_task_group() as group:
            group.start_soon(UnmetPreferenceWatch(registry).run)
            await anyio.wait_all_tasks_blocked()
            yield registry, news
            group.cancel_scope.cancel()


def list_pod(registry: Registry, annotations: Mapping[str, str], phase: str = "Pending") -> None:
    """Report the pod with these annotations, as the API server does."""
    pod = KnownPod("u", "team", "train", phase, gpu_annotations=annotations)
    registry.apply(PodsListed((pod,)))


def hold(registry: Registry, *indices: int, at: float = 1) -> None:
    """Report that the pod holds a share of each of these GPUs, as the kubelet does."""
    states = [registry.snapshot.gpus[gpu(index).id] for index in indices]
    registry.apply(LeasesObserved({state.shares[0].id: TRAIN for state in states}, at=at))


async def reported(news: Subscription[Event]) -> str:
    """Return the next reason that is reported."""
    with anyio.fail_after(30):
        event = await anext(aiter(news))
    assert isinstance(event, PreferenceNotMet)
    assert (str(event.pod), event.container) == ("team/train", "main")
    return event.reason


async def test_a_pod_on_another_gpu_is_told_why() -> None:
    """The event joins what the pod holds with the reason at the kubelet's request, once."""
    async with watched() as (registry, news):
        list_pod(registry, NAMED)
        registry.events.publish(PreferenceMissed((("u", "main"),), "wait for a pod to end there"))
        await anyio.wait_all_tasks_blocked()
        hold(registry, 0)
        reason = await reported(news)
        list_pod(registry, NAMED, "Running")
        list_pod(registry, {**NAMED, "gpus.metagpu.io/main": "many"}, "Running")
        further = await reported(news)

    assert reason == (
        f"container main holds 1 share of GPU {gpu(0)}, which nvidia.com/use-gpuuuid does not "
        "name: wait for a pod to end there"
    )
    assert "main has an annotation without effect: gpus.metagpu.io/main: 'many' is no" in further


async def test_a_pod_whose_wish_is_met_hears_nothing() -> None:
    """Shares on the named GPU are no news, whatever was said at the request; a move is."""
    async with watched() as (registry, news):
        list_pod(registry, NAMED)
        registry.events.publish(PreferenceMissed((("u", "main"),), "several pods"))
        hold(registry, 1)
        await anyio.wait_all_tasks_blocked()
        list_pod(registry, {"gpus.metagpu.io/main": "2"})
        reason = await reported(news)
    assert "gpus.metagpu.io/main asks for equal parts of 2 GPUs" in reason


async def test_a_pod_that_was_known_too_late_is_told_so() -> None:
    """Without a reason from the request, the pod was unknown then, or its annotations are new."""
    async with watched() as (registry, news):
        hold(registry, 0)
        list_pod(registry, NAMED, "Running")
        assert "metagpu heard of the pod after the kubelet had asked" in await reported(news)


async def test_a_claim_has_its_selector_named() -> None:
    """For shares of a ResourceClaim the reason is that the scheduler chooses."""
    async with watched() as (registry, _):
        list_pod(registry, NAMED)
        hold(registry, 0)
        [pod] = registry.snapshot.pods.by_uid.values()
        state = registry.snapshot.gpus[gpu(0).id]
        [lease] = state.leases.values()
        claimed = replace(lease, resource_claim=ResourceClaimRef("team", "claim", "c"))
        leases = MappingProxyType({claimed.share.id: claimed})
        snapshot = with_states(registry.snapshot, [replace(state, leases=leases)])
        [(found, container, _, why)] = unmet_preferences([pod], snapshot)
    assert (found, container) == (pod, "main")
    assert "name the GPU in a selector of the claim" in why


async def test_a_pod_that_is_not_admitted_holds_nothing() -> None:
    """Shares under the name of a pod that is not admitted are its predecessor's."""
    async with watched() as (registry, _):
        list_pod(registry, NAMED)
        hold(registry, 0)
        [pod] = registry.snapshot.pods.by_uid.values()
        snapshot = registry.snapshot
    assert not list(unmet_preferences([replace(pod, arriving=True)], snapshot))
    assert list(unmet_preferences([pod], snapshot))


class CountedLeases(UserDict[ShareId, Lease]):
    """Leases that count how often all of them are read."""

    reads = 0

    def values(self) -> ValuesView[Lease]:
        """Return the leases, and count that."""
        self.reads += 1
        return super().values()


async def test_leases_are_read_once_for_all_pods() -> None:
    """Each lease's change compares all pods: with all leases for each, Allocate would wait."""
    async with watched() as (registry, _):
        hold(registry, 0)
        state = registry.snapshot.gpus[gpu(0).id]
        leases = CountedLeases(state.leases)
        snapshot = with_states(registry.snapshot, [replace(state, leases=leases)])
    pods = [
        KnownPod(f"u{n}", "team", "train" if n == 1 else f"p{n}", gpu_annotations=NAMED)
        for n in range(50)
    ]
    [(pod, *_)] = unmet_preferences(pods, snapshot)
    assert (pod.uid, leases.reads) == ("u1", 1)
