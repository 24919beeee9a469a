"""Leases of running pods in odd hours: a kubelet that errs, or that lost its checkpoint."""

from pathlib import Path

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from msgspec.structs import replace

from metagpu.plugins.kubelet.timing import TIMING
from metagpu.sim.kubelet.kubelet import AdmissionError, SimKubelet, SimPod
from metagpu.sim.kubelet.pod_resources import PodResourcesSource
from tests.rigs.agent import METAGPU, QUICK, Scene, agent_at_work

WHOLE = "nvidia.com/gpu"
MIXED = QUICK.replace("sharesPerGpu: 10}]", "sharesPerGpu: 10}, {backend: whole}]")


async def run(it: Scene, name: str, shares: int) -> frozenset[str]:
    """Run a pod; return the ids of its shares."""
    pod = SimPod.single(name, {METAGPU: shares})
    await it.kubelet.admit(pod)
    await it.kubelet.start_container(pod, "main")
    return it.kubelet.devices(pod)["main"][METAGPU]


def unconfirmed(it: Scene) -> set[str]:
    """Return the shares that the present kubelet does not know as held."""
    gpus = it.agent.registry.snapshot.gpus.values()
    return {i for gpu in gpus for i, lease in gpu.leases.items() if lease.unconfirmed}


async def test_what_the_checkpoint_names_is_held_before_the_kubelet_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that starts while PodResources errs offers no held GPU to another backend."""
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")

    def fail(_: PodResourcesSource) -> None:
        raise GRPCError(Status.UNAVAILABLE, "not now")

    async with kubelet.running():
        async with agent_at_work(tmp_path, config=MIXED, kubelet=kubelet) as it:
            await it.until(20, 20)
            await it.until(2, 2, WHOLE)
            await kubelet.admit(SimPod.single("train", {METAGPU: 5}))
        monkeypatch.setattr(PodResourcesSource, "check_rate", fail)
        before = kubelet.lists[WHOLE]
        async with agent_at_work(tmp_path, config=MIXED, kubelet=kubelet) as it:
            await kubelet.wait_for(lambda: kubelet.lists[WHOLE] > before)
            assert kubelet.allocatable()[WHOLE] == 1

            monkeypatch.undo()
            await it.wait_holders()
            assert kubelet.allocatable()[WHOLE] == 1


async def test_shares_of_an_ended_pod_are_granted_by_a_daemon_that_has_just_started(
    tmp_path: Path,
) -> None:
    """The present kubelet wrote the checkpoint: it knows which ids are free.

    The pod comes between the first look at the kubelet and the second.
    """
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")
    once = replace(TIMING, settle=60.0, contended_period=60.0)

    async with kubelet.running():
        async with agent_at_work(tmp_path, config=MIXED, kubelet=kubelet) as it:
            await it.until(20, 20)
            await run(it, "train", 20)
            await it.wait_holders()
        await kubelet.delete(*kubelet.pods)
        before = kubelet.lists[METAGPU]
        async with agent_at_work(
            tmp_path, config=MIXED, kubelet=kubelet, kubelet_timing=once
        ) as it:
            await kubelet.wait_for(lambda: kubelet.lists[METAGPU] > before)
            assert len(await run(it, "next", 20)) == 20


async def test_a_kubelet_that_lost_its_checkpoint_takes_nothing_from_running_pods(
    tmp_path: Path,
) -> None:
    """The shares of running pods are preferred last, refused with the reason, and stay held."""
    async with agent_at_work(tmp_path, config=MIXED) as it:
        await it.until(20, 20)
        await it.until(2, 2, WHOLE)
        held = await run(it, "train", 5)
        await it.wait_holders()

        await it.kubelet.restart(forget=True)
        await it.until(20, 20)
        await it.wait_snapshot(lambda _: unconfirmed(it) == held)
        await it.until(2, 1, WHOLE)

        others = await run(it, "other", 15)
        assert not others & held
        with pytest.raises(AdmissionError, match=r"default/train \(main\) still runs with it"):
            await run(it, "late", 1)
        await it.wait_holders()
        assert unconfirmed(it) == held


async def test_a_share_that_a_kubelet_forgot_is_free_when_its_pod_is_gone(tmp_path: Path) -> None:
    """The lease of a forgotten pod ends with the pod."""
    async with agent_at_work(tmp_path, config=MIXED) as it:
        await it.until(20, 20)
        await it.until(2, 2, WHOLE)
        await run(it, "train", 5)
        await it.wait_holders()
        await it.kubelet.restart(forget=True)
        await it.until(2, 1, WHOLE)
        await it.until(20, 20)
        await run(it, "other", 1)

        [train, other] = it.kubelet.pods
        await it.wait_holders()
        await it.kubelet.delete(train)
        await it.wait_snapshot(lambda now: sum(len(gpu.leases) for gpu in now.gpus.values()) == 1)
        await it.kubelet.delete(other)
        await it.until(2, 2, WHOLE)
