"""Errors of the rig."""


class RigError(Exception):
    """A failure of the rig or of the node; the text has the reason."""


class MissingError(RigError):
    """Missing parts of the machine, one line each, with the way to get them."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class EndedError(Exception):
    """An unexpected end of a program.

    Not a `RigError`: waiting functions retry after that one, and waiting is no use here.
    """


class DeadlineError(RigError):
    """A condition that did not become true in time; the text has the last value."""
