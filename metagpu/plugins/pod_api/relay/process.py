"""The relay as a process: its socket, its rights, its end."""

import ctypes
import os
import resource
import signal
import socket
from contextlib import suppress

from metagpu.plugins.pod_api.relay.relay import HELD, Relay

_PR_SET_PDEATHSIG = 1
_BACKLOG = 4096
_NICE = 10
"""The daemon comes first, whatever callers do."""


def main(path: str, proc: str, *settings: str) -> None:
    """Serve the socket at `path` until the daemon ends."""
    # A daemon that has ended before this is one whose channel is closed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGALRM, lambda *_: None)
    os.nice(_NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * HELD), hard))

    values = {name: float(number) for name, _, number in (it.partition("=") for it in settings)}
    channel = socket.socket(fileno=0)
    try:
        listener = _listener(path, int(values["passrights"]))
    except OSError as error:
        channel.send(f"failed {error.strerror or error}".encode())
        return
    channel.send(b"listening")
    with suppress(BrokenPipeError):  # the daemon has ended
        Relay(listener, channel, proc, values).run()
    os._exit(0)


def _listener(path: str, passrights: int) -> socket.socket:
    """Listen for all users, for the caller's pod decides about the answer.

    Raises:
        OSError: the socket cannot be created.
    """
    new = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(new)  # noqa: PTH108 - pathlib is large
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(new)
    os.chmod(new, 0o666)  # noqa: PTH101, S103 - as said
    with suppress(OSError):  # before Linux 6.16
        listener.setsockopt(socket.SOL_SOCKET, passrights, 0)
    listener.listen(_BACKLOG)
    os.replace(new, path)  # noqa: PTH105 - as above; a socket that is seen is one that listens
    listener.setblocking(False)  # noqa: FBT003 - the socket module's signature
    return listener
