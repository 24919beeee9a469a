"""`web`: the page of the cluster, on the loopback of the user's machine."""

import argparse
import logging
import sys
import webbrowser
from collections.abc import Sequence

import anyio
import structlog
from anyio import to_thread

from metagpu.cli.live import print_text
from metagpu.kubectl.cluster_view import ClusterView
from metagpu.kubectl.viewer import ClusterViewer
from metagpu.plugins.metrics.address import ListenAddress
from metagpu.plugins.web.server import WebServer


async def web(args: argparse.Namespace, viewer: ClusterViewer, namespaces: Sequence[str]) -> int:
    """Serve the page until cancelled; Pods and Events are those of `namespaces`.

    Raises:
        MetagpuError: the port is taken, or the user may not see the nodes.
    """
    _log_errors_alone()
    view = ClusterView(viewer, args.selector, namespaces, args.interval)
    if lacking := await view.check():
        _warn(lacking)
    server = WebServer(args.address, view.read, view.changes, tokens=None)
    server.server.bind("--address")
    url = f"http://{ListenAddress(args.address.host, server.port)}/"
    print_text(f"{url} shows the GPUs of the cluster; Ctrl-C ends it\n")
    async with anyio.create_task_group() as group:
        if args.open:
            group.start_soon(_open_browser, url)
        await server.run()
    return 0


async def _open_browser(url: str) -> None:
    if not await to_thread.run_sync(webbrowser.open, url, abandon_on_cancel=True):
        _warn("no browser starts here; open the page in one")


def _warn(text: str) -> None:
    print(f"kubectl metagpu: {text}", file=sys.stderr)  # noqa: T201 - a command line speaks so


def _log_errors_alone() -> None:
    """Log to stderr what failed in a page, and nothing else."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
