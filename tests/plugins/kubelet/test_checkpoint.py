"""Containers' memory and MIG devices, as the kubelet's checkpoint has them."""

import base64
import json
from pathlib import Path

import pytest
from anyio import to_thread

from metagpu.core.model.gpu import MIB
from metagpu.core.usage.lost_devices import AllocatedDevices
from metagpu.plugins.kubelet import checkpoint
from metagpu.plugins.kubelet.checkpoint import (
    read_allocated_devices,
    read_allocated_ids,
    read_promised_memory,
    read_registered_resources,
)
from metagpu.plugins.kubelet.paths import CHECKPOINT_FILE
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


def test_the_shares_of_all_containers_are_read(tmp_path: Path) -> None:
    """A share is of its resource and its containers, in every form that kubelets have written."""
    entries = [
        {"PodUID": uid, "ContainerName": name, "ResourceName": "x/y", "DeviceIDs": devices}
        for uid, name, devices in [
            ("u", "init", {"-1": ["a"]}),
            ("u", "main", {"0": ["a"], "1": ["b", "c"], "2": None}),
            ("v", "main", ["d"]),
            ("w", "main", None),
        ]
    ]
    data = {"PodDeviceEntries": entries, "RegisteredDevices": {"x/y": ["a"], "x/z": None}}
    (tmp_path / CHECKPOINT_FILE).write_text(json.dumps({"Data": data}))

    found = read_allocated_ids(tmp_path)
    assert found is not None
    assert found.pods == {"u": {"a", "b", "c"}, "v": {"d"}, "w": set()}
    assert found.resources == dict.fromkeys("abcd", "x/y")
    both, main = {("u", "init"), ("u", "main")}, {("u", "main")}
    assert found.containers == {"a": both, "b": main, "c": main, "d": {("v", "main")}}
    assert {*(read_registered_resources(tmp_path) or ())} == {"x/y", "x/z"}


def test_a_checkpoint_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    """A missing or damaged checkpoint says nothing, and one of a new node that there is nothing."""
    readers = read_allocated_devices, read_allocated_ids, read_registered_resources
    assert [read(tmp_path) for read in readers] == [None] * 3
    (tmp_path / CHECKPOINT_FILE).write_text("{")
    assert [read(tmp_path) for read in readers] == [None] * 3
    (tmp_path / CHECKPOINT_FILE).write_text(json.dumps({"Data": {"PodDeviceEntries": None}}))
    assert read_allocated_devices(tmp_path) == ()
    assert (found := read_allocated_ids(tmp_path)) is not None
    assert not found.pods
    assert read_registered_resources(tmp_path) == frozenset()


@pytest.mark.parametrize(("nodes", "numbers"), [((0, 1), {0, 1}), ((0,), None), ((), None)])
def test_an_answer_without_a_node_of_each_gpu_tells_nothing(
    tmp_path: Path, nodes: tuple[int, ...], numbers: set[int] | None
) -> None:
    """A node that was missing at the grant is no sign of another GPU's."""
    answer = base64.b64encode(b"".join(f"/dev/nvidia{number}".encode() for number in nodes))
    entry = {"PodUID": "u", "ContainerName": "c", "ResourceName": "x/y"}
    devices = {"-1": ["GPU-a::1", "GPU-a::2", "GPU-b::1"]}
    entries = [{**entry, "AllocResp": answer.decode(), "DeviceIDs": devices}]
    (tmp_path / CHECKPOINT_FILE).write_text(json.dumps({"Data": {"PodDeviceEntries": entries}}))
    allocated = read_allocated_ids(tmp_path)
    assert allocated is not None
    expected = numbers and {
        "GPU-a": {frozenset(numbers): {"GPU-a::1", "GPU-a::2"}},
        "GPU-b": {frozenset(numbers): {"GPU-b::1"}},
    }
    assert allocated.nodes == (expected or {})
