"""Admission of pods and the start of their containers (kubelet.md §1.5).

The order of checks is the kubelet's: topology policy, device manager container by container,
then the predicate on node resources. Plugins are called through the endpoints of the state.
"""

import random
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable
from typing import TYPE_CHECKING

import msgspec

from metagpu.sim.kubelet.device_manager import DeviceManagerState, EndpointInfo
from metagpu.sim.kubelet.pods import (
    AdmissionError,
    ContainerRunOptions,
    ContainerStartError,
    DeviceError,
    SimContainer,
    SimPod,
    merge_responses,
)
from metagpu.sim.kubelet.topology import (
    TopologyPolicy,
    merge_hints,
    split_by_affinity,
    topology_hints,
)


class DeviceRequest(msgspec.Struct, frozen=True):
    """A container's request for one resource.

    `reusable` are devices of the pod's earlier init containers, `nodes` the NUMA nodes of the
    topology policy's decision. `running` marks a container that the runtime reported as running
    while the kubelet started: the container keeps its devices, unchecked.
    """

    uid: str
    container: str
    resource: str
    count: int
    reusable: Collection[str] = ()
    nodes: frozenset[int] | None = None
    running: bool = False


class PreferenceQuestion(msgspec.Struct, frozen=True):
    """The request of GetPreferredAllocation, if the plugin announced it (case 45)."""

    available: Collection[str]
    must_include: Collection[str]
    size: int


DeviceChoice = Generator[PreferenceQuestion, Collection[str], frozenset[str]]


def choose_devices(
    state: DeviceManagerState, request: DeviceRequest, rng: random.Random
) -> DeviceChoice:
    """Choose devices and mark them allocated; yield at most one question on the way.

    Send the preferred ids as the answer, an empty collection for no preference. Returns the
    chosen ids: none when there is nothing to allocate.

    Raises:
        DeviceError: the request cannot be met; devices picked so far stay marked.
    """
    if request.running:
        return frozenset()
    _check(state, request)
    if request.count == 0 or state.devices_of(request.uid, request.container, request.resource):
        return frozenset()
    pick = _Pick(state, request, rng)
    if pick.take(request.reusable):
        return pick.done()
    available = state.available(request.resource)
    if len(available) < pick.missing:
        raise DeviceError(
            f"requested number of devices unavailable for {request.resource}. "
            f"Requested: {pick.missing}, Available: {len(available)}"
        )
    aligned, unaligned, rootless = split_by_affinity(
        state, request.resource, available, request.nodes
    )
    if pick.missing < len(aligned):
        preferred = yield pick.question(aligned)
        _ = pick.take(aligned.intersection(preferred)) or pick.take(aligned)
        return pick.done()
    if pick.take(aligned):
        return pick.done()
    preferred = yield pick.question(available)
    _ = pick.take(available.intersection(preferred)) or pick.take(unaligned) or pick.take(rootless)
    return pick.done()


def _check(state: DeviceManagerState, request: DeviceRequest) -> None:
    resource = request.resource
    held = state.devices_of(request.uid, request.container, resource)
    if held is not None and len(held) != request.count:
        raise DeviceError(
            f'pod "{request.uid}" container "{request.container}" changed request for resource '
            f'"{resource}" from {len(held)} to {request.count}'
        )
    healthy = state.healthy.get(resource)
    if healthy is None:
        raise DeviceError(f"cannot allocate unregistered device {resource}")
    if not healthy:
        raise DeviceError(
            f"no healthy devices present; cannot allocate unhealthy devices {resource}"
        )
    if held and not healthy >= held:
        raise DeviceError(
            "previously allocated devices are no longer healthy; "
            f"cannot allocate unhealthy devices {resource}"
        )


class _Pick:
    """The devices picked so far for one request."""

    def __init__(
        self, state: DeviceManagerState, request: DeviceRequest, rng: random.Random
    ) -> None:
        self._state = state
        self._request = request
        self._rng = rng
        self._picked: set[str] = set()

    @property
    def missing(self) -> int:
        return self._request.count - len(self._picked)

    def take(self, devices: Collection[str]) -> bool:
        """Pick the missing devices at random; return whether the request is complete."""
        fresh = sorted(set(devices) - self._picked)
        chosen = self._rng.sample(fresh, min(self.missing, len(fresh)))
        self._picked.update(chosen)
        # Looked up each time: a recount while the plugin is asked replaces the sets.
        self._state.allocated.setdefault(self._request.resource, set()).update(chosen)
        return self.missing == 0

    def question(self, devices: Collection[str]) -> PreferenceQuestion:
        picked = frozenset(self._picked)
        return PreferenceQuestion(picked.union(devices), picked, self._request.count)

    def done(self) -> frozenset[str]:
        if self.missing:
            raise DeviceError(
                "unexpectedly allocated less resources than required. Requested: "
                f"{self._request.count}, Got: {len(self._picked)}"
            )
        return frozenset(self._picked)


