"""Options that programs share: about the output, also as JSON and YAML, and times."""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import to_builtins

from metagpu.core.config.units import Duration

FORMATS: Final = ("table", "json", "yaml")
WIDE_FORMATS: Final = ("table", "wide", "json", "yaml")
LIST_FORMATS: Final = (*WIDE_FORMATS, "name")


def add_output(parser: argparse.ArgumentParser, formats: Sequence[str] = FORMATS) -> None:
    """Add the option for the form of the output; the first is the default."""
    parser.add_argument(
        "-o",
        "--output",
        choices=formats,
        type=_form,
        default=formats[0],
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


def duration(least: float) -> Callable[[str], Duration]:
    """Return a reader of durations, of a least number of seconds."""

    def read(text: str) -> Duration:
        try:
            given = Duration.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if given < least:
            raise argparse.ArgumentTypeError(f"{text!r} is too short; write {least:g}s or more")
        return given

    return read


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Add the option that repeats the output."""
    parser.add_argument("-w", "--watch", action="store_true", help="repeat every second")


def add_sort_by(parser: argparse.ArgumentParser) -> None:
    """Add the option for the order of rows."""
    help_ = "a field of -o json: texts from a to z, numbers from the largest"
    parser.add_argument("--sort-by", metavar="FIELD", default="", help=help_)


def encode(value: object, form: str, *, compact: bool = False) -> str:
    """Return a report or plain data as JSON or YAML.

    `compact` is for a series of values: JSON is one line, YAML one document.
    """
    plain: Any = to_builtins(value)
    if form == "json":
        return json.dumps(plain, indent=None if compact else 2) + "\n"
    import yaml  # noqa: PLC0415 - tables need no YAML

    text: str = yaml.safe_dump(plain, sort_keys=False)
    return f"---\n{text}" if compact else text
