"""The demo's scenarios: nodes, configurations, pods, the fault, and its tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import convert

from metagpu.core.reports.schema.gpus import GpuReport
from metagpu.display.status import gpus_table, show, table
from metagpu.display.table import Cell, TextTable

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


GROWTH_NODE: Final = "a100-40gb:1"
GROWTH_CONFIG: Final = """\
version: metagpu/v1
pools:
  - name: all
    memoryEnforcement: {policy: kill}
    backends: [{backend: fraction}]
"""
GROWTH_SHARES: Final = 50
GROWTH: Final = (("serve", 18), ("notebook", 12), ("notebook", 9))
"""Processes that start, by pod and GiB: half of the GPU is 20 GiB."""


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
        DemoClaim(name, "3g.40gb, or else 25 shares", _MIG_OR_ELSE)
        for name in ("serve", "train", "tune")
    ),
    DemoClaim(
        "batch", "a whole GPU", {"exactly": {"deviceClassName": "gpu.metagpu.io"}}, waits=True
    ),
)


def show_demo(story: Mapping[str, Any]) -> None:
    """Print what happened in the demo."""
    node, fault, claims = story["node"], story["fault"], story["claims"]
    growth = story["growth"]
    show(
        "metagpu on simulated nodes. Only the GPUs and the cluster are simulated.",
        *_heading(f"1. Fractions: {node['gpus']} offers {node['capacity']} shares, 100 per GPU"),
        _pods(story["pods"], story["before"]["gpus"]),
        *(
            Cell(f"{pod['pod']} waits: {pod['message']}; no GPU has that many free", "yellow")
            for pod in story["pods"]
            if not pod["admitted"]
        ),
        *_heading(f"2. A fault: GPU {fault['gpu']} reports XID {fault['xid']}"),
        gpus_table(convert(story["after"]["gpus"], list[GpuReport]), "HELD"),
        f"The node's allocatable shares fall from {fault['allocatableBefore']} to "
        f"{fault['allocatable']}: only GPU {fault['gpu']} leaves service. "
        f"The {len(fault['running'])} running pods stay.",
        f"GPU {fault['gpu']} returns to service when NVML requires no recovery action and its "
        f"checks pass, or by `metagpu acknowledge {fault['gpu']}`.",
        *_heading(f"3. A mixed pool: {story['pool']['gpus']} in time-slices, by MPS or whole"),
        _steps(story["pool"]["steps"], _owners),
        "All backends offer an idle GPU. Its first request chooses the backend, until the last pod "
        "ends. The last columns are the node's allocatable shares; shares in use count too.",
        *_heading(f"4. MIG on demand: requests create instances on {story['mig']['gpus']}"),
        _steps(story["mig"]["steps"], _slices),
        "The GPU column shows memory slices; 3 is a slice of a 3g instance. An instance without a "
        "pod is kept for the next pod of its size, until another pod needs its slices.",
        *_heading("5. Exact offers: 30 shares are free on each of two GPUs, and a pod requests 40"),
        _offers(story["offers"]),
        "The scheduler counts the shares of a node. With `offer: exact`, the default, it counts as "
        "many as one request can get: the pod waits for the end of another, and then runs.",
        *_heading(
            f"6. Over its share: two pods with {growth['shares']} shares of {growth['gpus']}, "
            "20 GiB each"
        ),
        _growth(growth["steps"]),
        "The pool has `memoryEnforcement: {policy: kill}`; the default, warn, ends nothing. The "
        f"Event says: {growth['message']}",
        *_heading(f"7. ResourceClaims (DRA): pods describe what they need of {claims['gpus']}"),
        _claims(claims["claims"]),
        "A claim names a class of devices and an amount, or alternatives in order. The scheduler "
        "chooses the device, and metagpu prepares it. A GPU has one backend at a time here too.",
    )


def _heading(text: str) -> Sequence[Cell]:
    return Cell(""), Cell(text, "bold")


def _pods(pods: Sequence[Mapping[str, Any]], gpus: Sequence[Mapping[str, Any]]) -> TextTable:
    index = {gpu["uuid"]: str(gpu["index"]) for gpu in gpus}
    rows = table("POD", "RESOURCE", "SHARES", "GPUS", "MEMORY")

    for pod in pods:
        indices, memory = "waits", "-"
        if pod["admitted"]:
            indices = ", ".join(index[gpu] for gpu in pod["gpus"])
            memory = f"{pod['memoryMiB']} MiB"
        rows.add(pod["pod"], pod["resource"], str(pod["shares"]), indices, memory)
    return rows


def _offers(policies: Sequence[Mapping[str, Any]]) -> TextTable:
    """Return a table of what becomes of the pod under each policy."""
    rows = table("OFFER", "COUNT AS FREE", "THE POD", "THEN COUNT", "AND THE POD")
    for policy in policies:
        cells = [
            text for each in policy["outcomes"] for text in (str(each["free"]), each["outcome"])
        ]
        rows.add(policy["offer"], *cells, *["-"] * (4 - len(cells)))
    return rows


def _growth(steps: Sequence[Mapping[str, Any]]) -> TextTable:
    """Return a table of the memory that the pods use after each step."""
    names = list(steps[0]["gib"])
    rows = table("EVENT", *[f"{name.upper()} USES" for name in names])
    for step in steps:
        rows.add(step["event"], *[f"{step['gib'][name]} GiB" for name in names])
    return rows


def _claims(claims: Sequence[Mapping[str, Any]]) -> TextTable:
    """Return a table of what each claim asks for, and gets."""
    rows = table("CLAIM", "ASKS FOR", "GETS")
    for claim in claims:
        waits = claim["state"] == "Pending"
        rows.add(claim["name"], claim["asks"], Cell(claim["gets"], "yellow" if waits else ""))
    return rows


def _steps(
    steps: Sequence[Mapping[str, Any]], cells: Callable[[Mapping[str, Any]], Sequence[Cell]]
) -> TextTable:
    """Return a table of the GPUs and the allocatable shares after each step."""
    first = steps[0]
    gpus = [f"GPU {gpu['index']}" for gpu in first["gpus"]]
    names = [name.rpartition("/")[2].removeprefix("mig-") for name in first["allocatable"]]
    rows = table("EVENT", *gpus, *names, whole=gpus)

    for step in steps:
        counts = [Cell(str(count)) for count in step["allocatable"].values()]
        rows.add(step["event"], *cells(step), *counts)
    return rows


def _owners(step: Mapping[str, Any]) -> Sequence[Cell]:
    """Return the owner of each GPU."""
    return [
        Cell(gpu["owner"], "bold") if gpu["owner"] else Cell("idle", "dim") for gpu in step["gpus"]
    ]


def _slices(step: Mapping[str, Any]) -> Sequence[Cell]:
    """Return the memory slices of each GPU by their instance: `3 3 3 3 · · 1 ·`."""
    return [Cell(" ".join(str(n or "·") for n in sizes)) for sizes in step["slices"]]
