"""Opaque parameters of a claim: from the API server to leases, limits, and refusals."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from metagpu.compat.nvidia_claims import API_VERSION, read_sharing
from metagpu.core.model.shares import Holder, ResourceClaimRef
from metagpu.core.state.events import LayoutApplied
from metagpu.core.state.facts import BackendResumed, BackendSuspended, LeasesObserved
from metagpu.core.state.gpu_state import NOT_READY
from metagpu.core.state.registry import Registry
from metagpu.plugins.dra.preparer import LONGEST
from tests.plugins.dra.rig import CONFIG, DRIVER, DraNode, variable
from tests.plugins.kubelet.rig import gpu
from tests.rigs.mig import until

MANY = CONFIG.replace("replicas: 4}", "replicas: 4, timeSlice: default}\n      - {backend: mps}")
THREADS, MEMORY = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


def config(sharing: dict[str, Any], *requests: str, source: str = "FromClaim") -> dict[str, Any]:
    """Write an entry of an allocation's `config`, with a GpuConfig."""
    parameters = {"apiVersion": API_VERSION, "kind": "GpuConfig", "sharing": sharing}
    opaque = {"driver": DRIVER, "parameters": parameters}
    return {"source": source, "requests": list(requests), "opaque": opaque}


def mps(**limits: object) -> dict[str, Any]:
    """Write `sharing` by MPS."""
    return {"strategy": "MPS", "mpsConfig": limits}


def by_time(interval: str) -> dict[str, Any]:
    """Write `sharing` by time-slices."""
    return {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}


def offer(node: DraNode, text: str = MANY) -> DraNode:
    """Offer two GPUs whose control daemons serve."""
    node.offer([gpu(0), gpu(1)], text)
    for number in (0, 1):
        node.registry.apply(BackendResumed(gpu(number).id, "mps", at=1))
    return node


@pytest.fixture
def node(tmp_path: Path) -> DraNode:
    """Return a node of two GPUs whose driver has parameters."""
    return offer(DraNode(tmp_path, read_sharing=read_sharing))


def settings(node: DraNode) -> set[str]:
    """Return the settings of all leases."""
    states = node.registry.snapshot.gpus.values()
    return {lease.settings for state in states for lease in state.leases.values()}


async def test_two_requests_share_their_gpus_as_the_claim_says(node: DraNode) -> None:
    """Each has all of its GPU, and a restarted daemon knows how, by the CDI names alone."""
    limits = mps(defaultActiveThreadPercentage=50, defaultPinnedDeviceMemoryLimit="10Gi")
    claim = node.allocate(
        "gpu-test5",
        node.result(gpu(0), "gpu", "ts-gpu"),
        node.result(gpu(1), "gpu", "mps-gpu"),
        config=[config(by_time("Long"), "ts-gpu"), config(limits, "mps-gpu")],
    )
    async with node.running():
        answer = (await node.prepare(claim))[claim.uid]
        assert not answer.error
        by_slices, by_mps, _ = (device.cdi_device_ids[-1] for device in answer.devices)
        assert by_slices.endswith(f".{gpu(0).id}.timeslice:long.t0-t3")
        assert by_mps.endswith(f".{gpu(1).id}.mps:50-10240.p00-p99")
        edits, leased = node.edits(claim), set(node.leased(claim))
        assert variable(edits[by_mps], THREADS) == "50"
        assert variable(edits[by_mps], MEMORY) == "0=10240M"
        assert settings(node) == {"long", "50-10240"}
    node.write_checkpoint({claim: answer.devices})
    for file in (node.root / "cdi").iterdir():
        file.unlink()  # as a reboot does
    node.registry = Registry()
    offer(node)
    node.dra = node.new_dra()
    async with node.running():
        assert settings(node) == {"long", "50-10240"}
        assert (node.edits(claim), set(node.leased(claim))) == (edits, leased)


async def test_limits_of_a_newer_daemon_take_no_other_claim_with_them(node: DraNode) -> None:
    """A claim of settings that are unknown here stays held; the rest is written again."""
    new, known = (
        node.allocate(name, node.result(gpu(number), "gpu"), config=[config(mps())])
        for number, name in enumerate(("new", "known"))
    )
    async with node.running():
        answers = await node.prepare(new, known)
        edits = node.edits(known)
        [device] = answers[new.uid].devices
        names = [name.replace(".mps.", ".mps:50-x-9.") for name in device.cdi_device_ids]
        device.cdi_device_ids = names
    node.write_checkpoint({ref: answers[ref.uid].devices for ref in (new, known)})
    for file in (node.root / "cdi").iterdir():
        file.unlink()
    node.registry = Registry()
    offer(node)
    node.dra = node.new_dra()
    with structlog.testing.capture_logs() as logs:
        async with node.running():
            assert len(node.leased(new)) == len(node.leased(known)) == 100
            assert node.edits(known) == edits
    [failed] = [log for log in logs if log["event"].endswith("not written again")]
    assert failed["claim"] == "default/new"
    assert "50-x-9" in failed["error"]


