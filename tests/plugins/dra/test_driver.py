"""Claims of the kubelet, from the socket to leases and CDI specifications."""

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from grpclib.exceptions import StreamTerminatedError
from structlog.testing import capture_logs

from metagpu.core.errors import CdiError, DriverTimeout
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.request_errors import CdiNameMissing, ProvisioningFailed
from metagpu.core.model.resource_claims import ClaimDevice, parse_claim_device
from metagpu.core.model.shares import Holder, ResourceClaimRef, ShareId
from metagpu.core.state.events import ClaimRefusalEnded, LayoutApplied, ResourceClaimRefused
from metagpu.core.state.facts import (
    BackendResumed,
    GpuFaulted,
    GpuRecovered,
    KubeletStarted,
    LeasesObserved,
    SharesClaimed,
)
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra import service
from metagpu.plugins.dra.service import device_states
from metagpu.plugins.kubelet.grpc_client import UnixChannel
from metagpu.plugins.kubelet.grpc_server import StreamingCalls, serve_grpc, unary_method
from metagpu.plugins.kubelet.pb import v1alpha1
from tests.plugins.dra.rig import CONFIG, DRIVER, NODE, DraNode, variable
from tests.plugins.kubelet.rig import gpu
from tests.rigs import waiting as polling
from tests.rigs.logs import capture_module_logs
from tests.rigs.mig import until

MEMORY = "METAGPU_MEMORY_MIB"


@pytest.fixture
def node(tmp_path: Path) -> DraNode:
    """Return a node of two GPUs that are offered by claims."""
    made = DraNode(tmp_path)
    made.offer([gpu(0), gpu(1)])
    return made


async def test_the_kubelet_finds_the_driver_and_says_how_its_registration_went(
    node: DraNode,
) -> None:
    """GetInfo names the service's socket, which answers; Notify is reported."""
    async with node.running():
        info = await node.get_info()
        assert (info.type, info.name) == ("DRAPlugin", DRIVER)
        assert info.supported_versions[0] == "v1.DRAPlugin"
        assert await anyio.Path(info.endpoint).is_socket()
        assert not node.dra.report().registered
        await node.notify(registered=True)
        assert node.dra.report().registered
        await node.notify(registered=False, error="RegisterPlugin error -- no")
        assert node.dra.report().problem == "RegisterPlugin error -- no"


async def test_a_registration_socket_that_is_removed_is_made_again(node: DraNode) -> None:
    """The kubelet deregisters a driver whose socket is gone."""
    async with node.running():
        node.registration.unlink()
        await node.wait_registration()


@pytest.mark.parametrize("endpoint", ["other.sock", f"plugins/{DRIVER}/dra.sock"])
async def test_another_driver_of_the_name_keeps_its_sockets(
    node: DraNode, tmp_path: Path, endpoint: str
) -> None:
    """Two drivers of one name would take each other's claims, and daemons each other's sockets."""
    other = DraNode(tmp_path)
    other.dra.registration._endpoint = tmp_path / endpoint
    sockets = node.registration, tmp_path / endpoint
    async with anyio.create_task_group() as group:
        async with other.running():
            await other.notify(registered=True)
            before = [socket.stat().st_ino for socket in sockets]
            group.start_soon(node.dra.run)
            await until(lambda: endpoint in str(node.dra.report().problem))
            assert f"process {os.getpid()} " in str(node.dra.report().problem)
            assert [socket.stat().st_ino for socket in sockets] == before
            assert other.dra.report().problem is None
        await node.wait_registration()
        group.cancel_scope.cancel()


async def test_of_two_daemons_that_start_at_once_one_serves(node: DraNode, tmp_path: Path) -> None:
    """Each removes a socket of the other first; then one of them waits, and says for whom."""
    drivers = [node.dra, DraNode(tmp_path).dra]

    async def settled() -> bool:
        with suppress(OSError, StreamTerminatedError):
            await node.notify(registered=True)
        served, other = sorted(
            (dra_driver.report() for dra_driver in drivers),
            key=lambda report: not report.registered,
        )
        return (served.registered, other.registered) == (True, False) and (
            f"process {os.getpid()} serves" in str(other.problem)
        )

    async with anyio.create_task_group() as group:
        for driver in drivers:
            group.start_soon(driver.run)
        await polling.until(settled)
        group.cancel_scope.cancel()


async def test_a_program_that_is_no_driver_does_not_keep_the_socket(node: DraNode) -> None:
    """The kubelet could not register it; metagpu serves there at once."""

    async def answer(_: bytes) -> bytes:
        return b"\x12\xff no PluginInfo"

    node.registration.parent.mkdir(parents=True)
    method = {"/pluginregistration.Registration/GetInfo": unary_method(answer)}
    async with serve_grpc(node.registration, method, StreamingCalls()):
        before = node.registration.stat().st_ino
        async with anyio.create_task_group() as group:
            group.start_soon(node.dra.run)
            await until(lambda: _inode(node.registration) not in (None, before))
            await node.wait_registration()
            assert (await node.get_info()).name == DRIVER
            group.cancel_scope.cancel()


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


async def test_a_whole_gpu_and_a_fraction_get_leases_and_cdi_names(node: DraNode) -> None:
    """A container gets its GPU by the node's specification, its limits by the claim's."""
    half = node.allocate("half", node.fraction(gpu(0), 50, "half"))
    whole = node.allocate("whole", node.result(gpu(1), "gpu"))
    async with node.running():
        answers = await node.prepare(half, whole)
        [device] = answers[half.uid].devices
        assert device.request_names == ["half"]
        assert (device.pool_name, device.share_id) == ("node-1", "s-1")
        assert device.cdi_device_ids[0] == f"metagpu.io/gpu={gpu(0).id}"
        assert len(node.leased(half)) == 50
        own = node.edits(half)[device.cdi_device_ids[1]]
        assert variable(own, MEMORY) == f"{gpu(0).id}=20480"
        assert variable(own, "NVIDIA_VISIBLE_DEVICES") == "void"

        [device] = answers[whole.uid].devices
        assert list(map(str, node.leased(whole))) == [gpu(1).id]
        assert f"metagpu.io/gpu={gpu(1).id}" in device.cdi_device_ids

        assert await node.unprepare(half, whole) == {half.uid: "", whole.uid: ""}
        assert node.leased(half) == node.leased(whole) == []
        assert list((node.root / "cdi").iterdir()) == []


