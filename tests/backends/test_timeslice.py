"""Time-slices as a backend: replicas, preference, refusal, grant, and how long a turn lasts."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.backends import timeslice
from metagpu.backends.timeslice import TimesliceBackend
from metagpu.core.backend import Options, installed_backends
from metagpu.core.errors import ConfigError, ToolError, ToolMissing, TooManyReplicas
from metagpu.core.facts import GpuFaulted, GpuRecovered, SharesGranted
from metagpu.core.gpu import MIB, Gpu
from metagpu.core.injection import Injection
from metagpu.core.model import ResourceName, Share
from metagpu.core.snapshot import Snapshot
from tests.build import after, config, gpu, laid_out, offered
from tests.heard import heard
from tests.recorded_tools import RecordedTools
from tests.served import Care, in_care

A, B, C = gpu(0), gpu(1), gpu(2)
SHARED = ResourceName("nvidia.com/gpu.shared")


def pool(options: str = "replicas: 4") -> str:
    """Write a configuration of one pool of time-slices."""
    return (
        "version: metagpu/v1\npools:\n"
        f"  - {{name: all, backends: [{{backend: timeslice, {options}}}]}}\n"
    )


def node(*gpus: Gpu, options: str = "replicas: 4") -> tuple[TimesliceBackend, Snapshot]:
    """Offer replicas of GPUs; give the backend and what is known."""
    layout, snapshot = offered(*gpus, text=pool(options))
    backend = layout.backends[SHARED]
    assert isinstance(backend, TimesliceBackend)
    return backend, snapshot


def of(snapshot: Snapshot, where: Gpu, *numbers: int) -> list[Share]:
    """Name replicas of a GPU by their numbers, all of them without any."""
    shares = [share for share in snapshot.gpus[where.id].shares if share.backend == "timeslice"]
    return [shares[number] for number in numbers] if numbers else shares


def counted(shares: Sequence[Share]) -> dict[str, int]:
    """Count replicas by GPU."""
    return dict(Counter(share.gpu for share in shares))


# --- replicas -------------------------------------------------------------------------------------


def test_time_slices_come_through_the_door_of_everyone() -> None:
    """Time-slices are installed as an entry point under their own name."""
    assert installed_backends()["timeslice"] is TimesliceBackend


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
    layout = laid_out(A, B, text=text)

    assert counted(layout.shares) == {A.id: 2, B.id: 5}
    assert {share.resource for share in layout.shares} == {SHARED}


def test_the_resource_can_be_renamed() -> None:
    """The name is the pool's choice, NVIDIA's default name for whole GPUs included."""
    layout = laid_out(A, text=pool("replicas: 2, resource: nvidia.com/gpu"))

    assert layout.offered.resources == ("nvidia.com/gpu",)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("resource: a.b/c", "replicas"),
        ("replicas: 0", "replicas is 0; allowed: 1 to 100000"),
        ("replicas: 100001", "replicas is 100001; allowed: 1 to 100000"),
        ("replicas: 2, allocationPolicy: spread", "distributed"),
        ("replicas: 2, timeSlice: endless", "medium"),
        ("replicas: 2, timeslice: long", "did you mean timeSlice"),
        ("replicas: 2, resource: gpu", "is no resource name"),
    ],
)
def test_wrong_options_say_what_is_right(options: str, problem: str) -> None:
    """A pool that says something else is refused with what is allowed."""
    with pytest.raises(ConfigError, match=problem):
        config(pool(options))


def test_only_its_own_options_make_a_backend() -> None:
    """Options of another backend are a mistake of ours."""
    with pytest.raises(TypeError, match="timeslice cannot read Options"):
        TimesliceBackend.configured(Options(backend="other"), Injection())


# --- preference -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"), [("distributed", {A.id: 2, C.id: 1}), ("packed", {B.id: 1, C.id: 2})]
)
def test_a_preference_follows_the_policy(policy: str, expected: dict[str, int]) -> None:
    """The kubelet is advised by the pool's policy: of A 1 is held, of B 3 and of C 2."""
    backend, snapshot = node(A, B, C, options=f"replicas: 4, allocationPolicy: {policy}")
    available = [*of(snapshot, A, 1, 2, 3), *of(snapshot, B, 3), *of(snapshot, C, 2, 3)]

    assert counted(backend.prefer(available, [], 3, snapshot)) == expected


def test_spreading_is_the_default() -> None:
    """Without a word one request is spread over GPUs, as NVIDIA's plugin does it."""
    backend, snapshot = node(A, B)

    assert counted(backend.prefer([*of(snapshot, A), *of(snapshot, B)], [], 2, snapshot)) == {
        A.id: 1,
        B.id: 1,
    }


