"""The real scheduler allocates published devices by the one rule of sharing."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import permutations

import pytest
from msgspec.structs import replace

from metagpu.compat.nvidia_claims import read_sharing
from metagpu.core.devices.slices import slices_of
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import ResourceClaimRef
from metagpu.plugins.dra.allocation import parse_allocation
from tests.backends.mig.gpus import mig_gpu
from tests.e2e.claims import shares
from tests.e2e.cluster import NAMESPACE
from tests.e2e.fake_node import (
    DRIVER,
    MARK,
    NODE,
    FakeNode,
    allocations_of,
    capacity,
    exactly,
    fake_node,
    together,
)
from tests.e2e.instances import MEMORY_SLICES
from tests.e2e.nvidia_claims import GPU_TEST5, NVIDIA, nvidia_classes
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.waiting import wait_for
from tests.rigs.build import gpu, offered

CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
FIXED_AMOUNT = "extendedResourceCapacityRequests"
"""A field of DeviceClasses by KEP-6406."""
SHARED = """\
version: metagpu/v1
pools:
  - name: shared
    api: dra
    backends:
      - {backend: whole}
      - {backend: fraction, sharesPerGpu: 100}
      - {backend: timeslice, replicas: 4}
      - {backend: mps}
      - {backend: mig, profiles: [1g.5gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb], enableMig: true}
"""
MIG = """\
version: metagpu/v1
pools:
  - name: mig
    api: dra
    backends:
      - {backend: mig, profiles: [1g.5gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb]}
