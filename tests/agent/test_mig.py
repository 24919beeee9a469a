"""Pods ask for MIG instances that do not exist: the whole agent, a node and a kubelet."""

import random
from pathlib import Path
from typing import Any

import anyio
import pynvml
import pytest

from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.kubelet.kubelet import AdmissionError, SimKubelet, SimPod
from metagpu.sim.machine import foreign_instances as foreign
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.mig_state import SimProvisioning
from metagpu.sim.nvml.library import SimLibrary
from tests.rigs.agent import agent_at_work
from tests.rigs.mig import (
    PROFILES,
    a_node,
    blocked,
    blocker,
    created,
    hurry,
    mig_at_work,
    on_demand_pool,
    placements,
    pod,
    until,
    until_placed,
)

TWO = "nvidia.com/mig-2g.10gb"
THREE = "nvidia.com/mig-3g.20gb"
WHOLE = "nvidia.com/mig-7g.40gb"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timings that last seconds on a real node."""
    hurry(monkeypatch)


@pytest.mark.parametrize("profiles", [PROFILES, "1g, 2g, 3g, 7g"])
async def test_a_pod_gets_an_instance_that_did_not_exist(tmp_path: Path, profiles: str) -> None:
    """The instance is created at admission, is the one in the answer, and ends with the pod."""
    async with mig_at_work(tmp_path, profiles=profiles) as scene:
        await scene.until(3, 3, TWO)
        assert placements(scene.node) == []

        asking = pod("train")
        options = (await scene.kubelet.admit(asking))["main"]
        [place] = placements(scene.node)
        assert place.startswith("2g.10gb@")
        [(_, device)] = [(i, c.uuid) for i, c in scene.node.gpus[0].mig.compute_instances]
        assert options.envs["NVIDIA_VISIBLE_DEVICES"] == device
        assert options.envs["METAGPU_MEMORY_MIB"] == f"{device}=9856"
        await scene.until(3, 3, TWO)
        await scene.until(1, 0, WHOLE)

        await scene.wait_holders()
        await scene.kubelet.delete(asking)
        await until_placed(scene)
        await scene.until(1, 1, WHOLE)


async def test_two_pods_never_overlap(tmp_path: Path) -> None:
    """Shares that overlap a pod's instance are unavailable, so the next pod gets other slices."""
    async with mig_at_work(tmp_path) as scene:
        await scene.until(2, 2, "nvidia.com/mig-3g.20gb")
        await scene.kubelet.admit(pod("a", "3g.20gb"))
        await scene.until(1, 0, WHOLE)
        await scene.kubelet.admit(pod("b", "3g.20gb"))

        assert placements(scene.node) == ["3g.20gb@0", "3g.20gb@4"]
        with pytest.raises(AdmissionError):
            await scene.kubelet.admit(pod("c", "1g.5gb"))
        assert placements(scene.node) == ["3g.20gb@0", "3g.20gb@4"]


async def test_two_instances_of_ten_gigabytes_on_one_gpu(tmp_path: Path) -> None:
    """A container that asks for two 2g.10gb on an empty A100-PCIE-40GB gets both."""
    gpus = "{model: a100-pcie-40gb, mig: true}"
    async with mig_at_work(tmp_path, gpus=gpus) as scene:
        await scene.until(3, 3, TWO)
        options = (await scene.kubelet.admit(pod("gpu-pod1", count=2)))["main"]

        devices = options.envs["NVIDIA_VISIBLE_DEVICES"].split(",")
        assert {m.device for m in created(scene).values()} == {*devices}
        assert len(placements(scene.node)) == 2
        assert [
            part.partition("=")[2] for part in options.envs["METAGPU_MEMORY_MIB"].split(",")
        ] == [*("9856", "9856")]


