"""The programs of a simulated host: stand-ins run where there are some, the rest is only told."""

import shlex
import sys
from pathlib import Path
from typing import Final

import structlog

from metagpu.companions import HostCompanions
from metagpu.sim import mps_control
from metagpu.tools import HostTools

STAND_INS: Final = {
    "nvidia-cuda-mps-control": (sys.executable, "-S", "-E", str(Path(mps_control.__file__))),
}
"""Commands that stand in for programs of the host."""

log = structlog.get_logger()


class SimulatedTools:
    """Takes every command and does nothing: a simulated GPU has no such settings."""

    async def run(self, program: str, *arguments: str) -> str:
        """Tell what would have been run."""
        log.info("simulated", command=shlex.join([program, *arguments]))
        return ""


def simulated_companions() -> HostCompanions:
    """Give companions that are stand-ins: real processes that touch no GPU and mount nothing."""
    return HostCompanions(HostTools(roots=(), instead=STAND_INS), mounts=False)
