"""The part of kubernetes_asyncio that metagpu uses: addresses and credentials.

The library's own `__init__` modules import all 767 models: 33 MB of memory and a quarter of a
second, for classes that nobody here uses. Bare packages take their place; a release of the library
that does not load so is loaded whole. urllib3, which it imports for passwords, waits until then.
"""

# ruff: noqa: E402 - the bare packages come first

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, Final

_LIBRARY: Final = "kubernetes_asyncio"
_USED: Final = ("config", "config.exec_provider", "config.kube_config")


def _add_bare_package(name: str, *path: str) -> Any:  # noqa: ANN401 - any attribute can be set
    """Add a package whose `__init__` is not run; its modules can be imported."""
    package = ModuleType(name)
    package.__path__ = list(path)
    sys.modules[name] = package
    return package


@contextmanager
def _loaded_later(name: str) -> Iterator[None]:
    """Put a stand-in in a module's place: the first use of it loads the module."""
    if name in sys.modules:
        yield
        return
    stand_in = sys.modules[name] = ModuleType(name)

    def step_aside() -> None:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]

    def attribute_of(attribute: str) -> Any:  # noqa: ANN401 - any attribute of the module
        step_aside()
        return getattr(import_module(name), attribute)

    stand_in.__getattr__ = attribute_of  # type: ignore[method-assign] # as PEP 562 has it
    try:
        yield
    finally:
        step_aside()


def _load_without_models() -> None:
    """Import the library, with bare packages where its models would be imported.

    Raises:
        ImportError: this release of the library is made in another way, or it is not installed.
        AttributeError: the former.
    """
    found = PathFinder.find_spec(_LIBRARY)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"{_LIBRARY} is not installed")
    root = next(iter(found.submodule_search_locations))
    library = _add_bare_package(_LIBRARY, root)
    client = library.client = _add_bare_package(f"{_LIBRARY}.client", f"{root}/client")
    client.models = _add_bare_package(f"{_LIBRARY}.client.models")

    from kubernetes_asyncio.client.api_client import ApiClient  # noqa: PLC0415
    from kubernetes_asyncio.client.configuration import Configuration  # noqa: PLC0415

    client.ApiClient, client.Configuration = ApiClient, Configuration  # what `config` imports
    for module in _USED:
        import_module(f"{_LIBRARY}.{module}")


if _LIBRARY not in sys.modules:  # a program that has the whole library keeps it
    try:
        with _loaded_later("urllib3"):
            _load_without_models()
    except (ImportError, AttributeError):
        for _name in [it for it in sys.modules if it.partition(".")[0] == _LIBRARY]:
            del sys.modules[_name]

from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import ConfigException, load_incluster_config
from kubernetes_asyncio.config.exec_provider import ExecProvider
from kubernetes_asyncio.config.kube_config import ConfigNode, KubeConfigLoader, KubeConfigMerger

__all__ = [
    "ConfigException",
    "ConfigNode",
    "Configuration",
    "ExecProvider",
    "KubeConfigLoader",
    "KubeConfigMerger",
    "load_incluster_config",
]