async def test_a_freed_instance_is_kept_warm_and_used_again(tmp_path: Path) -> None:
    """The next pod of the profile gets the instance of the pod before it."""
    async with mig_at_work(tmp_path, options="keepWarm: 1h") as scene:
        await scene.until(3, 3, TWO)
        first = pod("first")
        before = (await scene.kubelet.admit(first))["main"]
        await scene.wait_holders()
        await scene.kubelet.delete(first)
        await until(lambda: [m.idle for m in created(scene).values()] == [True])
        await scene.until(1, 1, WHOLE)

        after = (await scene.kubelet.admit(pod("second")))["main"]
        assert after.envs == before.envs


async def test_a_warm_instance_gives_way_to_another(tmp_path: Path) -> None:
    """A warm instance is removed when another share needs its slices."""
    async with mig_at_work(tmp_path, options="keepWarm: 1h") as scene:
        await scene.until(3, 3, TWO)
        first = pod("first")
        await scene.kubelet.admit(first)
        await scene.wait_holders()
        await scene.kubelet.delete(first)
        await scene.until(1, 1, WHOLE)

        await scene.kubelet.admit(pod("large", "7g.40gb"))
        assert placements(scene.node) == ["7g.40gb@0"]


@pytest.mark.parametrize(
    "making", [SimProvisioning(failures=1), SimProvisioning(compute_failures=1)]
)
async def test_a_failure_has_its_reason_and_leaves_nothing(
    tmp_path: Path, making: SimProvisioning
) -> None:
    """A pod whose instance fails gets NVML's reason; the next pod gets its own instance."""
    async with mig_at_work(tmp_path) as scene:
        await scene.until(3, 3, TWO)
        scene.node.gpus[0].mig.provisioning = making
        with pytest.raises(
            AdmissionError, match=r"2g.10gb@\d could not be created: .*Unknown Error"
        ):
            await scene.kubelet.admit(pod("unlucky"))

        assert placements(scene.node) == []
        await scene.kubelet.admit(pod("lucky"))
        assert len(placements(scene.node)) == 1


@pytest.mark.parametrize(
    "making",
    [
        SimProvisioning(failures=1, done=True),
        SimProvisioning(compute_failures=1, done=True),
        SimProvisioning(compute_failures=1, removal_failures=1),
        SimProvisioning(removal_failures=1, done=True),
        SimProvisioning(removal_failures=1),
    ],
    ids=["created", "compute-created", "left-over", "removed", "half-removed"],
)
async def test_what_nvml_did_despite_its_error_is_ours(
    tmp_path: Path, making: SimProvisioning
) -> None:
    """An instance of a creation that NVML calls failed is used or removed, never foreign."""
    async with mig_at_work(tmp_path, options="keepWarm: 0s") as scene:
        await scene.until(3, 3, TWO)
        scene.node.gpus[0].mig.provisioning = making
        unlucky = pod("unlucky")
        try:
            await scene.kubelet.admit(unlucky)
            await scene.wait_holders()
            await scene.kubelet.delete(unlucky)
        except AdmissionError as error:
            assert "Unknown Error" in str(error)  # noqa: PT017 - a creation that fails

        await until_placed(scene)
        await scene.until(1, 1, WHOLE)
        assert not blocked(scene)


async def test_a_busy_driver_is_asked_again(tmp_path: Path) -> None:
    """While NVML reports the GPU in use the pod waits, and then gets its instance."""
    async with mig_at_work(tmp_path) as scene:
        await scene.until(3, 3, TWO)
        scene.node.gpus[0].mig.provisioning = SimProvisioning(in_use_until=float("inf"))
        async with anyio.create_task_group() as group:
            group.start_soon(scene.kubelet.admit, pod("patient"))
            await scene.wait_snapshot(lambda now: any(gpu.leases for gpu in now.gpus.values()))
            scene.node.gpus[0].mig.provisioning = SimProvisioning()

        assert len(placements(scene.node)) == 1


async def test_an_instance_that_comes_too_late_is_removed(tmp_path: Path) -> None:
    """A pod waits until the deadline; an instance that comes later is removed."""
    async with mig_at_work(tmp_path, options="deadline: 1s, keepWarm: 0s") as scene:
        await scene.until(3, 3, TWO)
        scene.node.gpus[0].mig.provisioning = SimProvisioning(duration=1.5)
        with pytest.raises(AdmissionError, match=r"no answer from NVML within (1|0\.\d+) s"):
            await scene.kubelet.admit(pod("hasty"))

        await until(lambda: scene.node.handles_issued > 0)
        await until_placed(scene)


