"""The commands of `kubectl metagpu`, and the connection that they share."""

import argparse
import asyncio
import os
import sys
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from metagpu import __version__
from metagpu.cli.live import print_text, repeat, show_live
from metagpu.cli.loading import quick_loading
from metagpu.core.reports.schema.usage import UsageReport
from metagpu.display.options import encode
from metagpu.display.sorting import sort_items
from metagpu.display.table import PLAIN, Cell, Terminal, TextTable, render, stdout_terminal
from metagpu.kubectl.errors import NoKubeconfig
from metagpu.kubectl.tables import (
    Item,
    draw_items,
    draw_top,
    in_namespace,
    named_rows,
    not_listed,
    object_names,
    read_rows,
)
from metagpu.kubectl.viewer import (
    USAGE,
    ClusterViewer,
    NodeAnswer,
    Progress,
    RepeatedQuestions,
)
from metagpu.plugins.cluster.settings import TOKEN_FILE, ClusterTiming

_NAMED: Final = 5
"""Nodes that a line names; all are in `-o json`."""


def silent_nodes(answers: Sequence[NodeAnswer[UsageReport]]) -> Sequence[str]:
    """Return the nodes that gave no answer, a line for all of one problem."""
    same: dict[str, list[str]] = {}
    for answer in answers:
        if answer.report is None:
            same.setdefault(answer.problem, []).append(answer.node)
    return [f"{_named(nodes)}: {problem}" for problem, nodes in same.items()]


def _named(nodes: Sequence[str]) -> str:
    more = len(nodes) - _NAMED
    return ", ".join(nodes[:_NAMED]) + (f" and {more} more" if more > 0 else "")


_DEFAULT_KUBECONFIG: Final = Path("~/.kube/config")


def _get(args: argparse.Namespace) -> int:
    with connect(args) as (runner, viewer):
        rows = Rows(args, runner, viewer)
        if args.output in ("json", "yaml", "name"):
            if args.watch:
                return repeat(lambda: print_text(_encode(args, *rows.read(), compact=True)))
            shown, answers = rows.read()
            print_text(_encode(args, shown, answers))
            return report_silence(answers)
        draw = partial(
            draw_items, args.kind, wide=args.output == "wide", has_head=not args.no_headers
        )
        if args.watch:
            return _show_live(rows, draw)
        shown, answers = rows.read()
        if shown or not all(answer.report for answer in answers):
            print_text(render(draw(shown), stdout_terminal()))
        else:
            print(rows.nothing, file=sys.stderr)  # noqa: T201 - as kubectl does
        return report_silence(answers)


def _version(args: argparse.Namespace) -> int:
    print_text(f"kubectl-metagpu {__version__}\n")
    if args.client:
        return 0

    async def ask(viewer: ClusterViewer) -> int:
        answers = await RepeatedQuestions(viewer).ask(await viewer.agents())
        versions = Counter(answer.report.version for answer in answers if answer.report)
        for version, count in sorted(versions.items()):
            print_text(f"metagpu {version} on {count} node{'s' if count > 1 else ''}\n")
        return report_silence(answers)

    return _run(args, ask)


def _top(args: argparse.Namespace) -> int:
    if args.output in ("json", "yaml"):
        return _get(args)  # bars are for people
    with connect(args) as (runner, viewer):
        wide = args.output == "wide"
        rows = Rows(args, runner, viewer)
        return _show_live(rows, lambda shown: draw_top(args.kind, shown, wide=wide))


def _why(args: argparse.Namespace) -> int:
    from metagpu.kubectl.placement import why

    namespace = namespace_of(args)
    return _run(args, lambda viewer: why(args, viewer, namespace))


def _fit(args: argparse.Namespace) -> int:
    from metagpu.kubectl.placement import fit

    namespace = namespace_of(args)
    return _run(args, lambda viewer: fit(args, viewer, namespace))


def _doctor(args: argparse.Namespace) -> int:
    from metagpu.kubectl.node_commands import doctor

    return _run(args, lambda viewer: doctor(args, viewer))


def _cordon(args: argparse.Namespace) -> int:
    from metagpu.kubectl.node_commands import cordon

    return _run(args, lambda viewer: cordon(args, viewer))


def _uncordon(args: argparse.Namespace) -> int:
    from metagpu.kubectl.node_commands import uncordon

    return _run(args, lambda viewer: uncordon(args, viewer))


def _drain_gpu(args: argparse.Namespace) -> int:
    from metagpu.kubectl.drain import drain_gpu

    with connect(args) as (runner, viewer):
        return drain_gpu(args, runner, viewer)


def _uninstall(args: argparse.Namespace) -> int:
    from metagpu.kubectl.uninstall import uninstall

    with connect(args) as (runner, viewer):
        return uninstall(args, runner, viewer)


