"""The kubelet contract: claims and the DRA manager's checkpoint (kubelet.md §6)."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from metagpu.plugins.kubelet.pb import pluginregistration, v1
from metagpu.plugins.kubelet.pb.k8s.io.kubelet.pkg.apis.dra import v1 as dra
from metagpu.sim.kubelet.transport import AbortableServer
from tests.contract.kubelet.rig import NAMESPACE, Document, Kubelet, container, plugin_of

_State = Sequence[Mapping[str, Any]]


class Driver(dra.DraPluginBase):
    """A DRA driver that prepares one device, and records its calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []
        self.state: Callable[[], Awaitable[_State]] | None = None
        self.states: list[_State] = []

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.state is not None:
            self.states.append(await self.state())

    async def node_prepare_resources(
        self, message: dra.NodePrepareResourcesRequest
    ) -> dra.NodePrepareResourcesResponse:
        """Answer with the only device."""
        await self._called("prepare")
        device = dra.Device(request_names=["gpu"], pool_name="pool", device_name="zero")
        answer = dra.NodePrepareResourceResponse(devices=[device])
        return dra.NodePrepareResourcesResponse(
            claims={other.uid: answer for other in message.claims}
        )

    async def node_unprepare_resources(
        self, message: dra.NodeUnprepareResourcesRequest
    ) -> dra.NodeUnprepareResourcesResponse:
        """Agree."""
        await self._called("unprepare")
        answer = dra.NodeUnprepareResourceResponse()
        return dra.NodeUnprepareResourcesResponse(
            claims={other.uid: answer for other in message.claims}
        )

    @asynccontextmanager
    async def serving(self, kubelet: Kubelet) -> AsyncIterator[None]:
        """Serve in the kubelet's folder of sockets, and wait until it has registered."""
        socket = kubelet.registry / f"{self.name}.sock"
        registration = _Registration(self.name, str(socket))
        server = AbortableServer([self, registration])
        await server.open(socket)
        try:
            with anyio.fail_after(60):
                await registration.told.wait()
            yield
        finally:
            socket.unlink()
            await server.abort()


class _Registration(pluginregistration.RegistrationBase):
    def __init__(self, name: str, endpoint: str) -> None:
        self._info = pluginregistration.PluginInfo(
            type="DRAPlugin", name=name, endpoint=endpoint, supported_versions=["v1.DRAPlugin"]
        )
        self.told = anyio.Event()

    async def get_info(
        self,
        message: pluginregistration.InfoRequest,  # noqa: ARG002
    ) -> pluginregistration.PluginInfo:
        return self._info

    async def notify_registration_status(
        self, message: pluginregistration.RegistrationStatus
    ) -> pluginregistration.RegistrationStatusResponse:
        assert message.plugin_registered, message.error
        self.told.set()
        return pluginregistration.RegistrationStatusResponse()


def offer(driver: str, node: str) -> list[Document]:
    """Return a DeviceClass and a ResourceSlice with one device of a driver."""
    expression = f"device.driver == '{driver}'"
    pool = {"name": "pool", "generation": 1, "resourceSliceCount": 1}
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": driver},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        },
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": driver},
            "spec": {
                "driver": driver,
                "nodeName": node,
                "pool": pool,
                "devices": [{"name": "zero"}],
            },
        },
    ]


def claim(name: str, driver: str) -> Document:
    """Return a claim of the driver's only device."""
    exactly = {"deviceClassName": driver, "allocationMode": "ExactCount", "count": 1}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    }


def user(kubelet: Kubelet, name: str, of: str, gpu: str, count: int | None = None) -> Document:
    """Return a pod that uses a claim, and devices; the scheduler binds it."""
    main = dict(container("main", count, gpu))
    main["resources"] = {**main["resources"], "claims": [{"name": "gpu"}]}
    pod = kubelet.pod(name, main, resourceClaims=[{"name": "gpu", "resourceClaimName": of}])
    spec = {key: value for key, value in pod["spec"].items() if key != "nodeName"}
    return {**pod, "spec": spec}


async def uid_of(kubelet: Kubelet, name: str, kind: str = "Pod") -> str:
    """Return the uid of an object."""
    found = await kubelet.get(name, kind)
    assert found is not None
    return str(found["metadata"]["uid"])


