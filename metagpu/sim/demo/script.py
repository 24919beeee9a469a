"""The demo's scenarios: nodes, configurations, pods, and the fault."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

NODE: Final = "a100-40gb:8"
RESOURCE: Final = "cnvrg.io/metagpu"
FAULTY_GPU: Final = "0"
XID: Final = 79

PODS: Final = (
    ("metagpu-test", 30),  # the example pod of MetaGPU's own manual
    ("notebook", 50),
    ("train-large", 150),
    ("serve-a", 20),
    ("serve-b", 20),
    ("batch", 75),
    ("finetune", 400),
    ("experiment", 40),  # more shares are free, but not on one GPU: it waits
)


OFFERS_NODE: Final = "a100-40gb:2"
OFFERS_CONFIG: Final = """\
version: metagpu/v1
pools: [{{name: all, backends: [{{backend: fraction, offer: {offer}}}]}}]
"""
OFFER_POLICIES: Final = ("all", "exact")
OFFERS_HELD: Final = (("lab", 70), ("serve", 70))
OFFERS_WAITING: Final = ("train", 40)


class DemoScenario(msgspec.Struct, frozen=True):
    """Pods that start and end on a node, one after the other.

    Attributes:
        gpus: the node, as for `--simulate`.
        idle: the allocatable shares of the idle node.
        steps: pod, requested resource, and count; a step without a resource ends the pod.
    """

    gpus: str
    config: str
    idle: Mapping[str, int]
    steps: Sequence[tuple[str, str, int]]


SHARED: Final = "nvidia.com/gpu.shared"
MPS: Final = "nvidia.com/gpu.mps"
WHOLE: Final = "nvidia.com/gpu"
POOL: Final = DemoScenario(
    gpus="a100-40gb:2",
    config="""\
version: metagpu/v1
pools:
  - name: mixed
    backends:
      - {backend: timeslice, replicas: 4}
      - {backend: mps, unitsPerGpu: 100}
      - {backend: whole}
""",
    idle={SHARED: 8, MPS: 200, WHOLE: 2},
    steps=(("lab", SHARED, 1), ("train", WHOLE, 1), ("lab", "", 0), ("serve", MPS, 50)),
)

EIGHTH, QUARTER, HALF, FULL = (
    f"nvidia.com/mig-{profile}" for profile in ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb")
)
MIG: Final = DemoScenario(
    gpus="h100-80gb:1",
    config="""\
version: metagpu/v1
pools:
  - name: mig
    backends:
      - {backend: mig, profiles: [1g.10gb, 2g.20gb, 3g.40gb, 7g.80gb], enableMig: true}
""",
    idle={EIGHTH: 7, QUARTER: 3, HALF: 2, FULL: 1},
    steps=(
        ("notebook", EIGHTH, 1),
        ("serve", QUARTER, 1),
        ("train", HALF, 1),
        ("notebook", "", 0),
        ("serve", "", 0),
        ("finetune", HALF, 1),
    ),
)


class DemoClaim(msgspec.Struct, frozen=True):
    """A ResourceClaim of the demo.

    Attributes:
        asks: its request in words.
        request: its request as ResourceClaims have it, without a name.
        waits: whether no device is left for it.
    """

    name: str
    asks: str
    request: Mapping[str, Any]
    waits: bool = False


_FRACTION: Final = "fraction.metagpu.io"
_HALF_OF_MIG: Final = "device.attributes['gpu.metagpu.io'].profile == '3g.40gb'"
_MIG_OR_ELSE: Final = {
    "firstAvailable": [
        {
            "name": "mig",
            "deviceClassName": "mig.metagpu.io",
            "selectors": [{"cel": {"expression": _HALF_OF_MIG}}],
        },
        {
            "name": "fraction",
            "deviceClassName": _FRACTION,
            "capacity": {"requests": {"shares": "25"}},
        },
    ]
}
_HALF: Final = {"deviceClassName": _FRACTION, "capacity": {"requests": {"shares": "50"}}}
CLAIMS_NODE: Final = "h100-80gb:2"
CLAIMS_CONFIG: Final = """\
version: metagpu/v1
pools:
  - name: shared
    gpus: {index: 0}
    api: dra
    backends: [{backend: whole}, {backend: fraction}]
  - name: mig
    api: dra
    backends: [{backend: mig, profiles: [3g.40gb], enableMig: true}]
"""
CLAIMS: Final = (
    DemoClaim("notebook", "half a GPU", {"exactly": _HALF}),
    *(
        DemoClaim(it, "3g.40gb, or else 25 shares", _MIG_OR_ELSE)
        for it in ("serve", "train", "tune")
    ),
    DemoClaim(
        "batch", "a whole GPU", {"exactly": {"deviceClassName": "gpu.metagpu.io"}}, waits=True
    ),
)
