"""The choice between nodes that would serve a pod by different resources."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from metagpu.translation.affinity import NodeSelection, required_terms
from metagpu.translation.choices import Choice, choose, demand_of, fits_together
from metagpu.translation.hami_annotations import (
    MODE,
    NODE_POLICY,
    NOUSE_TYPE,
    USE_TYPE,
    annotations_of,
    refused_model,
)
from metagpu.translation.node_offers import FRACTION, MPS, WHOLE, NodeGroup, NodeGroups, OfferedPart
from metagpu.translation.requests import GpuRequest
from metagpu.translation.values import POLICIES, NodeOffer, Object, TranslationSettings

_SHARES: Final = "hami-core"
"""HAMi's mode of shares that software divides a GPU into."""


class NodeParts(NamedTuple):
    """A group of nodes, and why the pod may not go there, empty where it may."""

    group: NodeGroup
    refused: str

    @property
    def parts(self) -> Sequence[OfferedPart]:
        """The parts that each of the nodes offers."""
        return self.group.parts

    @property
    def node(self) -> NodeOffer:
        """One of the nodes, which stands for all."""
        return next(iter(self.group.nodes.values()))


class Plan(msgspec.Struct, frozen=True):
    """One way to serve the requests of a pod.

    Attributes:
        choices: one for each request.
        waste: MiB beyond the requests.
        demands: groups of nodes, and the shares that the pod needs of one node at once.
    """

    technique: str
    choices: tuple[Choice, ...]
    waste: int
    demands: tuple[tuple[NodeGroup, Mapping[str, int]], ...]

    @property
    def fits_now(self) -> bool:
        """True if some node counts enough shares for the pod now."""
        return any(group.has_room(demand) for group, demand in self.demands)

    @property
    def copies(self) -> int:
        """The number of such pods that all nodes count shares for now."""
        return sum(group.copies(demand) for group, demand in self.demands)

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """The resource name and the number of shares of each request."""
        return tuple((choice.resource, choice.count) for choice in self.choices)


def survey(pod: Object, nodes: NodeGroups, needed: Iterable[str] = ()) -> Sequence[NodeParts]:
    """Return what the nodes offer, and whether the pod may go there.

    It needs some resources of its node in any case.
    """
    spec, annotations = pod.get("spec") or {}, annotations_of(pod)
    selector, terms = spec.get("nodeSelector") or {}, required_terms(spec)
    own, needed = str(spec.get("nodeName") or ""), sorted(needed)
    models = [annotations.get(name) for name in (USE_TYPE, NOUSE_TYPE)]
    key = msgspec.json.encode((selector, terms, own, needed, models))

    def look_at_all() -> Sequence[NodeParts]:
        selection = NodeSelection(selector, terms)
        return [part for group in nodes.groups for part in divided(group, selection)]

    def divided(group: NodeGroup, selection: NodeSelection) -> Iterator[NodeParts]:
        groups: Mapping[str, NodeGroup] = {"": group}
        if selector or terms or own:
            groups = _by_refusal(group, selection, own)
        for refused, each in groups.items():
            one = NodeParts(each, refused)
            why = refused or refused_model(annotations, one.node) or _missing(each, needed)
            yield one._replace(refused=why)

    return nodes.remember(key, look_at_all)


def _by_refusal(group: NodeGroup, selection: NodeSelection, own: str) -> Mapping[str, NodeGroup]:
    """Divide nodes by why a pod may not go there."""
    found: dict[str, list[NodeOffer]] = {}
    for node in group.nodes.values():
        refused = selection.missing(node.name, node.labels)
        if own and own != node.name:
            refused = f"nodeName: {own}"
        found.setdefault(refused, []).append(node)
    if len(found) == 1:
        return dict.fromkeys(found, group)
    return {refused: NodeGroup(group.parts, nodes) for refused, nodes in found.items()}


def _missing(group: NodeGroup, needed: Iterable[str]) -> str:
    return next((f"it has no {name}" for name in needed if not group.offers(name)), "")


def techniques_of(
    pod: Object, requests: Sequence[GpuRequest], settings: TranslationSettings
) -> tuple[str, ...]:
    """Return the techniques that a pod may be served by, by preference.

    Whole GPUs are for requests of whole GPUs, unless the pod or the settings say otherwise.
    """
    modes = [part.strip() for part in (annotations_of(pod).get(MODE) or "").split(",")]
    names = [mode for mode in modes if mode]
    names = names or [request.technique for request in requests if request.technique]
    if not names:
        whole = all(request.whole for request in requests) and WHOLE not in settings.order
        names = [WHOLE, *settings.order] if whole else [*settings.order]
    limited = any(request.cores and not request.whole for request in requests)
    shares = (MPS, FRACTION) if limited else (FRACTION, MPS)  # MPS alone limits threads
    found = [one for name in names for one in (shares if name == _SHARES else (name,))]
    return tuple(dict.fromkeys(found))


def policy_of(pod: Object, settings: TranslationSettings) -> str:
    """Return the policy of a pod, or that of the settings."""
    own: str = annotations_of(pod).get(NODE_POLICY, "")
    return own if own in POLICIES else settings.policy


def plans_of(
    requests: Sequence[GpuRequest], surveyed: Sequence[NodeParts], technique: str
) -> Sequence[Plan]:
    """Return the ways to serve a pod by one technique; nodes of one way are together."""
    found: dict[tuple[tuple[str, int], ...], list[tuple[NodeParts, tuple[Choice, ...]]]] = {}
    chosen: dict[int, tuple[Choice, ...]] = {}
    for each in surveyed:
        if each.refused:
            continue
        same_parts = id(each.parts)  # groups with equal parts share them
        if same_parts not in chosen:
            chosen[same_parts] = _choices(requests, each.parts, technique)
        if choices := chosen[same_parts]:
            key = tuple((choice.resource, choice.count) for choice in choices)
            found.setdefault(key, []).append((each, choices))
    return [
        Plan(
            technique,
            same[0][1],
            min(sum(choice.waste for choice in choices) for _, choices in same),
            tuple((parts.group, demand_of(requests, choices)) for parts, choices in same),
        )
        for same in found.values()
    ]


def _choices(
    requests: Sequence[GpuRequest], parts: Sequence[OfferedPart], technique: str
) -> tuple[Choice, ...]:
    """Return the shares for each request, nothing unless a node serves all at once."""
    found: list[Choice] = []
    for request in requests:
        choice = choose(request, technique, parts)
        if choice is None:
            return ()
        found.append(choice)
    return tuple(found) if fits_together(requests, found) else ()


def best_plan(
    requests: Sequence[GpuRequest],
    surveyed: Sequence[NodeParts],
    techniques: Iterable[str],
    policy: str,
) -> Plan | None:
    """Return the best way to serve a pod, `None` where no node could.

    The techniques go before the policy, and a way that a Node counts enough shares for goes before
    one that waits for the end of pods.
    """
    waiting: Sequence[Plan] = ()
    for technique in techniques:
        plans = plans_of(requests, surveyed, technique)
        if now := [plan for plan in plans if plan.fits_now]:
            return _first(now, policy)
        waiting = waiting or plans
    return _first(waiting, policy) if waiting else None


def _first(plans: Sequence[Plan], policy: str) -> Plan:
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: _rank(plan, policy))


def _rank(plan: Plan, policy: str) -> tuple[int, int, tuple[tuple[str, int], ...]]:
    """Return the order: the least waste or the most room, then the other."""
    if policy == "spread":
        return -plan.copies, plan.waste, plan.counts
    return plan.waste, -plan.copies, plan.counts