def pods_of(state: Mapping[str, Any]) -> set[str]:
    """Return the pods of a claim in the checkpoint."""
    return set(state["PodUIDs"])


async def test_a_claim_is_prepared_after_allocate_and_once(kubelet: Kubelet, gpu: str) -> None:
    """A second pod joins; the claim is unprepared when the last one has ended.

    The checkpoint names the claim and its pod before the driver prepares it, and until the driver
    has unprepared it. PodResources lists the devices of the claim.
    """
    driver, plugin = Driver("once.contract.example"), plugin_of(gpu, "a")
    plugin.calls = driver.calls
    driver.state = kubelet.claims_state
    async with kubelet.serving(plugin), driver.serving(kubelet):
        await kubelet.reports(gpu, 1, 1)
        driver.calls.clear()
        await kubelet.create(*offer(driver.name, kubelet.node), claim("shared", driver.name))
        await kubelet.run(user(kubelet, "first", "shared", gpu, 1))
        assert driver.calls == ["allocate", "prepare"]
        uids = {await uid_of(kubelet, "first")}
        [before], [after] = driver.states[0], await kubelet.claims_state()
        assert pods_of(before) == pods_of(after) == uids
        assert {key: after[key] for key in ("ClaimUID", "ClaimName", "Namespace")} == {
            "ClaimUID": await uid_of(kubelet, "shared", "ResourceClaim"),
            "ClaimName": "shared",
            "Namespace": NAMESPACE,
        }
        assert after["DriverState"][driver.name]["Devices"][0] | {"ShareID": None} == {
            "PoolName": "pool",
            "DeviceName": "zero",
            "ShareID": None,
            "RequestNames": ["gpu"],
            "CDIDeviceIDs": after["DriverState"][driver.name]["Devices"][0]["CDIDeviceIDs"],
        }
        async with kubelet.lister() as lister:
            request = v1.GetPodResourcesRequest(pod_name="first", pod_namespace=NAMESPACE)
            found = (await lister.get(request)).pod_resources
        assert found is not None
        [listed] = found.containers[0].dynamic_resources
        assert (listed.claim_name, listed.claim_namespace) == ("shared", NAMESPACE)
        assert [
            (resource.driver_name, resource.device_name) for resource in listed.claim_resources
        ] == [(driver.name, "zero")]
        await kubelet.run(user(kubelet, "second", "shared", gpu))
        [state] = await kubelet.claims_state()
        assert pods_of(state) == uids | {await uid_of(kubelet, "second")}
        await kubelet.gone("first")
        assert driver.calls == ["allocate", "prepare"]
        await kubelet.gone("second")
        assert driver.calls == ["allocate", "prepare", "unprepare"]
        [last] = driver.states[-1]
        assert last["ClaimName"] == "shared"
        assert not await kubelet.claims_state()


async def test_a_restarted_kubelet_prepares_for_the_next_pod_of_a_claim(
    kubelet: Kubelet, gpu: str
) -> None:
    """A running pod has no call; a second pod has one, whose devices are added to the known ones.

    The kubelet finds the driver's socket by itself, and unprepares once.
    """
    driver = Driver("restart.contract.example")
    async with driver.serving(kubelet):
        await kubelet.create(*offer(driver.name, kubelet.node), claim("kept", driver.name))
        await kubelet.run(user(kubelet, "keeps", "kept", gpu))
        await kubelet.stop()
        await kubelet.start()
        [state] = await kubelet.claims_state()
        assert pods_of(state) == {await uid_of(kubelet, "keeps")}
        assert driver.calls == ["prepare"]
        await kubelet.run(user(kubelet, "joins", "kept", gpu))
        assert driver.calls == ["prepare", "prepare"]
        [state] = await kubelet.claims_state()
        assert [
            device["DeviceName"] for device in state["DriverState"][driver.name]["Devices"]
        ] == [
            "zero",
            "zero",
        ]
        async with kubelet.lister() as lister:
            request = v1.GetPodResourcesRequest(pod_name="joins", pod_namespace=NAMESPACE)
            found = (await lister.get(request)).pod_resources
        assert found is not None
        [listed] = found.containers[0].dynamic_resources
        assert [resource.device_name for resource in listed.claim_resources] == ["zero", "zero"]
        await kubelet.gone("keeps", "joins")
        assert driver.calls == ["prepare", "prepare", "unprepare"]