async def test_a_claim_is_answered_alike_however_often_the_kubelet_asks(node: DraNode) -> None:
    """Also at the same time; an unknown claim is unprepared, without the API server."""
    claim = node.allocate("a", node.fraction(gpu(0), 30))
    unknown = ResourceClaimRef("default", "gone", "7")
    async with node.running():
        answers: list[object] = []

        async def prepare() -> None:
            answers.append((await node.prepare(claim))[claim.uid])

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(prepare)
        assert answers[0] == answers[1] == answers[2]
        assert len(node.leased(claim)) == 30
        reads = node.reads
        assert await node.unprepare(unknown) == {"7": ""}
        assert node.reads == reads


async def test_requests_of_one_claim_have_slots_and_limits_of_their_own(node: DraNode) -> None:
    """Two requests on one GPU hold the sum; several GPUs of one request are one grant."""
    two = node.allocate("two", node.fraction(gpu(0), 40, "a"), node.fraction(gpu(0), 30, "b"))
    both = node.allocate("both", *(node.fraction(gpu(n), 10, "c/first") for n in (0, 1)))
    async with node.running():
        answers = await node.prepare(two, both)
        first, second, _ = answers[two.uid].devices
        assert len(set(node.leased(two))) == 70
        edits = node.edits(two)
        assert variable(edits[first.cdi_device_ids[-1]], MEMORY) == f"{gpu(0).id}=16384"
        assert variable(edits[second.cdi_device_ids[-1]], MEMORY) == f"{gpu(0).id}=12288"
        expected = f"{gpu(0).id}=4096,{gpu(1).id}=4096"
        requests = node.dra.preparer.requests_of(two.uid)
        assert [list(requests.values()).count(name) for name in ("a", "b")] == [40, 30]
        assert node.dra.preparer.requests_of(both.uid) == {}
        for device in answers[both.uid].devices:
            assert device.request_names == ["c"]
            assert variable(node.edits(both)[device.cdi_device_ids[-1]], MEMORY) == expected


async def test_requests_that_come_together_have_one_value_of_each_variable(node: DraNode) -> None:
    """The whole claim has the sum of its requests, also after a reboot; one request its own."""
    two = [node.fraction(gpu(0), 40, "a"), node.fraction(gpu(0), 30, "b")]
    claim = node.allocate("two", *two, node.result(gpu(1), "gpu", "c"))
    one = node.allocate("one", node.fraction(gpu(0), 5))
    async with node.running():
        answers = await node.prepare(claim, one)
        *own, together = answers[claim.uid].devices
        names = [name for device in (*own, together) for name in device.cdi_device_ids]
        edits = node.edits(claim)
        memory = [variable(edits[device.cdi_device_ids[-1]], MEMORY) for device in own]
        assert memory == [
            *(f"{gpu(0).id}={mib}" for mib in (16384, 12288)),
            f"{gpu(1).id}=40960",
        ]
        # The kubelet gives a container the names in this order, and the last value counts.
        environment = dict(
            value.split("=", 1) for name in names for value in edits.get(name, {}).get("env", ())
        )
        assert environment[MEMORY] == f"{gpu(0).id}=28672,{gpu(1).id}=40960"
        assert environment["METAGPU_MAX_MEM"] == "28672"
        assert together.request_names == ["*"]  # no container can name it
        assert len(answers[one.uid].devices) == 1

    node.write_checkpoint({claim: answers[claim.uid].devices})
    (node.root / "cdi" / f"metagpu.io-claim-{claim.uid}.json").unlink()
    node.dra = node.new_dra()
    async with node.running():
        assert node.edits(claim) == edits
        assert (await node.prepare(claim))[claim.uid] == answers[claim.uid]


async def test_extended_resources_of_one_container_come_together(node: DraNode) -> None:
    """The scheduler makes one claim for a pod, with requests named by container."""
    requests = [f"container-{name}" for name in ("0-request-0", "0-request-1", "1-request-0")]
    first, second, other = requests
    claim = node.allocate(
        "pod-extended-resources-x7k2p",
        node.result(gpu(0), "timeslice", first),
        node.result(gpu(1), "gpu", second),
        node.result(gpu(0), "timeslice", other),
    )
    async with node.running():
        devices = (await node.prepare(claim))[claim.uid].devices
        assert [device.request_names for device in devices] == [[request] for request in requests]
        edits = node.edits(claim)
        slice_, whole = f"{gpu(0).id}=10240", f"{gpu(1).id}=40960"
        assert [variable(edits[device.cdi_device_ids[-1]], MEMORY) for device in devices] == [
            *(f"{slice_},{whole}",) * 2,
            slice_,
        ]


async def test_one_claims_error_is_its_own_and_leaves_no_lease(node: DraNode) -> None:
    """The text names the reason; the claim is prepared once the reason has ended."""
    good = node.allocate("good", node.fraction(gpu(1), 10))
    ill = node.allocate("ill", node.fraction(gpu(1), 10, "a"), node.fraction(gpu(0), 10, "b"))
    unknown = node.allocate("unknown", {**node.fraction(gpu(0), 1), "device": "gpu-other"})
    other = ResourceClaimRef("default", "good", "another-uid")
    node.registry.apply(GpuFaulted(gpu(0).id, "XID 79", at=1))
    async with node.running():
        answers = await node.prepare(good, ill, unknown)
        assert not answers[good.uid].error
        assert "is unhealthy: XID 79" in answers[ill.uid].error
        assert "gpu-other" in answers[unknown.uid].error
        refused = (await node.prepare(other))["another-uid"].error
        assert "another-uid" in refused
        assert good.uid in refused
        assert node.leased(ill) == node.leased(unknown) == []
        node.registry.apply(GpuRecovered(gpu(0).id, "reset", at=2))
        assert not (await node.prepare(ill))[ill.uid].error


async def test_pods_of_a_refused_claim_are_annotated_once_it_can_be_prepared(
    node: DraNode,
) -> None:
    """The kubelet tries again at once; not before, and not for a claim that is gone."""
    first = node.allocate("first", node.fraction(gpu(0), 60))
    second = node.allocate("second", node.fraction(gpu(0), 50), node.fraction(gpu(1), 1))
    gone = node.allocate("gone", node.fraction(gpu(1), 10))
    async with node.running():
        node.registry.apply(GpuFaulted(gpu(1).id, "XID 79", at=1))
        await node.prepare(first, second, gone)
        await node.unprepare(gone)
        node.registry.apply(GpuRecovered(gpu(1).id, "reset", at=2))
        await anyio.wait_all_tasks_blocked()
        assert node.annotated == []
        node.denied = True
        await node.unprepare(first)
        await until(lambda: bool(node.annotated))
        await anyio.wait_all_tasks_blocked()
        assert node.annotated == ["default/pod-of-second: metagpu.io/prepare-again"]
        assert not (await node.prepare(second))[second.uid].error
        assert not node.dra.preparer.states.refused


