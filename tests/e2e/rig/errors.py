"""What the rig raises when it cannot go on."""


class RigError(Exception):
    """The rig or the node could not do what was asked; the text says why."""


class MissingError(RigError):
    """Things the machine lacks, one line each, with the way to get them."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class EndedError(Exception):
    """A program has ended that should run.

    Not a `RigError`: to those who wait, that means "not yet", and waiting is no use here.
    """


class DeadlineError(RigError):
    """A condition did not come true in time; the text holds the last thing seen."""
