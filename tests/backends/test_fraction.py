"""Fractions as a backend: shares, preference, refusal and grant."""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.backends.fraction import FractionBackend, FractionOptions
from metagpu.core.backend import Options
from metagpu.core.errors import FractionSplit
from metagpu.core.facts import BackendSuspended, Fact, GpuCordoned, GpuFaulted, SharesGranted
from metagpu.core.gpu import MIB, Gpu
from metagpu.core.injection import Injection
from metagpu.core.model import Share
from metagpu.core.snapshot import Snapshot
from metagpu.core.units import Bytes
from tests.build import METAGPU, after, gpu, laid_out, offered, pool, share

A, B, C = gpu(0), gpu(1), gpu(2)
T4 = gpu(3, name="Tesla T4", memory_mib=15360)


def fraction(
    *, shares: int | None = None, unit: str | None = None, metagpu_env: bool = True
) -> FractionBackend:
    """Make the backend with some options."""
    return FractionBackend(
        FractionOptions(
            backend="fraction",
            shares_per_gpu=shares,
            memory_unit=None if unit is None else Bytes.parse(unit),
            metagpu_env=metagpu_env,
        ),
        Injection(),
    )


def node(*gpus: Gpu, options: str = "sharesPerGpu: 10") -> tuple[FractionBackend, Snapshot]:
    """Offer fractions of GPUs; give the backend and what is known."""
    layout, snapshot = offered(*gpus, text=pool(options))
    backend = layout.backends[METAGPU]
    assert isinstance(backend, FractionBackend)
    return backend, snapshot


def of(snapshot: Snapshot, where: Gpu, *numbers: int) -> list[Share]:
    """Name shares of a GPU by their numbers, all of them without any."""
    shares = snapshot.gpus[where.id].shares
    return [shares[number] for number in numbers] if numbers else list(shares)


def counted(shares: Sequence[Share]) -> dict[str, int]:
    """Count shares by GPU."""
    return dict(Counter(share.gpu for share in shares))


# --- shares ---------------------------------------------------------------------------------------


def test_a_gpu_is_cut_into_equal_shares() -> None:
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
        )
        for number in range(4)
    ]
    assert [share.id for share in shares] == [f"{A.id}::m0{number}" for number in range(4)]


@pytest.mark.parametrize(
    ("count", "last"), [(1, "m00"), (10, "m09"), (100, "m99"), (101, "m100"), (1001, "m1000")]
)
def test_ids_have_two_digits_or_as_many_as_needed(count: int, last: str) -> None:
    """An id does not depend on how many shares there are: it outlives a change of the count."""
    shares = fraction(shares=count).shares(A)

    assert shares[-1].id == f"{A.id}::{last}"
    assert [share.id for share in shares[:1]] == [f"{A.id}::m00"]


def test_a_gpu_has_a_hundred_shares_by_default() -> None:
    """Without a word it is MetaGPU's hundred."""
    assert len(fraction().shares(A)) == 100


@pytest.mark.parametrize(
    ("unit", "cut", "count"),
    [
        ("1Gi", A, 40),
        ("1Gi", T4, 15),
        ("4Gi", T4, 3),
        ("15Gi", T4, 1),
        ("16Gi", T4, 0),
        ("1G", A, 42),
    ],
)
def test_a_memory_unit_is_the_same_on_every_model(unit: str, cut: Gpu, count: int) -> None:
    """By memory unit every share has that memory, larger GPUs have more, a rest stays unused."""
    shares = fraction(unit=unit).shares(cut)

    assert len(shares) == count
    assert {share.memory for share in shares} <= {Bytes.parse(unit)}


def test_a_gpu_in_mig_mode_is_not_cut() -> None:
    """CUDA sees only the instances of a GPU in MIG mode: a fraction of it would be nothing."""
    assert not fraction(shares=4).shares(replace(A, mig_enabled=True))
    assert len(fraction(shares=4).shares(replace(A, mig_enabled=False))) == 4


def test_a_share_is_within_its_gpu() -> None:
    """All shares together never have more memory than the GPU."""
    for count in (3, 7, 64, 100):
        assert sum(share.memory for share in fraction(shares=count).shares(T4)) <= T4.memory


