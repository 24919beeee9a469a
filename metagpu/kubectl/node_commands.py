"""The commands about nodes: `doctor`, `explain`, `cordon` and `uncordon`.

An annotation of the Node cordons a GPU; its daemon follows. The others read the status of daemons.
"""

import argparse
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import anyio

from metagpu.cli.live import print_text
from metagpu.core.errors import ClusterError, NotCordoned, UnknownGpu
from metagpu.core.model.quantities import whole_number
from metagpu.core.reports.diagnosis import CheckResult, Diagnosis
from metagpu.core.reports.doctor import diagnose_status
from metagpu.core.reports.reading import plain_report
from metagpu.core.reports.schema.gpus import GpuReport
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.runtime.rate_limit import Backoff
from metagpu.display.options import encode
from metagpu.display.status import show_explanation
from metagpu.display.table import Cell, TextTable, render, stdout_terminal
from metagpu.kubectl.errors import CordonFailed, NoAnswer, NodeNotServed, report_of
from metagpu.kubectl.obstacles import offers_of
from metagpu.kubectl.viewer import STATUS, AgentPod, ClusterViewer, NodeAnswer, Object
from metagpu.plugins.cluster.settings import CORDON_PREFIX

_FORBIDDEN: Final = 403
_GPU_LABELS: Final = ("nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present")
"""The labels of Nodes with GPUs, by which the chart chooses its nodes."""
_STYLES: Final[Mapping[CheckResult, str]] = {
    CheckResult.OK: "green",
    CheckResult.WARNING: "yellow",
    CheckResult.ERROR: "bold red",
}


async def doctor(args: argparse.Namespace, viewer: ClusterViewer) -> int:
    """Check the daemons of nodes; return 1 if a node has an error, or gives no answer."""
    agents, nodes = await viewer.agents(), await _nodes(viewer, args.selector)
    if args.selector:
        names = {node["metadata"]["name"] for node in nodes}
        agents = [agent for agent in agents if agent.node in names]
    answers = await viewer.ask(STATUS, agents)
    offered = {name for answer in answers for name in offers_of(answer.report)}
    checked = {answer.node: _checks(answer) for answer in answers}
    found = dict(sorted({**checked, **_without_daemon(nodes, checked, offered)}.items()))
    if args.output in ("json", "yaml"):
        print_text(encode(_plain(found), args.output))
    else:
        show_all = args.output == "wide"
        print_text(render(_drawn(found, show_all=show_all), stdout_terminal()))
    return int(
        any(check.result is CheckResult.ERROR for checks in found.values() for check in checks)
    )


async def explain(args: argparse.Namespace, viewer: ClusterViewer) -> int:
    """Print what a node offers, and why.

    Raises:
        MetagpuError: metagpu does not run on the node, or gives no answer.
    """
    agents = {agent.node: agent for agent in await viewer.agents()}
    if args.node not in agents:
        raise NodeNotServed(f"metagpu does not run on a node {args.node}; see `kubectl get nodes`")
    [answer] = await viewer.ask(STATUS, [agents[args.node]])
    if answer.report is None:
        raise NoAnswer(f"{answer.node}: {answer.problem}")
    if args.output in ("json", "yaml"):
        print_text(encode(plain_report(answer.report), args.output))
        return 0
    with report_of(args.node):
        show_explanation(answer.report, topology=args.topology)
    return 0


async def _nodes(viewer: ClusterViewer, selector: str) -> Sequence[Object]:
    """List Nodes; without the right to, none where no labels choose them.

    Raises:
        ClusterError: the API server refuses, or does not answer.
    """
    try:
        return await viewer.items(
            "/api/v1/nodes", **({"labelSelector": selector} if selector else {})
        )
    except ClusterError as error:
        if error.status != _FORBIDDEN or selector:
            raise
        text = f"kubectl metagpu: nodes without a daemon are not looked for: {error.message}"
        print(text, file=sys.stderr)  # noqa: T201 - a command line speaks so
        return ()