async def test_a_folder_that_takes_no_socket_is_named(node: DraNode) -> None:
    """The status names the path, and the driver registers once it can be used."""
    blocked = node.root / "plugins" / node.driver
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("not a folder")
    async with anyio.create_task_group() as group:
        group.start_soon(node.dra.run)
        await polling.becomes(lambda: str(blocked) in (node.dra.report().problem or ""))
        blocked.unlink()
        await node.wait_registration()
        group.cancel_scope.cancel()


async def test_a_refusal_that_the_kubelet_repeats_is_logged_once(node: DraNode) -> None:
    """The kubelet repeats a refused call for as long as the pod is there."""
    claim = node.allocate("first", node.fraction(gpu(0), 60))
    with capture_module_logs(service) as entries:
        async with node.running():
            node.registry.apply(GpuFaulted(gpu(0).id, "XID 79", at=1))
            for _ in range(5):
                assert (await node.prepare(claim))[claim.uid].error
            node.registry.apply(GpuRecovered(gpu(0).id, "reset", at=2))
            assert not (await node.prepare(claim))[claim.uid].error
    events = [entry["event"] for entry in entries]
    assert events == ["resource claim refused", "resource claim prepared"]


async def test_pods_that_look_at_a_gpu_that_is_lost_are_annotated_once_it_is_found(
    node: DraNode,
) -> None:
    """A GPU that comes back ends the refusal, as it does for a claim that holds shares."""
    claim = node.allocate("look", {**node.fraction(gpu(1), 1), "adminAccess": True})
    node.registry = Registry()
    node.offer([gpu(0)])
    node.dra = node.new_dra()
    async with node.running():
        assert (await node.prepare(claim))[claim.uid].error
        assert not node.dra.preparer.states.failed
        node.offer([gpu(0), gpu(1)])
        await until(lambda: node.annotated == ["default/pod-of-look: metagpu.io/prepare-again"])
        assert not (await node.prepare(claim))[claim.uid].error
        assert node.monitored == {gpu(1).id}


async def test_gpus_are_looked_at_until_the_last_claim_that_does_ends(node: DraNode) -> None:
    """The runtime knows them while a prepared claim has them."""
    first, last = (
        node.allocate(name, {**node.fraction(gpu(0), 1), "adminAccess": True})
        for name in ("first", "last")
    )
    async with node.running():
        await node.prepare(first, last)
        await node.unprepare(first)
        assert node.monitored == {gpu(0).id}
        await node.unprepare(last)
        assert node.monitored == set()


async def test_pods_that_cannot_look_at_a_gpu_are_not_annotated_at_its_changes(
    node: DraNode,
) -> None:
    """No change of a GPU makes its device node; each annotation would be refused again."""
    looking = {**node.fraction(gpu(0), 1), "adminAccess": True}
    claim = node.allocate("look", looking)

    async def refuse(gpus: frozenset[GpuId]) -> None:
        raise CdiNameMissing(", ".join(gpus), "it has no device node on this machine")

    node.dra.preparer._ensure_monitored = refuse
    node.dra.preparer.states.failed.first = 100  # it is tried again after a back-off
    async with node.running():
        assert "no device node" in (await node.prepare(claim))[claim.uid].error
        node.registry.apply(GpuFaulted(gpu(0).id, "XID 79", at=1))
        await anyio.wait_all_tasks_blocked()
        assert node.annotated == []
        assert not node.dra.preparer.states.prepared


@pytest.mark.parametrize(
    "error",
    [
        ProvisioningFailed("nvidia.com/gpu", "GPU-0", "the driver answers: in use"),
        CdiNameMissing("GPU-0", "the file cannot be written"),
        CdiError("/var/run/cdi cannot be written: no space left"),
        DriverTimeout("nvmlDeviceGetHandleByUUID did not return"),
    ],
    ids=["provisioning", "names", "file", "driver"],
)
async def test_a_claim_that_failed_is_tried_again_after_a_back_off(
    node: DraNode, error: Exception
) -> None:
    """Nothing reports the end of such a reason: not at once, and later after each failure."""
    claim = node.allocate("a", node.fraction(gpu(0), 10))
    failures = 2

    async def fail(names: frozenset[str]) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise error
        await node.ensure_cdi_names(names)

    node.dra.preparer._ensure_cdi_names = fail
    node.dra.preparer.states.failed.first = 100
    node.dra.preparer.states.failed.longest = 1000
    async with node.running():
        for times in (1, 2):
            assert str(error) in (await node.prepare(claim))[claim.uid].error
            node.registry.apply(GpuFaulted(gpu(1).id, "XID 79", at=1))
            await anyio.wait_all_tasks_blocked()
            assert len(node.annotated) == times - 1
            polling.skip(times * 100)
            await until(partial(_is_annotated, node, times))
        assert node.annotated == ["default/pod-of-a: metagpu.io/prepare-again"] * 2
        assert not (await node.prepare(claim))[claim.uid].error
        assert not node.dra.preparer.states.failed


async def test_shares_of_a_claim_that_failed_are_free_at_once(node: DraNode) -> None:
    """A full disk at the last step: the next claim gets the shares of the one that failed."""
    failed = node.allocate("failed", node.result(gpu(0), "gpu"))
    other = node.allocate("other", node.fraction(gpu(0), 100))
    (node.root / "cdi").write_text("no folder")
    async with node.running():
        assert (await node.prepare(failed))[failed.uid].error
        assert node.leased(failed) == []
        (node.root / "cdi").unlink()
        assert not (await node.prepare(other))[other.uid].error
        assert len(node.leased(other)) == 100


async def test_a_failed_claim_that_is_unusable_or_refused_has_no_back_off(node: DraNode) -> None:
    """Only the end of another reason is tried for; its pod was annotated before."""
    failed = node.dra.preparer.states.failed
    failed.first = failed.longest = 100
    odd = node.allocate("odd", node.fraction(gpu(0), 10))
    full = node.allocate("full", node.fraction(gpu(0), 10))
    async with node.running():
        node.unanswered = 2
        await node.prepare(odd, full)
        polling.skip(100)
        await until(partial(_is_annotated, node, 2))
        assert len(failed) == 2
        node.allocate("odd", node.fraction(gpu(0), 1) | {"consumedCapacity": {"shares": "0"}})
        node.claims["default", "odd"]["metadata"]["uid"] = odd.uid
        node.registry.apply(GpuFaulted(gpu(0).id, "XID 79", at=1))
        await node.prepare(odd, full)
        assert not failed
        assert list(node.dra.preparer.states.refused) == [full]


