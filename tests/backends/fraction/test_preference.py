"""The preferred allocation of fractions."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.core.model.shares import Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import (
    BackendSuspended,
    Fact,
    GpuCordoned,
    GpuFaulted,
    SharesClaimed,
)
from tests.backends.fraction.fractions import A, B, C, counted, node, of
from tests.rigs.build import METAGPU, after, gpu, share


@pytest.mark.parametrize(
    ("options", "size", "expected"),
    [
        ("sharesPerGpu: 10", 5, {B.id: 5}),
        ("sharesPerGpu: 10", 7, {C.id: 7}),
        ("sharesPerGpu: 10, placement: spread", 5, {A.id: 5}),
        ("sharesPerGpu: 10", 15, {A.id: 10, B.id: 5}),
        ("sharesPerGpu: 10, placement: spread", 15, {A.id: 10, C.id: 5}),
        ("sharesPerGpu: 10", 17, {A.id: 10, C.id: 7}),
    ],
)
def test_a_preference_follows_the_placement(
    options: str, size: int, expected: dict[str, int]
) -> None:
    """The pool's placement decides: A is idle, B has 5 and C 7 shares free."""
    backend, snapshot = node(A, B, C, options=options)
    available = [*of(snapshot, A), *of(snapshot, B)[5:], *of(snapshot, C)[3:]]

    assert counted(backend.prefer(available, [], size, snapshot)) == expected


def test_a_faulty_gpu_comes_last() -> None:
    """All free shares of healthy GPUs are taken before those of a faulty one."""
    backend, snapshot = node(A, B, C)
    snapshot = after(GpuFaulted(A.id, "XID 79", at=1), since=snapshot)
    available = [*of(snapshot, A), *of(snapshot, B, 1, 2), *of(snapshot, C, 7)]

    assert counted(backend.prefer(available, [], 5, snapshot)) == {B.id: 2, C.id: 1, A.id: 2}


OTHERS = share(A, 0, backend="timeslice", resource="x.y/slices")


@pytest.mark.parametrize(
    "facts",
    [
        (SharesClaimed((OTHERS,), at=1),),
        (GpuFaulted(A.id, "XID 79", at=1),),
        (GpuCordoned(A.id, "riser", at=1),),
        (BackendSuspended(A.id, "fraction", "no daemon", at=1),),
    ],
    ids=["in others' hands", "faulty", "cordoned", "suspended"],
)
def test_an_unavailable_gpu_comes_last(facts: tuple[Fact, ...]) -> None:
    """Shares that the kubelet may not yet know as Unhealthy are taken last."""
    backend, snapshot = node(A, B)
    snapshot = after(*facts, since=snapshot)
    available = [*of(snapshot, A)[5:], *of(snapshot, B)]

    assert counted(backend.prefer(available, [], 5, snapshot)) == {B.id: 5}


def test_required_shares_are_kept_even_on_a_faulty_gpu() -> None:
    """Required shares stay in the preference, and the rest goes beside them."""
    backend, snapshot = node(A, B)
    snapshot = after(GpuFaulted(A.id, "XID 79", at=1), since=snapshot)
    required = of(snapshot, A, 4)
    chosen = backend.prefer([*of(snapshot, A), *of(snapshot, B)], required, 3, snapshot)

    assert [share.number for share in chosen] == [4, 0, 1]
    assert counted(chosen) == {A.id: 3}


def test_required_shares_need_not_be_among_the_available() -> None:
    """The required shares count, whether the kubelet lists them as available too or not."""
    backend, snapshot = node(A)
    required = of(snapshot, A, 8)

    assert backend.prefer(of(snapshot, A, 1, 2, 3), required, 2, snapshot) == [
        *required,
        *of(snapshot, A, 1),
    ]


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[Share], list[Share], int, Snapshot, FractionBackend]:
    """Create a node of up to four GPUs, some faulty, and any request for its shares."""
    gpus = [
        gpu(index, memory_mib=draw(st.sampled_from([2048, 4096])), numa_node=index % 2)
        for index in range(draw(st.integers(1, 4)))
    ]
    backend, snapshot = node(
        *gpus,
        options=draw(st.sampled_from(["memoryUnit: 1Gi", "memoryUnit: 512Mi, placement: spread"])),
    )
    for each in gpus:
        if draw(st.booleans()):
            snapshot = after(GpuFaulted(each.id, "XID 79", at=1), since=snapshot)

    shares = list(snapshot.offers[METAGPU].shares.values())
    available = draw(st.lists(st.sampled_from(shares), unique_by=lambda share: share.id))
    required = draw(st.lists(st.sampled_from(shares), unique_by=lambda s: s.id, max_size=3))
    return available, required, draw(st.integers(0, 20)), snapshot, backend


@given(questions())
def test_exactly_as_many_as_asked_for(
    question: tuple[list[Share], list[Share], int, Snapshot, FractionBackend],
) -> None:
    """On any node exactly n shares are preferred while n are there, all required ones in."""
    available, required, size, snapshot, backend = question
    chosen = backend.prefer(available, required, size, snapshot)
    there = {*available, *required}

    assert len(set(chosen)) == len(chosen) == min(size, len(there))
    assert set(chosen) <= there
    assert set(required) <= set(chosen) or set(chosen) <= set(required)


@given(questions(), st.randoms())
def test_the_order_of_the_request_does_not_matter(
    question: tuple[list[Share], list[Share], int, Snapshot, FractionBackend], chance: Random
) -> None:
    """The kubelet's order is random; the preference is not."""
    available, required, size, snapshot, backend = question
    mixed = chance.sample(available, len(available))
    must = chance.sample(required, len(required))

    assert backend.prefer(mixed, must, size, snapshot) == backend.prefer(
        available, required, size, snapshot
    )


@given(questions())
def test_a_preference_can_be_granted_if_any_choice_can(
    question: tuple[list[Share], list[Share], int, Snapshot, FractionBackend],
) -> None:
    """A preference is never refused where one GPU or healthy GPUs have enough shares."""
    available, _, size, snapshot, backend = question
    sound = [share for share in available if snapshot.gpus[share.gpu].verdict.healthy]
    room = max(counted(sound).values(), default=0)

    if 0 < size <= room:
        backend.check(backend.prefer(available, [], size, snapshot), snapshot)
        assert len(counted(backend.prefer(available, [], size, snapshot))) == 1
