"""The contents of a Node object, and the changes to it."""

from typing import Any

import pytest
from msgspec.structs import replace

from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder, ResourceName, ShareId
from metagpu.core.state.facts import (
    BackendSuspended,
    CompetingPluginFound,
    CompetingPluginGone,
    Fact,
    GpuFaulted,
    GpusFound,
    InstanceFaulted,
    KubeletStarted,
    LeasesObserved,
    NodeWithdrawn,
    PodsListed,
    UnreadableGpusFound,
)
from metagpu.plugins.cluster.node_object import (
    allocatable_of,
    capacity_of,
    conditions_differ,
    conditions_of,
    conflicting_labels,
    healthy_shares_of,
    is_labelled_by_gfd,
    labels_differ,
    nfd_labels,
    owned_labels,
    remaining_taints,
    stale_allocatable,
    without_labels,
)
from tests.rigs.build import METAGPU, after, gpu, layout_of, offered

R = ResourceName("nvidia.com/gpu.shared")


def node(**status: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    """Return a Node with a status."""
    return {"metadata": {}, "status": status}


def managed(manager: str, *labels: str, operation: str = "Apply") -> dict[str, Any]:
    """Return an entry of managed labels, as the API server writes it."""
    fields: dict[str, object] = {".": {}, **{f"f:{label}": {} for label in labels}}
    return {
        "manager": manager,
        "operation": operation,
        "fieldsV1": {"f:metadata": {"f:labels": fields}},
    }


def test_own_labels_are_those_applied_in_our_name() -> None:
    """Labels of other managers, or of updates, are not ours to remove."""
    entries = [managed("metagpu", "a", "b"), managed("nfd", "c"), {"manager": "kubelet"}]
    entries.append(managed("metagpu", "d", operation="Update"))
    assert owned_labels({"metadata": {"managedFields": entries}}) == {"a", "b"}
    assert owned_labels({"metadata": {}}) == frozenset()


def test_what_nfd_keeps_is_read_off_its_annotations() -> None:
    """The annotations of every NFD instance count, without NFD's own labels."""
    annotations = {
        "nfd.node.kubernetes.io/feature-labels": "cpu-cpuid.AVX,nvidia.com/gpu.count",
        "second.nfd.node.kubernetes.io/feature-labels": "metagpu.io/gpu.ecc",
        "nfd.node.kubernetes.io/extended-resources": "a.b/c",
    }

    assert nfd_labels({"metadata": {"annotations": annotations}}) == {
        "nvidia.com/gpu.count",
        "metagpu.io/gpu.ecc",
    }
    assert nfd_labels({"metadata": {}}) == frozenset()


def test_labels_are_disowned_and_nothing_else() -> None:
    """Our entry loses those labels, others' lose none; an empty entry goes as a whole."""
    status = {"manager": "metagpu", "operation": "Apply", "subresource": "status", "fieldsV1": {}}
    others = [managed("nfd-master", "a", operation="Update"), status]
    document = {"metadata": {"managedFields": [managed("metagpu", "a", "b"), *others]}}

    [ours, *rest] = without_labels(document, {"a"})
    assert owned_labels({"metadata": {"managedFields": [ours]}}) == {"b"}
    assert rest == others
    assert without_labels(document, {"a", "b"}) == others
    assert without_labels({"metadata": {}}, {"a"}) == []


def test_labels_of_others_are_those_that_say_something_else() -> None:
    """Own, known or equal labels are not another manager's."""
    document = {
        "metadata": {
            "labels": {"a": "1", "b": "1", "c": "1", "d": "1"},
            "managedFields": [managed("metagpu", "a")],
        }
    }
    wanted = {"a": "2", "b": "2", "c": "2", "d": "1", "e": "1"}

    assert conflicting_labels(document, wanted, {"c"}) == {"b"}


@pytest.mark.parametrize(
    ("wanted", "differ"),
    [({"a": "1"}, False), ({"a": "2"}, True), ({"a": "1", "b": "1"}, True), ({}, True)],
)
def test_labels_are_written_only_if_they_differ(wanted: dict[str, str], *, differ: bool) -> None:
    """A value, a missing label and one too many are differences; labels of others are none."""
    entries = [managed("metagpu", "a")]
    metadata = {"labels": {"a": "1", "c": "1"}, "managedFields": entries}
    assert labels_differ({"metadata": metadata}, wanted) is differ
    assert labels_differ({"metadata": {"managedFields": entries}}, {"a": "1"})


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
    """The time stamp, or the manager of the product's label, shows GPU Feature Discovery."""
    metadata = {"labels": labels, "managedFields": entries}
    assert is_labelled_by_gfd({"metadata": metadata}) is elsewhere


def test_amounts_of_the_node_are_compared_with_ours() -> None:
    """Numbers fall to ours, rise no higher than the kubelet knows, and never pass the kubelet's."""
    shown = node(capacity={R: "8", METAGPU: "2k"}, allocatable={R: "6", METAGPU: "2k"})

    assert stale_allocatable(shown, {R: 4, METAGPU: 2000}) == {R: 4}
    assert stale_allocatable(shown, {R: 8}) == {}
    assert stale_allocatable(shown, {R: 9}, {R: 9}) == {R: 8}
    assert (
        stale_allocatable(shown, {ResourceName("new.io/gpu"): 3}, {ResourceName("new.io/gpu"): 3})
        == {}
    )
    assert stale_allocatable({"metadata": {}}, {R: 4}, {R: 4}) == {}


@pytest.mark.parametrize(
    "key", ["metagpu.io/starting", "startup-taint.cluster-autoscaler.kubernetes.io/metagpu"]
)
def test_taint_waits_for_every_resource(key: str) -> None:
    """The taint goes when all resources have all their shares, but not without an offer."""
    ours = {"key": key, "effect": "NoSchedule"}
    tainted = {"metadata": {}, "spec": {"taints": [ours]}, "status": {"capacity": {R: "4"}}}

    assert remaining_taints(tainted, {R: 4}) == []
    assert remaining_taints(tainted, {R: 5}) is None
    assert remaining_taints(tainted, {R: 4, METAGPU: 1}) is None
    assert remaining_taints(tainted, {}) is None
    assert remaining_taints(tainted, {}, dra=True) == []
    assert remaining_taints(tainted, {R: 5}, dra=True) is None
    assert remaining_taints({"metadata": {}, "status": {"capacity": {R: "4"}}}, {R: 4}) is None


def test_resource_of_a_competing_plugin_is_not_counted() -> None:
    """A resource of another plugin is neither waited for nor lowered."""
    _, snapshot = offered(gpu(0))
    contested = after(CompetingPluginFound(METAGPU, "its.sock"), since=snapshot)

    assert (capacity_of(snapshot), allocatable_of(snapshot)) == ({METAGPU: 10}, {METAGPU: 10})
    assert (capacity_of(contested), allocatable_of(contested)) == ({}, {})
    assert capacity_of(after(CompetingPluginGone(METAGPU), since=contested)) == {METAGPU: 10}


def test_a_daemon_about_to_end_has_room_for_nobody() -> None:
    """A pod that ends leaves none either, and arriving pods change nothing."""
    _, snapshot = offered(gpu(0))
    arriving = KnownPod("uid", "team", "late", requests={METAGPU: 3}, arriving=True)
    ending = after(PodsListed((arriving,)), NodeWithdrawn(hands_over=True), since=snapshot)
    alone = after(NodeWithdrawn(hands_over=True), since=snapshot)

    assert allocatable_of(ending) == {METAGPU: 0}
    assert allocatable_of(alone) == {METAGPU: 10}, "without the API server's pods nobody is told"


def test_condition_has_the_times_of_the_verdict() -> None:
    """The condition has the verdict's times, so it changes only with the verdict."""
    _, snapshot = offered(gpu(0), gpu(1))
    broken = after(GpuFaulted(gpu(1).id, "XID 79", at=60), since=snapshot)
    [condition] = conditions_of(broken)

    assert condition["reason"] == "GPUUnhealthy"
    assert condition["lastTransitionTime"] == "1970-01-01T00:01:00Z"
    assert conditions_of(after()) == ()


def test_a_gpu_that_cannot_be_read_is_a_problem() -> None:
    """A GPU that NVML counts and nobody has read is a problem of the node, since it was found."""
    unreadable = UnreadableGpusFound({1: "GPU 1: it hangs"}, at=60)
    for found in (after(unreadable), after(unreadable, since=offered(gpu(0))[1])):
        [condition] = conditions_of(found)

        assert (condition["status"], condition["message"]) == ("True", "GPU 1: it hangs")
        assert condition["lastTransitionTime"] == "1970-01-01T00:01:00Z"


def test_a_faulted_instance_is_no_problem_of_the_node() -> None:
    """A faulty instance is named, but the status stays False: one pod is concerned."""
    _, snapshot = offered(gpu(0))
    [condition] = conditions_of(
        after(InstanceFaulted(gpu(0).id, "MIG-x", "XID 94", 60), since=snapshot)
    )

    assert (condition["status"], condition["reason"]) == ("False", "MIGDeviceUnhealthy")
    assert condition["message"] == (
        f"all 1 GPUs are in service; MIG device MIG-x of GPU {gpu(0)}: XID 94"
    )


def test_a_reset_that_is_needed_is_a_condition_while_it_is() -> None:
    """The condition has GPU and command, and goes with the need for a reset."""
    _, snapshot = offered(gpu(0))
    facts = (BackendSuspended(gpu(0).id, "mig", "run nvidia-smi", at=60, until_reset=True),)
    waiting = conditions_of(after(*facts, since=snapshot))

    assert [each["type"] for each in waiting] == ["GPUProblem", "GPUResetNeeded"]
    assert waiting[1]["status"] == "True"
    assert waiting[1]["message"] == f"GPU {gpu(0)}: run nvidia-smi"
    shown = node(conditions=[*waiting, {"type": "Ready", "status": "True"}])
    assert not conditions_differ(shown, waiting)
    assert conditions_differ(shown, conditions_of(snapshot))
    suspended = BackendSuspended(gpu(0).id, "mig", "MIG mode is off", at=60)
    assert len(conditions_of(after(suspended, since=snapshot))) == 1


@pytest.mark.parametrize(
    ("terminating", "amount"), [("", 16), ("a", 14), ("b", 12), ("c", 12), ("ab", 10), ("bc", 8)]
)
def test_the_end_of_a_pod_is_counted_before_the_scheduler_counts_it(
    terminating: str, amount: int
) -> None:
    """Shares of pods about to end leave list and number, and arriving pods keep their place.

    GPU 0 has 4 free shares of 10, which are held back, and GPU 1 has 6. The kubelet's checkpoint
    names all held shares.
    """
    gpus = gpu(0), gpu(1)
    held = {"a": (0, range(2)), "b": (0, range(2, 6)), "c": (1, range(4))}
    holders = {
        ShareId(f"{gpus[index].id}::m{number:02d}"): Holder("team", name, "main")
        for name, (index, numbers) in held.items()
        for number in numbers
    }
    pods = [
        KnownPod(
            *(name, "team", name, "Running"),
            terminating=name in terminating,
            requests={METAGPU: len(numbers)},
        )
        for name, (_, numbers) in held.items()
    ]
    snapshot = after(
        GpusFound(gpus, at=0),
        layout_of(*gpus).offer_fact,
        LeasesObserved(holders, at=1, allocated=dict.fromkeys(holders, METAGPU)),
        PodsListed(tuple(pods)),
    )

    assert allocatable_of(snapshot) == {METAGPU: amount}
    assert healthy_shares_of(snapshot) == allocatable_of(snapshot)
    arriving = KnownPod("d", "team", "d", "Pending", requests={METAGPU: 5}, arriving=True)
    snapshot = after(PodsListed((*pods, arriving)), since=snapshot)
    assert allocatable_of(snapshot) == {METAGPU: max(amount, 10 + 5)}
    ended = [replace(pod, phase="Succeeded") if pod.terminating else pod for pod in pods]
    snapshot = after(PodsListed((*ended, arriving)), since=snapshot)
    left = sum(len(numbers) for name, (_, numbers) in held.items() if name not in terminating)
    assert allocatable_of(snapshot) == {METAGPU: max(amount, left + 5)}


def test_a_new_kubelet_admits_a_pod_about_to_end_again() -> None:
    """A kubelet that starts fails pods whose shares are not healthy: these are, for its life."""
    gpus = gpu(0), gpu(1)
    held = {"alice": (0, range(3)), "bob": (0, range(3, 10)), "carol": (1, range(4))}
    holders = {
        ShareId(f"{gpus[index].id}::m{number:02d}"): Holder("team", name, "main")
        for name, (index, numbers) in held.items()
        for number in numbers
    }
    alice = KnownPod("a", "team", "alice", "Running", terminating=True)
    again = KnownPod("b", "team", "alice", "Running", terminating=True)
    facts = (
        GpusFound(gpus, at=0),
        layout_of(*gpus).offer_fact,
        LeasesObserved(holders, at=1),
        PodsListed((alice,)),
    )
    snapshot = after(*facts)
    assert allocatable_of(snapshot) == {METAGPU: 17}
    snapshot = after(KubeletStarted((1, 2, 3)), since=snapshot)
    assert allocatable_of(snapshot) == {METAGPU: 20}
    snapshot = after(PodsListed(()), PodsListed((again,)), since=snapshot)
    assert allocatable_of(snapshot) == {METAGPU: 17}


def test_the_last_change_is_the_time_of_a_condition() -> None:
    """A condition of several GPUs, resets or devices has changed with the last of them."""
    _, snapshot = offered(gpu(0), gpu(1))
    first, second = gpu(0).id, gpu(1).id
    pairs: list[tuple[Fact, ...]] = [
        (GpuFaulted(first, "XID 79", at=120), GpuFaulted(second, "XID 79", at=60)),
        (InstanceFaulted(first, "MIG-x", "XID 94", 120), InstanceFaulted(second, "MIG-y", "x", 60)),
        tuple(
            BackendSuspended(gpu_id, "mig", "reset it", at=at, until_reset=True)
            for gpu_id, at in ((first, 120), (second, 60))
        ),
    ]
    for pair in pairs:
        condition = conditions_of(after(*pair, since=snapshot))[-1]
        assert condition["lastTransitionTime"] == "1970-01-01T00:02:00Z"


def test_a_label_that_nfd_carries_for_us_is_not_gpu_feature_discoverys() -> None:
    """The product that NFD writes by our object is ours."""
    product = "nvidia.com/gpu.product"
    document = {
        "metadata": {"labels": {product: "x"}, "managedFields": [managed("nfd-master", product)]}
    }
    assert is_labelled_by_gfd(document)
    assert not is_labelled_by_gfd(document, {product})


@pytest.mark.parametrize("key", ["status", "reason", "message"])
def test_a_condition_that_says_something_else_differs(key: str) -> None:
    """Somebody may edit a condition."""
    wanted = conditions_of(offered(gpu(0))[1])
    shown = node(conditions=[{**wanted[0], key: "other"}])
    assert conditions_differ(shown, wanted)