async def test_a_claim_that_is_unprepared_during_its_retry_is_not_tried_again(
    node: DraNode,
) -> None:
    """An API server that does not answer then changes nothing."""
    failed = node.dra.preparer.states.failed
    failed.first = failed.longest = 100
    claim = node.allocate("a", node.fraction(gpu(0), 10))
    async with node.running():
        node.unanswered = 1
        await node.prepare(claim)
        node.answering, reads = anyio.Event(), node.reads
        polling.skip(100)
        await until(lambda: node.reads > reads)
        await node.unprepare(claim)
        node.unanswered = 1
        node.answering.set()
        await until(lambda: node.unanswered == 0)
        await anyio.wait_all_tasks_blocked()
        assert not failed
        assert node.annotated == []


async def test_a_failed_claim_does_not_wait_for_the_answer_about_another(node: DraNode) -> None:
    """A request of the API server may last until its deadline."""
    failed = node.dra.preparer.states.failed
    failed.first = failed.longest = 100
    first = node.allocate("first", node.fraction(gpu(0), 10))
    second = node.allocate("second", node.fraction(gpu(0), 10))

    async def read(ref: ResourceClaimRef) -> Mapping[str, Any]:
        if ref.name == first.name:
            await anyio.sleep_forever()
        return await node.read_claim(ref)

    async with node.running():
        node.unanswered = 2
        await node.prepare(first)
        failed.first = failed.longest = 200  # by jitter, 100 at least: it is due after the first
        await node.prepare(second)
        node.dra.preparer._read_claim = read
        polling.skip(200)
        await until(lambda: bool(node.annotated))
    assert node.annotated == ["default/pod-of-second: metagpu.io/prepare-again"]


async def test_a_claim_whose_devices_no_container_has_together_is_not_tried_again(
    node: DraNode,
) -> None:
    """No GPU and no time ends that reason: the claim has to be deleted."""
    node.offer([gpu(0), gpu(1)], CONFIG + "      - {backend: mps, unitsPerGpu: 10}\n")
    for each in (gpu(0), gpu(1)):
        node.registry.apply(BackendResumed(each.id, "mps", at=1))
    units: dict[str, Any] = {"consumedCapacity": {"shares": "2"}}
    results = (node.result(gpu(n), "mps", shareID=f"s-{n}", **units) for n in (0, 1))
    claim = node.allocate("a", *results)
    async with node.running():
        assert "MPS serves a container on one GPU" in (await node.prepare(claim))[claim.uid].error
        assert not node.dra.preparer.states.failed
        assert node.leased(claim) == []
        node.registry.apply(GpuFaulted(gpu(1).id, "XID 79", at=1))
        node.registry.apply(GpuRecovered(gpu(1).id, "reset", at=2))
        await anyio.wait_all_tasks_blocked()
        assert node.annotated == []


async def test_a_claim_whose_devices_a_backend_forbids_is_tried_after_a_reload(
    node: DraNode,
) -> None:
    """An option of the backend may forbid them in one request, and allow them later."""
    forbids = CONFIG.replace("replicas: 4", "replicas: 4, failRequestsGreaterThanOne: true")
    node.offer([gpu(0), gpu(1)], forbids)
    replica: dict[str, Any] = {"consumedCapacity": {"slices": "1"}}
    results = (node.result(gpu(n), "timeslice", shareID=f"s-{n}", **replica) for n in (0, 1))
    claim = node.allocate("a", *results)
    async with node.running():
        assert (await node.prepare(claim))[claim.uid].error
        assert not node.dra.preparer.states.failed
        node.offer([gpu(0), gpu(1)])
        node.registry.events.publish(LayoutApplied())
        await until(lambda: bool(node.annotated))
        assert not (await node.prepare(claim))[claim.uid].error


def _is_annotated(node: DraNode, times: int) -> bool:
    return len(node.annotated) == times


async def test_a_claim_that_could_not_be_read_is_prepared_once_it_can(node: DraNode) -> None:
    """Also where the API server stays away for a while; one that is gone or odd is left."""
    failed = node.dra.preparer.states.failed
    failed.first, failed.longest = 100, 1000
    claim = node.allocate("a", node.fraction(gpu(0), 10))
    gone = node.allocate("gone", node.fraction(gpu(0), 10))
    odd = node.allocate("odd", node.fraction(gpu(0), 1) | {"consumedCapacity": {"shares": "0"}})
    async with node.running():
        node.unanswered = 3
        answers = await node.prepare(claim, gone, odd)
        assert all("the API server is away" in answer.error for answer in answers.values())
        del node.claims[gone.namespace, gone.name]
        node.unanswered = 1
        polling.skip(100)
        await until(lambda: node.unanswered == 0)
        polling.skip(200)
        await until(lambda: bool(node.annotated) and len(failed) == 1)
        assert not (await node.prepare(claim))[claim.uid].error
        assert "consumes 0" in (await node.prepare(odd))[odd.uid].error
        assert not failed
    assert node.annotated == ["default/pod-of-a: metagpu.io/prepare-again"]


async def test_pods_that_came_while_the_kubelet_had_no_driver_are_annotated(
    node: DraNode,
) -> None:
    """The kubelet refused them without a call; what is prepared, gone or of others is left."""
    ready, late, made, limits = (
        node.allocate(name, node.fraction(gpu(0), 10))
        for name in ("ready", "late", "made", "limits")
    )
    foreign = node.allocate("foreign", {**node.fraction(gpu(0), 10), "driver": "gpu.example.com"})
    of_template = {"resourceClaimStatuses": [{"name": "0", "resourceClaimName": made.name}]}
    by_limits = {"extendedResourceClaimStatus": {"resourceClaimName": limits.name}}
    node.pending += [
        waiting("a", {"resourceClaimName": "gone"}, {"resourceClaimName": late.name}),
        waiting("b", {"resourceClaimName": ready.name}, {"resourceClaimName": foreign.name}),
        waiting("c", {"resourceClaimTemplateName": "t"}) | {"status": of_template},
        waiting("d") | {"status": by_limits},
    ]
    async with node.running():
        await node.prepare(ready)
        await node.notify(registered=True)
        await until(lambda: len(node.annotated) == 3)
        await anyio.wait_all_tasks_blocked()
        assert node.annotated == [f"default/{name}: metagpu.io/prepare-again" for name in "acd"]


