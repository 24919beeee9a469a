"""The two kubelets under the contract, each with its node, behind one interface."""

import itertools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
from anyio import to_thread
from grpclib.client import Channel

from metagpu.plugins.kubelet.pb import v1, v1beta1
from metagpu.sim.apiserver.objects import KINDS
from metagpu.sim.cluster.paths import pod_resources
from metagpu.sim.cluster.pod_objects import timestamp
from metagpu.sim.cluster.single_node import SingleNodeCluster
from tests.e2e.cluster import IDLE_COMMAND
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.node import Node
from tests.e2e.rig.settings import KUBELET_HOME
from tests.sim.kubelet.rig import FakePlugin, devices

NAMESPACE: Final = "contract"
CHECKPOINT: Final = "kubelet_internal_checkpoint"
_COLLECTIONS: Final = {kind: other.collection for kind, other in KINDS.items()}
_NUMBERS = itertools.count()
_FOUND = TypeVar("_FOUND")

Document = Mapping[str, Any]


def container(
    name: str, count: int | None, resource: str, *, sidecar: bool = False, seconds: float = 0
) -> Document:
    """Return a container that asks for devices; it ends after SECONDS, else with its pod."""
    amounts = {} if count is None else {resource: str(count)}
    return {
        "name": name,
        "image": BUSYBOX_IMAGE,
        "command": ["sleep", f"{seconds:g}"] if seconds else IDLE_COMMAND,
        "resources": {"limits": amounts, "requests": amounts},
        **({"restartPolicy": "Always"} if sidecar else {}),
    }


def init(name: str, count: int, resource: str) -> Document:
    """Return an init container that asks for devices and ends."""
    return {**container(name, count, resource), "command": ["true"]}


def plugin_of(
    resource: str,
    names: str,
    prefer: Callable[[v1beta1.ContainerPreferredAllocationRequest], list[str]] | None = None,
    pre_start: Callable[[], Awaitable[None]] | None = None,
) -> FakePlugin:
    """Return a plugin whose answers a real container starts with."""
    plugin = FakePlugin(resource, devices(names), prefer=prefer, pre_start=pre_start)
    plugin.is_bare = True
    return plugin


