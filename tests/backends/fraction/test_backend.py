"""The backend `fraction`: its shares and refusals."""

import pytest
from msgspec.structs import replace

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.core.config.units import Bytes
from metagpu.core.contracts.backend import Options
from metagpu.core.grants.injection import Injection
from metagpu.core.model.gpu import MIB, Gpu
from metagpu.core.model.request_errors import INIT_CONTAINERS, FractionSplit
from metagpu.core.model.shares import Share
from metagpu.core.state.facts import GpuFaulted, SharesClaimed
from tests.backends.fraction.fractions import T4, A, B, C, counted, fraction, node, of
from tests.rigs.build import METAGPU, after, layout_of, offered, pool

GIB = 1024 * MIB

# --- shares ---------------------------------------------------------------------------------------


def test_a_gpu_is_divided_into_equal_shares() -> None:
    """Each share has an id of its GPU, a number, a slot of its own and an equal part of memory."""
    shares = fraction(shares=4).shares(A)

    assert shares == [
        Share(
            id=shares[number].id,
            gpu=A.id,
            resource=METAGPU,
            backend="fraction",
            number=number,
            footprint=frozenset({f"m0{number}"}),
            memory=10240 * MIB,
            interchangeable=True,
        )
        for number in range(4)
    ]
    assert [share.id for share in shares] == [f"{A.id}::m0{number}" for number in range(4)]


@pytest.mark.parametrize(
    ("count", "last"), [(1, "m00"), (10, "m09"), (100, "m99"), (101, "m100"), (1001, "m1000")]
)
def test_ids_have_two_digits_or_as_many_as_needed(count: int, last: str) -> None:
    """An id does not depend on the number of shares: a change of the count keeps ids."""
    shares = fraction(shares=count).shares(A)

    assert shares[-1].id == f"{A.id}::{last}"
    assert [share.id for share in shares[:1]] == [f"{A.id}::m00"]


def test_a_gpu_has_a_hundred_shares_by_default() -> None:
    """Without an option a GPU has MetaGPU's hundred shares."""
    assert len(fraction().shares(A)) == 100


@pytest.mark.parametrize(
    ("unit", "shared_gpu", "count"),
    [
        ("1Gi", A, 40),
        ("1Gi", T4, 15),
        ("4Gi", T4, 3),
        ("15Gi", T4, 1),
        ("16Gi", T4, 0),
        ("1G", A, 42),
    ],
)
def test_a_memory_unit_is_the_same_on_every_model(unit: str, shared_gpu: Gpu, count: int) -> None:
    """Every share has the memory unit, larger GPUs have more shares, a rest stays unused."""
    shares = fraction(unit=unit).shares(shared_gpu)

    assert len(shares) == count
    assert {share.memory for share in shares} <= {Bytes.parse(unit)}


def test_a_gpu_in_mig_mode_has_no_shares() -> None:
    """CUDA sees only the instances of a GPU in MIG mode, so no fraction is usable."""
    assert not fraction(shares=4).shares(replace(A, mig_enabled=True))
    assert len(fraction(shares=4).shares(replace(A, mig_enabled=False))) == 4


@pytest.mark.parametrize(
    ("options", "count", "share"),
    [
        ("sharesPerGpu: 10, gpuMemory: 100Gi", 10, 10 * GIB),
        ("memoryUnit: 1Gi, gpuMemory: 100Gi", 100, GIB),
        ("sharesPerGpu: 10", 0, 0),
    ],
)
def test_unknown_memory_is_configured(options: str, count: int, share: int) -> None:
    """A GPU whose driver reports no memory has fractions of the configured amount, else none."""
    layout, _ = offered(replace(A, memory=None, reserved=None), text=pool(options))
    shares = layout.offer_fact.shares

    assert len(shares) == count
    assert {other.memory for other in shares} <= {share}
    [assignment] = layout.pool_assignments
    assert ("gpuMemory" in assignment.reason) == (not count)