def _without_daemon(
    nodes: Iterable[Object], checked: Collection[str], offered: Collection[str]
) -> Mapping[str, Sequence[Diagnosis]]:
    """Return a finding for each Node with GPUs, by labels or amounts, and no daemon."""
    fix = (
        "compare the node's labels and taints with the node selector, affinity and tolerations of "
        "the DaemonSet; a daemon that is a service of the host has no pod"
    )
    found = {}
    for node in nodes:
        name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
        amounts = (node.get("status") or {}).get("capacity") or {}
        signs = [f"has the label {label}" for label in _GPU_LABELS if labels.get(label) == "true"]
        signs += [
            f"counts {amount} of {resource}"
            for resource, amount in amounts.items()
            if resource in offered and whole_number(amount)
        ]
        if signs and name not in checked:
            finding = f"the Node {' and '.join(signs)}, and no pod of a daemon runs there"
            found[name] = [Diagnosis("-", CheckResult.WARNING, finding, fix)]
    return found


def _checks(answer: NodeAnswer[StatusReport]) -> Sequence[Diagnosis]:
    if answer.report is None:
        fix = "see `kubectl describe pod` of its daemon, and docs/kubectl.md"
        finding = f"its daemon gives no status: {answer.problem}"
        return [Diagnosis("-", CheckResult.ERROR, finding, fix)]
    return diagnose_status(answer.report)


def _drawn(
    found: Mapping[str, Sequence[Diagnosis]], *, show_all: bool
) -> Sequence[TextTable | Cell]:
    """Draw what is wrong, each finding once with the nodes that have it."""
    same: dict[tuple[str, CheckResult, str, str], list[str]] = {}
    for node, checks in found.items():
        for check in checks:
            if show_all or check.result is not CheckResult.OK:
                same.setdefault((check.code, check.result, check.finding, check.fix), []).append(
                    node
                )
    folded = frozenset(("FINDING", "FIX"))
    table = TextTable(("NODE", "CODE", "RESULT", "FINDING", "FIX"), folded=folded)
    errors_first = sorted(
        same.items(), key=lambda pair: (pair[0][1] is not CheckResult.ERROR, pair[0])
    )
    for (code, result, finding, fix), nodes in errors_first:
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        table.add(nodes[0] + more, code, Cell(str(result), _STYLES[result]), finding, fix or "-")
    bad = sum(
        any(check.result is not CheckResult.OK for check in checks) for checks in found.values()
    )
    total = "1 node" if len(found) == 1 else f"{len(found)} nodes"
    problem = f"{bad} of {total} {'has' if bad == 1 else 'have'} a problem"
    summary = Cell(problem if bad else f"{total}, no problem")
    return [table, summary] if same else [summary]


def _plain(found: Mapping[str, Sequence[Diagnosis]]) -> Sequence[Mapping[str, object]]:
    return [
        {
            "node": node,
            "checks": [
                {
                    "code": check.code,
                    "result": str(check.result),
                    "finding": check.finding,
                    "fix": check.fix,
                }
                for check in checks
            ],
        }
        for node, checks in found.items()
    ]


def ask_consent(plan: str, refusal: str) -> int | None:
    """Ask for consent to a plan; return `None` for yes, else the exit status."""
    if not sys.stdin.isatty():
        print_error(f"this would {plan}; without a terminal, --yes is the consent")
        return 2
    try:
        answer = input(f"{plan[:1].upper()}{plan[1:]}? [y/N] ")
    except EOFError:  # Ctrl-D
        answer = ""
        print_text("\n")
    if answer.strip().lower() in ("y", "yes"):
        return None
    print_error(refusal)
    return 1


def print_error(text: str) -> None:
    """Print a line to stderr."""
    print(f"kubectl metagpu: {text}", file=sys.stderr, flush=True)  # noqa: T201 - a command line speaks so


def delays() -> Backoff:
    """Return the seconds between two looks at a daemon's status."""
    return Backoff(0.05, 2.0)


