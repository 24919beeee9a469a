"""The simulated allocation finds the devices that kube-scheduler's allocator finds."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from metagpu.sim.allocation.allocator import HeldDevices
from metagpu.sim.allocation.amounts import AllocationError
from metagpu.sim.allocation.pools import DeviceId, gather_pools
from tests.backends.mig.gpus import mig_gpu
from tests.sim.allocation.slices import (
    CLASSES,
    DRIVER,
    NODE,
    Document,
    amount,
    claim,
    device,
    found,
    names,
    pool,
    published,
    request,
    shared,
    takes,
)

RANGE = {"default": "1", "validRange": {"min": "1", "step": "1"}}
TENS = {"default": "10", "validRange": {"min": "10", "step": "10", "max": "50"}}
MIB = {"default": "1Mi", "validRange": {"min": "1Mi", "step": "1Mi"}}
FEW = {"default": "25", "validValues": ["25", "50"]}
DEPLOYED = Path(__file__).parents[3] / "deploy" / "dra.yaml"
CONFIG = """\
version: metagpu/v1
pools:
  - name: all
    api: dra
    backends: [{backend: mig, profiles: [1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb]}]
"""


def fraction(name: str, value: object = 100, **more: object) -> Document:
    """Return a shared device, by default of 100 shares in steps of 1."""
    return device(name, "fraction", **shared(value, **RANGE), **more)


def holding(name: str, shares: int, pool_name: str = "p") -> HeldDevices:
    """Return what another claim has of a shared device."""
    return HeldDevices(shared={DeviceId(DRIVER, pool_name, name): {"shares": Fraction(shares)}})


def alone(*devices: str, pool_name: str = "p") -> HeldDevices:
    """Return devices that other claims have alone."""
    return HeldDevices(frozenset(DeviceId(DRIVER, pool_name, other) for other in devices))


TWO = pool(device("a"), device("b"))
OWNER = takes(owner=1)
MIXED = pool(device("all", **OWNER), fraction("half", **OWNER), counters={"owner": 1})
MIG = pool(
    device("0-1", "mig", **takes(s0=1, s1=1)),
    device("2-3", "mig", **takes(s2=1, s3=1)),
    device("1-2", "mig", **takes(s1=1, s2=1)),
    counters={f"s{n}": 1 for n in range(4)},
)
ROOTS = pool(
    *(
        device(name, attributes={"type": {"string": "gpu"}, "root": {"string": root}})
        for name, root in (("a", "x"), ("b", "y"), ("c", "x"))
    )
)
MATCH = {"matchAttribute": f"{DRIVER}/root"}
DISTINCT = {"distinctAttribute": f"{DRIVER}/root"}
TAINT = {"key": "metagpu.io/unhealthy", "value": "79", "effect": "NoSchedule"}
TAINTED = pool(device("ill", taints=[TAINT]), device("well"))


@pytest.mark.parametrize(
    ("slices", "requests", "held", "expected"),
    [
        pytest.param(TWO, [request()], None, ["a"], id="the first that fits"),
        pytest.param(TWO, [request()], alone("a"), ["b"], id="not what another claim has"),
        pytest.param(TWO, [request(count=2)], None, ["a", "b"], id="several in their order"),
        pytest.param(TWO, [request(count=3)], None, None, id="more than there are"),
        pytest.param(TWO, [request("x"), request("y")], None, ["a", "b"], id="two requests"),
        pytest.param(TWO, [request(allocationMode="All")], None, ["a", "b"], id="all"),
        pytest.param(TWO, [request(allocationMode="All")], alone("b"), None, id="all, one is held"),
        pytest.param(
            TWO, [request(kind="mig", allocationMode="All")], None, None, id="all of none"
        ),
        pytest.param(
            [*pool(device("b"), name="2"), *pool(device("a"), name="1")],
            [request(count=2)],
            None,
            ["a", "b"],
            id="pools by name",
        ),
        pytest.param(
            MIXED, [request()], holding("half", 1), None, id="counters of a shared device"
        ),
        pytest.param(
            MIXED,
            [request(kind="fraction", capacity=amount(shares=99))],
            holding("half", 1),
            ["half"],
            id="a shared device takes its counters once",
        ),
        pytest.param(
            MIXED,
            [
                request("x", "fraction", capacity=amount(shares=60)),
                request("y", "fraction", capacity=amount(shares=40)),
            ],
            None,
            ["half", "half"],
            id="two requests of one shared device",
        ),
        pytest.param(MIXED, [request(kind="fraction")], alone("all"), None, id="counters of all"),
        pytest.param(MIG, [request(kind="mig", count=2)], None, ["0-1", "2-3"], id="places"),
        pytest.param(MIG, [request(kind="mig", count=3)], None, None, id="places overlap"),
        pytest.param(MIG, [request(kind="mig")], alone("0-1"), ["2-3"], id="places beside others"),
        pytest.param(MIG, [request(kind="mig")], alone("1-2"), None, id="places in the middle"),
        pytest.param(TAINTED, [request()], None, ["well"], id="a taint"),
        pytest.param(
            TAINTED,
            [request(tolerations=[{"key": TAINT["key"], "operator": "Exists"}])],
            None,
            ["ill"],
            id="a tolerated taint",
        ),
        pytest.param(
            TAINTED,
            [request(tolerations=[{"key": TAINT["key"], "operator": "Equal", "value": "48"}])],
            None,
            ["well"],
            id="a toleration of another value",
        ),
        pytest.param(
            pool(device("a", taints=[{"key": "k", "effect": "None"}])),
            [request()],
            None,
            ["a"],
            id="a taint without an effect",
        ),
    ],
)
def test_devices(
    slices: Sequence[Document],
    requests: Sequence[Document],
    held: HeldDevices | None,
    expected: list[str] | None,
) -> None:
    """A claim gets the first devices that fulfil all of it, or none."""
    assert names(slices, claim(*requests), held=held) == expected


@pytest.mark.parametrize(
    ("policy", "value", "asked", "used", "expected"),
    [
        pytest.param(RANGE, 100, "50", 0, "50", id="as asked"),
        pytest.param(RANGE, 100, None, 0, "1", id="the default"),
        pytest.param(RANGE, 100, "32500m", 0, "33", id="rounded up to a step"),
        pytest.param(RANGE, 100, "51", 50, None, id="more than is left"),
        pytest.param(RANGE, 100, "50", 50, "50", id="all that is left"),
        pytest.param(TENS, 100, "1", 0, "10", id="the least"),
        pytest.param(TENS, 100, "41", 0, "50", id="the most"),
        pytest.param(TENS, 100, "51", 0, None, id="above the most"),
        pytest.param(MIB, "40Gi", "10Gi", 0, "10Gi", id="memory"),
        pytest.param(MIB, "40Gi", "1", 0, "1Mi", id="a byte of memory"),
        pytest.param(FEW, 100, "26", 0, "50", id="one of few values"),
        pytest.param(FEW, 100, "51", 0, None, id="none of few values"),
        pytest.param({}, 100, None, 0, "100", id="all without a policy"),
        pytest.param({}, 100, "7", 0, "7", id="as asked without a policy"),
    ],
)
def test_consumed_capacity(
    policy: dict[str, object], value: object, asked: str | None, used: int, expected: str | None
) -> None:
    """An amount is rounded up by the policy, and fits beside those of others."""
    slices = pool(device("a", "fraction", **shared(value, **policy)))
    more: dict[str, Any] = {} if asked is None else {"capacity": amount(shares=asked)}
    held = holding("a", used) if used else None
    results = found(slices, claim(request(kind="fraction", **more)), held=held)
    consumed = None if results is None else (results[0][0].consumed or {}).get("shares")
    assert consumed == expected


def test_a_capacity_selects_a_device_of_one_claim() -> None:
    """An amount of a device that is not shared is a minimum; one that it lacks selects nothing."""
    small = {"memory": {"value": "16Gi"}}
    slices = pool(device("a", capacity=small), device("b", capacity={"memory": {"value": "40Gi"}}))
    assert names(slices, claim(request(capacity=amount(memory="20Gi")))) == ["b"]
    assert names(slices, claim(request(capacity=amount(shares=1)))) is None


@pytest.mark.parametrize(
    ("constraint", "count", "expected"),
    [
        pytest.param([MATCH], 2, ["a", "c"], id="the same value"),
        pytest.param([MATCH], 3, None, id="too few of the same value"),
        pytest.param([DISTINCT], 2, ["a", "b"], id="different values"),
        pytest.param([{**MATCH, "requests": ["other"]}], 2, ["a", "b"], id="of another request"),
        pytest.param([{"matchAttribute": f"{DRIVER}/numa"}], 1, None, id="a missing attribute"),
    ],
)
def test_constraints(constraint: list[Document], count: int, expected: list[str] | None) -> None:
    """Devices of a claim have one value of an attribute, or different ones."""
    wanted = claim(request(count=count), constraints=constraint)
    assert names(ROOTS, wanted) == expected


def test_the_search_goes_back() -> None:
    """A first choice is given up where the next request finds nothing beside it."""
    slices = pool(device("any"), device("only", "mig"))
    either = {"selectors": [{"cel": {"expression": "true"}}]}
    requests = (
        {"name": "first", "exactly": {"deviceClassName": "gpu.metagpu.io", **either}},
        request("second", "gpu"),
    )
    assert names(slices, claim(*requests)) is None
    gone_back = pool(
        device("x", attributes={"type": {"string": "gpu"}, "root": {"string": "1"}}),
        device("y", attributes={"type": {"string": "gpu"}, "root": {"string": "2"}}),
        device("z", attributes={"type": {"string": "gpu"}, "root": {"string": "2"}}),
    )
    assert names(gone_back, claim(request("a"), request("b"), constraints=[MATCH])) == ["y", "z"]


def test_the_first_alternative_that_is_available() -> None:
    """Alternatives are tried in order, and the result names the one that was taken."""
    alternatives = [
        {"name": "mig", **request(kind="mig")["exactly"]},
        {"name": "half", **request(kind="fraction", capacity=amount(shares=50))["exactly"]},
    ]
    wanted = claim({"name": "gpu", "firstAvailable": alternatives})
    slices = pool(fraction("f"), device("m", "mig"))
    for held, expected in ((None, "gpu/mig"), (alone("m"), "gpu/half")):
        results = found(slices, wanted, held=held)
        assert results is not None
        assert [result.request for result in results[0]] == [expected]


def test_claims_of_a_pod_are_allocated_together() -> None:
    """Without devices for all claims, none of them gets one."""
    claims = [claim(request(), name=name) for name in "xyz"]
    assert names(TWO, *claims[:2]) == ["a", "b"]
    assert names(TWO, *claims) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"resourceSliceCount": 3}, "incomplete"),
        ({"generation": 2, "resourceSliceCount": 1}, "counter not found"),
    ],
)
def test_a_pool_that_cannot_be_used(change: dict[str, int], problem: str) -> None:
    """Nothing is allocated from a pool with slices missing, nor by counters that are not there."""
    counters, devices = pool(device("a", **OWNER), counters={"owner": 1})
    spec = {**devices["spec"], "pool": {**devices["spec"]["pool"], **change}}
    slices = [counters, {**devices, "spec": spec}]
    if problem == "incomplete":
        slices[0] = {**counters, "spec": {**counters["spec"], "pool": spec["pool"]}}
    assert gather_pools(slices, NODE).problems == {"p": problem}
    assert names(slices, claim(request())) is None


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (request(kind="npu"), "request gpu: device class npu.metagpu.io does not exist"),
        (request(count=50), "claim default/claim: number of requested devices 50 exceeds the"),
        (request(adminAccess=True), "request gpu: the simulator has no adminAccess"),
        (request(capacity=amount(shares="half")), "'half' is not an amount"),
        (
            request(selectors=[{"cel": {"expression": "device.attributes['x'].y == 1"}}]),
            "no such key: y",
        ),
    ],
)
def test_what_cannot_be_allocated(wanted: Document, problem: str) -> None:
    """A claim that can be allocated nowhere is refused with a reason."""
    with pytest.raises(AllocationError, match=problem):
        names(TWO, claim(wanted))


def test_real_slices_have_places() -> None:
    """Instances fill the GPUs that a daemon publishes until no place is left."""
    slices = published(CONFIG, mig_gpu(0), mig_gpu(1))
    is_3g = f"device.attributes['{DRIVER}'].profile == '3g.20gb'"
    large = [request(f"r{n}", "mig", selectors=[{"cel": {"expression": is_3g}}]) for n in range(5)]
    results = names(slices, claim(*large[:4]))
    assert results is not None
    assert len(set(results)) == 4
    assert names(slices, claim(*large)) is None


def test_classes_are_those_of_the_chart() -> None:
    """The simulated cluster has the DeviceClasses that `deploy/dra.yaml` creates."""
    documents = yaml.safe_load_all(DEPLOYED.read_text(encoding="utf-8"))
    classes = {
        document["metadata"]["name"]: document["spec"]
        for document in documents
        if document["kind"] == "DeviceClass"
    }
    assert classes == {name: document["spec"] for name, document in CLASSES.items()}