def test_only_its_own_options_make_a_backend() -> None:
    """Options of another backend are a mistake of ours."""
    with pytest.raises(TypeError, match="fraction cannot read Options"):
        FractionBackend.configured(Options(backend="other"), Injection())


def test_the_resource_is_known_without_a_gpu() -> None:
    """A backend says its resource name before there is a GPU to cut."""
    assert fraction().resources == (METAGPU,)


# --- preference -----------------------------------------------------------------------------------


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
    """The kubelet is advised by the pool's placement: A is idle, B has 5 and C 7 shares free."""
    backend, snapshot = node(A, B, C, options=options)
    available = [*of(snapshot, A), *of(snapshot, B)[5:], *of(snapshot, C)[3:]]

    assert counted(backend.prefer(available, [], size, snapshot)) == expected


def test_a_preference_avoids_a_faulty_gpu() -> None:
    """While a sound GPU has room, a faulty one is not advised, though it would be fuller."""
    backend, snapshot = node(A, B)
    snapshot = after(GpuFaulted(A.id, "XID 79", at=1), since=snapshot)
    available = [*of(snapshot, A)[5:], *of(snapshot, B)]

    assert counted(backend.prefer(available, [], 5, snapshot)) == {B.id: 5}


def test_a_faulty_gpu_comes_last() -> None:
    """Where sound GPUs have not enough, all they have is taken before a faulty one's."""
    backend, snapshot = node(A, B, C)
    snapshot = after(GpuFaulted(A.id, "XID 79", at=1), since=snapshot)
    available = [*of(snapshot, A), *of(snapshot, B, 1, 2), *of(snapshot, C, 7)]

    assert counted(backend.prefer(available, [], 5, snapshot)) == {B.id: 2, C.id: 1, A.id: 2}


OTHERS = share(A, 0, backend="timeslice", resource="x.y/slices")


@pytest.mark.parametrize(
    "facts",
    [
        (SharesGranted((OTHERS,), at=1),),
        (GpuCordoned(A.id, "riser", at=1),),
        (BackendSuspended(A.id, "fraction", "no daemon", at=1),),
    ],
    ids=["in others' hands", "cordoned", "suspended"],
)
def test_a_gpu_that_gives_nothing_comes_last(facts: tuple[Fact, ...]) -> None:
    """What the kubelet may not have heard of yet is not advised while another GPU has room."""
    backend, snapshot = node(A, B)
    snapshot = after(*facts, since=snapshot)
    available = [*of(snapshot, A)[5:], *of(snapshot, B)]

    assert counted(backend.prefer(available, [], 5, snapshot)) == {B.id: 5}


def test_required_shares_are_kept_even_on_a_faulty_gpu() -> None:
    """What the kubelet must include stays included, and the rest goes beside it."""
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


@pytest.mark.parametrize(("required", "size"), [([8, 9], 1), ([8, 9], 2), ([], 0), ([], 11)])
def test_a_preference_never_fails(required: list[int], size: int) -> None:
    """More required than asked for, nothing asked for, or more than there is: still an answer."""
    backend, snapshot = node(A)
    must = of(snapshot, A, *required) if required else []
    chosen = backend.prefer(of(snapshot, A), must, size, snapshot)

    assert len(chosen) == min(size, 10)
    assert set(chosen) <= set(must) or set(must) <= set(chosen)


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[Share], list[Share], int, Snapshot, FractionBackend]:
    """Make a node of up to four GPUs, some faulty, and any question about its shares."""
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
    """Whatever the node, exactly n shares are advised while n are there, all required ones in."""
    available, required, size, snapshot, backend = question
    chosen = backend.prefer(available, required, size, snapshot)
    there = {*available, *required}

    assert len(set(chosen)) == len(chosen) == min(size, len(there))
    assert set(chosen) <= there
    assert set(required) <= set(chosen) or set(chosen) <= set(required)


@given(questions(), st.randoms())
def test_the_order_of_the_question_does_not_matter(
    question: tuple[list[Share], list[Share], int, Snapshot, FractionBackend], chance: Random
) -> None:
    """The kubelet's order is random; the advice is not."""
    available, required, size, snapshot, backend = question
    mixed = chance.sample(available, len(available))
    must = chance.sample(required, len(required))

    assert backend.prefer(mixed, must, size, snapshot) == backend.prefer(
        available, required, size, snapshot
    )


