"""A fixed layout of MIG instances: the whole agent, a node and a kubelet."""

from pathlib import Path

import anyio
import pytest

from metagpu.sim import foreign
from metagpu.sim.gpu import SimProcess
from metagpu.sim.instances import Making
from metagpu.sim.kubelet import AdmissionError, Pod, SimKubelet
from tests.agent_rig import Scene, agent_at_work
from tests.mig_rig import (
    a_node,
    blocked,
    configured,
    cut,
    hurry,
    made,
    mig_at_work,
    places,
    pod,
    until,
    until_placed,
    why,
)

ONE = "nvidia.com/mig-1g.5gb"
TWO = "nvidia.com/mig-2g.10gb"
THREE = "nvidia.com/mig-3g.20gb"
LAYOUT = "{2g.10gb: 2, 1g.5gb: 3}"
FIVE = ("1g.5gb@0", "1g.5gb@1", "1g.5gb@6", "2g.10gb@2", "2g.10gb@4")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody wait for what takes seconds on a real node."""
    hurry(monkeypatch)


async def change(it: Scene, text: str) -> None:
    """Let another configuration be in force."""
    await anyio.Path(it.config_file).write_text(text)
    await it.agent.reload()


async def test_four_gpus_have_their_instances(tmp_path: Path) -> None:
    """12 and 8 of four A100, all made before a pod asks; a pod gets one, which outlives it."""
    gpus = "{board: a100-40gb, count: 4, mig: true}"
    async with mig_at_work(tmp_path, gpus=gpus, layout=LAYOUT) as it:
        await it.until(12, 12, ONE)
        await it.until(8, 8, TWO)
        assert [sorted(made(it, n)) for n in range(4)] == [sorted(FIVE)] * 4
        assert [places(it.node, n) for n in range(4)] == [sorted(FIVE)] * 4

        pods = [pod(f"sample{n}") for n in range(8)]
        told = [(await it.kubelet.admit(one))["main"].envs for one in pods]
        devices = {envs["NVIDIA_VISIBLE_DEVICES"] for envs in told}
        assert devices == {
            m.device for n in range(4) for slot, m in made(it, n).items() if slot.startswith("2g")
        }
        with pytest.raises(AdmissionError):
            await it.kubelet.admit(pod("ninth"))

        await it.told()
        await it.kubelet.delete(pods[0])
        await it.until(8, 8, TWO)
        assert [places(it.node, n) for n in range(4)] == [sorted(FIVE)] * 4


async def test_capacity_is_right_before_instances_are(tmp_path: Path) -> None:
    """While an instance cannot be made its share is listed Unhealthy, with the reason."""
    gpus = "{board: a100-40gb, mig: true, making: {failures: 1000}}"
    async with mig_at_work(tmp_path, gpus=gpus, layout=LAYOUT) as it:
        await it.until(3, 0, ONE)
        await it.until(2, 0, TWO)
        await until(lambda: why(it).startswith("the layout waits: "))
        await until(lambda: any("of the layout is not there" in text for text in blocked(it)))

        it.node.gpus[0].mig.making = Making()
        await it.until(3, 3, ONE)
        await until(lambda: not why(it) and not blocked(it))


async def test_one_name_for_all_instances(tmp_path: Path) -> None:
    """Under NVIDIA's strategy single, instances go by the name of GPUs."""
    async with mig_at_work(tmp_path, layout="{1g.5gb: 7}, resource: nvidia.com/gpu") as it:
        await it.until(7, 7, "nvidia.com/gpu")


async def test_instances_are_made_again_after_a_reset(tmp_path: Path) -> None:
    """After a reboot or a reset ids are the same, and shares are given when instances are there."""
    async with mig_at_work(tmp_path, layout=LAYOUT) as it:
        await it.until(3, 3, ONE)
        before = made(it)
        it.node.gpus[0].mig.making = Making(failures=1000)
        it.node.recover(it.node.gpus[0])
        await it.until(3, 0, ONE)

        it.node.gpus[0].mig.making = Making()
        await it.until(3, 3, ONE)
        assert made(it).keys() == before.keys()
        assert {m.device for m in made(it).values()}.isdisjoint(m.device for m in before.values())


