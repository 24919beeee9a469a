"""Updates of the page: their changes in the document, and the time from a grant to its cut."""

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from metagpu.sim.kubelet.kubelet import SimPod
from tests.rigs.agent import METAGPU
from tests.web import views
from tests.web.browser import opened, served
from tests.web.test_page import SOON_MS, free_port, page_of_agent

if TYPE_CHECKING:
    from playwright.async_api import Browser

GRANTS = 7
WITHIN = 1.0
"""Seconds, as docs/web.md promises; half of the grants show in a tenth on a busy machine."""
UNCHANGED = 5
OF_ONE_POD = 40
"""Changes of the document when one pod ends: its cut, what is free, and sums; 20 as measured."""

WATCH_CUTS = """() => {
    window.cuts = [];
    new MutationObserver((records) => {
        for (const it of records) for (const made of it.addedNodes)
            if (made.querySelector?.('button.cut'))
                window.cuts.push((performance.timeOrigin + performance.now()) / 1000);
    }).observe(document.body, { childList: true, subtree: true });
}"""
WATCH_CHANGES = """() => {
    window.changes = [];
    const all = { childList: true, subtree: true, attributes: true, characterData: true };
    new MutationObserver((records) => {
        for (const it of records) window.changes.push(
            `${it.type} ${it.attributeName ?? ''} of ${it.target.nodeName} ${it.target.className}`);
    }).observe(document.body, all);
}"""


async def test_a_grant_shows_within_a_second(browser: "Browser", tmp_path: Path) -> None:
    """From the admission of a pod to its cut in the document: a second, of half of all grants."""
    port, taken = free_port(), list[float]()
    async with page_of_agent(tmp_path, port) as scene, opened(browser, port) as tab:
        await tab.live()
        await tab.run(WATCH_CUTS)
        for number in range(GRANTS):
            await anyio.sleep(1)  # the last grant's name has come, and is reported
            began = time.time()
            await scene.kubelet.admit(SimPod.single(f"pod-{number}", {METAGPU: 1}))
            cut = tab.page.get_by_role("button", name=f"default/pod-{number} (main)")
            await cut.wait_for(timeout=SOON_MS)
            cuts = await tab.run("() => window.cuts")
            taken.append(min(at for at in cuts if at >= began) - began)
    assert statistics.median(taken) < WITHIN, taken


def crowd(*, without: str = "") -> Any:  # noqa: ANN401 - JSON
    """Return the view of 16 GPUs with 1000 shares and 60 pods each, without one pod."""
    node = views.NodeView("crowded")
    for index in range(16):
        names = [f"team-{k % 7}/pod-{index}-{k}" for k in range(60)]
        held = [(name, METAGPU, 16, 0.6) for name in names if name != without]
        node.gpu(views.A100, held, offers={METAGPU: 1000})
    return views.view("node", [node.as_node()])


async def test_an_update_changes_no_more_than_is_new(browser: "Browser") -> None:
    """Of 960 pods one ends: its cut, what is free and sums change; before, nothing changes."""
    ended = "team-3/pod-3-59"
    async with served(crowd()) as server, opened(browser, server.server.port) as tab:
        await tab.live()
        cuts = tab.page.locator("#gpu-3 button.cut")
        assert await cuts.count() == 60
        await tab.run(WATCH_CHANGES)
        for _ in range(UNCHANGED):
            async with tab.page.expect_response("**/api/v1/view", timeout=SOON_MS):
                server.change()
        server.view = crowd(without=ended)
        server.change()
        await tab.page.wait_for_function(
            "() => document.querySelectorAll('#gpu-3 button.cut').length === 59", timeout=SOON_MS
        )
        changes = await tab.run("() => window.changes")
        assert await cuts.count() == 59
    assert 0 < len(changes) <= OF_ONE_POD, changes
