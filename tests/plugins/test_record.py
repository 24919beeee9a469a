"""What passes between the kubelet and us is counted."""

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import pytest
from grpclib.exceptions import GRPCError

from metagpu.core.errors import FractionSplit, GpuUnhealthy, UnknownShare
from metagpu.core.model import ResourceName
from metagpu.plugins.pb import v1beta1
from metagpu.plugins.record import (
    BOUNDS,
    Call,
    CallRecord,
    KubeletRecord,
    Outcome,
    ResourceRecord,
)
from tests.plugins.rig import METAGPU, allocate, endpoint_of, ids, node
from tests.waiting import until

NAME = ResourceName(METAGPU)


def test_a_call_falls_into_the_bucket_it_does_not_exceed() -> None:
    """Bounds belong to the bucket below them, and what is longer than all has a place too."""
    record = CallRecord()
    for seconds in (0.0, BOUNDS[0], 0.0002, 31.0):
        record.note(Outcome.ANSWERED, seconds)

    assert record.buckets[:2] == [2, 1]
    assert record.buckets[-1] == 1
    assert sum(record.buckets) == record.outcomes[Outcome.ANSWERED] == 4
    assert record.seconds == pytest.approx(31.0003)
    assert list(BOUNDS) == sorted(BOUNDS)


@pytest.mark.parametrize(
    ("error", "outcome", "refusals"),
    [
        (UnknownShare("r", "s"), Outcome.REFUSED, [UnknownShare]),
        (ZeroDivisionError(), Outcome.FAILED, []),
        (anyio.get_cancelled_exc_class, Outcome.ABANDONED, []),
    ],
)
async def test_a_failure_is_told_by_its_error(
    error: object, outcome: Outcome, refusals: Sequence[type]
) -> None:
    """The pod's own, ours, or nobody's because the caller went away."""
    record = ResourceRecord()
    raised = error if isinstance(error, Exception) else anyio.get_cancelled_exc_class()()
    record.note_failure(Call.ALLOCATE, 0.5, raised)

    assert {it for it, n in record.calls[Call.ALLOCATE].outcomes.items() if n} == {outcome}
    assert list(record.refusals) == refusals


def test_another_kubelet_is_a_restart() -> None:
    """The first is none, nor the same again, nor one that cannot be told."""
    record = KubeletRecord()
    for kubelet in ("a", "a", None, "a", "b", "b", "a"):
        record.meet(kubelet)

    assert record.restarts == 2


async def test_calls_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    """Answered, refused by kind; the kubelet's own questions for a preference too."""
    async with node(tmp_path) as it, it.kubelet.running():
        await it.until(20, 20)
        async with endpoint_of(it) as stub:
            await allocate(stub, ids((0, 1)))
            await stub.get_preferred_allocation(v1beta1.PreferredAllocationRequest())
            it.fault(1)
            for wanted in (["GPU-unknown"], ids((1, 1)), ids((0, 2), (1, 2))):
                with pytest.raises(GRPCError):
                    await allocate(stub, wanted)
            with pytest.raises(GRPCError):
                await stub.pre_start_container(v1beta1.PreStartContainerRequest(["nothing"]))

        record = it.record.of(NAME)
        outcomes = record.calls[Call.ALLOCATE].outcomes
        assert outcomes == {**dict.fromkeys(Outcome, 0), Outcome.ANSWERED: 1, Outcome.REFUSED: 3}
        assert record.calls[Call.PREFERRED].outcomes[Outcome.ANSWERED] == 1
        assert record.refusals == {UnknownShare: 2, GpuUnhealthy: 2}
        assert 0 < record.calls[Call.ALLOCATE].seconds < 30
        assert FractionSplit not in record.refusals


async def test_registrations_and_restarts_are_counted(tmp_path: Path) -> None:
    """A resource is listed while the kubelet holds its list, and counts go on with the next."""
    async with node(tmp_path) as it:
        record = it.record.of(NAME)
        assert not record.listed

        async with it.kubelet.running():
            await so(lambda: record.listed)
            await so(lambda: record.lists == 1)
            assert (record.registrations, it.record.restarts) == (1, 0)
            it.fault(0)
            await so(lambda: record.lists == 2)

        await so(lambda: not record.listed)
        async with it.kubelet.running():
            await so(lambda: record.listed)
            assert (record.registrations, it.record.restarts) == (2, 1)


async def so(is_so: Callable[[], bool]) -> None:
    """Wait until it is so."""

    async def look() -> bool:
        return is_so()

    await until(look, deadline=30)
