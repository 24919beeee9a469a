"""The backend `timeslice`: replicas, preference, refusal, grant, and time slices."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from metagpu.backends.timeslice import backend as timeslice
from metagpu.backends.timeslice.backend import TimesliceBackend
from metagpu.core.availability.reasons import availability_of
from metagpu.core.config.errors import ConfigError
from metagpu.core.errors import ProgramError, ProgramMissing
from metagpu.core.model.gpu import MIB, Gpu
from metagpu.core.model.request_errors import TooManyReplicas
from metagpu.core.model.shares import ResourceClaimRef, ResourceName, Share
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import (
    GpuFaulted,
    GpuRecovered,
    SharesClaimed,
    SharesOffered,
    SharesReleased,
)
from metagpu.testing.node import RecordedPrograms
from tests.rigs.build import after, config, gpu, layout_of, offered
from tests.rigs.gpu_context import BackendRig, run_backends
from tests.rigs.logs import capture_module_logs

A, B, C = gpu(0), gpu(1), gpu(2)
SHARED = ResourceName("nvidia.com/gpu.shared")


def pool(options: str = "replicas: 4") -> str:
    """Write a configuration of one pool of time-slices."""
    return (
        "version: metagpu/v1\npools:\n"
        f"  - {{name: all, backends: [{{backend: timeslice, {options}}}]}}\n"
    )


def node(*gpus: Gpu, options: str = "replicas: 4") -> tuple[TimesliceBackend, Snapshot]:
    """Offer replicas of GPUs; return the backend and the snapshot."""
    layout, snapshot = offered(*gpus, text=pool(options))
    backend = layout.backends[SHARED]
    assert isinstance(backend, TimesliceBackend)
    return backend, snapshot


def of(snapshot: Snapshot, where: Gpu, *numbers: int) -> list[Share]:
    """Return replicas of a GPU by their numbers, all of them without numbers."""
    shares = [share for share in snapshot.gpus[where.id].shares if share.backend == "timeslice"]
    return [shares[number] for number in numbers] if numbers else shares


def counted(shares: Sequence[Share]) -> dict[str, int]:
    """Count replicas by GPU."""
    return dict(Counter(share.gpu for share in shares))


# --- replicas -------------------------------------------------------------------------------------


def test_a_gpu_is_offered_as_often_as_it_has_replicas() -> None:
    """Each replica has an id of its GPU, a slot of its own and an n-th of the memory."""
    _, snapshot = node(A)

    assert of(snapshot, A) == [
        Share(
            id=of(snapshot, A)[number].id,
            gpu=A.id,
            resource=SHARED,
            backend="timeslice",
            number=number,
            footprint=frozenset({f"t{number}"}),
            memory=10240 * MIB,
            replica=True,
            interchangeable=True,
        )
        for number in range(4)
    ]
    assert [share.id for share in of(snapshot, A)] == [f"{A.id}::t{number}" for number in range(4)]


def test_one_replica_is_legal() -> None:
    """A pool may offer each GPU once under the name of the shared ones."""
    _, snapshot = node(A, B, options="replicas: 1")

    assert [share.memory for share in snapshot.offers[SHARED].shares.values()] == [A.memory] * 2


def test_pools_give_different_counts_under_one_name() -> None:
    """Each GPU has the count of its own pool, whatever name they share."""
    text = (
        "version: metagpu/v1\npools:\n"
        "  - {name: a, gpus: {index: 0}, backends: [{backend: timeslice, replicas: 2}]}\n"
        "  - {name: b, backends: [{backend: timeslice, replicas: 5}]}\n"
    )
    layout = layout_of(A, B, text=text)

    assert counted(layout.shares) == {A.id: 2, B.id: 5}
    assert {share.resource for share in layout.shares} == {SHARED}


def test_the_resource_can_be_renamed() -> None:
    """The name is the pool's choice, NVIDIA's default name for whole GPUs included."""
    layout = layout_of(A, text=pool("replicas: 2, resource: nvidia.com/gpu"))

    assert layout.offer_fact.resources == ("nvidia.com/gpu",)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("resource: a.b/c", "replicas"),
        ("replicas: 0", "replicas is 0; allowed: 1 to 70000"),
        ("replicas: 70001", "replicas is 70001; allowed: 1 to 70000"),
        ("replicas: 2, allocationPolicy: spread", "distributed"),
        ("replicas: 2, timeSlice: endless", "medium"),
        ("replicas: 2, timeslice: long", "did you mean timeSlice"),
        ("replicas: 2, resource: gpu", "invalid resource name"),
    ],
)
def test_wrong_options_are_refused_with_the_allowed_ones(options: str, problem: str) -> None:
    """A wrong option is refused with the allowed values."""
    with pytest.raises(ConfigError, match=problem):
        config(pool(options))


# --- preference -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"), [("distributed", {A.id: 2, C.id: 1}), ("packed", {B.id: 1, C.id: 2})]
)
def test_a_preference_follows_the_policy(policy: str, expected: dict[str, int]) -> None:
    """The pool's policy decides: of A 1 is held, of B 3 and of C 2."""
    backend, snapshot = node(A, B, C, options=f"replicas: 4, allocationPolicy: {policy}")
    available = [*of(snapshot, A, 1, 2, 3), *of(snapshot, B, 3), *of(snapshot, C, 2, 3)]

    assert counted(backend.prefer(available, [], 3, snapshot)) == expected


