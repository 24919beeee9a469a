"""Decisions of `why` and `fit`, as a table: a pod, a node, and the sentence."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from metagpu.compat.kube_documents import KubeDocument
from metagpu.core.errors import MetagpuError
from metagpu.core.reports.schema.status import StatusReport
from metagpu.kubectl.claims import ReadClaims, claim_refs
from metagpu.kubectl.judgement import conclude, exceeded_quota, judge, judge_all
from metagpu.kubectl.obstacles import ClusterNode, Obstacle
from metagpu.kubectl.pod_reasons import PodReason
from metagpu.kubectl.pods import PodDemand, demand_of, pods_in
from tests.rigs.reported import complete

SHARES = "cnvrg.io/metagpu"
GPUS = "nvidia.com/gpu"


def gpu(index: int, held: int, free: int | None = None, **changes: object) -> Mapping[str, Any]:
    """Return a GPU of 100 shares, as a daemon reports it."""
    amounts = {"capacity": 100, "held": held, "free": 100 - held if free is None else free}
    return {
        "index": index,
        "healthy": True,
        "reason": "",
        "cordon": None,
        "suspended": {},
        "waitsFor": None,
        "shares": {SHARES: amounts},
        **changes,
    }


def node(*gpus: Mapping[str, Any], rule: str = "one_gpu", **changes: Any) -> ClusterNode:  # noqa: ANN401 - of any field
    """Return a node whose daemon offers shares of GPUs."""
    free = [other["shares"][SHARES]["free"] for other in gpus]
    report: dict[str, Any] = {
        "offers": {
            SHARES: {
                "free": sum(free),
                "heldBack": 0,
                "largestRequest": max(free) if rule == "one_gpu" else sum(free),
                "requestRule": rule,
            }
        },
        "gpus": gpus,
        "competingPlugins": {},
        "registrationProblems": {},
        "leases": [
            {
                "resource": SHARES,
                "gpu": other["index"],
                "shares": other["shares"][SHARES]["held"],
                "holder": f"team/pod-{other['index']} (main)",
            }
            for other in gpus
            if other["shares"][SHARES]["held"]
        ],
    }
    report |= changes.pop("report", {})
    return ClusterNode("gpu-1", report=complete(report, StatusReport), **changes)


def demand(*counts: int, resource: str = SHARES, **spec: object) -> PodDemand:
    """Return the demand of a pod with a container for each count."""
    containers = [
        {"name": f"c{n}", "resources": {"limits": {resource: str(count), "memory": "1Gi"}}}
        for n, count in enumerate(counts)
    ]
    metadata = {"name": "pod", "namespace": "team"}
    return demand_of({"metadata": metadata, "spec": {"containers": containers, **spec}})


TAINT = {"key": "team", "value": "a", "effect": "NoSchedule"}
AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "gen", "operator": "Gt", "values": ["7"]}]},
                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b", "c"]}]},
            ]
        }
    }
}


def by_dra(free: int, *names: str) -> ClusterNode:
    """Return a node that offers GPUs by DRA, and the names of DeviceClasses."""
    offer = {"free": free, "heldBack": 0, "largestRequest": free, "freeDevices": free}
    slices = {"extendedResources": dict.fromkeys(names, "a-class")}
    report = {"offers": {GPUS: offer}, "cluster": {"resourceSlices": slices}}
    return node(gpu(0, 0), report=report)


def claiming(*requests: Mapping[str, Any]) -> PodDemand:
    """Return the demand of a pod with a claim of requests, among classes of two drivers."""
    refs = claim_refs("team", {"resourceClaims": [{"name": "gpu", "resourceClaimName": "a"}]})
    spec = {"devices": {"requests": requests}}
    claims = ReadClaims(
        dict.fromkeys(refs, spec), [device_class(kind) for kind in (*TYPES, "foreign")]
    )
    return replace(demand(), claims=refs, devices=claims.devices(refs, claims.our_classes(())))


def device_class(kind: str) -> Mapping[str, Any]:
    """Return the DeviceClass of a type, as the chart writes it."""
    driver = "gpu.nvidia.com" if kind == "foreign" else "gpu.metagpu.io"
    expression = f"device.driver == '{driver}' && device.attributes['{driver}'].type == '{kind}'"
    return {
        "metadata": {"name": f"{kind}.metagpu.io"},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    }


def of_class(kind: str, count: int = 1, **capacity: str) -> Mapping[str, Any]:
    """Return what a claim asks for of a class."""
    requests = {"capacity": {"requests": capacity}} if capacity else {}
    return {"deviceClassName": f"{kind}.metagpu.io", "count": count, **requests}


TYPES = ("gpu", "fraction", "mig")
DEVICES = node(
    gpu(0, 0),
    report={
        "devices": {
            "gpu": {"devices": 2, "free": 1, "largest": {}},
            "fraction": {"devices": 2, "free": 2, "largest": {"memory": 10 * 2**30}},
        }
    },
)
CASES: Sequence[tuple[str, PodDemand, ClusterNode, Obstacle, str]] = [
    ("room", demand(30), node(gpu(0, 60)), Obstacle.NONE, "40 of cnvrg.io/metagpu are free"),
    ("full", demand(30), node(gpu(0, 100)), Obstacle.FULL, "held by team/pod-0 (100)"),
    (
        "fragmented",
        demand(50),
        node(gpu(0, 70), gpu(1, 60)),
        Obstacle.FRAGMENTED,
        "the largest part is 40 (30 on GPU 0, 40 on GPU 1); end team/pod-1",
    ),
    (
        "two containers, two GPUs",
        demand(40, 30),
        node(gpu(0, 70), gpu(1, 60)),
        Obstacle.NONE,
        "70 of",
    ),
    (
        "two containers, no two places",
        demand(40, 40),
        node(gpu(0, 50), gpu(1, 65)),
        Obstacle.FRAGMENTED,
        "(50 on GPU 0, 35 on GPU 1), and 40 + 40 in its containers do not fit; end in one of its",
    ),
    (
        "whole GPUs and a part, and no room beside them",
        demand(150, 60, 60),
        node(gpu(0, 0), gpu(1, 0), gpu(2, 0), rule="whole_gpus"),
        Obstacle.FRAGMENTED,
        "300 of cnvrg.io/metagpu are free; end and 150 + 60 + 60 in its containers do not fit",
    ),
    (
        "whole GPUs and a part beside others",
        demand(50, 150, 100),
        node(gpu(0, 0), gpu(1, 0), gpu(2, 0), rule="whole_gpus"),
        Obstacle.NONE,
        "300 of",
    ),
    (
        "two requests of whole GPUs",
        demand(200, 110),
        node(*(gpu(n, 0) for n in range(3)), gpu(3, 95), gpu(4, 95), rule="whole_gpus"),
        Obstacle.FRAGMENTED,
        "200 + 110 in its containers do not fit",
    ),
    (
        "shares of any GPUs",
        demand(70),
        node(gpu(0, 70), gpu(1, 60), rule="any"),
        Obstacle.NONE,
        "70 of",
    ),
    ("too large", demand(101), node(gpu(0, 0)), Obstacle.TOO_LARGE, "can get at most 100"),
    (
        "a cordoned GPU",
        demand(80),
        node(gpu(0, 60), gpu(1, 0, 0, cordon={"reason": "fan"})),
        Obstacle.OUT_OF_SERVICE,
        "GPU 1 is cordoned: fan",
    ),
    (
        "a GPU out of service",
        demand(80),
        node(gpu(0, 60), gpu(1, 0, 0, healthy=False, reason="XID 79")),
        Obstacle.OUT_OF_SERVICE,
        "GPU 1 is out of service: XID 79",
    ),
    (
        "another resource",
        demand(1, resource=GPUS),
        node(gpu(0, 0), labels={"metagpu.io/config": "slices"}),
        Obstacle.NOT_OFFERED,
        "does not offer nvidia.com/gpu, by its profile slices; it offers cnvrg.io/metagpu",
    ),
    (
        "compute of a backend that shares time",
        demand(30, resource="nvidia.com/gpucores"),
        node(gpu(0, 0)),
        Obstacle.NOT_OFFERED,
        "does not offer nvidia.com/gpucores; it offers cnvrg.io/metagpu",
    ),
    (
        "a competing plugin",
        demand(1),
        node(gpu(0, 0), report={"competingPlugins": {SHARES: "nvidia.sock"}}),
        Obstacle.COMPETING_PLUGIN,
        "another device plugin (nvidia.sock)",
    ),
    (
        "a Node that lags",
        demand(30),
        node(gpu(0, 0), allocatable={SHARES: 10}),
        Obstacle.NODE_AMOUNT,
        "the Node counts 10 in all",
    ),
    (
        "other pods have the Node's amount",
        demand(30),
        node(gpu(0, 60), allocatable={SHARES: 80}),
        Obstacle.NODE_AMOUNT,
        "the Node counts 80 in all, and pods hold 60",
    ),
    ("a cordoned node", demand(1), node(gpu(0, 0), unschedulable=True), Obstacle.NODE_CORDONED, ""),
    ("a taint", demand(1), node(gpu(0, 0), taints=(TAINT,)), Obstacle.TAINT, "team=a:NoSchedule"),
    (
        "a tolerated taint",
        demand(1, tolerations=[{"key": "team", "operator": "Exists"}]),
        node(gpu(0, 0), taints=(TAINT,)),
        Obstacle.NONE,
        "",
    ),
    (
        "a node selector",
        demand(1, nodeSelector={"zone": "a"}),
        node(gpu(0, 0), labels={"zone": "b"}),
        Obstacle.LABELS,
        "zone=a",
    ),
    (
        "an affinity",
        demand(1, affinity=AFFINITY),
        node(gpu(0, 0), labels={"gen": "7"}),
        Obstacle.LABELS,
        "gen Gt (7)",
    ),
    (
        "an affinity's second term",
        demand(1, affinity=AFFINITY),
        node(gpu(0, 0), labels={"zone": "c"}),
        Obstacle.NONE,
        "",
    ),
    ("a device of a class", demand(1, 1, resource=GPUS), by_dra(2, GPUS), Obstacle.NONE, "2 of"),
    (
        "more devices than are free",
        demand(1, 2, resource=GPUS),
        by_dra(2, GPUS),
        Obstacle.FULL,
        "2 devices of nvidia.com/gpu are free, and 3 different ones are requested",
    ),
    (
        "no class",
        demand(1, resource=GPUS),
        by_dra(2, SHARES),
        Obstacle.NOT_OFFERED,
        "no DeviceClass has this name; end ask by a ResourceClaim",
    ),
    (
        "a device of a claim",
        claiming({"exactly": of_class("gpu")}),
        DEVICES,
        Obstacle.NONE,
        "1 of 2 devices of gpu.metagpu.io are free",
    ),
    (
        "more devices of a claim than are free",
        claiming({"exactly": of_class("gpu", 2)}),
        DEVICES,
        Obstacle.FULL,
        "1 of 2 devices of gpu.metagpu.io are free, and 2 are requested",
    ),
    (
        "more memory in a claim than one device has",
        claiming({"exactly": of_class("fraction", memory="11Gi")}),
        DEVICES,
        Obstacle.FULL,
        "is 10240 MiB, and 11264 MiB are requested; end request at most 10240 MiB",
    ),
    (
        "an alternative of a claim",
        claiming({"firstAvailable": [of_class("mig"), of_class("fraction", memory="9Gi")]}),
        DEVICES,
        Obstacle.NONE,
        "2 of 2 devices of fraction.metagpu.io are free, the largest part is 10240 MiB",
    ),
    (
        "the nearer of two alternatives",
        claiming({"firstAvailable": [of_class("mig"), of_class("gpu", 2)]}),
        DEVICES,
        Obstacle.FULL,
        "2 are requested",
    ),
    (
        "a class that no GPU of the node has",
        claiming({"exactly": of_class("mig")}),
        DEVICES,
        Obstacle.NOT_OFFERED,
        "no devices of mig.metagpu.io are offered there",
    ),
    ("no daemon", demand(1), ClusterNode("gpu-1"), Obstacle.NO_DAEMON, "metagpu does not run"),
    (
        "no answer",
        demand(1),
        ClusterNode("gpu-1", problem="no answer within 5 s"),
        Obstacle.NO_ANSWER,
        "no answer within 5 s",
    ),
]


@pytest.mark.parametrize(
    ("pod", "at", "obstacle", "text"),
    [other[1:] for other in CASES],
    ids=[other[0] for other in CASES],
)
def test_a_pod_and_a_node(pod: PodDemand, at: ClusterNode, obstacle: Obstacle, text: str) -> None:
    """Each obstacle has its sentence, and a pod that fits has what is free."""
    judged = judge(pod, at)
    assert judged.obstacle is obstacle
    for part in text.split("; end "):
        assert part in f"{judged.reason} {judged.fix}"


def test_a_claim_of_others_asks_metagpu_for_nothing() -> None:
    """Another driver's class, and a look at a GPU, are no demand on a node of ours."""
    for request in (of_class("foreign"), {**of_class("gpu"), "adminAccess": True}):
        assert not claiming({"exactly": request}).devices


