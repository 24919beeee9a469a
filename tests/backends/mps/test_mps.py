"""MPS: how a GPU is cut, and what a container gets."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.backends.mps import MpsBackend
from metagpu.core.errors import ConfigError, OneDeviceOnly, TooManyClients
from metagpu.core.facts import BackendSuspended, GpuFaulted, GpusFound, SharesGranted
from metagpu.core.gpu import MIB, Gpu
from metagpu.core.grant import Grant, Mount
from metagpu.core.injection import Injection
from metagpu.core.model import Holder, Lease, Share
from metagpu.core.snapshot import GpuState, Snapshot
from tests.build import after, config, gpu, laid_out

NAME = "nvidia.com/gpu.mps"
A = replace(gpu(0, memory_mib=40960), reserved=620 * MIB, compute_capability=(8, 0))
B = replace(gpu(1, memory_mib=40960), reserved=620 * MIB, compute_capability=(8, 0))
OLD = replace(gpu(2, memory_mib=16384), compute_capability=(6, 0))
USABLE = 40960 - 620 - 64


def pool(options: str = "") -> str:
    """Write a configuration of MPS alone."""
    return (
        f"version: metagpu/v1\npools:\n  - {{name: all, backends: [{{backend: mps, {options}}}]}}\n"
    )


def backend(options: str = "") -> MpsBackend:
    """Make it as a pool's options say."""
    [made] = laid_out(text=pool(options), injection=Injection(run_dir="/run/x")).backends.values()
    assert isinstance(made, MpsBackend)
    return made


def offered(*gpus: Gpu, options: str = "") -> Snapshot:
    """Lay MPS over some GPUs."""
    return after(GpusFound(gpus, at=0), laid_out(*gpus, text=pool(options)).offered)


def units(state: GpuState, *numbers: int) -> list[Share]:
    """Name some units of a GPU."""
    return [state.shares[number] for number in numbers]


def held(snapshot: Snapshot, shares: Sequence[Share], at: float = 1.0) -> Snapshot:
    """Let one container hold shares."""
    return after(SharesGranted(tuple(shares), at), since=snapshot)


async def given_to(count: int, options: str = "", of: Gpu = A) -> Grant:
    """Grant the first units of a GPU."""
    snapshot = offered(of, options=options)
    shares = snapshot.gpus[of.id].shares[:count]
    return await backend(options).grant(shares, snapshot)


# --- how a GPU is cut ---------------------------------------------------------------------------


def test_a_gpu_has_a_hundred_units() -> None:
    """Their ids and slots begin with p, and each stands for a hundredth of what is usable."""
    shares = backend().shares(A)

    assert len(shares) == 100
    assert shares[7].id == f"{A.id}::p07"
    assert shares[7].footprint == {"p07"}
    assert shares[7].memory == USABLE * MIB // 100


def test_what_the_server_and_the_driver_keep_is_not_cut() -> None:
    """All units together are what NVML does not reserve, less the MPS server's part."""
    [share] = backend("unitsPerGpu: 1").shares(A)
    [more] = backend("unitsPerGpu: 1, serverMemory: 1Gi").shares(A)

    assert share.memory == USABLE * MIB
    assert more.memory == (40960 - 620 - 1024) * MIB


def test_a_gpu_that_does_not_say_what_it_reserves_is_cut_whole() -> None:
    """An old driver's total is what there is."""
    [share] = backend("unitsPerGpu: 1").shares(replace(A, reserved=None))

    assert share.memory == (40960 - 64) * MIB


@pytest.mark.parametrize(
    "found", [replace(A, mig_enabled=True), replace(A, memory=690 * MIB)], ids=["mig", "small"]
)
def test_some_gpus_are_not_cut(found: Gpu) -> None:
    """In MIG mode CUDA sees instances only; and a unit has a MiB at least."""
    assert backend().shares(found) == ()


