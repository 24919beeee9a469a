"""Counters of the kubelet's calls and registrations."""

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import pytest
from grpclib.exceptions import GRPCError

from metagpu.core.model.request_errors import FractionSplit, GpuUnhealthy, UnknownShare
from metagpu.core.model.shares import ResourceName
from metagpu.core.state.call_stats import (
    BUCKET_BOUNDS,
    CallOutcome,
    CallStats,
    KubeletCall,
    KubeletCallStats,
    ResourceCallStats,
)
from metagpu.plugins.kubelet.pb import v1beta1
from tests.plugins.kubelet.rig import METAGPU, allocate, endpoint_of, ids, node
from tests.rigs.waiting import until

NAME = ResourceName(METAGPU)


def test_a_call_falls_into_the_bucket_it_does_not_exceed() -> None:
    """A bound belongs to the bucket below it, and the last bucket has no bound."""
    record = CallStats()
    for seconds in (0.0, BUCKET_BOUNDS[0], BUCKET_BOUNDS[1], 31.0):
        record.record(CallOutcome.ANSWERED, seconds)

    assert record.buckets[:2] == [2, 1]
    assert record.buckets[-1] == 1
    assert sum(record.buckets) == record.outcomes[CallOutcome.ANSWERED] == 4
    assert record.seconds == pytest.approx(31.0 + sum(BUCKET_BOUNDS[:2]))
    assert list(BUCKET_BOUNDS) == sorted(BUCKET_BOUNDS)


@pytest.mark.parametrize(
    ("error", "outcome", "refusals"),
    [
        (UnknownShare("r", "s"), CallOutcome.REFUSED, [UnknownShare]),
        (ZeroDivisionError(), CallOutcome.FAILED, []),
        (anyio.get_cancelled_exc_class, CallOutcome.ABANDONED, []),
    ],
)
async def test_a_failure_is_classified_by_its_error(
    error: object, outcome: CallOutcome, refusals: Sequence[type]
) -> None:
    """A failure is a refusal, an error of metagpu, or an abandoned call."""
    record = ResourceCallStats()
    raised = error if isinstance(error, Exception) else anyio.get_cancelled_exc_class()()
    record.record_failure(KubeletCall.ALLOCATE, 0.5, raised)

    assert {
        call_outcome for call_outcome, n in record.calls[KubeletCall.ALLOCATE].outcomes.items() if n
    } == {outcome}
    assert list(record.refusals) == refusals


def test_another_kubelet_is_a_restart() -> None:
    """The first kubelet, the same one and an unknown one are no restarts."""
    record = KubeletCallStats()
    for kubelet in ("a", "a", None, "a", "b", "b", "a"):
        record.record_kubelet(kubelet)

    assert record.restarts == 2


async def test_calls_are_counted_by_result(tmp_path: Path) -> None:
    """Calls are counted by result and kind of refusal, those for a preference too."""
    async with node(tmp_path) as live_node, live_node.kubelet.running():
        await live_node.until(20, 20)
        async with endpoint_of(live_node) as stub:
            await allocate(stub, ids((0, 1)))
            await stub.get_preferred_allocation(v1beta1.PreferredAllocationRequest())
            live_node.fault(1)
            for wanted in (["GPU-unknown"], ids((1, 1)), ids((0, 2), (1, 2))):
                with pytest.raises(GRPCError):
                    await allocate(stub, wanted)
            with pytest.raises(GRPCError):
                await stub.pre_start_container(v1beta1.PreStartContainerRequest(["nothing"]))

        record = live_node.record.of_resource(NAME)
        outcomes = record.calls[KubeletCall.ALLOCATE].outcomes
        assert outcomes == {
            **dict.fromkeys(CallOutcome, 0),
            CallOutcome.ANSWERED: 1,
            CallOutcome.REFUSED: 3,
        }
        assert record.calls[KubeletCall.PREFERRED].outcomes[CallOutcome.ANSWERED] == 1
        assert record.refusals == {UnknownShare: 2, GpuUnhealthy: 2}
        assert 0 < record.calls[KubeletCall.ALLOCATE].seconds < 30
        assert FractionSplit not in record.refusals


async def test_registrations_and_restarts_are_counted(tmp_path: Path) -> None:
    """A resource is listed while the kubelet holds its list, and counts go on with the next."""
    async with node(tmp_path) as live_node:
        record = live_node.record.of_resource(NAME)
        assert not record.listed

        async with live_node.kubelet.running():
            await wait_until(lambda: record.listed)
            await wait_until(lambda: record.lists == 1)
            assert (record.registrations, live_node.record.restarts) == (1, 0)
            live_node.fault(0)
            await wait_until(lambda: record.lists == 2)

        await wait_until(lambda: not record.listed)
        async with live_node.kubelet.running():
            await wait_until(lambda: record.listed)
            assert (record.registrations, live_node.record.restarts) == (2, 1)


async def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds."""

    async def check() -> bool:
        return is_so()

    await until(check, deadline=30)
