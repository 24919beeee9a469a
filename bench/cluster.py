"""A simulated cluster for `kubectl metagpu`: an API server, and a daemon's report of each node."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from aiohttp import web
from anyio.from_thread import start_blocking_portal

from metagpu.kubectl.viewer import KUBELET_FOLDER, PORT, SELECTOR, USAGE
from metagpu.plugins.cluster.settings import VIEWER
from metagpu.sim.apiserver.server import SimApiServer

_NAMESPACE: Final = "kube-system"
_PER_NETWORK: Final = 250


@contextmanager
def serving(folder: Path, nodes: int, report: object) -> Iterator[Path]:
    """Serve a cluster whose nodes all give one report; yield a kubeconfig.

    The servers run in a thread: while a command is measured, nothing else runs in this process.
    """
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_serve(nodes, report)) as server,
    ):
        yield server.kubeconfig(folder)


@asynccontextmanager
async def _serve(nodes: int, report: object) -> AsyncIterator[SimApiServer]:
    async def usage(_: web.Request) -> web.StreamResponse:
        return web.json_response(report)

    app = web.Application()
    app.router.add_get(f"/{USAGE.path}", usage)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", 0).start()  # noqa: S104 - all of 127.0.0.0/8
        async with SimApiServer().running() as server:
            _fill(server, nodes, runner.addresses[0][1])
            yield server
    finally:
        await runner.cleanup()


def _fill(server: SimApiServer, nodes: int, port: int) -> None:
    """Add the pod of each node's daemon, with an address of its own."""
    label, _, name = SELECTOR.partition("=")
    ports = [{"name": PORT, "containerPort": port}]
    owner = {"kind": "DaemonSet", "name": "metagpu", "controller": True}
    volume = {"name": "kubelet", "hostPath": {"path": KUBELET_FOLDER}}
    server.store.put(("serviceaccounts", _NAMESPACE, VIEWER), {"metadata": {}})
    for number in range(nodes):
        network, host = divmod(number, _PER_NETWORK)
        pod = {
            "metadata": {"labels": {label: name}, "ownerReferences": [owner]},
            "spec": {
                "nodeName": f"node-{number:03}",
                "containers": [{"ports": ports}],
                "volumes": [volume],
            },
            "status": {"podIP": f"127.0.{network}.{host + 1}"},
        }
        server.store.put(("pods", _NAMESPACE, f"metagpu-{number}"), pod)