def test_spreading_is_the_default() -> None:
    """Without an option one request is spread over GPUs, as NVIDIA's plugin does it."""
    backend, snapshot = node(A, B)

    assert counted(backend.prefer([*of(snapshot, A), *of(snapshot, B)], [], 2, snapshot)) == {
        A.id: 1,
        B.id: 1,
    }


def test_a_faulty_gpu_comes_last() -> None:
    """Replicas of a faulty GPU are taken when no other GPU has one left."""
    backend, snapshot = node(A, B, options="replicas: 2")
    snapshot = after(GpuFaulted(A.id, "XID 79", at=1), since=snapshot)
    available = [*of(snapshot, A), *of(snapshot, B)]

    assert counted(backend.prefer(available, [], 2, snapshot)) == {B.id: 2}
    assert counted(backend.prefer(available, [], 3, snapshot)) == {B.id: 2, A.id: 1}


def test_a_gpu_of_another_backend_comes_last() -> None:
    """A GPU that another backend has just taken is not preferred, though still listed."""
    text = pool().replace("[{", "[{backend: fraction}, {")
    layout, snapshot = offered(A, B, text=text)
    fraction = next(share for share in layout.shares if share.backend == "fraction")
    snapshot = after(SharesClaimed((fraction,), at=1), since=snapshot)
    available = [*of(snapshot, A), *of(snapshot, B)]

    chosen = layout.backends[SHARED].prefer(available, [], 3, snapshot)
    assert counted(chosen) == {B.id: 3}


# --- refusal --------------------------------------------------------------------------------------


def test_several_replicas_may_be_refused() -> None:
    """A pool may refuse several replicas for one container, in NVIDIA's words."""
    backend, snapshot = node(A, options="replicas: 4, failRequestsGreaterThanOne: true")
    backend.check(of(snapshot, A, 2), snapshot)

    with pytest.raises(TooManyReplicas) as caught:
        backend.check(of(snapshot, A, 0, 1), snapshot)
    assert str(caught.value) == (
        'invalid allocation request for "nvidia.com/gpu.shared": invalid request: '
        "maximum request size for shared resources is 1; found 2"
    )


def test_several_replicas_are_granted_otherwise() -> None:
    """By default a container may hold any number of replicas."""
    backend, snapshot = node(A, B)

    backend.check([*of(snapshot, A), *of(snapshot, B)], snapshot)


