"""`web`: the page of the cluster, on the loopback of the user's machine."""

import argparse
import sys
import webbrowser
from collections.abc import Sequence

from anyio import to_thread

from metagpu.cli.page import log_errors_alone, serve_page
from metagpu.kubectl.cluster_view import ClusterView
from metagpu.kubectl.viewer import ClusterViewer


async def web(args: argparse.Namespace, viewer: ClusterViewer, namespaces: Sequence[str]) -> int:
    """Serve the page until cancelled; Pods and Events are those of `namespaces`.

    Raises:
        MetagpuError: the port is taken, or the user may not see the nodes.
    """
    log_errors_alone()
    view = ClusterView(viewer, args.selector, namespaces, args.interval)
    if lacking := await view.check():
        _warn(lacking)
    started = _open_browser if args.open else None
    await serve_page(args.address, view.read, view.changes, "the cluster", started)
    return 0


async def _open_browser(url: str) -> None:
    if not await to_thread.run_sync(webbrowser.open, url, abandon_on_cancel=True):
        _warn("no browser starts here; open the page in one")


def _warn(text: str) -> None:
    print(f"kubectl metagpu: {text}", file=sys.stderr)  # noqa: T201 - a command line speaks so
