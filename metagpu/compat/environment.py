"""Environment variables of other programs: their truth values, origins and notes."""

from collections.abc import Mapping
from typing import Final

from metagpu.compat.contract import CompatNote, Origin
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError, ConfigReason

TRUTH: Final = {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}
"""The words for true and false of Go's `strconv.ParseBool`, in any case."""


def parse_bool(variable: str, environment: Mapping[str, str]) -> bool | None:
    """Return a variable's truth as Go reads it, `None` where it is absent or empty.

    Raises:
        ConfigError: the value is neither true nor false.
    """
    if not (value := environment.get(variable)):
        return None
    if (truth := TRUTH.get(value.lower())) is None:
        problem = f"{value!r} is neither true nor false"
        raise ConfigError(problem, ConfigReason.UNKNOWN_VALUE, file="environment", path=variable)
    return truth


def variable_origin(variable: str) -> Origin:
    """Return the origin of what a variable says."""
    return Origin(Document("", "environment"), variable)


def note_variable(variable: str, text: str) -> CompatNote:
    """Return a note about a variable."""
    return variable_origin(variable).note(text)
