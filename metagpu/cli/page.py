"""A page on the loopback of the user's machine, while a command runs."""

import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import structlog

from metagpu.cli.live import print_text
from metagpu.plugins.http.address import ListenAddress
from metagpu.plugins.web.changes import ChangeSource
from metagpu.plugins.web.server import View, WebServer


async def serve_page(
    address: ListenAddress,
    view: View,
    changes: ChangeSource,
    subject: str,
    started: Callable[[str], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Serve the page until cancelled; print its URL.

    Args:
        address: on the loopback.
        view: makes the view.
        changes: the changes of the view.
        subject: whose GPUs the page shows, for the line with the URL.
        started: called with the URL.

    Raises:
        MetagpuError: the port is taken.
    """
    server = WebServer(address, view, changes, tokens=None)
    server.server.bind("--address")
    url = f"http://{ListenAddress(address.host, server.port)}/"
    print_text(f"{url} shows the GPUs of {subject}; Ctrl-C ends it\n")
    async with anyio.create_task_group() as group:
        if started is not None:
            group.start_soon(started, url)
        await server.run()


def log_errors_alone() -> None:
    """Log to stderr what failed in a page, and nothing else."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
