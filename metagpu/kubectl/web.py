"""`web`: the page of all nodes, on the loopback of the user's machine."""

import argparse
import sys
import time
import webbrowser
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import anyio
import msgspec
from anyio import to_thread

from metagpu.cli.page import log_errors_alone, serve_page
from metagpu.core.errors import ClusterError, MetagpuError
from metagpu.core.model.quantities import iso_time
from metagpu.core.reports.reading import plain_report
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.reports.schema.usage import UsageReport
from metagpu.kubectl.claims import ReadClaims, read_claims
from metagpu.kubectl.judgement import claims_of, waiting_pods
from metagpu.kubectl.placement import cluster_nodes
from metagpu.kubectl.viewer import (
    STATUS,
    USAGE,
    AgentPod,
    ClusterViewer,
    NodeAnswer,
    in_parallel,
)
from metagpu.plugins.web.changes import Object, PolledView, digest_of

OBJECTS_AGE: Final = 10.0
"""Seconds for which Nodes and daemons are not listed again: they are large and change seldom."""
EVENTS: Final = 100
"""The latest events of all nodes that a view has."""
_FORBIDDEN: Final = 403
_LEFT_OUT: Final = "feature.node.kubernetes.io/"
"""Labels of NFD, some fifty of each node, which say nothing of GPUs."""


class _Objects(msgspec.Struct, frozen=True):
    """Objects of the API server.

    Attributes:
        until: when they are listed again.
        lacking: the right that is missing to look for daemons again, empty for none.
    """

    until: float
    agents: Sequence[AgentPod]
    nodes: Sequence[Object]
    lacking: str = ""


class _WaitingPods(msgspec.Struct, frozen=True):
    """Pods that wait, their claims, and `refusal`: why Pods are not listed."""

    pods: Sequence[Object] = ()
    claims: ReadClaims = ReadClaims()
    refusal: ClusterError | None = None

    @property
    def lacking(self) -> str:
        """Name the right that is missing in one line, empty for none."""
        if self.refusal is not None:
            return f"pods that wait are not shown: {self.refusal.message}"
        if self.claims.refusal:
            return f"pods that wait by ResourceClaims are not shown: {self.claims.refusal}"
        return ""


class ClusterView(PolledView):
    """The view of the cluster, looked at with the rights of a user.

    Args:
        selector: labels of the nodes.
        namespaces: where Pods are listed: in the first of them that the user may list. An empty
            name means all namespaces.
        interval: seconds for which a view serves all requests, and between two looks.
    """

    def __init__(
        self,
        viewer: ClusterViewer,
        selector: str = "",
        namespaces: Sequence[str] = ("",),
        interval: float = 2.0,
    ) -> None:
        super().__init__(self._compose_view, interval)
        self._viewer = viewer
        self._selector = selector
        self._namespaces = list(namespaces)
        self._pods_are_wanted = len(namespaces) == 1
        self._objects: _Objects | None = None
        self._claims, self._claims_until = ReadClaims(), 0.0

    async def check(self) -> str:
        """Read what every page needs; return what this one cannot show, empty for nothing.

        Raises:
            MetagpuError: there is no daemon, the API server does not answer, or the user may not
                ask for what `namespaces` has alone.
        """
        self._objects = await self._list_objects()
        pods = await self._list_waiting()
        if pods.refusal is not None and self._pods_are_wanted:
            raise pods.refusal
        return pods.lacking

    async def _compose_view(self) -> tuple[Object, bytes]:
        try:
            if self._objects is None or anyio.current_time() >= self._objects.until:
                self._objects = await self._list_objects()
            objects = self._objects
            statuses, usages, pods = await in_parallel(
                partial(self._viewer.ask, STATUS, objects.agents),
                partial(self._viewer.ask, USAGE, objects.agents),
                self._list_waiting,
            )
            # In a thread: 500 nodes have some megabytes, and each pod is judged for each node.
            look = partial(_compose, objects, statuses, usages, pods)
            return await to_thread.run_sync(look)
        except MetagpuError as error:
            names = [agent.node for agent in self._objects.agents] if self._objects else []
            return _compose(
                _Objects(0, (), ()),
                [NodeAnswer(name, problem=str(error)) for name in names],
                [NodeAnswer(name, problem=str(error)) for name in names],
                _WaitingPods(),
            )

    async def _list_objects(self) -> _Objects:
        query = {"labelSelector": self._selector} if self._selector else {}
        nodes, (agents, lacking) = await in_parallel(
            partial(self._viewer.items, "/api/v1/nodes", **query), self._list_agents
        )
        if self._selector:
            names = {node["metadata"]["name"] for node in nodes}
            agents = [agent for agent in agents if agent.node in names]
        return _Objects(anyio.current_time() + OBJECTS_AGE, agents, nodes, lacking)

    async def _list_agents(self) -> tuple[Sequence[AgentPod], str]:
        """Find the daemons, or return those found before while they are refused."""
        try:
            return await self._viewer.agents(), ""
        except ClusterError as error:
            if error.status != _FORBIDDEN or self._objects is None:
                raise
            return self._objects.agents, f"new nodes are not looked for: {error.message}"

    async def _list_waiting(self) -> _WaitingPods:
        """List pods that wait; a right that is missing costs no node its row.

        Raises:
            ClusterError: the API server does not answer.
        """
        try:
            pods = await self._list_pods()
        except ClusterError as error:
            if error.status != _FORBIDDEN:
                raise
            return _WaitingPods(refusal=error)
        return _WaitingPods(pods, await self._read_claims(pods))

    async def _read_claims(self, pods: Sequence[Object]) -> ReadClaims:
        """Read the claims of pods that wait, known ones after some seconds only."""
        wanted = claims_of(pods)
        if not wanted <= self._claims.specs.keys() or anyio.current_time() >= self._claims_until:
            self._claims = await read_claims(self._viewer, wanted)
            self._claims_until = anyio.current_time() + OBJECTS_AGE
        return self._claims

    async def _list_pods(self) -> Sequence[Object]:
        """List pods that wait, where the user may; remember where that is.

        Raises:
            ClusterError: the API server does not answer, or refuses it in the last namespace too.
        """
        while True:
            where = f"/namespaces/{self._namespaces[0]}" if self._namespaces[0] else ""
            try:
                return await self._viewer.items(
                    f"/api/v1{where}/pods", fieldSelector="status.phase=Pending"
                )
            except ClusterError as error:
                if error.status != _FORBIDDEN or len(self._namespaces) == 1:
                    raise
                self._namespaces.pop(0)


