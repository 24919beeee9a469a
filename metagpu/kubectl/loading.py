"""Loading of the API server's client for a command, which lives for half a second."""

import gc
import ssl
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_loading() -> Iterator[None]:
    """Load libraries without garbage collection and without the system's authorities.

    aiohttp reads them twice as it is loaded, for contexts of its own. The client has a context of
    the kubeconfig: without them a connection of aiohttp's own would fail, and nobody opens one.
    """
    gc.disable()
    ssl.SSLContext.set_default_verify_paths = _read_none  # type: ignore[method-assign]
    try:
        yield
    finally:
        del ssl.SSLContext.set_default_verify_paths
        gc.freeze()  # no loaded module becomes garbage
        gc.enable()


def _read_none(self: ssl.SSLContext) -> None:
    pass
