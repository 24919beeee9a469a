"""The programs of a simulated host: stand-ins, or a log line in place of a run."""

import shlex
import sys
from pathlib import Path
from typing import Final

import structlog

from metagpu.host.daemons import HostDaemons
from metagpu.host.programs import HostPrograms
from metagpu.sim.machine import mps_control

STAND_INS: Final = {
    "nvidia-cuda-mps-control": (sys.executable, "-S", "-E", str(Path(mps_control.__file__))),
}
"""Commands that stand in for programs of the host."""

log = structlog.get_logger()


class SimPrograms:
    """Host programs that only log: a simulated GPU has no such settings."""

    async def run(self, program: str, *arguments: str) -> str:
        """Log the command in place of running it."""
        log.info("simulated", command=shlex.join([program, *arguments]))
        return ""


def sim_daemons(driver: int | None = None) -> HostDaemons:
    """Return daemons that are stand-ins: they touch no GPU and mount nothing.

    Args:
        driver: the version of the driver that they are of, the newest by default.
    """
    options = () if driver is None else (f"--driver={driver}",)
    substitutes = {name: (*command, *options) for name, command in STAND_INS.items()}
    return HostDaemons(HostPrograms(roots=(), substitutes=substitutes), on_host=False)
