"""The backend `mps`: shares, preference, refusal and grant."""

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.backends.mps.backend import MpsBackend
from metagpu.core.config.errors import ConfigError
from metagpu.core.grants.grant import Grant, Mount
from metagpu.core.grants.injection import Injection
from metagpu.core.model.gpu import MIB, Gpu
from metagpu.core.model.request_errors import INIT_CONTAINERS, MultipleDevices, TooManyClients
from metagpu.core.model.shares import Holder, Lease, Share
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.facts import BackendSuspended, GpuFaulted, GpusFound, SharesClaimed
from tests.rigs.build import after, config, gpu, layout_of

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
    """Create the backend with a pool's options."""
    [created] = layout_of(
        text=pool(options), injection=Injection(run_dir="/run/x")
    ).backends.values()
    assert isinstance(created, MpsBackend)
    return created


def offered(*gpus: Gpu, options: str = "") -> Snapshot:
    """Offer units of some GPUs."""
    return after(GpusFound(gpus, at=0), layout_of(*gpus, text=pool(options)).offer_fact)


def units(state: GpuState, *numbers: int) -> list[Share]:
    """Return some units of a GPU."""
    return [state.shares[number] for number in numbers]


def held(snapshot: Snapshot, shares: Sequence[Share], at: float = 1.0) -> Snapshot:
    """Report one container that holds shares."""
    return after(SharesClaimed(tuple(shares), at), since=snapshot)


async def given_to(count: int, options: str = "", of: Gpu = A) -> Grant:
    """Grant the first units of a GPU."""
    snapshot = offered(of, options=options)
    shares = snapshot.gpus[of.id].shares[:count]
    return await backend(options).grant(shares, snapshot)


# --- units of a GPU ----------------------------------------------------------------------------


def test_a_gpu_has_a_hundred_units() -> None:
    """Ids and slots of units begin with p, and each is a hundredth of the usable memory."""
    shares = backend().shares(A)

    assert len(shares) == 100
    assert shares[7].id == f"{A.id}::p07"
    assert shares[7].footprint == {"p07"}
    assert shares[7].memory == USABLE * MIB // 100


def test_reserved_memory_is_not_shared() -> None:
    """All units together have the memory without NVML's reserve and the MPS server's part."""
    [share] = backend("unitsPerGpu: 1").shares(A)
    [more] = backend("unitsPerGpu: 1, serverMemory: 1Gi").shares(A)

    assert share.memory == USABLE * MIB
    assert more.memory == (40960 - 620 - 1024) * MIB


def test_a_gpu_of_unknown_reserve_is_shared_whole() -> None:
    """An old driver reports the total alone, which is shared."""
    [share] = backend("unitsPerGpu: 1").shares(replace(A, reserved=None))

    assert share.memory == (40960 - 64) * MIB


@pytest.mark.parametrize(
    "found", [replace(A, mig_enabled=True), replace(A, memory=690 * MIB)], ids=["mig", "small"]
)
def test_some_gpus_have_no_units(found: Gpu) -> None:
    """A GPU in MIG mode has no units, and a unit has a MiB at least."""
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
    """A GPU has as many equal replicas as it serves clients, and all of it is offered."""
    shares = backend(options).shares(found)

    assert len(shares) == most
    whole = (found.memory or 0) - (found.reserved or 0) - 64 * MIB
    assert [share.memory for share in shares] == [whole // most] * most


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("unitsPerGpu: 0", "unitsPerGpu is 0; allowed: 1 to 100"),
        ("unitsPerGpu: 101", "unitsPerGpu is 101; allowed: 1 to 100"),
        ("replicas: 61", "replicas is 61; allowed: 1 to 60"),
        ("sharedMemory: 1Mi", "sharedMemory is 1048576 bytes; allowed: 64Mi or more"),
        ("maxClients: 0", "maxClients is 0; allowed: 1 to 60"),
        ("replicas: 2, unitsPerGpu: 2", "unitsPerGpu and replicas contradict each other"),
    ],
)
def test_options_that_cannot_be_are_refused(options: str, problem: str) -> None:
    """A wrong option is refused with the allowed values."""
    with pytest.raises(ConfigError, match=problem):
        config(pool(options))


# --- which units --------------------------------------------------------------------------------


def test_units_come_from_one_gpu() -> None:
    """A request that fits on one GPU is taken from one, the fullest that suffices."""
    snapshot = offered(A, B)
    snapshot = held(snapshot, units(snapshot.gpus[B.id], *range(30)))
    free = [*snapshot.gpus[A.id].shares, *snapshot.gpus[B.id].shares[30:]]

    chosen = backend().prefer(free, [], 60, snapshot)
    assert {share.gpu for share in chosen} == {B.id}
    assert len(chosen) == 60
    assert {share.gpu for share in backend().prefer(free, [], 80, snapshot)} == {A.id}
    spread = backend("placement: spread").prefer(free, [], 60, snapshot)
    assert {share.gpu for share in spread} == {A.id}


def test_an_unavailable_gpu_comes_last() -> None:
    """A suspended, faulty or full GPU is taken only when nothing else is left."""
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
    """A request that fits on no GPU has a choice all the same, which `check` refuses."""
    snapshot = offered(A, B)
    free = [*snapshot.gpus[A.id].shares[:30], *snapshot.gpus[B.id].shares[:30]]

    assert len(backend().prefer(free, [], 50, snapshot)) == 50
    assert len(backend().prefer(free, free[:2], 70, snapshot)) == 60


