"""What an operator may have meant."""

from collections.abc import Iterable


def allowed(given: str, known: Iterable[str]) -> str:
    """Say what is allowed, and which of it is near to what was given, as ends an error's line."""
    names = list(known)
    return f"allowed: {', '.join(names)}{hint(given, names)}"


def hint(given: str, known: Iterable[str]) -> str:
    """Ask for the nearest name, as `; did you mean t4?`; empty where none is near.

    A name that begins with what was given is nearer than one that merely looks like it.
    """
    import difflib  # noqa: PLC0415 - a start without mistakes does without it

    names = list(known)
    longer = [name for name in names if given and name.startswith(given)]
    near = longer or difflib.get_close_matches(given, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""