def test_replicas_are_equal_parts() -> None:
    """Four replicas are four quarters."""
    shares = backend("replicas: 4").shares(A)

    assert [share.memory for share in shares] == [USABLE * MIB // 4] * 4


@pytest.mark.parametrize(
    ("found", "options", "most"),
    [
        (A, "replicas: 60", 48),
        (A, "replicas: 60, maxClients: 60", 60),
        (OLD, "replicas: 20", 16),
        (replace(A, compute_capability=(7, 0)), "replicas: 49", 48),
        (replace(A, compute_capability=None), "replicas: 49", 48),
        (A, "replicas: 4, maxClients: 2", 2),
    ],
)
def test_no_more_replicas_than_clients(found: Gpu, options: str, most: int) -> None:
    """A GPU is cut into as many equal parts as it can serve, and all of it is offered."""
    shares = backend(options).shares(found)

    assert len(shares) == most
    whole = found.memory - (found.reserved or 0) - 64 * MIB
    assert [share.memory for share in shares] == [whole // most] * most


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("unitsPerGpu: 0", "unitsPerGpu is 0; allowed: 1 to 100"),
        ("unitsPerGpu: 101", "unitsPerGpu is 101; allowed: 1 to 100"),
        ("replicas: 61", "replicas is 61; allowed: 1 to 60"),
        ("maxClients: 0", "maxClients is 0; allowed: 1 to 60"),
        ("replicas: 2, unitsPerGpu: 2", "unitsPerGpu and replicas contradict each other"),
    ],
)
def test_options_that_cannot_be_are_refused(options: str, problem: str) -> None:
    """The error says what is allowed."""
    with pytest.raises(ConfigError, match=problem):
        config(pool(options))


# --- which units --------------------------------------------------------------------------------


def test_units_come_from_one_gpu() -> None:
    """What fits on one GPU is taken from one, the fullest that has room."""
    snapshot = offered(A, B)
    snapshot = held(snapshot, units(snapshot.gpus[B.id], *range(30)))
    free = [*snapshot.gpus[A.id].shares, *snapshot.gpus[B.id].shares[30:]]

    chosen = backend().prefer(free, [], 60, snapshot)
    assert {share.gpu for share in chosen} == {B.id}
    assert len(chosen) == 60
    assert {it.gpu for it in backend().prefer(free, [], 80, snapshot)} == {A.id}
    spread = backend("placement: spread").prefer(free, [], 60, snapshot)
    assert {it.gpu for it in spread} == {A.id}


def test_a_gpu_that_gives_none_comes_last() -> None:
    """One that is suspended, faulty or full of clients is taken only when nothing else is left."""
    options = "maxClients: 1"
    fresh = offered(A, B, options=options)
    free = [*fresh.gpus[A.id].shares[50:], *fresh.gpus[B.id].shares]
    for hindered in (
        after(BackendSuspended(A.id, "mps", "no answer", 1.0), since=fresh),
        after(GpuFaulted(A.id, "XID 79", 1.0), since=fresh),
        held(fresh, units(fresh.gpus[A.id], 0)),
    ):
        chosen = backend(options).prefer(free, [], 10, hindered)
        assert {share.gpu for share in chosen} == {B.id}


def test_a_choice_never_fails() -> None:
    """What fits on no GPU is gathered all the same; `check` says no to it."""
    snapshot = offered(A, B)
    free = [*snapshot.gpus[A.id].shares[:30], *snapshot.gpus[B.id].shares[:30]]

    assert len(backend().prefer(free, [], 50, snapshot)) == 50
    assert len(backend().prefer(free, free[:2], 70, snapshot)) == 60


def test_what_is_required_is_kept() -> None:
    """The kubelet's own shares stay in the choice, and decide about the GPU."""
    snapshot = offered(A, B)
    required = units(snapshot.gpus[B.id], 5, 6)

    chosen = backend().prefer([*snapshot.gpus[A.id].shares, *required], required, 2, snapshot)
    assert list(chosen) == required


# --- what is refused ----------------------------------------------------------------------------


def test_units_of_two_gpus_are_refused() -> None:
    """A process has one control daemon, and each GPU has its own; the pod is told what is free."""
    snapshot = offered(A, B)
    snapshot = held(snapshot, units(snapshot.gpus[A.id], *range(98)))
    chosen = [*units(snapshot.gpus[A.id], 98, 99), *units(snapshot.gpus[B.id], 0)]

    with pytest.raises(OneDeviceOnly) as caught:
        backend().check(chosen, snapshot)
    assert str(caught.value) == (
        f"{NAME}: 3 units do not fit: MPS serves a container on one GPU, and the kubelet chose "
        "GPU 0: 2, GPU 1: 1; free now: GPU 0: 2, GPU 1: 100. Ask for less, wait for a pod to end, "
        "or ask for whole GPUs"
    )


def test_one_container_too_many_is_refused() -> None:
    """A GPU serves so many containers at once, however many units are left."""
    snapshot = offered(OLD)
    for number in range(16):
        backend().check(units(snapshot.gpus[OLD.id], 20), snapshot)
        snapshot = held(snapshot, units(snapshot.gpus[OLD.id], number), at=1.0 + number)

    with pytest.raises(TooManyClients) as caught:
        backend().check(units(snapshot.gpus[OLD.id], 20), snapshot)
    assert str(caught.value) == (
        f"{NAME}: GPU 2 ({OLD.id}) serves 16 containers through MPS and can serve no more, though "
        "it has units left; wait for a pod to end"
    )


