"""A page in Chromium, and what it complained about."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from metagpu.plugins.http.address import HttpTiming, ListenAddress
from metagpu.plugins.web.server import WebServer
from tests.e2e.rig.errors import RigError
from tests.rigs.waiting import becomes
from tests.web.programs import provide_chromium

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

LOOPBACK = ListenAddress("127.0.0.1", 0)
DESKTOP = (1280, 800)
PHONE = (390, 844)
AXE_REPORT = """async () => (await axe.run()).violations.map(
    (it) => [it.id, it.nodes.length, it.nodes[0].html, it.nodes[0].failureSummary].join(" | "))"""
"""Runs axe-core, once its script is in the page."""


@asynccontextmanager
async def chromium() -> AsyncIterator["Browser"]:
    """Run Chromium while the block lasts; skip the test where there is none."""
    playwright = pytest.importorskip("playwright.async_api")
    try:
        found = provide_chromium()
    except RigError as error:
        pytest.skip(str(error))
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=found.program, env=found.environment)
        try:
            yield browser
        finally:
            await browser.close()


class Opened:
    """A page of the server at a port.

    Attributes:
        page: playwright's own.
        complaints: lines of the console, errors of scripts, violations of the policy.
    """

    def __init__(self, page: "Page") -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda worker: self.complaints.append(worker.text))
        page.on("pageerror", lambda worker: self.complaints.append(str(worker)))
        page.on("dialog", lambda worker: self.complaints.append(f"dialog: {worker.message}"))

    async def live(self) -> None:
        """Wait until the page follows the server."""
        await self.page.wait_for_selector("#connection[data-state=live]", timeout=30_000)
        await self.frame()

    async def frame(self) -> None:
        """Wait until what the page knows is drawn."""
        await self.page.evaluate("() => new Promise((done) => setTimeout(done, 50))")

    async def run(self, script: str) -> Any:  # noqa: ANN401 - JSON
        """Return what a script of the page returns."""
        return await self.page.evaluate(script)


@asynccontextmanager
async def opened(
    browser: "Browser",
    port: int,
    *,
    scheme: str = "light",
    size: tuple[int, int] = DESKTOP,
    quiet: bool = True,
    **more: Any,  # noqa: ANN401 - playwright's
) -> AsyncIterator[Opened]:
    """Open the page; at the end, require that it complained about nothing.

    Args:
        browser: Chromium.
        port: the server's.
        scheme: `light` or `dark`.
        size: width and height of the screen.
        quiet: whether complaints fail the test.
        more: further settings of the browser's context.
    """
    viewport = {"width": size[0], "height": size[1]}
    context = await browser.new_context(
        color_scheme=scheme,  # type: ignore[arg-type,unused-ignore]
        viewport=viewport,  # type: ignore[arg-type,unused-ignore]
        timezone_id="UTC",
        **more,
    )
    try:
        tab = Opened(await context.new_page())
        await tab.page.goto(f"http://127.0.0.1:{port}/")
        yield tab
        if quiet:
            assert tab.complaints == []
    finally:
        await context.close()


class ServedView:
    """A server of the page with a view of the test's.

    Attributes:
        view: what the page draws after the next `change`.
    """

    def __init__(self, view: Mapping[str, Any]) -> None:
        self.view = view
        self._changed = anyio.Event()
        timing = HttpTiming(page_age=0.0)
        self.server = WebServer(LOOPBACK, self._read, self._changes, None, timing)

    async def _read(self) -> Mapping[str, Any]:
        return self.view

    async def _changes(self) -> AsyncGenerator[None, None]:
        while True:
            await self._changed.wait()
            yield None

    def change(self) -> None:
        """Report a change of the view."""
        self._changed.set()
        self._changed = anyio.Event()


@asynccontextmanager
async def served(view: Mapping[str, Any]) -> AsyncIterator[ServedView]:
    """Serve a view while the block lasts."""
    served_view = ServedView(view)
    async with anyio.create_task_group() as group:
        group.start_soon(served_view.server.run)
        await becomes(lambda: served_view.server.port)
        yield served_view
        group.cancel_scope.cancel()
