"""Annotations of pods about GPU memory: accepted where allowed, or rejected with a reason."""

from collections.abc import Mapping
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from metagpu.core.config.memory import (
    AnnotationKind,
    Burst,
    EnforcementPolicy,
    MemoryEnforcement,
)
from metagpu.core.config.units import Bytes
from metagpu.core.model.gpu import MIB
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import GpusFound, LeasesObserved, PodsListed
from metagpu.core.usage.accounting import ContainerUsage
from metagpu.core.usage.annotations import (
    MAX_ANNOTATIONS,
    MAX_LENGTH,
    effective_limit,
    memory_annotations,
)
from metagpu.core.usage.policy import EffectiveLimit
from tests.rigs.build import after, gpu, layout_of, pool

A, B = (replace(gpu(number), reserved=620 * MIB) for number in (0, 1))
ALICE: Final = Holder("team", "alice", "main")
KEY: Final = "gpu-mem-limit.cnvrg.io/metagpu"
POLICY: Final = "metagpu.io/memory-policy"
ALL: Final = MemoryEnforcement(
    policy=EnforcementPolicy.KILL, allow_annotations=tuple(AnnotationKind)
)
OWN: Final = 10085 + 512
"""MiB of 25 shares, with the headroom."""
PERCENT: Final = 40340 / 100
"""MiB that programs can have of a GPU, for each of its 100 shares."""


def annotated_usage(
    annotations: Mapping[str, str], of_a: int = 25, of_b: int = 0
) -> tuple[Snapshot, ContainerUsage]:
    """Create alice with annotations and shares of two GPUs; return her use of the first GPU."""
    layout = layout_of(A, B, text=pool("sharesPerGpu: 100"))
    held = [[s for s in layout.shares if s.gpu == other.id] for other in (A, B)]
    shares = [*held[0][:of_a], *held[1][:of_b]]
    pod = KnownPod("uid", "team", "alice", "Running", memory_annotations=annotations)
    snapshot = after(
        GpusFound((A, B), at=0),
        layout.offer_fact,
        LeasesObserved({share.id: ALICE for share in shares}, at=1),
        PodsListed((pod,)),
    )
    return snapshot, ContainerUsage(A.id, ALICE, "uid", tuple(held[0][:of_a]))


def effective(
    annotations: Mapping[str, str], terms: MemoryEnforcement = ALL, **shares: int
) -> EffectiveLimit:
    """Return alice's effective limit."""
    snapshot, usage = annotated_usage(annotations, **shares)
    return effective_limit(usage, snapshot, terms)


def limit(value: str, **shares: int) -> int:
    """Return alice's limit in MiB with this annotation."""
    found = effective({KEY: value}, ALL, **shares)
    assert not found.rejected
    assert found.limit is not None
    return found.limit // MIB


def test_a_number_is_a_number_of_shares() -> None:
    """A number is a number of shares, as MetaGPU's users write it: 50 or 10 of 25 requested."""
    assert limit("50") == int(50 * PERCENT) + 512
    assert limit("10") == int(10 * PERCENT) + 512
    assert limit("25") == int(25 * PERCENT) + 512


def test_an_amount_is_for_each_gpu() -> None:
    """An amount of memory replaces the share's memory; pool part and headroom apply to it."""
    assert limit("16Gi") == 16 * 1024 * 40340 // 40960 + 512


def test_on_several_gpus_each_part_grows_in_proportion() -> None:
    """The annotation 75 of a container with 100 and 50 shares of two GPUs halves each part."""
    assert limit("75", of_a=100, of_b=50) == int(50 * PERCENT) + 512


@given(st.integers(1, 10**9))
def test_no_limit_passes_the_gpus_memory(shares: int) -> None:
    """No annotation gives a pod more memory than the GPU has."""
    assert limit(str(shares)) <= 40960


@pytest.mark.parametrize(
    "value",
    ["0", "5O", "-5", "0Gi", "16 GiB", "", "\u00b2", pytest.param("9" * 5000, id="digits")],
)
def test_a_wrong_amount_is_refused_in_words(value: str) -> None:
    """A wrong amount changes nothing, and its rejection has an example."""
    found = effective({KEY: value})
    assert found.limit == effective({}).limit
    [why] = found.rejected
    assert why == (
        f"{KEY}: {value!r} is neither a number of shares such as 50 nor an amount of memory "
        "such as 16Gi; the limit of the container's shares stays"
    )


def test_a_pod_chooses_its_policy() -> None:
    """A pod's policy replaces its pool's; `off` removes the limit."""
    assert effective({POLICY: "warn"}).settings.policy is EnforcementPolicy.WARN
    assert effective({POLICY: "off"}).limit is None
    off = replace_policy(ALL, EnforcementPolicy.OFF)
    assert effective({POLICY: "kill"}, off).limit == effective({}).limit


