"""Every change of another package's code, and every private name that is used.

Each stands beside the version that it was seen with. `tests/test_patches.py` fails where another
version is installed: look at the patch again, and write the new version here. Libraries are loaded
by the functions that patch them.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ssl import SSLContext

SEEN: Final[Mapping[str, str]] = {
    "aiohttp": "3.14.5",
    "grpclib": "0.4.9",
    "h2": "4.4.1",
    "hyperframe": "6.1.0",
    "kubernetes_asyncio": "36.1.0",
    "nvidia-ml-py": "13.615.71",
    "structlog": "26.1.0",
}
"""The version of each package that was looked at, for all that is below."""
PRIVATE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    # The end of a service waits for its calls, and knows those of one connection.
    "grpclib.server:Handler": ("_tasks", "_cancelled"),
    "grpclib.events:_DispatchServerEvents": (),
    "grpclib.config:Configuration": ("__for_server__",),
    # A connection that the server has ended is no error of grpclib's; a call on it would be.
    "grpclib.client:Channel": ("__connect__", "_connected"),
    # The simulated kubelet drops a connection as one that was killed does.
    "grpclib.protocol:Connection": ("_transport",),
    # The simulated library has NVML's own texts.
    "pynvml:NVMLError": ("_errcode_to_string",),
}
"""Names without a promise of their authors, by class; the other modules use them."""

_CLIENT: Final = "kubernetes_asyncio"
_CLIENT_PARTS: Final = ("config", "config.exec_provider", "config.kube_config")
_CLOSED_STREAMS: Final = 256


def use_nvml_library(library: object | None) -> None:
    """Make pynvml call this library, by the two globals in which pynvml keeps one.

    `nvmlInit` of pynvml knows one name of the library alone, and no folder.
    """
    import pynvml  # noqa: PLC0415 - as said above

    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - no public function clears it


def lighten_http2() -> None:
    """Spare h2 and hyperframe work for each call and each connection.

    h2 remembers 65,536 closed streams of a connection, 6 MB of them, to tell a late frame from a
    wrong one. The kubelet keeps one connection for months and makes one call after the other. And
    h2 describes every frame, all of its bytes in hexadecimal, for a log that it does not write.
    """
    from h2.connection import H2Connection  # noqa: PLC0415 - as said above
    from hyperframe.frame import Frame  # noqa: PLC0415 - as said above

    H2Connection.MAX_CLOSED_STREAMS = _CLOSED_STREAMS
    Frame.__repr__ = object.__repr__  # type: ignore[method-assign]


def load_structlog() -> None:
    """Load structlog without rich.

    structlog loads rich, where another package has installed it, for tracebacks that no log of ours
    draws: 50 ms of the daemon's start and 5 MB of its memory. A backend may load rich afterwards.
    """
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # Python's mark of a missing module
    try:
        import structlog as _  # noqa: F401, PLC0415
    finally:
        del sys.modules["rich"]


@contextmanager
def without_system_authorities() -> Iterator[None]:
    """Load libraries without the system's authorities.

    aiohttp reads them twice as it is loaded, for contexts of its own. The client has a context of
    the kubeconfig: without them a connection of aiohttp's own would fail, and nobody opens one.
    """
    import ssl  # noqa: PLC0415 - most programs need none

    ssl.SSLContext.set_default_verify_paths = _read_none  # type: ignore[method-assign]
    try:
        yield
    finally:
        del ssl.SSLContext.set_default_verify_paths


def _read_none(self: "SSLContext") -> None:
    pass


def load_kubernetes_client() -> None:
    """Load addresses and credentials of kubernetes_asyncio, without its models.

    The library's own `__init__` modules import all 767 models: 33 MB of memory and a quarter of a
    second, for classes that nobody here uses. Bare packages take their place; a release of the
    library that does not load so is loaded whole. urllib3, which it imports for passwords, waits
    until then.
    """
    if _CLIENT in sys.modules:  # a program that has the whole library keeps it
        return
    try:
        with _loaded_later("urllib3"):
            _load_without_models()
    except (ImportError, AttributeError):
        for name in [module for module in sys.modules if module.partition(".")[0] == _CLIENT]:
            del sys.modules[name]


def _load_without_models() -> None:
    """Import the client, with bare packages where its models would be imported.

    Raises:
        ImportError: this release of the library is made in another way, or it is not installed.
        AttributeError: the former.
    """
    found = PathFinder.find_spec(_CLIENT)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"{_CLIENT} is not installed")
    root = next(iter(found.submodule_search_locations))
    library = _add_bare_package(_CLIENT, root)
    client = library.client = _add_bare_package(f"{_CLIENT}.client", f"{root}/client")
    client.models = _add_bare_package(f"{_CLIENT}.client.models")

    from kubernetes_asyncio.client.api_client import ApiClient  # noqa: PLC0415
    from kubernetes_asyncio.client.configuration import Configuration  # noqa: PLC0415

    client.ApiClient, client.Configuration = ApiClient, Configuration  # what `config` imports
    for module in _CLIENT_PARTS:
        import_module(f"{_CLIENT}.{module}")


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
