"""Live output of all programs: a screen that is drawn again."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from typing import Final

from metagpu.display.table import PLAIN, Terminal, redraw, stdout_terminal

PERIOD: Final = 1.0
"""Seconds between two answers of `-w` and `top`."""
ENTER: Final = "\x1b[?1049h\x1b[?25l"
LEAVE: Final = "\x1b[?25h\x1b[?1049l"
"""The terminal's codes for a separate screen without a cursor, and for its end."""


def show_live(draw: Callable[[Terminal], str]) -> int:
    """Draw in place every second until `q` or an interrupt; on `PLAIN`, draw once."""
    screen = stdout_terminal()
    if screen is PLAIN:
        print_text(draw(screen))
        return 0

    with _read_keys() as next_key:
        print_text(ENTER)
        try:
            return repeat(
                lambda: print_text(redraw(draw(screen := stdout_terminal()), screen)), next_key
            )
        finally:
            print_text(LEAVE)


def repeat(show: Callable[[], None], next_key: Callable[[], str] | None = None) -> int:
    """Repeat every second until an interrupt or the key `q`; return 0, a normal end."""
    try:
        while True:
            show()
            if next_key is None:
                sleep(PERIOD)
            elif next_key() in {"q", "Q"}:
                return 0
    except KeyboardInterrupt:
        return 0


@contextmanager
def _read_keys() -> Iterator[Callable[[], str] | None]:
    """Read keys from the terminal as they are pressed, while the block lasts.

    Yields a function that waits a second for a key, and returns an empty text without one; `None`
    where stdin is no terminal.
    """
    if not sys.stdin.isatty():
        yield None
        return

    import termios
    import tty
    from select import select

    def next_key() -> str:
        ready, _, _ = select([sys.stdin], [], [], PERIOD)
        # A terminal that has gone is as good as the key that ends.
        return (os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q") if ready else ""

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield next_key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def print_text(text: str) -> None:
    """Print at once, without a line end of its own."""
    print(text, end="", flush=True)  # noqa: T201 - a command line speaks so