def test_a_faulty_gpu_comes_last() -> None:
    """A GPU out of service is taken from when no other has a replica left."""
    backend, snapshot = node(A, B, options="replicas: 2")
    snapshot = after(GpuFaulted(A.id, "XID 79", at=1), since=snapshot)
    available = [*of(snapshot, A), *of(snapshot, B)]

    assert counted(backend.prefer(available, [], 2, snapshot)) == {B.id: 2}
    assert counted(backend.prefer(available, [], 3, snapshot)) == {B.id: 2, A.id: 1}


def test_a_gpu_in_others_hands_comes_last() -> None:
    """What another backend has just taken is not advised, though the kubelet still lists it."""
    text = pool().replace("[{", "[{backend: fraction}, {")
    layout, snapshot = offered(A, B, text=text)
    fraction = next(share for share in layout.shares if share.backend == "fraction")
    snapshot = after(SharesGranted((fraction,), at=1), since=snapshot)
    available = [*of(snapshot, A), *of(snapshot, B)]

    chosen = layout.backends[SHARED].prefer(available, [], 3, snapshot)
    assert counted(chosen) == {B.id: 3}


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[Share], list[Share], int, Snapshot, TimesliceBackend]:
    """Make a node of up to four GPUs, some faulty, and any question about its replicas."""
    gpus = [gpu(index) for index in range(draw(st.integers(1, 4)))]
    policy = draw(st.sampled_from(["distributed", "packed"]))
    backend, snapshot = node(*gpus, options=f"replicas: 5, allocationPolicy: {policy}")
    for each in gpus:
        if draw(st.booleans()):
            snapshot = after(GpuFaulted(each.id, "XID 79", at=1), since=snapshot)

    shares = list(snapshot.offers[SHARED].shares.values())
    available = draw(st.lists(st.sampled_from(shares), unique_by=lambda share: share.id))
    required = draw(st.lists(st.sampled_from(shares), unique_by=lambda s: s.id, max_size=3))
    return available, required, draw(st.integers(0, 24)), snapshot, backend


@given(questions())
def test_exactly_as_many_as_asked_for(
    question: tuple[list[Share], list[Share], int, Snapshot, TimesliceBackend],
) -> None:
    """Whatever the node, exactly n are advised while n are there, all required ones in."""
    available, required, size, snapshot, backend = question
    chosen = backend.prefer(available, required, size, snapshot)
    there = {*available, *required}

    assert len(set(chosen)) == len(chosen) == min(size, len(there))
    assert set(chosen) <= there
    assert set(required) <= set(chosen) or set(chosen) <= set(required)


@given(questions(), st.randoms())
def test_the_order_of_the_question_does_not_matter(
    question: tuple[list[Share], list[Share], int, Snapshot, TimesliceBackend], chance: Random
) -> None:
    """The kubelet's order is random; the advice is not."""
    available, required, size, snapshot, backend = question
    mixed = chance.sample(available, len(available))
    must = chance.sample(required, len(required))

    assert backend.prefer(mixed, must, size, snapshot) == backend.prefer(
        available, required, size, snapshot
    )


# --- refusal --------------------------------------------------------------------------------------


def test_several_replicas_may_be_refused() -> None:
    """Where the pool says so, more than one for a container is refused in NVIDIA's words."""
    backend, snapshot = node(A, options="replicas: 4, failRequestsGreaterThanOne: true")
    backend.check(of(snapshot, A, 2), snapshot)

    with pytest.raises(TooManyReplicas) as caught:
        backend.check(of(snapshot, A, 0, 1), snapshot)
    assert str(caught.value) == (
        'invalid allocation request for "nvidia.com/gpu.shared": invalid request: '
        "maximum request size for shared resources is 1; found 2"
    )


def test_several_replicas_are_granted_otherwise() -> None:
    """By default a container may hold as many as it likes."""
    backend, snapshot = node(A, B)

    backend.check([*of(snapshot, A), *of(snapshot, B)], snapshot)


# --- grant ----------------------------------------------------------------------------------------


async def test_a_grant_names_each_gpu_once_with_its_memory() -> None:
    """GPUs come once, by index; the memory is that of the replicas held, told and no more."""
    backend, snapshot = node(A, B, options="replicas: 3")
    grant = await backend.grant([*of(snapshot, B, 2, 0), *of(snapshot, A)], snapshot)

    assert grant.envs == {
        "NVIDIA_VISIBLE_DEVICES": f"{A.id},{B.id}",
        "METAGPU_MEMORY_MIB": f"{A.id}=40960,{B.id}=27306",
    }


