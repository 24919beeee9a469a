"""The client of the daemon's control socket, without an event loop."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from metagpu.core.errors import DaemonRefusal, MetagpuError, NoDaemon, NotPermitted

SOCKET_NAME: Final = "metagpu.sock"
"""The socket's name in the daemon's run folder."""
ANSWER_TIMEOUT: Final = 30.0
"""Seconds for the daemon's answer."""


def send_request(
    run_dir: Path, request: Mapping[str, object], timeout: float = ANSWER_TIMEOUT
) -> Any:  # noqa: ANN401 - JSON
    """Send one request to the daemon and return its answer. Blocks.

    Raises:
        NoDaemon: no daemon answers.
        NotPermitted: this user may not ask it.
        DaemonRefusal: it answers with an error.
    """
    path = run_dir / SOCKET_NAME

    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = connection.makefile("rb").readline()
    except OSError as error:
        raise _failure(path, error, timeout) from error

    if not line:
        raise NoDaemon("no answer")
    answer = msgspec.json.decode(line, type=dict[str, Any])
    if "error" in answer:
        raise DaemonRefusal(answer["error"], answer.get("reason"))
    return answer["ok"]


def _failure(path: Path, error: OSError, timeout: float) -> MetagpuError:
    match error:
        case PermissionError():
            return NotPermitted(f"only root may ask the daemon on {path}")
        case TimeoutError():
            return NoDaemon(f"the daemon on {path} did not answer within {timeout:g} s")
        case _:
            return NoDaemon(
                f"no daemon answers on {path} ({error.strerror or error}); start `metagpu run`, or "
                "name its directory with --run-dir"
            )
