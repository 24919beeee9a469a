"""`doctor` and `explain`: daemons of other nodes, by their own status."""

import argparse
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from metagpu.cli.live import print_text
from metagpu.core.errors import ClusterError
from metagpu.core.model.quantities import whole_number
from metagpu.core.reports.diagnosis import CheckResult, Diagnosis
from metagpu.core.reports.doctor import diagnose_status
from metagpu.core.reports.reading import plain_report
from metagpu.core.reports.schema import StatusReport
from metagpu.display.encoding import encode
from metagpu.display.status import show_explanation
from metagpu.display.table import Cell, TextTable, render, stdout_terminal
from metagpu.kubectl.errors import NoAnswer, NodeNotServed, report_of
from metagpu.kubectl.obstacles import offers_of
from metagpu.kubectl.viewer import STATUS, ClusterViewer, NodeAnswer, Object

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
        names = {it["metadata"]["name"] for it in nodes}
        agents = [it for it in agents if it.node in names]
    answers = await viewer.ask(STATUS, agents)
    offered = {name for it in answers for name in offers_of(it.report)}
    checked = {it.node: _checks(it) for it in answers}
    found = dict(sorted({**checked, **_without_daemon(nodes, checked, offered)}.items()))
    if args.output in ("json", "yaml"):
        print_text(encode(_plain(found), args.output))
    else:
        show_all = args.output == "wide"
        print_text(render(_drawn(found, show_all=show_all), stdout_terminal()))
    return int(any(it.result is CheckResult.ERROR for checks in found.values() for it in checks))


async def explain(args: argparse.Namespace, viewer: ClusterViewer) -> int:
    """Print what a node offers, and why.

    Raises:
        MetagpuError: metagpu does not run on the node, or gives no answer.
    """
    agents = {it.node: it for it in await viewer.agents()}
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
    for it in nodes:
        name, labels = it["metadata"]["name"], it["metadata"].get("labels") or {}
        amounts = (it.get("status") or {}).get("capacity") or {}
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
        for it in checks:
            if show_all or it.result is not CheckResult.OK:
                same.setdefault((it.code, it.result, it.finding, it.fix), []).append(node)
    folded = frozenset(("FINDING", "FIX"))
    table = TextTable(("NODE", "CODE", "RESULT", "FINDING", "FIX"), folded=folded)
    errors_first = sorted(same.items(), key=lambda it: (it[0][1] is not CheckResult.ERROR, it[0]))
    for (code, result, finding, fix), nodes in errors_first:
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        table.add(nodes[0] + more, code, Cell(str(result), _STYLES[result]), finding, fix or "-")
    bad = sum(any(it.result is not CheckResult.OK for it in checks) for checks in found.values())
    summary = Cell(
        f"{bad or 'none'} of {len(found)} nodes {'has' if bad == 1 else 'have'} a problem"
    )
    return [table, summary] if same else [summary]


def _plain(found: Mapping[str, Sequence[Diagnosis]]) -> Sequence[Mapping[str, object]]:
    return [
        {
            "node": node,
            "checks": [
                {"code": it.code, "result": str(it.result), "finding": it.finding, "fix": it.fix}
                for it in checks
            ],
        }
        for node, checks in found.items()
    ]
