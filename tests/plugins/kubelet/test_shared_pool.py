"""A pool with two backends: an idle GPU is on offer by both, a held one by its owner."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpclib
import pytest
from grpclib.client import Channel
from grpclib.const import Status

from metagpu.core.availability.conflict import conflicting_shares
from metagpu.core.state.facts import (
    BackendAttached,
    BackendResumed,
    BackendSuspended,
    CleanupFinished,
    GpuCordoned,
    GpuUncordoned,
    LeasesObserved,
)
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.sim.kubelet.kubelet import AdmissionError
from tests.plugins.kubelet.rig import METAGPU, Node, allocate, gpu, node, pod

SHARED = "nvidia.com/gpu.shared"
BOTH = f"""
version: metagpu/v1
pools:
  - name: all
    backends:
      - {{backend: fraction, resource: {METAGPU}, sharesPerGpu: 10}}
      - {{backend: timeslice, resource: {SHARED}, replicas: 4}}
"""


@asynccontextmanager
async def endpoint(live_node: Node, resource: str) -> AsyncIterator[v1beta1.DevicePluginStub]:
    """Connect to our endpoint of a resource as the kubelet does, beside the kubelet."""
    name = f"metagpu-{resource.replace('/', '_')}-"
    [socket] = [path for path in live_node.sockets() if path.name.startswith(name)]

    async with Channel(path=str(socket)) as channel:
        yield v1beta1.DevicePluginStub(channel)


def end_leases(live_node: Node) -> None:
    """Report from the kubelet that no pod holds a share."""
    live_node.registry.apply(LeasesObserved({}, at=1e12))


async def test_an_idle_gpu_is_on_offer_both_ways(tmp_path: Path) -> None:
    """An idle GPU has no owner, and the shares of both backends are healthy."""
    async with node(tmp_path, config=BOTH) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20, METAGPU)
        await live_node.until(8, 8, SHARED)


@pytest.mark.parametrize(
    ("asked", "shares", "other", "capacity"), [(METAGPU, 3, SHARED, 8), (SHARED, 1, METAGPU, 20)]
)
async def test_a_grant_of_one_backend_makes_the_other_unavailable(
    tmp_path: Path, asked: str, shares: int, *, other: str, capacity: int
) -> None:
    """The first grant takes the GPU at once; its last lease returns the GPU to both backends."""
    async with node(tmp_path, config=BOTH) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20, METAGPU)
        await live_node.until(8, 8, SHARED)
        lists = live_node.kubelet.lists[other]
        await live_node.kubelet.admit(pod("first", shares, asked))

        # In the turn that answered: no request can see it otherwise.
        state = live_node.registry.snapshot.gpus[gpu(0).id]
        assert {
            share.resource for share in state.shares if share.id in conflicting_shares(state)
        } == {other}
        assert all(conflicting_shares(state) >= {s.id} for s in state.shares if s.resource == other)

        await live_node.until(capacity, capacity // 2, other)
        await live_node.kubelet.wait_for(lambda: live_node.kubelet.lists[other] == lists + 1)

        end_leases(live_node)
        await live_node.until(capacity, capacity, other)
        assert live_node.registry.snapshot.gpus[gpu(0).id].owner is None


async def test_the_race_for_a_gpu_is_lost_with_its_owners_name(tmp_path: Path) -> None:
    """A share of a GPU that another backend has just taken is refused with the owner's name."""
    async with node(tmp_path, config=BOTH) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20, METAGPU)
        await live_node.until(8, 8, SHARED)

        async with endpoint(live_node, METAGPU) as fractions, endpoint(live_node, SHARED) as slices:
            await allocate(fractions, [f"{gpu(0).id}::m03"])
            with pytest.raises(grpclib.GRPCError) as lost:
                await allocate(slices, [f"{gpu(0).id}::t1"])
            [other] = await allocate(slices, [f"{gpu(1).id}::t1"])

        assert lost.value.message == (
            f"share {gpu(0).id}::t1 cannot be granted: GPU {gpu(0)} is in use by fraction"
        )
        assert lost.value.status is not Status.INTERNAL
        assert other.envs["NVIDIA_VISIBLE_DEVICES"] == gpu(1).id


