"""A daemon whose calls of functions are counted, and asked for over a socket.

Calls of Python's and of C's functions, in all threads that the daemon starts. Unlike time, their
number does not depend on what else the machine does.

$ METAGPU_BENCH_COUNTER=SOCKET python -m bench.counted run --simulate a100-40gb:8 ...
"""

import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from metagpu.__main__ import main

SOCKET: Final = "METAGPU_BENCH_COUNTER"
_counter: Final = itertools.count()  # its `next` is one step, whichever thread calls


def _count(_: FrameType, event: str, __: object) -> None:
    if event in ("call", "c_call"):
        next(_counter)


def _total() -> int:
    return int(repr(_counter).removeprefix("count(").removesuffix(")"))


@contextmanager
def here() -> Iterator[Callable[[], int]]:
    """Count the calls of this thread until the block ends; yield what returns their number."""
    before, end = _total(), 0
    sys.setprofile(_count)
    try:
        yield lambda: end - before
    finally:
        sys.setprofile(None)
        end = _total()


def _answer(listening: socket.socket) -> None:
    """Send the count, and the number of loaded modules, to whoever connects."""
    while True:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(f"{_total()} {len(sys.modules)}".encode())


if __name__ == "__main__":
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ[SOCKET])
    listener.listen()
    threading.Thread(target=_answer, args=(listener,), daemon=True).start()
    threading.setprofile(_count)
    sys.setprofile(_count)
    sys.exit(main())
