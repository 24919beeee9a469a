"""An XID inside a MIG instance: the whole agent, a node and a kubelet."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from metagpu.core.availability.conflict import shares_on_faulty_devices
from metagpu.core.contracts.driver import RecoveryAction
from metagpu.core.errors import MetagpuError
from metagpu.core.model.shares import ShareId
from metagpu.core.reports.status import explain_report
from metagpu.core.state.facts import GpuFaulted, InstanceFaulted
from metagpu.sim.kubelet.kubelet import AdmissionError, SimPod
from metagpu.sim.machine import foreign_instances as foreign
from metagpu.sim.machine.gpu import SimProcess
from tests.rigs.agent import Scene, agent_at_work
from tests.rigs.mig import a_node, blocked, created, hurry, placements, pod, until, until_placed

pytestmark = pytest.mark.long

TWO = "nvidia.com/mig-2g.10gb"
THREE = "nvidia.com/mig-3g.20gb"
REASON = "XID 94: contained memory error"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timings that last seconds on a real node."""
    hurry(monkeypatch)


@asynccontextmanager
async def at_work(tmp_path: Path, options: str, *, rescan: str = "100ms") -> AsyncIterator[Scene]:
    """Run an agent on one A100 for which XID 94 is fatal, and 95 as by default."""
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    config = (
        "version: metagpu/v1\n"
        f"health: {{quietPeriod: 1h, rescanPeriod: {rescan}, xids: {{94: fatal}}}}\n"
        "pools:\n"
        "  - name: mig\n"
        f"    backends: [{{backend: mig, {options}}}]\n"
    )
    async with agent_at_work(tmp_path, node, config) as scene:
        yield scene


def numbers(scene: Scene, place: str) -> tuple[int, int]:
    """Return the numbers by which NVML knows an instance and its compute instance."""
    gpu = scene.node.gpus[0]
    with scene.node.changed:
        return next(
            (instance.number, compute.number)
            for instance, compute in gpu.mig.compute_instances
            if foreign.placement_name(gpu, instance) == place
        )


def fault(scene: Scene, place: str, code: int = 94) -> None:
    """Report an XID inside an instance, as the driver does."""
    scene.node.raise_xid(scene.node.gpus[0], code, *numbers(scene, place))


def out_of_service(scene: Scene) -> dict[str, str]:
    """Return the MIG devices that are out of service, each with its reason."""
    return {device: verdict.reason for device, verdict in scene.state(0).mig_faults.items()}


DYNAMIC = "profiles: [2g.10gb, 3g.20gb], keepWarm: 1h"


async def test_a_fault_inside_an_instance_is_that_instances_alone(tmp_path: Path) -> None:
    """The instance's share turns Unhealthy with reason and time; its neighbours are not touched."""
    async with at_work(tmp_path, DYNAMIC) as scene:
        await scene.until(2, 2, THREE)
        for name in ("a", "b"):
            await scene.kubelet.admit(pod(name, "3g.20gb"))
        await scene.wait_holders()
        [device] = [m.device for slot, m in created(scene).items() if slot == "3g.20gb@0"]
        fault(scene, "3g.20gb@0")

        await scene.until(2, 1, THREE)
        assert out_of_service(scene) == {device: REASON}
        assert scene.state(0).verdict.healthy
        assert shares_on_faulty_devices(scene.state(0)) == {f"{scene.state(0).gpu.id}::3g.20gb@0"}
        [expected] = (
            explain_report(scene.agent.registry.snapshot, scene.agent.layout).gpus[0].faults
        )
        assert (expected.device, expected.reason) == (device, REASON)
        assert expected.shares == [f"{scene.state(0).gpu.id}::3g.20gb@0"]
        assert placements(scene.node) == ["3g.20gb@0", "3g.20gb@4"]


async def test_a_faulty_instance_is_created_again_after_its_pod(tmp_path: Path) -> None:
    """A faulty instance is not kept warm; the next pod gets another device in its place."""
    async with at_work(tmp_path, DYNAMIC) as scene:
        await scene.until(2, 2, THREE)
        first = pod("first", "3g.20gb")
        before = (await scene.kubelet.admit(first))["main"].envs["NVIDIA_VISIBLE_DEVICES"]
        await scene.wait_holders()
        [place] = placements(scene.node)
        fault(scene, place)
        await scene.until(2, 1, THREE)

        await scene.kubelet.delete(first)
        await until_placed(scene)
        await scene.until(2, 2, THREE)
        assert out_of_service(scene) == {}
        after = (await scene.kubelet.admit(pod("next", "3g.20gb")))["main"]
        assert after.envs["NVIDIA_VISIBLE_DEVICES"] != before
        assert placements(scene.node) == [place]