@pytest.mark.parametrize(
    ("burst", "annotations", "expected"),
    [
        (Burst(), {}, (40960, OWN)),
        (Burst(limit=Bytes(16384 * MIB)), {}, (16136 + 512, OWN)),
        (Burst(limit=Bytes(0)), {}, (OWN, OWN)),
        (Burst(limit=Bytes(0)), {KEY: "50"}, (int(50 * PERCENT) + 512, OWN)),
        (Burst(), {KEY: "10"}, (int(10 * PERCENT) + 512, int(10 * PERCENT) + 512)),
        (Burst(), {POLICY: "warn"}, (OWN, OWN)),
    ],
)
def test_a_pool_that_lends_has_a_limit_and_a_request(
    burst: Burst, annotations: Mapping[str, str], expected: tuple[int, int]
) -> None:
    """A container may use the pool's limit or its annotation's; its own are its shares alone."""
    found = effective(annotations, replace(ALL, burst=burst))
    assert found.limit is not None
    assert found.request is not None
    assert (found.limit // MIB, found.request // MIB) == expected


def replace_policy(terms: MemoryEnforcement, policy: EnforcementPolicy) -> MemoryEnforcement:
    """Return the same settings with another policy."""
    return MemoryEnforcement(policy=policy, allow_annotations=terms.allow_annotations)


def test_a_wrong_policy_is_refused_in_words() -> None:
    """An unknown policy leaves the pool's."""
    found = effective({POLICY: "shoot"})
    assert found.settings.policy is EnforcementPolicy.KILL
    [why] = found.rejected
    assert why == (
        f"{POLICY}: 'shoot' is not a policy; allowed: off, report, warn, kill; "
        "the policy of the GPU's pool stays"
    )


def test_an_annotation_that_the_operator_does_not_allow_is_rejected() -> None:
    """By default annotations are rejected, and the pod gets the reason."""
    found = effective({KEY: "50", POLICY: "off"}, MemoryEnforcement(policy=EnforcementPolicy.KILL))
    assert (found.settings.policy, found.limit) == (EnforcementPolicy.KILL, effective({}).limit)
    policy, limit = found.rejected
    assert policy == (
        f"{POLICY}: the GPU's pool does not allow it (`allowAnnotations: [policy]`); "
        "the policy of the GPU's pool stays"
    )
    assert limit == (
        f"{KEY}: the GPU's pool does not allow it (`allowAnnotations: [limit]`); "
        "the limit of the container's shares stays"
    )


def test_one_may_be_allowed_without_the_other() -> None:
    """Each annotation is allowed by its own setting."""
    terms = MemoryEnforcement(
        policy=EnforcementPolicy.KILL, allow_annotations=(AnnotationKind.LIMIT,)
    )
    found = effective({KEY: "50", POLICY: "off"}, terms)
    assert found.limit == effective({KEY: "50"}).limit
    assert len(found.rejected) == 1


def test_an_unknown_share_gets_no_limit_from_an_annotation() -> None:
    """An annotation limits no holder of an unknown share: no process is ended by it."""
    snapshot, usage = annotated_usage({KEY: "16Gi"})
    unknown = replace(usage, shares=(replace(usage.shares[0], memory=0),))
    assert effective_limit(unknown, snapshot, ALL).limit is None


def test_annotations_belong_to_the_uid_of_a_pod() -> None:
    """A pod's predecessor is known by its uid, and does not have the successor's limit."""
    snapshot, usage = annotated_usage({KEY: "50"})
    assert (
        effective_limit(replace(usage, pod_uid="before"), snapshot, ALL).limit
        == effective({}).limit
    )


def test_other_annotations_are_dropped() -> None:
    """A pod's annotations about GPU memory alone are kept."""
    annotations = {KEY: "50", POLICY: "warn"}
    assert (
        memory_annotations({**annotations, "metagpu.io/config": "x", "other": "y"}) == annotations
    )


def test_annotations_are_limited_in_number_and_length() -> None:
    """A pod's first annotations and their beginnings are kept, the policy among them."""
    many = {f"gpu-mem-limit.example.com/r{number}": "5" for number in range(1000)}
    kept = memory_annotations({POLICY: "warn", **many})
    assert len(kept) == MAX_ANNOTATIONS
    assert kept[POLICY] == "warn"

    cut = memory_annotations({KEY: "9" * 5000})[KEY]
    assert len(cut) == MAX_LENGTH
    [why] = effective({KEY: cut}).rejected
    assert "is neither a number of shares" in why
