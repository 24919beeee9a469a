"""Pods that wait for GPUs, and why, as rows of the page: pure functions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from metagpu.core.errors import MetagpuError
from metagpu.kubectl.claims import ClaimRef, ReadClaims
from metagpu.kubectl.judgement import conclude, judge_all, what_else
from metagpu.kubectl.obstacles import ClusterNode, Obstacle
from metagpu.kubectl.pod_reasons import PodReason
from metagpu.kubectl.pods import PodDemand, demand_of, scheduler_says

Object = Mapping[str, Any]


def claims_of(pods: Iterable[Object]) -> frozenset[ClaimRef]:
    """Return the ResourceClaims of the pods without a node."""
    demands = filter(None, map(_demand_of, pods))
    return frozenset(it for demand in demands for it in demand.claims)


def waiting_pods(
    pods: Iterable[Object], nodes: Sequence[ClusterNode], claims: ReadClaims
) -> list[Object]:
    """Return the pods without a node that ask for what is ours, and why."""
    is_ours = _OurResources(nodes)
    classes = claims.our_classes(it.report for it in nodes if it.report)
    answers: dict[bytes, Object] = {}
    found = []
    for pod in pods:
        demand = _demand_of(pod)
        if demand is None:
            continue
        demand = msgspec.structs.replace(demand, devices=claims.devices(demand.claims, classes))
        if not demand.devices and not any(is_ours(it) for it in demand.totals):
            continue
        # The pods of a controller are alike, and of 500 nodes each is judged.
        shape = msgspec.json.encode(
            msgspec.structs.replace(demand, namespace="", name="", claims=(), new_claims=())
        )
        if shape not in answers:
            answers[shape] = _answer(demand, nodes)
        row = {"namespace": demand.namespace, "pod": demand.name, **answers[shape]}
        found.append({**row, "scheduler": scheduler_says(pod)})
    return sorted(found, key=lambda it: (it["namespace"], it["pod"]))


class _OurResources:
    """The resources of daemons, and those of their domains that no Node counts."""

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self._offered = {name for it in nodes if it.report for name in it.report["offers"]}
        self._domains = {name.partition("/")[0] for name in self._offered}
        self._counted = {name for it in nodes for name in it.allocatable}

    def __call__(self, resource: str) -> bool:
        of_domain = resource.partition("/")[0] in self._domains
        return resource in self._offered or (of_domain and resource not in self._counted)


def _demand_of(pod: Object) -> PodDemand | None:
    """Return the demand of a pod that no node has yet, `None` for all others."""
    try:
        demand = demand_of(pod)
    except MetagpuError:  # an amount in a form that metagpu does not read, such as 1k
        return None
    return None if demand.node else demand


def _answer(demand: PodDemand, nodes: Sequence[ClusterNode]) -> Object:
    """Return the obstacle of the nearest node, the sentence of `why`, and the advice."""
    judged = judge_all(demand, nodes)
    _, text, advice = conclude(demand, judged)
    obstacle = judged[0].obstacle if judged else Obstacle.NO_DAEMON
    if obstacle is Obstacle.NONE:
        return {"reason": str(PodReason.FITS), "text": text, "advice": what_else(demand)}
    return {"reason": obstacle.name.lower(), "text": text, "advice": advice}
