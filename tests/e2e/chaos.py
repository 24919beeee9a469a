"""Random schedules beside the real kubelet: their steps on the node of the tests.

The account sees what the kubelet lists, what the API server has, the processes of the containers
and the driver's file. A pod has what it was seen with as long as the kubelet lists it or a process
of it runs, also one that was deleted by force or forgotten. Its phase may be older than its end.
"""

import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from metagpu.plugins.kubelet.paths import CHECKPOINT_FILE
from metagpu.plugins.kubelet.pb import v1
from metagpu.sim.machine.spec import build_node
from tests.chaos.account import BY_HAND, Account, Holding
from tests.chaos.chaos import Chaos
from tests.chaos.node import GPUS
from tests.chaos.steps import Step
from tests.e2e.claims import leave_nothing
from tests.e2e.cluster import IDLE_COMMAND, NAMESPACE, Cluster
from tests.e2e.instances import (
    REFUSED,
    MigNode,
    allocatable_devices,
    failure,
    list_pod_resources,
)
from tests.e2e.rig.api import Api
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.settings import KUBELET_HOME

PAUSE_S: Final = 0.2
PROBE_S: Final = 180.0
"""The kubelet may read a claim before the API server knows that the claim's pod is of its node
("no relationship found"), and tries again after 90 s."""
TWICE_S: Final = 1.0
"""Seconds after which a kubelet is killed that has just been started."""
FOLDERS: Final = {
    "pods": f"/api/v1/namespaces/{NAMESPACE}/pods",
    "resourceclaims": f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims",
}