class Kubelet(ABC):
    """A node's kubelet and its API server, as a test drives and sees them.

    Pods come past the scheduler, so that the kubelet alone decides about them.
    """

    def __init__(self, *, node: str, directory: Path, listing: Path, claims: Path) -> None:
        self.node = node
        self.directory = directory
        self.socket = directory / "kubelet.sock"
        self.registry = claims / "plugins_registry"
        self._claims_state = claims / "dra_manager_state"
        self._listing = listing

    # ---- what differs ----------------------------------------------------------------------

    @abstractmethod
    async def create(self, *documents: Document) -> None:
        """Create objects; wait for nothing."""

    @abstractmethod
    async def get(self, name: str, kind: str = "Pod") -> Document | None:
        """Return an object of the tests' namespace, `None` for none."""

    @abstractmethod
    async def delete(self, name: str, grace: int = 1) -> None:
        """Begin to delete a pod, which has GRACE seconds."""

    @abstractmethod
    async def amounts(self, resource: str) -> tuple[int | None, int | None]:
        """Return capacity and allocatable of a resource as the Node has them."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop the kubelet; containers go on."""

    @abstractmethod
    async def start(self) -> None:
        """Start the kubelet again."""

    # ---- pods ------------------------------------------------------------------------------

    def pod(
        self, name: str, *containers: Document, init: Sequence[Document] = (), **spec: object
    ) -> Document:
        """Return a pod that is bound to the node."""
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "nodeName": self.node,
                "hostNetwork": True,
                "enableServiceLinks": False,
                "restartPolicy": "Never",
                "initContainers": list(init),
                "containers": list(containers),
                **spec,
            },
        }

    async def run(self, *pods: Document) -> None:
        """Create pods, and wait until all run."""
        await self.create(*pods)
        for pod in pods:
            name = pod["metadata"]["name"]
            assert await self.phase(name, "Running", "Failed") == "Running", await self.get(name)

    async def fail(self, pod: Document) -> tuple[str, str]:
        """Create a pod that is refused; return its reason and message."""
        await self.create(pod)
        name = pod["metadata"]["name"]
        assert await self.phase(name, "Running", "Failed") == "Failed"
        found = await self.get(name)
        assert found is not None
        return found["status"]["reason"], found["status"]["message"]

    async def phase(self, name: str, *phases: str) -> str:
        """Wait until a pod is in one of these phases; return which."""

        async def seen() -> str | None:
            found = await self.get(name)
            now: str = found["status"]["phase"] if found else "gone"
            return now if now in phases else None

        return await until(seen)

    async def gone(self, *names: str) -> None:
        """Delete pods, and wait until the API server has them no more."""
        for name in names:
            await self.delete(name)
        for name in names:
            await self.phase(name, "gone")

    # ---- device plugins ----------------------------------------------------------------------

    @asynccontextmanager
    async def serving(self, plugin: FakePlugin, endpoint: str = "") -> AsyncIterator[None]:
        """Register a plugin, and wait until the kubelet has its list."""
        endpoint = endpoint or f"contract-{next(_NUMBERS)}.sock"
        async with plugin.serving(self.directory, endpoint):
            await self.register(plugin)
            yield

    async def register(self, plugin: FakePlugin) -> None:
        """Register a plugin that serves, and wait until the kubelet has its list."""
        await plugin.register(self)
        await self.has_list(plugin)

    async def has_list(self, plugin: FakePlugin) -> None:
        """Wait until the kubelet has a plugin's healthy devices."""
        wanted = {device.id for device in plugin.listed if device.health == "Healthy"}

        async def is_there() -> bool:
            return await self.allocatable(plugin.resource) == wanted

        await until(is_there)

    async def reports(self, resource: str, capacity: int, allocatable: int) -> None:
        """Wait until the Node has these amounts."""

        async def is_there() -> bool:
            return await self.amounts(resource) == (capacity, allocatable)

        await until(is_there)

    # ---- PodResources and state files --------------------------------------------------------

    @asynccontextmanager
    async def lister(self) -> AsyncIterator[v1.PodResourcesListerStub]:
        """Connect to PodResources."""
        async with Channel(path=str(self._listing)) as channel:
            yield v1.PodResourcesListerStub(channel)

    async def allocatable(self, resource: str) -> set[str]:
        """Return the ids that GetAllocatableResources has of a resource."""
        async with self.lister() as lister:
            answer = await lister.get_allocatable_resources()
        return ids_of(answer.devices, resource)

    async def listed(self, resource: str) -> dict[str, dict[str, set[str]]]:
        """Return the ids of each container of the tests' pods that List has."""
        async with self.lister() as lister:
            pods = (await lister.list()).pod_resources
        return {
            pod.name: {c.name: ids_of(c.devices, resource) for c in pod.containers}
            for pod in pods
            if pod.namespace == NAMESPACE
        }

    async def holders(self, resource: str) -> dict[str, set[str]]:
        """Return the ids of each container that the checkpoint names, by its name."""
        entries = (await self.checkpoint())["PodDeviceEntries"] or ()
        return {
            entry["ContainerName"]: {i for ids in entry["DeviceIDs"].values() for i in ids}
            for entry in entries
            if entry["ResourceName"] == resource
        }

    async def checkpoint(self) -> Mapping[str, Any]:
        """Return the content of the device manager's checkpoint."""
        try:
            text = await anyio.Path(self.directory / CHECKPOINT).read_text()
        except FileNotFoundError:  # of a kubelet that has never granted a device
            return {"PodDeviceEntries": None, "RegisteredDevices": {}}
        data: Mapping[str, Any] = json.loads(text)["Data"]
        return data

    async def claims_state(self) -> Sequence[Mapping[str, Any]]:
        """Return the claims in the DRA manager's checkpoint."""
        try:
            text = await anyio.Path(self._claims_state).read_text()
        except FileNotFoundError:  # of a kubelet that has never prepared a claim
            return ()
        return json.loads(json.loads(text)["Data"])["ClaimInfoStateList"] or ()


def ids_of(devices: Iterable[v1.ContainerDevices], resource: str) -> set[str]:
    """Return the ids of one resource."""
    return {
        name for device in devices if device.resource_name == resource for name in device.device_ids
    }


async def until(probe: Callable[[], Awaitable[_FOUND | None]], within: float = 60) -> _FOUND:
    """Poll until a probe finds something true, and return that."""
    with anyio.fail_after(within):
        while not (found := await probe()):  # noqa: ASYNC110 - a real kubelet sends no events
            await anyio.sleep(0.05)
    return found


