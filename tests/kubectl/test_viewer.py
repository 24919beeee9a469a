"""The daemons that are asked: which pods they are, many at once, and one that is silent."""

import json
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from aiohttp import web

from metagpu.core.errors import ClusterError, MetagpuError
from metagpu.core.reports.reading import read_report
from metagpu.core.reports.schema.usage import UsageReport
from metagpu.kubectl import viewer
from metagpu.kubectl.commands import report_silence, silent_nodes
from metagpu.kubectl.tables import read_rows
from metagpu.kubectl.viewer import (
    AT_ONCE,
    SELECTOR,
    STATUS,
    USAGE,
    AgentPod,
    ClusterViewer,
    NodeAnswer,
    RepeatedQuestions,
    choose_agents,
)
from metagpu.kubectl.web import ClusterView
from metagpu.plugins.cluster import client as client_module
from metagpu.plugins.cluster.settings import VIEWER
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimPod
from tests.agent.test_status_api import NODE, SYSTEM, serving
from tests.cli.test_mgctl import TtyText
from tests.kubectl.test_program import AGENT, DAEMON_OWNER, DAEMON_VOLUMES, Cluster, cluster
from tests.plugins.cluster.rig import client_of
from tests.rigs.agent import METAGPU
from tests.rigs.reported import complete
from tests.rigs.waiting import skip

EVIL = "team-evil"
MANIFEST = Path(__file__).parents[2] / "deploy" / "static.yaml"


