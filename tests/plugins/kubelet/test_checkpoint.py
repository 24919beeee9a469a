"""Containers' memory and MIG devices, as the kubelet's checkpoint has them."""

import json
from pathlib import Path

import pytest
from anyio import to_thread

from metagpu.core.model.gpu import MIB
from metagpu.core.usage.lost_devices import AllocatedDevices
from metagpu.plugins.kubelet import checkpoint
from metagpu.plugins.kubelet.checkpoint import (
    CHECKPOINT_FILE,
    read_allocated_devices,
    read_promised_memory,
)
from metagpu.sim.kubelet.kubelet import SimContainer, SimPod
from tests.rigs.agent import METAGPU, agent_at_work
from tests.rigs.logs import capture_module_logs
from tests.rigs.mig import mig_at_work
from tests.rigs.mig import pod as mig_pod


async def test_a_kubelets_checkpoint_is_read(tmp_path: Path) -> None:
    """The checkpoint has our answer to Allocate for each container and GPU, by the pod's uid."""
    side = SimContainer("side", {METAGPU: 2})
    pod = SimPod(
        "alice", containers=(SimContainer("main", {METAGPU: 13}), side, SimContainer("none"))
    )
    async with agent_at_work(tmp_path) as scene:
        await scene.until(20, 20)
        await scene.kubelet.admit(pod)
        promised = await to_thread.run_sync(read_promised_memory, tmp_path / "device-plugins")
        first, second = (state.gpu.id for state in scene.agent.registry.snapshot.gpus.values())

    assert promised == {
        (pod.uid, "main", first): 12288 * MIB,
        (pod.uid, "main", second): 40960 * MIB,
        (pod.uid, "side", first): 8192 * MIB,
    }


@pytest.mark.parametrize(
    "data", [{"PodDeviceEntries": None, "RegisteredDevices": None}, {"PodDeviceEntries": []}]
)
def test_a_node_without_pods_has_no_entries(tmp_path: Path, data: object) -> None:
    """An empty checkpoint, as Go writes it, and a missing one are not logged."""
    with capture_module_logs(checkpoint) as entries:
        assert read_promised_memory(tmp_path) == {}
        (tmp_path / CHECKPOINT_FILE).write_text(json.dumps({"Data": data, "Checksum": 1}))
        assert read_promised_memory(tmp_path) == {}

    assert entries == []


def test_answers_of_others_are_passed_over(tmp_path: Path) -> None:
    """An answer without our memory variable, and a missing answer, are ignored."""
    entry = {"PodUID": "u", "ContainerName": "c", "ResourceName": "x/y", "DeviceIDs": {"-1": ["d"]}}
    document = {"Data": {"PodDeviceEntries": [entry, {**entry, "AllocResp": "CgYKAWESAWI="}]}}
    (tmp_path / CHECKPOINT_FILE).write_text(json.dumps(document))

    assert read_promised_memory(tmp_path) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"Data": {"PodDeviceEntries": [{}]}}',
        '{"Data": {"PodDeviceEntries": [{"PodUID":"", "ContainerName":"", "AllocResp":"CP8="}]}}',
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_logged(tmp_path: Path, text: str) -> None:
    """A checkpoint of another format is logged with reason and consequence, and ends nothing."""
    (tmp_path / CHECKPOINT_FILE).write_text(text)
    with capture_module_logs(checkpoint) as entries:
        assert read_promised_memory(tmp_path) == {}

    [entry] = entries
    assert entry["event"] == "kubelet checkpoint unreadable"
    assert entry["effect"] == "limits of running containers follow the present size of shares"
    assert entry["file"] == str(tmp_path / CHECKPOINT_FILE)
    assert entry["error"]


async def test_mig_devices_of_containers_are_read(tmp_path: Path) -> None:
    """The checkpoint has MIG devices and their shares by container, ours alone."""
    async with mig_at_work(tmp_path) as scene:
        await scene.until(3, 3, "nvidia.com/mig-2g.10gb")
        train = mig_pod("train")
        options = (await scene.kubelet.admit(train))["main"]
        given = await to_thread.run_sync(read_allocated_devices, tmp_path / "device-plugins")
        [share] = scene.state(0).leases

    device = options.envs["NVIDIA_VISIBLE_DEVICES"]
    assert given == (AllocatedDevices(train.uid, "main", frozenset({share}), frozenset({device})),)


def test_a_checkpoint_that_cannot_be_read_has_no_devices(tmp_path: Path) -> None:
    """A missing or damaged checkpoint gives no devices of any container."""
    assert read_allocated_devices(tmp_path) is None
    (tmp_path / CHECKPOINT_FILE).write_text("{")
    assert read_allocated_devices(tmp_path) is None
    (tmp_path / CHECKPOINT_FILE).write_text(json.dumps({"Data": {"PodDeviceEntries": None}}))
    assert read_allocated_devices(tmp_path) == ()