async def test_both_kinds_share_a_node(tmp_path: Path) -> None:
    """Pods of both backends get GPUs of their own, until no GPU is left for one of them."""
    async with node(tmp_path, config=BOTH) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20, METAGPU)
        await live_node.until(8, 8, SHARED)
        visible: list[Sequence[str]] = []

        for name, shares, resource in (("a", 5, METAGPU), ("b", 1, SHARED), ("c", 5, METAGPU)):
            options = await live_node.kubelet.admit(pod(name, shares, resource))
            visible.append(options["main"].envs["NVIDIA_VISIBLE_DEVICES"])
            await live_node.until(20, 20 if len(visible) == 1 else 10, METAGPU)
            await live_node.until(8, 4, SHARED)

        assert visible == [gpu(0).id, gpu(1).id, gpu(0).id]

        with pytest.raises(AdmissionError):
            await live_node.kubelet.admit(pod("d", 1, METAGPU))
        await live_node.kubelet.admit(pod("e", 3, SHARED))


async def refused(live_node: Node, resource: str, share: str) -> str:
    """Ask for a share that is not given; return the refusal's text."""
    async with endpoint(live_node, resource) as stub:
        with pytest.raises(grpclib.GRPCError) as lost:
            await allocate(stub, [share])
    assert lost.value.status is Status.FAILED_PRECONDITION
    return lost.value.message or ""


async def test_a_suspended_backend_is_refused_with_its_reason(tmp_path: Path) -> None:
    """A suspended backend's shares are unhealthy, held or not; the others are unchanged."""
    async with node(tmp_path, config=BOTH) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20, METAGPU)
        await live_node.kubelet.admit(pod("first", 3))
        await live_node.until(8, 4, SHARED)
        end_leases(live_node)
        await live_node.until(8, 8, SHARED)
        live_node.registry.apply(BackendSuspended(gpu(0).id, "timeslice", "no daemon", at=60))
        await live_node.until(8, 4, SHARED)
        await live_node.until(20, 20, METAGPU)

        assert await refused(live_node, SHARED, f"{gpu(0).id}::t0") == (
            f"{SHARED}: GPU {gpu(0)} gives no new shares: timeslice is suspended since "
            "1970-01-01T00:01:00+00:00: no daemon"
        )

        live_node.registry.apply(BackendResumed(gpu(0).id, "timeslice", at=70))
        await live_node.until(8, 8, SHARED)


async def test_a_gpu_that_is_being_cleaned_is_its_owners(tmp_path: Path) -> None:
    """During cleanup other backends' refusals name the owner; the owner's shares are given."""
    async with node(tmp_path, config=BOTH) as live_node, live_node.kubelet.running():
        live_node.registry.apply(
            BackendAttached(gpu(0).id, "timeslice", needs_setup=False, needs_cleanup=True, at=1)
        )
        await live_node.until(20, 20, METAGPU)
        await live_node.until(8, 8, SHARED)
        async with endpoint(live_node, SHARED) as slices:
            await allocate(slices, [f"{gpu(0).id}::t1"])
            end_leases(live_node)
            await live_node.until(8, 8, SHARED)
            await live_node.until(20, 10, METAGPU)

            assert await refused(live_node, METAGPU, f"{gpu(0).id}::m01") == (
                f"share {gpu(0).id}::m01 cannot be granted: GPU {gpu(0)} is being cleaned after "
                "its last lease by timeslice"
            )
            await allocate(slices, [f"{gpu(0).id}::t2"])
            end_leases(live_node)

        since = live_node.registry.snapshot.gpus[gpu(0).id].cleanup.since["timeslice"]
        live_node.registry.apply(CleanupFinished(gpu(0).id, "timeslice", since, at=since + 1))
        await live_node.until(20, 20, METAGPU)


async def test_a_cordoned_gpu_gives_nothing_new(tmp_path: Path) -> None:
    """Free shares of every backend are unhealthy; held shares stay listed for their pods."""
    async with node(tmp_path, config=BOTH) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20, METAGPU)
        await live_node.until(8, 8, SHARED)
        await live_node.kubelet.admit(pod("first", 3))
        live_node.registry.apply(GpuCordoned(gpu(0).id, "riser", at=60))
        await live_node.until(20, 13, METAGPU)
        await live_node.until(8, 4, SHARED)

        assert await refused(live_node, METAGPU, f"{gpu(0).id}::m09") == (
            f"{METAGPU}: GPU {gpu(0)} gives no new shares: it is cordoned since "
            "1970-01-01T00:01:00+00:00 (riser); `metagpu uncordon 0` on this node ends that"
        )

        end_leases(live_node)
        await live_node.until(20, 10, METAGPU)
        live_node.registry.apply(GpuUncordoned(gpu(0).id, at=70))
        await live_node.until(20, 20, METAGPU)
