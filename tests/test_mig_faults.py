"""An XID inside a MIG instance: the whole agent, a node and a kubelet."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from metagpu.core.driver import RecoveryAction
from metagpu.core.errors import MetagpuError
from metagpu.core.facts import GpuFaulted, InstanceFaulted
from metagpu.core.model import ShareId
from metagpu.core.report import status
from metagpu.sim import foreign
from metagpu.sim.gpu import SimProcess
from metagpu.sim.kubelet import AdmissionError, Pod
from tests.agent_rig import Scene, agent_at_work
from tests.mig_rig import a_node, blocked, hurry, made, places, pod, until, until_placed

TWO = "nvidia.com/mig-2g.10gb"
THREE = "nvidia.com/mig-3g.20gb"
REASON = "XID 94: contained memory error"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody wait for what takes seconds on a real node."""
    hurry(monkeypatch)


@asynccontextmanager
async def at_work(tmp_path: Path, options: str, *, rescan: str = "100ms") -> AsyncIterator[Scene]:
    """Run an agent on one A100 for which XID 94 is fatal, and 95 as ever."""
    node = await a_node(tmp_path, "{board: a100-40gb, mig: true}")
    config = (
        "version: metagpu/v1\n"
        f"health: {{quietPeriod: 1h, rescanPeriod: {rescan}, xids: {{94: fatal}}}}\n"
        "pools:\n"
        "  - name: mig\n"
        f"    backends: [{{backend: mig, {options}}}]\n"
    )
    async with agent_at_work(tmp_path, node, config) as scene:
        yield scene


def numbers(it: Scene, place: str) -> tuple[int, int]:
    """Give the numbers by which NVML knows an instance and its compute instance."""
    gpu = it.node.gpus[0]
    with it.node.changed:
        return next(
            (instance.number, compute.number)
            for instance, compute in gpu.mig.computes
            if foreign.place_of(gpu, instance) == place
        )


def fault(it: Scene, place: str, code: int = 94) -> None:
    """Have the driver report an XID inside an instance."""
    it.node.raise_xid(it.node.gpus[0], code, *numbers(it, place))


def out(it: Scene) -> dict[str, str]:
    """Say which MIG devices are out of service, and why."""
    return {device: verdict.reason for device, verdict in it.state(0).faults.items()}


DYNAMIC = "profiles: [2g.10gb, 3g.20gb], keepWarm: 1h"


async def test_a_fault_inside_an_instance_is_that_instances_alone(tmp_path: Path) -> None:
    """Its share turns Unhealthy with reason and time; its neighbour's pod and new pods do not."""
    async with at_work(tmp_path, DYNAMIC) as it:
        await it.until(2, 2, THREE)
        for name in ("a", "b"):
            await it.kubelet.admit(pod(name, "3g.20gb"))
        await it.told()
        [device] = [m.device for slot, m in made(it).items() if slot == "3g.20gb@0"]
        fault(it, "3g.20gb@0")

        await it.until(2, 1, THREE)
        assert out(it) == {device: REASON}
        assert it.state(0).verdict.healthy
        assert it.state(0).broken == {f"{it.state(0).gpu.id}::3g.20gb@0"}
        [told] = status(it.agent.registry.snapshot, it.agent.layout)["gpus"][0]["faults"]
        assert (told["device"], told["reason"]) == (device, REASON)
        assert told["shares"] == [f"{it.state(0).gpu.id}::3g.20gb@0"]
        assert places(it.node) == ["3g.20gb@0", "3g.20gb@4"]


async def test_an_instance_is_made_anew_once_its_pod_has_gone(tmp_path: Path) -> None:
    """What is out of service is not kept warm; the next pod gets another device in its place."""
    async with at_work(tmp_path, DYNAMIC) as it:
        await it.until(2, 2, THREE)
        first = pod("first", "3g.20gb")
        before = (await it.kubelet.admit(first))["main"].envs["NVIDIA_VISIBLE_DEVICES"]
        await it.told()
        [place] = places(it.node)
        fault(it, place)
        await it.until(2, 1, THREE)

        await it.kubelet.delete(first)
        await until_placed(it)
        await it.until(2, 2, THREE)
        assert out(it) == {}
        after = (await it.kubelet.admit(pod("next", "3g.20gb")))["main"]
        assert after.envs["NVIDIA_VISIBLE_DEVICES"] != before
        assert places(it.node) == [place]


