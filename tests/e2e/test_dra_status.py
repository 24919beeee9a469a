"""ResourceClaims as others see them: status, processes, metrics; claims with `adminAccess`."""

import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest

from tests.e2e.claims import (
    MIG_GPU,
    SETTLED_S,
    ClaimsNode,
    claims_node,
    page_configuration,
    pod,
    resource_claim,
    shares,
)
from tests.e2e.cluster import NAMESPACE, Cluster
from tests.e2e.fake_node import DRIVER, exactly
from tests.e2e.joined import ACCOUNT, SYSTEM_NAMESPACE
from tests.e2e.rig.daemon import Daemon
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.waiting import wait_for
from tests.e2e.test_admission_policy import MERGE, Token
from tests.e2e.test_enforcement import (
    ABOVE_MIB,
    SHARES,
    WITHIN_MIB,
    await_event,
    await_named,
    await_restarted,
)

APPLY = "application/apply-patch+yaml"
SOON_S = 5.0
LOOK: dict[str, Any] = {
    "allocationMode": "All",
    "adminAccess": True,
}
PROFILE = "device.attributes['gpu.metagpu.io'].profile == '2g.10gb'"


@pytest.fixture(scope="module")
def metrics() -> str:
    """Return the address of the metrics, with a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(scope="module")
def shared_node(
    node: Node, daemon: Daemon, account: tuple[str, ...], metrics: str
) -> Iterator[ClaimsNode]:
    """Start the daemon with the configuration of the page, and metrics."""
    with claims_node(Cluster(node, daemon), (*account, "--metrics", metrics)) as live_claims_node:
        yield live_claims_node


@pytest.fixture
def claims(shared_node: ClaimsNode) -> Iterator[ClaimsNode]:
    """Return the node without ResourceClaims; a test leaves it so."""
    yield shared_node
    shared_node.clear()


def entries(claims: ClaimsNode, name: str) -> list[Document]:
    """Wait until the status of a claim has devices; return them."""
    return list(
        wait_for(
            f"the devices of {name}",
            lambda: claims.claims()[name]["status"].get("devices"),
            within_s=SOON_S,
        )
    )


def test_a_claim_says_what_it_has(claims: ClaimsNode) -> None:
    """The uuid of a MIG device that was made on demand is there, and in no ResourceSlice."""
    here = [{"cel": {"expression": PROFILE}}]
    claims.start(
        *(resource_claim("mig", exactly("gpu", "mig.metagpu.io", selectors=here)),),
        *(pod("mig", "mig"), resource_claim("part", shares(50)), pod("part", "part")),
    )
    [mig], [part] = entries(claims, "mig"), entries(claims, "part")
    [instance] = claims.instances()
    assert mig["data"]["migDevice"] in str(instance)
    assert "migDevice" not in part["data"]
    assert (part["data"]["shares"], part["data"]["memoryMiB"]) == (50, 20480)
    assert part["shareID"] == results(claims, "part")[0]["shareID"]
    for document in (mig, part):
        [condition] = document["conditions"]
        assert (condition["type"], condition["status"]) == ("Ready", "True")
    assert claims.daemon.status()["dra"]["statusProblem"] is None


def test_a_monitor_sees_what_another_pod_holds(claims: ClaimsNode) -> None:
    """Two monitors have the node of every GPU and none to compute with, and hold nothing."""
    whole = exactly("gpu", "gpu.metagpu.io")
    claims.start(resource_claim("held", whole), pod("held", "held"))
    leases = claims.settled_leases()
    claims.daemon.request("cordon", gpu="1", reason="fan")
    try:
        wait_for("the taint", lambda: any(claims.taints(1).values()), within_s=SOON_S)
        everything = {"name": "gpus", "exactly": {"deviceClassName": "monitor.metagpu.io", **LOOK}}
        claims.start(
            *(resource_claim("look", everything), pod("look", "look")),
            *(resource_claim("look-too", everything), pod("look-too", "look-too")),
        )
        for name in ("look", "look-too"):
            seen = claims.inspect(name)
            assert seen.gpu_devices == {f"nvidia{index}" for index in range(MIG_GPU + 1)}
            assert "nvidiactl" in seen.devices
            assert "nvidia-uvm" not in seen.devices
            assert seen.environment["NVIDIA_VISIBLE_DEVICES"] == "void"
        assert claims.leases() == leases
        gpus = {gpu["uuid"] for gpu in claims.daemon.status()["gpus"]}
        assert {entry["data"]["gpu"] for entry in entries(claims, "look")} == gpus
        claims.cluster.delete("look")
        assert claims.leases() == leases
        claims.start(resource_claim("next", whole), pod("next", "next"))
    finally:
        claims.daemon.request("uncordon", gpu="1")


def results(claims: ClaimsNode, name: str) -> list[Document]:
    """Return the results of a claim's allocation."""
    found: list[Document] = claims.claims()[name]["status"]["allocation"]["devices"]["results"]
    return found


