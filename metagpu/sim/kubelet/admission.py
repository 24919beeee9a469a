"""Admission of pods and the start of their containers (kubelet.md §1.5).

The order of questions is the kubelet's: topology policy, device manager container by container,
then the predicate on node resources. Plugins are asked through the endpoints of the ledger.
"""

import random
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import TYPE_CHECKING

from metagpu.sim.kubelet.choice import Question, Request, choose
from metagpu.sim.kubelet.ledger import Endpoint, Ledger
from metagpu.sim.kubelet.pods import (
    AdmissionError,
    Container,
    ContainerStartError,
    DeviceError,
    Pod,
    RunOptions,
    merge,
)
from metagpu.sim.kubelet.topology import TopologyPolicy, hints, merge_hints

if TYPE_CHECKING:
    from metagpu.sim.kubelet.wire import Plugin

Reuse = dict[str, set[str]]


class Admission:
    """The admit handlers of one kubelet lifetime.

    `save` writes the checkpoint, `active` gives the pods that count, `running` the (pod uid,
    container) pairs that the runtime reported when this kubelet started.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        save: Callable[[], Awaitable[None]],
        active: Callable[[], Iterable[Pod]],
        running: Collection[tuple[str, str]],
        rng: random.Random,
        numa_nodes: Collection[int],
        policy: TopologyPolicy,
        pre_start_timeout: float,
    ) -> None:
        self._ledger = ledger
        self._save = save
        self._active = active
        self._running = running
        self._rng = rng
        self._numa_nodes = numa_nodes
        self._policy: TopologyPolicy = policy
        self._pre_start_timeout = pre_start_timeout
        self._affinity: dict[tuple[str, str], frozenset[int] | None] = {}
        self._reuse: tuple[str, Reuse] = ("", {})

    def free(self) -> None:
        """Drop what ended pods hold: nobody tells the plugin."""
        self._ledger.free({pod.uid for pod in self._active()})

    async def admit(self, pod: Pod, node_allocatable: Callable[[], dict[str, int]]) -> None:
        """Give every container of the pod its devices.

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

    async def start(self, pod: Pod, container: Container) -> RunOptions:
        """Give what a container is created with: the stored answers, never a new Allocate.

        Except for a container without devices of a resource that by now is a plugin's: it is
        allocated late.

        Raises:
            ContainerStartError: PreStartContainer failed, or the plugin is gone for good.
        """
        ours = [name for name in container.resources if self._ledger.is_ours(name)]
        asked = [name for name in ours if container.resources[name] > 0]
        try:
            for resource in asked:
                await self._pre_start(pod, container, resource)
            if any(self._ledger.held(pod.uid, container.name, name) is None for name in asked):
                await self._allocate(pod, container)
        except DeviceError as error:
            raise ContainerStartError(str(error)) from error
        return self.options(pod, container)

    def options(self, pod: Pod, container: Container) -> RunOptions:
        """Merge what is stored for a container; of the resources, which is first is random."""
        entries = list(self._ledger.of_container(pod.uid, container.name).values())
        return merge([entry.response for entry in self._rng.sample(entries, len(entries))])

    # ---- the topology handler --------------------------------------------------------------

    def _align(self, pod: Pod, container: Container) -> None:
        if self._policy == "none":
            return
        self.free()
        reuse = self._reuse_of(pod)
        wishes = [
            hints(
                self._ledger,
                resource,
                count,
                numa_nodes=self._numa_nodes,
                held=self._ledger.held(pod.uid, container.name, resource),
                reusable=reuse.get(resource, ()),
            )
            for resource, count in container.resources.items()
            if self._ledger.is_ours(resource)
        ]
        nodes, admitted = merge_hints(self._policy, wishes, self._numa_nodes)
        if not admitted:
            raise AdmissionError(
                "TopologyAffinityError", "Resources cannot be allocated with Topology locality"
            )
        self._affinity[pod.uid, container.name] = nodes

    # ---- the device manager ----------------------------------------------------------------

    async def _allocate(self, pod: Pod, container: Container) -> None:
        self._ledger.pending = pod.uid
        reuse = self._reuse_of(pod)
        await self._allocate_resources(pod, container, reuse)
        hands_on = container in pod.init_containers and not container.restartable
        for resource, entry in self._ledger.of_container(pod.uid, container.name).items():
            if hands_on:
                reuse.setdefault(resource, set()).update(entry.ids)
            else:
                reuse.get(resource, set()).difference_update(entry.ids)

    def _reuse_of(self, pod: Pod) -> Reuse:
        if self._reuse[0] != pod.uid:
            self._reuse = (pod.uid, {})
        return self._reuse[1]

    async def _allocate_resources(self, pod: Pod, container: Container, reuse: Reuse) -> None:
        changed = False
        freed = False
        # Go walks a map: the order is random, and so is which resource is allocated when a
        # later one fails.
        limits = list(container.resources.items())
        for resource, count in self._rng.sample(limits, len(limits)):
            if not self._ledger.is_ours(resource):
                continue
            if not freed:
                self.free()
                freed = True
            request = Request(
                uid=pod.uid,
                container=container.name,
                resource=resource,
                count=count,
                reusable=reuse.get(resource, ()),
                nodes=self._affinity.get((pod.uid, container.name)),
                running=not self._ledger.ready and (pod.uid, container.name) in self._running,
            )
            changed |= await self._allocate_one(request)
        if changed:
            await self._save()

    async def _allocate_one(self, request: Request) -> bool:
        ledger = self._ledger
        ids = await self._choose(request)
        if not ids:
            return False
        endpoint = ledger.endpoints.get(request.resource)
        if endpoint is None:
            ledger.recount()
            raise DeviceError(f"unknown Device Plugin {request.resource}")
        ordered = self._rng.sample(sorted(ids), len(ids))
        try:
            responses = await _live(request.resource, endpoint).allocate(ordered)
        except DeviceError:
            ledger.recount()
            raise
        if not responses:
            # No recount here: the ids leak, as in the kubelet (§1.5).
            raise DeviceError("no containers return in allocation response")
        key = (request.uid, request.container, request.resource)
        ledger.record(key, ordered, responses[0])
        return True

    async def _choose(self, request: Request) -> frozenset[str]:
        choice = choose(self._ledger, request, self._rng)
        try:
            question = next(choice)
            while True:
                question = choice.send(await self._prefer(request.resource, question))
        except StopIteration as done:
            chosen: frozenset[str] = done.value
            return chosen

    async def _prefer(self, resource: str, question: Question) -> Collection[str]:
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

    async def _pre_start(self, pod: Pod, container: Container, resource: str) -> None:
        endpoint = self._known(resource)
        if endpoint.options is None or not endpoint.options.pre_start_required:
            return
        held = self._ledger.held(pod.uid, container.name, resource)
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

    def _known(self, resource: str) -> Endpoint:
        endpoint = self._ledger.endpoints.get(resource)
        if endpoint is None:
            raise DeviceError(f"endpoint not found in cache for a registered resource: {resource}")
        return endpoint

    def _shuffled(self, ids: Collection[str]) -> list[str]:
        return self._rng.sample(sorted(ids), len(ids))

    # ---- the predicate ---------------------------------------------------------------------

    def _check_fit(self, pod: Pod, allocatable: dict[str, int]) -> None:
        """Refuse a pod that the node's numbers cannot hold; unknown resources pass."""
        if self._ledger.holds(pod.uid):
            for resource, ids in self._ledger.allocated.items():
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


def _live(resource: str, endpoint: Endpoint) -> "Plugin":
    if endpoint.plugin is None or endpoint.stopped_at is not None:
        raise DeviceError(f"endpoint {resource} has been stopped")
    return endpoint.plugin