def test_a_container_counts_once() -> None:
    """Many units of one container are one client, before and after the kubelet names it."""
    snapshot = offered(OLD)
    state = snapshot.gpus[OLD.id]
    snapshot = held(snapshot, units(state, *range(50)))
    backend().check(units(state, 60), snapshot)

    named = {
        share: Lease(lease.share, lease.since, Holder("default", "pod", "main"))
        for share, lease in snapshot.gpus[OLD.id].leases.items()
    }
    known = replace(snapshot.gpus[OLD.id], leases=named)
    assert backend()._clients_now(known, known.leases) == 1


def test_what_is_handed_on_is_no_new_container() -> None:
    """The kubelet asks again for what an init container had; a full GPU gives it again."""
    snapshot = offered(A, options="maxClients: 1")
    shares = units(snapshot.gpus[A.id], 1, 2)
    backend("maxClients: 1").check(shares, held(snapshot, shares))


async def test_pools_of_one_name_keep_their_own_parts() -> None:
    """Where two pools offer one resource, each GPU's parts are those of its own pool."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - {name: a, gpus: {index: 0}, backends: [{backend: mps}]}\n"
        "  - {name: b, gpus: {index: 1}, backends: [{backend: mps, replicas: 4}]}\n"
    )
    layout = laid_out(A, B, text=text)
    snapshot = after(GpusFound((A, B), at=0), layout.offered)
    [first] = layout.backends.values()
    quarter = await first.grant(snapshot.gpus[B.id].shares[:1], snapshot)

    assert quarter.envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert quarter.envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={USABLE // 4}M"


# --- what a container gets ----------------------------------------------------------------------


async def test_a_container_gets_its_part() -> None:
    """Threads, memory and the way to the GPU's own control daemon, and nothing of MetaGPU's."""
    grant = await given_to(30)

    assert grant.envs == {
        "NVIDIA_VISIBLE_DEVICES": A.id,
        "METAGPU_MEMORY_MIB": f"{A.id}=12082",
        "CUDA_MPS_PIPE_DIRECTORY": f"/run/x/mps/{A.id}/pipe",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=12082M",
    }
    assert grant.mounts == (
        Mount(f"/run/x/mps/{A.id}/pipe", f"/run/x/mps/{A.id}/pipe", read_only=False),
        Mount("/dev/shm", f"/run/x/mps/{A.id}/shm", read_only=False),  # noqa: S108 - MPS's own place
    )


@pytest.mark.parametrize(
    ("count", "options", "threads", "memory"),
    [
        (1, "", "1", 402),
        (100, "", "100", USABLE),
        (1, "replicas: 3", "33", 13425),
        (3, "replicas: 3", "100", USABLE),
        (2, "replicas: 3", "66", 26850),
        (1, "unitsPerGpu: 8", "12", 5034),
        (1, "replicas: 60", "2", 839),
    ],
)
async def test_the_limits_are_exact(count: int, options: str, threads: str, memory: int) -> None:
    """Unequal parts are right to the MiB and the percent, rounded down."""
    envs = (await given_to(count, options)).envs

    assert envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == threads
    assert envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={memory}M"


@given(
    total=st.integers(1000, 200_000),
    reserved=st.integers(0, 900 * MIB),
    parts=st.integers(1, 100),
    cuts=st.lists(st.integers(1, 99), max_size=10),
)
async def test_all_parts_fit(total: int, reserved: int, parts: int, cuts: list[int]) -> None:
    """However the units are dealt out, their limits together are no more than there is."""
    found = replace(A, memory=total * MIB, reserved=reserved)
    options = f"unitsPerGpu: {parts}"
    snapshot = offered(found, options=options)
    shares = list(snapshot.gpus[found.id].shares)
    bounds = [0, *sorted({cut for cut in cuts if cut < parts}), parts]

    threads = memory = 0
    for first, last in pairwise(bounds):
        if taken := shares[first:last]:
            envs = (await backend(options).grant(taken, snapshot)).envs
            threads += int(envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
            memory += int(envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"][2:-1])

    assert threads <= 100
    assert memory * MIB <= max(0, found.memory - reserved - 64 * MIB)


def test_a_control_daemon_that_serves_is_up() -> None:
    """Monitoring is told of each GPU whether its control daemon takes clients."""
    layout = laid_out(A, B, text=pool())
    snapshot = after(
        GpusFound((A, B), at=0), layout.offered, BackendSuspended(B.id, "mps", "it hangs", at=1)
    )

    assert [(it.kind.name, it.gpu, it.value) for it in layout.figures(snapshot)] == [
        ("mps_control_daemon_up", A.id, 1),
        ("mps_control_daemon_up", B.id, 0),
    ]
