"""Colours of text for people: on terminals alone."""

import os
from typing import TextIO


def shows_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with colours; NO_COLOR switches them off."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
