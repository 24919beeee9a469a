"""The page of a whole agent: what a browser is sent when pods come and GPUs fail."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from metagpu.agent.agent import Agent
from metagpu.agent.config_source import ConfigSource
from metagpu.cli.arguments import parser
from metagpu.cli.options import resolve_environment, web_of
from metagpu.core.config.errors import ConfigError
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.plugins.http.address import ListenAddress
from metagpu.plugins.web.node import NodeWeb
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimPod
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.plugins.http.rig import exchanged
from tests.rigs.agent import METAGPU, Scene, agent_at_work
from tests.rigs.waiting import until

HOST = "Host: localhost\r\n"


async def web_of_agent(scene: Scene) -> NodeWeb:
    """Return the agent's page once it is served."""
    web = scene.agent.web
    assert web is not None

    async def listens() -> bool:
        return web.server.port != 0

    await until(listens, deadline=30)
    return web


async def view_at(port: int) -> dict[str, Any]:
    """Return the view."""
    answer = await exchanged(port, f"GET /api/v1/view HTTP/1.1\r\n{HOST}\r\n".encode())
    assert answer.status == 200
    view: dict[str, Any] = msgspec.json.decode(answer.body)
    return view


async def test_a_grant_is_in_the_stream(tmp_path: Path) -> None:
    """A browser hears of a grant and of a fault, and the view that it then reads has them."""
    loopback = ListenAddress("127.0.0.1", 0)
    async with agent_at_work(tmp_path, web_address=loopback) as scene:
        await scene.until(20, 20)
        port = (await web_of_agent(scene)).server.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /api/v1/changes HTTP/1.1\r\n{HOST}\r\n".encode())
        await reader.readuntil(b"event: change\n")

        async def view_after_a_change(shows: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            with anyio.fail_after(30):
                while True:
                    await reader.readuntil(b"event: change\n")
                    view = await view_at(port)
                    if shows(view["nodes"][0]):
                        return view

        await scene.kubelet.admit(SimPod.single("alice", {METAGPU: 3}))
        alice = ["default/alice (main)"]
        view = await view_after_a_change(
            lambda node: (
                [lease["holder"] for lease in node["status"]["leases"]] == alice
                and node["usage"] is not None  # a busy machine may not have read it yet
                and len(node["usage"]["containers"]) == 1
            )
        )
        [lease] = view["nodes"][0]["status"]["leases"]
        assert (view["kind"], view["waiting"]) == ("node", [])
        assert lease["part"] == 0.3
        [container] = view["nodes"][0]["usage"]["containers"]
        assert (container["pod"], container["gpus"][0]["shares"]) == ("alice", 3)

        scene.node.raise_xid(scene.node.gpu(str(lease["gpu"])), 79)
        await view_after_a_change(lambda node: not node["status"]["gpus"][lease["gpu"]]["healthy"])

        async def reported() -> bool:
            reasons = {event["reason"] for event in (await view_at(port))["events"]}
            return reasons >= {"GPUUnhealthy", "GPUSharesGranted"}

        await until(reported, deadline=30)
        writer.close()


async def test_others_need_a_viewers_token(tmp_path: Path) -> None:
    """Beyond the loopback a viewer's token is needed, which the API server reviews."""
    server = SimApiServer()
    server.add_node("gpu-1")
    async with server.running():
        settings = ClusterSettings(
            "gpu-1", server.kubeconfig(tmp_path), features=frozenset({Feature.CORDON})
        )
        async with agent_at_work(
            tmp_path, cluster_settings=settings, web_address=ListenAddress("", 0)
        ) as scene:
            port = (await web_of_agent(scene)).server.port
            request = f"GET /api/v1/view HTTP/1.1\r\n{HOST}".encode()
            token = server.tokens.issue("kube-system", "metagpu-viewer", ["metagpu.io/status"])

            async def statuses() -> list[int]:
                return [
                    (await exchanged(port, request + more + b"\r\n")).status
                    for more in (b"", f"Metagpu-Token: {token}\r\n".encode())
                ]

            async def connected() -> bool:
                return (await statuses())[1] != 503

            await until(connected, deadline=30)
            assert await statuses() == [403, 200]


@pytest.mark.parametrize(
    ("line", "variables", "address"),
    [
        ("run", {}, None),
        ("run --web", {}, "127.0.0.1:9450"),
        ("run --web [::1]:80", {}, "[::1]:80"),
        ("run", {"METAGPU_WEB": "localhost:1"}, "127.0.0.1:1"),
    ],
)
def test_the_page_is_served_where_it_is_wanted(
    line: str, variables: dict[str, str], address: str | None
) -> None:
    """The option alone means a port of the loopback; without it nothing is served."""
    args = parser().parse_args(line.split())
    resolve_environment(args, variables)
    found = web_of(args, None)
    assert (None if found is None else str(found)) == address

    settings = ClusterSettings("n", None, features=frozenset(Feature))
    driver = NvmlDriver(SimLibrary(build_node("t4:1")))
    web = Agent(ConfigSource(()), driver, cluster_settings=settings, web_address=found).web
    assert (web is None) == (address is None)
    assert web is None or web.server._tokens is None  # also where an API server could review them


@pytest.mark.parametrize("address", [":9450", "0.0.0.0:9450", "10.0.0.7:9450", "[::]:9450"])
def test_a_page_for_others_needs_an_api_server(address: str) -> None:
    """Without an API server nobody could review tokens: the option says what to give."""
    args = parser().parse_args(["run", "--web", address])
    resolve_environment(args, {})
    with pytest.raises(ConfigError, match=r"--web: others reach .* also --node-name"):
        web_of(args, None)
    assert web_of(args, ClusterSettings("n", None, features=frozenset(Feature))) is not None
