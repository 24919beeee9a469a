"""Annotations about GPUs: their meaning, and the limits within which they are read."""

import pytest

from metagpu.core.model.gpu import GpuId
from metagpu.core.model.gpu_preference import (
    MAX_ANNOTATIONS,
    MAX_LENGTH,
    GpuPolicy,
    GpuPreference,
    by_fullness,
    gpu_annotations,
    parse_preference,
    unmet,
)
from tests.rigs.build import gpu

FIRST, SECOND = gpu(0), gpu(1)
BOTH = {FIRST.id: FIRST, SECOND.id: SECOND}


def preference(container: str = "train", **annotations: str) -> GpuPreference:
    """Return the preference of annotations by their short names."""
    keys = {
        "uuid": "nvidia.com/use-gpuuuid",
        "not_uuid": "nvidia.com/nouse-gpuuuid",
        "type": "nvidia.com/use-gputype",
        "not_type": "nvidia.com/nouse-gputype",
        "policy": "hami.io/gpu-scheduler-policy",
        "parts": "gpus.metagpu.io/train",
    }
    return parse_preference({keys[name]: value for name, value in annotations.items()}, container)


@pytest.mark.parametrize(
    ("annotations", "fits"),
    [
        ({}, True),
        ({"uuid": FIRST.id}, True),
        ({"uuid": f"GPU-other, {FIRST.id}"}, True),
        ({"uuid": SECOND.id}, False),
        ({"not_uuid": FIRST.id}, False),
        ({"not_uuid": SECOND.id}, True),
        ({"type": "h100,a100"}, True),
        ({"type": "NVIDIA-NVIDIA A100-SXM4-40GB"}, True),
        ({"type": "A100 SXM4"}, True),
        ({"type": "H100"}, False),
        ({"not_type": "a100"}, False),
        ({"not_type": "V100"}, True),
        ({"uuid": FIRST.id, "not_type": "A100"}, False),
        ({"uuid": " , "}, True),
    ],
)
def test_gpus_are_named_as_in_hami(annotations: dict[str, str], *, fits: bool) -> None:
    """UUIDs are compared exactly, types as parts of the model's name in any case."""
    assert FIRST.name == "NVIDIA A100-SXM4-40GB"
    assert (preference(**annotations).misfit(FIRST) == "") is fits


def test_a_preference_is_of_its_container_where_it_names_one() -> None:
    """Equal parts are asked for by container; all other annotations are of the pod."""
    assert preference(parts="2").parts == 2
    assert preference("other", parts="2", uuid=FIRST.id) == GpuPreference((FIRST.id,))
    assert not preference("other", parts="2")


@pytest.mark.parametrize(
    ("value", "policy", "problem"),
    [
        ("binpack", GpuPolicy.BINPACK, ""),
        ("Spread", GpuPolicy.SPREAD, ""),
        ("topology-aware,spread", GpuPolicy.SPREAD, "topology-aware is not followed"),
        ("mutex", None, "mutex is not followed; binpack and spread are"),
    ],
)
def test_policies_of_hami(value: str, policy: GpuPolicy | None, problem: str) -> None:
    """The first known policy counts; others have no effect, and that is said."""
    found = preference(policy=value)
    assert found.policy is policy
    assert problem in "".join(found.problems)
    assert bool(found.problems) is bool(problem)


@pytest.mark.parametrize("value", ["", "0", "-1", "two", "2.0", "65", "9" * 500, "\u0662"])
def test_a_number_of_gpus_has_limits(value: str) -> None:
    """Anything but 1 to 64 has no effect; the sentence about it is short."""
    found = preference(parts=value)
    assert found.parts is None
    [problem] = found.problems
    assert "is not a number of GPUs from 1 to 64" in problem
    assert len(problem) < 200


def test_annotations_are_limited_in_number_and_length() -> None:
    """Of any annotations, so many are read, and so much of each; HAMi's keys come first."""
    many = {f"gpus.metagpu.io/c{n:03d}": "1" for n in range(500)}
    kept = gpu_annotations({"a": "b", "nvidia.com/use-gpuuuid": "x" * 10_000, **many})

    assert len(kept) == MAX_ANNOTATIONS
    assert len(kept["nvidia.com/use-gpuuuid"]) == MAX_LENGTH
    assert gpu_annotations({"team": "b"}) == {}


def test_a_value_that_is_cut_is_reported() -> None:
    """A value that is cut is a problem, and the word at the cut names no GPU."""
    value = ",".join(gpu(n).id for n in range(100))
    kept = gpu_annotations({"nvidia.com/use-gpuuuid": value})
    found = parse_preference(kept, "train")

    assert found.use_uuids == tuple(value.split(","))[: len(found.use_uuids)]
    assert len(found.use_uuids) == kept["nvidia.com/use-gpuuuid"].count(",")
    assert found.problems == (
        "nvidia.com/use-gpuuuid: what follows its first 1024 characters is not read",
    )


def test_a_policy_orders_gpus_by_how_full_they_are() -> None:
    """Binpack begins with the fullest, spread with the emptiest; equal ones come together."""
    free = {GpuId("a"): (5, 10), GpuId("b"): (50, 100), GpuId("c"): (10, 10), GpuId("d"): (1, 10)}

    assert list(by_fullness(free, GpuPolicy.BINPACK)) == [{"d"}, {"a", "b"}, {"c"}]
    assert list(by_fullness(free, GpuPolicy.SPREAD)) == [{"c"}, {"a", "b"}, {"d"}]


def test_what_is_not_met_is_described() -> None:
    """The sentence names the shares, the GPU and the annotation; nothing is said of the rest."""
    named = preference(uuid=SECOND.id)
    assert unmet(named, "train", {SECOND.id: 3}, BOTH) == ""
    assert unmet(named, "train", {FIRST.id: 3}, BOTH) == (
        f"holds 3 shares of GPU {FIRST}, which nvidia.com/use-gpuuuid does not name"
    )
    parts = preference(parts="2")
    assert unmet(parts, "train", {FIRST.id: 20, SECOND.id: 20}, BOTH) == ""
    assert unmet(parts, "train", {FIRST.id: 30, SECOND.id: 10}, BOTH) == (
        "holds 40 shares (GPU 0: 30, GPU 1: 10), and gpus.metagpu.io/train asks for equal parts of "
        "2 GPUs"
    )
    assert "asks for one GPU" in unmet(
        preference(parts="1"), "train", {FIRST.id: 1, SECOND.id: 1}, BOTH
    )
    assert unmet(preference(policy="spread"), "train", {FIRST.id: 1}, BOTH) == ""
