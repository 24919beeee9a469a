"""Schedules: lists of plain steps, drawn from a seed, that read as a story."""

import random
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tests.chaos.node import (
    CLAIMS,
    CLASSES,
    FRACTION,
    MIG_RESOURCES,
    MIXED,
    MPS,
    MPS_WHOLE,
    SLICED,
    UNITS,
    WHOLE,
)

Value = str | int | float
MOODS: Final = ("well", "late", "empty", "half", "erring")
"""How PodResources answers after a start of the kubelet, for some seconds."""
DAMAGES: Final = ("garbage", "half", "empty", "missing")
"""What becomes of the kubelet's checkpoint while the kubelet runs."""
STOPS: Final = ("prepare", "standby", "take", "registered", "withdraw", "released")
"""Steps of a daemon at which it gets a signal (`tests.rigs.exchange.PLACES`)."""
WORK: Final = ("allocate", "prepare", "unprepare", "create", "destroy", "mps")
"""The same while it serves pods (`tests.rigs.exchange.AT_WORK`)."""
RESETTABLE: Final = (*MIXED, MPS, CLAIMS)
"""The GPUs that have faults: a reset of the other one ends MIG instances in use."""
FAILURES: Final = ("failures", "compute_failures", "removal_failures")
"""What a driver can fail to do of MIG; with `done`, it does it and reports an error."""
FATAL_XIDS: Final = (48, 79)


class Step(NamedTuple):
    """One step; `pause` are the seconds after it."""

    what: str
    given: Mapping[str, Value] = {}
    pause: float = 0.0

    def __str__(self) -> str:
        given = ", ".join(f"{name} {value}" for name, value in self.given.items())
        wait = f"; then {self.pause} s" if self.pause else ""
        return f"{self.what.replace('_', ' ')}{': ' if given else ''}{given}{wait}"


_WEIGHTS: Final = {
    "pod": 20,
    "claim": 5,
    "end": 8,
    "force": 2,
    "kubelet_restart": 6,
    "kubelet_down": 2,
    "kubelet_up": 3,
    "forget": 1,
    "kill": 3,
    "terminate": 2,
    "kill_beside_late_kubelet": 8,
    "damage": 2,
    "exchange": 2,
    "reload": 3,
    "cordon": 4,
    "uncordon": 2,
    "old_list": 2,
    "xid": 2,
    "lose": 1,
    "reset": 1,
    "work": 10,
    "provisioning": 3,
    "instance": 2,
    "api": 4,
    "stop_at_work": 4,
    "clock": 2,
    "full_disk": 2,
    "descriptors": 1,
    "remove": 2,
    "quiet": 1,
}
_CRITICAL: Final = (
    *("kill", "terminate", "kill_beside_late_kubelet", "damage", "exchange"),
    *("kubelet_restart", "kubelet_up", "cordon", "lose", "stop_at_work", "full_disk"),
    *("restart_kubelet", "restart_both", "roll_out"),
)
"""After these is the moment for pods, and for a kubelet with an older list."""


class Kubelet(NamedTuple):
    """The steps that are drawn beside a kubelet, with their weights.

    Attributes:
        first: the first steps, so that the node is not idle.
        then: the steps after a critical one.
    """

    weights: Mapping[str, int]
    first: Sequence[str]
    then: Sequence[str]


SIMULATED: Final = Kubelet(_WEIGHTS, ("pod", "pod", "pod", "pod", "work"), ("pod", "old_list"))
REAL: Final = Kubelet(
    {
        "pod": 10,
        "claim": 4,
        "end": 6,
        "force": 2,
        "reload": 3,
        "restart_kubelet": 6,
        "kubelet_down": 2,
        "restart_both": 4,
        "forget": 2,
        "kill": 4,
        "terminate": 2,
        "roll_out": 3,
        "cordon": 3,
        "uncordon": 2,
        "xid": 2,
        "lose": 1,
        "reset": 1,
        "provisioning": 2,
        "instance": 1,
        "api_away": 3,
    },
    ("pod", "pod", "pod", "claim"),
    ("pod", "claim"),
)
"""Its lists, its checkpoint and its clock are its own."""
_SHARES: Final = {FRACTION: 10, WHOLE: 1, SLICED: 1, UNITS: 10, MPS_WHOLE: 1}