if TYPE_CHECKING:
    from metagpu.sim.kubelet.transport import PluginClient

Reuse = dict[str, set[str]]


class PodAdmission:
    """The admit handlers of one kubelet process.

    `save` writes the checkpoint, `active` returns the pods that count, `running` has the (pod uid,
    container) pairs that the runtime reported when this kubelet started.
    """

    def __init__(
        self,
        state: DeviceManagerState,
        *,
        save: Callable[[], Awaitable[None]],
        active: Callable[[], Iterable[SimPod]],
        running: Collection[tuple[str, str]],
        rng: random.Random,
        numa_nodes: Collection[int],
        policy: TopologyPolicy,
        pre_start_timeout: float,
    ) -> None:
        self._state = state
        self._save = save
        self._active = active
        self._running = running
        self._rng = rng
        self._numa_nodes = numa_nodes
        self._policy: TopologyPolicy = policy
        self._pre_start_timeout = pre_start_timeout
        self._affinity: dict[tuple[str, str], frozenset[int] | None] = {}
        self._reuse: tuple[str, Reuse] = ("", {})

    def release_ended_pods(self) -> None:
        """Release the devices of ended pods; the plugin is not informed."""
        self._state.release_ended_pods({pod.uid for pod in self._active()})

    async def admit(self, pod: SimPod, node_allocatable: Callable[[], dict[str, int]]) -> None:
        """Return every container of the pod its devices.

        Raises:
            AdmissionError: TopologyAffinityError, UnexpectedAdmissionError or OutOf<resource>.
        """
        for container in pod.in_order():
            self._align(pod, container)
            try:
                await self._allocate(pod, container)
            except DeviceError as error:
                raise AdmissionError(
                    "UnexpectedAdmissionError",
                    f"Allocate failed due to {error}, which is unexpected",
                ) from error
        self._check_fit(pod, node_allocatable())

    async def start(self, pod: SimPod, container: SimContainer) -> ContainerRunOptions:
        """Return the options of a container: the stored answers, never a new Allocate.

        Exception: a container without devices of a resource that a plugin registered meanwhile is
        allocated late.

        Raises:
            ContainerStartError: PreStartContainer failed, or the plugin is gone for good.
        """
        ours = [name for name in container.resources if self._state.is_known_resource(name)]
        asked = [name for name in ours if container.resources[name] > 0]
        try:
            for resource in asked:
                await self._pre_start(pod, container, resource)
            if any(self._state.devices_of(pod.uid, container.name, name) is None for name in asked):
                await self._allocate(pod, container)
        except DeviceError as error:
            raise ContainerStartError(str(error)) from error
        return self.options(pod, container)

    def options(self, pod: SimPod, container: SimContainer) -> ContainerRunOptions:
        """Merge the stored answers of a container's resources, in random order."""
        entries = list(self._state.allocations_of(pod.uid, container.name).values())
        return merge_responses(
            [entry.response for entry in self._rng.sample(entries, len(entries))]
        )

    # ---- the topology handler --------------------------------------------------------------

    def _align(self, pod: SimPod, container: SimContainer) -> None:
        if self._policy == "none":
            return
        self.release_ended_pods()
        reuse = self._reuse_of(pod)
        hint_lists = [
            topology_hints(
                self._state,
                resource,
                count,
                numa_nodes=self._numa_nodes,
                held=self._state.devices_of(pod.uid, container.name, resource),
                reusable=reuse.get(resource, ()),
            )
            for resource, count in container.resources.items()
            if self._state.is_known_resource(resource)
        ]
        nodes, admitted = merge_hints(self._policy, hint_lists, self._numa_nodes)
        if not admitted:
            raise AdmissionError(
                "TopologyAffinityError", "Resources cannot be allocated with Topology locality"
            )
        self._affinity[pod.uid, container.name] = nodes

    # ---- the device manager ----------------------------------------------------------------

    async def _allocate(self, pod: SimPod, container: SimContainer) -> None:
        self._state.pending_pod = pod.uid
        reuse = self._reuse_of(pod)
        await self._allocate_resources(pod, container, reuse)
        hands_on = container in pod.init_containers and not container.restartable
        for resource, entry in self._state.allocations_of(pod.uid, container.name).items():
            if hands_on:
                reuse.setdefault(resource, set()).update(entry.ids)
            else:
                reuse.get(resource, set()).difference_update(entry.ids)

    def _reuse_of(self, pod: SimPod) -> Reuse:
        if self._reuse[0] != pod.uid:
            self._reuse = (pod.uid, {})
        return self._reuse[1]

    async def _allocate_resources(self, pod: SimPod, container: SimContainer, reuse: Reuse) -> None:
        changed = False
        freed = False
        # Go walks a map: the order is random, and so is which resource is allocated when a
        # later one fails.
        limits = list(container.resources.items())
        for resource, count in self._rng.sample(limits, len(limits)):
            if not self._state.is_known_resource(resource):
                continue
            if not freed:
                self.release_ended_pods()
                freed = True
            request = DeviceRequest(
                uid=pod.uid,
                container=container.name,
                resource=resource,
                count=count,
                reusable=reuse.get(resource, ()),
                nodes=self._affinity.get((pod.uid, container.name)),
                running=not self._state.ready and (pod.uid, container.name) in self._running,
            )
            changed |= await self._allocate_one(request)
        if changed:
            await self._save()

    async def _allocate_one(self, request: DeviceRequest) -> bool:
        state = self._state
        ids = await self._choose(request)
        if not ids:
            return False
        endpoint = state.endpoints.get(request.resource)
        if endpoint is None:
            state.rebuild_allocated()
            raise DeviceError(f"unknown Device Plugin {request.resource}")
        ordered = self._rng.sample(sorted(ids), len(ids))
        try:
            responses = await _live(request.resource, endpoint).allocate(ordered)
        except DeviceError:
            state.rebuild_allocated()
            raise
        if not responses:
            # No recount here: the ids leak, as in the kubelet (§1.5).
            raise DeviceError("no containers return in allocation response")
        key = (request.uid, request.container, request.resource)
        state.record_allocation(key, ordered, responses[0])
        return True

    async def _choose(self, request: DeviceRequest) -> frozenset[str]:
        choice = choose_devices(self._state, request, self._rng)
        try:
            question = next(choice)
            while True:
                question = choice.send(await self._prefer(request.resource, question))
        except StopIteration as done:
            chosen: frozenset[str] = done.value
            return chosen

    async def _prefer(self, resource: str, question: PreferenceQuestion) -> Collection[str]:
        endpoint = self._known(resource)
        options = endpoint.options
        if options is None or not options.get_preferred_allocation_available:
            return ()
        plugin = _live(resource, endpoint)
        try:
            return await plugin.prefer(
                self._shuffled(question.available),
                self._shuffled(question.must_include),
                question.size,
            )
        except DeviceError as error:
            raise DeviceError(
                f"device plugin GetPreferredAllocation rpc failed with err: {error}"
            ) from error

    async def _pre_start(self, pod: SimPod, container: SimContainer, resource: str) -> None:
        endpoint = self._known(resource)
        if endpoint.options is None or not endpoint.options.pre_start_required:
            return
        held = self._state.devices_of(pod.uid, container.name, resource)
        if held is None:
            raise DeviceError(
                f"no devices found allocated in local cache for pod {pod.uid}, "
                f"container {container.name}, resource {resource}"
            )
        try:
            plugin = _live(resource, endpoint)
            await plugin.pre_start(self._shuffled(held), self._pre_start_timeout)
        except DeviceError as error:
            raise DeviceError(
                f"device plugin PreStartContainer rpc failed with err: {error}"
            ) from error

    def _known(self, resource: str) -> EndpointInfo:
        endpoint = self._state.endpoints.get(resource)
        if endpoint is None:
            raise DeviceError(f"endpoint not found in cache for a registered resource: {resource}")
        return endpoint

    def _shuffled(self, ids: Collection[str]) -> list[str]:
        return self._rng.sample(sorted(ids), len(ids))

    # ---- the predicate ---------------------------------------------------------------------

    def _check_fit(self, pod: SimPod, allocatable: dict[str, int]) -> None:
        """Refuse a pod that the node's resources cannot hold; unknown resources pass."""
        if self._state.has_allocations(pod.uid):
            for resource, ids in self._state.allocated.items():
                if allocatable.get(resource, 0) < len(ids):
                    allocatable[resource] = len(ids)
        others = [other for other in self._active() if other.uid != pod.uid]
        for resource in sorted(pod.resources()):
            request = pod.request(resource)
            if request == 0 or resource not in allocatable:
                continue
            used = sum(other.request(resource) for other in others)
            if request > allocatable[resource] - used:
                raise AdmissionError(
                    f"OutOf{resource}",
                    f"Node didn't have enough resource: {resource}, requested: {request}, "
                    f"used: {used}, capacity: {allocatable[resource]}",
                )


def _live(resource: str, endpoint: EndpointInfo) -> "PluginClient":
    if endpoint.plugin is None or endpoint.stopped_at is not None:
        raise DeviceError(f"endpoint {resource} has been stopped")
    return endpoint.plugin
