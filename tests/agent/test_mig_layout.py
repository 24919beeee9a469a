"""A fixed layout of MIG instances: the whole agent, a node and a kubelet."""

from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from metagpu.backends.mig.backend import MigBackend
from metagpu.sim.kubelet.kubelet import AdmissionError, SimKubelet, SimPod
from metagpu.sim.machine import foreign_instances as foreign
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.mig_state import SimProvisioning
from tests.rigs.agent import Scene, agent_at_work
from tests.rigs.mig import (
    a_node,
    blocked,
    blocker,
    created,
    hurry,
    mig_at_work,
    mig_pool,
    on_demand_pool,
    placements,
    pod,
    until,
    until_placed,
)

ONE = "nvidia.com/mig-1g.5gb"
TWO = "nvidia.com/mig-2g.10gb"
THREE = "nvidia.com/mig-3g.20gb"
GPU = "nvidia.com/gpu"
WITHOUT_MIG = mig_pool(f"disableMig: true}}, {{backend: whole, resource: {GPU}")
LAYOUT = "{2g.10gb: 2, 1g.5gb: 3}"
FIVE = ("1g.5gb@0", "1g.5gb@1", "1g.5gb@6", "2g.10gb@2", "2g.10gb@4")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timings that last seconds on a real node."""
    hurry(monkeypatch)


async def change(scene: Scene, text: str) -> None:
    """Put another configuration in force."""
    await anyio.Path(scene.config_file).write_text(text)
    await scene.agent.reload()


async def test_four_gpus_have_their_instances(tmp_path: Path) -> None:
    """12 and 8 instances of four A100 exist before a pod asks, and outlive their pods."""
    gpus = "{model: a100-40gb, count: 4, mig: true}"
    async with mig_at_work(tmp_path, gpus=gpus, layout=LAYOUT) as scene:
        await scene.until(12, 12, ONE)
        await scene.until(8, 8, TWO)
        assert [sorted(created(scene, n)) for n in range(4)] == [sorted(FIVE)] * 4
        assert [placements(scene.node, n) for n in range(4)] == [sorted(FIVE)] * 4

        pods = [pod(f"sample{n}") for n in range(8)]
        answers = [(await scene.kubelet.admit(one))["main"].envs for one in pods]
        devices = {envs["NVIDIA_VISIBLE_DEVICES"] for envs in answers}
        assert devices == {
            m.device
            for n in range(4)
            for slot, m in created(scene, n).items()
            if slot.startswith("2g")
        }
        with pytest.raises(AdmissionError):
            await scene.kubelet.admit(pod("ninth"))

        await scene.wait_holders()
        await scene.kubelet.delete(pods[0])
        await scene.until(8, 8, TWO)
        assert [placements(scene.node, n) for n in range(4)] == [sorted(FIVE)] * 4


async def test_capacity_is_right_before_instances_are(tmp_path: Path) -> None:
    """The share of an instance that cannot be created is listed Unhealthy, with the reason."""
    gpus = "{model: a100-40gb, mig: true, provisioning: {failures: 1000}}"
    async with mig_at_work(tmp_path, gpus=gpus, layout=LAYOUT) as scene:
        await scene.until(3, 0, ONE)
        await scene.until(2, 0, TWO)
        await until(lambda: blocker(scene).startswith("the layout waits: "))
        await until(lambda: any("of the layout is missing" in text for text in blocked(scene)))

        scene.node.gpus[0].mig.provisioning = SimProvisioning()
        await scene.until(3, 3, ONE)
        await until(lambda: not blocker(scene) and not blocked(scene))


async def test_one_name_for_all_instances(tmp_path: Path) -> None:
    """Under NVIDIA's strategy single, instances have the resource name of GPUs."""
    async with mig_at_work(tmp_path, layout="{1g.5gb: 7}, resource: nvidia.com/gpu") as scene:
        await scene.until(7, 7, "nvidia.com/gpu")