def test_required_units_are_kept() -> None:
    """The required shares stay in the choice, and decide about the GPU."""
    snapshot = offered(A, B)
    required = units(snapshot.gpus[B.id], 5, 6)

    chosen = backend().prefer([*snapshot.gpus[A.id].shares, *required], required, 2, snapshot)
    assert list(chosen) == required


# --- what is refused ----------------------------------------------------------------------------


def test_units_of_two_gpus_are_refused() -> None:
    """A process has one control daemon of one GPU; the refusal lists the free units."""
    snapshot = offered(A, B)
    snapshot = held(snapshot, units(snapshot.gpus[A.id], *range(98)))
    chosen = [*units(snapshot.gpus[A.id], 98, 99), *units(snapshot.gpus[B.id], 0)]

    with pytest.raises(MultipleDevices) as caught:
        backend().check(chosen, snapshot)
    assert str(caught.value) == (
        f"{NAME}: 3 units do not fit: MPS serves a container on one GPU, and the kubelet chose "
        "GPU 0: 2, GPU 1: 1; free now: GPU 0: 2, GPU 1: 100. Ask for less, wait for a pod to end, "
        f"or ask for whole GPUs. {INIT_CONTAINERS}"
    )


def test_more_units_than_any_gpu_has_can_never_be_had() -> None:
    """A request above the largest GPU's units is refused with the most that can be had."""
    snapshot = offered(A, B)
    chosen = [*units(snapshot.gpus[A.id], *range(100)), *units(snapshot.gpus[B.id], *range(20))]

    with pytest.raises(MultipleDevices) as caught:
        backend().check(chosen, snapshot)
    assert str(caught.value) == (
        f"{NAME}: no GPU of this node can ever give 120 units: MPS serves a container on one GPU, "
        "and the largest has 100; ask for at most 100, or for whole GPUs"
    )
    assert caught.value.never


def test_one_container_too_many_is_refused() -> None:
    """A GPU serves a limited number of containers, however many units are left."""
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
    assert backend()._count_clients(known, known.leases) == 1


def test_shares_of_an_init_container_are_no_new_client() -> None:
    """Shares that an init container had are granted again, also of a full GPU."""
    snapshot = offered(A, options="maxClients: 1")
    shares = units(snapshot.gpus[A.id], 1, 2)
    backend("maxClients: 1").check(shares, held(snapshot, shares))


async def test_pools_of_one_name_keep_their_own_parts() -> None:
    """Each GPU's parts are those of its own pool, also under a shared name."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - {name: a, gpus: {index: 0}, backends: [{backend: mps}]}\n"
        "  - {name: b, gpus: {index: 1}, backends: [{backend: mps, replicas: 4}]}\n"
    )
    layout = layout_of(A, B, text=text)
    snapshot = after(GpusFound((A, B), at=0), layout.offer_fact)
    [first] = layout.backends.values()
    quarter = await first.grant(snapshot.gpus[B.id].shares[:1], snapshot)

    assert quarter.envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert quarter.envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={USABLE // 4}M"


# --- what a container gets ----------------------------------------------------------------------


async def test_a_container_gets_its_part() -> None:
    """A grant has threads, memory and the control daemon's pipe, and nothing of MetaGPU's."""
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


async def test_the_memory_limit_is_of_the_one_device_that_mps_shows() -> None:
    """An entry of a GPU that is not there would drop all limits: number 0 always is."""
    snapshot, mps = offered(A, B), backend()
    grant = await mps.grant(units(snapshot.gpus[B.id], 3, 4), snapshot)

    for limits in (grant, mps.with_settings(grant, "-1024")):
        assert re.fullmatch(r"0=\d+M", limits.envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"])
        assert limits.envs["CUDA_MPS_PIPE_DIRECTORY"] == f"/run/x/mps/{B.id}/pipe"
    with pytest.raises(ValueError, match="too many values"):
        await mps.grant([*snapshot.gpus[A.id].shares, *snapshot.gpus[B.id].shares], snapshot)


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
    bounds=st.lists(st.integers(1, 99), max_size=10),
)
async def test_all_parts_fit(total: int, reserved: int, parts: int, bounds: list[int]) -> None:
    """For any grants of units, their limits together are no more than the GPU has."""
    found = replace(A, memory=total * MIB, reserved=reserved)
    options = f"unitsPerGpu: {parts}"
    snapshot = offered(found, options=options)
    shares = list(snapshot.gpus[found.id].shares)
    ends = [0, *sorted({bound for bound in bounds if bound < parts}), parts]

    threads = memory = 0
    for first, last in pairwise(ends):
        if taken := shares[first:last]:
            envs = (await backend(options).grant(taken, snapshot)).envs
            threads += int(envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
            memory += int(envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"][2:-1])

    assert threads <= 100
    assert memory * MIB <= max(0, (found.memory or 0) - reserved - 64 * MIB)


def test_the_metric_of_the_control_daemon() -> None:
    """A metric of each GPU is 1 while its control daemon takes clients."""
    layout = layout_of(A, B, text=pool())
    snapshot = after(
        GpusFound((A, B), at=0), layout.offer_fact, BackendSuspended(B.id, "mps", "it hangs", at=1)
    )

    assert [
        (metric.kind.name, metric.gpu, metric.value) for metric in layout.metrics(snapshot)
    ] == [
        ("mps_control_daemon_up", A.id, 1),
        ("mps_control_daemon_up", B.id, 0),
    ]
