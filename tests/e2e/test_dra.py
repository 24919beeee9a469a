"""ResourceClaims on a real kubelet: containers, leases, and what the API server sees."""

import time
import uuid
from collections.abc import Iterator, Mapping
from itertools import combinations

import anyio
import pytest
import yaml

from metagpu.core.devices.devices import gpu_of_device
from metagpu.plugins.kubelet.grpc_client import call_raw
from metagpu.plugins.kubelet.pb.k8s.io.kubelet.pkg.apis.dra import v1
from tests.e2e.claims import (
    MIG_GPU,
    SETTLED_S,
    ClaimsNode,
    claims_node,
    page_configuration,
    page_documents,
    pod,
    ready,
    resource_claim,
    shares,
)
from tests.e2e.cluster import NAMESPACE, Cluster, container
from tests.e2e.cluster import pod as pod_of
from tests.e2e.fake_node import DRIVER, exactly
from tests.e2e.nvidia_claims import GPU_TEST5, NVIDIA, QUICKSTART, gpu_config, nvidia_classes
from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.release import CHART, IMAGE, helm_of
from tests.e2e.rig.settings import KUBELET_HOME
from tests.e2e.rig.waiting import took, wait_for

FELL_OFF_THE_BUS = 79
UNHEALTHY = "metagpu.io/unhealthy"
GPU_MIB = 40960
ONE_GPU = {"constraints": [{"matchAttribute": f"{DRIVER}/uuid"}]}
CORDONED = [{"key": "metagpu.io/cordoned", "operator": "Exists"}]
SOON_S, CALL_S = 5.0, 45.0
TAINTED_S = 1.0
PREPARED_S = 2.0
"""From the end of the reason for which a ResourceClaim was not prepared."""
GONE_S = 1.0 + 5.0
"""The grace period of the tests' deletions, and what a pod may take beyond it."""
REGISTERED_S = 3.0
"""The kubelet looks for plugins every second: it lets go of a lost socket at one look and registers
the new one at the next; a second more is its own deadline of the driver's answer."""


@pytest.fixture(scope="module")
def shared_node(node: Node, daemon: Daemon, account: tuple[str, ...]) -> Iterator[ClaimsNode]:
    """Start the daemon with the configuration of the page."""
    with claims_node(Cluster(node, daemon), account) as live_claims_node:
        yield live_claims_node


@pytest.fixture
def claims(shared_node: ClaimsNode) -> Iterator[ClaimsNode]:
    """Return the node without ResourceClaims; a test leaves it so."""
    yield shared_node
    shared_node.clear()


