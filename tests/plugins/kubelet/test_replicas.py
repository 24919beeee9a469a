"""Time-slices at the kubelet: CERN's ReplicaSet, and the refusal of NVIDIA's plugin."""

from collections import Counter
from pathlib import Path

import pytest

from metagpu.sim.kubelet.kubelet import AdmissionError
from tests.plugins.kubelet.rig import gpu, node, pod, simulated_kubelet

SHARED = "nvidia.com/gpu.shared"
GPUS = [gpu(index) for index in range(4)]
VISIBLE = "NVIDIA_VISIBLE_DEVICES"


def slices(options: str = "replicas: 4") -> str:
    """Write a configuration of time-slices on every GPU."""
    return (
        "version: metagpu/v1\npools:\n"
        f"  - {{name: all, backends: [{{backend: timeslice, {options}}}]}}\n"
    )


async def test_cerns_replica_set_spreads(tmp_path: Path) -> None:
    """Four GPUs of four replicas are 16; five pods of one each run and spread over all GPUs."""
    config = slices("replicas: 4, failRequestsGreaterThanOne: true")

    async with node(tmp_path, *GPUS, config=config) as live_node, live_node.kubelet.running():
        await live_node.until(16, 16, SHARED)
        visible = []
        for number in range(5):
            options = await live_node.kubelet.admit(
                pod(f"nvidia-test-time-slice-{number}", 1, SHARED)
            )
            visible.append(options["main"].envs[VISIBLE])

        assert Counter(visible) == {GPUS[0].id: 2, **{each.id: 1 for each in GPUS[1:]}}
        assert options["main"].envs["METAGPU_MEMORY_MIB"] == f"{GPUS[0].id}=10240"


async def test_packed_pods_leave_gpus_idle(tmp_path: Path) -> None:
    """Packed, the same five pods need two GPUs."""
    config = slices("replicas: 4, allocationPolicy: packed")

    async with node(tmp_path, *GPUS, config=config) as live_node, live_node.kubelet.running():
        await live_node.until(16, 16, SHARED)
        admitted = [
            await live_node.kubelet.admit(pod(f"p{number}", 1, SHARED)) for number in range(5)
        ]

        assert [options["main"].envs[VISIBLE] for options in admitted] == [
            *[GPUS[0].id] * 4,
            GPUS[1].id,
        ]


async def test_several_replicas_are_several_gpus(tmp_path: Path) -> None:
    """A container's replicas are spread, and a GPU with two of them is given once."""
    async with node(tmp_path, *GPUS, config=slices()) as live_node, live_node.kubelet.running():
        await live_node.until(16, 16, SHARED)
        options = await live_node.kubelet.admit(pod("train", 5, SHARED))

        assert options["main"].envs[VISIBLE] == ",".join(each.id for each in GPUS)
        assert options["main"].envs["METAGPU_MEMORY_MIB"].startswith(f"{GPUS[0].id}=20480,")


async def test_more_than_one_is_refused_in_nvidias_words(tmp_path: Path) -> None:
    """The pod's event has the text of NVIDIA's plugin, and the replicas are free again."""
    config = slices("replicas: 4, failRequestsGreaterThanOne: true")

    async with node(tmp_path, config=config) as live_node, live_node.kubelet.running():
        await live_node.until(8, 8, SHARED)
        with pytest.raises(AdmissionError) as refused:
            await live_node.kubelet.admit(pod("greedy", 2, SHARED))

        assert refused.value.reason == "UnexpectedAdmissionError"
        assert (
            'invalid allocation request for "nvidia.com/gpu.shared": invalid request: '
            "maximum request size for shared resources is 1; found 2"
        ) in refused.value.message
        assert live_node.registry.snapshot.gpus[gpu(0).id].leases == {}


async def test_a_fault_takes_all_replicas_of_a_gpu(tmp_path: Path) -> None:
    """Every replica of a faulty GPU is Unhealthy, and all return."""
    async with node(tmp_path, config=slices()) as live_node, live_node.kubelet.running():
        await live_node.until(8, 8, SHARED)
        live_node.fault(0)
        await live_node.until(8, 4, SHARED)
        live_node.recover(0)
        await live_node.until(8, 8, SHARED)


async def test_held_replicas_outlive_a_kubelet_restart(tmp_path: Path) -> None:
    """A pod keeps its replica over a restart of the kubelet: the id is the same."""
    kubelet = simulated_kubelet(tmp_path)

    async with node(tmp_path, config=slices(), kubelet=kubelet) as live_node, kubelet.running():
        await live_node.until(8, 8, SHARED)
        held = pod("held", 1, SHARED)
        await kubelet.admit(held)
        await kubelet.start_container(held, "main")
        await kubelet.restart()
        await live_node.until(8, 8, SHARED)

        assert await kubelet.readmit() == {}
        assert kubelet.devices(held)["main"][SHARED] == {f"{gpu(0).id}::t0"}