# --- grant ----------------------------------------------------------------------------------------


async def test_a_grant_names_each_gpu_once_with_its_memory() -> None:
    """GPUs come once, by index; the memory is that of the replicas held, as a variable alone."""
    backend, snapshot = node(A, B, options="replicas: 3")
    grant = await backend.grant([*of(snapshot, B, 2, 0), *of(snapshot, A)], snapshot)

    assert grant.envs == {
        "NVIDIA_VISIBLE_DEVICES": f"{A.id},{B.id}",
        "METAGPU_MEMORY_MIB": f"{A.id}=40960,{B.id}=27306",
    }


async def test_everything_of_the_injection_is_granted() -> None:
    """A grant has the injection's mounts, nodes, annotations and CDI names."""
    text = pool() + "deviceListStrategy: [volume-mounts, cdi-cri]\n"
    layout, snapshot = offered(A, text=text)
    grant = await layout.backends[SHARED].grant(of(snapshot, A, 0), snapshot)

    assert [mount.container_path for mount in grant.mounts] == [
        f"/var/run/nvidia-container-devices/{A.id}"
    ]
    assert grant.cdi_names == (f"metagpu.io/gpu={A.id}",)


# --- the length of a turn -------------------------------------------------------------------------


def command(where: Gpu, step: int) -> str:
    """Write the command that sets a time slice."""
    return f"nvidia-smi compute-policy -i {where.id} --set-timeslice {step}"


@asynccontextmanager
async def serving(
    options: str,
    programs: RecordedPrograms,
    gpu_models: str = "t4:1",
    api: str = "device-plugin",
) -> AsyncIterator[tuple[BackendRig, list[str]]]:
    """Run the backend while the block lasts; the warnings are complete after it."""
    warnings: list[str] = []

    with capture_module_logs(timeslice) as logs:
        async with run_backends(
            pool(f"replicas: 4{options}").replace("backends:", f"api: {api}, backends:"),
            gpu_models=gpu_models,
            programs=programs,
        ) as rig:
            yield rig, warnings
    warnings += [str(line) for line in logs if line["log_level"] == "warning"]


@pytest.mark.parametrize(
    ("length", "steps"), [("short", [1, 0]), ("medium", [2, 0]), ("long", [3, 0]), ("default", [0])]
)
async def test_the_time_slice_is_the_pools(length: str, steps: list[int]) -> None:
    """The time slice is set while the GPU is offered, and reset to the default after."""
    programs = RecordedPrograms()

    async with serving(f", timeSlice: {length}", programs) as (rig, warnings):
        [where] = rig.gpus

    assert warnings == []
    assert programs.calls == [command(where, step) for step in steps]


async def test_without_an_option_no_time_slice_is_set() -> None:
    """A pool without the option leaves the GPU's time slice as it is."""
    programs = RecordedPrograms()

    async with serving("", programs):
        pass
    assert programs.calls == []


async def test_an_unfinished_time_slice_is_reset() -> None:
    """A backend that is stopped while nvidia-smi runs resets the time slice."""
    programs = RecordedPrograms(hold=True)

    async with serving(", timeSlice: long", programs) as (rig, _):
        [where] = rig.gpus
        programs.hold = False

    assert programs.calls == [command(where, 3), command(where, 0)]


async def test_a_time_slice_is_set_again_after_a_fault() -> None:
    """A reset may have ended a fault, and it takes the time slice with it."""
    programs = RecordedPrograms()

    async with serving(", timeSlice: long", programs) as (rig, _):
        [where] = rig.gpus
        rig.registry.apply(GpuFaulted(where.id, "XID 79", at=1))
        await rig.settled()
        assert programs.calls == [command(where, 3)]

        rig.registry.apply(GpuRecovered(where.id, "mended", at=2))
        await rig.settled()

    assert programs.calls == [command(where, 3), command(where, 3), command(where, 0)]