async def test_a_faulty_instance_in_use_stays(tmp_path: Path) -> None:
    """While a program runs on a faulty instance, it is unavailable, and the reason names both."""
    async with at_work(tmp_path, DYNAMIC) as scene:
        await scene.until(2, 2, THREE)
        gone = pod("gone", "3g.20gb")
        await scene.kubelet.admit(gone)
        await scene.wait_holders()
        [place] = placements(scene.node)
        scene.node.start_process(scene.node.gpus[0], SimProcess(4242, None, *numbers(scene, place)))
        fault(scene, place)
        await scene.until(2, 1, THREE)
        await scene.kubelet.delete(gone)
        expected = (
            f"instance {place} is out of service ({REASON}) and will be created again; "
            "process 4242 still runs on it"
        )
        await until(lambda: blocked(scene) == {expected})

        scene.node.end_process(scene.node.gpus[0], 4242)
        await until_placed(scene)
        await scene.until(2, 2, THREE)


async def test_a_faulty_instance_of_a_layout_is_created_again(tmp_path: Path) -> None:
    """All its replicas are Unhealthy until the last pod has gone; then the instance returns."""
    shared = f"{TWO}.shared"
    async with at_work(tmp_path, "layout: {2g.10gb: 3}, replicas: 2") as scene:
        await scene.until(6, 6, shared)
        one = SimPod.single("one", {shared: 1})
        device = (await scene.kubelet.admit(one))["main"].envs["NVIDIA_VISIBLE_DEVICES"]
        await scene.wait_holders()
        [place] = {
            slot.partition("-t")[0] for slot, m in created(scene).items() if m.device == device
        }
        fault(scene, place)
        await scene.until(6, 4, shared)
        assert out_of_service(scene) == {device: REASON}

        await scene.kubelet.delete(one)
        await scene.until(6, 6, shared)
        assert out_of_service(scene) == {}
        assert len(placements(scene.node)) == 3
        assert device not in {m.device for m in created(scene).values()}


async def test_no_replica_of_a_faulted_instance_is_given(tmp_path: Path) -> None:
    """A free replica is refused too, until the holder of another replica ends."""
    async with at_work(tmp_path, "layout: {7g.40gb: 1}, replicas: 2") as scene:
        shared = "nvidia.com/mig-7g.40gb.shared"
        await scene.until(2, 2, shared)
        await scene.kubelet.admit(SimPod.single("one", {shared: 1}))
        await scene.wait_holders()
        fault(scene, "7g.40gb@0")
        await scene.until(2, 0, shared)
        with pytest.raises(AdmissionError):
            await scene.kubelet.admit(SimPod.single("two", {shared: 1}))


async def test_an_operator_acknowledges_an_instance(tmp_path: Path) -> None:
    """The device's uuid acknowledges an instance, as does its GPU, which may be healthy."""
    async with at_work(tmp_path, DYNAMIC) as scene:
        await scene.until(2, 2, THREE)
        await scene.kubelet.admit(pod("a", "3g.20gb"))
        await scene.wait_holders()
        [place] = placements(scene.node)
        acknowledge = scene.agent.commands["acknowledge"]

        fault(scene, place)
        await scene.until(2, 1, THREE)
        [device] = out_of_service(scene)
        answer = await acknowledge({"gpu": device})
        assert answer == f"MIG device {device} of GPU {scene.state(0).gpu} is back in service"
        await scene.until(2, 2, THREE)

        fault(scene, place)
        await scene.until(2, 1, THREE)
        await acknowledge({"gpu": "0"})
        await scene.until(2, 2, THREE)
        with pytest.raises(MetagpuError, match="is in service"):
            await acknowledge({"gpu": "0"})


async def test_a_verdict_does_not_pass_to_the_next_instance(tmp_path: Path) -> None:
    """A verdict belongs to a device; the next device with its number is healthy."""
    async with at_work(tmp_path, "profiles: [7g.40gb], keepWarm: 0s") as scene:
        whole = "nvidia.com/mig-7g.40gb"
        await scene.until(1, 1, whole)
        first = pod("first", "7g.40gb")
        await scene.kubelet.admit(first)
        await scene.wait_holders()
        number = numbers(scene, "7g.40gb@0")
        fault(scene, "7g.40gb@0")
        await scene.until(1, 0, whole)
        await scene.kubelet.delete(first)
        await scene.until(1, 1, whole)

        await scene.kubelet.admit(pod("next", "7g.40gb"))
        assert numbers(scene, "7g.40gb@0") == number
        assert out_of_service(scene) == {}
        await scene.until(1, 1, whole)


