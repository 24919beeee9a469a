"""The simulated cluster of one node: what runs, and what a user may do with it."""

import json
import random
import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
from anyio import to_thread

from metagpu import __version__
from metagpu.agent.paths import KUBELET_DIR
from metagpu.core.model.shares import Holder
from metagpu.plugins.cluster.settings import DEFAULT_NAMESPACE, VIEWER
from metagpu.sim.apiserver.objects import ApiError, Key, Object
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.cluster import pod_objects
from metagpu.sim.cluster.claim_scheduler import ClaimScheduler
from metagpu.sim.cluster.claims import ClusterClaims
from metagpu.sim.cluster.containers import PodContainers, PodProcess
from metagpu.sim.cluster.inspection import view_events, view_node, view_pod
from metagpu.sim.cluster.kubelet_sync import KubeletSync
from metagpu.sim.cluster.manifests import Manifests
from metagpu.sim.cluster.paths import (
    NODE_NAME,
    containers_dir,
    host_root,
    kubelet_dir,
    objects_file,
    pod_resources,
)
from metagpu.sim.cluster.pod_manifest import PodManifest
from metagpu.sim.cluster.pod_objects import key_of, title
from metagpu.sim.cluster.scheduler import schedule
from metagpu.sim.cluster.views import ClusterNodeView, EventView, PodView
from metagpu.sim.cluster.workloads import owner_of
from metagpu.sim.kubelet.claims import ClaimManager
from metagpu.sim.kubelet.kubelet import SimKubelet
from metagpu.sim.kubelet.other_plugin import other_plugin
from metagpu.sim.machine.containers import make_device_nodes
from metagpu.sim.machine.gpu import SimError
from metagpu.sim.machine.node import SimNode

_OFFERED_WITHIN: Final = 5.0
"""Seconds until a daemon that has no shares yet is taken for one that offers none."""
_SAVE_PERIOD: Final = 0.1
_CLEAN_PERIOD: Final = 60.0
_HISTORY: Final = 1000
"""Changes that the API server keeps for watches, at least."""
_DAEMON_SET: Final = ("daemonsets", DEFAULT_NAMESPACE, "metagpu")


