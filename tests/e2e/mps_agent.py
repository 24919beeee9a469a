"""A metagpu of simulated GPUs with NVIDIA's own MPS programs, for a container of the tests."""

import os
import signal
import sys
from pathlib import Path

from metagpu.cli.metagpu import main
from metagpu.host.daemons import HostDaemons
from metagpu.host.programs import HostPrograms
from metagpu.sim.machine import programs as sim_programs

DRIVER_ROOT = "METAGPU_E2E_DRIVER_ROOT"
"""Environment variable: the folder with NVIDIA's programs, on the host and in the container."""
HOST_PROCESS = "METAGPU_E2E_HOST_PROCESS"
"""Environment variable: a process of the host. A sandbox may refuse to show process 1 to root."""
MEMORY = 256 << 20
"""Bytes that the container may take; it takes more after SIGUSR1."""


def real_daemons(driver: int | None = None) -> HostDaemons:
    """Return daemons of NVIDIA's programs, in place of the stand-ins of a simulated node."""
    del driver
    programs = HostPrograms(roots=(Path(os.environ[DRIVER_ROOT]),))
    return HostDaemons(programs, host_process=int(os.environ[HOST_PROCESS]))


def take_memory(*_: object) -> None:
    """Take more memory than the container may have."""
    print(len(b"x" * (4 * MEMORY)))


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, take_memory)
    sim_programs.sim_daemons = real_daemons
    sys.exit(main())