async def test_instances_are_created_again_after_a_reset(tmp_path: Path) -> None:
    """After a reboot or a reset the ids are the same, and given once the instances exist."""
    async with mig_at_work(tmp_path, layout=LAYOUT) as scene:
        await scene.until(3, 3, ONE)
        before = created(scene)
        scene.node.gpus[0].mig.provisioning = SimProvisioning(failures=1000)
        scene.node.reset_gpu(scene.node.gpus[0])
        await scene.until(3, 0, ONE)

        scene.node.gpus[0].mig.provisioning = SimProvisioning()
        await scene.until(3, 3, ONE)
        assert created(scene).keys() == before.keys()
        assert {m.device for m in created(scene).values()}.isdisjoint(
            m.device for m in before.values()
        )


async def test_a_new_daemon_finds_its_layout(tmp_path: Path) -> None:
    """The next daemon gives the same instances, without creating any."""
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    text = mig_pool(f"layout: {LAYOUT}")
    async with kubelet.running():
        async with agent_at_work(tmp_path, node, text, kubelet=kubelet) as agent:
            await agent.until(3, 3, ONE)
            await agent.until(2, 2, TWO)
            await kubelet.admit(pod("kept"))
            await agent.wait_holders()
            before = created(agent)
        assert placements(node) == sorted(FIVE)

        async with agent_at_work(tmp_path, node, text, kubelet=kubelet) as scene:
            await scene.wait_snapshot(lambda now: bool(now.gpus))
            await scene.until(3, 3, ONE)
            await until(lambda: len(scene.state(0).leases) == 1)
            assert {i: m.device for i, m in created(scene).items()} == {
                i: m.device for i, m in before.items()
            }
        assert node.gpus[0].mig.provisioning.requested == len(FIVE)


async def test_a_change_waits_for_the_pod_that_holds_an_instance(tmp_path: Path) -> None:
    """Present instances stay, the reason names the pod, and its end applies the new layout."""
    async with mig_at_work(tmp_path, layout="{3g.20gb: 2}") as scene:
        await scene.until(2, 2, THREE)
        last = pod("last", "3g.20gb")
        await scene.kubelet.admit(last)
        await scene.wait_holders()
        [held] = [lease.share.id.partition("::")[2] for lease in scene.state(0).leases.values()]

        await change(scene, mig_pool(f"layout: {LAYOUT}"))
        await scene.until(3, 0, ONE)
        await until(
            lambda: blocker(scene) == f"the layout waits: default/last (main) holds instance {held}"
        )
        assert placements(scene.node) == ["3g.20gb@0", "3g.20gb@4"]

        await scene.kubelet.delete(last)
        await until_placed(scene, *FIVE)
        await scene.until(3, 3, ONE)
        await scene.until(2, 2, TWO)


async def test_a_change_of_an_idle_gpu_is_made_by_difference(tmp_path: Path) -> None:
    """An instance of both layouts stays; the others are removed or created at once."""
    async with mig_at_work(tmp_path, layout="{3g.20gb: 1, 4g.20gb: 1}") as scene:
        await scene.until(1, 1, THREE)
        [(place, before)] = [(i, m) for i, m in created(scene).items() if i.startswith("3g")]

        await change(scene, mig_pool("layout: {3g.20gb: 2}"))
        await scene.until(2, 2, THREE)
        assert created(scene)[place].device == before.device

        await change(scene, on_demand_pool("keepWarm: 0s"))
        await until_placed(scene)


async def test_foreign_instances_are_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance that an operator creates by hand is not touched, and the reason names it."""
    # Idle for so long, it would be removed: on a busy machine before its process starts.
    monkeypatch.setattr(MigBackend, "timing", replace(MigBackend.timing, grace=3.0))
    async with mig_at_work(tmp_path, layout="{3g.20gb: 1}") as scene:
        await scene.until(1, 1, THREE)
        [place] = placements(scene.node)
        other = "2g.10gb@0" if place.endswith("4") else "2g.10gb@4"
        foreign.create_instance(scene.node, scene.node.gpus[0], other)
        await until(lambda: any(other in text for text in blocked(scene)))

        await change(scene, mig_pool("layout: {7g.40gb: 1}"))
        await until(lambda: f"instance {other} may be of another program" in blocker(scene))
        scene.node.start_process(scene.node.gpus[0], SimProcess(4242, None, *number(scene, other)))
        await scene.until(1, 0, "nvidia.com/mig-7g.40gb")
        assert placements(scene.node) == sorted([place, other])

        scene.node.end_process(scene.node.gpus[0], 4242)
        await scene.until(1, 1, "nvidia.com/mig-7g.40gb")
        assert placements(scene.node) == ["7g.40gb@0"]


async def test_instances_of_before_become_the_layout(tmp_path: Path) -> None:
    """Another program's idle instances are used where they fit, and removed otherwise."""
    gpus = "{model: a100-40gb, mig: true, instances: [3g.20gb@0, 2g.10gb@4]}"
    async with mig_at_work(tmp_path, gpus=gpus, layout=LAYOUT) as scene:
        await until_placed(scene, *FIVE)
        await scene.until(2, 2, TWO)
        assert scene.node.gpus[0].mig.provisioning.requested == len(FIVE) - 1