def draw(seed: int, length: int = 9, beside: Kubelet = SIMULATED) -> list[Step]:
    """Draw a schedule."""
    chance = random.Random(seed)  # noqa: S311 - repeatable
    kinds = chance.choices(list(beside.weights), list(beside.weights.values()), k=length)
    steps = [_step(chance, name) for name in beside.first]
    for kind in kinds:
        steps.append(_step(chance, kind))
        if kind in _CRITICAL:
            steps += [_step(chance, name) for name in beside.then]
        elif kind == "provisioning":
            steps += [_step(chance, name) for name in ("mig_pod", "mig_pod", "end")]
    return steps


def _step(chance: random.Random, what: str) -> Step:  # noqa: C901, PLR0912, PLR0915 - a table
    pick = chance.choice
    given: Mapping[str, Value] = {}
    if what in {"pod", "mig_pod"}:
        others = () if what == "mig_pod" else (*_SHARES, *_SHARES)
        what, resource = "pod", pick((*others, *MIG_RESOURCES))
        size = chance.randint(1, _SHARES.get(resource, 1))
        shape = pick(("one", "one", "one", "two", "init", "sidecar", "many"))
        given = {"resource": resource, "size": size, "shape": shape}
    elif what == "claim":
        given = {"kind": pick(list(CLASSES)), "size": chance.randint(10, 100)}
    elif what in {"end", "force"}:
        given = {"number": chance.randrange(8)}
    elif what == "old_list":
        given = {"number": chance.randrange(1000), "seconds": pick((0.1, 1.0, 4.0))}
    elif what in {"kubelet_restart", "kubelet_up", "kill_beside_late_kubelet"}:
        given = {"mood": pick(MOODS), "seconds": pick((1.5, 3.0, 6.0))}
    elif what in {"kill", "terminate"}:
        given = {"down": pick((0, 0, 0.5, 3.0))}
    elif what == "restart_kubelet":
        given = {"times": pick((1, 1, 2))}
    elif what == "damage":
        mood = pick(("well", "late"))
        given = {"how": pick(DAMAGES), "mood": mood, "seconds": pick((1.5, 4.0))}
    elif what == "exchange" and chance.random() < 0.5:
        given = {"at": pick(STOPS), "by": pick(("KILL", "STOP"))}
    elif what == "reload":
        given = {"to": pick(("all", "no slices", "turns", "wrong"))}
    elif what in {"cordon", "uncordon"}:
        given = {"gpu": chance.randrange(CLAIMS + 1)}
    elif what == "xid":
        given = {"gpu": pick(RESETTABLE), "code": pick((13, 31, *FATAL_XIDS))}
    elif what in {"lose", "reset"}:
        given = {"gpu": pick(RESETTABLE)}
    elif what == "work":
        percent, count = pick((40, 45, 90, 110, 300)), pick((1, 1, 3, 12))
        given = {"number": chance.randrange(8), "percent": percent, "count": count}
        given |= {"stubborn": pick((0, 1))}
    elif what == "provisioning":
        given = {
            pick(FAILURES): pick((1, 2)),
            "done": pick((False, True)),
            "duration": pick((0, 1)),
        }
    elif what == "instance":
        given = {"placement": pick(("1g.5gb@6", "2g.10gb@4", "3g.20gb@0", "3g.20gb@4"))}
    elif what == "api":
        given = {"how": pick(("410", "429", "500", "away", "slow")), "seconds": pick((1, 5, 15))}
    elif what == "api_away":
        given = {"seconds": pick((1, 5, 15))}
    elif what == "stop_at_work":
        given = {"at": pick(WORK), "when": pick(("before", "after")), "by": pick(("KILL", "STOP"))}
    elif what == "clock":
        given = {"step": pick((-3600, -20, 20, 3600))}
    elif what == "full_disk":
        given = {"seconds": pick((2, 6))}
    elif what == "descriptors":
        given = {"spare": pick((0, 2, 8)), "seconds": pick((1, 5))}
    elif what == "remove":
        given = {"what": pick(("cdi", "device-plugins", "pods"))}
    return Step(what, given, pick((0, 0, 0.1, 0.5, 1.0, 2.0)))


def story(steps: Sequence[Step]) -> str:
    """Return a schedule as text for people."""
    return "\n".join(f"  {number:2}. {step}" for number, step in enumerate(steps, 1))