async def test_an_instance_that_is_used_is_not_made_anew(tmp_path: Path) -> None:
    """While a program runs on it, it stays, is given to nobody, and the reason names both."""
    async with at_work(tmp_path, DYNAMIC) as it:
        await it.until(2, 2, THREE)
        gone = pod("gone", "3g.20gb")
        await it.kubelet.admit(gone)
        await it.told()
        [place] = places(it.node)
        it.node.add_process(it.node.gpus[0], SimProcess(4242, None, *numbers(it, place)))
        fault(it, place)
        await it.until(2, 1, THREE)
        await it.kubelet.delete(gone)
        told = (
            f"instance {place} is out of service ({REASON}) and is made anew; process 4242 still "
            "runs on it"
        )
        await until(lambda: blocked(it) == {told})

        it.node.end_process(it.node.gpus[0], 4242)
        await until_placed(it)
        await it.until(2, 2, THREE)


async def test_an_instance_of_a_layout_is_made_anew(tmp_path: Path) -> None:
    """All its replicas are Unhealthy until the last pod has gone; then it is there again."""
    shared = f"{TWO}.shared"
    async with at_work(tmp_path, "layout: {2g.10gb: 3}, replicas: 2") as it:
        await it.until(6, 6, shared)
        one = Pod.single("one", {shared: 1})
        device = (await it.kubelet.admit(one))["main"].envs["NVIDIA_VISIBLE_DEVICES"]
        await it.told()
        [place] = {slot.partition("-t")[0] for slot, m in made(it).items() if m.device == device}
        fault(it, place)
        await it.until(6, 4, shared)
        assert out(it) == {device: REASON}

        await it.kubelet.delete(one)
        await it.until(6, 6, shared)
        assert out(it) == {}
        assert len(places(it.node)) == 3
        assert device not in {m.device for m in made(it).values()}


async def test_nobody_is_given_a_replica_of_a_faulted_instance(tmp_path: Path) -> None:
    """One that is free is refused too, while the instance waits for the end of who has another."""
    async with at_work(tmp_path, "layout: {7g.40gb: 1}, replicas: 2") as it:
        shared = "nvidia.com/mig-7g.40gb.shared"
        await it.until(2, 2, shared)
        await it.kubelet.admit(Pod.single("one", {shared: 1}))
        await it.told()
        fault(it, "7g.40gb@0")
        await it.until(2, 0, shared)
        with pytest.raises(AdmissionError):
            await it.kubelet.admit(Pod.single("two", {shared: 1}))


async def test_an_operator_takes_an_instance_back(tmp_path: Path) -> None:
    """By the device's uuid, or with its GPU; the GPU itself need not have been out."""
    async with at_work(tmp_path, DYNAMIC) as it:
        await it.until(2, 2, THREE)
        await it.kubelet.admit(pod("a", "3g.20gb"))
        await it.told()
        [place] = places(it.node)
        acknowledge = it.agent.commands["acknowledge"]

        fault(it, place)
        await it.until(2, 1, THREE)
        [device] = out(it)
        said = await acknowledge({"gpu": device})
        assert said == f"MIG device {device} of GPU {it.state(0).gpu} is back in service"
        await it.until(2, 2, THREE)

        fault(it, place)
        await it.until(2, 1, THREE)
        await acknowledge({"gpu": "0"})
        await it.until(2, 2, THREE)
        with pytest.raises(MetagpuError, match="is in service"):
            await acknowledge({"gpu": "0"})


async def test_a_number_that_another_instance_has_later_says_nothing_of_it(tmp_path: Path) -> None:
    """A verdict belongs to a device: what is made in its place, by its number, is well."""
    async with at_work(tmp_path, "profiles: [7g.40gb], keepWarm: 0s") as it:
        whole = "nvidia.com/mig-7g.40gb"
        await it.until(1, 1, whole)
        first = pod("first", "7g.40gb")
        await it.kubelet.admit(first)
        await it.told()
        number = numbers(it, "7g.40gb@0")
        fault(it, "7g.40gb@0")
        await it.until(1, 0, whole)
        await it.kubelet.delete(first)
        await it.until(1, 1, whole)

        await it.kubelet.admit(pod("next", "7g.40gb"))
        assert numbers(it, "7g.40gb@0") == number
        assert out(it) == {}
        await it.until(1, 1, whole)


