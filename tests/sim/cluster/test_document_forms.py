"""Objects that people give to the simulated cluster: a mistake is an answer, and ends nothing."""

from collections.abc import Mapping
from typing import Any

import pytest

from metagpu.sim.apiserver.objects import KINDS
from metagpu.sim.cluster.claim_manifest import claim_with_pod
from metagpu.sim.cluster.claim_scheduler import ClaimScheduler
from metagpu.sim.cluster.document_forms import check_document
from metagpu.sim.cluster.pod_objects import kubelet_pod, remaining_time, requests_of
from metagpu.sim.machine.gpu import SimError

GPU = "gpu.metagpu.io"


def document(kind: str, spec: object, **metadata: object) -> Mapping[str, Any]:
    """Return an object with the name `a`."""
    return {"kind": kind, "metadata": {"name": "a", **metadata}, "spec": spec}


def claim(**request: object) -> Mapping[str, Any]:
    """Return a ResourceClaim of one request."""
    return document("ResourceClaim", {"devices": {"requests": [{"name": "gpu", **request}]}})


def exactly(**fields: object) -> Mapping[str, Any]:
    """Return a ResourceClaim of one request for devices of a class."""
    return claim(exactly={"deviceClassName": GPU, **fields})


def pod(**container: object) -> Mapping[str, Any]:
    """Return a Pod of one container."""
    return document("Pod", {"containers": [{"name": "main", **container}]})


def workload(kind: str, **spec: object) -> Mapping[str, Any]:
    """Return a workload of pods with one container."""
    template = {"metadata": {"labels": {"app": "a"}}, "spec": {"containers": [{"name": "main"}]}}
    return document(kind, {"template": template, **spec})


