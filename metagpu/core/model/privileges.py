"""The kernel's capabilities that a feature of metagpu needs beside the user root."""

from enum import StrEnum
from typing import Final


class Privilege(StrEnum):
    """A capability by its name in capabilities(7), without `CAP_`."""

    KILL = "KILL"
    SYS_ADMIN = "SYS_ADMIN"
    NET_BIND_SERVICE = "NET_BIND_SERVICE"
    SYS_PTRACE = "SYS_PTRACE"
    SYS_CHROOT = "SYS_CHROOT"
    DAC_OVERRIDE = "DAC_OVERRIDE"
    FOWNER = "FOWNER"


NUMBERS: Final = {
    Privilege.KILL: 5,
    Privilege.SYS_ADMIN: 21,
    Privilege.NET_BIND_SERVICE: 10,
    Privilege.SYS_PTRACE: 19,
    Privilege.SYS_CHROOT: 18,
    Privilege.DAC_OVERRIDE: 1,
    Privilege.FOWNER: 3,
}
"""The bit of each privilege, of linux/capability.h."""


def privileges_in(mask: int) -> frozenset[Privilege]:
    """Return the privileges in a mask, such as `CapEff` of /proc/PID/status."""
    return frozenset(privilege for privilege, number in NUMBERS.items() if mask >> number & 1)