async def test_a_new_daemon_finds_its_layout(tmp_path: Path) -> None:
    """Instances outlive the daemon: the next one gives the same, without making any."""
    node = await a_node(tmp_path, "{board: a100-40gb, mig: true}")
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    text = cut(f"layout: {LAYOUT}")
    async with kubelet.running():
        async with agent_at_work(tmp_path, node, text, kubelet=kubelet) as it:
            await it.until(3, 3, ONE)
            await kubelet.admit(pod("kept"))
            await it.told()
            before = made(it)
        assert places(node) == sorted(FIVE)

        async with agent_at_work(tmp_path, node, text, kubelet=kubelet) as it:
            await it.settles(lambda now: bool(now.gpus))
            await it.until(3, 3, ONE)
            await until(lambda: len(it.state(0).leases) == 1)
            assert {i: m.device for i, m in made(it).items()} == {
                i: m.device for i, m in before.items()
            }
        assert node.gpus[0].mig.making.begun == len(FIVE)


async def test_a_change_waits_for_the_pod_that_holds_an_instance(tmp_path: Path) -> None:
    """What there is stays as it is, the reason names the pod, and its end brings the layout."""
    async with mig_at_work(tmp_path, layout="{3g.20gb: 2}") as it:
        await it.until(2, 2, THREE)
        last = pod("last", "3g.20gb")
        await it.kubelet.admit(last)
        await it.told()
        [held] = [lease.share.id.partition("::")[2] for lease in it.state(0).leases.values()]

        await change(it, cut(f"layout: {LAYOUT}"))
        await it.until(3, 0, ONE)
        await until(
            lambda: why(it) == f"the layout waits: default/last (main) holds instance {held}"
        )
        assert places(it.node) == ["3g.20gb@0", "3g.20gb@4"]

        await it.kubelet.delete(last)
        await until_placed(it, *FIVE)
        await it.until(3, 3, ONE)
        await it.until(2, 2, TWO)


async def test_a_change_of_an_idle_gpu_is_made_by_difference(tmp_path: Path) -> None:
    """An instance that both layouts have stays; the rest goes or comes, at once."""
    async with mig_at_work(tmp_path, layout="{3g.20gb: 1, 4g.20gb: 1}") as it:
        await it.until(1, 1, THREE)
        [(place, before)] = [(i, m) for i, m in made(it).items() if i.startswith("3g")]

        await change(it, cut("layout: {3g.20gb: 2}"))
        await it.until(2, 2, THREE)
        assert made(it)[place].device == before.device

        await change(it, configured("keepWarm: 0s"))
        await until_placed(it)


async def test_what_others_made_is_the_reason(tmp_path: Path) -> None:
    """An instance made by hand while the daemon runs is not touched, and is named."""
    async with mig_at_work(tmp_path, layout="{3g.20gb: 1}") as it:
        await it.until(1, 1, THREE)
        [place] = places(it.node)
        other = "2g.10gb@0" if place.endswith("4") else "2g.10gb@4"
        foreign.make(it.node, it.node.gpus[0], other)
        await until(lambda: any(other in text for text in blocked(it)))

        await change(it, cut("layout: {7g.40gb: 1}"))
        await until(lambda: f"instance {other} was found here" in why(it))
        it.node.add_process(it.node.gpus[0], SimProcess(4242, None, *number(it, other)))
        await it.until(1, 0, "nvidia.com/mig-7g.40gb")
        assert places(it.node) == sorted([place, other])

        it.node.end_process(it.node.gpus[0], 4242)
        await it.until(1, 1, "nvidia.com/mig-7g.40gb")
        assert places(it.node) == ["7g.40gb@0"]


async def test_what_a_gpu_had_before_becomes_its_layout(tmp_path: Path) -> None:
    """Of what another program left, idle, what fits is used at once and the rest goes later."""
    gpus = "{board: a100-40gb, mig: true, instances: [3g.20gb@0, 2g.10gb@4]}"
    async with mig_at_work(tmp_path, gpus=gpus, layout=LAYOUT) as it:
        await until_placed(it, *FIVE)
        await it.until(2, 2, TWO)
        assert it.node.gpus[0].mig.making.begun == len(FIVE) - 1


async def test_a_layout_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """A GPU that has no room for the layout keeps what it has, and says why it offers nothing."""
    gpus = "{board: a100-40gb, mig: true, instances: [2g.10gb@0]}"
    async with mig_at_work(tmp_path, gpus=gpus, layout="{3g.20gb: 3}") as it:
        await until(
            lambda: why(it) == "the layout 3x3g.20gb does not fit: 3 x 3g.20gb wanted, room for 2"
        )
        assert places(it.node) == ["2g.10gb@0"]


