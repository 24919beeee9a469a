"""The configuration changes while an instance is being made: what its pod gets, or is told."""

from pathlib import Path

import anyio
import pytest

from metagpu.backends.mig import making, turns
from metagpu.sim.instances import Making
from metagpu.sim.kubelet import AdmissionError
from tests.agent_rig import Scene, agent_at_work
from tests.mig_rig import a_node, hurry, made, places, pod, until, until_placed

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
GPUS = "{board: a100-40gb, mig: true}, {board: a100-40gb}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody wait for what takes seconds on a real node."""
    hurry(monkeypatch)
    monkeypatch.setattr(turns, "TURN", 0.01)


async def changed(it: Scene, before: str, after: str) -> None:
    """Change the configuration; it is taken when this returns."""
    assert before in POOLS
    await anyio.Path(it.config_file).write_text(POOLS.replace(before, after))
    await it.agent.reload()
    assert it.agent.adoption.error is None


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
async def test_a_pod_gets_what_was_being_made_for_it(
    tmp_path: Path, before: str, after: str
) -> None:
    """Whoever keeps the GPU after the change, the pod gets that very instance, and it is ours."""
    node = await a_node(tmp_path, GPUS)
    async with agent_at_work(tmp_path, node, POOLS) as it:
        await it.until(3, 3, TWO)
        node.gpus[0].mig.making = Making(takes=0.7)
        train, told = pod("train"), list[str]()

        async def admit() -> None:
            options = (await it.kubelet.admit(train))["main"]
            told.append(options.envs["NVIDIA_VISIBLE_DEVICES"])

        async with anyio.create_task_group() as group:
            group.start_soon(admit)
            await until(lambda: node.gpus[0].mig.making.begun > 0)
            await changed(it, before, after)

        assert node.gpus[0].mig.making.begun == 1
        assert told == [instance.device for instance in made(it).values()]
        await it.told()
        await it.kubelet.delete(train)
        await until_placed(it)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TWO_THREE, "[3g.20gb]"),
        ("gpus: {index: 0}", "gpus: {index: 7}"),
        (MIG + OTHER, MIG.replace(TWO_THREE, "[3g.20gb]") + OTHER.replace("[", f"[{ELSEWHERE}, ")),
    ],
    ids=["its resource is gone", "its pool is gone", "its resource is another GPU's"],
)
async def test_a_pod_whose_share_is_gone_is_told_at_once(
    tmp_path: Path, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for what nobody makes any more, and reads why, before its list ends."""
    monkeypatch.setattr(making, "FIRST_PAUSE", 0.01)
    node = await a_node(tmp_path, GPUS)
    async with agent_at_work(tmp_path, node, POOLS) as it:
        await it.until(3, 3, TWO)
        node.gpus[0].mig.making = Making(in_use_until=float("inf"))
        refused: list[str] = []

        async def admit() -> None:
            with pytest.raises(AdmissionError) as error:
                await it.kubelet.admit(pod("train"))
            refused.append(str(error.value))

        async with anyio.create_task_group() as group:
            group.start_soon(admit)
            await it.settles(lambda now: any(gpu.leases for gpu in now.gpus.values()))
            await changed(it, before, after)

        assert (
            "2g.10gb@4 could not be made: the configuration was changed meanwhile, and it is not "
            "on offer any more; a new pod gets what is on offer now"
        ) in refused[0]
        node.gpus[0].mig.making = Making()
        await it.settles(lambda now: not any(gpu.leases for gpu in now.gpus.values()))
        assert places(node) == []