@pytest.mark.parametrize("code", [95, 79])
async def test_some_faults_are_the_whole_gpus_wherever_they_are(tmp_path: Path, code: int) -> None:
    """What is not contained takes all of the GPU out, whatever instance the driver names."""
    async with at_work(tmp_path, DYNAMIC) as it:
        await it.until(2, 2, THREE)
        await it.kubelet.admit(pod("a", "3g.20gb"))
        await it.told()
        [place] = places(it.node)
        fault(it, place, code)

        await it.until(2, 0, THREE)
        assert not it.state(0).verdict.healthy
        assert out(it) == {}


@pytest.mark.parametrize("seed", [1, 2])
async def test_whoever_breaks_neighbours_do_not_notice(tmp_path: Path, seed: int) -> None:
    """Of seven full instances some break and are made anew; the others' devices stay the same."""
    one, chance = "nvidia.com/mig-1g.5gb", random.Random(seed)  # noqa: S311 - chance, no secret
    async with at_work(tmp_path, "profiles: [1g.5gb], keepWarm: 1h") as it:
        await it.until(7, 7, one)
        pods = {f"pod{n}": pod(f"pod{n}", "1g.5gb") for n in range(7)}
        for each in pods.values():
            await it.kubelet.admit(each)
        await it.told()
        before = {slot: m.device for slot, m in made(it).items()}
        ill = set(chance.sample(sorted(before), 3))
        for slot in sorted(ill):
            fault(it, slot)

        await it.until(7, 4, one)
        assert it.state(0).broken == {f"{it.state(0).gpu.id}::{slot}" for slot in ill}
        holders = {i: lease.holder for i, lease in it.state(0).leases.items()}
        for slot in ill:
            holder = holders[ShareId(f"{it.state(0).gpu.id}::{slot}")]
            assert holder is not None
            await it.kubelet.delete(pods[holder.pod])
        await it.until(7, 7, one)

        assert it.state(0).verdict.healthy
        stayed = {slot: m.device for slot, m in made(it).items()}
        assert stayed == {slot: device for slot, device in before.items() if slot not in ill}
        for n in range(3):
            await it.kubelet.admit(pod(f"new{n}", "1g.5gb"))
        assert {m.device for m in made(it).values()}.isdisjoint({before[slot] for slot in ill})


async def test_a_recovery_action_after_a_contained_fault_is_the_gpus(tmp_path: Path) -> None:
    """The driver's word that a reset is needed counts more than where the fault was."""
    async with at_work(tmp_path, DYNAMIC) as it:
        await it.until(2, 2, THREE)
        await it.kubelet.admit(pod("a", "3g.20gb"))
        await it.told()
        [place] = places(it.node)
        it.node.gpus[0].recovery_action = RecoveryAction.GPU_RESET
        fault(it, place)

        await it.until(2, 0, THREE)
        assert "GPU reset" in it.state(0).verdict.reason


async def test_a_fault_of_somebody_elses_instance_is_nobody_elses(tmp_path: Path) -> None:
    """Known by its device and told; forgotten when the instance is gone."""
    async with at_work(tmp_path, "profiles: [3g.20gb]") as it:
        await it.until(2, 2, THREE)
        foreign.make(it.node, it.node.gpus[0], "2g.10gb@0")
        with it.node.changed:
            [(_, compute)] = it.node.gpus[0].mig.computes
        fault(it, "2g.10gb@0")
        heard = await it.news(InstanceFaulted)
        assert isinstance(heard, InstanceFaulted)
        assert heard.device == compute.uuid
        assert it.state(0).verdict.healthy
        await it.until(2, 1, THREE)

        foreign.end(it.node, it.node.gpus[0], "2g.10gb@0")
        await until(lambda: out(it) == {})
        await it.until(2, 2, THREE)


async def test_an_instance_named_on_a_gpu_without_mig_is_the_gpu(tmp_path: Path) -> None:
    """Numbers of instances mean nothing where MIG is off: the GPU itself is out."""
    config = (
        "version: metagpu/v1\nhealth: {xids: {94: fatal}}\n"
        "pools: [{name: a, backends: [{backend: fraction, sharesPerGpu: 2}]}]\n"
    )
    async with agent_at_work(tmp_path, "a100-40gb:1", config) as it:
        await it.until(2, 2)
        it.node.raise_xid(it.node.gpus[0], 94, 0, 0)
        assert isinstance(await it.news(GpuFaulted), GpuFaulted)
        await it.until(2, 0)
