"""The simulated scheduler's decisions on claims are those of the real scheduler.

Both get the same ResourceSlices and the same claims, one after the other. The real one's order is
determined since 1.36 (pools and slices by name, devices as listed), so the same devices are
expected, not merely valid ones.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from uuid import uuid4

import pytest
import yaml

from metagpu.sim.allocation.allocator import AllocationResult, allocate, held_devices
from metagpu.sim.allocation.amounts import parse_amount
from metagpu.sim.allocation.pools import gather_pools
from tests.backends.mig.gpus import mig_gpu
from tests.e2e.claims import shares
from tests.e2e.fake_node import (
    DRIVER,
    NODE,
    Allocation,
    FakeNode,
    capacity,
    exactly,
    fake_node,
    together,
)
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.test_dra_scheduler import MIG, mig, shared_gpu, slices

BY_MEMORY = """\
version: metagpu/v1
pools:
  - name: by-memory
    api: dra
    backends: [{backend: fraction, resource: cnvrg.io/gpu-memory, memoryUnit: 1Gi}]
"""
PROFILES = ("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")
ILL = "metagpu.io/unhealthy"
SEED = 84
CLAIMS = 30
Wanted = tuple[list[Document], list[Document]]
"""Requests, and constraints."""


@pytest.fixture(scope="module")
def fake(node: Node) -> Iterator[FakeNode]:
    """Create a Node without a kubelet, and the classes of the devices."""
    with fake_node(node) as fake:
        yield fake


def random_claim(draw: random.Random) -> Wanted:
    """Return a claim as one of those that the page shows, of a random size."""
    some = draw.randint(1, 60)
    profile = draw.choice(PROFILES)
    alternatives = [
        {"name": "mig", **mig(profile)["exactly"]},
        {"name": "part", **shares(some)["exactly"]},
    ]
    tolerant = [{"key": ILL, "operator": "Exists", "effect": "NoSchedule"}]
    large = f"device.capacity['{DRIVER}'].memory.compareTo(quantity('30Gi')) >= 0"
    same, other = f"{DRIVER}/uuid", "resource.kubernetes.io/pciBusID"
    choices: Sequence[Wanted] = (
        ([shares(some)], []),
        ([shares(some)], []),
        ([exactly("gpu", "fraction.metagpu.io", capacity=capacity(memory=f"{some}Gi"))], []),
        ([exactly("gpu", "fraction.metagpu.io")], []),
        ([exactly("gpu", "mps.metagpu.io", capacity=capacity(shares=f"{some}500m"))], []),
        ([exactly("gpu", "timeslice.metagpu.io", draw.randint(1, 2))], []),
        ([exactly("gpu", "gpu.metagpu.io")], []),
        ([exactly("gpu", "gpu.metagpu.io", tolerations=tolerant)], []),
        ([exactly("gpu", "gpu.metagpu.io", selectors=[{"cel": {"expression": large}}])], []),
        ([mig(profile)], []),
        ([mig("1g.5gb"), mig(profile, "second")], [{"matchAttribute": f"{DRIVER}/parentUUID"}]),
        ([{"name": "gpu", "firstAvailable": alternatives}], []),
        ([shares(some), shares(30, "second")], [{"matchAttribute": same}]),
        ([shares(some), shares(30, "second")], [{"distinctAttribute": other}]),
        ([exactly("gpu", "fraction.metagpu.io", 2, capacity=capacity(shares=some))], []),
    )
    return draw.choice(choices)


def simulated(
    slices_now: Sequence[Document], claims: Mapping[str, Document], name: str
) -> Sequence[AllocationResult]:
    """Return what the simulated scheduler gives a claim beside those of others."""
    documents = yaml.safe_load_all((REPOSITORY / "deploy" / "dra.yaml").read_text())
    classes = {
        document["metadata"]["name"]: document
        for document in documents
        if document["kind"] == "DeviceClass"
    }
    others = [document for other, document in claims.items() if other != name]
    found = allocate(gather_pools(slices_now, NODE), [claims[name]], classes, held_devices(others))
    return () if found is None else found[0]


def compared(devices: Sequence[Allocation | AllocationResult]) -> list[tuple[object, ...]]:
    """Return devices of either scheduler in one form."""
    found: list[tuple[object, ...]] = []
    for device in devices:
        where = (
            (device.id.pool, device.id.device)
            if isinstance(device, AllocationResult)
            else (device.pool, device.device)
        )
        amounts = {name: parse_amount(value) for name, value in (device.consumed or {}).items()}
        found.append((device.request, *where, amounts))
    return found


@pytest.mark.long
def test_thirty_random_claims_are_decided_alike(fake: FakeNode) -> None:
    """Thirty claims that come, and some that end between them, get the same devices from both."""
    draw = random.Random(SEED)  # noqa: S311 - claims guard nothing
    ill = slices(shared_gpu(5))
    taint = {"key": ILL, "value": "79", "effect": "NoSchedule"}
    for spec in ill:  # this GPU is out of service
        if "devices" in spec:
            spec["devices"] = [{**device, "taints": [taint]} for device in spec["devices"]]
    specs = together(
        slices(shared_gpu(0), shared_gpu(1)),
        slices(mig_gpu(2), mig_gpu(3), text=MIG),
        slices(shared_gpu(4), text=BY_MEMORY),
        ill,
    )
    fake.publish(specs)
    is_last = {"cel": {"expression": f"device.attributes['{DRIVER}'].uuid == '{shared_gpu(5).id}'"}}
    tolerant = [{"key": ILL, "operator": "Exists"}]
    probe = exactly("gpu", "gpu.metagpu.io", selectors=[is_last], tolerations=tolerant)
    fake.ask("last-slice", probe)
    assert fake.await_allocated("last-slice")  # the scheduler has seen all slices
    fake.end("last-slice")
    published = [
        {"metadata": {"name": f"{number:05x}-{NODE}"}, "spec": spec}
        for number, spec in enumerate(specs)
    ]
    running: list[str] = []
    allocated = 0
    try:
        for number in range(CLAIMS):
            name = f"claim-{number}-{uuid4().hex[:4]}"
            requests, constraints = random_claim(draw)
            if running and draw.random() < 1 / 3:
                fake.end(running.pop(draw.randrange(len(running))))
            real = fake.allocate(name, *requests, constraints=constraints)
            claims = fake.claims()
            ours = simulated(published, claims, name)
            assert compared(ours) == compared(real), f"{name}: {requests} {constraints}"
            allocated += bool(real)
            if real:
                running.append(name)
            else:
                fake.end(name)  # it would get what the next end frees
        assert allocated >= CLAIMS // 2
        assert allocated < CLAIMS
    finally:
        fake.clear()
