"""`why` and `fit`: facts about a pod and the nodes, and their judgement."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from anyio import to_thread

from metagpu.cli.live import print_text
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.errors import ClusterError, MetagpuError
from metagpu.core.model.quantities import whole_number
from metagpu.core.reports.reading import FieldMissing
from metagpu.core.reports.schema.daemon import LostDevicesReport
from metagpu.core.reports.schema.status import StatusReport
from metagpu.display.options import encode
from metagpu.display.table import Cell, TextTable, render, stdout_terminal
from metagpu.kubectl.claims import read_claims
from metagpu.kubectl.errors import UnknownPod
from metagpu.kubectl.judgement import (
    Judgement,
    conclude,
    exceeded_quota,
    judge_all,
    what_else,
)
from metagpu.kubectl.manifests import read_objects
from metagpu.kubectl.obstacles import ClusterNode, Obstacle
from metagpu.kubectl.pod_reasons import PodReason
from metagpu.kubectl.pods import PodDemand, controllers_of, demand_of, pods_in, scheduler_says
from metagpu.kubectl.viewer import STATUS, ClusterViewer, NodeAnswer, in_parallel

Object = Mapping[str, Any]

_FORBIDDEN: Final = 403
_REJECTED: Final = "UnexpectedAdmissionError"


class PodAnswer(msgspec.Struct):
    """The answer about a pod.

    Attributes:
        reason: the kind of the answer.
        sentence: the sentence that helps most.
        fix: what to change; empty where nothing has to be.
        notes: what others say of the pod, as the scheduler does.
        nodes: the judgement of each node, the nearest to a fit first.
    """

    pod: str
    reason: PodReason
    sentence: str
    fix: str = ""
    notes: list[str] = msgspec.field(default_factory=list)
    nodes: Sequence[Judgement] = ()


async def why(args: argparse.Namespace, viewer: ClusterViewer, namespace: str) -> int:
    """Print why a pod gets no GPU; return 0 where nothing is in its way.

    Raises:
        MetagpuError: there is no such pod, nor a controller whose pods are refused.
    """
    kind, slash, name = args.pod.rpartition("/")
    path = f"/api/v1/namespaces/{namespace}/pods"
    if slash and kind not in ("po", "pod", "pods"):
        pod, asked = _pod_of(kind, name, await viewer.items(path)), f"of {kind} {name}"
    else:
        pod, asked = await viewer.get(f"{path}/{name}"), name
    if pod is not None:
        answer: PodAnswer | None = await _answer_on(viewer, pod)
    else:
        answer = await _refusal_of(viewer, namespace, name)
    if answer is None:
        raise UnknownPod(
            f"there is no pod {asked} in the namespace {namespace}, and no controller of that "
            "name whose pods are refused; give another namespace by -n"
        )
    _print([answer], args.output)
    return int(bool(answer.fix) or answer.reason is PodReason.FITS_NOWHERE)


_SHORT: Final = {
    "deploy": "deployment",
    "sts": "statefulset",
    "rs": "replicaset",
    "ds": "daemonset",
}
"""Kubectl's short names of controllers."""


def _pod_of(kind: str, name: str, pods: Iterable[Object]) -> Object | None:
    """Return a pod of a controller, one that waits before others; `None` without any."""
    wanted = _SHORT.get(kind.lower(), kind.lower().removesuffix("s")), name
    owned = [pod for pod in pods if wanted in controllers_of(pod)]
    phases = [(pod.get("status") or {}).get("phase") for pod in owned]
    return owned[phases.index("Pending") if "Pending" in phases else 0] if owned else None


async def fit(args: argparse.Namespace, viewer: ClusterViewer, namespace: str) -> int:
    """Print where the pods of a manifest would fit; return 0 if all do.

    Raises:
        MetagpuError: the file is no manifest with a pod.
    """
    pods = await to_thread.run_sync(_read_manifest, args.filename)
    demands = [demand_of(_in_namespace(pod, namespace)) for pod in pods]
    nodes = await _nodes(viewer)
    answers = []
    for demand in demands:
        quotas = await _quotas(viewer, demand.namespace)
        answers.append(await _judged(viewer, demand, nodes, quotas, is_new=True))
    _print(answers, args.output)
    return int(any(answer.fix or _fits_nowhere(answer) for answer in answers))