async def test_pods_are_annotated_once_the_api_server_is_back(node: DraNode) -> None:
    """Pods and claims are read until the server answers; each pod is annotated once.

    An outage is one warning, and the next one is another.
    """
    node.dra.retries._rest = 0.01
    for name in ("a", "b"):
        claim = node.allocate(f"of-{name}", node.fraction(gpu(0), 10))
        node.pending.append(waiting(name, {"resourceClaimName": claim.name}))
    node.unanswered = 3
    read = node.read_claim

    async def fails_once_for_b(ref: ResourceClaimRef) -> Mapping[str, Any]:
        if ref.name == "of-b" and node.annotated and node.reads < 3:
            node.unanswered = 1
        return await read(ref)

    node.dra.preparer._read_claim = fails_once_for_b
    with capture_logs() as logs:
        async with node.running():
            await node.notify(registered=True)
            await until(lambda: len(node.annotated) == 2)
            await anyio.wait_all_tasks_blocked()
            assert node.annotated == [f"default/{key}: metagpu.io/prepare-again" for key in "ab"]
            assert node.unanswered == 0
            node.unanswered = 1
            await node.notify(registered=True)
            await until(lambda: len(node.annotated) == 4)
    assert [line["event"] for line in logs].count("pending pods not read") == 2


def waiting(name: str, *claims: dict[str, str]) -> dict[str, Any]:
    """Return a pod that waits on the node for its claims."""
    named = [{"name": str(number), **document} for number, document in enumerate(claims)]
    return {"metadata": {"namespace": "default", "name": name}, "spec": {"resourceClaims": named}}


async def test_a_claim_may_end_while_the_pods_of_others_are_annotated(node: DraNode) -> None:
    """The API server may take seconds; the kubelet goes on meanwhile."""
    first, second = (node.allocate(name, node.fraction(gpu(1), 1)) for name in ("first", "second"))
    annotate = node.annotate_pod

    async def slowly(namespace: str, pod: str, key: str, value: str) -> None:
        await annotate(namespace, pod, key, value)
        await node.unprepare(second if pod == "pod-of-first" else first)

    node.dra.retries._annotate = slowly
    async with node.running():
        node.registry.apply(GpuFaulted(gpu(1).id, "XID 79", at=1))
        await node.prepare(first, second)
        node.registry.apply(GpuRecovered(gpu(1).id, "reset", at=2))
        await until(lambda: not node.dra.preparer.states.refused)
        await anyio.wait_all_tasks_blocked()
        [annotated] = node.annotated
        assert annotated.endswith(": metagpu.io/prepare-again")
        assert (await node.get_info()).name == DRIVER


@pytest.mark.parametrize("amount", ["0", "1m", "1e3000"])
async def test_an_amount_that_is_none_is_refused(node: DraNode, amount: str) -> None:
    """The scheduler writes no such amount; somebody else may have."""
    odd = node.fraction(gpu(0), 1) | {"consumedCapacity": {"shares": amount}}
    claim = node.allocate("odd", odd)
    async with node.running():
        error = (await node.prepare(claim))[claim.uid].error
        assert f"consumes {amount} of shares" in error
        assert node.leased(claim) == []
        assert not node.dra.preparer.states.refused


async def test_the_kubelet_is_sent_the_health_of_each_device(node: DraNode) -> None:
    """With the reason of a fault, at once and again periodically, in a call that is closed."""
    endpoint = node.root / "plugins" / DRIVER / "dra.sock"
    seen: list[v1alpha1.NodeWatchResourcesResponse] = []

    async def read() -> None:
        async with UnixChannel(endpoint) as channel:
            stub = v1alpha1.DraResourceHealthStub(channel)
            request = v1alpha1.NodeWatchResourcesRequest()
            async for resource in stub.node_watch_resources(request):
                seen.append(resource)  # noqa: PERF401 - each is waited for

    async with anyio.create_task_group() as group, node.running():
        info = await node.get_info()
        assert "v1alpha1.DRAResourceHealth" in info.supported_versions
        group.start_soon(read)
        await until(lambda: len(seen) == 1)
        node.registry.apply(GpuFaulted(gpu(0).id, "XID 79", at=1))
        await until(lambda: len(seen) == 2)
    first, second = seen
    assert {device.health for device in first.devices} == {v1alpha1.HealthStatus.HEALTHY}
    ill = [device for device in second.devices if device.health == v1alpha1.HealthStatus.UNHEALTHY]
    devices = [health.device for health in ill if health.device]
    assert {device.pool_name for device in devices} == {"node-1"}
    assert all(device.device_name.startswith(gpu(0).id.lower()) for device in devices)
    assert {health.message for health in ill} == {"XID 79"}
    assert len(ill) == len(second.devices) / 2 == 3


async def test_a_device_with_too_few_free_shares_says_how_many(node: DraNode) -> None:
    """And a GPU that another backend has says who holds it."""
    first = node.allocate("first", node.fraction(gpu(0), 60))
    second = node.allocate("second", node.fraction(gpu(0), 50))
    slices = node.allocate("slices", node.result(gpu(0), "timeslice"))
    async with node.running():
        assert not (await node.prepare(first))[first.uid].error
        with node.registry.events.subscribe(ResourceClaimRefused) as refused:
            answers = await node.prepare(second, slices)
            events = aiter(refused)
            heard = [await anext(events), await anext(events)]
        assert {
            str(ended.reason) for ended in heard if isinstance(ended, ResourceClaimRefused)
        } == {answer.error for answer in answers.values()}
        assert "40 free shares of 50" in answers[second.uid].error
        assert "in use by fraction" in answers[slices.uid].error


async def test_the_end_of_a_refusal_is_on_the_bus(node: DraNode) -> None:
    """A claim that is prepared or unprepared is refused no more."""
    first = node.allocate("first", node.fraction(gpu(0), 60))
    second = node.allocate("second", node.fraction(gpu(0), 50))
    async with node.running():
        with node.registry.events.subscribe(ClaimRefusalEnded) as ended:
            await node.prepare(first, second)
            await node.unprepare(second)
            events = aiter(ended)
            assert [await anext(events), await anext(events)] == [
                ClaimRefusalEnded(first),
                ClaimRefusalEnded(second),
            ]


async def test_a_hundred_claims_get_distinct_shares_at_once(node: DraNode) -> None:
    """And all of them are free afterwards."""
    claims = [node.allocate(f"c{n}", node.fraction(gpu(0), 1)) for n in range(100)]
    async with node.running():
        answers = await node.prepare(*claims)
        assert {answer.error for answer in answers.values()} == {""}
        assert len({share for ref in claims for share in node.leased(ref)}) == 100
        await node.unprepare(*claims)
        assert not node.registry.snapshot.gpus[gpu(0).id].leases


