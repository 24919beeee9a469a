"""Errors of configurations: place, kind of problem, and the nearest known name."""

from collections.abc import Iterable
from enum import StrEnum

from metagpu.core.errors import MetagpuError


def at_place(problem: str, file: str, line: int, path: str) -> str:
    """Return a problem after its place, without what of the place is empty or 0."""
    return ": ".join([*filter(None, (file, str(line or ""), path)), problem])


class ConfigReason(StrEnum):
    """The kind of an error of a configuration.

    - unreadable: a file cannot be read.
    - no_yaml: a text is no YAML.
    - too_large: a text, a list, or the shares of a node are more than is possible.
    - unknown_format: a file has no format that metagpu reads.
    - unknown_key: a key is not known where it stands.
    - unknown_value: a value is none of those that are allowed.
    - wrong_type: a value is of another type, such as a text for a number.
    - invalid_value: a value is out of range, or has another form than it should.
    - missing: a key, or each entry of a list, is missing.
    - given_twice: one thing is given twice, such as a key, a pool's name, or a file.
    - conflict: settings contradict each other, or one needs another that is not given.
    - invalid_name: Kubernetes does not allow the name of a resource.
    - name_taken: a resource would be offered by two backends, or by both APIs.
    - no_choice: nothing chooses among several profiles or nodes, or among layouts of unknown GPUs.
    - unknown_choice: the profile or layout that is chosen does not exist.
    - not_served: metagpu has no backend for a setting.
    - no_gpu: no GPU of the node can have what a pool offers.
    - not_written: the CDI specification cannot be written.
    """

    UNREADABLE = "unreadable"
    NO_YAML = "no_yaml"
    TOO_LARGE = "too_large"
    UNKNOWN_FORMAT = "unknown_format"
    UNKNOWN_KEY = "unknown_key"
    UNKNOWN_VALUE = "unknown_value"
    WRONG_TYPE = "wrong_type"
    INVALID_VALUE = "invalid_value"
    MISSING = "missing"
    GIVEN_TWICE = "given_twice"
    CONFLICT = "conflict"
    INVALID_NAME = "invalid_name"
    NAME_TAKEN = "name_taken"
    NO_CHOICE = "no_choice"
    UNKNOWN_CHOICE = "unknown_choice"
    NOT_SERVED = "not_served"
    NO_GPU = "no_gpu"
    NOT_WRITTEN = "not_written"


class ConfigError(MetagpuError):
    """Raised when a configuration cannot be used; names place, problem and fix.

    Attributes:
        reason: the kind of the problem.
        file: the path as the operator wrote it, or `<default>`.
        line: the 1-based line in that file, 0 for the whole file.
        path: the keys to the value, as `pools[0].backends[0].resource`; empty for the document.
        problem: the problem and the allowed values, in one line.
    """

    reason: ConfigReason

    def __init__(
        self, problem: str, reason: ConfigReason, *, file: str = "", line: int = 0, path: str = ""
    ) -> None:
        self.reason, self.problem = reason, problem
        self.file, self.line, self.path = file, line, path
        super().__init__(at_place(problem, file, line, path))


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