def _web(args: argparse.Namespace) -> int:
    from metagpu.kubectl.web import serve_cluster

    namespaces = [args.namespace]
    if not args.namespace and not args.all_namespaces:
        namespaces.append(namespace_of(args))
    try:
        return _run(args, lambda viewer: serve_cluster(args, viewer, namespaces))
    except KeyboardInterrupt:
        return 0  # the end of every page


def _report(args: argparse.Namespace) -> int:
    from metagpu.kubectl.report import ask_address, ask_service, report_namespaces

    if path := args.prometheus_service:
        return _run(args, lambda viewer: report_namespaces(args, ask_service(viewer, path)))
    ask = ask_address(args.prometheus, args.prometheus_token_file)
    return asyncio.run(report_namespaces(args, ask))


def _explain(args: argparse.Namespace) -> int:
    from metagpu.kubectl.node_commands import explain

    return _run(args, lambda viewer: explain(args, viewer))


def _translate(args: argparse.Namespace) -> int:
    from metagpu.kubectl.claims import read_extended_resources
    from metagpu.kubectl.manifests import print_translation, read_nodes

    if args.nodes is not None:
        return print_translation(args, read_nodes(args.nodes))

    with connect(args) as (runner, viewer):
        nodes = runner.run(viewer.items("/api/v1/nodes"))
        names = runner.run(read_extended_resources(viewer))
    return print_translation(args, nodes, names)


COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "top": _top,
    "get": _get,
    "why": _why,
    "fit": _fit,
    "doctor": _doctor,
    "cordon": _cordon,
    "uncordon": _uncordon,
    "drain-gpu": _drain_gpu,
    "explain": _explain,
    "report": _report,
    "translate": _translate,
    "uninstall": _uninstall,
    "web": _web,
    "version": _version,
    "completion": lambda args: int(args.do(args)),
}


def names_of(kind: str, args: argparse.Namespace, word: str) -> Iterable[str]:
    """Return the names of what is in the cluster, for the completion of a line.

    Raises:
        MetagpuError: there is no kubeconfig, or no answer.
        TimeoutError: no answer came in time.
    """
    if kind == "contexts":
        from metagpu.plugins.cluster.credentials import context_names

        kubeconfig = _kubeconfig(args)
        return context_names(kubeconfig) if kubeconfig else ()
    namespace = namespace_of(args) if kind in ("pods", "controllers") else ""

    async def ask() -> Iterable[str]:
        with anyio.fail_after(args.timeout):
            async with open_viewer(args) as viewer:
                return await _names(viewer, kind, namespace, word.partition("/")[0])

    return asyncio.run(ask())


async def _names(viewer: ClusterViewer, kind: str, namespace: str, node: str) -> Iterable[str]:
    if kind == "namespaces":
        return [found["metadata"]["name"] for found in await viewer.items("/api/v1/namespaces")]
    if kind in ("pods", "controllers"):
        pods = await viewer.items(f"/api/v1/namespaces/{namespace}/pods")
        names = [pod["metadata"]["name"] for pod in pods]
        if kind == "controllers":
            from metagpu.kubectl.pods import controllers_of

            names += ["/".join(owner) for pod in pods for owner in controllers_of(pod)]
        return names
    agents = await viewer.agents()
    if kind == "nodes":
        return [agent.node for agent in agents]
    asked = [agent for agent in agents if agent.node == node] or agents
    rows, _ = read_rows("gpus", await viewer.ask(USAGE, asked))
    return object_names("gpus", rows)


# --- shared ---------------------------------------------------------------------------------------