async def test_the_length_of_a_resource_claim_lasts_as_long_as_the_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backend sets it at once, also after a failure, and the pool's after the claim."""
    monkeypatch.setattr(TimesliceBackend, "retry", 3600)
    programs = RecordedPrograms(refusal=ProgramError("no driver"), refuses=1)
    claim = ResourceClaimRef("default", "long", "uid-1")

    async with serving(", timeSlice: default", programs, api="dra") as (rig, _):
        [where] = rig.gpus
        shares = rig.state(0).shares
        settings = {share.id: "long" for share in shares}
        rig.registry.apply(SharesClaimed(shares, 1, resource_claim=claim, settings=settings))
        await rig.settled()
        assert programs.calls == [command(where, 0), command(where, 3)]

        rig.registry.apply(SharesOffered((SHARED,), shares))  # by the device plugin from now on
        await rig.settled()
        assert len(programs.calls) == 2

        rig.registry.apply(SharesReleased(shares, 2))
        await rig.settled()
        assert programs.calls[2:] == [command(where, 0)]
    assert len(programs.calls) == 3


async def test_a_length_of_a_newer_daemon_leaves_the_configured_one() -> None:
    """The claim stays held, and one warning has what it asked for."""
    programs, claim = RecordedPrograms(), ResourceClaimRef("default", "newer", "uid-1")
    async with serving(", timeSlice: short", programs, api="dra") as (rig, warnings):
        [where], shares = rig.gpus, rig.state(0).shares
        settings = {share.id: "x" for share in shares}
        rig.registry.apply(SharesClaimed(shares, 1, resource_claim=claim, settings=settings))
        rig.registry.apply(GpuFaulted(where.id, "XID 79", at=2))
        await rig.settled()
        rig.registry.apply(GpuRecovered(where.id, "reset", at=3))
        await rig.settled()
        assert programs.calls[:2] == [command(where, 1), command(where, 1)]
        assert len(rig.state(0).leases) == len(shares)
    [warning] = warnings
    assert "'x'" in warning


async def test_a_missing_program_is_one_warning() -> None:
    """Without nvidia-smi the shares are served all the same; one warning has option and fix."""
    programs = RecordedPrograms(
        refusal=ProgramMissing("there is no nvidia-smi here; looked in PATH")
    )

    async with serving(", timeSlice: short", programs, "t4:2") as (rig, warnings):
        assert all(availability_of(rig.state(index)).unlisted == frozenset() for index in (0, 1))

    [warning] = warnings
    assert "timeSlice needs nvidia-smi" in warning
    assert "--driver-root" in warning
    assert "looked in PATH" in warning
    assert sorted(programs.calls) == sorted(command(where, 1) for where in rig.gpus)


async def test_a_failed_program_is_a_warning_for_its_gpu() -> None:
    """A failure of nvidia-smi for a GPU is logged with its output, and nothing is reset."""
    programs = RecordedPrograms(
        refusal=ProgramError("`nvidia-smi` failed with status 3: Not Supported")
    )

    async with serving(", timeSlice: short", programs, "t4:2") as (rig, warnings):
        pass

    assert len(warnings) == len(rig.gpus)
    assert all(any(each.id in warning for warning in warnings) for each in rig.gpus)
    assert all("Not Supported" in warning for warning in warnings)
    assert sorted(programs.calls) == sorted(command(where, 1) for where in rig.gpus)


async def test_a_failed_program_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed time slice is set as soon as possible; the same failure is logged once."""
    monkeypatch.setattr(TimesliceBackend, "retry", 0)
    refusal = ProgramError("`nvidia-smi` failed with status 9: no driver")
    programs = RecordedPrograms(refusal=refusal, refuses=3)

    async with serving(", timeSlice: short", programs) as (rig, warnings):
        [where] = rig.gpus

    assert len(warnings) == 1
    assert programs.calls == [command(where, 1)] * 4 + [command(where, 0)]