async def test_a_layout_that_does_not_fit_keeps_the_gpu_from_nobody(tmp_path: Path) -> None:
    """After the last pod of an earlier layout the GPU is idle; nothing is made or removed."""
    async with mig_at_work(tmp_path, layout="{3g.20gb: 2}") as it:
        await it.until(2, 2, THREE)
        last = pod("last", "3g.20gb")
        await it.kubelet.admit(last)
        await it.told()
        await change(it, cut("layout: {3g.20gb: 3}"))
        await until(lambda: "does not fit" in why(it))

        await it.kubelet.delete(last)
        await until(lambda: it.state(0).owner is None)
        assert places(it.node) == ["3g.20gb@0", "3g.20gb@4"]


async def test_replicas_of_an_instance(tmp_path: Path) -> None:
    """Several pods have one instance at once, and it is given again when the last has gone."""
    shared = f"{ONE}.shared"
    layout = f"{LAYOUT}, replicas: {{1g.5gb: 2}}"
    async with mig_at_work(tmp_path, layout=layout) as it:
        await it.until(6, 6, shared)
        await it.until(2, 2, TWO)
        pods = [Pod.single(f"pod{n}", {shared: 1}) for n in range(6)]
        told = [(await it.kubelet.admit(one))["main"].envs for one in pods]

        devices = [envs["NVIDIA_VISIBLE_DEVICES"] for envs in told]
        assert devices[:3] == devices[3:]
        assert len(set(devices)) == 3
        assert {envs["METAGPU_MEMORY_MIB"].partition("=")[2] for envs in told} == {"2432"}
        with pytest.raises(AdmissionError):
            await it.kubelet.admit(Pod.single("seventh", {shared: 1}))

        await it.told()
        for gone in pods:
            await it.kubelet.delete(gone)
        await it.until(6, 6, shared)
        await it.kubelet.admit(Pod.single("next", {shared: 1}))
        assert places(it.node) == sorted(FIVE)


async def test_replicas_of_an_instance_that_is_not_there(tmp_path: Path) -> None:
    """None of them is given before it is there, nor when it is gone."""
    shared = f"{ONE}.shared"
    async with mig_at_work(tmp_path, layout="{1g.5gb: 7}, replicas: 4") as it:
        await it.until(28, 28, shared)
        it.node.gpus[0].mig.making = Making(failures=1000)
        foreign.end(it.node, it.node.gpus[0], "1g.5gb@3")
        await it.until(28, 24, shared)

        it.node.gpus[0].mig.making = Making()
        await it.until(28, 28, shared)


def number(it: Scene, place: str) -> tuple[int, int]:
    """Give the numbers by which NVML knows an instance and its compute instance."""
    gpu = it.node.gpus[0]
    with it.node.changed:
        return next(
            (instance.number, compute.number)
            for instance, compute in gpu.mig.computes
            if foreign.place_of(gpu, instance) == place
        )


async def test_gpus_that_are_not_as_single_wants_them_are_kept_alone(tmp_path: Path) -> None:
    """Wrong instances or no MIG mode cost their own GPU, say so, and are taken up when right."""
    one = "nvidia.com/gpu"
    node = await a_node(
        tmp_path, "{board: a100-40gb, mig: true, count: 2}, {board: a100-40gb, count: 1}"
    )
    other = node.gpus[1]
    number = foreign.make(node, other, "2g.10gb@0")
    node.add_process(other, SimProcess(7, None, number, 0))

    config = cut("layout: {1g.5gb: 7}, resource: nvidia.com/gpu")
    async with agent_at_work(tmp_path, node, config) as it:
        await it.until(21, 7, one)
        await until(lambda: "MIG mode is off; turn it on" in why(it, 2))
        kept = "instance 2g.10gb@0 was found here"
        await until(lambda: kept in why(it, 1))
        await it.kubelet.admit(Pod.single("served", {one: 7}))

        node.end_process(other, 7)
        await it.until(21, 14, one)
        with node.changed:
            node.gpus[2].mig.enabled = node.gpus[2].mig.pending = True
        await it.until(21, 21, one)