async def test_a_layout_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """A GPU without free capacity for the layout keeps its instances, with a reason."""
    gpus = "{model: a100-40gb, mig: true, instances: [2g.10gb@0]}"
    async with mig_at_work(tmp_path, gpus=gpus, layout="{3g.20gb: 3}") as scene:
        await until(
            lambda: (
                blocker(scene)
                == "the layout 3x3g.20gb does not fit: 3 x 3g.20gb wanted, room for 2"
            )
        )
        assert placements(scene.node) == ["2g.10gb@0"]


async def test_a_layout_that_does_not_fit_leaves_the_gpu_idle(tmp_path: Path) -> None:
    """After the last pod of an earlier layout the GPU is idle; no instance changes."""
    gpus = "{model: a100-40gb, mig: true}, {model: h100-80gb, mig: true}"
    async with mig_at_work(tmp_path, gpus=gpus, layout="{3g.20gb: 2}") as scene:
        await scene.until(2, 2, THREE)
        last = pod("last", "3g.20gb")
        await scene.kubelet.admit(last)
        await scene.wait_holders()
        await change(scene, mig_pool("layout: {3g.40gb: 2}"))  # the other GPU can have it
        await until(lambda: "does not fit" in blocker(scene))

        await scene.kubelet.delete(last)
        await until(lambda: scene.state(0).owner is None)
        assert placements(scene.node) == ["3g.20gb@0", "3g.20gb@4"]


async def test_a_layout_that_no_gpu_can_have_is_refused(tmp_path: Path) -> None:
    """The layout of before stays on offer, on this GPU and on others; an error says why."""
    async with mig_at_work(tmp_path, layout="{3g.20gb: 2}") as scene:
        await scene.until(2, 2, THREE)
        await change(scene, mig_pool("layout: {3g.20gb: 3}"))

        error = scene.agent.config_loader.error or ""
        assert error.endswith(
            "pools[0]: no GPU can have this: GPU 0: the layout 3x3g.20gb does not fit: "
            "3 x 3g.20gb wanted, room for 2"
        )
        await scene.kubelet.admit(pod("next", "3g.20gb"))
        assert not blocker(scene)


async def test_mig_mode_without_instances(tmp_path: Path) -> None:
    """An empty layout turns MIG on and removes idle instances; nothing is offered."""
    gpus = "{model: a100-40gb, mig: true, instances: [3g.20gb@0]}, {model: h100-80gb}"
    async with mig_at_work(tmp_path, gpus=gpus, layout="{}, enableMig: true") as scene:
        await until_placed(scene)
        await until(lambda: scene.node.gpus[1].mig.enabled)
        await until(lambda: not blocker(scene) and not blocker(scene, 1))
        assert not scene.agent.registry.snapshot.offers


async def test_idle_gpus_leave_mig_mode(tmp_path: Path) -> None:
    """Without pods, instances go and MIG mode is off at once; whole GPUs are on offer then."""
    gpus = "{model: h100-80gb, mig: true, instances: [3g.40gb@0]}, {model: t4}"
    node = await a_node(tmp_path, gpus)
    async with agent_at_work(tmp_path, node, WITHOUT_MIG) as scene:
        await scene.until(2, 2, GPU)
        assert not scene.node.gpus[0].mig.enabled
        assert not scene.node.gpus[0].mig.instances
        await until(lambda: not blocker(scene) and not blocker(scene, 1))