async def test_a_claim_is_prepared_again_once_the_pool_has_the_option(node: DraNode) -> None:
    """A reload that changes no share may end the reason of a refusal."""
    offer(node, CONFIG)
    short = node.allocate("short", node.result(gpu(0), "gpu"), config=[config(by_time("Short"))])
    async with node.running():
        assert "timeSlice: default" in (await node.prepare(short))[short.uid].error
        offer(node, CONFIG.replace("replicas: 4}", "replicas: 4, timeSlice: default}"))
        node.registry.events.publish(LayoutApplied())
        await until(lambda: node.annotated == ["default/pod-of-short: metagpu.io/prepare-again"])
        assert not (await node.prepare(short))[short.uid].error


async def test_a_claim_with_more_containers_than_clients_is_reported(node: DraNode) -> None:
    """All containers of one claim are clients of MPS; the kubelet asks for the claim once."""
    offer(node, MANY.replace("{backend: mps}", "{backend: mps, maxClients: 2}"))
    claim = node.allocate("many", node.result(gpu(0), "gpu"), config=[config(mps())])
    pods = [Holder("default", f"pod-{number}", "main") for number in range(3)]
    sentence = (
        "GPU 0 serves 2 containers of nvidia.com/gpu.mps at once, and has 3 by ResourceClaim "
        "default/many: the last of them get no client of MPS; end a pod, or give it a claim of "
        "its own"
    )
    async with node.running():
        await node.prepare(claim)
        for count, crowded in ((2, []), (3, [sentence])):
            held = {(claim.uid, share_id): tuple(pods[:count]) for share_id in node.leased(claim)}
            node.registry.apply(LeasesObserved({}, anyio.current_time() + count, of_claims=held))
            assert node.dra.report().crowded == crowded


async def test_what_the_gpus_pool_cannot_do_is_refused_with_the_field(node: DraNode) -> None:
    """The claim is prepared once the pool can; what needs nothing is a GPU as it is."""
    offer(node, CONFIG)
    whole = node.result(gpu(0), "gpu")
    by_mps = node.allocate("mps", whole, config=[config(mps())])
    short = node.allocate("short", whole, config=[config(by_time("Short"))])
    default = node.allocate("default", whole, config=[config(by_time("Default"))])
    async with node.running():
        errors = {
            uid: response.error for uid, response in (await node.prepare(by_mps, short)).items()
        }
        assert "sharing.strategy: MPS: the pool of GPU 0" in errors[by_mps.uid]
        assert "has no backend mps" in errors[by_mps.uid]
        assert "interval: Short: the backend timeslice of" in errors[short.uid]
        assert "timeSlice: default" in errors[short.uid]
        assert not (await node.prepare(default))[default.uid].error
        await node.unprepare(default)

        offer(node, CONFIG.replace("      - {backend: timeslice, replicas: 4}\n", ""))
        assert not (await node.prepare(default))[default.uid].error
        assert list(map(str, node.leased(default))) == [gpu(0).id]
        await node.unprepare(default)

        offer(node)
        assert not (await node.prepare(by_mps))[by_mps.uid].error
        assert len(node.leased(by_mps)) == 100


async def test_a_pod_whose_claim_has_parameters_is_annotated_after_a_registration(
    node: DraNode,
) -> None:
    """The kubelet refused it while it had no driver, as any other."""
    claim = node.allocate("mps", node.result(gpu(0), "gpu"), config=[config(mps())])
    named = [{"name": "gpu", "resourceClaimName": claim.name}]
    pod = {"namespace": claim.namespace, "name": "a"}
    node.pending.append({"metadata": pod, "spec": {"resourceClaims": named}})
    async with node.running():
        await node.notify(registered=True)
        await until(lambda: node.annotated == ["default/a: metagpu.io/prepare-again"])


async def test_a_slow_api_server_is_within_the_time_of_a_call(node: DraNode) -> None:
    """The pod gets the reason of the refusal, not the kubelet's deadline."""
    node.registry.apply(BackendSuspended(gpu(0).id, "mps", NOT_READY, at=2))
    claim = node.allocate("mps", node.result(gpu(0), "gpu"), config=[config(mps())])
    now = 0.0
    read = node.read_claim

    async def slowly(ref: ResourceClaimRef) -> Mapping[str, Any]:
        nonlocal now
        now += LONGEST
        return await read(ref)

    node.dra.preparer._read_claim, node.dra.preparer._clock = slowly, lambda: now
    with anyio.fail_after(30):
        async with node.running():
            assert "mps" in (await node.prepare(claim))[claim.uid].error


async def test_parameters_that_are_not_followed_fail_the_claim_with_their_path(
    node: DraNode,
) -> None:
    """Parameters of a class too; a driver without parameters refuses them all."""
    unknown = config(mps(percentage=50), source="FromClass")
    claim = node.allocate("unknown", node.result(gpu(0), "gpu"), config=[unknown])
    async with node.running():
        error = (await node.prepare(claim))[claim.uid].error
        assert "default/unknown cannot be prepared: opaque parameters: " in error
        assert "sharing.mpsConfig.percentage: unknown key" in error
        assert node.leased(claim) == []
    node.read_sharing = None
    node.dra = node.new_dra()
    async with node.running():
        error = (await node.prepare(claim))[claim.uid].error
        assert f"it has opaque parameters for {DRIVER}, which has none" in error
