"""`python -m tests.e2e.rig prepare | up | clean`: the rig without a test."""

import argparse
import signal
import sys
import threading
import time

from tests.e2e.rig.errors import EndedError, MissingError, RigError
from tests.e2e.rig.images import ARCHITECTURES, metagpu_image
from tests.e2e.rig.node import Node
from tests.e2e.rig.prepare import prepare
from tests.e2e.rig.tools import Tools


def main() -> int:
    """Run one command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.rig", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare", help="gather and build the programs of the node, once")
    commands.add_parser("up", help="keep a node running until Ctrl-C")
    commands.add_parser("clean", help="remove what a run that was killed has left behind")
    chosen = parser.parse_args().command
    try:
        return {"prepare": _prepare, "up": _up, "clean": _clean}[chosen]()
    except MissingError as error:
        for line in error.lines:
            print(f"e2e needs {line}", file=sys.stderr)
        return 1
    except (RigError, EndedError) as error:
        print(f"e2e: {error}", file=sys.stderr)
        return 1


def _prepare() -> int:
    started = time.monotonic()
    tools = prepare()
    for architecture in ARCHITECTURES.values():
        metagpu_image(architecture=architecture)
    seconds = time.monotonic() - started
    versions = ", ".join(f"{programs.name} {programs.version}" for programs in tools.built)
    print(f"ready after {seconds:.0f} s: {versions}")
    return 0


def _up() -> int:
    asked_to_stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked_to_stop.set())
    started = time.monotonic()
    with Node(Tools.cached()) as node:
        print(f"ready after {time.monotonic() - started:.1f} s; Ctrl-C stops it\n")
        print(f"  export KUBECONFIG={node.kubeconfig}")
        print(f"  {Tools.cached().path('kubectl')} get pods -A", flush=True)
        asked_to_stop.wait()
    print("stopped")
    return 0


def _clean() -> int:
    node = Node(Tools.cached())
    try:
        node.acquire_machine()
    finally:
        node.release_machine()
    print("nothing of an earlier run is left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