class SingleNodeCluster:
    """An API server, a scheduler and a kubelet for one simulated node.

    Attributes:
        api: the API server, with the Node and all Pods.
        kubelet: the node's kubelet.
        claims: the ResourceClaims.
        containers: the containers of pods, with the processes that users start.
        manifests: what people apply, and its controllers.
        started: set once all of it runs, and the Node has shares or devices to offer.
        status_port: where the daemon serves its status, as a pod in the host's network; 0 is a
            daemon outside the cluster.
    """

    def __init__(self, node: SimNode, run_dir: Path, name: str = NODE_NAME) -> None:
        self.name = name
        self.status_port = 0
        self.api = SimApiServer(secrets.token_hex())
        numa_nodes = sorted({gpu.numa for gpu in node.gpus}) or (0,)
        manager = ClaimManager(run_dir)
        self.kubelet = SimKubelet(
            kubelet_dir(run_dir),
            pod_resources=pod_resources(run_dir),
            numa_nodes=numa_nodes,
            claimed=manager.dynamic_resources,
        )
        self.claims = ClusterClaims(self.api, manager, self._gpus)
        self.containers = PodContainers(containers_dir(run_dir), node)
        self.manifests = Manifests(self.api, lambda: self.kubelet.is_up)
        self.started = anyio.Event()
        self._machine = node
        self._objects_file = objects_file(run_dir)
        self._host_root = host_root(run_dir)
        self._sync = KubeletSync(
            self.api, self.kubelet, manager, self.containers, name, self._record
        )
        self._plugin: AsyncExitStack | None = None
        self._bursts = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["SingleNodeCluster"]:
        """Run everything while the block lasts.

        Raises:
            OSError: a socket or a file cannot be created.
        """
        if content := await to_thread.run_sync(_load, self._objects_file):
            self.api.store.load(content)
        if ("nodes", "", self.name) not in self.api.store.objects:
            self.api.add_node(self.name, {"kubernetes.io/hostname": self.name})
        if self.status_port:
            self.manifests.install(_daemon_objects(self.status_port))
        await to_thread.run_sync(make_device_nodes, self._host_root, len(self._machine.gpus))
        async with self.containers.running():
            self._sync.resume()
            async with self._serving():
                yield self

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        async with self.api.running(), self.kubelet.running():
            await to_thread.run_sync(self.api.kubeconfig, self._objects_file.parent)
            async with anyio.create_task_group() as group:
                group.start_soon(self._schedule)
                group.start_soon(self._sync.run)
                group.start_soon(self._clean)
                group.start_soon(self._save)
                group.start_soon(self._begin)
                try:
                    yield
                finally:
                    await self._end_plugin()
                    group.cancel_scope.cancel()

    # ---- what a user may do ----------------------------------------------------------------

    async def add_pods(self, requests: Sequence[PodManifest]) -> Sequence[PodView]:
        """Create pods at once; return them when it is decided what becomes of each.

        Raises:
            SimError: a request is not valid, or a pod of its name exists.
        """
        for request in requests:
            request.check()
        return self.views(
            await self.manifests.create([manifest.document() for manifest in requests])
        )

    async def burst(
        self, count: int, resource: str, sizes: tuple[int, int], namespace: str, seed: int | None
    ) -> Sequence[PodView]:
        """Create pods of random sizes at once; return them as `add_pods` does."""
        self._bursts += 1
        draw = random.Random(seed)  # noqa: S311 - sizes of pods guard nothing
        digits = len(str(count))
        names = [f"burst-{self._bursts}-{number:0{digits}}" for number in range(1, count + 1)]
        return await self.add_pods(
            [PodManifest(name, {resource: draw.randint(*sizes)}, namespace) for name in names]
        )

    async def end_pod(self, name: str, namespace: str) -> bool:
        """Delete a pod; return whether it is gone: while no kubelet runs, it is not.

        Raises:
            SimError: the pod does not exist.
        """
        return await self.manifests.remove([self._pod_key(name, namespace)])

    async def start_process(
        self,
        name: str,
        namespace: str,
        container: str = "",
        gpu: str = "",
        *,
        memory: int | None,
        load: int,
    ) -> int:
        """Start a process in a running pod; return its pid.

        Args:
            name: the pod's name.
            namespace: the pod's namespace.
            container: its name, empty for the first one with a GPU.
            gpu: its index or UUID, empty for the container's first one.
            memory: in bytes, `None` where NVML does not know it.
            load: the percent of the multiprocessors that it would use alone.

        Raises:
            SimError: the pod does not run or has no such GPU, or the memory is not free.
        """
        pod = self.api.store.objects[self._pod_key(name, namespace)]
        if pod_objects.phase_of(pod) != "Running":
            raise SimError(f"pod {title(pod)} is {pod_objects.phase_of(pod)}, not Running")
        wanted = self._machine.gpu(gpu) if gpu else None
        names = [every["name"] for every in pod["spec"]["containers"]]
        if container and container not in names:
            raise SimError(f"pod {title(pod)} has no container {container}: {', '.join(names)}")
        for place in [container] if container else names:
            for device in self._sync.devices_of(pod, place, self._machine):
                if wanted is None or wanted is device.gpu:
                    holder = Holder(namespace, name, place)
                    process = PodProcess(
                        uid=pod["metadata"]["uid"],
                        holder=holder,
                        device=device,
                        memory=memory,
                        load=load,
                    )
                    return await self.containers.start_process(process)
        what = f"GPU {gpu}" if gpu else "GPU"
        where = f"container {container} of " if container else ""
        raise SimError(f"{where}pod {title(pod)} sees no {what}")

    async def end_processes(self, name: str, namespace: str) -> Sequence[int]:
        """End all processes of a pod; return their pids.

        Raises:
            SimError: the pod does not exist, or has none.
        """
        pod = self.api.store.objects[self._pod_key(name, namespace)]
        uid = pod["metadata"]["uid"]
        if found := await self.containers.end_processes(lambda process: process.uid == uid):
            return found
        raise SimError(f"pod {title(pod)} has no process")

    async def end_claim(self, name: str, namespace: str) -> bool:
        """Delete a claim and the pods that use it; return whether they are gone.

        Raises:
            SimError: there is no such claim.
        """
        key = self.claims.key(name, namespace)
        return await self.manifests.remove([key, *self.claims.users(key)])

    def views(self, pods: Collection[Key]) -> Sequence[PodView]:
        """Return those pods that still exist."""
        objects = self.api.store.objects
        return [self._view(objects[pod]) for pod in pods if pod in objects]

    def pods(self) -> Sequence[PodView]:
        """Return all pods but the daemon's, the oldest first."""
        return [self._view(pod) for pod in self._pods_of_users()]

    def node(self) -> ClusterNodeView:
        """Return the Node."""
        return view_node(self.api.node(self.name), self.api.pods(), is_up=self.kubelet.is_up)

    def events(self) -> Sequence[EventView]:
        """Return all Events, the oldest first."""
        return view_events(self.api.events())

    def label_node(self, labels: Mapping[str, str | None]) -> None:
        """Set labels of the Node; `None` removes a label.

        Raises:
            SimError: the API server does not accept a value.
        """
        try:
            self.api.label(self.name, labels)
        except ApiError as error:
            raise SimError(str(error)) from error

    def set_config_map(self, namespace: str, name: str, data: Mapping[str, str]) -> None:
        """Create or replace a ConfigMap."""
        self.api.configure(namespace, name, data)

    async def restart_kubelet(self, *, forget: bool = False, reboot: bool = False) -> None:
        """Start the kubelet again, whether it runs or not.

        With `forget` it has lost its checkpoint; a `reboot` ended all containers.
        """
        await self._sync.restart(forget=forget, reboot=reboot)

    async def stop_kubelet(self) -> None:
        """Kill the kubelet; containers go on."""
        await self._sync.stop()

    async def start_plugin(self, resource: str, ids: Collection[str]) -> None:
        """Register a second plugin for a resource, with devices of its own.

        Raises:
            SimError: one runs, or the kubelet does not.
            KubeletError: the kubelet refuses.
        """
        if self._plugin is not None:
            raise SimError("a second plugin runs already; end it first")
        if not self.kubelet.is_up:
            raise SimError("no plugin can register: the kubelet does not run")
        async with AsyncExitStack() as stack:
            plugin = other_plugin(self.kubelet.directory, resource, list(ids))
            await stack.enter_async_context(plugin)
            self._plugin = stack.pop_all()

    async def end_plugin(self) -> None:
        """Kill the second plugin.

        Raises:
            SimError: none runs.
        """
        if self._plugin is None:
            raise SimError("no second plugin runs")
        await self._end_plugin()

    async def _end_plugin(self) -> None:
        plugin, self._plugin = self._plugin, None
        if plugin is not None:
            with anyio.CancelScope(shield=True):
                await plugin.aclose()

    # ---- what runs -------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Wait for the first shares, and let users begin: a pod before them would wait."""
        with anyio.move_on_after(_OFFERED_WITHIN):
            await self.api.until(
                lambda: (
                    any(each.allocatable for each in self.node().resources.values())
                    or any(kind == "resourceslices" for kind, *_ in self.api.store.objects)
                )
            )
        self.started.set()

    async def _schedule(self) -> None:
        """Bind pods; try those that wait again at each change."""
        while True:
            changed = self.api.next_change()
            self.manifests.keep()
            self.claims.keep()
            pods = {key_of(pod): pod for pod in self.api.pods()}
            plugin = ClaimScheduler(self.name, self.api.store.objects)
            for decision in schedule(self.api.node(self.name), list(pods.values()), plugin):
                status = pod_objects.scheduled(decision.message)
                status = {"status": {**status["status"], **decision.claims.status}}
                for claim, content in decision.claims.made.items():
                    self.api.store.put(claim, content)
                for claim, change in decision.claims.changes.items():
                    self.api.store.merge(claim, change, status=True, manager="kube-scheduler")
                if decision.node:
                    patch = pod_objects.binding(decision.node)
                    self.api.store.merge(
                        decision.pod, patch, status=False, manager="kube-scheduler"
                    )
                elif (
                    pods[decision.pod]["status"].get("conditions")
                    != (status["status"]["conditions"])
                ):
                    note = decision.message
                    self._record(pods[decision.pod], "FailedScheduling", note)
                self.api.store.merge(decision.pod, status, status=True, manager="kube-scheduler")
            await changed.wait()

    async def _save(self) -> None:
        """Save all objects after a change and at the end: pods outlive the daemon."""
        saved = 0
        try:
            while True:
                changed = self.api.next_change()
                if saved != self.api.store.version:
                    saved = self.api.store.version
                    await self._write_objects()
                    await anyio.sleep(_SAVE_PERIOD)
                else:
                    await changed.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await self._write_objects()

    async def _write_objects(self) -> None:
        text = json.dumps(self.api.store.dump())
        await to_thread.run_sync(_replace, self._objects_file, text)

    async def _clean(self) -> None:
        """Forget old requests and changes; a watch that lags behind lists again."""
        while True:
            await anyio.sleep(_CLEAN_PERIOD)
            self.api.requests.clear()
            if len(self.api.store.history) > _HISTORY:
                self.api.store.compact()

    def _record(self, pod: Object, reason: str, note: str) -> None:
        """Write a warning about a pod; one of the same reason is replaced, and counted."""
        metadata = pod["metadata"]
        key = ("events", metadata["namespace"], f"{metadata['uid']}.{reason.lower()}")
        before = self.api.store.objects.get(key)
        count = before["series"]["count"] + 1 if before else 1
        event = pod_objects.event_object(pod, reason, note)
        self.api.store.put(key, {**event, "series": {"count": count}})

    def _view(self, pod: Object) -> PodView:
        held = self._sync.held_devices(pod["metadata"]["uid"])
        return view_pod(pod, held, self._gpus())

    def _pod_key(self, name: str, namespace: str) -> Key:
        key = ("pods", namespace, name)
        if key not in self.api.store.objects:
            known = ", ".join(title(pod) for pod in self._pods_of_users()) or "none"
            raise SimError(f"no pod {name} in namespace {namespace}; there are: {known}")
        return key

    def _pods_of_users(self) -> Sequence[Object]:
        daemon = self.api.store.objects.get(_DAEMON_SET)
        uid = daemon["metadata"]["uid"] if daemon else "none"
        return [pod for pod in self.api.pods() if owner_of(pod) != uid]

    def _gpus(self) -> Mapping[str, int]:
        """Return the indices of the GPUs by uuid."""
        return {gpu.id: index for index, gpu in enumerate(self._machine.gpus)}


