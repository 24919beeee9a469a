"""All tests of the page run in Chromium: `make e2e` alone starts it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.e2e.rig.errors import RigError
from tests.web.browser import chromium
from tests.web.programs import provide_axe

if TYPE_CHECKING:
    from playwright.async_api import Browser

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here, before pytest selects by mark; one loop has one browser."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator["Browser"]:
    """Run one Chromium for all tests."""
    async with chromium() as live_browser:
        yield live_browser


@pytest.fixture(scope="session")
def axe() -> str:
    """Return the script of axe-core; skip where it cannot be had."""
    try:
        return provide_axe()
    except RigError as error:
        pytest.skip(f"without axe-core: {error}")
