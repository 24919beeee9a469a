"""NVML's library in Python: its C functions, by their names, on a simulated node.

pynvml finds functions by name on one library object, so an object of this class can be that
library. Functions that are not here raise `AttributeError`, which pynvml reports as it does for a
library too old to have them.
"""

from metagpu.sim.library_activity import Activity
from metagpu.sim.library_events import Events
from metagpu.sim.library_limits import Limits
from metagpu.sim.library_mig import Mig
from metagpu.sim.library_queries import Queries
from metagpu.sim.library_wiring import Wiring


class Library(Queries, Wiring, Mig, Events, Activity, Limits):
    """All of the functions; see `LibraryBase` for what it takes."""