def pod(name: str, namespace: str = SYSTEM, **changes: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any field
    """Return the pod of a daemon, ready, with another owner, folder or state."""
    metadata = {
        "name": name,
        "namespace": namespace,
        "ownerReferences": changes.get("owners", [DAEMON_OWNER]),
        **changes.get("metadata", {}),
    }
    ready = {"type": "Ready", "status": str(changes.get("ready", True))}
    return {
        "metadata": metadata,
        "spec": {"nodeName": NODE, "volumes": changes.get("volumes", DAEMON_VOLUMES)},
        "status": {"conditions": [ready]},
    }


@pytest.mark.parametrize("reverse", [True, False])
def test_of_two_daemons_of_a_node_the_one_that_serves_is_asked(*, reverse: bool) -> None:
    """The older one that is ready has the node, also while it ends."""
    times = {name: {"creationTimestamp": name} for name in ("2026-11-01", "2026-11-02")}
    old, new = (pod(name, metadata=times[name]) for name in times)
    ending = {"deletionTimestamp": "now"}
    for pods, name in (
        ([old, new], "2026-11-01"),
        ([pod("2026-11-01", metadata={**times["2026-11-01"], **ending}), new], "2026-11-01"),
        ([pod("gone", metadata=ending, ready=False), new], "2026-11-02"),
        ([pod("broken", ready=False), new], "2026-11-02"),
    ):
        [chosen] = choose_agents(pods[::-1] if reverse else pods)
        assert chosen.name == name


@pytest.mark.parametrize(
    "changes",
    [
        {"owners": []},
        {"owners": [{**DAEMON_OWNER, "kind": "ReplicaSet"}]},
        {"owners": [{**DAEMON_OWNER, "controller": False}]},
        {"volumes": []},
        {"volumes": [{"name": "device-plugins", "emptyDir": {}}]},
        {"volumes": [{"hostPath": {"path": "/data/var/lib/kubelet/device-plugins"}}]},
    ],
)
@pytest.mark.parametrize("namespace", [SYSTEM, EVIL])
def test_a_pod_with_the_label_alone_is_no_daemon(
    changes: Mapping[str, Any], namespace: str
) -> None:
    """Without a DaemonSet, or the kubelet's folder, a pod is ignored wherever it is."""
    [chosen] = choose_agents([pod("agent"), pod("forged", namespace, **changes)])
    assert (chosen.namespace, chosen.name) == (SYSTEM, "agent")


def test_the_manifests_pods_are_daemons() -> None:
    """The DaemonSet of the chart makes pods that are recognized, with their port."""
    documents = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    [template] = [
        document["spec"]["template"] for document in documents if document["kind"] == "DaemonSet"
    ]
    daemon = pod("agent", metadata={"labels": template["metadata"]["labels"]})
    [chosen] = choose_agents([{**daemon, "spec": {**template["spec"], "nodeName": NODE}}])
    assert chosen.port > 0
    key, _, value = SELECTOR.partition("=")
    assert template["metadata"]["labels"][key] == value


GOOD = NodeAnswer("good", complete({}, UsageReport))


def test_silent_nodes_are_named() -> None:
    """Nodes of one problem have one line with their names, of which a long list is cut."""
    silent = [NodeAnswer[UsageReport](f"n{number}", None, "timed out") for number in range(9)]
    assert list(silent_nodes([*silent[:2], GOOD])) == ["n0, n1: timed out"]
    assert list(silent_nodes(silent)) == ["n0, n1, n2, n3, n4 and 4 more: timed out"]
    assert report_silence(silent) == 1
    assert report_silence([*silent, GOOD]) == 0
    assert report_silence([]) == 0


def test_daemons_of_several_namespaces_are_refused() -> None:
    """One line names the namespaces and the option; none is preferred by its name or order."""
    with pytest.raises(MetagpuError, match=rf"{SYSTEM}, {EVIL} .*--agent-namespace"):
        choose_agents([pod("agent"), pod("forged", EVIL)])


def forge(live_cluster: Cluster, **changes: Any) -> None:  # noqa: ANN401 - any field
    """Add a tenant's pod with label, account and port of a daemon."""
    store, forged = live_cluster.scene.server.store, pod("forged", EVIL, **changes)
    port = {"name": "status-api", "containerPort": 9}  # nobody listens there
    store.put(("serviceaccounts", EVIL, VIEWER), {"metadata": {}})
    content = {
        **forged,
        "metadata": {**forged["metadata"], "labels": AGENT},
        "spec": {**forged["spec"], "containers": [{"name": "metagpu", "ports": [port]}]},
        "status": {**forged["status"], "podIP": "127.0.0.1"},
    }
    store.put(("pods", EVIL, "forged"), content)


async def test_a_tenant_forges_no_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenant's labelled pod is not asked; with root's rights its namespace has to be chosen."""
    async with cluster(tmp_path, capsys) as live_cluster:
        forge(live_cluster, volumes=[])
        nodes = await live_cluster.json("get", "nodes")
        assert [(row["node"], row["held"]) for row in nodes["items"]] == [(NODE, {METAGPU: 3})]
        status, out, _ = await live_cluster.run("drain-gpu", f"{NODE}/0", "--dry-run")
        assert (status, "alice" in out) == (0, True)
        asked = [each.target for each in live_cluster.scene.server.requests]
        assert not [target for target in asked if EVIL in target]

        forge(live_cluster)
        status, _, err = await live_cluster.run("get", "nodes")
        assert (status, f"{SYSTEM}, {EVIL} have" in err, err.count("\n")) == (1, True, 1)
        status, out, _ = await live_cluster.run(
            "get", "nodes", "--agent-namespace", SYSTEM, "-o", "json"
        )
        assert (status, len(json.loads(out)["items"])) == (0, 1)
        status, _, err = await live_cluster.run("drain-gpu", f"{NODE}/0", "--yes")
        assert (status, "--agent-namespace" in err) == (1, True)

        live_cluster.scene.server.store.delete(("pods", SYSTEM, "agent"))
        forge(live_cluster, volumes=[])
        status, _, err = await live_cluster.run("get", "nodes")
        assert (status, "metagpu is not installed in this cluster" in err) == (1, True)


async def test_a_namespace_without_a_token_costs_its_nodes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nodes whose daemons no viewer may ask have the reason as their problem."""
    async with cluster(tmp_path, capsys) as live_cluster:
        live_cluster.add_pod("small", 1)
        live_cluster.scene.server.denied.append(("POST", "serviceaccounts"))
        status, out, _ = await live_cluster.run("get", "nodes", "-o", "json")
        [silent] = json.loads(out)["unanswered"]
        assert (status, silent["node"]) == (1, NODE)
        assert "ask for the roles metagpu-viewer" in silent["problem"]
        status, out, _ = await live_cluster.run("why", "small")
        assert (status, "its daemon gives no status" in out, "ask for the roles" in out) == (
            1,
            True,
            True,
        )


NODES = 500
SILENT = 3
DEADLINE = 90.0


def yard() -> float:
    """Return the processor time of a piece of work, by which a slow machine is known."""
    began = time.process_time()
    sum(number * number for number in range(5_000_000))
    return time.process_time() - began


async def read_reports(tmp_path: Path) -> Mapping[str, Any]:
    """Return the reports of a real agent by their paths, its two GPUs four times in each."""
    await anyio.Path(tmp_path).mkdir()
    async with serving(tmp_path) as scene:
        await scene.node.kubelet.admit(SimPod.single("alice", {METAGPU: 3}))
        await scene.node.wait_holders()
        found: dict[str, Any] = {
            path: await scene.get(f"/{path}", scene.token()) for path in (STATUS.path, USAGE.path)
        }
    return {path: {**report, "gpus": 4 * report["gpus"]} for path, report in found.items()}


@asynccontextmanager
async def daemons(
    server: SimApiServer, reports: Mapping[str, Any], *, silent: int
) -> AsyncIterator[anyio.Event]:
    """Serve the reports of 500 nodes, each at an address of its own.

    A node answers once as many as the viewer asks at a time have been asked: asked one by one, the
    nodes would answer nothing. Some are silent until the yielded event is set.
    """
    crowd, ended, waiting = anyio.Event(), anyio.Event(), 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal waiting
        address = request.transport.get_extra_info("sockname")[0] if request.transport else ""
        _, _, high, low = (int(part) for part in address.split("."))
        if (number := high * 250 + low - 1) < silent:
            await ended.wait()
        waiting += 1
        if waiting >= AT_ONCE - silent:
            crowd.set()
        await crowd.wait()
        report = reports[request.path.removeprefix("/")]
        gpus = [{**value, "uuid": f"GPU-{number}-{n}"} for n, value in enumerate(report["gpus"])]
        return web.json_response({**report, "gpus": gpus})

    app = web.Application()
    app.router.add_get(f"/{USAGE.path}", answer)
    app.router.add_get(f"/{STATUS.path}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "0.0.0.0", 0)  # noqa: S104 - all of 127.0.0.0/8
    await site.start()
    port = {"name": "status-api", "containerPort": runner.addresses[0][1]}
    server.store.put(("serviceaccounts", "kube-system", VIEWER), {"metadata": {}})
    for number in range(NODES):
        pod = {
            "metadata": {"labels": AGENT, "ownerReferences": [DAEMON_OWNER]},
            "spec": {
                "nodeName": f"node-{number:03}",
                "containers": [{"ports": [port]}],
                "volumes": DAEMON_VOLUMES,
            },
            "status": {"podIP": f"127.0.{number // 250}.{number % 250 + 1}"},
        }
        server.store.put(("pods", "kube-system", f"metagpu-{number}"), pod)
    try:
        yield ended
    finally:
        await runner.cleanup()


async def test_500_nodes_are_asked_in_parallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view has both reports of all nodes, but for those that are silent: a line for each."""
    monkeypatch.setattr(client_module, "REQUEST_TIMEOUT", 2 * DEADLINE)
    server, steps = SimApiServer(), []
    reports = await read_reports(tmp_path / "agent")
    async with (
        daemons(server, reports, silent=SILENT) as ended,
        client_of(server, tmp_path) as client,
    ):

        def progress(done: int, of: int) -> None:
            steps.append((done, of))
            if len(steps) == 2 * (NODES - SILENT):
                skip(DEADLINE)

        view = ClusterView(ClusterViewer(client, deadline=DEADLINE, progress=progress))
        before, began = yard(), time.process_time()
        shown = await view.read()
        took = time.process_time() - began
        # Of this process, with all servers in it: 8 yards as measured, of the slower moment.
        assert took < 20 * max(before, yard())
        ended.set()
        await anyio.wait_all_tasks_blocked()

    silent = [node for node in shown["nodes"] if node["status"] is None and node["usage"] is None]
    assert [document["name"] for document in silent] == ["node-000", "node-001", "node-002"]
    problems = [document["problem"] for document in silent]
    assert all("no answer within 90 s" in problem or "reached" in problem for problem in problems)
    assert all(node["status"] and node["usage"] for node in shown["nodes"][SILENT:])
    answers = [
        NodeAnswer(node["name"], read_report(node["usage"], UsageReport))
        for node in shown["nodes"][SILENT:]
    ]
    assert len(read_rows("nodes", answers)[0]) == NODES - SILENT
    assert len(read_rows("gpus", answers)[0]) == (NODES - SILENT) * 8
    assert sorted(steps) == sorted(2 * [(n, NODES) for n in range(1, NODES + 1)])
    tokens = [request for request in server.requests if request.target.endswith("/token")]
    assert len(tokens) == 1


def test_progress_is_shown_once_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow answers are counted on a terminal, in the first round alone, and the line goes."""
    terminal = TtyText()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(viewer, "_SHOW_AFTER", 0.0)
    progress = viewer.Progress()
    for _ in range(2):
        for done in (1, 2, 3):
            progress(done, 3)
    assert terminal.getvalue() == f"\rasked 1 of 3 nodes\rasked 2 of 3 nodes\r{' ' * 18}\r"


A, B = (AgentPod(node, "kube-system", node, 1, ready=True) for node in "ab")
REPORT = complete({}, UsageReport)


class SlowViewer:
    """A viewer for which `b` gives no answer, and later answers once it is `released`."""

    def __init__(self) -> None:
        self.deadline = 5.0
        self.asked: list[str] = []
        self.released = anyio.Event()
        self.error: ClusterError | None = None

    async def ask(
        self, _: str, agents: Iterable[AgentPod], deadline: float | None = None
    ) -> Sequence[NodeAnswer[UsageReport]]:
        """Answer for `a` at once; a question with a deadline waits for `b`."""
        found: list[NodeAnswer[UsageReport]] = []
        for agent in agents:
            self.asked.append(agent.node)
            if agent is B and deadline is None:
                found.append(NodeAnswer("b", problem="no answer within 5 s"))
                continue
            if agent is B:
                await self.released.wait()
                if self.error:
                    raise self.error
            found.append(NodeAnswer(agent.node, REPORT))
        return found


async def test_a_silent_node_delays_the_first_look_alone() -> None:
    """The node is asked once at a time, and its row returns once it has answered."""
    viewer: Any = SlowViewer()
    questions = RepeatedQuestions(viewer)
    silent = NodeAnswer[UsageReport]("b", problem="no answer within 5 s")
    with anyio.fail_after(20):
        for _ in range(3):
            assert await questions.ask([A, B]) == [NodeAnswer("a", REPORT), silent]
            await anyio.wait_all_tasks_blocked()
        assert viewer.asked.count("b") == 2
        viewer.released.set()
        await anyio.wait_all_tasks_blocked()
        for _ in range(2):
            found = await questions.ask([A, B])
            assert found[0] == NodeAnswer("a", REPORT)
            assert found[1].node == "b"
        assert viewer.asked.count("b") == 3  # after the answer, as every other node


async def test_an_error_of_a_later_question_is_the_nodes() -> None:
    """A question in the background ends no look, and nodes that have gone are forgotten."""
    viewer: Any = SlowViewer()
    questions = RepeatedQuestions(viewer)
    viewer.error = ClusterError("away", message="away")
    viewer.released.set()
    with anyio.fail_after(20):
        for _ in range(2):
            await questions.ask([A, B])
            await anyio.wait_all_tasks_blocked()
        assert (await questions.ask([A, B]))[1] == NodeAnswer("b", problem="away")
        assert await questions.ask([A]) == [NodeAnswer("a", REPORT)]
