"""The simulated kubelet's PodResources API (§4; cases 28, 35, 55, 65)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from metagpu.plugins.kubelet.pb import v1, v1alpha1, v1beta1
from metagpu.sim.kubelet.kubelet import SimContainer, SimKubelet
from tests.sim.kubelet.rig import GPU, Clock, FakePlugin, device, devices, pod


@asynccontextmanager
async def node(
    tmp_path: Path, plugin: FakePlugin, clock: Clock | None = None
) -> AsyncIterator[tuple[SimKubelet, Channel]]:
    """Run a kubelet with a plugin, and connect to its PodResources socket."""
    socket = tmp_path / "pr" / "kubelet.sock"
    kubelet = SimKubelet(tmp_path / "dp", pod_resources=socket, clock=clock or Clock())
    async with (
        kubelet.running(),
        plugin.registered(kubelet),
        Channel(path=str(socket)) as channel,
    ):
        yield kubelet, channel


def entries_of(
    containers: list[v1.ContainerResources],
) -> dict[str, list[tuple[list[str], list[int]]]]:
    """Reduce containers to the ids and NUMA nodes of each entry."""
    return {
        container.name: [
            (entry.device_ids, [n.id for n in entry.topology.nodes] if entry.topology else [])
            for entry in container.devices
        ]
        for container in containers
    }


async def test_a_holder_is_listed_in_both_versions(tmp_path: Path) -> None:
    """An entry has name, namespace, resource and id, but no UID (case 28)."""
    plugin = FakePlugin(GPU, devices("a"))
    async with node(tmp_path, plugin) as (kubelet, channel):
        await kubelet.admit(pod("p", ("main", 1), ("idle", 0)))
        (now,) = (await v1.PodResourcesListerStub(channel).list()).pod_resources
        (then,) = (await v1alpha1.PodResourcesListerStub(channel).list()).pod_resources
    assert (now.name, now.namespace) == (then.name, then.namespace) == ("p", "default")
    assert entries_of(now.containers) == {"main": [(["a"], [])], "idle": []}
    assert now.containers[0].devices[0].topology is None
    assert then.containers[0].devices == [
        v1alpha1.ContainerDevices(resource_name=GPU, device_ids=["a"])
    ]


async def test_every_device_has_an_entry_for_each_numa_node(tmp_path: Path) -> None:
    """A device on two nodes appears twice (§4)."""
    plugin = FakePlugin(GPU, [device("a", 0, 1), device("b", 1)])
    async with node(tmp_path, plugin) as (kubelet, channel):
        await kubelet.admit(pod("p", ("main", 2)))
        stub = v1.PodResourcesListerStub(channel)
        (one,) = (await stub.list()).pod_resources
        all_of_them = (await stub.get_allocatable_resources()).devices
    entries = entries_of(one.containers)["main"]
    assert sorted(entries) == [(["a"], [0]), (["a"], [1]), (["b"], [1])]
    assert len(all_of_them) == 3


async def test_ordinary_init_containers_are_not_listed(tmp_path: Path) -> None:
    """Sidecars are listed in v1, ordinary init containers are not (case 35)."""
    plugin = FakePlugin(GPU, devices("a b"))
    init = [SimContainer("init", {GPU: 1}), SimContainer("side", {GPU: 1}, restartable=True)]
    async with node(tmp_path, plugin) as (kubelet, channel):
        await kubelet.admit(pod("p", ("main", 1), init=init))
        (now,) = (await v1.PodResourcesListerStub(channel).list()).pod_resources
        (then,) = (await v1alpha1.PodResourcesListerStub(channel).list()).pod_resources
    assert [container.name for container in now.containers] == ["side", "main"]
    assert [container.name for container in then.containers] == ["main"]


async def test_listing_frees_what_ended_pods_held(tmp_path: Path) -> None:
    """A List call frees the devices of ended pods, as an admission does (§4)."""
    plugin = FakePlugin(GPU, devices("a"))
    old, other = pod("old", ("main", 1)), pod("other", ("main", 0))
    async with node(tmp_path, plugin) as (kubelet, channel):
        await kubelet.admit(old)
        await kubelet.admit(other)
        await kubelet.delete(old)
        assert kubelet.devices(old)
        listed = (await v1.PodResourcesListerStub(channel).list()).pod_resources
        assert kubelet.devices(old) == {}
    assert [one.name for one in listed] == ["other"]


async def test_only_healthy_devices_are_allocatable(tmp_path: Path) -> None:
    """Held devices count; a device with an empty topology is missing (rule 9)."""
    hollow = v1beta1.Device(id="c", health="Healthy", topology=v1beta1.TopologyInfo())
    plugin = FakePlugin(GPU, [device("a"), device("b", health="Unhealthy"), hollow])
    async with node(tmp_path, plugin) as (kubelet, channel):
        await kubelet.admit(pod("p", ("main", 2)))
        stub = v1.PodResourcesListerStub(channel)
        allocatable = (await stub.get_allocatable_resources()).devices
        (one,) = (await stub.list()).pod_resources
    assert [entry.device_ids for entry in allocatable] == [["a"]]
    assert sorted(entries_of(one.containers)["main"]) == [(["a"], []), (["c"], [])]


async def test_more_than_ten_at_once_are_throttled(tmp_path: Path) -> None:
    """The limit is 100 a second, bursts of 10, for all methods together (case 65)."""
    clock = Clock()
    async with node(tmp_path, FakePlugin(GPU, devices("a")), clock) as (_, channel):
        now, then = v1.PodResourcesListerStub(channel), v1alpha1.PodResourcesListerStub(channel)
        for _ in range(5):
            await now.list()
            await then.list()
        with pytest.raises(GRPCError) as caught:
            await now.get_allocatable_resources()
        clock.now += 0.0101
        await now.list()
        with pytest.raises(GRPCError):
            await then.list()
    assert (caught.value.status, caught.value.message) == (
        Status.RESOURCE_EXHAUSTED,
        "rejected by rate limit",
    )
