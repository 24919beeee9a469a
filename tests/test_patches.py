"""Patches of libraries: all in one module, each seen with the version that is installed."""

import ast
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Final

import h2.connection
import pynvml
import pytest
from hyperframe.frame import Frame, PingFrame

from metagpu import patches

PACKAGE: Final = Path(__file__).parents[1] / "metagpu"
LISTED: Final = {
    *(name for names in patches.PRIVATE_NAMES.values() for name in names),
    *(place.partition(":")[2] for place in patches.PRIVATE_NAMES),
}


@pytest.mark.parametrize(("package", "seen"), patches.SEEN.items())
def test_patches_were_looked_at_with_the_installed_version(package: str, seen: str) -> None:
    """A new version of a patched library is a reason to read its patch again."""
    assert version(package) == seen, "read the patches of this package, then write its version"


@pytest.mark.parametrize(("place", "names"), patches.PRIVATE_NAMES.items())
def test_the_private_names_exist(place: str, names: tuple[str, ...]) -> None:
    """A library that renames what we use is noticed here, and not in a running daemon."""
    module, _, name = place.partition(":")
    found = getattr(import_module(module), name)

    text = "".join(
        inspect.getsource(value) for value in found.__mro__ if value.__module__ == module
    )
    assert [
        other for other in names if not hasattr(found, other) and f"self.{other}" not in text
    ] == []


def test_what_is_replaced_is_there() -> None:
    """Each patch replaces something that the library has, and that still does what it did."""
    assert isinstance(pynvml._nvmlGetFunctionPointer_cache, dict)
    assert "nvmlLib" in vars(pynvml)
    assert "def __repr__" in inspect.getsource(Frame)
    patches.lighten_http2()
    assert h2.connection.H2Connection.MAX_CLOSED_STREAMS == patches._CLOSED_STREAMS
    assert "MAX_CLOSED_STREAMS" in inspect.getsource(h2.connection.H2Connection.__init__)
    assert repr(PingFrame(0)).startswith("<hyperframe.frame.PingFrame object at")


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the package of each name that a module imports from elsewhere."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[(alias.asname or alias.name).partition(".")[0]] = alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = node.module.partition(".")[0]
    return {name: package for name, package in found.items() if package != "metagpu"}


def root_of(node: ast.expr) -> str:
    """Return the name at which a chain of attributes begins."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def patches_in(text: str) -> Iterator[str]:
    """Yield what a module changes in others' code, and their private names that it uses."""
    tree = ast.parse(text)
    foreign = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and foreign.keys() & {name.name for name in node.names}:
            yield from (name.name for name in node.names if _is_private(name.name))
        if not isinstance(node, ast.Attribute) or (root := root_of(node)) not in foreign:
            continue
        changed = isinstance(node.ctx, ast.Store | ast.Del)
        if changed or (_is_private(node.attr) and foreign[root] not in sys.stdlib_module_names):
            yield ast.unparse(node)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in LISTED


def test_no_other_module_patches_a_library() -> None:
    """Changes of a library, and private names of one, stand in one module."""
    modules = [file for file in PACKAGE.rglob("*.py") if file.name != "patches.py"]
    found = {
        str(module.relative_to(PACKAGE)): list(patches_in(module.read_text())) for module in modules
    }

    assert {place: names for place, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pynvml\npynvml.nvmlLib = None",
        "from rich.text import Text\nText.plain = ''",
        "import pynvml\npynvml._nvmlLibraryLoaded",
        "from grpclib.protocol import _Hidden",
        "from hyperframe.frame import Frame\ndel Frame.__repr__",
    ],
)
def test_a_patch_elsewhere_is_refused(text: str) -> None:
    """A planted patch is seen."""
    assert list(patches_in(text))