@dataclass(kw_only=True)
class RealChaos(Chaos):
    """The node of the tests, and what befalls it.

    Attributes:
        documents: the pods of the API server, as seen last.
        devices: the number of healthy devices of each resource, as seen last.
        closed: for each pod whose grant is still to be judged, what was closed when it came.
        turn: for all that uses the connection.
        served: set while the API server is there.
        refused: the pods that were not admitted, with the reasons.
    """

    cluster: Cluster
    api: Api
    group: TaskGroup
    documents: Sequence[Document] = ()
    devices: Mapping[str, int] = field(default_factory=dict)
    closed: dict[str, frozenset[int]] = field(default_factory=dict)
    turn: anyio.Lock = field(default_factory=anyio.Lock)
    served: anyio.Event = field(default_factory=anyio.Event)
    refused: dict[str, str] = field(default_factory=dict)

    # ---- what is seen ------------------------------------------------------------------------

    async def see(self) -> None:
        """Take over what is seen now, after a short pause."""
        await anyio.sleep(PAUSE_S)
        async with self.turn:
            listed = await self._ask_kubelet()
            with suppress(RigError):  # the API server is away
                pods, claims, alive = await to_thread.run_sync(self._look)
                self._take(listed, pods, claims, alive)

    async def _ask_kubelet(self) -> Mapping[str, v1.PodResources]:
        """Return what the kubelet lists of each pod, nothing while it does not answer."""
        try:
            self.devices = await allocatable_devices()
            answer = await list_pod_resources()
        except RigError:
            self.devices = {}
            return {}
        return {pod.name: pod for pod in answer.pod_resources if pod.namespace == NAMESPACE}

    def _look(self) -> tuple[Mapping[str, Document], Mapping[str, Document], set[str]]:
        pods, claims = (self.api.objects(path) for path in FOLDERS.values())
        return pods, claims, set(processes())

    def _take(
        self,
        listed: Mapping[str, v1.PodResources],
        pods: Mapping[str, Document],
        claims: Mapping[str, Document],
        alive: Collection[str],
    ) -> None:
        self.documents = list(pods.values())
        running = {*listed, *({*self.account.pods, *pods} & {*alive})} - {BY_HAND}
        held = {
            name: set(self._held(listed[name], claims)) if name in listed else set[Holding]()
            for name in running
        }
        self.saw({name: (name, holdings) for name, holdings in held.items()})
        for name in {name for name in running if held[name]} & self.closed.keys():
            self.note(f"  {name} holds {sorted(f'{h.gpu}:{h.kind}:{h.part}' for h in held[name])}")
            self.account.granted(name, held[name], self.closed.pop(name) & self.account.closed())
        for name in pods.keys() - self.refused.keys():
            if why := failure(pods[name]):
                self.refused[name] = why
                self.note(f"  {name} is refused: {why}")
                if not why.startswith(REFUSED):
                    self.account.add(f"{name} failed: {why}")

    def _held(self, pod: v1.PodResources, claims: Mapping[str, Document]) -> Iterator[Holding]:
        for container in pod.containers:
            for devices in container.devices:
                for device in devices.device_ids:
                    yield self.account.of_device(devices.resource_name, device)
            for resource in container.dynamic_resources:
                if resource.claim_resources and resource.claim_name in claims:
                    yield from self.account.of_claim(claims[resource.claim_name])

    async def watch(self) -> None:
        """Look at all sides all the time."""
        while True:
            await self.see()

    def pods(self) -> Sequence[Document]:
        """Return the pods that the API server has."""
        return self.documents

    def allocatable(self) -> Mapping[str, int]:
        """Return how many healthy devices of each resource the kubelet has."""
        return self.devices

    # ---- pods --------------------------------------------------------------------------------

    async def create(self, kind: str, name: str, content: Document) -> None:
        """Create a pod or a ResourceClaim."""
        if kind == "pods":
            self.closed[name] = self.account.closed()
        await self._call("POST", FOLDERS[kind], named(name, content))

    async def end(self, pod: Document, grace_s: int = 1) -> None:
        """Delete a pod, and the claim that was made for it."""
        name = pod["metadata"]["name"]
        self.note(f"  deletes {name}{'' if grace_s else ' by force'}")
        await self._call("DELETE", f"{FOLDERS['pods']}/{name}", {"gracePeriodSeconds": grace_s})
        if pod["spec"].get("resourceClaims"):
            await self._call("DELETE", f"{FOLDERS['resourceclaims']}/{name}")

    async def do_force(self, number: int) -> None:
        """Delete a pod by force: it is gone at the API server, whatever its kubelet does."""
        if self.documents:
            await self.end(self.documents[number % len(self.documents)], 0)

    async def _call(self, method: str, path: str, body: Document | None = None) -> None:
        await self.served.wait()
        async with self.turn:
            call = partial(self.api.call, method, path, body)
            try:
                await to_thread.run_sync(call)
            except RigError:  # the connection was that to an earlier API server
                await to_thread.run_sync(call)

    # ---- the kubelet and the API server ------------------------------------------------------

    async def do_restart_kubelet(self, times: int) -> None:
        """Start the kubelet again, once more while it starts."""
        await self._with_api(partial(self._restart_kubelet, times))

    def _restart_kubelet(self, times: int = 1) -> None:
        node = self.cluster.node
        for _ in range(times - 1):
            node.stop_kubelet()
            node.kubelet.start()
            time.sleep(TWICE_S)
            node.kubelet.kill()
        node.restart_kubelet()

    async def do_kubelet_down(self) -> None:
        """Kill the kubelet; containers go on."""
        await to_thread.run_sync(self.cluster.node.kubelet.kill)

    async def do_forget(self) -> None:
        """Start the kubelet without its checkpoint, beside a daemon that knows all leases."""
        await self.rest()
        self.forgotten |= {*self.account.names.values()} - {BY_HAND}
        self.cluster.node.stop_kubelet()
        (KUBELET_HOME / "device-plugins" / CHECKPOINT_FILE).unlink(missing_ok=True)
        await self._with_api(self._restart_kubelet)

    async def do_api_away(self, seconds: float) -> None:
        """Kill the API server, and start it some seconds later."""
        await self.served.wait()
        self.served = anyio.Event()
        self.cluster.node.apiserver.kill()
        self.group.start_soon(self._start_api, seconds)

    async def _start_api(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        await to_thread.run_sync(self.cluster.node.start_api)
        self.served.set()

    async def _with_api(self, action: Callable[[], object]) -> None:
        """Do something that needs the API server."""
        await self.served.wait()
        await to_thread.run_sync(action)

    # ---- the daemon --------------------------------------------------------------------------

    async def do_kill(self, down: float) -> None:
        """Kill the daemon and start it again."""
        await self._stop(self.cluster.daemon.kill)
        await anyio.sleep(down)
        await self._start()

    async def do_terminate(self, down: float) -> None:
        """End the daemon in good order and start it again."""
        await self._stop(self.cluster.daemon.stop)
        await anyio.sleep(down)
        await self._start()

    async def do_restart_both(self) -> None:
        """Kill the daemon, start the kubelet again, and the daemon."""
        await self._stop(self.cluster.daemon.kill)
        await self._with_api(self._restart_kubelet)
        await self._start()

    async def do_roll_out(self) -> None:
        """Exchange the daemon by another one."""
        await self.do_reload(self.configuration)  # none takes over with a wrong one
        await self.up()
        await self._stop(self.cluster.daemon.exchange)
        self.by_hand.clear()

    async def _stop(self, how: Callable[[], None]) -> None:
        await self.delete_forgotten()
        await self._with_api(how)
        self.account.lost.clear()  # the simulated GPUs end with it

    async def _start(self) -> None:
        await self._with_api(self.cluster.daemon.start_again)
        self.by_hand.clear()  # a start takes over what nobody uses

    async def configure(self, text: str) -> None:
        """Write a configuration and have it read."""
        await self._with_api(partial(self.cluster.daemon.configure, text))

    async def rest(self) -> None:
        """Bring up all that is down, and calm the node."""
        await self.do_reload(self.configuration)
        await self.up()
        await self.calm()

    async def up(self) -> None:
        """Bring up the API server, the kubelet, and a daemon that could not start."""
        await self.served.wait()
        if not self.cluster.node.kubelet.alive:
            await to_thread.run_sync(self.cluster.node.start_kubelet)
        if not self.cluster.daemon.alive:
            await self._start()


def named(name: str, content: Document) -> Document:
    """Return an object of the API server; a pod idles, its processes have its name."""
    spec, main = content["spec"], {"image": BUSYBOX_IMAGE, "env": [{"name": "POD", "value": name}]}
    for container in (*spec.get("initContainers", ()), *spec.get("containers", ())):
        once = container.get("restartPolicy") == "once"
        container |= {**main, "command": ["true"] if once else IDLE_COMMAND}
        if once:
            del container["restartPolicy"]
    if "containers" in spec:
        spec |= {"hostNetwork": True, "enableServiceLinks": False}
        spec |= {"automountServiceAccountToken": False}
    return {"metadata": {"name": name}, "spec": spec}


def processes() -> Iterator[str]:
    """Yield the pods of the machine's processes, by their environments."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process has ended, or is the kernel's own
            for line in file.read_bytes().split(b"\0"):
                if line.startswith(b"POD="):
                    yield line.removeprefix(b"POD=").decode()


@asynccontextmanager
async def _chaos(node: MigNode, driver: Path) -> AsyncIterator[RealChaos]:
    """Look at a node while the block lasts; bring up afterwards what is down then."""
    cluster = node.cluster
    spec = cluster.node.paths.home / "chaos-node.yaml"
    spec.write_text(f"gpus: [{GPUS}]\n")
    uuids = tuple(str(gpu.id) for gpu in build_node(str(spec)).gpus)
    with cluster.node.api() as api:
        async with anyio.create_task_group() as group:
            found = RealChaos(
                account=Account(uuids, driver),
                run_folder=cluster.daemon.run_folder,
                probe_s=PROBE_S,
                cluster=cluster,
                api=api,
                group=group,
            )
            found.served.set()
            group.start_soon(found.watch)
            try:
                yield found
            except RigError as error:
                found.account.add(str(error))
            await found.do_reload("all")
            await found.up()
            for gpu in list(found.account.cordoned):
                await found.do_uncordon(gpu)
            group.cancel_scope.cancel()


def faults(node: MigNode, driver: Path, steps: Sequence[Step]) -> tuple[list[str], list[str]]:
    """Run a schedule on a node without pods; return what must not be, and what happened."""

    async def run() -> tuple[list[str], list[str]]:
        async with _chaos(node, driver) as chaos:
            await chaos.run(steps)
        return chaos.account.broken, chaos.log

    try:
        return anyio.run(run)
    finally:
        leave_nothing(node.cluster)
