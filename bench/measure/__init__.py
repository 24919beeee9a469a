"""The measurements: each module has a function from a plan to figures."""

from collections.abc import Callable, Mapping
from typing import Final

from bench.figures import Figure
from bench.measure.admissions import admissions
from bench.measure.amounts import amounts
from bench.measure.attacked import attacked
from bench.measure.before import before
from bench.measure.calls import calls
from bench.measure.claims import claims
from bench.measure.commands import commands
from bench.measure.cordoned import cordoned
from bench.measure.ends import ends
from bench.measure.enforcement import enforcement
from bench.measure.faults import faults
from bench.measure.fleet import fleet
from bench.measure.idle import idle
from bench.measure.labels import labels
from bench.measure.memory import memory
from bench.measure.mig import mig
from bench.measure.placement import placement
from bench.measure.preferences import preferences
from bench.measure.prepares import prepares
from bench.measure.registration import restarts, starts
from bench.measure.reviews import reviews
from bench.measure.scrapes import scrapes
from bench.measure.slices import slices
from bench.plan import Plan

MEASUREMENTS: Final[Mapping[str, Callable[[Plan], list[Figure]]]] = {
    "before": before,
    "calls": calls,
    "preferences": preferences,
    "cordoned": cordoned,
    "attacked": attacked,
    "admissions": admissions,
    "faults": faults,
    "claims": claims,
    "amounts": amounts,
    "prepares": prepares,
    "slices": slices,
    "restarts": restarts,
    "starts": starts,
    "ends": ends,
    "labels": labels,
    "memory": memory,
    "idle": idle,
    "scrapes": scrapes,
    "reviews": reviews,
    "mig": mig,
    "placement": placement,
    "enforcement": enforcement,
    "commands": commands,
    "fleet": fleet,
}
"""By the name that `--only` takes, in the order of a full run."""