def _daemon_objects(port: int) -> Sequence[Mapping[str, Any]]:
    """Return what viewers find a daemon by, as the chart makes it, and their account."""
    labels = {"app.kubernetes.io/name": "metagpu"}
    place = {"namespace": _DAEMON_SET[1]}
    container = {"name": "metagpu", "image": f"metagpu:{__version__}"}
    spec = {
        "hostNetwork": True,
        "tolerations": [{"operator": "Exists"}],
        "containers": [{**container, "ports": [{"name": "status-api", "containerPort": port}]}],
        "volumes": [{"name": "device-plugins", "hostPath": {"path": str(KUBELET_DIR)}}],
    }
    template = {"metadata": {"labels": labels}, "spec": spec}
    content = {"selector": {"matchLabels": labels}, "template": template}
    metadata = {**place, "name": _DAEMON_SET[2], "labels": labels}
    return [
        {"kind": "DaemonSet", "metadata": metadata, "spec": content},
        {"kind": "ServiceAccount", "metadata": {**place, "name": VIEWER}},
    ]


def _load(file: Path) -> Object | None:
    """Make the folder of a file and return the file's content, `None` without one."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        content: Object = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SimError(f"cannot read {file}: {error}; delete it for a new cluster") from error
    return content


def _replace(file: Path, text: str) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(file)
