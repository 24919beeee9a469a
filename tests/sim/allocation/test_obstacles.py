"""The request of a claim that has no device, and the sentence why."""

import pytest

from metagpu.sim.allocation.obstacles import ClaimObstacle, ObstacleKind, find_obstacle
from metagpu.sim.allocation.pools import gather_pools
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import gpu
from tests.sim.allocation.slices import CLASSES, NODE, Document, published

SHARED = """
version: metagpu/v1
pools:
  - name: all
    api: dra
    backends: [{backend: whole}, {backend: fraction}]
"""
MIG = """
version: metagpu/v1
pools:
  - name: all
    api: dra
    backends: [{backend: mig, profiles: [1g.5gb, 3g.20gb]}]
"""


def exactly(kind: str, name: str = "gpu", **more: object) -> Document:
    """Return a request of devices of a class of the chart."""
    return {"name": name, "exactly": {"deviceClassName": f"{kind}.metagpu.io", **more}}


def shares(amount: str, name: str = "gpu", kind: str = "fraction") -> Document:
    """Return a request of shares."""
    return exactly(kind, name, capacity={"requests": {"shares": amount}})


def claim(*requests: Document, **constraint: str) -> Document:
    """Return a claim of these requests, with one constraint or none."""
    devices = {"requests": requests, "constraints": [constraint] if constraint else []}
    return {"metadata": {"name": "claim"}, "spec": {"devices": devices}}


SLICES = published(SHARED, gpu(0), gpu(1))
PROFILE = "device.attributes['gpu.metagpu.io'].profile == '3g.20gb'"


@pytest.mark.parametrize(
    ("wanted", "request_name", "reason"),
    [
        (claim(exactly("mig")), "gpu", "no device is of the class mig.metagpu.io"),
        (claim(exactly("none")), "gpu", "device class none.metagpu.io does not exist"),
        (
            claim(shares("101")),
            "gpu",
            (
                "101 of the capacity shares are requested, and a device of fraction.metagpu.io has "
                "100 at most"
            ),
        ),
        (
            claim(shares("1", kind="gpu")),
            "gpu",
            "devices of gpu.metagpu.io have no capacity shares; they have: memory",
        ),
        (
            claim(exactly("gpu", count=3)),
            "gpu",
            "3 devices are requested, and 2 of gpu.metagpu.io fit",
        ),
        (
            claim(exactly("gpu", selectors=[{"cel": {"expression": "device.driver == 'other'"}}])),
            "gpu",
            "no device of gpu.metagpu.io fulfils device.driver == 'other'",
        ),
        (
            claim(exactly("gpu", "a", count=2), shares("1", "b")),
            "b",
            "no device is left after those of a",
        ),
        (
            claim(exactly("gpu", "a"), shares("1", "b"), matchAttribute="gpu.metagpu.io/uuid"),
            "b",
            "no devices fulfil the constraint matchAttribute gpu.metagpu.io/uuid",
        ),
        (
            claim(
                {
                    "name": "gpu",
                    "firstAvailable": [
                        {"name": "mig", "deviceClassName": "mig.metagpu.io"},
                        {"name": "two", "deviceClassName": "gpu.metagpu.io", "count": 3},
                    ],
                }
            ),
            "gpu",
            (
                "mig: no device is of the class mig.metagpu.io; "
                "two: 3 devices are requested, and 2 of gpu.metagpu.io fit"
            ),
        ),
    ],
)
def test_the_request_without_a_device_has_its_reason(
    wanted: Document, request_name: str, reason: str
) -> None:
    """Selectors, capacities, numbers, other requests and constraints each have a sentence."""
    pools = gather_pools(SLICES, NODE)
    assert find_obstacle(pools, [wanted], CLASSES) == ClaimObstacle(0, request_name, reason)


EITHER = {"name": "one", "firstAvailable": [{"name": "a", "deviceClassName": "gpu.metagpu.io"}]}


@pytest.mark.parametrize("place", ["constraint matchAttribute gpu.metagpu.io/uuid", "config"])
@pytest.mark.parametrize("name", ["two", "one/b", "gpu/a"])
def test_a_name_that_is_no_request_is_named(place: str, name: str) -> None:
    """The API server takes no claim with it; an alternative has a name with its request's."""
    pools = gather_pools(SLICES, NODE)

    def naming(*names: str) -> Document:
        found = claim(EITHER, shares("1"))
        own = {"requests": names}
        constraint = {"matchAttribute": "gpu.metagpu.io/uuid", **own}
        more = {"config": [own]} if place == "config" else {"constraints": [constraint]}
        return {**found, "spec": {"devices": {**found["spec"]["devices"], **more}}}

    assert find_obstacle(pools, [naming("one/a")], CLASSES) is None
    assert find_obstacle(pools, [naming("one")], CLASSES) is None
    found = find_obstacle(pools, [naming("one", name)], CLASSES)
    reason = f"its {place} names the request {name}, and the claim has: one, gpu, one/a"
    assert found == ClaimObstacle(0, "", reason, ObstacleKind.ERROR)


def test_a_constraint_of_no_attribute_is_refused() -> None:
    """Also in a claim without a request."""
    bare = {"metadata": {"name": "claim"}, "spec": {"devices": {"constraints": [{}]}}}
    found = find_obstacle(gather_pools(SLICES, NODE), [bare], CLASSES)
    reason = "a constraint has neither matchAttribute nor distinctAttribute"
    assert found == ClaimObstacle(0, "", reason, ObstacleKind.ERROR)


def test_instances_that_overlap_are_no_missing_devices() -> None:
    """All of one GPU's MIG devices fit, and not together."""
    pools = gather_pools(published(MIG, mig_gpu(0)), NODE)
    selectors = [{"cel": {"expression": PROFILE}}]
    assert find_obstacle(pools, [claim(exactly("mig", selectors=selectors))], CLASSES) is None
    found = find_obstacle(pools, [claim(exactly("mig", count=9))], CLASSES)
    assert found is not None
    assert found.reason.startswith("9 devices of mig.metagpu.io fit, and not 9 of them together")


def test_a_taint_is_named() -> None:
    """Tolerating it helps."""
    taint = {"key": "metagpu.io/cordoned", "effect": "NoSchedule"}
    tainted = [{**piece, "spec": _with_taint(piece["spec"], taint)} for piece in SLICES]
    pools = gather_pools(tainted, NODE)
    found = find_obstacle(pools, [claim(exactly("gpu"))], CLASSES)
    reason = "the request does not tolerate the taint metagpu.io/cordoned of 2 devices"
    assert found == ClaimObstacle(0, "gpu", f"{reason} of gpu.metagpu.io")
    tolerated = exactly("gpu", tolerations=[{"key": taint["key"], "operator": "Exists"}])
    assert find_obstacle(pools, [claim(tolerated)], CLASSES) is None


def _with_taint(spec: Document, taint: Document) -> Document:
    devices = [{**device, "taints": [taint]} for device in spec.get("devices", ())]
    return {**spec, "devices": devices} if devices else spec


def test_claims_of_one_pod_are_allocated_together() -> None:
    """Each of two fits alone."""
    pools = gather_pools(SLICES, NODE)
    both = [claim(exactly("gpu", count=2)), claim(shares("1"))]
    assert [find_obstacle(pools, [document], CLASSES) for document in both] == [None, None]
    found = find_obstacle(pools, both, CLASSES)
    assert found == ClaimObstacle(1, "", "no device is left after those of the claims before it")