def test_a_reported_memory_comes_first() -> None:
    """The configured memory is for GPUs without a reported one alone."""
    layout, _ = offered(A, text=pool("sharesPerGpu: 10, gpuMemory: 100Gi"))
    assert {share.memory for share in layout.offer_fact.shares} == {4 * GIB}


def test_a_share_is_within_its_gpu() -> None:
    """All shares together never have more memory than the GPU."""
    for count in (3, 7, 64, 100):
        assert sum(share.memory for share in fraction(shares=count).shares(T4)) <= (T4.memory or 0)


def test_only_its_own_options_make_a_backend() -> None:
    """Options of another backend are a mistake of ours."""
    with pytest.raises(TypeError, match="fraction cannot read Options"):
        FractionBackend.configured(Options(backend="other"), Injection())


def test_the_resource_is_known_without_a_gpu() -> None:
    """A backend names its resource before there is a GPU."""
    assert fraction().resources == (METAGPU,)


# --- refusal --------------------------------------------------------------------------------------


def test_a_split_fraction_is_refused_with_the_free_shares() -> None:
    """The refusal has the chosen shares, the free shares of each GPU, and the fix."""
    backend, snapshot = node(A, B, C)
    snapshot = after(
        SharesClaimed(tuple(of(snapshot, A)[:4]), at=1),
        GpuFaulted(C.id, "XID 79", at=2),
        since=snapshot,
    )

    with pytest.raises(FractionSplit) as caught:
        backend.check([*of(snapshot, B, 0, 1), *of(snapshot, A, 9)], snapshot)
    assert str(caught.value) == (
        "cnvrg.io/metagpu: 3 shares do not fit: a request gets one GPU, or whole GPUs and one part "
        "of another, and the kubelet chose GPU 0: 1, GPU 1: 2; free now: GPU 0: 6, GPU 1: 10, "
        "GPU 2: unhealthy. Ask for less, wait for a pod to end, or set `split: accept` in the "
        f"pool's backend. {INIT_CONTAINERS}"
    )


@pytest.mark.parametrize(
    ("on_a", "on_b", "refused"),
    [(1, 0, False), (10, 0, False), (10, 3, False), (1, 1, True), (5, 5, True), (9, 9, True)],
)
def test_the_rule_decides_what_is_refused(on_a: int, on_b: int, *, refused: bool) -> None:
    """One GPU, or whole ones and a part, may be granted; anything else is refused."""
    backend, snapshot = node(A, B)
    chosen = [*of(snapshot, A)[:on_a], *of(snapshot, B)[:on_b]]

    try:
        backend.check(chosen, snapshot)
    except FractionSplit:
        assert refused
    else:
        assert not refused


def test_accepting_pools_refuse_nothing() -> None:
    """With `split: accept` any set is granted, as MetaGPU did."""
    backend, snapshot = node(A, B, options="sharesPerGpu: 10, split: accept")

    backend.check([*of(snapshot, A, 0, 1), *of(snapshot, B, 0)], snapshot)
    assert backend.prefer([*of(snapshot, A, 0, 1), *of(snapshot, B, 0)], [], 3, snapshot)


def test_a_refusal_names_gpus_of_the_resource_alone() -> None:
    """A refusal lists the GPUs that offer the resource, no others."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - {name: a, gpus: {index: 0-1}, backends: [{backend: fraction, sharesPerGpu: 10}]}\n"
        "  - {name: b, backends: [{backend: fraction, resource: example.com/b}]}\n"
    )
    layout, snapshot = offered(A, B, C, text=text)

    with pytest.raises(FractionSplit, match=r"free now: GPU 0: 10, GPU 1: 10\. Ask"):
        layout.backends[METAGPU].check([*of(snapshot, A, 0), *of(snapshot, B, 0)], snapshot)


def test_the_builder_has_ten_shares() -> None:
    """The tests' node has ten shares of each GPU unless a test says otherwise."""
    assert counted(layout_of(A, B).shares) == {A.id: 10, B.id: 10}
