"""The simulated scheduler counts as kube-scheduler does."""

from collections.abc import Mapping
from typing import Any

from metagpu.sim.apiserver.objects import Object
from metagpu.sim.cluster.claim_scheduler import ClaimScheduler
from metagpu.sim.cluster.pod_manifest import PodManifest
from metagpu.sim.cluster.scheduler import free_on, schedule

SHARED = "nvidia.com/gpu.shared"
MPS = "nvidia.com/gpu.mps"


def node(taints: tuple[Mapping[str, str], ...] = (), **allocatable: int) -> Object:
    """Return a Node with these numbers: `shared` and `mps`."""
    names = {"shared": SHARED, "mps": MPS}
    status = {"allocatable": {names[name]: str(n) for name, n in allocatable.items()}}
    return {"metadata": {"name": "n"}, "spec": {"taints": list(taints)}, "status": status}


def pod(name: str, *, bound: bool = False, phase: str = "Pending", **counts: int) -> Object:
    """Return a Pod that requests these numbers of `shared` and `mps`."""
    names = {"shared": SHARED, "mps": MPS}
    request = PodManifest(name, {names[text]: n for text, n in counts.items()})
    made: Object = {**request.document(), "status": {"phase": phase}}
    if bound:
        made["spec"]["nodeName"] = "n"
    return made


def decided(node: Object, *pods: Object) -> list[tuple[str, str]]:
    """Return each pod that was decided on, with its node or the message."""
    decisions = schedule(node, pods, ClaimScheduler("n", {}))
    return [(decision.pod[2], decision.node or decision.message) for decision in decisions]


def test_bound_pods_count_until_they_end() -> None:
    """Requests of bound pods are subtracted; those of ended pods are not."""
    present = (
        pod("running", bound=True, phase="Running", shared=3),
        pod("starting", bound=True, shared=2),
        pod("done", bound=True, phase="Succeeded", shared=4),
        pod("rejected", bound=True, phase="Failed", shared=4),
    )

    assert free_on(node(shared=10), present) == {SHARED: 5}


def test_the_earlier_pod_counts_for_the_later() -> None:
    """Pods are decided on in order, and a smaller one may pass a larger one that waits."""
    assert decided(node(shared=10), pod("a", shared=6), pod("b", shared=5), pod("c", shared=4)) == [
        ("a", "n"),
        ("b", f"0/1 nodes are available: 1 Insufficient {SHARED}."),
        ("c", "n"),
    ]


def test_every_missing_resource_is_named() -> None:
    """The message names each resource that is too few, in order; an unknown one counts as none."""
    assert decided(node(shared=1), pod("a", shared=2, mps=1)) == [
        ("a", f"0/1 nodes are available: 1 Insufficient {MPS}, 1 Insufficient {SHARED}.")
    ]


def test_a_falling_number_leaves_bound_pods_alone() -> None:
    """A resource of which too much is bound keeps its next pod waiting, no other."""
    present = pod("running", bound=True, phase="Running", shared=8)
    numbers = node(shared=4, mps=1)

    assert free_on(numbers, [present])[SHARED] == -4
    assert decided(numbers, present, pod("a", shared=1), pod("b", mps=1)) == [
        ("a", f"0/1 nodes are available: 1 Insufficient {SHARED}."),
        ("b", "n"),
    ]


def test_a_taint_comes_before_the_numbers() -> None:
    """A taint keeps each pod away, and its key is the reason; a preference does not."""
    taint: dict[str, Any] = {"key": "metagpu.io/starting", "effect": "NoSchedule"}
    message = "0/1 nodes are available: 1 node(s) had untolerated taint {metagpu.io/starting: }."

    assert decided(node((taint,), shared=0), pod("a", shared=1)) == [("a", message)]
    mild = {**taint, "effect": "PreferNoSchedule"}
    assert decided(node((mild,), shared=1), pod("a", shared=1)) == [("a", "n")]


def test_a_pod_tolerates_taints_and_chooses_nodes() -> None:
    """Tolerations, node selectors and required node affinities count."""
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    tolerant = pod("a", shared=1)
    tolerant["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert decided(node((taint,), shared=1), tolerant) == [("a", "n")]

    labelled = {**node(shared=2), "metadata": {"name": "n", "labels": {"zone": "one"}}}
    wants, term = pod("a", shared=1), {"key": "zone", "operator": "In", "values": ["one"]}
    wants["spec"]["nodeSelector"] = {"zone": "one"}
    requires = pod("b", shared=1)
    required = {"nodeSelectorTerms": [{"matchExpressions": [term]}]}
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    requires["spec"]["affinity"] = {"nodeAffinity": affinity}
    assert decided(labelled, wants, requires) == [("a", "n"), ("b", "n")]
    message = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    assert decided(node(shared=2), wants, requires) == [("a", message), ("b", message)]


def test_a_request_of_none_needs_no_amount() -> None:
    """A pod with 0 of a resource that the node does not know is bound."""
    assert decided(node(), pod("none", mps=0)) == [("none", "n")]