@pytest.mark.parametrize("code", [95, 79])
async def test_some_faults_are_the_whole_gpus_wherever_they_are(tmp_path: Path, code: int) -> None:
    """A fault that is not contained takes the whole GPU out, whatever instance the driver names."""
    async with at_work(tmp_path, DYNAMIC) as scene:
        await scene.until(2, 2, THREE)
        await scene.kubelet.admit(pod("a", "3g.20gb"))
        await scene.wait_holders()
        [place] = placements(scene.node)
        fault(scene, place, code)

        await scene.until(2, 0, THREE)
        assert not scene.state(0).verdict.healthy
        assert out_of_service(scene) == {}


@pytest.mark.parametrize("seed", [1, 2])
async def test_neighbours_of_faulty_instances_do_not_change(tmp_path: Path, seed: int) -> None:
    """Of seven full instances the faulty ones are created again; the other devices stay."""
    one, chance = "nvidia.com/mig-1g.5gb", random.Random(seed)  # noqa: S311 - chance, no secret
    async with at_work(tmp_path, "profiles: [1g.5gb], keepWarm: 1h") as scene:
        await scene.until(7, 7, one)
        pods = {f"pod{n}": pod(f"pod{n}", "1g.5gb") for n in range(7)}
        for each in pods.values():
            await scene.kubelet.admit(each)
        await scene.wait_holders()
        before = {slot: m.device for slot, m in created(scene).items()}
        ill = set(chance.sample(sorted(before), 3))
        for slot in sorted(ill):
            fault(scene, slot)

        await scene.until(7, 4, one)
        assert shares_on_faulty_devices(scene.state(0)) == {
            f"{scene.state(0).gpu.id}::{slot}" for slot in ill
        }
        holders = {i: lease.holder for i, lease in scene.state(0).leases.items()}
        for slot in ill:
            holder = holders[ShareId(f"{scene.state(0).gpu.id}::{slot}")]
            assert holder is not None
            await scene.kubelet.delete(pods[holder.pod])
        await scene.until(7, 7, one)

        assert scene.state(0).verdict.healthy
        stayed = {slot: m.device for slot, m in created(scene).items()}
        assert stayed == {slot: device for slot, device in before.items() if slot not in ill}
        for n in range(3):
            await scene.kubelet.admit(pod(f"new{n}", "1g.5gb"))
        assert {m.device for m in created(scene).values()}.isdisjoint(
            {before[slot] for slot in ill}
        )


async def test_a_recovery_action_after_a_contained_fault_is_the_gpus(tmp_path: Path) -> None:
    """A reset that the driver requests takes the GPU out, even after a contained fault."""
    async with at_work(tmp_path, DYNAMIC) as scene:
        await scene.until(2, 2, THREE)
        await scene.kubelet.admit(pod("a", "3g.20gb"))
        await scene.wait_holders()
        [place] = placements(scene.node)
        scene.node.gpus[0].recovery_action = RecoveryAction.GPU_RESET
        fault(scene, place)

        await scene.until(2, 0, THREE)
        assert "GPU reset" in scene.state(0).verdict.reason


async def test_a_fault_of_a_foreign_instance_stays_with_it(tmp_path: Path) -> None:
    """A foreign instance's fault is reported by its device, and forgotten with the instance."""
    async with at_work(tmp_path, "profiles: [3g.20gb]") as scene:
        await scene.until(2, 2, THREE)
        foreign.create_instance(scene.node, scene.node.gpus[0], "2g.10gb@0")
        with scene.node.changed:
            [(_, compute)] = scene.node.gpus[0].mig.compute_instances
        fault(scene, "2g.10gb@0")
        event = await scene.next_event(InstanceFaulted)
        assert isinstance(event, InstanceFaulted)
        assert event.device == compute.uuid
        assert scene.state(0).verdict.healthy
        await scene.until(2, 1, THREE)

        foreign.destroy_instance(scene.node, scene.node.gpus[0], "2g.10gb@0")
        await until(lambda: out_of_service(scene) == {})
        await scene.until(2, 2, THREE)


async def test_an_instance_named_on_a_gpu_without_mig_is_the_gpu(tmp_path: Path) -> None:
    """Without MIG mode an XID with instance numbers takes the GPU out."""
    config = (
        "version: metagpu/v1\nhealth: {xids: {94: fatal}}\n"
        "pools: [{name: a, backends: [{backend: fraction, sharesPerGpu: 2}]}]\n"
    )
    async with agent_at_work(tmp_path, "a100-40gb:1", config) as scene:
        await scene.until(2, 2)
        scene.node.raise_xid(scene.node.gpus[0], 94, 0, 0)
        assert isinstance(await scene.next_event(GpuFaulted), GpuFaulted)
        await scene.until(2, 0)