def test_the_manifests_of_the_page(claims: ClaimsNode) -> None:
    """Each pod of the page runs, with the GPUs that its ResourceClaim has, and with no other."""
    sections = page_documents()
    claims.start(
        *(document for found in sections.values() for document in found if "kind" in document)
    )
    held = {name: claims.inspect(name) for name in ("half", "ten", "small", "pair", "first")}

    for name, claim in {"half": "half", "ten": "ten", "pair": "pair", "first": "together"}.items():
        devices = claims.allocation(claim)
        assert held[name].gpu_devices == {
            f"nvidia{claims.index_of(device)}" for device in devices
        }, name
    assert claims.inspect("second").gpu_devices == held["first"].gpu_devices
    assert held["half"].environment["METAGPU_MAX_MEM"] == str(GPU_MIB // 2)
    assert held["ten"].environment["METAGPU_MAX_MEM"] == str(10 * 1024)
    roots = claims.roots()
    assert (
        len({roots[claims.index_of(allocation)] for allocation in claims.allocation("pair")}) == 1
    )
    (mig,) = claims.allocation("small")
    assert mig.request == "gpu/mig"
    assert held["small"].gpu_devices == {f"nvidia{MIG_GPU}"}

    # One slice, one MIG device, two whole GPUs, 10 units of memory, 50 shares.
    assert claims.leased() == 1 + 1 + 2 + 10 + 50
    assert len(claims.files()) == 5
    assert len(claims.instances()) == 1


def test_containers_of_a_pod_have_their_own_requests(claims: ClaimsNode) -> None:
    """Two requests on one GPU are two limits of memory; a container has its own, or the sum."""
    claims.start(
        resource_claim("split", shares(40, "large"), shares(30, "small"), **ONE_GPU),
        pod("split", "split", one="large", two="small", both=""),
    )
    (gpu,) = {claims.index_of(allocation) for allocation in claims.allocation("split")}
    containers = [claims.inspect("split", name) for name in ("one", "two", "both")]

    assert all(holding.gpu_devices == {f"nvidia{gpu}"} for holding in containers)
    limits = [int(holding.environment["METAGPU_MAX_MEM"]) for holding in containers]
    assert limits == [GPU_MIB * part // 100 for part in (40, 30, 70)]
    assert claims.leased(gpu) == 70


def test_pods_that_share_a_claim(claims: ClaimsNode) -> None:
    """The claim is prepared once, and unprepared after the last pod has ended."""
    claims.start(resource_claim("both", shares(20)), pod("one", "both"), pod("two", "both"))
    files = claims.files()
    assert (claims.leased(), len(files)) == (20, 1)
    made = (claims.cdi / files[0]).stat().st_mtime_ns

    claims.cluster.delete("one")
    assert (claims.leased(), claims.files()) == (20, files)
    assert (claims.cdi / files[0]).stat().st_mtime_ns == made
    claims.cluster.delete("two")
    wait_for("the lease to end", lambda: not claims.leased(), within_s=SOON_S)
    assert claims.files() == []


def test_calls_come_twice(claims: ClaimsNode) -> None:
    """Prepare answers twice the same; another uid is refused with both; Unprepare succeeds."""
    claims.start(resource_claim("twice", shares(5)), pod("twice", "twice"))
    uid = claims.claims()["twice"]["metadata"]["uid"]
    other = str(uuid.uuid4())

    first, second = prepare("twice", uid), prepare("twice", uid)
    assert first == second
    assert [response.error for response in first.values()] == [""]
    assert claims.leased() == 5
    refused = prepare("twice", other)[other].error
    assert uid in refused
    assert other in refused
    assert [response.error for response in unprepare("gone", other).values()] == [""]
    assert claims.leased() == 5


def test_a_claim_that_cannot_be_prepared(claims: ClaimsNode) -> None:
    """The reason is in the pod's Event and leaves no lease; the pod runs when the reason ends."""
    claims.daemon.request("cordon", gpu="0", reason="fan")
    try:
        wait_for(
            "the taint",
            lambda: {"metagpu.io/cordoned"} in claims.taints(0).values(),
            within_s=SOON_S,
        )
        here = [{"cel": {"expression": first_gpu(claims)}}]
        request = shares(10, tolerations=CORDONED, selectors=here)
        claims.kubectl.apply(resource_claim("late", request), pod("late", "late"))
        refusal = wait_for("a refusal", lambda: claims.events("late"), within_s=20)
        assert "cordoned" in refusal
        assert "fan" in refusal
        assert claims.leased() == 0

        claims.kubectl.apply(resource_claim("never", request), pod("never", "never"))
        wait_for("a refusal", lambda: claims.events("never"), within_s=20)
        began = time.monotonic()
        claims.cluster.delete("never")
        took("the end of a pod that waits", time.monotonic() - began, at_most=GONE_S)
    finally:
        ended = time.time()
        claims.daemon.request("uncordon", gpu="0")
    wait_for("the pod to run", lambda: claims.phase("late") == "Running", within_s=SOON_S)
    prepared = claims.logged("resource claim prepared", claim=f"{NAMESPACE}/late")
    seconds = min(number for number in prepared if number >= ended) - ended
    took("Prepare after the reason's end", seconds, at_most=PREPARED_S)
    assert claims.leased(0) == 10
    assert set().union(*claims.taints(0).values()) == set()


def first_gpu(claims: ClaimsNode) -> str:
    """Return the CEL expression that selects the GPU of index 0."""
    return f"device.attributes['{DRIVER}'].uuid == '{claims.daemon.status()['gpus'][0]['uuid']}'"


def counted_batches(names: list[str]) -> Iterator[list[str]]:
    """Split the claims that fill a GPU into batches that the scheduler all counts right.

    For a moment it counts the capacity of an allocation twice: between its arrival in the cache of
    claims and its removal from those in flight (Kubernetes 1.36, `GatherAllocatedState`). So a
    batch fits even if all of it but the last claim is counted twice.
    """
    while names:
        fitting = (len(names) + 1) // 2
        yield names[:fitting]
        names = names[fitting:]


@pytest.mark.long
def test_many_claims_fill_a_gpu(claims: ClaimsNode) -> None:
    """Ten pods have ten distinct shares each of one GPU; the next goes to another."""
    names = [f"part-{n}" for n in range(10)]
    for batch in counted_batches(names):
        claims.start(
            *(document for n in batch for document in (resource_claim(n, shares(10)), pod(n, n)))
        )
    (gpu,) = {
        claims.index_of(allocation) for name in names for allocation in claims.allocation(name)
    }
    assert claims.leased(gpu) == claims.leased() == 100
    claims.start(resource_claim("next", shares(10)), pod("next", "next"))
    assert (claims.leased(gpu), claims.leased()) == (100, 110)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_hundred_claims_fill_a_gpu(claims: ClaimsNode) -> None:
    """A hundred pods have a hundred distinct shares of one GPU; afterwards all are free."""
    names = [f"part-{n}" for n in range(100)]
    for batch in counted_batches(names):
        claims.kubectl.apply(
            *(document for n in batch for document in (resource_claim(n, shares(1)), pod(n, n)))
        )
        claims.cluster.await_running(within_s=600)
    (gpu,) = {
        claims.index_of(allocation) for name in names for allocation in claims.allocation(name)
    }
    assert claims.leased(gpu) == claims.leased() == 100
    assert len(claims.files()) == 100


def test_a_faulty_gpu_is_tainted(claims: ClaimsNode) -> None:
    """A faulty GPU gets no new claim, and its pod runs on; the taint ends with the fault."""
    claims.start(resource_claim("victim", shares(30)), pod("victim", "victim"))
    before, slices = claims.cluster.incarnations(), claims.slices()
    (allocation,) = claims.allocation("victim")
    gpu = claims.index_of(allocation)

    began = time.monotonic()
    claims.daemon.fault(gpu, FELL_OFF_THE_BUS)
    wait_for("the taint", lambda: all_unhealthy(claims.taints(gpu)), within_s=SOON_S)
    took("the taint of a fault", time.monotonic() - began, at_most=TAINTED_S)
    changed = {name for name, document in claims.slices().items() if document != slices.get(name)}
    devices = [device for name in changed for device in claims.slices()[name]["spec"]["devices"]]
    assert {gpu_of_device(device["name"]) for device in devices} == {allocation.gpu}
    reason = claims.daemon.status()["gpus"][gpu]["reason"]
    wait_for(
        "the status of the pod to have the reason",
        lambda: claims.unhealthy("victim") == [reason],
        within_s=SETTLED_S,
    )
    claims.start(resource_claim("elsewhere", shares(30)), pod("elsewhere", "elsewhere"))
    assert claims.index_of(claims.allocation("elsewhere")[0]) != gpu

    claims.daemon.reset(gpu)
    wait_for("a healthy device", lambda: not claims.unhealthy("victim"), within_s=SETTLED_S)
    wait_for("no taint", lambda: not set().union(*claims.taints(gpu).values()), within_s=20)
    assert claims.cluster.incarnations()["victim"] == before["victim"]


def all_unhealthy(taints: Mapping[str, set[str]]) -> bool:
    """Return whether each device has the taint of a fault, and no other."""
    return set(map(frozenset, taints.values())) == {frozenset({UNHEALTHY})}


def test_deleted_slices_are_written_again(claims: ClaimsNode) -> None:
    """ResourceSlices that somebody deletes are back within two seconds."""
    before = claims.await_slices()
    claims.kubectl("delete", "resourceslices", *before)
    after = claims.await_slices(within_s=2)
    assert before.keys().isdisjoint(after) or all(
        before[name]["metadata"]["uid"] != after[name]["metadata"]["uid"] for name in before
    )
    claims.start(resource_claim("then", shares(5)), pod("then", "then"))


def test_a_deleted_socket_is_made_again(claims: ClaimsNode) -> None:
    """The kubelet registers the driver again after somebody deleted its registration socket."""
    socket = KUBELET_HOME / "plugins_registry" / f"{DRIVER}-reg.sock"
    before = claims.registrations()
    began = time.time()
    socket.unlink()
    claims.await_registered(before)
    seconds = claims.logged("dra driver registered")[-1] - began
    took("the registration by another socket", seconds, at_most=REGISTERED_S)
    claims.start(resource_claim("after", shares(5)), pod("after", "after"))


@pytest.fixture
def resources(shared_node: ClaimsNode) -> Iterator[tuple[str, ...]]:
    """Create the chart's DeviceClasses of some resources until the test ends; return the names."""
    names = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb")
    shared_node.kubectl.apply(*(classes := extended_classes(shared_node.node, *names)))
    yield names
    shared_node.kubectl(
        "delete", "deviceclasses", *(device_class["metadata"]["name"] for device_class in classes)
    )


def extended_classes(node: Node, *names: str) -> list[Document]:
    """Return the DeviceClasses that the chart renders for extended resources."""
    values = f"--set=dra.enabled=true,dra.extendedResources={{{','.join(names)}}}"
    options = ("--kube-version=1.36.0", values, "--show-only=templates/dra.yaml")
    documents = yaml.safe_load_all(helm_of(node)("template", "metagpu", CHART, *IMAGE, *options))
    return [
        document
        for document in documents
        if document and "extendedResourceName" in document.get("spec", {})
    ]


def test_extended_resources_by_device_classes(
    claims: ClaimsNode, resources: tuple[str, ...]
) -> None:
    """Limits of a container are devices of the resource; each container has its own alone."""
    gpu, timeslice, mig = resources
    both = container("two", 1, resource=mig)
    both["resources"]["limits"][timeslice] = "1"
    claims.start(
        pod_of("pair", container("main", 2, resource=gpu)),
        pod_of("mixed", container("one", 1, resource=timeslice), both),
    )
    claims.kubectl.apply(pod_of("many", container("main", 5, resource=timeslice)))
    found = {allocation.request: allocation for allocation in claims.allocation("mixed")}
    assert found.keys() == {
        f"container-{name}" for name in ("0-request-0", "1-request-0", "1-request-1")
    }
    assert {allocation.request for allocation in claims.allocation("pair")} == {
        "container-0-request-0"
    }

    pair = {f"nvidia{claims.index_of(allocation)}" for allocation in claims.allocation("pair")}
    assert len(pair) == 2
    assert claims.inspect("pair").gpu_devices == pair
    one, two = (claims.inspect("mixed", name) for name in ("one", "two"))
    assert one.gpu_devices == {f"nvidia{claims.index_of(found['container-0-request-0'])}"}
    second = claims.index_of(found["container-1-request-0"])
    assert two.gpu_devices == {f"nvidia{second}", f"nvidia{MIG_GPU}"}
    assert len(two.environment["METAGPU_MEMORY_MIB"].split(",")) == 2

    assert claims.leased() == 2 + 2 + 1
    wait_for(
        "each container to hold its own alone",
        lambda: claims.holders(mig) == {"mixed (two)"} and claims.holders(gpu) == {"pair (main)"},
        within_s=SOON_S,
    )
    assert claims.holders(timeslice) == {"mixed (one)", "mixed (two)"}
    published = claims.daemon.status()["cluster"]["resourceSlices"]
    assert published["extendedResources"].keys() == set(resources)
    assert published["contested"] == {}
    assert claims.phase("many") == "Pending"  # five slices are of five different GPUs


@pytest.fixture
def under_nvidias_name(shared_node: ClaimsNode) -> Iterator[ClaimsNode]:
    """Run the driver under NVIDIA's name, with NVIDIA's classes, until the test ends."""
    before = shared_node.registrations()
    text = page_configuration().replace("replicas: 4", "replicas: 4, timeSlice: default")
    shared_node.daemon.configure(f"{text}dra: {{driver: {NVIDIA}}}\n")
    with nvidia_classes(shared_node.kubectl):
        shared_node.await_registered(before)
        yield shared_node
        shared_node.clear()
        before = shared_node.registrations()
        shared_node.daemon.configure(page_configuration())
        shared_node.await_registered(before)
    shared_node.await_slices()


def test_nvidias_manifests_run(under_nvidias_name: ClaimsNode) -> None:
    """Containers share GPUs as NVIDIA's gpu-test5 says; an unknown field is in the Event."""
    claims = under_nvidias_name
    requests = exactly("ts-gpu", NVIDIA), exactly("mps-gpu", NVIDIA)
    containers = {"ts0": "ts-gpu", "ts1": "ts-gpu", "mps0": "mps-gpu", "mps1": "mps-gpu"}
    wrong = gpu_config({"strategy": "MPS", "mpsConfig": {"threads": 50}})
    claims.kubectl.apply(
        resource_claim("wrong", exactly("gpu", NVIDIA), config=[wrong]), pod("wrong", "wrong")
    )
    refusal = wait_for("a refusal", lambda: claims.events("wrong"), within_s=20)
    assert "sharing.mpsConfig.threads: unknown key" in refusal
    claims.cluster.delete("wrong")

    claims.start(
        resource_claim("gpu-test5", *requests, config=list(GPU_TEST5)),
        pod("gpu-test5", "gpu-test5", **containers),
    )
    held = {name: claims.inspect("gpu-test5", name) for name in containers}
    assert held["ts0"].gpu_devices == held["ts1"].gpu_devices
    assert held["mps0"].gpu_devices == held["mps1"].gpu_devices != held["ts0"].gpu_devices
    for name in ("mps0", "mps1"):
        assert held[name].environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        assert held[name].environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=10240M"
    wait_for("the length", lambda: "--set-timeslice 3" in claims.daemon.log, within_s=SOON_S)


@pytest.mark.long
def test_nvidias_quickstart_runs(under_nvidias_name: ClaimsNode) -> None:
    """GPUs of gpu-test1 are distinct, those of 2 and 3 shared, and gpu-test4 is on one GPU."""
    claims = under_nvidias_name
    claims.start(*map(ready, yaml.safe_load_all(QUICKSTART)))
    (one,), (two,) = (claims.inspect(f"gpu-test1-pod{n}").gpu_devices for n in (1, 2))
    (inside,), (beside,) = (claims.inspect("gpu-test2", f"ctr{n}").gpu_devices for n in (0, 1))
    (third,), (fourth,) = (claims.inspect(f"gpu-test3-pod{n}").gpu_devices for n in (1, 2))
    assert (inside, third) == (beside, fourth)
    assert len({one, two, inside, third}) == 4

    parts = [claims.inspect("gpu-test4", f"ctr{n}") for n in range(4)]
    assert [part.gpu_devices for part in parts] == [{f"nvidia{MIG_GPU}"}] * 4
    memory = [int(part.environment["METAGPU_MEMORY_MIB"].rpartition("=")[2]) for part in parts]
    assert memory[0] == memory[1] < memory[2] < memory[3]
    files = [mig_devices(claims, "gpu-test4", f"ctr{n}") for n in range(4)]
    assert all(files)
    assert not any(one & other for one, other in combinations(files, 2))
    assert len(claims.instances()) == 4


def mig_devices(claims: ClaimsNode, name: str, container: str) -> frozenset[str]:
    """Return the device files of MIG devices in a container."""
    command = "ls", "/dev/nvidia-caps"
    return frozenset(claims.cluster.execute(name, *command, container=container).split())


def prepare(name: str, uid: str) -> Mapping[str, v1.NodePrepareResourceResponse]:
    """Call NodePrepareResources as the kubelet does, for one ResourceClaim."""
    request = v1.NodePrepareResourcesRequest(claims=[v1.Claim(NAMESPACE, uid, name)])
    answer = _call("NodePrepareResources", bytes(request))
    return v1.NodePrepareResourcesResponse.parse(answer).claims


def unprepare(name: str, uid: str) -> Mapping[str, v1.NodeUnprepareResourceResponse]:
    """Call NodeUnprepareResources as the kubelet does, for one ResourceClaim."""
    request = v1.NodeUnprepareResourcesRequest(claims=[v1.Claim(NAMESPACE, uid, name)])
    answer = _call("NodeUnprepareResources", bytes(request))
    return v1.NodeUnprepareResourcesResponse.parse(answer).claims


def _call(method: str, request: bytes) -> bytes:
    socket = KUBELET_HOME / "plugins" / DRIVER / "dra.sock"
    path = f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{method}"
    return anyio.run(call_raw, socket, path, request, CALL_S)