def _compose(
    objects: _Objects,
    statuses: Sequence[NodeAnswer[StatusReport]],
    usages: Sequence[NodeAnswer[UsageReport]],
    waiting: _WaitingPods,
) -> tuple[dict[str, Any], bytes]:
    """Return the view, and a digest of all in it that is no time of a look."""
    labels = {
        node["metadata"]["name"]: node["metadata"].get("labels") or {} for node in objects.nodes
    }
    usage_of = {other.node: other for other in usages}
    rows, steady, events = [], [], []
    for node_answer in statuses:
        answer = usage_of[node_answer.node]
        usage = None if answer.report is None else plain_report(answer.report)
        status = None if node_answer.report is None else plain_report(node_answer.report)
        if status is not None:
            recent = status.pop("events", None) or ()  # a daemon of an earlier version has none
            events += [{**event, "node": node_answer.node} for event in recent]
        row: Object = {
            "name": node_answer.node,
            "problem": node_answer.problem or answer.problem,
            "labels": _shown_labels(labels.get(node_answer.node, {})),
        }
        rows.append({**row, "status": status, "usage": usage})
        steady.append((row, _steady(status), _timeless(usage)))
    shown = {
        "events": sorted(events, key=lambda event: str(event.get("at")), reverse=True)[:EVENTS],
        "waiting": waiting_pods(
            waiting.pods, cluster_nodes(objects.nodes, statuses), waiting.claims
        ),
        "lacking": "; ".join(filter(None, (objects.lacking, waiting.lacking))),
    }
    view = {"kind": "cluster", "at": iso_time(time.time()), "nodes": rows, **shown}
    return view, digest_of([steady, shown])


def _shown_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in labels.items() if not name.startswith(_LEFT_OUT)}


def _steady(status: Object | None) -> Object | None:
    """Return a status without the seconds to each next turn: they always differ."""
    if status is None:
        return None
    gpus = [
        {**gpu, "turn": {**gpu["turn"], "nextIn": 0}} if gpu.get("turn") else gpu
        for gpu in status.get("gpus", ())
    ]
    return {**status, "gpus": gpus}


def _timeless(usage: Object | None) -> Object | None:
    return None if usage is None else {**usage, "at": 0}


async def serve_cluster(
    args: argparse.Namespace, viewer: ClusterViewer, namespaces: Sequence[str]
) -> int:
    """Serve the page until cancelled; Pods and Events are those of `namespaces`.

    Raises:
        MetagpuError: the port is taken, or the user may not see the nodes.
    """
    log_errors_alone()
    view = ClusterView(viewer, args.selector, namespaces, args.interval)
    if lacking := await view.check():
        _warn(lacking)
    started = _open_browser if args.open else None
    await serve_page(args.address, view.read, view.changes, "the cluster", started)
    return 0


async def _open_browser(url: str) -> None:
    if not await to_thread.run_sync(webbrowser.open, url, abandon_on_cancel=True):
        _warn("no browser starts here; open the page in one")


def _warn(text: str) -> None:
    print(f"kubectl metagpu: {text}", file=sys.stderr)  # noqa: T201 - a command line speaks so
