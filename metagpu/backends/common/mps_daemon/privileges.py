"""The capabilities that MPS daemons on the host need, beside those of the driver."""

from collections.abc import Mapping
from typing import Final

from metagpu.core.model.privileges import Privilege

PRIVILEGES: Final[Mapping[Privilege, str]] = {
    Privilege.SYS_PTRACE: "MPS: the mounts and cgroups of the host's first process",
    Privilege.SYS_CHROOT: "MPS: the host's mounts, a driver container's root",
    Privilege.DAC_OVERRIDE: "MPS: a cgroup for each control daemon",
    Privilege.FOWNER: "MPS: the removal of what containers left in its folders",
}
"""By what each is needed for. Docs: permissions.md."""
