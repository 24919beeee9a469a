"""Options that programs share: about the output, and times."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf

from metagpu.display.encoding import FORMATS


def add_output(parser: argparse.ArgumentParser, formats: Sequence[str] = FORMATS) -> None:
    """Add the option for the form of the output; the default is a table."""
    parser.add_argument(
        "-o",
        "--output",
        choices=formats,
        type=_form,
        default="table",
        metavar="FORMAT",
        help=f"one of {', '.join(formats)} (default: %(default)s)",
    )


def _form(text: str) -> str:
    """Read the name of a form; kubectl computes some of its own from objects."""
    form, _, rest = text.partition("=")
    if rest or form in ("jsonpath", "custom-columns", "go-template", "template"):
        raise argparse.ArgumentTypeError(f"no {form} here: give -o json to jq")
    return text


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option for the form of the output, and a short one for JSON."""
    add_output(parser)
    parser.add_argument(
        "--json", action="store_const", const="json", dest="output", help="the same as -o json"
    )


def seconds(least: float) -> Callable[[str], float]:
    """Return a reader of seconds, of a least number of them."""

    def read(text: str) -> float:
        with suppress(ValueError):
            if least <= (given := float(text)) < inf:
                return given
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; give seconds, {least:g} or more")

    return read


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Add the option that repeats the output."""
    parser.add_argument("-w", "--watch", action="store_true", help="repeat every second")


def add_sort_by(parser: argparse.ArgumentParser) -> None:
    """Add the option for the order of rows."""
    parser.add_argument(
        "--sort-by",
        metavar="FIELD",
        default="",
        help="a field of -o json: texts from a to z, numbers from the largest",
    )