async def test_a_claim_of_an_earlier_pool_is_prepared(node: DraNode) -> None:
    """An earlier version had a pool for each GPU: the scheduler counts its claims there."""
    pool = f"node-1/{gpu(0).id.lower()}"
    claim = node.allocate("earlier", {**node.fraction(gpu(0), 50), "pool": pool})
    async with node.running():
        answer = (await node.prepare(claim))[claim.uid]
        assert (answer.error, answer.devices[0].pool_name) == ("", pool)
        leases = node.registry.snapshot.gpus[gpu(0).id].leases
        assert {lease.pool for lease in leases.values()} == {f"{DRIVER}/{pool}"}
        states = device_states(node.registry.snapshot, "node-1")
        told = {(state.pool, state.device.startswith(gpu(0).id.lower())) for state in states}
        assert told == {("node-1", True), ("node-1", False), (pool, True)}
    node.write_checkpoint({claim: answer.devices})

    node.registry = Registry()
    node.offer([gpu(0), gpu(1)])
    node.dra = node.new_dra()
    async with node.running():
        leases = node.registry.snapshot.gpus[gpu(0).id].leases
        assert len(leases) == 50
        assert {lease.pool for lease in leases.values()} == {f"{DRIVER}/{pool}"}


async def test_a_prepared_device_whose_gpu_is_gone_is_out_of_service(node: DraNode) -> None:
    """The kubelet is told so by the device of the allocation, until the claim is unprepared."""
    claim = node.allocate("gone", node.fraction(gpu(1), 5))
    async with node.running():
        devices = (await node.prepare(claim))[claim.uid].devices
    node.write_checkpoint({claim: devices})

    node.registry = Registry()
    node.offer([gpu(0)])
    node.dra = node.new_dra()
    async with node.running():
        prepared, now = node.dra.preparer.states.prepared, node.registry.snapshot
        assert {lease.resource_claim for lease in now.vanished.values()} == {claim}
        [ill] = [state for state in device_states(now, "node-1", prepared) if not state.healthy]
        assert (ill.pool, ill.device) == (devices[0].pool_name, devices[0].device_name)
        assert await node.unprepare(claim) == {claim.uid: ""}
        assert not node.registry.snapshot.vanished
        assert all(state.healthy for state in device_states(now, "node-1", prepared))


async def test_leases_outlive_the_daemon_by_the_kubelets_checkpoint(node: DraNode) -> None:
    """A new daemon answers alike, writes what is missing, and ends what the kubelet lacks."""
    kept = node.allocate("kept", node.fraction(gpu(0), 40, "a"), node.fraction(gpu(0), 5, "b"))
    ended = node.allocate("ended", node.result(gpu(1), "gpu"))
    async with node.running():
        before = await node.prepare(kept, ended)
        leased, edits = set(node.leased(kept)), node.edits(kept)
    node.write_checkpoint({kept: before[kept.uid].devices})
    for file in (node.root / "cdi").iterdir():
        file.unlink()  # as a reboot does
    node.registry = Registry()
    node.offer([gpu(0), gpu(1)])
    node.dra = node.new_dra()
    node.claims.clear()
    async with node.running():
        assert set(node.leased(kept)) == leased
        assert node.edits(kept) == edits
        assert not node.registry.snapshot.gpus[gpu(1).id].leases
        assert (await node.prepare(kept))[kept.uid] == before[kept.uid]
        await node.unprepare(kept)
        assert node.leased(kept) == []


async def test_a_claim_that_ended_before_the_driver_served_holds_nothing(node: DraNode) -> None:
    """An unreadable checkpoint is named; a claim that the next one lacks has no lease left."""
    kept = node.allocate("kept", node.fraction(gpu(0), 40))
    ended = node.allocate("ended", node.result(gpu(1), "gpu"))
    async with node.running():
        before = {ref: (await node.prepare(ref))[ref.uid].devices for ref in (kept, ended)}
    node.registry = Registry()
    node.offer([gpu(0), gpu(1)])
    node.dra = node.new_dra()
    node.write_checkpoint(before)
    await node.dra.checkpoint.read_leases()
    assert node.leased(ended)
    (node.root / "dra_manager_state").write_text("{")
    async with anyio.create_task_group() as group:
        group.start_soon(node.dra.run)
        await until(lambda: "dra_manager_state" in (node.dra.report().problem or ""))
        node.write_checkpoint({kept: before[kept]})
        del node.claims[ended.namespace, ended.name]
        await node.wait_registration()
        assert (len(node.leased(kept)), node.leased(ended)) == (40, [])
        group.cancel_scope.cancel()


async def test_devices_that_the_checkpoint_has_twice_are_one(node: DraNode) -> None:
    """A restarted kubelet adds a second answer to the first; the third answer has each once."""
    kept = node.allocate("kept", node.fraction(gpu(0), 40, "a"), node.fraction(gpu(0), 5, "b"))
    async with node.running():
        before = (await node.prepare(kept))[kept.uid]
    node.write_checkpoint({kept: [*before.devices, *before.devices]})
    node.dra = node.new_dra()
    async with node.running():
        assert (await node.prepare(kept))[kept.uid] == before


async def test_a_claim_that_cannot_be_written_again_keeps_its_lease_and_the_driver(
    node: DraNode,
) -> None:
    """Claims that need no file are prepared and unprepared meanwhile."""
    kept = node.allocate("kept", node.fraction(gpu(0), 4))
    async with node.running():
        answer = (await node.prepare(kept))[kept.uid]
    node.write_checkpoint({kept: answer.devices})
    for file in (node.root / "cdi").iterdir():
        file.unlink()
    (node.root / "cdi").rmdir()
    (node.root / "cdi").touch()  # no folder: nothing can be written
    node.dra = node.new_dra()
    async with node.running():
        assert len(node.leased(kept)) == 4


async def test_a_gpu_that_is_found_after_the_start_has_its_leases_again(node: DraNode) -> None:
    """A GPU may answer later than others; its claim keeps its CDI name, also after a reboot."""
    kept = node.allocate("kept", node.fraction(gpu(0), 4))
    async with node.running():
        answer = (await node.prepare(kept))[kept.uid]
        leased = node.leased(kept)
    node.write_checkpoint({kept: answer.devices})
    for file in (node.root / "cdi").iterdir():
        file.unlink()
    node.registry = Registry()
    node.offer([gpu(1)])
    node.dra = node.new_dra()
    node.dra.checkpoint.period = 0.01
    async with node.running():
        assert node.leased(kept) == []
        node.offer([gpu(0), gpu(1)])
        await until(lambda: node.leased(kept) == leased)
        await until(lambda: any((node.root / "cdi").glob("metagpu*")))  # renamed to that
        assert answer.devices[0].cdi_device_ids[-1] in node.edits(kept)
        assert await node.unprepare(kept) == {kept.uid: ""}
        await anyio.sleep(0.05)  # some looks at the checkpoint, which has it still
        assert node.leased(kept) == []


