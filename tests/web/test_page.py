"""The page in Chromium, served by a real agent on simulated GPUs."""

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import to_thread

from metagpu.plugins import web
from metagpu.plugins.http.address import ListenAddress
from metagpu.sim.kubelet.kubelet import SimPod
from metagpu.sim.machine.node import SimNode
from tests.agent.test_status_api import NODE
from tests.kubectl.test_program import cluster
from tests.kubectl.test_web import page
from tests.rigs.agent import METAGPU, QUICK, Scene, agent_at_work
from tests.rigs.mig import a_node, mig_pool
from tests.rigs.waiting import becomes
from tests.web import views
from tests.web.browser import opened

if TYPE_CHECKING:
    from playwright.async_api import Browser

MIG = "nvidia.com/mig-2g.10gb"
LARGEST_PAGE = 100_000
SOON_MS = 30_000
REPORTED_MS = 4_000
"""The page itself asks after 5 s: what shows before then was reported to it."""
FILES = files(web) / "assets"
SHOWN = """() => {
  Object.defineProperty(document, 'visibilityState', { value: 'STATE', configurable: true });
  document.dispatchEvent(new Event('visibilitychange'));
}"""


def free_port() -> int:
    """Return a port of the loopback that nothing uses."""
    with socket.create_server(("127.0.0.1", 0)) as live_socket:
        return int(live_socket.getsockname()[1])


@asynccontextmanager
async def page_of_agent(
    tmp_path: Path, port: int, gpus: str | SimNode = "a100-40gb:2", config: str = QUICK
) -> AsyncIterator[Scene]:
    """Run an agent that serves the page at a port."""
    address = ListenAddress("127.0.0.1", port)
    async with agent_at_work(tmp_path, gpus, config, web_address=address) as scene:
        if config == QUICK:
            await scene.until(20, 20)
        await becomes(lambda: scene.agent.web and scene.agent.web.server.port)
        yield scene


async def test_a_grant_shows_at_once(browser: "Browser", tmp_path: Path) -> None:
    """An open page draws a pod's cut, and its name once the kubelet lists it."""
    port = free_port()
    async with page_of_agent(tmp_path, port) as scene, opened(browser, port) as tab:
        await tab.live()
        assert await tab.page.title() == f"{await tab.page.inner_text('h1')} - metagpu"
        assert await tab.page.locator(".gpu").count() == 2
        assert await tab.page.locator("button.cut").count() == 0

        await scene.kubelet.admit(SimPod.single("train", {METAGPU: 6}))
        await tab.page.wait_for_selector("button.cut", timeout=REPORTED_MS)
        cut = tab.page.get_by_role("button", name="default/train (main): 6 of 10 metagpu")
        await cut.wait_for(timeout=SOON_MS)
        assert await tab.page.inner_text("#pods th .pod") == "default/train"

        served = await tab.run("() => fetch('/api/v1/view').then((it) => it.json())")
        [real], [made] = served["nodes"], views.node_view()["nodes"]
        for key in ("status", "usage"):
            assert made[key].keys() <= real[key].keys(), key
            assert made[key]["gpus"][0].keys() <= real[key]["gpus"][0].keys(), key
        assert made["status"]["leases"][0].keys() - real["status"]["leases"][0].keys() <= {
            *("podUid", "podOwner", "podPhase")  # of the API server, which is not here
        }


async def test_a_fault_shows_with_its_reason(browser: "Browser", tmp_path: Path) -> None:
    """A fault is in the list of what needs attention, and on its GPU with its time."""
    port = free_port()
    async with page_of_agent(tmp_path, port) as scene, opened(browser, port) as tab:
        await tab.live()
        assert not await tab.page.is_visible("#attention")
        scene.node.raise_xid(scene.node.gpu("1"), 79)
        row = tab.page.locator("#problems li", has_text="XID 79")
        await row.wait_for(timeout=SOON_MS)
        assert "since" in await row.inner_text()
        gpu = tab.page.locator("#gpu-1")
        assert await gpu.get_attribute("data-level") == "error"
        assert "out of service" in await gpu.inner_text()
        assert "10 not available" in await gpu.locator(".bar").inner_text()
        assert "XID 79" in (await tab.page.text_content("#news") or "")  # read out by readers


async def test_the_page_survives_a_restart(browser: "Browser", tmp_path: Path) -> None:
    """Without a daemon the page says since when, keeps what it knows, and follows the next one."""
    port = free_port()
    async with AsyncExitStack() as kept:
        async with page_of_agent(tmp_path, port):
            tab = await kept.enter_async_context(opened(browser, port, quiet=False))
            await tab.live()
        lost = tab.page.locator("#connection[data-state=lost]")
        await lost.wait_for(timeout=SOON_MS)
        assert (await lost.inner_text()).startswith("no connection since ")
        assert await tab.page.locator(".gpu").count() == 2
        await tab.run("() => { window.same = true }")

        async with page_of_agent(tmp_path, port) as scene:
            await tab.live()
            await scene.kubelet.admit(SimPod.single("late", {METAGPU: 3}))
            await tab.page.wait_for_selector("button.cut", timeout=SOON_MS)
        assert await tab.run("() => window.same")
        assert {text for text in tab.complaints if "ERR_" not in text} == set()


