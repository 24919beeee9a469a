"""Colours and other codes in text for people: on terminals alone."""

import os
from typing import TextIO


def takes_codes(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that follows codes.

    A terminal without a name in TERM, or with the name `dumb`, is written as a file is.
    """
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def shows_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with colours; NO_COLOR switches them off."""
    return takes_codes(stream) and "NO_COLOR" not in os.environ
