"""Preferred allocations: cases 45 to 49 of the contract."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.core.model.shares import Share
from metagpu.plugins.kubelet.pb import v1beta1
from tests.plugins.kubelet.rig import (
    OFFER_ALL,
    VISIBLE,
    endpoint_of,
    gpu,
    ids,
    node,
    pod,
    simulated_kubelet,
)


async def test_kubelet_follows_our_choice(tmp_path: Path) -> None:
    """The kubelet gives the preferred shares: one GPU, the fullest first (case 45)."""
    async with node(tmp_path, config=OFFER_ALL) as it, it.kubelet.running():
        await it.until(20, 20)
        visible = []
        for name, shares in (("a", 4), ("b", 7), ("c", 3), ("d", 3)):
            options = await it.kubelet.admit(pod(name, shares))
            visible.append(options["main"].envs[VISIBLE])

        # 4 | 7 opens the second GPU | 3 fills it up | 3 goes beside the 4
        assert visible == [gpu(0).id, gpu(1).id, gpu(1).id, gpu(0).id]


@pytest.mark.parametrize("shares", [10, 15, 20])
async def test_large_request_keeps_to_its_numa_node(tmp_path: Path, shares: int) -> None:
    """A request larger than a GPU takes whole GPUs and a part, all NUMA-aligned (case 46)."""
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
    """After a backend's failure the kubelet gets its own order back (case 49)."""

    def broken(*_: object) -> Sequence[Share]:
        raise ZeroDivisionError

    monkeypatch.setattr(FractionBackend, "prefer", broken)

    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)

        async with endpoint_of(it) as stub:
            [chosen] = await preferred(stub, ids((0, 3), (0, 1)), ids((0, 1)), 2)

        assert chosen == ids((0, 1), (0, 3))
        await it.kubelet.admit(pod("train", 1))


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