async def test_a_gpu_that_is_found_after_the_start_is_held_at_once(node: DraNode) -> None:
    """No other claim gets what one holds, also between two looks at the checkpoint."""
    kept = node.allocate("kept", node.fraction(gpu(0), 4))
    async with node.running():
        answer = (await node.prepare(kept))[kept.uid]
        leased = node.leased(kept)
    node.write_checkpoint({kept: answer.devices})
    node.registry = Registry()
    node.offer([gpu(1)])
    node.dra = node.new_dra()
    async with node.running():
        node.offer([gpu(0), gpu(1)])
        node.registry.apply(LeasesObserved({}, anyio.current_time(), kubelet_ready=True))
        assert node.leased(kept) == leased
        other = node.allocate("other", node.fraction(gpu(0), 100))
        assert "96 free shares of 100" in (await node.prepare(other))[other.uid].error


async def test_leases_of_the_drivers_earlier_name_are_kept(node: DraNode) -> None:
    """Their pods run, whatever the configuration calls the driver now."""
    kept = node.allocate("kept", node.fraction(gpu(0), 4))
    async with node.running():
        answer = (await node.prepare(kept))[kept.uid]
        leased = node.leased(kept)
    node.write_checkpoint({kept: answer.devices})
    checkpoint = node.root / "dra_manager_state"
    checkpoint.write_text(
        checkpoint.read_text().replace(f'\\"{DRIVER}\\"', '\\"gpu.example.com\\"')
    )
    node.registry = Registry()
    node.offer([gpu(0), gpu(1)])
    node.dra = node.new_dra()
    async with node.running():
        assert node.leased(kept) == leased
        assert not node.dra.preparer.states.prepared


async def test_a_claim_whose_answer_the_kubelet_has_not_written_is_kept(node: DraNode) -> None:
    """The other daemon handed its lease over; the same shares are answered again."""
    claim = node.allocate("a", node.fraction(gpu(0), 7))
    async with node.running():
        before, leased = await node.prepare(claim), set(node.leased(claim))
    node.write_checkpoint({claim: []})
    node.dra = node.new_dra()
    async with node.running():
        assert set(node.leased(claim)) == leased
        assert await node.prepare(claim) == before


@pytest.mark.parametrize("end", ["deleted", "made again", "unreserved", "deallocated"])
async def test_a_claim_that_the_kubelet_has_forgotten_ends_with_its_pods(
    node: DraNode, end: str
) -> None:
    """A kubelet that lost its checkpoint unprepares nothing, and its pods run on."""
    kept, lost = (node.allocate(name, node.fraction(gpu(0), 1)) for name in ("kept", "lost"))
    node.dra.checkpoint.period = 0.01
    node.write_checkpoint({kept: [], lost: []})
    async with node.running():
        await node.prepare(kept, lost)
        reads = node.reads
        node.write_checkpoint({kept: []})
        node.unanswered = 1
        await until(lambda: node.reads > reads + 2)  # two looks had an answer
        assert node.leased(lost)
        assert node.edits(lost)
        claim = node.claims[lost.namespace, lost.name]
        match end:
            case "deleted":
                del node.claims[lost.namespace, lost.name]
            case "made again":
                node.allocate("lost", node.fraction(gpu(0), 1), uid=9)
            case "unreserved":
                claim["status"]["reservedFor"] = []
            case _:
                del claim["status"]["allocation"]
        await until(lambda: not node.leased(lost))
        assert node.leased(kept)


async def test_an_answer_that_the_kubelet_has_not_written_outlives_the_daemon(
    node: DraNode,
) -> None:
    """The kubelet writes it once all claims of the pod are prepared, by all drivers."""
    first, claim, late = (node.allocate(name, node.fraction(gpu(0), 7)) for name in ("a", "b", "c"))
    async with node.running():
        await node.prepare(first)
        before, leased = await node.prepare(claim), node.leased(claim)
    node.write_checkpoint({claim: []})
    node.registry = Registry()
    node.offer([gpu(0), gpu(1)])
    node.dra = node.new_dra()
    node.dra.checkpoint.period = 0.01
    async with node.running():
        assert node.leased(claim) == leased
        await node.prepare(late)
        assert set(node.leased(late)).isdisjoint(leased)
        node.write_checkpoint({claim: before[claim.uid].devices, late: []})
        await until(lambda: claim in node.dra.preparer.states.prepared)
        pool = f"{DRIVER}/{NODE}"
        await until(lambda: {lease.pool for lease in node.leases(claim)} == {pool})
        assert await node.prepare(claim) == before
        assert await node.unprepare(claim) == {claim.uid: ""}
        await anyio.sleep(0.05)  # some looks at the checkpoint, which has it still
        assert node.leased(claim) == []


async def test_a_claim_that_is_prepared_again_has_its_new_shares_alone(node: DraNode) -> None:
    """The kubelet's checkpoint, as it was read, may have the answer of before."""
    claim, other = (node.allocate(name, node.fraction(gpu(0), 4)) for name in ("a", "b"))
    node.dra.checkpoint.period = 0.01
    async with node.running():
        before = await node.prepare(claim)
        node.write_checkpoint({claim: before[claim.uid].devices, other: []})
        await node.unprepare(claim)
        await node.prepare(other)
        await node.prepare(claim)
        await node.unprepare(other)
        await anyio.sleep(0.05)  # some looks at the checkpoint
        assert len(node.leased(claim)) == 4


async def test_a_claim_that_is_allocated_another_device_gets_it(node: DraNode) -> None:
    """A kubelet that lost its checkpoint unprepares no claim that its pods leave."""
    claim = node.allocate("a", node.fraction(gpu(0), 4))
    async with node.running():
        before = await node.prepare(claim)
        node.unanswered = 1
        assert await node.prepare(claim) == before
        node.allocate("a", node.fraction(gpu(1), 4), uid=1)
        [device] = (await node.prepare(claim))[claim.uid].devices
        assert device.device_name.startswith(gpu(1).id.lower())
        assert {share.partition("::")[0] for share in node.leased(claim)} == {gpu(1).id}