"""
FRACTIONS = """\
version: metagpu/v1
pools: [{name: fractions, api: dra, backends: [{backend: fraction}]}]
"""
PLACES = MEMORY_SLICES | {"4g.20gb": 4}
"""Memory slices of an A100 with 40 GB, by profile."""
LIMITS = {"fraction": 100, "mps": 100, "timeslice": 4}
"""How many parts of one GPU all claims together may have."""


@pytest.fixture(scope="module")
def fake(node: Node) -> Iterator[FakeNode]:
    """Create a Node without a kubelet, and the classes of the devices."""
    with fake_node(node) as fake:
        yield fake


@pytest.fixture
def empty(fake: FakeNode) -> Iterator[FakeNode]:
    """Return the Node without devices and claims."""
    yield fake
    fake.clear()


def shared_gpu(index: int) -> Gpu:
    """Return an A100 of which MIG mode is off."""
    return replace(mig_gpu(index), mig_enabled=False)


def mig(
    profile: str, name: str = "gpu", driver: str = DRIVER, kind: str = "mig.metagpu.io"
) -> Document:
    """Return a request of one MIG device of a profile."""
    selector = {"cel": {"expression": f"device.attributes['{driver}'].profile == '{profile}'"}}
    return exactly(name, kind, selectors=[selector])


KINDS: Mapping[str, Document] = {
    "whole": exactly("gpu", "gpu.metagpu.io"),
    "fraction": shares(10),
    "timeslice": exactly("gpu", "timeslice.metagpu.io"),
    "mps": exactly("gpu", "mps.metagpu.io", capacity=capacity(shares=10)),
    "mig": mig("1g.5gb"),
}


def test_the_api_server_takes_every_field(empty: FakeNode) -> None:
    """Sixteen GPUs with MIG: nothing is dropped, every pool is complete, no slice is too long."""
    mig_gpus = slices(*map(mig_gpu, range(8)), text=MIG)
    empty.publish(together(mig_gpus, slices(*map(shared_gpu, range(8, 16)))))

    pools = defaultdict[str, list[Document]](list)
    for spec in empty.slices():
        pools[spec["pool"]["name"]].append(spec)
    assert {name: len(parts) for name, parts in pools.items()} == {NODE: 32, f"{NODE}/monitor": 2}
    for parts in pools.values():
        (count,) = {part["pool"]["resourceSliceCount"] for part in parts}
        assert count == len(parts)
        assert all(len(part.get("devices", ())) <= 64 for part in parts)
    assert sum(len(pool.get("sharedCounters", ())) for pool in pools[NODE]) == 16


def test_a_gpu_has_one_backend(empty: FakeNode) -> None:
    """While a claim holds a GPU by one backend, no claim gets it by another."""
    empty.publish(slices(shared_gpu(0)))
    for holder, request in KINDS.items():
        assert empty.allocate(holder, request)
        others = [kind for kind in KINDS if kind != holder]
        for other in others:
            empty.ask(f"{other}-beside-{holder}", KINDS[other])
        beside = {candidate: empty.settled(f"{candidate}-beside-{holder}") for candidate in others}
        assert beside == dict.fromkeys(others, ()), f"beside {holder}"
        empty.end(*(f"{candidate}-beside-{holder}" for candidate in others), holder)


def test_shares_add_up_to_a_gpu(empty: FakeNode) -> None:
    """Claims of shares fill one GPU after the other; a whole GPU waits for the last of them."""
    empty.publish(slices(shared_gpu(0), shared_gpu(1)))
    halves = [empty.allocate(f"half-{n}", shares(50)) for n in range(2)]
    assert len({allocation.gpu for (allocation,) in halves}) == 1

    (tenth,) = empty.allocate("tenth", shares(10))
    assert tenth.gpu != halves[0][0].gpu
    assert tenth.consumed == {"shares": "10"}
    (default,) = empty.allocate("default", exactly("gpu", "fraction.metagpu.io"))
    assert default.consumed == {"shares": "1"}
    assert empty.allocate("ninety", shares(90)) == ()
    assert empty.allocate("whole", KINDS["whole"]) == ()

    empty.end("default")
    assert [allocation.gpu for allocation in empty.await_allocated("ninety")] == [tenth.gpu]
    empty.end("half-0")
    assert empty.devices("whole") == ()
    empty.end("half-1")
    assert [allocation.gpu for allocation in empty.await_allocated("whole")] == [halves[0][0].gpu]


def test_requests_of_one_claim(empty: FakeNode) -> None:
    """Two requests may be on one GPU; a count of devices is of different GPUs."""
    empty.publish(slices(shared_gpu(0), shared_gpu(1)))
    same = [{"matchAttribute": f"{DRIVER}/uuid", "requests": ["large", "small"]}]
    both = empty.allocate("one-gpu", shares(40, "large"), shares(30, "small"), constraints=same)
    assert [allocation.consumed["shares"] for allocation in both] == ["40", "30"]
    assert len({allocation.gpu for allocation in both}) == 1

    pair = exactly("gpu", "fraction.metagpu.io", 2, capacity=capacity(shares=30))
    assert len({allocation.gpu for allocation in empty.allocate("two-gpus", pair)}) == 2
    three = exactly("gpu", "fraction.metagpu.io", 3, capacity=capacity(shares=1))
    assert empty.allocate("three-gpus", three) == ()


def test_mig_places_exclude_each_other(empty: FakeNode) -> None:
    """Two 3g fit an A100 and two 4g do not; the whole comes when, and only when, all are gone."""
    empty.publish(slices(mig_gpu(0), text=MIG))
    for order in permutations(("3g-0", "3g-1"), 2):
        assert all(empty.allocate(f"3g-{n}", mig("3g.20gb")) for n in range(2))
        assert empty.allocate("1g", mig("1g.5gb")) == ()
        assert empty.allocate("7g", mig("7g.40gb")) == ()
        empty.end("1g", order[0])
        assert empty.devices("7g") == ()
        empty.end(order[1])
        assert empty.await_allocated("7g")
        empty.end("7g")

    assert empty.allocate("4g-0", mig("4g.20gb"))
    assert empty.allocate("4g-1", mig("4g.20gb")) == ()
    assert empty.allocate("3g", mig("3g.20gb"))


def test_the_first_that_is_available(empty: FakeNode) -> None:
    """A claim gets a MIG device while there is one, and shares after that."""
    empty.publish(together(slices(mig_gpu(0), text=MIG), slices(gpu(1), text=FRACTIONS)))
    subrequests = [
        {"name": "mig", **mig("7g.40gb")["exactly"]},
        {"name": "half", **shares(50)["exactly"]},
    ]
    either = {"name": "gpu", "firstAvailable": subrequests}
    found = [empty.allocate(f"either-{n}", either) for n in range(3)]
    assert [allocation.request for (allocation,) in found] == ["gpu/mig", "gpu/half", "gpu/half"]


def test_nvidias_manifests_are_allocated(empty: FakeNode, node: Node) -> None:
    """Classes, claims and parameters of NVIDIA's quickstart, under its driver name.

    What the API server has of an allocated claim is read as the parameters mean it.
    """
    large = (
        f"device.attributes['{NVIDIA}'].productName.lowerAscii().matches('^.*a100.*$') && "
        f"device.attributes['{NVIDIA}'].architecture == 'Ampere' && "
        f"device.capacity['{NVIDIA}'].memory.compareTo(quantity('30Gi')) >= 0"
    )
    known = {"architecture": "ampere", "brand": "Nvidia"}
    gpus = [replace(shared_gpu(number), **known) for number in range(2)]
    divided = slices(replace(mig_gpu(2), **known), text=MIG, driver=NVIDIA)
    empty.publish(together(slices(*gpus, text=SHARED, driver=NVIDIA), divided))
    with nvidia_classes(node.kubectl):
        # gpu-test5: one GPU by time-slices, one by MPS
        found = empty.allocate(
            "gpu-test5",
            exactly("ts-gpu", NVIDIA, selectors=[{"cel": {"expression": large}}]),
            exactly("mps-gpu", NVIDIA),
            config=GPU_TEST5,
        )
        assert [allocation.request for allocation in found] == ["ts-gpu", "mps-gpu"]
        claim = empty.claims()["gpu-test5"]
        ref = ResourceClaimRef(NAMESPACE, "gpu-test5", claim["metadata"]["uid"])
        results = parse_allocation(ref, claim, NVIDIA, read_sharing).results
        sharing = [device.sharing for device in results]
        assert [
            claim_sharing and (claim_sharing.backend, claim_sharing.settings)
            for claim_sharing in sharing
        ] == [
            ("timeslice", "long"),
            ("mps", "50-10240"),
        ]
        # gpu-test1: no whole GPU is left; gpu-test4: MIG devices of one GPU
        assert empty.allocate("gpu-test1", exactly("gpu", NVIDIA)) == ()
        profiles = ("1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb")
        mig_devices = empty.allocate(
            "gpu-test4",
            *(mig(text, f"mig-{n}", NVIDIA, "mig.nvidia.com") for n, text in enumerate(profiles)),
            constraints=[{"requests": [], "matchAttribute": f"{NVIDIA}/parentUUID"}],
        )
        assert len(mig_devices) == len(profiles)


def test_a_class_fixes_the_amount_of_a_name_in_limits(empty: FakeNode, node: Node) -> None:
    """Each device of the name is of the amount of its class, where the API server has the field."""
    fraction = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'fraction'"
    spec = {
        "extendedResourceName": "example.com/quarter",
        FIXED_AMOUNT: capacity(shares=25),
        "selectors": [{"cel": {"expression": fraction}}],
    }
    limits = {"limits": {"example.com/quarter": "1"}}
    main = {"name": "main", "image": BUSYBOX_IMAGE, "resources": limits}
    where = {"nodeSelector": MARK, "tolerations": [{"operator": "Exists"}]}
    with node.api() as api:
        stored = api.call("POST", CLASSES, {"metadata": {"name": "quarter"}, "spec": spec})
        try:
            if FIXED_AMOUNT not in stored["spec"]:
                pytest.skip(f"this API server drops {FIXED_AMOUNT}: it is alpha in Kubernetes 1.38")
            empty.publish(slices(gpu(0), text=FRACTIONS))
            api.create(
                NAMESPACE,
                {"metadata": {"name": "quarter"}, "spec": {"containers": [main], **where}},
            )
            [(found,)] = wait_for(
                "a claim for the name",
                lambda: list(filter(None, map(allocations_of, empty.claims().values()))),
                within_s=60,
            )
            assert found.consumed == {"shares": "25"}
        finally:
            api.call("DELETE", f"{CLASSES}/quarter")


def slices(*gpus: Gpu, text: str = SHARED, driver: str = DRIVER) -> list[Document]:
    """Return the `spec` of every ResourceSlice of healthy GPUs under a configuration."""
    _, snapshot = offered(*gpus, text=text)
    return [dict(spec) for piece in slices_of(snapshot, NODE, driver).values() for spec in piece]