async def test_an_instance_in_use_outlives_its_pod(tmp_path: Path) -> None:
    """An instance with a running program stays unavailable, and other instances are created."""
    async with mig_at_work(tmp_path, options="keepWarm: 0s") as scene:
        await scene.until(2, 2, THREE)
        gone = pod("gone", "3g.20gb")
        await scene.kubelet.admit(gone)
        await scene.wait_holders()
        [(_, device)] = created(scene).items()
        where = device.gpu_instance, device.compute_instance
        scene.node.start_process(scene.node.gpus[0], SimProcess(4242, None, *where))
        await scene.kubelet.delete(gone)
        await until(lambda: not scene.state(0).leases)
        await scene.until(2, 1, THREE)
        there = "instance 3g.20gb@4 was released, and process 4242 still runs on it"
        await until(lambda: blocked(scene) == {there})

        await scene.kubelet.admit(pod("other", "3g.20gb"))
        assert placements(scene.node) == ["3g.20gb@0", "3g.20gb@4"]
        scene.node.end_process(scene.node.gpus[0], 4242)
        await until_placed(scene, "3g.20gb@0")


async def test_an_instance_that_cannot_be_removed_blocks_only_itself(tmp_path: Path) -> None:
    """The instance is not offered, the rest of the GPU is, and its removal is tried again."""
    async with mig_at_work(tmp_path, options="keepWarm: 0s") as scene:
        await scene.until(2, 2, THREE)
        scene.node.gpus[0].mig.provisioning = SimProvisioning(in_use_until=float("inf"))
        gone = pod("gone", "3g.20gb")
        scene.node.gpus[0].mig.provisioning = SimProvisioning()
        await scene.kubelet.admit(gone)
        await scene.wait_holders()
        scene.node.gpus[0].mig.provisioning = SimProvisioning(in_use_until=float("inf"))
        await scene.kubelet.delete(gone)
        await scene.until(2, 1, THREE)

        scene.node.gpus[0].mig.provisioning = SimProvisioning()
        await scene.kubelet.admit(pod("other", "3g.20gb"))
        await until_placed(scene, "3g.20gb@0")
        await scene.until(2, 2, THREE)


async def test_instances_of_an_administrator_are_left_alone(tmp_path: Path) -> None:
    """An instance of an administrator is not touched, and its slices are not offered."""
    async with mig_at_work(tmp_path, options="keepWarm: 0s") as scene:
        await scene.until(2, 2, THREE)
        foreign.create_instance(scene.node, scene.node.gpus[0], "3g.20gb@4")
        await scene.until(2, 1, THREE)

        await scene.kubelet.admit(pod("mine", "3g.20gb"))
        assert placements(scene.node) == ["3g.20gb@0", "3g.20gb@4"]
        foreign.destroy_instance(scene.node, scene.node.gpus[0], "3g.20gb@4")
        await scene.until(2, 2, THREE)


async def test_idle_instances_of_before_are_taken_over(tmp_path: Path) -> None:
    """An earlier daemon's idle instance is removed after a delay, a foreign one stays."""
    gpus = "{model: a100-40gb, mig: true, instances: [2g.10gb@0, 4g.20gb@0]}"
    one = gpus.replace(", 4g.20gb@0", "")
    async with mig_at_work(tmp_path, gpus=one, options="keepWarm: 0s") as mig:
        await until_placed(mig)
        await mig.until(3, 3, TWO)

    async with mig_at_work(tmp_path, gpus=gpus.replace("2g.10gb@0, ", "")) as scene:
        await scene.until(3, 1, TWO)
        await scene.kubelet.admit(pod("beside"))
        assert placements(scene.node) == ["2g.10gb@4", "4g.20gb@0"]


