"""What containers were told of their memory, as the kubelet's checkpoint has it."""

import json
from pathlib import Path

import pytest
from anyio import to_thread

from metagpu.core.gpu import MIB
from metagpu.core.lost import Given
from metagpu.plugins import checkpoint
from metagpu.plugins.checkpoint import FILE, read_given, read_told
from metagpu.sim.kubelet import Container, Pod
from tests.agent_rig import METAGPU, agent_at_work
from tests.heard import heard
from tests.mig_rig import mig_at_work
from tests.mig_rig import pod as mig_pod


async def test_what_a_kubelet_keeps_is_read(tmp_path: Path) -> None:
    """For each container and GPU: what our answer to Allocate said, by the pod's uid."""
    side = Container("side", {METAGPU: 2})
    pod = Pod("alice", containers=(Container("main", {METAGPU: 13}), side, Container("none")))
    async with agent_at_work(tmp_path) as it:
        await it.until(20, 20)
        await it.kubelet.admit(pod)
        told = await to_thread.run_sync(read_told, tmp_path / "device-plugins")
        first, second = (state.gpu.id for state in it.agent.registry.snapshot.gpus.values())

    assert told == {
        (pod.uid, "main", first): 12288 * MIB,
        (pod.uid, "main", second): 40960 * MIB,
        (pod.uid, "side", first): 8192 * MIB,
    }


@pytest.mark.parametrize(
    "data", [{"PodDeviceEntries": None, "RegisteredDevices": None}, {"PodDeviceEntries": []}]
)
def test_a_node_without_pods_has_told_nobody(tmp_path: Path, data: object) -> None:
    """An empty checkpoint, as Go writes it, and a missing one are no reason to complain."""
    with heard(checkpoint) as entries:
        assert read_told(tmp_path) == {}
        (tmp_path / FILE).write_text(json.dumps({"Data": data, "Checksum": 1}))
        assert read_told(tmp_path) == {}

    assert entries == []


def test_answers_of_others_are_passed_over(tmp_path: Path) -> None:
    """An answer that says nothing of our memory, and one that is missing, tell nothing."""
    entry = {"PodUID": "u", "ContainerName": "c", "ResourceName": "x/y", "DeviceIDs": {"-1": ["d"]}}
    document = {"Data": {"PodDeviceEntries": [entry, {**entry, "AllocResp": "CgYKAWESAWI="}]}}
    (tmp_path / FILE).write_text(json.dumps(document))

    assert read_told(tmp_path) == {}


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
def test_a_checkpoint_that_cannot_be_read_is_told_of(tmp_path: Path, text: str) -> None:
    """A file of another form is named with the reason and what follows, and stops nobody."""
    (tmp_path / FILE).write_text(text)
    with heard(checkpoint) as entries:
        assert read_told(tmp_path) == {}

    [entry] = entries
    assert entry["event"] == (
        "the kubelet's checkpoint cannot be read: containers that are older than this daemon are "
        "held to shares of the present size"
    )
    assert entry["file"] == str(tmp_path / FILE)
    assert entry["why"]


async def test_what_containers_were_told_of_mig_devices_is_read(tmp_path: Path) -> None:
    """The devices in the answer and the shares they were for, by container; of others nothing."""
    async with mig_at_work(tmp_path) as it:
        await it.until(3, 3, "nvidia.com/mig-2g.10gb")
        train = mig_pod("train")
        options = (await it.kubelet.admit(train))["main"]
        given = await to_thread.run_sync(read_given, tmp_path / "device-plugins")
        [share] = it.state(0).leases

    device = options.envs["NVIDIA_VISIBLE_DEVICES"]
    assert given == (Given(train.uid, "main", frozenset({share}), frozenset({device})),)


def test_a_checkpoint_that_cannot_be_read_says_nothing_of_devices(tmp_path: Path) -> None:
    """A file that is missing or damaged is no account of anybody."""
    assert read_given(tmp_path) is None
    (tmp_path / FILE).write_text("{")
    assert read_given(tmp_path) is None
    (tmp_path / FILE).write_text(json.dumps({"Data": {"PodDeviceEntries": None}}))
    assert read_given(tmp_path) == ()
