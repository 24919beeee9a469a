"""A cluster of 500 nodes: real HTTP through a simulated API server to 500 pods."""

import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web

from metagpu.kubectl import viewer
from metagpu.kubectl.cluster_view import ClusterView
from metagpu.kubectl.items import gpu_items, node_items
from metagpu.kubectl.viewer import AT_ONCE, STATUS, USAGE, ClusterViewer, NodeAnswer
from metagpu.plugins.cluster import client as client_module
from metagpu.plugins.cluster.settings import VIEWER
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimPod
from tests.agent.test_status_api import serving
from tests.cli.test_mgctl import TtyText
from tests.kubectl.test_program import AGENT, DAEMON_OWNER, DAEMON_VOLUMES
from tests.plugins.cluster.rig import client_of
from tests.rigs.agent import METAGPU
from tests.rigs.waiting import skip

NODES = 500
SILENT = 3
DEADLINE = 90.0


async def read_reports(tmp_path: Path) -> Mapping[str, Any]:
    """Return the reports of a real agent by their paths, its two GPUs four times in each."""
    await anyio.Path(tmp_path).mkdir()
    async with serving(tmp_path) as scene:
        await scene.it.kubelet.admit(SimPod.single("alice", {METAGPU: 3}))
        await scene.it.wait_holders()
        found: dict[str, Any] = {
            path: await scene.get(f"/{path}", scene.token()) for path in (STATUS, USAGE)
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
        gpus = [{**it, "uuid": f"GPU-{number}-{n}"} for n, it in enumerate(report["gpus"])]
        return web.json_response({**report, "gpus": gpus})

    app = web.Application()
    app.router.add_get(f"/{USAGE}", answer)
    app.router.add_get(f"/{STATUS}", answer)
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
        began = time.process_time()
        shown = await view.read()
        assert time.process_time() - began < 5.0  # of this process, with all servers in it
        ended.set()
        await anyio.wait_all_tasks_blocked()

    silent = [it for it in shown["nodes"] if it["status"] is None and it["usage"] is None]
    assert [it["name"] for it in silent] == ["node-000", "node-001", "node-002"]
    problems = [it["problem"] for it in silent]
    assert all("no answer within 90 s" in it or "reached" in it for it in problems)
    assert all(it["status"] and it["usage"] for it in shown["nodes"][SILENT:])
    answers = [NodeAnswer(it["name"], it["usage"]) for it in shown["nodes"]]
    assert len(list(node_items(answers))) == NODES - SILENT
    assert len(list(gpu_items(answers))) == (NODES - SILENT) * 8
    assert sorted(steps) == sorted(2 * [(n, NODES) for n in range(1, NODES + 1)])
    tokens = [it for it in server.requests if it.target.endswith("/token")]
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