async def _answer_on(viewer: ClusterViewer, pod: Object) -> PodAnswer:
    demand, status = demand_of(pod), pod.get("status") or {}
    name, phase = f"{demand.namespace}/{demand.name}", status.get("phase", "")
    if demand.node and phase in ("Running", "Pending") and (lost := await _lost(viewer, demand)):
        sentence = "; ".join(loss.reason for loss in lost)
        return PodAnswer(name, PodReason.DEVICE_LOST, sentence, lost[0].fix, _waiting(status))
    if phase == "Running":
        return PodAnswer(
            name, PodReason.RUNNING, f"it runs on {demand.node}", notes=_waiting(status)
        )
    if phase == "Succeeded":
        return PodAnswer(name, PodReason.ENDED, "it has ended successfully")
    if phase == "Failed":
        return await _failed(viewer, demand, status)
    if demand.node:
        sentence = f"it is bound to {demand.node}, whose kubelet has not started it yet"
        return PodAnswer(name, PodReason.STARTING, sentence, notes=_waiting(status))

    quotas = await _quotas(viewer, demand.namespace) if demand.new_claims else ()
    nodes = await _nodes(viewer)
    answer = await _judged(viewer, demand, nodes, quotas)
    if answer.reason is PodReason.FITS_NOWHERE:
        answer.notes.extend(_counted_for_nothing(nodes))
    if said := scheduler_says(pod):
        answer.notes.append(f"the scheduler says: {said}")
    if answer.reason is PodReason.FITS:
        answer.notes.append(what_else(demand))
    return answer


def _counted_for_nothing(nodes: Iterable[ClusterNode]) -> Iterable[str]:
    """Yield the pods whose requests a Node counts, and whose devices are gone."""
    for node in nodes:
        try:
            lost = node.report.lost_devices if node.report is not None else ()
        except FieldMissing:
            continue
        for loss in lost:
            which = f"{loss.holder} requests, whose device is gone"
            yield f"{node.name} counts what {which}: {loss.fix}"


async def _lost(viewer: ClusterViewer, demand: PodDemand) -> Sequence[LostDevicesReport]:
    """Return the lost devices of a pod, by its node's daemon; none without its answer."""
    try:
        agents = [agent for agent in await viewer.agents() if agent.node == demand.node]
        answers = await viewer.ask(STATUS, agents)
        losses = [loss for each in answers if each.report for loss in each.report.lost_devices]
    except MetagpuError:
        return []
    holder = f"{demand.namespace}/{demand.name} ("
    return [loss for loss in losses if loss.holder.startswith(holder)]


async def _failed(viewer: ClusterViewer, demand: PodDemand, status: Object) -> PodAnswer:
    """Return why a pod failed, and whether another like it would fit now."""
    name = f"{demand.namespace}/{demand.name}"
    reason, message = status.get("reason", ""), status.get("message", "")
    if reason != _REJECTED:
        text = f"it failed: {': '.join(filter(None, (reason, message)))}"
        return PodAnswer(name, PodReason.FAILED, text)
    anywhere = msgspec.structs.replace(demand, node="")
    again = await _judged(viewer, anywhere, await _nodes(viewer), ())
    fix = "delete it: the kubelet never tries a rejected pod again; its controller makes another"
    sentence = f"{demand.node} rejected it: {message}"
    notes = [f"another pod like it: {again.sentence}", *([again.fix] if again.fix else [])]
    return PodAnswer(name, PodReason.REJECTED, sentence, fix, notes, again.nodes)


async def _refusal_of(viewer: ClusterViewer, namespace: str, name: str) -> PodAnswer | None:
    """Return why a controller's pods are refused, by its Events; `None` without."""
    path = f"/api/v1/namespaces/{namespace}/events"
    events = await viewer.items(path, fieldSelector="reason=FailedCreate")
    found = [event for event in events if (event.get("involvedObject") or {}).get("name") == name]
    if not found:
        return None
    latest = max(
        found, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or "")
    )
    quota = "exceeded quota" in str(latest.get("message"))
    fix = "change the pod's template as the message says"
    if quota:
        fix = "end other pods of the namespace, request less, or raise the quota"
    kind = latest["involvedObject"].get("kind", "controller")
    sentence = f"pods of {kind} {name} are refused: {latest['message']}"
    return PodAnswer(f"{namespace}/{name}", PodReason.CONTROLLER_REFUSED, sentence, fix)


async def _judged(
    viewer: ClusterViewer,
    demand: PodDemand,
    nodes: Sequence[ClusterNode],
    quotas: Sequence[Object],
    *,
    is_new: bool = False,
) -> PodAnswer:
    claims = await read_claims(viewer, demand.claims)
    classes = claims.our_classes(node.report for node in nodes if node.report)
    demand = msgspec.structs.replace(demand, devices=claims.devices(demand.claims, classes))
    judged = judge_all(demand, nodes) if demand.asks else ()
    reason, sentence, fix = (
        claims.problem(demand.claims)
        or exceeded_quota(demand, quotas, is_new=is_new)
        or conclude(demand, judged)
    )
    return PodAnswer(f"{demand.namespace}/{demand.name}", reason, sentence, fix, nodes=judged)


