"""The kubelet contract: what PodResources and the checkpoint say of pods (kubelet.md §2, §4)."""

import anyio
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from metagpu.plugins.kubelet.pb import v1
from tests.contract.kubelet.rig import NAMESPACE, Kubelet, container, init, plugin_of, until


async def test_get_finds_a_pod_by_name(kubelet: Kubelet, gpu: str) -> None:
    """Get has what List has of one pod, and answers UNKNOWN for a missing one."""
    async with kubelet.serving(plugin_of(gpu, "a b")), kubelet.lister() as lister:
        await kubelet.run(
            kubelet.pod("p", container("main", 1, gpu), init=[init("before", 1, gpu)])
        )
        request = v1.GetPodResourcesRequest(pod_name="p", pod_namespace=NAMESPACE)
        found = (await lister.get(request)).pod_resources
        listed = [
            resource
            for resource in (await lister.list()).pod_resources
            if resource.namespace == NAMESPACE
        ]
        request.pod_name = "other"
        with pytest.raises(GRPCError) as caught:
            await lister.get(request)
    assert [found] == listed
    assert [resources.name for resources in listed[0].containers] == ["main"]
    assert caught.value.status is Status.UNKNOWN
    assert caught.value.message == f"pod other in namespace {NAMESPACE} not found"


async def test_a_pod_is_listed_from_its_admission_on(kubelet: Kubelet, gpu: str) -> None:
    """A pod whose container cannot start is Pending, and holds its devices."""
    tries = anyio.Event()

    async def refuse() -> None:
        tries.set()
        raise GRPCError(Status.INTERNAL, "not yet")

    plugin = plugin_of(gpu, "a", pre_start=refuse)
    async with kubelet.serving(plugin):
        await kubelet.create(kubelet.pod("pending", container("main", 1, gpu)))
        with anyio.fail_after(60):
            await tries.wait()
        assert await kubelet.phase("pending", "Pending", "Running") == "Pending"
        assert await kubelet.listed(gpu) == {"pending": {"main": {"a"}}}
        assert await kubelet.holders(gpu) == {"main": {"a"}}


async def test_during_allocate_nobody_holds_the_devices(kubelet: Kubelet, gpu: str) -> None:
    """Neither the checkpoint nor List names the ids of an Allocate in flight."""
    plugin = plugin_of(gpu, "a")
    asked, go = anyio.Event(), anyio.Event()

    async def wait() -> None:
        asked.set()
        await go.wait()

    plugin.before_answer = wait
    async with kubelet.serving(plugin):
        await kubelet.create(kubelet.pod("asks", container("main", 1, gpu)))
        with anyio.fail_after(60):
            await asked.wait()
        held, listed = await kubelet.holders(gpu), await kubelet.listed(gpu)
        go.set()
        assert await kubelet.phase("asks", "Running", "Failed") == "Running"
        assert (held, listed.get("asks", {}).get("main", set())) == ({}, set())
        assert await kubelet.holders(gpu) == {"main": {"a"}}


async def test_an_ended_pod_is_not_listed_and_its_devices_are_free(
    kubelet: Kubelet, gpu: str
) -> None:
    """The pod may stay as an object; the checkpoint names it until the next allocation."""
    async with kubelet.serving(plugin_of(gpu, "a")):
        await kubelet.create(kubelet.pod("short", container("main", 1, gpu, seconds=1)))
        await kubelet.phase("short", "Succeeded")

        async def is_unlisted() -> bool:
            return "short" not in await kubelet.listed(gpu)

        await until(is_unlisted)
        assert await kubelet.holders(gpu) == {"main": {"a"}}
        await kubelet.run(kubelet.pod("next", container("later", 1, gpu)))
        assert await kubelet.holders(gpu) == {"later": {"a"}}
        assert await kubelet.listed(gpu) == {"next": {"later": {"a"}}}


async def test_a_deleted_pod_holds_its_devices_until_its_containers_end(
    kubelet: Kubelet, gpu: str
) -> None:
    """In its grace a pod is listed, and another pod is refused."""
    async with kubelet.serving(plugin_of(gpu, "a")):
        await kubelet.run(kubelet.pod("stubborn", container("main", 1, gpu, seconds=1000)))
        await kubelet.delete("stubborn", grace=5)
        _, message = await kubelet.fail(kubelet.pod("early", container("main", 1, gpu)))
        assert "Requested: 1, Available: 0" in message
        assert await kubelet.listed(gpu) == {"stubborn": {"main": {"a"}}}
        await kubelet.phase("stubborn", "gone")
        assert await kubelet.listed(gpu) == {}
        await kubelet.run(kubelet.pod("late", container("main", 1, gpu)))


async def test_the_checkpoint_has_ids_by_numa_node_and_healthy_ids(
    kubelet: Kubelet, gpu: str
) -> None:
    """Ids without a node are under -1; RegisteredDevices has the healthy ids of a resource."""
    plugin = plugin_of(gpu, "a b")
    async with kubelet.serving(plugin):
        await kubelet.run(kubelet.pod("p", container("main", 1, gpu)))
        checkpoint, found = await kubelet.checkpoint(), await kubelet.get("p")
        [entry] = [
            pod_device_entry
            for pod_device_entry in checkpoint["PodDeviceEntries"]
            if pod_device_entry["ResourceName"] == gpu
        ]
        assert found is not None
        assert entry.pop("AllocResp")
        assert entry == {
            "PodUID": found["metadata"]["uid"],
            "ContainerName": "main",
            "ResourceName": gpu,
            "DeviceIDs": {"-1": plugin.allocations[0]},
        }
        assert sorted(checkpoint["RegisteredDevices"][gpu]) == ["a", "b"]