def test_a_token_writes_the_devices_of_its_driver_and_node(claims: ClaimsNode) -> None:
    """Neither an allocation, nor a token of another node, nor of none."""
    claims.start(resource_claim("part", shares(1)), pod("part", "part"))
    entries(claims, "part")
    path = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims/part/status"
    names = {key: results(claims, "part")[0][key] for key in ("pool", "device", "shareID")}
    body: dict[str, Any] = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "part"},
        "status": {"devices": [{"driver": DRIVER, **names, "data": {"by": "test"}}]},
    }
    query = "?fieldManager=test&force=true"
    own = Token(claims.node.credentials(SYSTEM_NAMESPACE, ACCOUNT))
    nowhere = Token(claims.node.credentials(SYSTEM_NAMESPACE, ACCOUNT, ""))
    assert own.send("PATCH", path + query, body, APPLY) == ""
    assert "of no node" in nowhere.send("PATCH", path + query, body, APPLY)
    refused = own.send("PATCH", path, {"status": {"reservedFor": None}}, MERGE)
    assert "allocates no ResourceClaim" in refused or "resourceclaims/binding" in refused


@pytest.fixture
def strict(claims: ClaimsNode) -> Iterator[ClaimsNode]:
    """Configure the GPUs to end processes above their limit; restore it afterwards."""
    gpus = "    gpus: {index: 0-3}\n"
    enforced = f"{gpus}    memoryEnforcement: {{policy: kill}}\n"
    claims.daemon.configure(page_configuration().replace(gpus, enforced))
    yield claims
    claims.daemon.configure(page_configuration())


def test_a_claims_container_is_as_any_other(strict: ClaimsNode, metrics: str) -> None:
    """Metrics and mgctl name its pod; a process above its shares ends, and its neighbour stays."""
    cluster, names = strict.cluster, ("greedy", "neighbour")
    claims = (
        document for n in names for document in (resource_claim(n, shares(SHARES)), pod(n, n))
    )
    strict.start(*claims)
    strict.settled_leases()
    (gpu,) = {
        strict.index_of(allocation) for name in names for allocation in strict.allocation(name)
    }
    before = cluster.incarnations()
    pids = {name: cluster.first_process(name) for name in names}
    for pid in pids.values():
        strict.daemon.use(gpu, pid, WITHIN_MIB)
    await_named(cluster, {name: {pid} for name, pid in pids.items()})
    used = {f"metagpu_container_memory_used_bytes {name} {WITHIN_MIB << 20}" for name in names}
    wait_for("metrics of the claims' pods", lambda: used <= pods_of(metrics), within_s=SETTLED_S)
    assert cluster.incarnations() == before

    strict.daemon.use(gpu, pids["greedy"], ABOVE_MIB)
    await_restarted(cluster, "greedy", before["greedy"])
    await_event(cluster, "greedy", "GPUMemoryExceeded", f"{ABOVE_MIB} MiB")
    assert cluster.incarnations()["neighbour"] == before["neighbour"]
    for pid in pids.values():
        strict.daemon.free(gpu, pid)


def pods_of(metrics: str) -> set[str]:
    """Return the names, pods and whole values of all series of pods."""
    with urlopen(f"http://{metrics}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    found = (re.fullmatch(r'(\w+){.*pod="([^"]*)".*} (\S+)', line) for line in lines)
    return {f"{other[1]} {other[2]} {float(other[3]):.0f}" for other in found if other}
