"""The node of a schedule, as data: its hardware, its configurations, and how pods ask for it.

The checker computes amounts from these tables and from what it sees; nothing here is metagpu's.
"""

from collections.abc import Mapping
from typing import Final

GPUS: Final = "{model: a100-40gb, count: 3}, {model: a100-40gb, mig: true}, {model: a100-40gb}"
MIXED: Final = (0, 1)
MPS, MIG, CLAIMS = 2, 3, 4
"""The GPUs of each pool, by index."""

FRACTIONS: Final = 10
"""Shares of a GPU by fractions, and units of one by MPS."""
SLICES: Final = 4
CLAIMED: Final = {"fraction": ("shares", 100), "timeslice": ("slices", SLICES)}
"""What several claims may have of a GPU, and how much of it: the capacity of each kind's device."""
MEMORY_MIB, USABLE_MIB, HEADROOM_MIB = 40960, 40960 - 620, 512
"""Memory of an A100, without what its driver reserves, and the default headroom of a limit."""

FRACTION, WHOLE, SLICED = "cnvrg.io/metagpu", "nvidia.com/gpu", "nvidia.com/gpu.shared"
UNITS, MPS_WHOLE = "nvidia.com/gpu.mps", "example.com/gpu"
PROFILES: Final[Mapping[str, tuple[int, tuple[int, ...]]]] = {
    "1g.5gb": (1, (0, 1, 2, 3, 4, 5, 6)),
    "2g.10gb": (2, (0, 2, 4)),
    "3g.20gb": (4, (0, 4)),
    "7g.40gb": (8, (0,)),
}
"""Memory slices and starts of each profile of an A100 (NVIDIA's MIG user guide)."""
MIG_RESOURCES: Final = {f"nvidia.com/mig-{profile}": profile for profile in PROFILES}

BACKENDS: Final[Mapping[str, tuple[str, tuple[int, ...], int]]] = {
    FRACTION: ("fraction", MIXED, FRACTIONS),
    WHOLE: ("whole", MIXED, 1),
    SLICED: ("timeslice", MIXED, SLICES),
    UNITS: ("mps", (MPS,), FRACTIONS),
    MPS_WHOLE: ("whole", (MPS,), 1),
}
"""The backend, the GPUs and the shares of a GPU of each resource but those of MIG."""

PARTS: Final = {FRACTION: FRACTIONS, SLICED: SLICES}
"""The parts of a GPU whose memory enforcement guards."""

CLASSES: Final = {
    "fraction": "fraction.metagpu.io",
    "whole": "gpu.metagpu.io",
    "timeslice": "timeslice.metagpu.io",
}
"""The DeviceClass of each kind of claim."""

_HEAD: Final = """\
version: metagpu/v1
health: {quietPeriod: 100ms, rescanPeriod: 200ms}
pools:
  - name: mixed
    gpus: {index: 0-1}
    memoryEnforcement: {policy: kill, period: 200ms, grace: 300ms}
    offer: all
    backends:
      - {backend: fraction, sharesPerGpu: 10}
      - {backend: whole}
"""
_SLICES: Final = "      - {backend: timeslice, replicas: 4}\n"
_REST: Final = """\
  - name: mps
    gpus: {index: 2}
    offer: all
    backends:
      - {backend: mps, unitsPerGpu: 10}
      - {backend: whole, resource: example.com/gpu}
  - name: mig
    gpus: {index: 3}
    offer: all
    backends: [{backend: mig, profiles: [1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb], keepWarm: 1s}]
  - name: claims
    gpus: {index: 4}
    api: dra
    backends:
      - {backend: fraction, resource: metagpu.io/by-claim, sharesPerGpu: 100}
      - {backend: whole, resource: metagpu.io/whole-by-claim}
      - {backend: timeslice, resource: metagpu.io/slice-by-claim, replicas: 4}
"""
CONFIGURATIONS: Final = {
    "all": _HEAD + _SLICES + _REST,
    "no slices": _HEAD + _REST,
    "turns": _HEAD.replace("    offer: all\n", "") + _SLICES + _REST,
    "wrong": _HEAD + "      - {backend: timesliced}\n" + _REST,
}
"""`wrong` is refused: what was in force before stays."""
MISSING: Final = {
    "all": frozenset[str](),
    "no slices": frozenset({SLICED}),
    "turns": frozenset({FRACTION, WHOLE, SLICED}),
}
"""The resources that a configuration lacks, or whose amounts change while they take turns."""
