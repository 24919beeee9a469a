"""The judgement of nodes for a pod, and of all pods that wait: pure functions."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from metagpu.core.errors import MetagpuError
from metagpu.core.reports.reading import FieldMissing
from metagpu.core.reports.schema.status import StatusReport
from metagpu.kubectl.claims import ClaimRef, ReadClaims
from metagpu.kubectl.obstacles import (
    ClusterNode,
    Found,
    Obstacle,
    device_obstacles,
    free_devices,
    offers_of,
    resource_obstacles,
)
from metagpu.kubectl.pod_reasons import Conclusion, PodReason
from metagpu.kubectl.pods import PodDemand, demand_of, missing_label, scheduler_says
from metagpu.translation.affinity import tolerates

Object = Mapping[str, Any]

NOT_OUR_OBSTACLE: Final = "metagpu does not stop this pod: read the scheduler's message"
"""The advice where a pod fits and yet waits."""
CLAIMS_NOT_COMPARED: Final = (
    "selectors and constraints of its claims are not compared here: read the scheduler's message"
)
"""The advice where that pod asks by ResourceClaims."""
_REQUESTS: Final = "requests."
_DEVICES: Final = ".deviceclass.resource.k8s.io/devices"
"""The names of quotas: before a resource, and behind a DeviceClass."""
_UNSCHEDULABLE: Final = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


class Judgement(msgspec.Struct, frozen=True):
    """The judgement of one node: what keeps the pod from it, and what to change."""

    node: str
    obstacle: Obstacle
    reason: str
    fix: str = ""


def judge(demand: PodDemand, node: ClusterNode) -> Judgement:
    """Return whether a pod fits on a node, or all obstacles, by the hardest of them."""
    try:
        return _judge(demand, node)
    except FieldMissing as error:
        return Judgement(node.name, Obstacle.NO_ANSWER, str(error))


def _judge(demand: PodDemand, node: ClusterNode) -> Judgement:
    if found := list(_obstacles(demand, node)):
        hardest = max(obstacle for obstacle, _, _ in found)
        reasons = "; ".join(reason for _, reason, _ in found)
        fixes = "; ".join(fix for _, _, fix in found if fix)
        return Judgement(node.name, hardest, reasons, fixes)
    assert node.report is not None  # noqa: S101 - `_obstacles` has found none
    parts = [_free(node.report, resource) for resource in demand.totals]
    parts += free_devices(demand, node.report)
    return Judgement(node.name, Obstacle.NONE, "; ".join(parts) or "it requests no GPU")


def judge_all(demand: PodDemand, nodes: Iterable[ClusterNode]) -> Sequence[Judgement]:
    """Judge nodes, the nearest to a fit first; of a bound pod its own node alone."""
    return sorted(
        (judge(demand, node) for node in nodes if demand.node in ("", node.name)),
        key=lambda judgement: (judgement.obstacle, judgement.node),
    )


def conclude(demand: PodDemand, judged: Sequence[Judgement]) -> Conclusion:
    """Return the kind of the answer, the sentence that helps, and what to change."""
    if not demand.asks and demand.claims:
        claims = ", ".join(claim.used_as for claim in demand.claims)
        text = f"its ResourceClaims ({claims}) request no device of metagpu"
        return PodReason.CLAIMS_OF_OTHERS, text, ""
    if not demand.asks:
        fix = "add a share to the limits of a container, for example cnvrg.io/metagpu: 30"
        return PodReason.NO_REQUEST, "the pod requests no GPU resource", fix
    if not judged:
        if demand.node:
            text = f"there is no node {demand.node}"
            return PodReason.UNKNOWN_NODE, text, "correct the pod's nodeName"
        return PodReason.NO_NODES, "the cluster has no node", "add one"
    best = judged[0]
    if best.obstacle is Obstacle.NONE:
        names = [judgement.node for judgement in judged if judgement.obstacle is Obstacle.NONE]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return PodReason.FITS, f"fits on node {names[0]}{more}: {best.reason}", ""
    sentence = f"it fits on no node; of {len(judged)} the nearest is {best.node}: {best.reason}"
    if len(judged) == 1:
        sentence = f"it does not fit on {best.node}: {best.reason}"
    return PodReason.FITS_NOWHERE, sentence, best.fix


def what_else(demand: PodDemand) -> str:
    """Return what to read where a pod fits and yet waits."""
    return CLAIMS_NOT_COMPARED if demand.claims else NOT_OUR_OBSTACLE


def exceeded_quota(
    demand: PodDemand, quotas: Iterable[Object], *, is_new: bool
) -> Conclusion | None:
    """Return the quota that refuses a pod or its claims, `None` if none does.

    Args:
        demand: of the pod.
        quotas: the ResourceQuotas of its namespace.
        is_new: the pod does not exist. The shares of one that does are counted already, and its
            claims once they are made.
    """
    counts = _counts(demand, is_new=is_new)
    for quota in quotas:
        status = quota.get("status") or {}
        for key, count in counts.items():
            hard = (status.get("hard") or {}).get(key)
            used = (status.get("used") or {}).get(key, "0")
            if hard is None or not (str(hard).isdecimal() and str(used).isdecimal()):
                continue
            if int(used) + count > int(hard):
                name = quota["metadata"]["name"]
                return _refusal(name, key, count, hard=int(hard), used=int(used))
    return None


def _refusal(name: str, key: str, count: int, *, hard: int, used: int) -> Conclusion:
    """Return the sentence of a quota, of shares or of devices."""
    what, who, end = f"of {key.removeprefix(_REQUESTS)}", "the pod requests", "end pods"
    if key.endswith(_DEVICES):
        what, end = f"devices of {key.removesuffix(_DEVICES)}", "delete ResourceClaims"
        who = "claims of the pod request"
    reason = (
        f"the quota {name} of the namespace allows {hard} {what}; {used} are used, "
        f"and {who} {count}"
    )
    fix = f"request at most {max(0, hard - used)}, {end} of the namespace, or raise it"
    return PodReason.QUOTA_EXCEEDED, reason, fix


def _counts(demand: PodDemand, *, is_new: bool) -> Mapping[str, int]:
    """Return the amounts of a pod and of its new claims, by their names in a quota."""
    counts = Counter[str]()
    if is_new:
        counts.update({f"{_REQUESTS}{name}": count for name, count in demand.totals.items()})
    for request in demand.devices:
        if request.claim in demand.new_claims:
            # A request counts for each class of its alternatives, with the most that it may get.
            most: dict[str, int] = {}
            for option in request.options:
                most[option.device_class] = max(option.charged, most.get(option.device_class, 0))
            counts.update({f"{name}{_DEVICES}": count for name, count in most.items()})
    return counts


def _obstacles(demand: PodDemand, node: ClusterNode) -> Iterator[Found]:
    """Yield the obstacles: what the scheduler compares, then what the daemon reports."""
    if node.unschedulable and not tolerates(demand.tolerations, _UNSCHEDULABLE):
        yield Obstacle.NODE_CORDONED, "the node is cordoned", f"kubectl uncordon {node.name}"
    for taint in node.taints:
        keeps_out = taint.get("effect") in ("NoSchedule", "NoExecute")
        is_cordon = taint["key"] == _UNSCHEDULABLE["key"]
        if keeps_out and not is_cordon and not tolerates(demand.tolerations, taint):
            value = f"={taint['value']}" if taint.get("value") else ""
            shown = f"{taint['key']}{value}:{taint['effect']}"
            fix = f"add a toleration of {taint['key']} to the pod, if it may run there"
            yield Obstacle.TAINT, f"the taint {shown} is not tolerated", fix
    if label := missing_label(demand, node.name, node.labels):
        fix = "change the pod's nodeSelector or affinity, or label the node"
        yield Obstacle.LABELS, f"the pod wants a node with {label}", fix
    if node.report is None and node.problem:
        yield Obstacle.NO_ANSWER, f"its daemon gives no status: {node.problem}", ""
    elif node.report is None:
        yield Obstacle.NO_DAEMON, "metagpu does not run there", ""
    else:
        for resource in demand.totals:
            yield from resource_obstacles(demand, resource, node, node.report)
        yield from device_obstacles(demand, node.report)


def _free(report: StatusReport, resource: str) -> str:
    offer = report.offers[resource]
    held = f", {offer.held_back} held back" if offer.held_back else ""
    largest = offer.largest_request
    return f"{offer.free} of {resource} are free, the largest part is {largest}{held}"


def claims_of(pods: Iterable[Object]) -> frozenset[ClaimRef]:
    """Return the ResourceClaims of the pods without a node."""
    demands = filter(None, map(_demand_of, pods))
    return frozenset(claim for demand in demands for claim in demand.claims)


def waiting_pods(
    pods: Iterable[Object], nodes: Sequence[ClusterNode], claims: ReadClaims
) -> list[Object]:
    """Return the pods without a node that ask for what is ours, and why."""
    is_ours = _OurResources(nodes)
    classes = claims.our_classes(node.report for node in nodes if node.report)
    answers: dict[bytes, Object] = {}
    found = []
    for pod in pods:
        demand = _demand_of(pod)
        if demand is None:
            continue
        demand = msgspec.structs.replace(demand, devices=claims.devices(demand.claims, classes))
        if not demand.devices and not any(is_ours(total) for total in demand.totals):
            continue
        # The pods of a controller are alike, and of 500 nodes each is judged.
        shape = msgspec.json.encode(
            msgspec.structs.replace(demand, namespace="", name="", claims=(), new_claims=())
        )
        if shape not in answers:
            answers[shape] = _answer(demand, nodes)
        row = {"namespace": demand.namespace, "pod": demand.name, **answers[shape]}
        found.append({**row, "scheduler": scheduler_says(pod)})
    return sorted(found, key=lambda holding: (holding["namespace"], holding["pod"]))


class _OurResources:
    """The resources of daemons, and those of their domains that no Node counts."""

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self._offered = {name for node in nodes for name in offers_of(node.report)}
        self._domains = {name.partition("/")[0] for name in self._offered}
        self._counted = {name for node in nodes for name in node.allocatable}

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
