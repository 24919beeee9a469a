"""What is read off a Node object, and what is wanted of it."""

from typing import Any

import pytest

from metagpu.core.facts import BackendSuspended, GpuFaulted, InstanceFaulted, RivalLeft, RivalMet
from metagpu.core.model import ResourceName
from metagpu.plugins.cluster.node import (
    amount,
    capacity_of,
    conditions_differ,
    conditions_of,
    discovered_elsewhere,
    disowned,
    healthy_of,
    others_labels,
    owned_labels,
    stale_amounts,
    taints_left,
    taken_by_nfd,
)
from tests.build import METAGPU, after, gpu, offered

R = ResourceName("nvidia.com/gpu.shared")


def node(**status: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    """Make a Node with a status."""
    return {"metadata": {}, "status": status}


def managed(manager: str, *labels: str, operation: str = "Apply") -> dict[str, Any]:
    """Make an entry of who manages which labels, as the API server writes it."""
    fields: dict[str, object] = {".": {}, **{f"f:{label}": {} for label in labels}}
    return {
        "manager": manager,
        "operation": operation,
        "fieldsV1": {"f:metadata": {"f:labels": fields}},
    }


def test_own_labels_are_those_applied_in_our_name() -> None:
    """What others manage, or was only updated, is not ours to take away."""
    entries = [managed("metagpu", "a", "b"), managed("nfd", "c"), {"manager": "kubelet"}]
    assert owned_labels({"metadata": {"managedFields": entries}}) == {"a", "b"}
    assert owned_labels({"metadata": {}}) == frozenset()


def test_what_nfd_keeps_is_read_off_its_annotations() -> None:
    """Of every instance of NFD, and without the labels of its own namespace."""
    annotations = {
        "nfd.node.kubernetes.io/feature-labels": "cpu-cpuid.AVX,nvidia.com/gpu.count",
        "second.nfd.node.kubernetes.io/feature-labels": "metagpu.io/gpu.ecc",
        "nfd.node.kubernetes.io/extended-resources": "a.b/c",
    }

    assert taken_by_nfd({"metadata": {"annotations": annotations}}) == {
        "nvidia.com/gpu.count",
        "metagpu.io/gpu.ecc",
    }
    assert taken_by_nfd({"metadata": {}}) == frozenset()


def test_labels_are_disowned_and_nothing_else() -> None:
    """Of our entry those labels go, of others' nothing; an entry of none goes as a whole."""
    status = {"manager": "metagpu", "operation": "Apply", "subresource": "status", "fieldsV1": {}}
    others = [managed("nfd-master", "a", operation="Update"), status]
    it = {"metadata": {"managedFields": [managed("metagpu", "a", "b"), *others]}}

    [ours, *rest] = disowned(it, {"a"})
    assert owned_labels({"metadata": {"managedFields": [ours]}}) == {"b"}
    assert rest == others
    assert disowned(it, {"a", "b"}) == others
    assert disowned({"metadata": {}}, {"a"}) == []


def test_labels_of_others_are_those_that_say_something_else() -> None:
    """What is ours, is known, or says the same is no other's."""
    it = {
        "metadata": {
            "labels": {"a": "1", "b": "1", "c": "1", "d": "1"},
            "managedFields": [managed("metagpu", "a")],
        }
    }
    wanted = {"a": "2", "b": "2", "c": "2", "d": "1", "e": "1"}

    assert others_labels(it, wanted, {"c"}) == {"b"}


@pytest.mark.parametrize(
    ("labels", "entries", "elsewhere"),
    [
        ({}, [], False),
        ({"nvidia.com/gfd.timestamp": "1"}, [], True),
        ({"nvidia.com/gpu.product": "x"}, [managed("metagpu", "nvidia.com/gpu.product")], False),
        ({"nvidia.com/gpu.product": "x"}, [managed("nfd", "nvidia.com/gpu.product")], True),
    ],
)
def test_gpu_feature_discovery_is_noticed(
    labels: dict[str, str], entries: list[dict[str, Any]], *, elsewhere: bool
) -> None:
    """It is by its time stamp, or, set to write none, by who manages the product's label."""
    metadata = {"labels": labels, "managedFields": entries}
    assert discovered_elsewhere({"metadata": metadata}) is elsewhere


def test_amounts_of_the_node_are_compared_with_ours() -> None:
    """Numbers fall to ours, rise only if wanted, and never pass what the kubelet knows."""
    shown = node(capacity={R: "8", METAGPU: "2k"}, allocatable={R: "6", METAGPU: "2k"})

    assert stale_amounts(shown, {R: 4, METAGPU: 2000}, rising=False) == {R: 4}
    assert stale_amounts(shown, {R: 8}, rising=False) == {}
    assert stale_amounts(shown, {R: 9}, rising=True) == {R: 8}
    assert stale_amounts(shown, {ResourceName("new.io/gpu"): 3}, rising=True) == {}
    assert stale_amounts({"metadata": {}}, {R: 4}, rising=True) == {}


@pytest.mark.parametrize(("text", "number"), [("7", 7), ("2k", 2000), (None, None), ("1.5", None)])
def test_quantities_are_read(text: str | None, number: int | None) -> None:
    """Devices are counted in whole numbers, in thousands if that is shorter."""
    assert amount(text) == number


@pytest.mark.parametrize(
    "key", ["metagpu.io/starting", "startup-taint.cluster-autoscaler.kubernetes.io/metagpu"]
)
def test_taint_waits_for_every_resource(key: str) -> None:
    """It goes when all resources have all their shares, and not while nothing is on offer."""
    ours = {"key": key, "effect": "NoSchedule"}
    tainted = {"metadata": {}, "spec": {"taints": [ours]}, "status": {"capacity": {R: "4"}}}

    assert taints_left(tainted, {R: 4}) == []
    assert taints_left(tainted, {R: 5}) is None
    assert taints_left(tainted, {R: 4, METAGPU: 1}) is None
    assert taints_left(tainted, {}) is None
    assert taints_left({"metadata": {}, "status": {"capacity": {R: "4"}}}, {R: 4}) is None


def test_resource_of_a_rival_is_not_counted() -> None:
    """What another plugin serves is neither waited for nor lowered."""
    _, snapshot = offered(gpu(0))
    rivalled = after(RivalMet(METAGPU, "its.sock"), since=snapshot)

    assert (capacity_of(snapshot), healthy_of(snapshot)) == ({METAGPU: 10}, {METAGPU: 10})
    assert (capacity_of(rivalled), healthy_of(rivalled)) == ({}, {})
    assert capacity_of(after(RivalLeft(METAGPU), since=rivalled)) == {METAGPU: 10}


def test_condition_tells_since_when() -> None:
    """Its times are those of the verdict, so that it changes only with it."""
    _, snapshot = offered(gpu(0), gpu(1))
    broken = after(GpuFaulted(gpu(1).id, "XID 79", at=60), since=snapshot)
    [said] = conditions_of(broken)

    assert said["reason"] == "GPUOutOfService"
    assert said["lastTransitionTime"] == "1970-01-01T00:01:00Z"
    assert conditions_of(after()) == ()


def test_a_faulted_instance_is_no_problem_of_the_node() -> None:
    """It is named, but nobody shall drain a node for what concerns one pod."""
    _, snapshot = offered(gpu(0))
    [said] = conditions_of(after(InstanceFaulted(gpu(0).id, "MIG-x", "XID 94", 60), since=snapshot))

    assert (said["status"], said["reason"]) == ("False", "MIGDevicesOutOfService")
    assert said["message"] == (
        f"all 1 GPUs are in service; MIG device MIG-x of GPU {gpu(0)}: XID 94"
    )


def test_a_reset_that_is_needed_is_a_condition_while_it_is() -> None:
    """With the GPU and the command; a node that shows it longer differs from what is wanted."""
    _, snapshot = offered(gpu(0))
    facts = (BackendSuspended(gpu(0).id, "mig", "run nvidia-smi", at=60, reset=True),)
    waiting = conditions_of(after(*facts, since=snapshot))

    assert [each["type"] for each in waiting] == ["GPUProblem", "GPUResetNeeded"]
    assert waiting[1]["status"] == "True"
    assert waiting[1]["message"] == f"GPU {gpu(0)}: run nvidia-smi"
    shown = node(conditions=[*waiting, {"type": "Ready", "status": "True"}])
    assert not conditions_differ(shown, waiting)
    assert conditions_differ(shown, conditions_of(snapshot))
    suspended = BackendSuspended(gpu(0).id, "mig", "MIG mode is off", at=60)
    assert len(conditions_of(after(suspended, since=snapshot))) == 1