async def test_a_new_daemon_knows_the_instances_of_its_pods(tmp_path: Path) -> None:
    """A new daemon finds instances by the ids of the shares, and removes them after their pods."""
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    kept = pod("kept")
    async with kubelet.running():
        async with agent_at_work(tmp_path, node, on_demand_pool(), kubelet=kubelet) as agent:
            await agent.until(3, 3, TWO)
            await kubelet.admit(kept)
            before = created(agent)
            await agent.wait_holders()
        assert len(placements(node)) == 1

        async with agent_at_work(tmp_path, node, on_demand_pool(), kubelet=kubelet) as scene:
            await scene.wait_snapshot(lambda now: bool(now.gpus))
            await until(lambda: created(scene) == before)
            await scene.until(1, 0, WHOLE)
            await kubelet.delete(kept)
            await until_placed(scene)
            await scene.until(1, 1, WHOLE)


async def test_nothing_stays_of_a_daemon_killed_meanwhile(tmp_path: Path) -> None:
    """The next daemon removes an instance whose pod never got an answer."""
    timing = KubeletTiming(  # a killed daemon answers no call
        poll_period=0.02, contended_period=0.05, settle=0.01, linger=0.05
    )
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true, provisioning: {duration: 1500ms}}")
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    async with kubelet.running(), anyio.create_task_group() as group:
        async with agent_at_work(
            tmp_path, node, on_demand_pool(), kubelet=kubelet, kubelet_timing=timing
        ) as scene:
            await scene.until(3, 3, TWO)

            async def fails() -> None:
                with pytest.raises(AdmissionError):
                    await kubelet.admit(pod("unanswered"))

            group.start_soon(fails)
            await until(lambda: node.gpus[0].mig.provisioning.requested == 1)
        assert len(placements(node)) == 1

        async with agent_at_work(tmp_path, node, on_demand_pool(), kubelet=kubelet) as scene:
            await until_placed(scene)
            await scene.until(1, 1, WHOLE)


async def test_mig_that_is_off_is_reported(tmp_path: Path) -> None:
    """Without MIG mode nothing is offered, and the reason names the command that helps."""
    async with mig_at_work(tmp_path, gpus="{model: a100-40gb}") as scene:
        await scene.until(3, 0, TWO)
        await until(lambda: "`nvidia-smi -i 0 -mig 1`" in blocker(scene))


async def test_mig_is_turned_on_for_an_idle_gpu(tmp_path: Path) -> None:
    """From Hopper on MIG mode is turned on at once, unless a program has the GPU."""
    gpus = "{model: h100-80gb, processes: [{pid: 77}]}"
    two = "nvidia.com/mig-2g.20gb"
    async with mig_at_work(
        tmp_path, gpus=gpus, options="enableMig: true", profiles="2g.20gb"
    ) as scene:
        await until(lambda: "process 77" in blocker(scene))
        scene.node.end_process(scene.node.gpus[0], 77)
        await scene.until(3, 3, two)

        assert scene.node.gpus[0].mig.enabled
        await scene.kubelet.admit(pod("train", "2g.20gb"))


async def test_mig_stays_off_where_nothing_would_be_offered(tmp_path: Path) -> None:
    """A GPU with none of the pool's profiles stays unchanged, with a reason."""
    gpus = "{model: h100-80gb}"
    async with mig_at_work(
        tmp_path, gpus=gpus, options="enableMig: true", profiles="2g.10gb"
    ) as scene:
        await until(lambda: blocker(scene) == "it has none of the MIG profiles of its pool")
        await scene.wait_snapshot(
            lambda now: all(
                gpu.kubelet.mig_devices_of_other_plugins is not None for gpu in now.gpus.values()
            )
        )

        assert not scene.node.gpus[0].mig.pending


async def test_mig_waits_for_a_reset_on_ampere(tmp_path: Path) -> None:
    """On Ampere the reason names the reset that the mode needs; after it shares are given."""
    async with mig_at_work(tmp_path, gpus="{model: a100-40gb}", options="enableMig: true") as scene:
        await until(lambda: "`nvidia-smi --gpu-reset -i 0`" in blocker(scene))
        assert scene.state(0).suspended["mig"].until_reset
        scene.node.reset_gpu(scene.node.gpus[0])
        await scene.until(3, 3, TWO)


