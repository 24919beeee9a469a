"""NVML's library in Python: its C functions, by their names, on a simulated node.

pynvml finds functions by name on one library object, so an object of this class can be that
library. A function that is missing here raises `AttributeError`, which pynvml reports as it does
for a library too old to have the function.
"""

from metagpu.sim.nvml.events import EventFunctions
from metagpu.sim.nvml.mig import MigFunctions
from metagpu.sim.nvml.queries import QueryFunctions
from metagpu.sim.nvml.readings import (
    MemoryLimitFunctions,
    SensorFunctions,
    TopologyFunctions,
    UtilizationFunctions,
)


class SimLibrary(
    QueryFunctions,
    TopologyFunctions,
    MigFunctions,
    EventFunctions,
    UtilizationFunctions,
    SensorFunctions,
    MemoryLimitFunctions,
):
    """All simulated functions; see `SimLibraryBase` for the arguments."""
