"""The page on the smallest phone and on a wall screen, and for who sees no bars."""

from typing import TYPE_CHECKING

import pytest

from tests.web import views
from tests.web.browser import AXE_REPORT, opened, served

if TYPE_CHECKING:
    from playwright.async_api import Browser

VIEWS = {"node": views.node_view, "cluster": views.cluster_view, "pod": views.pod_view}
TOO_WIDE = """() => [...document.querySelectorAll('main *')].filter((it) => {
    const { left, right, width } = it.getBoundingClientRect();
    return width > 1 && !it.closest('.scroll') && (left < -1 || right > innerWidth + 1);
}).map((it) => it.outerHTML.slice(0, 100))"""
"""Elements that reach over an edge of the screen; tables scroll within their frames."""
OF_MAIN = "() => document.querySelector('main').getBoundingClientRect().width / innerWidth"


@pytest.mark.parametrize("size", [(320, 568), (3840, 2160)], ids=["phone", "wall"])
@pytest.mark.parametrize("kind", VIEWS)
async def test_every_screen_fits(
    browser: "Browser", axe: str, kind: str, size: tuple[int, int]
) -> None:
    """Nothing reaches over an edge, and axe-core finds no violation at this size either."""
    async with (
        served(VIEWS[kind]()) as server,
        opened(browser, server.server.port, size=size, bypass_csp=True) as tab,
    ):
        await tab.live()
        assert await tab.run("() => document.documentElement.scrollWidth <= innerWidth")
        assert await tab.run(TOO_WIDE) == []
        assert await tab.run(OF_MAIN) > 0.9  # a wall screen is used as far as it goes
        await tab.run(axe)
        assert await tab.run(AXE_REPORT) == []


async def test_each_bar_of_the_cluster_has_its_text(browser: "Browser") -> None:
    """The picture of a GPU names each holder with its part, and what is free."""
    async with served(views.cluster_view()) as server, opened(browser, server.server.port) as tab:
        await tab.live()
        minis = tab.page.locator(".mini")
        texts = [await one.get_attribute("aria-label") or "" for one in await minis.all()]
    assert len(texts) > 20
    assert all(text.startswith("GPU ") for text in texts)
    for part in (
        "held by vision/train-resnet (main): 50 of 100 metagpu, lab/notebook-ana (main): 20 of",
        "lab/notebook-ben (main): 10 of 100 metagpu; 20 free; ",
    ):
        assert part in texts[0]
    assert "2g.20gb rerank: serve/rerank (main), MIG device 2g.20gb@4; 1g.10gb idle" in texts[1]
    assert "held by nobody; 100 free" in texts[7]


async def test_no_text_of_a_table_covers_another(browser: "Browser") -> None:
    """Large numbers and what is held back have their place beside the bars of resources."""
    covered = """() => [...document.querySelectorAll('td > *, td > * > *')].filter((it) => {
        const cell = it.closest('td').getBoundingClientRect(), own = it.getBoundingClientRect();
        return own.width > 1 && (own.right > cell.right + 1 || it.scrollWidth > it.clientWidth + 1);
    }).map((it) => it.outerHTML.slice(0, 100))"""
    for size in ((1000, 800), (1280, 800), (320, 568)):
        async with (
            served(views.cluster_view()) as server,
            opened(browser, server.server.port, size=size) as tab,
        ):
            await tab.live()
            assert await tab.run(covered) == []


async def test_a_long_name_hides_no_column(browser: "Browser") -> None:
    """A pod's name has 253 characters at most: what waits and why stays in view beside it."""
    name = "n" * 253
    view = views.cluster_view()
    long = {**view, "waiting": [{**value, "pod": name} for value in view["waiting"]]}
    for node in long["nodes"]:
        for lease in (node["status"] or {}).get("leases", ()):
            lease["holder"] = f"lab/{name} (main)"
    async with served(long) as server, opened(browser, server.server.port) as tab:
        await tab.live()
        for table in ("#waiting", "#pods"):
            assert name in await tab.page.inner_text(table)
            frame = tab.page.locator(".scroll", has=tab.page.locator(table))
            assert await frame.evaluate("(it) => it.scrollWidth <= it.clientWidth")
        width = "() => document.querySelector('#waiting td').getBoundingClientRect().width"
        assert await tab.run(width) > 300


async def test_a_long_resource_name_stays_in_its_row(browser: "Browser") -> None:
    """A resource's name has 63 characters behind the domain: its row is as wide as the others."""
    node = views.NodeView("gpu-1")
    node.gpu(views.A100, offers={f"example.com/{'n' * 63}": 100})
    nodes = [node.as_node(), views.busy_node("gpu-2").as_node()]
    for size in ((1280, 800), (320, 568)):
        async with (
            served(views.view("cluster", nodes)) as server,
            opened(browser, server.server.port, size=size) as tab,
        ):
            await tab.live()
            wider = """() => [...document.querySelectorAll('.node')].filter((row) =>
                [...row.querySelectorAll('.node-offers *')].some((part) =>
                    part.getBoundingClientRect().right > row.getBoundingClientRect().right
                )).length"""
            assert await tab.run(wider) == 0
            assert await tab.run("() => document.documentElement.scrollWidth <= innerWidth")