async def test_a_claim_that_the_kubelet_asks_for_again_does_not_end(node: DraNode) -> None:
    """The API server's answer that it has no pods is older than the kubelet's call."""
    claim = node.allocate("a", node.fraction(gpu(0), 1))
    reserved = node.claims[claim.namespace, claim.name]["status"]
    node.dra.checkpoint.period = 0.01
    node.write_checkpoint({claim: []})
    async with node.running():
        await node.prepare(claim)
        read, asked, answer = node.dra.preparer._read_claim, anyio.Event(), anyio.Event()

        async def read_late(ref: ResourceClaimRef) -> Mapping[str, Any]:
            found = {"metadata": {"uid": ref.uid}, "status": {**reserved, "reservedFor": []}}
            node.dra.preparer._read_claim = read
            asked.set()
            await answer.wait()
            return found

        node.dra.preparer._read_claim = read_late
        node.write_checkpoint({})
        await asked.wait()
        node.write_checkpoint({claim: []})
        await node.prepare(claim)
        answer.set()
        await anyio.sleep(0.05)
        assert node.leased(claim)


@pytest.mark.parametrize("reserved", ["podgroup", "parameters"])
async def test_a_claim_that_is_reserved_is_in_use_however_it_reads(
    node: DraNode, reserved: str
) -> None:
    """A group of pods may have it, or parameters that this version does not know."""
    claim = node.allocate("a", node.fraction(gpu(0), 1))
    status = node.claims[claim.namespace, claim.name]["status"]
    node.dra.checkpoint.period = 0.01
    node.write_checkpoint({claim: []})
    async with node.running():
        await node.prepare(claim)
        if reserved == "podgroup":
            group = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "g"}
            status["reservedFor"] = [{**group, "uid": "g"}]
        else:
            opaque = {"driver": DRIVER, "parameters": {}}
            status["allocation"]["devices"]["config"] = [{"opaque": opaque}]
        reads = node.reads
        node.write_checkpoint({})
        await until(lambda: node.reads > reads + 2)
        assert node.leased(claim)


async def test_a_driver_that_begins_again_ends_no_claim_that_its_pods_have(node: DraNode) -> None:
    """The kubelet lost its checkpoint, and a reload began the driver again."""
    claim = node.allocate("a", node.fraction(gpu(0), 4))
    async with node.running():
        await node.prepare(claim)
        leased, edits = node.leased(claim), node.edits(claim)
    node.write_checkpoint({})
    node.dra = node.new_dra()
    async with node.running():
        assert node.leased(claim) == leased
        assert node.edits(claim) == edits


async def test_a_claim_of_another_capacity_is_refused_until_the_device_has_it(
    node: DraNode,
) -> None:
    """A reload between the allocation and the kubelet's call: 50 shares are not one GiB."""
    claim = node.allocate("a", node.fraction(gpu(0), 50))
    node.offer([gpu(0), gpu(1)], CONFIG.replace("sharesPerGpu: 100", "memoryUnit: 1Gi"))
    async with node.running():
        error = (await node.prepare(claim))[claim.uid].error
        assert "it counts memory now" in error
        assert node.leased(claim) == []
        node.offer([gpu(0), gpu(1)])
        assert not (await node.prepare(claim))[claim.uid].error
        assert len(node.leased(claim)) == 50


async def test_a_share_that_somebody_else_has_by_now_is_reported(node: DraNode) -> None:
    """The kubelet's checkpoint has it for a claim; the lease stays with its holder of now.

    Once that holder has ended the claim has it again, and nobody else gets it.
    """
    claim = node.allocate("a", node.fraction(gpu(0), 2))
    async with node.running():
        answer = (await node.prepare(claim))[claim.uid]
        shares = [
            node.registry.snapshot.gpus[gpu(0).id].leases[share_id].share
            for share_id in node.leased(claim)
        ]
    node.write_checkpoint({claim: answer.devices})
    node.registry = Registry()
    node.offer([gpu(0), gpu(1)])
    node.registry.apply(SharesClaimed((shares[0],), at=1))
    node.dra = node.new_dra()
    node.dra.checkpoint.period = 0.01
    with capture_logs() as logs:
        async with node.running():
            assert node.leased(claim) == [shares[1].id]
            node.registry.apply(LeasesObserved({}, anyio.current_time(), kubelet_ready=True))
            await until(lambda: len(node.leased(claim)) == len(shares))
    [log] = [
        mapping
        for mapping in logs
        if mapping["event"] == "share of a resource claim held by others too"
    ]
    assert (log["claim"], log["share"]) == ("default/a", shares[0].id)


async def test_silence_ends_no_lease_of_a_claim(node: DraNode) -> None:
    """The kubelet's list names its container; neither its silence nor its restart says more."""
    claim = node.allocate("a", node.fraction(gpu(0), 2))
    async with node.running():
        [device] = (await node.prepare(claim))[claim.uid].devices
    [of_claim] = filter(None, map(parse_claim_device, device.cdi_device_ids))
    holder, other = Holder("default", "pod", "main"), Holder("default", "other", "main")
    now = anyio.current_time() + 1000
    held = {(claim.uid, share): (holder, other) for share in of_claim.share_ids}
    for fact in (
        LeasesObserved({}, now, of_claims=held),
        KubeletStarted((1, 2, 3)),
        LeasesObserved({}, now + 1000, of_claims={}, confirms=True, allocated={}),
    ):
        node.registry.apply(fact)
        leases = node.registry.snapshot.gpus[gpu(0).id].leases.values()
        assert {
            (lease.holder, lease.sharers, lease.unconfirmed, lease.resource_claim)
            for lease in leases
        } == {(holder, (other,), False, claim)}
    later = {(claim.uid, share): (other,) for share in of_claim.share_ids}
    node.registry.apply(LeasesObserved({}, now + 2000, of_claims=later))
    assert {(lease.holder, lease.sharers) for lease in leases} == {(holder, (other,))}
    leases = node.registry.snapshot.gpus[gpu(0).id].leases.values()
    assert {(lease.holder, lease.sharers) for lease in leases} == {(other, ())}


@pytest.mark.parametrize(
    ("slots", "written"),
    [
        (("m00", "m01", "m02", "m07"), "m00-m02..m07"),
        (tuple(f"m{n:02d}" for n in range(98, 102)), "m98-m101"),
        (("t8", "t9", "t10"), "t8-t10"),
        (("1g.10gb+me@4",), "1g.10gb_me:4"),
        (("",), "whole"),
    ],
)
def test_a_cdi_name_says_which_shares_it_stands_for(slots: tuple[str, ...], written: str) -> None:
    """The name is all that is kept of a lease."""
    device = ClaimDevice("uid-1", GpuId("GPU-1"), "fraction", slots)
    assert device.qualified_name == f"metagpu.io/claim=uid-1.GPU-1.fraction.{written}"
    assert parse_claim_device(device.qualified_name) == device
    expected = tuple(f"GPU-1::{slot}" if slot else "GPU-1" for slot in slots)
    assert device.share_ids == tuple(map(ShareId, expected))
    assert parse_claim_device("metagpu.io/gpu=GPU-1") is None