def test_the_nearest_node_speaks_for_the_cluster() -> None:
    """Of many nodes, the one with the least to change has the sentence and the fix."""
    near = node(gpu(0, 70), gpu(1, 60))
    far = replace(node(gpu(0, 0), taints=(TAINT,)), name="gpu-2")
    judged = judge_all(demand(50), [far, near])
    reason, sentence, fix = conclude(demand(50), judged)
    assert reason is PodReason.FITS_NOWHERE
    assert [judgement.node for judgement in judged] == ["gpu-1", "gpu-2"]
    assert "of 2 the nearest is gpu-1" in sentence
    assert "request at most 40" in fix
    control_plane = ClusterNode("control", taints=(TAINT,))  # without metagpu it is never near
    assert judge_all(demand(101), [control_plane, near])[0].node == "gpu-1"
    room = replace(node(gpu(0, 0)), name="gpu-3")
    assert conclude(demand(50), judge_all(demand(50), [far, near, room]))[1].startswith(
        "fits on node gpu-3"
    )
    assert conclude(demand(), [])[:2] == (
        PodReason.NO_REQUEST,
        "the pod requests no GPU resource",
    )
    claiming = demand(resourceClaims=[{"name": "gpu", "resourceClaimName": "a"}])
    assert "(gpu) request no device of metagpu" in conclude(claiming, [])[1]