class Rows:
    """The rows of a kind, read again and again over the same connections."""

    def __init__(
        self, args: argparse.Namespace, runner: asyncio.Runner, viewer: ClusterViewer
    ) -> None:
        self._args = args
        self._runner = runner
        self._viewer = viewer
        self._questions = RepeatedQuestions(viewer)
        self._shown = False
        one_namespace = args.kind == "pods" and not args.all_namespaces
        self._namespace = namespace_of(args) if one_namespace else ""

    @property
    def nothing(self) -> str:
        """The sentence for an answer without rows."""
        where = f" in namespace {self._namespace}" if self._namespace else ""
        pods = self._args.kind in ("pods", "namespaces")
        return f"No pods hold GPU shares{where}." if pods else f"No {self._args.kind} found."

    def read(self) -> tuple[Sequence[Item], Sequence[NodeAnswer[UsageReport]]]:
        """Return the rows that the arguments select, and the answers of all nodes."""
        return self._runner.run(self._read())

    async def _read(self) -> tuple[Sequence[Item], Sequence[NodeAnswer[UsageReport]]]:
        args, viewer = self._args, self._viewer
        agents = await viewer.agents()
        of_nodes = args.kind in ("nodes", "gpus")
        if args.selector and of_nodes:
            chosen = await viewer.items("/api/v1/nodes", labelSelector=args.selector)
            names = {pod["metadata"]["name"] for pod in chosen}
            agents = [agent for agent in agents if agent.node in names]

        answers = await self._questions.ask(agents)
        pods = await self._chosen_pods(viewer) if args.selector and not of_nodes else None
        rows, answers = read_rows(args.kind, answers, pods)
        if self._namespace:
            rows = in_namespace(rows, self._namespace)
        if args.names:
            rows, missing = named_rows(args.kind, rows, args.names)
            if missing and not self._shown and all(answer.report for answer in answers):
                raise not_listed(args.kind, missing[0], self._namespace)
        self._shown = True  # what ends while it is watched is no error
        return sort_items(rows, args.sort_by) if args.sort_by else rows, answers

    async def _chosen_pods(self, viewer: ClusterViewer) -> frozenset[tuple[str, str]]:
        where = f"/namespaces/{self._namespace}" if self._namespace else ""
        chosen = await viewer.items(f"/api/v1{where}/pods", labelSelector=self._args.selector)
        return frozenset((pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in chosen)


@contextmanager
def connect(args: argparse.Namespace) -> Iterator[tuple[asyncio.Runner, ClusterViewer]]:
    """Open a connection for coroutines that run one after the other.

    Raises:
        MetagpuError: there is no kubeconfig.
    """
    opening = open_viewer(args)
    with asyncio.Runner() as runner:
        viewer = runner.run(opening.__aenter__())
        try:
            yield runner, viewer
        finally:
            runner.run(opening.__aexit__(None, None, None))


def open_viewer(args: argparse.Namespace) -> AbstractAsyncContextManager[ClusterViewer]:
    """Return a connection by the arguments, open for the length of its block.

    Raises:
        MetagpuError: there is no kubeconfig.
    """
    return _open_viewer(args, _kubeconfig(args))


@asynccontextmanager
async def _open_viewer(
    args: argparse.Namespace, kubeconfig: Path | None
) -> AsyncIterator[ClusterViewer]:
    with quick_loading():
        from metagpu.host.programs import run_command
        from metagpu.plugins.cluster.client import open_client

    async with open_client(kubeconfig, run_command, ClusterTiming(), args.context) as client:
        yield ClusterViewer(client, args.agent_namespace, args.timeout, Progress())


def _run(args: argparse.Namespace, do: Callable[[ClusterViewer], Awaitable[int]]) -> int:
    """Run a command that asks once."""
    opening = open_viewer(args)

    async def run() -> int:
        async with opening as viewer:
            return await do(viewer)

    return asyncio.run(run())


def _kubeconfig(args: argparse.Namespace) -> Path | None:
    """Return the kubeconfig in resolved arguments; `None` for a pod's service account."""
    if args.kubeconfig is not None:
        given: Path = args.kubeconfig
        return given
    default = _DEFAULT_KUBECONFIG.expanduser()
    if default.is_file():
        return default
    if TOKEN_FILE.exists() and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    raise NoKubeconfig(f"there is no {default}; give --kubeconfig, or set KUBECONFIG")


def namespace_of(args: argparse.Namespace) -> str:
    """Return the namespace of the arguments, or of the context."""
    if args.namespace:
        return str(args.namespace)
    with quick_loading():
        from metagpu.plugins.cluster.credentials import context_namespace

    kubeconfig = _kubeconfig(args)
    if kubeconfig is None:
        return (TOKEN_FILE.parent / "namespace").read_text(encoding="utf-8").strip()
    return context_namespace(kubeconfig, args.context)


def _encode(
    args: argparse.Namespace,
    rows: Sequence[Item],
    answers: Sequence[NodeAnswer[UsageReport]],
    *,
    compact: bool = False,
) -> str:
    if args.output == "name":
        return "".join(f"{name}\n" for name in object_names(args.kind, rows))
    silent = [
        {"node": answer.node, "problem": answer.problem}
        for answer in answers
        if answer.report is None
    ]
    return encode({"items": list(rows), "unanswered": silent}, args.output, compact=compact)


def _show_live(
    rows: Rows, draw_rows: Callable[[Sequence[Item]], Iterable[TextTable | Cell]]
) -> int:
    """Draw rows again and again, and the silent nodes; into a pipe, draw once."""
    answers: Sequence[NodeAnswer[UsageReport]] = ()

    def draw(screen: Terminal) -> str:
        nonlocal answers
        shown, answers = rows.read()
        notes = [] if screen is PLAIN else [Cell(node, "yellow") for node in silent_nodes(answers)]
        return render([*draw_rows(shown), *notes], screen)

    status = show_live(draw)
    return report_silence(answers) if stdout_terminal() is PLAIN else status


def report_silence(answers: Sequence[NodeAnswer[UsageReport]]) -> int:
    """Print the nodes without an answer, and why; return 1 if no node answered."""
    for line in silent_nodes(answers):
        print(f"kubectl metagpu: {line}", file=sys.stderr)  # noqa: T201 - a command line speaks so
    return int(bool(answers) and all(answer.report is None for answer in answers))
