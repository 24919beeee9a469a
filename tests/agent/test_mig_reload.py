"""The configuration changes while an instance is being created: the answer to its pod."""

from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from metagpu.backends.mig.backend import MigBackend
from metagpu.sim.kubelet.kubelet import AdmissionError
from metagpu.sim.machine.mig_state import SimProvisioning
from tests.rigs.agent import Scene, agent_at_work
from tests.rigs.mig import a_node, created, hurry, placements, pod, until, until_placed

TWO = "nvidia.com/mig-2g.10gb"
TWO_THREE = "[2g.10gb, 3g.20gb]"
MIG = f"""\
  - name: mig
    gpus: {{index: 0}}
    backends: [{{backend: mig, profiles: {TWO_THREE}, keepWarm: 100ms, deadline: 15s}}]
"""
OTHER = """\
  - {name: other, gpus: {index: 1}, backends: [{backend: fraction, sharesPerGpu: 10}]}
"""
ELSEWHERE = "{backend: mig, profiles: [2g.10gb]}"
POOLS = f"version: metagpu/v1\npools:\n{MIG}{OTHER}"
GPUS = "{model: a100-40gb, mig: true}, {model: a100-40gb}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timings that last seconds on a real node."""
    hurry(monkeypatch)


async def change(scene: Scene, before: str, after: str) -> None:
    """Change the configuration; return when the change is in force."""
    assert before in POOLS
    await anyio.Path(scene.config_file).write_text(POOLS.replace(before, after))
    await scene.agent.reload()
    assert scene.agent.config_loader.error is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("sharesPerGpu: 10", "sharesPerGpu: 5"),
        ("keepWarm: 100ms", "keepWarm: 200ms"),
        (TWO_THREE, "[1g.5gb, 2g.10gb]"),
        ("version: metagpu/v1", "version: metagpu/v1\ndeviceListStrategy: volume-mounts"),
    ],
    ids=["another pool", "its own pool", "other profiles", "another way of giving it"],
)
async def test_a_pod_gets_the_instance_that_was_being_created(
    tmp_path: Path, before: str, after: str
) -> None:
    """A pod gets its instance, as ours, whatever backend has the GPU after the change."""
    node = await a_node(tmp_path, GPUS)
    async with agent_at_work(tmp_path, node, POOLS) as scene:
        await scene.until(3, 3, TWO)
        node.gpus[0].mig.provisioning = SimProvisioning(duration=0.7)
        train, devices = pod("train"), list[str]()

        async def admit() -> None:
            options = (await scene.kubelet.admit(train))["main"]
            devices.append(options.envs["NVIDIA_VISIBLE_DEVICES"])

        async with anyio.create_task_group() as group:
            group.start_soon(admit)
            await until(lambda: node.gpus[0].mig.provisioning.requested > 0)
            await change(scene, before, after)

        assert node.gpus[0].mig.provisioning.requested == 1
        assert devices == [instance.device for instance in created(scene).values()]
        await scene.wait_holders()
        await scene.kubelet.delete(train)
        await until_placed(scene)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TWO_THREE, "[3g.20gb]"),
        ("gpus: {index: 0}", "gpus: {index: 7}"),
        (MIG + OTHER, MIG.replace(TWO_THREE, "[3g.20gb]") + OTHER.replace("[", f"[{ELSEWHERE}, ")),
    ],
    ids=["its resource is gone", "its pool is gone", "its resource is another GPU's"],
)
async def test_a_pod_whose_share_is_gone_is_refused_at_once(
    tmp_path: Path, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod gets the reason at once, before its resource's list ends."""
    monkeypatch.setattr(MigBackend, "timing", replace(MigBackend.timing, busy=0.01))
    node = await a_node(tmp_path, GPUS)
    async with agent_at_work(tmp_path, node, POOLS) as scene:
        await scene.until(3, 3, TWO)
        node.gpus[0].mig.provisioning = SimProvisioning(in_use_until=float("inf"))
        refused: list[str] = []

        async def admit() -> None:
            with pytest.raises(AdmissionError) as error:
                await scene.kubelet.admit(pod("train"))
            refused.append(str(error.value))

        async with anyio.create_task_group() as group:
            group.start_soon(admit)
            await scene.wait_snapshot(lambda now: any(gpu.leases for gpu in now.gpus.values()))
            await change(scene, before, after)

        assert (
            "2g.10gb@2 could not be created: the configuration was changed meanwhile, and it is "
            "not on offer any more; a new pod gets what is on offer now"
        ) in refused[0]
        node.gpus[0].mig.provisioning = SimProvisioning()
        await scene.wait_snapshot(lambda now: not any(gpu.leases for gpu in now.gpus.values()))
        assert placements(node) == []
