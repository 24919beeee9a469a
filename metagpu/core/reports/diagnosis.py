"""The result of one check of `mgctl doctor`."""

from enum import StrEnum

import msgspec


class CheckResult(StrEnum):
    """Result of one check; only `error` makes the doctor exit with status 1."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Diagnosis(msgspec.Struct, frozen=True):
    """One check with its result; `fix` is empty where nothing has to be done."""

    code: str
    result: CheckResult
    finding: str
    fix: str = ""


Finding = tuple[CheckResult, str] | tuple[CheckResult, str, str]
"""Result, finding, and a fix where one is needed."""
OK, WARNING, ERROR = CheckResult