async def test_gpus_leave_mig_mode_after_their_last_pod(tmp_path: Path) -> None:
    """A pod keeps its instance, and the reason names it; its GPU leaves MIG mode afterwards."""
    async with mig_at_work(
        tmp_path, gpus="{model: h100-80gb, mig: true}", layout="{3g.40gb: 2}"
    ) as scene:
        await scene.until(2, 2, "nvidia.com/mig-3g.40gb")
        last = pod("last", "3g.40gb")
        await scene.kubelet.admit(last)
        await scene.wait_holders()

        await change(scene, WITHOUT_MIG)
        await until(lambda: "the GPU is unused: default/last (main) holds" in blocker(scene))
        await until(lambda: len(placements(scene.node)) == 1)
        assert scene.node.gpus[0].mig.enabled

        await scene.kubelet.delete(last)
        await scene.until(1, 1, GPU)
        assert not scene.node.gpus[0].mig.enabled


async def test_an_a100_leaves_mig_mode_with_a_reset(tmp_path: Path) -> None:
    """On Ampere the reason names the reset that the mode needs; whole GPUs are offered after it."""
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    async with agent_at_work(tmp_path, node, WITHOUT_MIG) as scene:
        await scene.wait_snapshot(lambda now: bool(now.gpus))
        await until(lambda: "switched off" in blocker(scene))
        assert "`nvidia-smi --gpu-reset -i 0`" in blocker(scene)
        assert scene.state(0).suspended["mig"].until_reset
        await scene.until(0, 0, GPU)

        scene.node.reset_gpu(scene.node.gpus[0])
        await scene.until(1, 1, GPU)
        await until(lambda: not blocker(scene))


async def test_existing_instances_are_offered_and_left_alone(tmp_path: Path) -> None:
    """Instances of another program are given to pods; none is created or removed for them."""
    gpus = "{model: a100-40gb, mig: true, instances: [1g.5gb@0, 2g.10gb@2]}, {model: t4}"
    node = await a_node(tmp_path, gpus)
    text = mig_pool(f"existing: true}}, {{backend: whole, resource: {GPU}")
    async with agent_at_work(tmp_path, node, text) as scene:
        await scene.until(1, 1, ONE)
        await scene.until(1, 1, TWO)
        await scene.until(1, 1, GPU)
        one = pod("one")
        envs = (await scene.kubelet.admit(one))["main"].envs
        assert envs["NVIDIA_VISIBLE_DEVICES"].startswith("MIG-")
        await scene.wait_holders()
        await scene.kubelet.delete(one)
        await scene.until(1, 1, TWO)

        other = next(i for i in scene.node.gpus[0].mig.instances.values() if i.start == 0)
        with scene.node.changed:
            del scene.node.gpus[0].mig.instances[other.number]
        await scene.until(1, 0, ONE)
        assert any("another program removed it" in text for text in blocked(scene))
    assert placements(node) == ["2g.10gb@2"]
    assert node.gpus[0].mig.provisioning.requested == 0


async def test_existing_instances_are_shared(tmp_path: Path) -> None:
    """Several pods have one instance of another program at once, each one replica, packed."""
    gpus = "{model: a100-40gb, mig: true, instances: [1g.5gb@0, 1g.5gb@1]}, {model: t4}"
    node, shared = await a_node(tmp_path, gpus), f"resource: {GPU}, replicas: 3"
    shared += ", failRequestsGreaterThanOne: true"
    text = mig_pool(
        f"existing: true, {shared}, allocationPolicy: packed}}, {{backend: timeslice, {shared}"
    )
    async with agent_at_work(tmp_path, node, text) as scene:
        await scene.until(6, 6, GPU)
        with pytest.raises(AdmissionError, match="maximum request size for shared resources is 1"):
            await scene.kubelet.admit(SimPod.single("two", {GPU: 2}))
        granted = [
            (await scene.kubelet.admit(SimPod.single(f"pod{n}", {GPU: 1})))["main"].envs[
                "NVIDIA_VISIBLE_DEVICES"
            ]
            for n in range(6)
        ]
        assert len(set(granted)) == 2
        assert len(set(granted[:3])) == 1