class SimulatedKubelet(Kubelet):
    """The kubelet of a simulated cluster."""

    def __init__(self, cluster: SingleNodeCluster, run_dir: Path) -> None:
        super().__init__(
            node=cluster.name,
            directory=cluster.kubelet.directory,
            listing=pod_resources(run_dir),
            claims=run_dir,
        )
        self._cluster = cluster
        self._store = cluster.api.store

    async def create(self, *documents: Document) -> None:
        """Put objects into the API server's store."""
        for document in documents:
            collection, name = _COLLECTIONS[document["kind"]], document["metadata"]["name"]
            metadata = {"annotations": {}, "creationTimestamp": timestamp(time.time())}
            status = {"phase": "Pending"} if collection == "pods" else {}
            namespace = document["metadata"].get("namespace", "")
            self._store.put(
                (collection, namespace, name),
                {"metadata": metadata, "spec": document["spec"], "status": status},
            )

    async def get(self, name: str, kind: str = "Pod") -> Document | None:
        """Look into the API server's store."""
        return self._store.objects.get((_COLLECTIONS[kind], NAMESPACE, name))

    async def delete(self, name: str, grace: int = 1) -> None:
        """Set the time at which the pod's containers are killed, as an API server does."""
        found = self._store.objects[("pods", NAMESPACE, name)]
        grace = grace if _ignores_signals(found) else 0
        deletion = {"metadata": {"deletionTimestamp": timestamp(time.time() + grace)}}
        self._store.merge(("pods", NAMESPACE, name), deletion, status=False, manager="kubectl")

    async def amounts(self, resource: str) -> tuple[int | None, int | None]:
        """Return what the kubelet's next report has."""
        kubelet = self._cluster.kubelet
        return kubelet.capacity().get(resource), kubelet.allocatable().get(resource)

    async def stop(self) -> None:
        """Stop the kubelet."""
        await self._cluster.stop_kubelet()

    async def start(self) -> None:
        """Start the kubelet."""
        await self._cluster.restart_kubelet()


def _ignores_signals(pod: Document) -> bool:
    return any(other["command"][0] == "sleep" for other in pod["spec"]["containers"])


class RealKubelet(Kubelet):
    """The kubelet of a real one-node cluster."""

    def __init__(self, node: Node) -> None:
        super().__init__(
            node=node.name,
            directory=KUBELET_HOME / "device-plugins",
            listing=KUBELET_HOME / "pod-resources" / "kubelet.sock",
            claims=KUBELET_HOME,
        )
        self._machine = node

    async def create(self, *documents: Document) -> None:
        """Create objects by kubectl."""
        await to_thread.run_sync(self._machine.kubectl.apply, *documents)

    async def get(self, name: str, kind: str = "Pod") -> Document | None:
        """Ask the API server."""

        def found() -> Document | None:
            try:
                return self._machine.kubectl.get(kind, name, NAMESPACE)
            except RigError as error:
                if "NotFound" in str(error):
                    return None
                raise

        return await to_thread.run_sync(found)

    async def delete(self, name: str, grace: int = 1) -> None:
        """Delete by kubectl."""
        options = (f"--namespace={NAMESPACE}", f"--grace-period={grace}", "--wait=false")
        await self._kubectl("delete", "pod", name, "--ignore-not-found", *options)

    async def clear(self) -> None:
        """Delete every pod and claim of the tests, and wait for it."""
        kinds = "pods,resourceclaims"
        options = (f"--namespace={NAMESPACE}", "--grace-period=1", "--timeout=60s")
        await self._kubectl("delete", kinds, "--all", *options)

    async def _kubectl(self, *arguments: str) -> str:
        return await to_thread.run_sync(self._machine.kubectl, *arguments)

    async def amounts(self, resource: str) -> tuple[int | None, int | None]:
        """Return what the Node has."""
        return await to_thread.run_sync(self._machine.resource, resource)

    async def stop(self) -> None:
        """Stop the kubelet."""
        await to_thread.run_sync(self._machine.stop_kubelet)

    async def start(self) -> None:
        """Start the kubelet, and wait until it reports Ready."""
        await to_thread.run_sync(self._machine.start_kubelet)
