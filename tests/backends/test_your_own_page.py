"""The backend on the page `docs/development/your-own-backend.md` works as the page shows it."""

import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

from metagpu.core.config.config import parse
from metagpu.core.contracts import backend as contract
from metagpu.core.contracts.backend import installed_backends
from metagpu.core.grants.injection import Injection
from metagpu.core.layout.layout import build_layout
from metagpu.testing.node import gpu

PAGE: Final = (
    Path(__file__).parents[2] / "docs" / "development" / "your-own-backend.md"
).read_text("utf-8")
BLOCKS: Final = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[str]:
    """Return the page's blocks of a kind."""
    return [text for found, text in BLOCKS if found == kind]


def module(name: str, text: str) -> ModuleType:
    """Execute a block as a module."""
    made = ModuleType(name)
    exec(compile(text, f"your-own-backend.md:{name}", "exec"), made.__dict__)  # noqa: S102 - our own page
    return made


@pytest.fixture
def tests_of_the_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the page's test module, with the page's backend installed."""
    code, tests = blocks("python")
    monkeypatch.setitem(sys.modules, "sizes", module("sizes", code))
    [project] = blocks("toml")
    group = tomllib.loads(project)["project"]["entry-points"]["metagpu.backends"]
    entries = [EntryPoint(name, value, "metagpu.backends") for name, value in group.items()]

    def entry_points(*, group: str) -> Iterable[EntryPoint]:
        assert group == "metagpu.backends"
        return entries

    monkeypatch.setattr(contract, "entry_points", entry_points)
    return module("test_sizes", tests)


def named_tests(owner: object) -> dict[str, Callable[[], None]]:
    """Return the tests of a module or of a suite, by name."""
    return {name: getattr(owner, name) for name in dir(owner) if name.startswith("test_")}


def test_the_backend_is_short() -> None:
    """A backend of one's own has at most 60 lines."""
    assert len(blocks("python")[0].splitlines()) <= 60


def test_the_contract_suite_accepts_the_backend(tests_of_the_page: ModuleType) -> None:
    """The page's backend passes every check of the suite."""
    suite = named_tests(tests_of_the_page.TestSizes())

    assert len(suite) > 10
    for check in suite.values():
        check()


def test_the_tests_of_the_page_pass(tests_of_the_page: ModuleType) -> None:
    """The page's own test of the backend holds."""
    own = named_tests(tests_of_the_page)

    assert own
    for check in own.values():
        check()


@pytest.mark.usefixtures("tests_of_the_page")
def test_the_pool_of_the_page_offers_its_sizes() -> None:
    """The configuration on the page offers 14 shares of a GPU under three names."""
    [pools] = blocks("yaml")
    config = parse(f"version: metagpu/v1\n{pools}", "page.yaml", installed_backends())
    layout = build_layout(config, [gpu(0)], Injection())

    assert list(layout.backends) == [
        f"example.com/gpu-{name}" for name in ("half", "quarter", "eighth")
    ]
    assert len(layout.shares) == 14
