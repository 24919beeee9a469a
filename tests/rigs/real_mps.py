"""NVIDIA's own MPS control daemons, from Debian's archive."""

from functools import cache
from pathlib import Path

import pytest

from metagpu.host.daemons import HostDaemons
from metagpu.host.programs import HostPrograms
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.nvidia_packages import DRIVERS, MPS, provide
from tests.rigs.privileges import require_mounts

__all__ = ["DRIVERS", "real_daemons"]


def real_daemons(driver: str) -> HostDaemons:
    """Return daemons of a driver's version; skip the test with the reason if there are none."""
    require_mounts("NVIDIA's own MPS programs")
    found = _provide(driver)
    if isinstance(found, RigError):
        pytest.skip(f"NVIDIA's own MPS programs of driver {driver} were not tested: {found}")
    return HostDaemons(HostPrograms(roots=(found,)))


@cache
def _provide(driver: str) -> Path | RigError:
    """Return the programs' folder, or why there is none; the archive is asked once."""
    try:
        return provide(MPS, driver)
    except RigError as error:
        return error
