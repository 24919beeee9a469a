"""Loading of libraries for programs, and the log that they write."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from metagpu.patches import load_structlog, without_system_authorities


def return_large_buffers() -> None:
    """Make glibc return the memory of a large buffer at the buffer's end.

    By itself it takes a size that was freed once from its heap. A read of a socket, 256 KiB, stays
    there: the heap keeps more than that free at its end.
    """
    import ctypes

    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 264 * 1024)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**20)  # M_TRIM_THRESHOLD


@contextmanager
def loading() -> Iterator[None]:
    """Load modules without garbage collection, a tenth of the daemon's start."""
    if not gc.isenabled():  # inside another such block
        yield
        return
    gc.disable()
    try:
        load_structlog()
        yield
    finally:
        gc.freeze()  # no loaded module becomes garbage
        gc.enable()


@contextmanager
def quick_loading() -> Iterator[None]:
    """Load libraries without garbage collection and without the system's authorities."""
    gc.disable()
    try:
        with without_system_authorities():
            yield
    finally:
        gc.freeze()  # no loaded module becomes garbage
        gc.enable()


def configure_log(level: str, log_format: str) -> None:
    """Log to stderr: JSON lines, or aligned text for a person at a terminal."""
    load_structlog()
    import logging

    import structlog

    from metagpu.display.table import shows_colours

    as_text = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(
            colors=shows_colours(sys.stderr), exception_formatter=structlog.dev.plain_traceback
        )
        if as_text
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if as_text else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # grpclib logs each call that the end of a kubelet cancels; only its errors matter.
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