async def _nodes(viewer: ClusterViewer) -> Sequence[ClusterNode]:
    """Return all nodes, as the API server and their daemons report them."""

    async def ask() -> Sequence[NodeAnswer[StatusReport]]:
        return await viewer.ask(STATUS, await viewer.agents())

    objects, answers = await in_parallel(lambda: viewer.items("/api/v1/nodes"), ask)
    return cluster_nodes(objects, answers)


def cluster_nodes(
    objects: Iterable[Object], answers: Iterable[NodeAnswer[StatusReport]]
) -> Sequence[ClusterNode]:
    """Return nodes by their Node objects and the answers of their daemons."""
    by_node = {answer.node: answer for answer in answers}
    return [_node_of(entry, by_node.get(entry["metadata"]["name"])) for entry in objects]


def _node_of(node: Object, answer: NodeAnswer[StatusReport] | None) -> ClusterNode:
    spec, metadata = node.get("spec") or {}, node["metadata"]
    amounts = (node.get("status") or {}).get("allocatable") or {}
    return ClusterNode(
        metadata["name"],
        metadata.get("labels") or {},
        tuple(spec.get("taints") or ()),
        bool(spec.get("unschedulable")),
        {
            name: count
            for name, amount in amounts.items()
            if (count := whole_number(amount)) is not None
        },
        answer.report if answer else None,
        answer.problem if answer else "",
    )


async def _quotas(viewer: ClusterViewer, namespace: str) -> Sequence[Object]:
    """Return the quotas of a namespace; none where the user may not read them."""
    try:
        return await viewer.items(f"/api/v1/namespaces/{namespace}/resourcequotas")
    except ClusterError as error:
        if error.status == _FORBIDDEN:
            return ()
        raise


def _waiting(status: Object) -> list[str]:
    """Return why containers wait."""
    waiting = [
        (container_status["name"], container_status["state"]["waiting"])
        for container_status in status.get("containerStatuses") or ()
        if (container_status.get("state") or {}).get("waiting")
    ]
    texts = ((name, filter(None, (why.get("reason"), why.get("message")))) for name, why in waiting)
    return [f"container {name} waits: {': '.join(text)}" for name, text in texts]


def _read_manifest(file: str) -> Sequence[Object]:
    """Read the pods of a file, or of stdin for `-`; blocks.

    Raises:
        MetagpuError: it cannot be read, or has no pod.
    """
    found = pods_in(read_objects(file))
    if not found:
        problem = "no pod in it; give a Pod, or a workload with one"
        raise ConfigError(problem, ConfigReason.MISSING, file=file)
    return found


def _in_namespace(pod: Object, default: str) -> Object:
    metadata = pod.get("metadata") or {}
    namespace = metadata.get("namespace") or default
    return {**pod, "metadata": {**metadata, "namespace": namespace}, "status": {}}


def _fits_nowhere(answer: PodAnswer) -> bool:
    return not any(node.obstacle is Obstacle.NONE for node in answer.nodes)


def _print(answers: Sequence[PodAnswer], form: str) -> None:
    if form in ("json", "yaml"):
        plain = [_plain(pod_answer) for pod_answer in answers]
        print_text(encode(plain[0] if len(plain) == 1 else plain, form))
        return
    parts: list[Cell | TextTable] = []
    for answer in answers:
        fits = any(node.obstacle is Obstacle.NONE for node in answer.nodes)
        parts.append(Cell(f"{answer.pod}: {answer.sentence}", "bold" if fits else "bold yellow"))
        if answer.fix:
            parts.append(Cell(f"  {answer.fix}"))
        parts += [Cell(f"  {note}") for note in answer.notes]
        if answer.nodes:
            parts.append(_table(answer.nodes))
    print_text(render(parts, stdout_terminal()))


def _table(judged: Sequence[Judgement]) -> TextTable:
    """Draw the judgements; nodes of one reason share a line."""
    table = TextTable(("NODE", "FITS", "REASON", "CHANGE"), folded=frozenset(("REASON", "CHANGE")))
    groups: dict[tuple[Obstacle, str], list[Judgement]] = {}
    for judgement in judged:
        groups.setdefault((judgement.obstacle, judgement.reason), []).append(judgement)
    for (obstacle, reason), same in groups.items():
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        fits = obstacle is Obstacle.NONE
        table.add(
            same[0].node + more,
            Cell("yes", "green") if fits else Cell("no", "yellow"),
            reason,
            same[0].fix or "-",
        )
    return table


def _plain(answer: PodAnswer) -> Mapping[str, Any]:
    return {
        **msgspec.structs.asdict(answer),
        "reason": str(answer.reason),
        "nodes": [
            {
                "node": node.node,
                "fits": node.obstacle is Obstacle.NONE,
                "obstacle": node.obstacle.name.lower(),
                "reason": node.reason,
                "fix": node.fix,
            }
            for node in answer.nodes
        ],
    }