async def test_a_plan_counts_existing_instances(tmp_path: Path) -> None:
    """A plan for the instances that are there reads them, and changes nothing."""
    gpus = "{model: a100-40gb, mig: true, instances: [1g.5gb@0, 2g.10gb@2]}"
    node = await a_node(tmp_path, gpus)
    before = mig_pool("existing: true").replace("mig, existing: true", "whole")
    async with agent_at_work(tmp_path, node, before) as scene:
        await scene.wait_snapshot(lambda now: bool(now.gpus))
        planned = await scene.agent.commands["plan"]({"text": mig_pool("existing: true")})

    assert isinstance(planned, dict)
    assert {ONE, TWO} <= planned["resources"].keys()


async def test_replicas_of_an_instance(tmp_path: Path) -> None:
    """Several pods have one instance at once; the instance is free when the last has gone."""
    shared = f"{ONE}.shared"
    layout = f"{LAYOUT}, replicas: {{1g.5gb: 2}}"
    async with mig_at_work(tmp_path, layout=layout) as scene:
        await scene.until(6, 6, shared)
        await scene.until(2, 2, TWO)
        pods = [SimPod.single(f"pod{n}", {shared: 1}) for n in range(6)]
        answers = [(await scene.kubelet.admit(one))["main"].envs for one in pods]

        devices = [envs["NVIDIA_VISIBLE_DEVICES"] for envs in answers]
        assert devices[:3] == devices[3:]
        assert len(set(devices)) == 3
        assert {envs["METAGPU_MEMORY_MIB"].partition("=")[2] for envs in answers} == {"2432"}
        with pytest.raises(AdmissionError):
            await scene.kubelet.admit(SimPod.single("seventh", {shared: 1}))

        await scene.wait_holders()
        for gone in pods:
            await scene.kubelet.delete(gone)
        await scene.until(6, 6, shared)
        await scene.kubelet.admit(SimPod.single("next", {shared: 1}))
        assert placements(scene.node) == sorted(FIVE)


async def test_replicas_of_an_instance_that_is_not_there(tmp_path: Path) -> None:
    """No replica is given before its instance exists, nor after the instance is gone."""
    shared = f"{ONE}.shared"
    async with mig_at_work(tmp_path, layout="{1g.5gb: 7}, replicas: 4") as scene:
        await scene.until(28, 28, shared)
        scene.node.gpus[0].mig.provisioning = SimProvisioning(failures=1000)
        foreign.destroy_instance(scene.node, scene.node.gpus[0], "1g.5gb@3")
        await scene.until(28, 24, shared)

        scene.node.gpus[0].mig.provisioning = SimProvisioning()
        await scene.until(28, 28, shared)


def number(scene: Scene, place: str) -> tuple[int, int]:
    """Return the numbers by which NVML knows an instance and its compute instance."""
    gpu = scene.node.gpus[0]
    with scene.node.changed:
        return next(
            (instance.number, compute.number)
            for instance, compute in gpu.mig.compute_instances
            if foreign.placement_name(gpu, instance) == place
        )


async def test_gpus_that_do_not_suit_single_are_excluded_alone(tmp_path: Path) -> None:
    """Wrong instances or no MIG mode exclude one GPU, with a reason, until the GPU is right."""
    one = "nvidia.com/gpu"
    node = await a_node(
        tmp_path, "{model: a100-40gb, mig: true, count: 2}, {model: a100-40gb, count: 1}"
    )
    other = node.gpus[1]
    number = foreign.create_instance(node, other, "2g.10gb@0")
    node.start_process(other, SimProcess(7, None, number, 0))

    config = mig_pool("layout: {1g.5gb: 7}, resource: nvidia.com/gpu")
    async with agent_at_work(tmp_path, node, config) as scene:
        await scene.until(21, 7, one)
        await until(lambda: "MIG mode is off; turn it on" in blocker(scene, 2))
        kept = "instance 2g.10gb@0 may be of another program"
        await until(lambda: kept in blocker(scene, 1))
        await scene.kubelet.admit(SimPod.single("served", {one: 7}))

        node.end_process(other, 7)
        await scene.until(21, 14, one)
        with node.changed:
            node.gpus[2].mig.enabled = node.gpus[2].mig.pending = True
        await scene.until(21, 21, one)
