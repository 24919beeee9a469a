"""Suggestions for misspelled names."""

from collections.abc import Iterable


def allowed_values(given: str, known: Iterable[str]) -> str:
    """Return the end of an error's line: the allowed values, and the nearest one."""
    names = list(known)
    return f"allowed: {', '.join(names)}{suggest(given, names)}"


def suggest(given: str, known: Iterable[str]) -> str:
    """Return the nearest name as `; did you mean t4?`; empty where none is near.

    A name that begins with the given text is nearer than a similar one.
    """
    import difflib  # noqa: PLC0415 - only for a wrong name

    names = list(known)
    longer = [name for name in names if given and name.startswith(given)]
    near = longer or difflib.get_close_matches(given, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""