async def cordon(args: argparse.Namespace, viewer: ClusterViewer) -> int:
    """Cordon a GPU, and wait until its daemon has done so.

    Raises:
        MetagpuError: there is no such GPU, or the daemon does not follow in time.
    """
    reason = " ".join(args.reason.split()) or "no reason was given"
    with report_of(node_of(args.gpu)):
        agent, gpu = await find_gpu(args.gpu, viewer)
        found = await cordon_gpu(viewer, agent, gpu, reason, args.timeout)
        held = sum(share.held for share in found.shares.values())
    title = f"GPU {gpu.index} of node {agent.node}"
    print_text(
        f"{title} is cordoned; {'1 share is' if held == 1 else f'{held} shares are'} still in use\n"
    )
    return 0


async def cordon_gpu(
    viewer: ClusterViewer, agent: AgentPod, gpu: GpuReport, reason: str, deadline: float
) -> GpuReport:
    """Write the annotation of a cordon; return the GPU as its daemon reports it then.

    Raises:
        MetagpuError: the user may not, or the daemon does not follow within `deadline` seconds.
    """
    await viewer.annotate_node(agent.node, f"{CORDON_PREFIX}{gpu.uuid}", reason)
    return await _follow(viewer, agent, gpu, deadline, cordoned=True)


async def uncordon(args: argparse.Namespace, viewer: ClusterViewer) -> int:
    """End the cordon of a GPU, and wait until its daemon has done so.

    Raises:
        MetagpuError: there is no such GPU, it has another cordon, or the daemon does not follow.
    """
    with report_of(node_of(args.gpu)):
        agent, gpu = await find_gpu(args.gpu, viewer)
        if gpu.cordon is None:
            raise NotCordoned(f"GPU {gpu.index} of {agent.node} is not cordoned")
        for name in (gpu.uuid, str(gpu.index)):
            await viewer.annotate_node(agent.node, f"{CORDON_PREFIX}{name}", None)
        await _follow(viewer, agent, gpu, args.timeout, cordoned=False)
    print_text(f"GPU {gpu.index} of {agent.node} gives new shares again\n")
    return 0


def node_of(gpu: str) -> str:
    """Return the node of `NODE/GPU`."""
    return gpu.partition("/")[0]


async def find_gpu(name: str, viewer: ClusterViewer) -> tuple[AgentPod, GpuReport]:
    """Find the daemon and the GPU of `NODE/GPU`.

    Raises:
        MetagpuError: there is no such node or GPU, or its daemon gives no answer.
    """
    node, _, wanted = name.partition("/")
    if not wanted:
        raise UnknownGpu(f"{name!r} names no GPU; write NODE/GPU, as in gpu-1/3")
    agents = {agent.node: agent for agent in await viewer.agents()}
    if node not in agents:
        raise NodeNotServed(f"metagpu does not run on a node {node}; see `kubectl get nodes`")
    gpus = await _gpus(viewer, agents[node])
    for gpu in gpus:
        if wanted in (str(gpu.index), gpu.uuid):
            return agents[node], gpu
    known = ", ".join(str(gpu.index) for gpu in gpus) or "none"
    raise UnknownGpu(f"there is no GPU {wanted!r} on {node}; there are: {known}")


async def _gpus(viewer: ClusterViewer, agent: AgentPod) -> list[GpuReport]:
    [answer] = await viewer.ask(STATUS, [agent])
    if answer.report is None:
        raise NoAnswer(f"{answer.node}: {answer.problem}")
    return answer.report.gpus


async def _follow(
    viewer: ClusterViewer,
    agent: AgentPod,
    gpu: GpuReport,
    deadline: float,
    *,
    cordoned: bool,
) -> GpuReport:
    """Wait until the daemon reports the GPU as wanted; return what it reports."""
    current, pauses = gpu, delays()
    with anyio.move_on_after(deadline):
        while True:
            # A daemon that has just started, or whose GPU has fallen off the bus, reports it not.
            for report in await _gpus(viewer, agent):
                if report.uuid == gpu.uuid:
                    current = report
                    if (report.cordon is not None) == cordoned:
                        return current
            await anyio.sleep(pauses.next())
    if not cordoned and current.cordon is not None:
        problem = f"it is still cordoned ({current.cordon.reason}): `metagpu uncordon` there"
    else:
        problem = f"its daemon has not followed within {deadline:g} s: see its feature `cordon`"
    raise CordonFailed(f"GPU {gpu.index} of {agent.node}: {problem}")
