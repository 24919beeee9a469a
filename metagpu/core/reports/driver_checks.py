"""Checks of the driver's place on a node, for `mgctl doctor`."""

from collections.abc import Sequence

from metagpu.core.model.driver_roots import MOUNT_HOST, NVML_LIBRARY
from metagpu.core.reports.diagnosis import ERROR, OK, WARNING, Finding
from metagpu.core.reports.schema import DriverRootsReport, StatusReport


def check_roots(roots: DriverRootsReport, status: StatusReport | None) -> Finding:
    """Check that NVML is in the driver's root, and name both roots."""
    driver = _folder(roots.driver_root, roots.container_driver_root)
    dev = _folder(roots.dev_root, roots.container_dev_root)
    found = f"driver in {driver}, {roots.reason}; device nodes below {dev}"
    if roots.library:
        return OK, found
    if status is not None and status.gpus:
        return OK, f"{found}; NVML is found by the linker"
    fix = f"install the driver; in a container, {MOUNT_HOST}, or see --driver-root"
    return ERROR, f"{NVML_LIBRARY} is not in {driver}, {roots.reason}", fix


def check_links(unlinked: Sequence[str]) -> Finding:
    """Check that systemd can find the device nodes of running containers."""
    if not unlinked:
        return OK, "every device node has the link in /dev/char that it needs"
    effect = "containers lose these devices at the next `systemctl daemon-reload`"
    finding = f"no link in /dev/char to {', '.join(unlinked)}: {effect}"
    other = "`nvidia-ctk system create-dev-char-symlinks --create-all`"
    fix = f"let metagpu write to the host's /dev/char, or run {other} at each start of the node"
    return WARNING, finding, fix


def _folder(host: str, here: str) -> str:
    return host if host == here else f"{host} (here {here})"