def test_init_containers_count_where_they_need_more() -> None:
    """An init container counts where it is larger; a sidecar counts beside the others."""
    limits = {"resources": {"limits": {SHARES: "40"}}}
    init = [{"name": "init", **limits}, {"name": "side", "restartPolicy": "Always", **limits}]
    assert demand(30, initContainers=init).totals == {SHARES: 80}
    with pytest.raises(MetagpuError, match="'a' is not a whole number"):
        demand_of({"spec": {"containers": [{"resources": {"limits": {SHARES: "a"}}}]}})


def test_quotas() -> None:
    """A quota that is used up has its sentence; one of another resource has none."""
    status = {"hard": {f"requests.{SHARES}": "50"}, "used": {f"requests.{SHARES}": "30"}}
    quota = {"metadata": {"name": "gpus"}, "status": status}
    assert exceeded_quota(demand(20), [quota], is_new=True) is None
    assert exceeded_quota(demand(21), [quota], is_new=False) is None  # it is counted already
    found = exceeded_quota(demand(21), [quota], is_new=True)
    assert found is not None
    reason, sentence, fix = found
    assert reason is PodReason.QUOTA_EXCEEDED
    assert "allows 50" in sentence
    assert "request at most 20" in fix


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize(
    ("wanted", "left", "exceeded"),
    [
        ({"exactly": of_class("fraction", 2)}, 2, False),
        ({"exactly": of_class("fraction", 2)}, 1, True),
        ({"exactly": {**of_class("fraction", 1), "allocationMode": "All"}}, 31, True),
        ({"exactly": {**of_class("fraction", 1), "allocationMode": "All"}}, 32, False),
        ({"firstAvailable": [of_class("mig", 4), of_class("fraction", 2)]}, 2, False),
        ({"firstAvailable": [of_class("mig", 4), of_class("fraction", 2)]}, 1, True),
        ({"firstAvailable": [of_class("fraction", 1), of_class("fraction", 3)]}, 2, True),
    ],
)
def test_quotas_of_devices(
    wanted: Mapping[str, Any], left: int, *, exceeded: bool, is_new: bool
) -> None:
    """Devices of claims are counted by their class, once their claim is created."""
    key = "fraction.metagpu.io.deviceclass.resource.k8s.io/devices"
    status = {"hard": {key: "40"}, "used": {key: str(40 - left)}}
    quota = {"metadata": {"name": "devices"}, "status": status}
    pod = claiming(wanted)
    assert exceeded_quota(pod, [quota], is_new=is_new) is None  # a claim by name exists
    found = exceeded_quota(replace(pod, new_claims=("gpu",)), [quota], is_new=is_new)
    assert (found is not None) == exceeded
    if found is not None:
        reason, sentence, fix = found
        assert reason is PodReason.QUOTA_EXCEEDED
        assert f"allows 40 devices of fraction.metagpu.io; {40 - left} are used" in sentence
        assert f"request at most {left}, delete ResourceClaims" in fix


def test_claims_are_new_until_the_pod_has_them() -> None:
    """A template's claim is counted until it exists; one that the pod names is another's."""
    claims = [
        {"name": "a", "resourceClaimTemplateName": "t"},
        {"name": "b", "resourceClaimTemplateName": "t"},
        {"name": "c", "resourceClaimName": "shared"},
    ]
    pod = {"spec": {"resourceClaims": claims}}
    assert demand_of(pod).new_claims == ("a", "b")
    status = {"resourceClaimStatuses": [{"name": "a", "resourceClaimName": "pod-a-x"}]}
    assert demand_of({**pod, "status": status}).new_claims == ("b",)


def test_a_manifest_has_other_objects_beside_its_pods() -> None:
    """A Service, a ConfigMap and the like have no pod, and are no error."""
    documents = [
        KubeDocument("a.yaml", "document 1", {"kind": "Service", "spec": {}}),
        KubeDocument(
            "a.yaml", "document 2", {"kind": "Pod", "metadata": {"name": "a"}, "spec": {}}
        ),
    ]
    assert [pod["metadata"] for pod in pods_in(documents)] == [{"name": "a"}]