async def test_everything_of_the_injection_is_granted() -> None:
    """Mounts, nodes, annotations and CDI names are what the node's injection says."""
    text = pool() + "deviceListStrategy: [volume-mounts, cdi-cri]\n"
    layout, snapshot = offered(A, text=text)
    grant = await layout.backends[SHARED].grant(of(snapshot, A, 0), snapshot)

    assert [mount.container_path for mount in grant.mounts] == [
        f"/var/run/nvidia-container-devices/{A.id}"
    ]
    assert grant.cdi_names == (f"metagpu.io/gpu={A.id}",)


# --- the length of a turn -------------------------------------------------------------------------


def command(where: Gpu, step: int) -> str:
    """Write the command that sets a length."""
    return f"nvidia-smi compute-policy -i {where.id} --set-timeslice {step}"


@asynccontextmanager
async def serving(
    options: str, tools: RecordedTools, boards: str = "t4:1"
) -> AsyncIterator[tuple[Care, list[str]]]:
    """Keep GPUs while the block lasts; the warnings are complete after it."""
    warnings: list[str] = []

    with heard(timeslice) as logs:
        async with in_care(pool(f"replicas: 4{options}"), boards=boards, tools=tools) as care:
            yield care, warnings
    warnings += [str(line) for line in logs if line["log_level"] == "warning"]


@pytest.mark.parametrize(
    ("length", "steps"), [("short", [1, 0]), ("medium", [2, 0]), ("long", [3, 0]), ("default", [0])]
)
async def test_turns_last_as_long_as_the_pool_says(length: str, steps: list[int]) -> None:
    """The length is set while the GPU is offered, and the driver's own comes back after."""
    tools = RecordedTools()

    async with serving(f", timeSlice: {length}", tools) as (care, warnings):
        [where] = care.gpus

    assert warnings == []
    assert tools.calls == [command(where, step) for step in steps]


async def test_without_a_word_no_length_is_set() -> None:
    """A pool that says nothing leaves the GPU as somebody else may have set it."""
    tools = RecordedTools()

    async with serving("", tools):
        pass
    assert tools.calls == []


async def test_a_length_that_was_being_set_is_put_back() -> None:
    """Who is stopped while the tool runs cannot know whether it took effect, so undoes it."""
    tools = RecordedTools(hold=True)

    async with serving(", timeSlice: long", tools) as (care, _):
        [where] = care.gpus
        tools.hold = False

    assert tools.calls == [command(where, 3), command(where, 0)]


async def test_a_length_is_set_anew_after_a_fault() -> None:
    """A reset may have brought a GPU back, and it took the setting with it."""
    tools = RecordedTools()

    async with serving(", timeSlice: long", tools) as (care, _):
        [where] = care.gpus
        care.registry.apply(GpuFaulted(where.id, "XID 79", at=1))
        await care.settled()
        assert tools.calls == [command(where, 3)]

        care.registry.apply(GpuRecovered(where.id, "mended", at=2))
        await care.settled()

    assert tools.calls == [command(where, 3), command(where, 3), command(where, 0)]


async def test_a_missing_tool_is_one_warning() -> None:
    """Without nvidia-smi the shares are served all the same; one line names option and mend."""
    tools = RecordedTools(refusal=ToolMissing("there is no nvidia-smi here; looked in PATH"))

    async with serving(", timeSlice: short", tools, "t4:2") as (care, warnings):
        assert all(care.state(index).shut == frozenset() for index in (0, 1))

    [warning] = warnings
    assert "timeSlice has no effect" in warning
    assert "--dev-root" in warning
    assert "looked in PATH" in warning
    assert tools.calls == [command(where, 1) for where in care.gpus]


async def test_a_tool_that_fails_is_a_warning_for_its_gpu() -> None:
    """What nvidia-smi refuses for a GPU is told with its words, and nothing is undone."""
    tools = RecordedTools(refusal=ToolError("`nvidia-smi` failed with status 3: Not Supported"))

    async with serving(", timeSlice: short", tools, "t4:2") as (care, warnings):
        pass

    assert all(each.id in warning for each, warning in zip(care.gpus, warnings, strict=True))
    assert all("Not Supported" in warning for warning in warnings)
    assert tools.calls == [command(where, 1) for where in care.gpus]


async def test_a_tool_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be set is set as soon as it can be; the same failure is told once."""
    monkeypatch.setattr(timeslice, "RETRY", 0)
    refusal = ToolError("`nvidia-smi` failed with status 9: no driver")
    tools = RecordedTools(refusal=refusal, refuses=3)

    async with serving(", timeSlice: short", tools) as (care, warnings):
        [where] = care.gpus

    assert len(warnings) == 1
    assert tools.calls == [command(where, 1)] * 4 + [command(where, 0)]