async def test_a_mig_device_is_drawn_where_it_lies(browser: "Browser", tmp_path: Path) -> None:
    """An instance that a pod made the agent create stands on its slices, under the pod's name."""
    port, node = free_port(), await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    config = mig_pool("profiles: [1g.5gb, 2g.10gb], keepWarm: 1h")
    async with (
        page_of_agent(tmp_path, port, node, config) as scene,
        opened(browser, port) as tab,
    ):
        await scene.until(3, 3, MIG)
        await tab.live()
        assert await tab.page.locator(".slices .slot").count() == 8
        await scene.kubelet.admit(SimPod.single("tuner", {MIG: 1}))
        cut = tab.page.get_by_role("button", name="2g.10gb tuner: default/tuner (main), MIG device")
        await cut.wait_for(timeout=SOON_MS)
        [device] = scene.agent.registry.snapshot.gpus.values()
        [slot] = [share.partition("::")[2] for share in device.leases]
        assert (await cut.get_attribute("aria-label") or "").endswith(slot)
        style = (
            "(it) => [it.style.getPropertyValue('--start'), it.style.getPropertyValue('--size')]"
        )
        place = await cut.locator("xpath=..").evaluate(style)
        assert place == [str(int(slot.partition("@")[2]) + 1), "2"]
        assert await tab.page.locator(".slices .slot").count() == 6


async def test_the_cluster_of_real_daemons(
    browser: "Browser", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page of `kubectl metagpu web` has nodes, faults, and what waits and why."""
    async with (
        cluster(tmp_path, capsys) as live_cluster,
        page(live_cluster, "--interval", "0.5s") as port,
        opened(browser, port) as shown,
    ):
        await shown.live()
        assert await shown.page.locator("#nodes h3").all_inner_texts() == [NODE]
        assert "largest 17 of 17 free" in await shown.page.inner_text("#nodes")
        live_cluster.add_pod("large", 21)
        row = shown.page.locator("#waiting tr", has_text="default/large")
        await row.wait_for(timeout=SOON_MS)
        assert "too large" in await row.inner_text()
        live_cluster.scene.node.node.raise_xid(live_cluster.scene.node.node.gpu(1), 79)
        problem = shown.page.locator("#problems li", has_text="XID 79")
        await problem.wait_for(timeout=SOON_MS)
        await problem.locator("a").click()
        await shown.page.locator("h1", has_text=f"Node {NODE}").wait_for(timeout=SOON_MS)
        assert await shown.page.locator("button.cut").count() == 1


async def test_the_page_is_small_and_alone(browser: "Browser", tmp_path: Path) -> None:
    """All files are under 100 KB, and nothing is asked of another origin."""
    port = free_port()
    async with page_of_agent(tmp_path, port), opened(browser, port) as tab:
        await tab.live()
        script = "() => performance.getEntriesByType('resource').map((it) => it.name)"
        origins = {name.split("/")[2] for name in await tab.run(script)}
        assert origins == {f"127.0.0.1:{port}"}
    bodies = [await to_thread.run_sync(file.read_bytes) for file in FILES.iterdir()]
    assert sum(map(len, bodies)) < LARGEST_PAGE


async def test_a_tab_that_nobody_sees_lets_go(browser: "Browser", tmp_path: Path) -> None:
    """After a minute in the background the page follows nothing; seen again, it has all."""
    port = free_port()
    async with page_of_agent(tmp_path, port) as scene, opened(browser, port) as tab:
        await tab.live()
        await tab.page.clock.install()
        await tab.run(SHOWN.replace("STATE", "hidden"))
        await tab.page.clock.fast_forward("01:01")
        lost = tab.page.locator("#connection[data-state=lost]")
        await lost.wait_for(timeout=SOON_MS)
        await scene.kubelet.admit(SimPod.single("alice", {METAGPU: 3}))
        assert await tab.page.locator("button.cut").count() == 0
        await tab.run(SHOWN.replace("STATE", "visible"))
        await tab.live()
        await tab.page.locator("button.cut").wait_for(timeout=SOON_MS)


async def test_an_idle_page_costs_a_request_in_seconds(browser: "Browser", tmp_path: Path) -> None:
    """Without a change the page asks only for the memory in use, every few seconds."""
    port = free_port()
    async with page_of_agent(tmp_path, port), opened(browser, port) as tab:
        await tab.live()
        asked: list[str] = []
        tab.page.on("request", lambda request: asked.append(request.url))
        await anyio.sleep(2)
        assert len(asked) <= 1, asked
