"""XID errors: their meaning and severity, and the overrides of a configuration.

Sources: NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors) for meanings and recommended
actions; the NVIDIA device plugin's list of application errors (13, 31, 43, 45, 68, 109), which
clusters rely on. Where the two differ (109), the GPU's own recovery action decides: the health
watch reads it after every XID.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import msgspec


class Severity(StrEnum):
    """The effect of an XID on the GPU's verdict.

    - application: the program's own fault; the GPU stays healthy.
    - notice: the hardware reports a condition and goes on working; the XID is logged only.
    - fatal: the GPU is out of service until it has recovered.
    """

    APPLICATION = "application"
    NOTICE = "notice"
    FATAL = "fatal"


class XidRule(msgspec.Struct, frozen=True):
    """The severity and the meaning of one XID."""

    severity: Severity
    meaning: str


_A, _N, _F = Severity.APPLICATION, Severity.NOTICE, Severity.FATAL

DEFAULT_XIDS: Final[Mapping[int, XidRule]] = MappingProxyType(
    {
        8: XidRule(_A, "GPU stopped processing"),
        11: XidRule(_A, "invalid or corrupted push buffer stream"),
        13: XidRule(_A, "graphics engine exception"),
        31: XidRule(_A, "GPU memory page fault"),
        32: XidRule(_A, "invalid or corrupted push buffer stream"),
        38: XidRule(_F, "driver firmware error"),
        43: XidRule(_A, "GPU stopped processing"),
        45: XidRule(_A, "preemptive cleanup after an earlier error"),
        46: XidRule(_F, "GPU stopped processing and did not resume"),
        48: XidRule(_F, "double-bit ECC error"),
        61: XidRule(_F, "internal micro-controller breakpoint or warning"),
        62: XidRule(_F, "internal micro-controller halt"),
        63: XidRule(_N, "row remapping recorded"),
        64: XidRule(_F, "row remapping failed"),
        66: XidRule(_A, "illegal access by driver"),
        67: XidRule(_A, "illegal access by driver"),
        68: XidRule(_A, "video decoder exception"),
        69: XidRule(_A, "graphics engine class error"),
        74: XidRule(_F, "NVLink error"),
        79: XidRule(_F, "GPU has fallen off the bus"),
        92: XidRule(_N, "high rate of single-bit ECC errors"),
        94: XidRule(_A, "contained memory error"),
        95: XidRule(_F, "uncontained memory error"),
        109: XidRule(_A, "context switch timeout"),
        110: XidRule(_F, "security fault"),
        119: XidRule(_F, "timeout of the GPU system processor"),
        120: XidRule(_F, "error of the GPU system processor"),
        121: XidRule(_N, "C2C link error"),
        136: XidRule(_F, "link training failed"),
        137: XidRule(_A, "NVLink privilege error of a remote access"),
        140: XidRule(_F, "unrecovered ECC error"),
        143: XidRule(_F, "GPU initialisation failed"),
        154: XidRule(_N, "GPU recovery action changed"),
        155: XidRule(_N, "NVLink software-defined error"),
        156: XidRule(_N, "resource retirement recorded"),
        157: XidRule(_F, "resource retirement failed"),
        158: XidRule(_F, "GPU fatal timeout"),
    }
)
"""An XID that is not listed is logged; the GPU's recovery action decides (see `rule_for`)."""

UNKNOWN_XID: Final = XidRule(Severity.NOTICE, "not in metagpu's table")

CONTAINED_XIDS: Final = frozenset((8, 11, 13, 31, 32, 43, 45, 68, 69, 94))
"""XIDs that concern only the MIG instance that NVML names: faults of a channel, or of memory that
the hardware has contained, after which NVIDIA's catalogue restarts the program. All others concern
the whole GPU, whatever instance NVML names (docs/decisions/0036)."""


def rule_for(
    code: int, overrides: Mapping[int, Severity], others: Severity | None = None
) -> XidRule:
    """Return the rule of an XID, with the configuration's severity if it has one."""
    rule = DEFAULT_XIDS.get(code, UNKNOWN_XID)
    severity = overrides.get(code, others)

    return rule if severity is None else XidRule(severity, rule.meaning)