@pytest.mark.parametrize(
    "entry",
    [
        exactly(),
        {**claim(deviceClassName=GPU, count=2), "apiVersion": "resource.k8s.io/v1beta1"},
        {**exactly(), "apiVersion": "resource.k8s.io/v1beta2"},
        exactly(count=2, capacity={"requests": {"shares": 50, "memory": "10Gi"}}),
        exactly(allocationMode="All", tolerations=[{"key": "k", "operator": "Exists"}]),
        claim(firstAvailable=[{"name": "a", "deviceClassName": GPU, "count": 1}]),
        document("ResourceClaim", {}),
        document("ResourceClaimTemplate", {"spec": exactly()["spec"]}),
        document("DeviceClass", {"selectors": [{"cel": {"expression": "true"}}], "config": []}),
        pod(resources={"requests": {"cpu": "500m", "x.y/z": 1}, "limits": {"x.y/z": "1"}}),
        workload("Deployment", selector={"matchLabels": {"app": "a"}}),
        workload("Job", parallelism=2),
        document("Secret", None, name="a.b"),
        document("ClusterRole", None, name="system:reader"),
        *claim_with_pod("a", {"exactly": {"deviceClassName": GPU}}),
    ],
)
def test_what_kubernetes_takes_is_taken(entry: Mapping[str, Any]) -> None:
    """Fields that nothing here reads are taken too."""
    check_document({"apiVersion": KINDS[entry["kind"]].api, **entry, "status": {}})


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (claim(deviceClassName=GPU), "either `exactly` or `firstAvailable`"),
        (claim(exactly={}), "missing required field `deviceClassName`"),
        (exactly(count="many"), "$.devices.requests[0].exactly.count"),
        (exactly(selectors=[{"cel": "true"}]), "$.devices.requests[0].exactly.selectors[0].cel"),
        (exactly(capacity={"requests": ["x"]}), "exactly.capacity.requests"),
        (claim(firstAvailable=[{"deviceClassName": GPU}]), "missing required field `name`"),
        (document("ResourceClaim", {"devices": {"requests": "x"}}), "$.devices.requests"),
        (document("ResourceClaim", None), "the spec of the ResourceClaim a: Expected `object`"),
        (document("ResourceClaimTemplate", {}), "missing required field `spec`"),
        (document("Pod", {"containers": []}), "length >= 1 - at `$.containers`"),
        (pod(resources={"requests": {"x.y/z": "1k"}}), "'1k' is not a number of x.y/z"),
        (document("RayCluster", {}), "of the kind 'RayCluster'; taken are Pod, Namespace"),
        (document("Node", {}), "of the kind 'Node'; taken are Pod, Namespace"),
        ({**exactly(), "apiVersion": "resource.k8s.io/v1alpha3"}, "write resource.k8s.io/v1"),
        (pod(resources={"limits": {"x.y/z": "half"}}), "'half' is not a number of x.y/z"),
        (
            pod(resources={"limits": {"x.y/z": 2}, "requests": {"x.y/z": 1}}),
            "the request for x.y/z is 1, its limit 2",
        ),
        (pod(resources={"claims": [{"name": "gpu"}]}), "container main: no gpu in `resourceC"),
        (
            document("Pod", {"containers": [{"name": "c"}], "resourceClaims": [{"name": "g"}]}),
            "the claim g has either `resourceClaimName` or `resourceClaimTemplateName`",
        ),
        (workload("Job", template={"spec": {}}), "`containers` - at `$.template.spec`"),
        (workload("ReplicaSet", replicas=-1), "`int` >= 0 - at `$.replicas`"),
        (
            workload("Deployment", selector={"matchLabels": {"app": "b"}}),
            "the selector does not match the labels of the pod template",
        ),
        (document("Pod", {}, name=""), "the Pod cannot be named ''"),
        (document("Secret", None, ownerReferences=[{"controller": True}]), "ownerReferences[0]"),
        (document("Secret", None, ownerReferences=["a"]), "$.metadata.ownerReferences[0]"),
        ({"kind": "Pod", "metadata": "a"}, "$.metadata"),
        ({"kind": ["Pod"]}, "$.kind"),
    ],
)
def test_what_is_not_read_is_refused(entry: Mapping[str, Any], problem: str) -> None:
    """The error has the path of the field."""
    with pytest.raises(SimError) as error:
        check_document(entry)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    "entry",
    [claim(deviceClassName=GPU), exactly(count="many"), exactly(count=[]), claim(exactly=[])],
)
def test_a_claim_that_is_not_read_concerns_its_pods_alone(entry: Mapping[str, Any]) -> None:
    """A claim of an earlier version, which is saved, or of a client of the API server, does too."""
    key = ("resourceclaims", "default", "a")
    metadata = {"name": "a", "namespace": "default", "uid": "u"}
    uses = [{"name": "gpu", "resourceClaimName": "a"}]
    spec = {"containers": [{"name": "main"}], "resourceClaims": uses}
    round_ = ClaimScheduler("n1", {key: {**entry, "metadata": metadata}})
    fit = round_.fit({"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}})
    assert fit.problem
    assert not fit.changes


def test_pods_of_files_need_no_form_of_ours() -> None:
    """Amounts of processors are not counted, and a command that is not read never ends."""
    requests = {"cpu": "500m", "memory": "1Gi", "x.y/z": "2"}
    entry = {**pod(command=["sleep", "1h"], resources={"requests": requests}), "status": {}}
    assert requests_of(entry) == {"x.y/z": 2}
    assert remaining_time(entry, 0) is None


def test_init_containers_count_as_the_scheduler_counts_them() -> None:
    """An ordinary one counts while it runs, and a sidecar as long as the pod."""

    def asking(count: int, **more: str) -> Mapping[str, Any]:
        return {"name": f"c{count}", "resources": {"requests": {"x.y/z": str(count)}}, **more}

    spec = {
        "initContainers": [asking(2, restartPolicy="Always"), asking(7)],
        "containers": [asking(4)],
    }
    metadata = {"name": "a", "namespace": "default", "uid": "u"}
    entry = {"metadata": metadata, "spec": spec, "status": {}}
    assert requests_of(entry) == {"x.y/z": 9}
    assert [each.restartable for each in kubelet_pod(entry).init_containers] == [True, False]
