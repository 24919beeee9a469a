"""Refused pods and the texts of their refusals."""

from pathlib import Path

import grpclib
import pytest
from grpclib.const import Status

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.core.model.shares import ResourceClaimRef, ResourceName
from metagpu.core.state.events import AllocationRefused
from metagpu.core.state.facts import SharesClaimed, SharesReleased
from metagpu.plugins.kubelet.timing import KubeletTiming
from metagpu.sim.kubelet.kubelet import AdmissionError
from tests.plugins.kubelet.rig import (
    CONFIG,
    METAGPU,
    OFFER_ALL,
    VISIBLE,
    allocate,
    endpoint_of,
    gpu,
    ids,
    node,
    pod,
    simulated_kubelet,
)


async def test_what_a_resource_claim_holds_is_not_granted(tmp_path: Path) -> None:
    """After a reload to the device plugin API the shares of ResourceClaims are out of the list."""
    text = CONFIG + "    api: dra\n"
    async with node(tmp_path, gpu(0), config=text) as live_node, live_node.kubelet.running():
        shares = live_node.layout.shares[:4]
        claim = ResourceClaimRef("ns", "half", "uid")
        live_node.registry.apply(SharesClaimed(shares, at=1, resource_claim=claim))
        live_node.offer()
        await live_node.until(10, 6)
        async with endpoint_of(live_node) as stub:
            with pytest.raises(grpclib.GRPCError, match="the ResourceClaim ns/half holds it"):
                await allocate(stub, [shares[0].id])
        live_node.registry.apply(SharesReleased(shares, at=2))
        await live_node.until(10, 10)


async def test_the_three_refusals_of_the_kubelet(tmp_path: Path) -> None:
    """Held but faulty, nothing healthy, and unregistered have different texts (case 31)."""
    now = [1000.0]
    kubelet = simulated_kubelet(tmp_path, clock=lambda: now[0])

    async with kubelet.running(), node(tmp_path, kubelet=kubelet) as live_node:
        await live_node.until(20, 20)
        held, kept = pod("held", 3), pod("kept", 10)
        await kubelet.admit(held)
        await kubelet.admit(kept)
        await kubelet.start_container(kept, "main")
        live_node.fault(0)
        await live_node.until(20, 10)
        await kubelet.restart()
        await live_node.until(20, 10)
        lost = await kubelet.readmit()

        assert list(lost) == [held.uid]
        assert "previously allocated devices are no longer healthy" in lost[held.uid].message

        live_node.fault(1)
        await live_node.until(20, 0)

        with pytest.raises(AdmissionError, match="no healthy devices present"):
            await kubelet.admit(pod("late", 1))

    async with kubelet.running():
        now[0] += 301
        await kubelet.tick()

        with pytest.raises(AdmissionError, match="cannot allocate unregistered device"):
            await kubelet.admit(pod("later", 1))


async def test_unknown_share_is_refused_after_a_list(tmp_path: Path) -> None:
    """An unknown id is refused with a text, after the list is sent (case 40)."""
    timing = KubeletTiming(flush_deadline=3600.0)
    async with node(tmp_path, timing=timing) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)

        async with endpoint_of(live_node) as stub:
            with pytest.raises(grpclib.GRPCError) as refused:
                await allocate(stub, ["GPU-gone::m01"])

        assert (
            live_node.record.of_resource(ResourceName(METAGPU)).lists == 2
        )  # sent before the refusal came
        assert refused.value.status is Status.NOT_FOUND
        assert "no share has the id 'GPU-gone::m01'" in str(refused.value.message)
        await live_node.kubelet.wait_for(lambda: live_node.kubelet.lists[METAGPU] == 2)


async def test_broken_share_is_refused_with_the_reason(tmp_path: Path) -> None:
    """A share of a faulty GPU is refused with the fault's reason (case 40)."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        live_node.fault(0, "XID 79: GPU has fallen off the bus")

        with live_node.registry.events.subscribe(AllocationRefused) as refusals:
            async with endpoint_of(live_node) as stub:
                with pytest.raises(grpclib.GRPCError, match="fallen off the bus") as refused:
                    await allocate(stub, ids((0, 1)))
            [event] = [await anext(aiter(refusals))]

        assert isinstance(event, AllocationRefused)
        assert (event.cause, event.reason) == ("GpuUnhealthy", refused.value.message)
        assert refused.value.status is Status.FAILED_PRECONDITION
        await live_node.until(20, 10)


async def test_refused_pod_gets_the_free_shares_of_each_gpu(tmp_path: Path) -> None:
    """A fraction that fits on no GPU fails with the free shares of each GPU."""
    async with node(tmp_path, config=OFFER_ALL) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        await live_node.kubelet.admit(pod("one", 6))
        await live_node.kubelet.admit(pod("two", 6))

        with pytest.raises(AdmissionError) as refused:
            await live_node.kubelet.admit(pod("three", 8))

        assert refused.value.reason == "UnexpectedAdmissionError"
        assert "8 shares do not fit" in refused.value.message
        assert "free now: GPU 0: 4, GPU 1: 4" in refused.value.message

        await live_node.kubelet.admit(pod("small", 4))


async def test_split_may_be_accepted(tmp_path: Path) -> None:
    """A configuration that accepts splits gives such a pod both GPUs."""
    config = CONFIG + "        split: accept\n"

    async with node(tmp_path, config=config) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        await live_node.kubelet.admit(pod("one", 6))
        await live_node.kubelet.admit(pod("two", 6))
        options = await live_node.kubelet.admit(pod("three", 8))

        assert options["main"].envs[VISIBLE] == f"{gpu(0).id},{gpu(1).id}"
        assert options["main"].envs["METAGPU_MAX_MEM"] == str(8 * 4096)


async def test_refused_container_gives_the_others_back(tmp_path: Path) -> None:
    """After the refusal of one container of a call, no container of the call holds anything."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)

        async with endpoint_of(live_node) as stub:
            with pytest.raises(grpclib.GRPCError):
                await allocate(stub, ids((0, 0)), ["GPU-gone::m01"])

        assert live_node.registry.snapshot.gpus[gpu(0).id].leases == {}


async def test_foreign_error_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An internal error reaches the pod with its name, not as Internal Server Error."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(FractionBackend, "check", broken)

    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)

        with pytest.raises(AdmissionError, match="ZeroDivisionError: a bug"):
            await live_node.kubelet.admit(pod("train", 2))
