"""Tasks that feed the Event recorders; pure functions choose each Event."""

from collections.abc import Callable
from dataclasses import dataclass, field

from metagpu.core.model.shares import ResourceName
from metagpu.core.state.events import AllocationRefused, ClaimRefusalEnded, ResourceClaimRefused
from metagpu.core.state.facts import PodsListed
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.event_reasons import EventReason
from metagpu.plugins.cluster.event_recorder import EventData, EventRecorder, ObjectReference
from metagpu.plugins.cluster.held_gpus import Troubles, gpu_events_between, troubles_of
from metagpu.plugins.cluster.node_events import NODE_EVENT_KINDS, node_event_of, standing_problems
from metagpu.plugins.cluster.node_object import KubeObject
from metagpu.plugins.cluster.pod_events import POD_EVENT_KINDS, pod_event_of
from metagpu.plugins.cluster.refusals import (
    RefusalMatcher,
    claim_refusal_event,
    pod_refusal_events,
)


@dataclass(eq=False)
class NodeEvents:
    """The Events of this node's Node.

    Attributes:
        node: the Node's name.
        enabled: whether the feature is in use; without it nothing is recorded.
    """

    node: str
    recorder: EventRecorder
    enabled: bool
    _uid: str = ""

    @property
    def reference(self) -> ObjectReference:
        """The Node; its uid is known once the API server has answered."""
        return ObjectReference("Node", self.node, self._uid)

    def take_in(self, node: KubeObject | None) -> None:
        """Note the uid of the Node that is there now."""
        self._uid = str(node["metadata"].get("uid", "")) if node else ""

    def record(
        self, reason: EventReason, note: str, action: str, *, warning: bool = False, key: str = ""
    ) -> None:
        """Record an Event of the Node."""
        if self.enabled:
            self.recorder.record(EventData(self.reference, reason, note, action, warning, key))


async def record_node_events(
    registry: Registry, node: NodeEvents, name_competitor: Callable[[ResourceName], str]
) -> None:
    """Record Events of the Node until cancelled, first those of standing problems."""
    with registry.events.subscribe(*NODE_EVENT_KINDS) as events:
        for data in standing_problems(registry.snapshot, node.reference):
            node.recorder.record(data)
        async for event in events:
            found = node_event_of(event, registry.snapshot, node.reference, name_competitor)
            if found is not None:
                node.recorder.record(found)


async def record_pod_events(registry: Registry, recorder: EventRecorder) -> None:
    """Record Events about the memory and the MIG devices of pods until cancelled."""
    with registry.events.subscribe(*POD_EVENT_KINDS) as events:
        async for event in events:
            if (data := pod_event_of(event, registry.snapshot)) is not None:
                recorder.record(data)


async def record_refusals(
    registry: Registry, recorder: EventRecorder, matcher: RefusalMatcher, node: str
) -> None:
    """Record Events of refused pods, their controllers, and pods of refused claims."""
    kinds = AllocationRefused, ResourceClaimRefused, ClaimRefusalEnded, PodsListed
    with registry.events.subscribe(*kinds) as events:
        async for event in events:
            match event:
                case AllocationRefused():
                    matcher.remember(event)
                case ResourceClaimRefused():
                    for pod in matcher.match_claim(event, registry.snapshot.pods.by_uid.values()):
                        recorder.record(claim_refusal_event(pod, event))
                case ClaimRefusalEnded(claim):
                    matcher.forget_claim(claim)
                case PodsListed(pods):
                    for pod, refusal in matcher.match(pods):
                        for data in pod_refusal_events(pod, refusal, node):
                            recorder.record(data)


@dataclass(eq=False)
class GpuEventFeed:
    """Records Events of pods whose GPU or MIG device leaves service or returns.

    It outlives a connection: what was recorded before is not recorded again.
    """

    registry: Registry
    _before: Troubles = field(default_factory=dict)

    async def run(self, recorder: EventRecorder) -> None:
        """Record Events until cancelled."""
        async for troubles in self.registry.watch(troubles_of):
            for data in gpu_events_between(self._before, troubles, self.registry.snapshot):
                recorder.record(data)
            self._before = troubles
