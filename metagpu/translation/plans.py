"""The choice between nodes that would serve a pod by different resources."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from metagpu.translation.affinity import missing_label, required_terms
from metagpu.translation.choices import Choice, choose, copies, fits_together
from metagpu.translation.models import refused_model
from metagpu.translation.parts import OfferedPart, parts_of
from metagpu.translation.requests import GpuRequest
from metagpu.translation.values import POLICIES, NodeOffer, Object, TranslationSettings

MODE: Final = "nvidia.com/vgpu-mode"
NODE_POLICY: Final = "hami.io/node-scheduler-policy"


class NodeParts(msgspec.Struct, frozen=True):
    """A node, what it offers, and why the pod may not go there, empty where it may."""

    node: NodeOffer
    parts: tuple[OfferedPart, ...]
    refused: str


class Plan(msgspec.Struct, frozen=True):
    """One way to serve the requests of a pod, and the nodes that could.

    Attributes:
        choices: one for each request.
        waste: MiB beyond the requests.
        copies: how many such pods these nodes count shares for now.
    """

    technique: str
    choices: tuple[Choice, ...]
    nodes: tuple[str, ...]
    waste: int
    copies: int

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """The resource name and the number of shares of each request."""
        return tuple((it.resource, it.count) for it in self.choices)


def annotations_of(pod: Object) -> Object:
    """Return the annotations of a pod."""
    return (pod.get("metadata") or {}).get("annotations") or {}


def survey(pod: Object, nodes: Iterable[NodeOffer]) -> Sequence[NodeParts]:
    """Return what each node offers, and whether the pod may go there."""
    spec = pod.get("spec") or {}
    selector, terms = spec.get("nodeSelector") or {}, required_terms(spec)
    own, annotations = spec.get("nodeName") or "", annotations_of(pod)
    found = []
    for node in nodes:
        refused = missing_label(selector, terms, node.name, node.labels)
        if own and own != node.name:
            refused = f"nodeName: {own}"
        found.append(NodeParts(node, parts_of(node), refused or refused_model(annotations, node)))
    return found


def techniques_of(pod: Object, settings: TranslationSettings) -> tuple[str, ...]:
    """Return the techniques that a pod may be served by, by preference."""
    modes = [it.strip() for it in annotations_of(pod).get(MODE, "").split(",")]
    return tuple(it for it in modes if it) or settings.order


def policy_of(pod: Object, settings: TranslationSettings) -> str:
    """Return the policy of a pod, or that of the settings."""
    own: str = annotations_of(pod).get(NODE_POLICY, "")
    return own if own in POLICIES else settings.policy


def plans_of(
    requests: Sequence[GpuRequest], surveyed: Sequence[NodeParts], technique: str
) -> Sequence[Plan]:
    """Return the ways to serve a pod by one technique; nodes of one way are together."""
    found: dict[tuple[tuple[str, int], ...], list[tuple[NodeParts, tuple[Choice, ...]]]] = {}
    for each in surveyed:
        if each.refused:
            continue
        choices = tuple(
            choice
            for request in requests
            if (choice := choose(request, technique, each.parts)) is not None
        )
        if len(choices) == len(requests) and fits_together(requests, choices):
            key = tuple((it.resource, it.count) for it in choices)
            found.setdefault(key, []).append((each, choices))
    return [
        Plan(
            technique,
            same[0][1],
            tuple(it.node.name for it, _ in same),
            min(sum(it.waste for it in choices) for _, choices in same),
            sum(copies(requests, choices) for _, choices in same),
        )
        for same in found.values()
    ]


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
        if now := [it for it in plans if it.copies > 0]:
            return min(now, key=lambda it: _rank(it, policy))
        waiting = waiting or plans
    return min(waiting, key=lambda it: _rank(it, policy), default=None)


def _rank(plan: Plan, policy: str) -> tuple[int, int, tuple[tuple[str, int], ...]]:
    """Return the order: the least waste or the most room, then the other."""
    if policy == "spread":
        return -plan.copies, plan.waste, plan.counts
    return plan.waste, -plan.copies, plan.counts