async def test_mig_that_cannot_be_turned_on_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's reason is shown, other backends may have the GPU, and MIG is tried again."""
    refusing = True
    allowed = SimLibrary.nvmlDeviceSetMigMode

    def refuse(*arguments: Any) -> Any:  # noqa: ANN401 - arguments of C
        return pynvml.NVML_ERROR_NO_PERMISSION if refusing else allowed(*arguments)

    monkeypatch.setattr(SimLibrary, "nvmlDeviceSetMigMode", refuse)
    gpus = "{model: h100-80gb}"
    async with mig_at_work(
        tmp_path, gpus=gpus, options="enableMig: true", profiles="2g.20gb"
    ) as scene:
        await until(lambda: blocker(scene).startswith("MIG mode is off and cannot be enabled: "))
        assert "Insufficient Permissions" in blocker(scene)
        await until(lambda: not any(s.exclusive for s in scene.state(0).provisioned.values()))

        refusing = False
        await scene.until(3, 3, "nvidia.com/mig-2g.20gb")


async def test_a_reset_takes_the_instances_of_pods(tmp_path: Path) -> None:
    """A pod's instance is not created again after a reset; other pods are served."""
    async with mig_at_work(tmp_path) as scene:
        await scene.until(2, 2, THREE)
        lost = pod("lost", "3g.20gb")
        await scene.kubelet.admit(lost)
        await scene.wait_holders()
        scene.node.reset_gpu(scene.node.gpus[0])
        await until(lambda: not created(scene))

        await scene.kubelet.admit(pod("new", "3g.20gb"))
        assert placements(scene.node) == ["3g.20gb@0"]
        await scene.kubelet.delete(lost)
        await until(lambda: len(scene.state(0).leases) == 1)
        assert placements(scene.node) == ["3g.20gb@0"]


async def test_a_pool_that_goes_lets_its_pods_end(tmp_path: Path) -> None:
    """After a reload without the pool a pod keeps its instance, which is removed with the pod."""
    async with mig_at_work(tmp_path, options="keepWarm: 1h") as scene:
        await scene.until(3, 3, TWO)
        last = pod("last")
        await scene.kubelet.admit(last)
        await scene.wait_holders()
        await anyio.Path(scene.config_file).write_text(
            on_demand_pool().replace("name: mig", "name: mig\n    gpus: {index: 7}")
        )
        await scene.agent.reload()
        await scene.until(0, 0, TWO)
        assert len(placements(scene.node)) == 1

        await scene.kubelet.delete(last)
        await until_placed(scene)


async def test_pods_come_and_go(tmp_path: Path) -> None:
    """Over many pods of all sizes, the GPUs have exactly the instances of the answers."""
    chance = random.Random(4)  # noqa: S311 - chance, not secrets
    gpus = "{model: a100-40gb, count: 2, mig: true}"
    async with mig_at_work(tmp_path, gpus=gpus, options="keepWarm: 50ms") as scene:
        await scene.until(6, 6, TWO)
        pods: dict[str, tuple[SimPod, str]] = {}
        refused = 0

        for number in range(60):
            if pods and chance.random() < 0.4:
                gone, _ = pods.pop(chance.choice(list(pods)))
                await scene.kubelet.delete(gone)
                continue
            profile = chance.choice(["1g.5gb", "1g.5gb+me", "2g.10gb", "3g.20gb", "7g.40gb"])
            new = pod(f"pod{number}", profile)
            try:
                options = await scene.kubelet.admit(new)
            except AdmissionError:
                refused += 1
                continue
            await scene.wait_holders()
            device = options["main"].envs["NVIDIA_VISIBLE_DEVICES"]
            pods[new.name] = new, device
            there = {m.device for index in (0, 1) for m in created(scene, index).values()}
            assert {device for _, device in pods.values()} <= there

        assert refused < 30
        for gone, _ in pods.values():
            await scene.kubelet.delete(gone)
        await until_placed(scene, index=0)
        await until_placed(scene, index=1)