@given(questions())
def test_what_is_advised_can_be_granted_if_anything_can(
    question: tuple[list[Share], list[Share], int, Snapshot, FractionBackend],
) -> None:
    """On one GPU with room, or without faults where several are needed, advice is never refused."""
    available, _, size, snapshot, backend = question
    sound = [share for share in available if snapshot.gpus[share.gpu].verdict.healthy]
    room = max(counted(sound).values(), default=0)

    if 0 < size <= room:
        backend.check(backend.prefer(available, [], size, snapshot), snapshot)
        assert len(counted(backend.prefer(available, [], size, snapshot))) == 1


# --- refusal --------------------------------------------------------------------------------------


def test_a_split_fraction_is_refused_with_what_is_free() -> None:
    """The pod's owner reads what was chosen, what is free where, and what to do."""
    backend, snapshot = node(A, B, C)
    snapshot = after(
        SharesGranted(tuple(of(snapshot, A)[:4]), at=1),
        GpuFaulted(C.id, "XID 79", at=2),
        since=snapshot,
    )

    with pytest.raises(FractionSplit) as caught:
        backend.check([*of(snapshot, B, 0, 1), *of(snapshot, A, 9)], snapshot)
    assert str(caught.value) == (
        "cnvrg.io/metagpu: 3 shares do not fit: a request gets one GPU, or whole GPUs and one part "
        "of another, and the kubelet chose GPU 0: 1, GPU 1: 2; free now: GPU 0: 6, GPU 1: 10, "
        "GPU 2: unhealthy. Ask for less, wait for a pod to end, or set `split: accept` in the "
        "pool's backend"
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


def test_gpus_of_no_interest_are_not_told() -> None:
    """A refusal tells of the GPUs that offer the resource, no others."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - {name: a, gpus: {index: 0-1}, backends: [{backend: fraction, sharesPerGpu: 10}]}\n"
        "  - {name: b, backends: [{backend: fraction, resource: example.com/b}]}\n"
    )
    layout, snapshot = offered(A, B, C, text=text)

    with pytest.raises(FractionSplit, match=r"free now: GPU 0: 10, GPU 1: 10\. Ask"):
        layout.backends[METAGPU].check([*of(snapshot, A, 0), *of(snapshot, B, 0)], snapshot)


# --- grant ----------------------------------------------------------------------------------------


async def test_a_grant_names_gpus_and_memory() -> None:
    """The container gets its GPUs and reads how much memory of each is its own."""
    backend, snapshot = node(A, B)
    grant = await backend.grant([*of(snapshot, B), *of(snapshot, A, 2, 7)], snapshot)

    assert grant.envs == {
        "NVIDIA_VISIBLE_DEVICES": f"{A.id},{B.id}",
        "METAGPU_MEMORY_MIB": f"{A.id}=8192,{B.id}=40960",
        "METAGPU_MAX_MEM": "49152",
        "CNVRG_META_GPU_DEVICES": ",".join(
            [
                f"cnvrg-meta-0-2-{A.id}",
                f"cnvrg-meta-0-7-{A.id}",
                *[f"cnvrg-meta-1-{number}-{B.id}" for number in range(10)],
            ]
        ),
    }


async def test_metagpus_own_variables_can_be_left_out() -> None:
    """With metagpuEnv off only our own variables are set."""
    _, snapshot = node(A)
    grant = await fraction(shares=10, metagpu_env=False).grant(of(snapshot, A, 0), snapshot)

    assert grant.envs.keys() == {"NVIDIA_VISIBLE_DEVICES", "METAGPU_MEMORY_MIB"}


async def test_everything_of_the_injection_is_granted() -> None:
    """Mounts, nodes, annotations and CDI names are what the node's injection says."""
    text = pool() + "deviceListStrategy: [volume-mounts, cdi-cri]\n"
    layout, snapshot = offered(A, text=text)
    grant = await layout.backends[METAGPU].grant(of(snapshot, A, 0), snapshot)
    base = layout.backends[METAGPU]
    assert isinstance(base, FractionBackend)
    plain = base.injection.grant([A])

    assert (grant.mounts, grant.nodes, grant.annotations, grant.cdi_names) == (
        plain.mounts,
        plain.nodes,
        plain.annotations,
        plain.cdi_names,
    )
    assert len(grant.mounts) == len(grant.cdi_names) == 1


@given(st.data())
async def test_the_order_of_ids_does_not_matter(data: st.DataObject) -> None:
    """The same ids in any order give the same answer to the last byte (case 42)."""
    backend, snapshot = node(A, B)
    shares = data.draw(st.permutations([*of(snapshot, A), *of(snapshot, B, 3, 4, 5)]))

    mixed = await backend.grant(shares, snapshot)
    straight = await backend.grant(sorted(shares, key=lambda share: share.id), snapshot)

    assert list(mixed.envs.items()) == list(straight.envs.items())
    assert mixed == straight


@pytest.mark.parametrize(
    ("options", "which", "count", "mib"),
    [
        ("sharesPerGpu: 100", A, 30, 12288),
        ("sharesPerGpu: 100", A, 1, 409),
        ("sharesPerGpu: 100", A, 100, 40960),
        ("sharesPerGpu: 3", A, 1, 13653),
        ("sharesPerGpu: 3", A, 2, 27306),
        ("sharesPerGpu: 3", A, 3, 40960),
        ("sharesPerGpu: 7", T4, 7, 15360),
        ("memoryUnit: 1Gi", A, 40, 40960),
        ("memoryUnit: 1Gi", T4, 3, 3072),
        ("memoryUnit: 1G", A, 1, 953),
        ("memoryUnit: 1G", A, 42, 40054),
    ],
)
async def test_memory_is_rounded_down_once(options: str, which: Gpu, count: int, mib: int) -> None:
    """The memory of a grant is that of its shares together, rounded down to MiB at the end."""
    backend, snapshot = node(which, options=options)
    grant = await backend.grant(of(snapshot, which)[:count], snapshot)

    assert grant.envs["METAGPU_MEMORY_MIB"] == f"{which.id}={mib}"
    assert grant.envs["METAGPU_MAX_MEM"] == str(mib)


@given(st.integers(1, 10_000), st.integers(1, 200_000), st.data())
async def test_memory_is_the_exact_part(count: int, mib: int, data: st.DataObject) -> None:
    """So many of n shares are that part of the GPU's memory, to the MiB and never too much."""
    held = data.draw(st.integers(1, count))
    whole = gpu(0, memory_mib=mib)
    shares = fraction(shares=count).shares(whole)[:held]
    _, snapshot = offered(whole)
    grant = await fraction(shares=count).grant(shares, snapshot)

    assert grant.envs["METAGPU_MAX_MEM"] == str(whole.memory * held // count // MIB)


async def test_pools_of_one_resource_grant_by_their_own_cut() -> None:
    """Where two pools share a name, each GPU's memory is by its own pool's cut."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - {name: t4, gpus: {index: 3}, backends: [{backend: fraction, sharesPerGpu: 15}]}\n"
        "  - {name: a100, backends: [{backend: fraction, sharesPerGpu: 40}]}\n"
    )
    layout, snapshot = offered(A, T4, text=text)
    grants = [
        await layout.backends[METAGPU].grant(of(snapshot, which)[:4], snapshot) for which in (A, T4)
    ]

    assert [grant.envs["METAGPU_MAX_MEM"] for grant in grants] == ["4096", "4096"]


async def test_a_list_too_long_for_linux_is_left_out() -> None:
    """An environment string of 128 KiB keeps a container from starting; the rest is enough."""
    backend, snapshot = node(A, options="sharesPerGpu: 4000")
    few, many = [await backend.grant(of(snapshot, A)[:count], snapshot) for count in (2000, 4000)]

    assert len(few.envs["CNVRG_META_GPU_DEVICES"]) < 128 * 1024
    assert many.envs.keys() == few.envs.keys() - {"CNVRG_META_GPU_DEVICES"}
    assert many.envs["METAGPU_MAX_MEM"] == "40960"


def test_the_builder_lays_out_what_it_says() -> None:
    """The tests' node has ten shares of each GPU unless it is told otherwise."""
    assert counted(laid_out(A, B).shares) == {A.id: 10, B.id: 10}
