"""Pods in custom resources: found wherever they stand, translated, and what is left is said."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from metagpu.compat.kube_documents import KubeDocument
from metagpu.kubectl.pod_places import places_in
from metagpu.kubectl.pods import pods_in
from tests.kubectl.test_translate import nodes_file, run, written
from tests.translation.nodes import node, pod

NODE = node("a", "a100-40gb")
ASKED = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 8000}
SHARES = {"cnvrg.io/metagpu": "20"}
LIMITS = {"limits": ASKED}


def template(name: str = "main") -> dict[str, Any]:
    """Return a pod template that asks for a part of a GPU."""
    return {"spec": {"containers": [{"name": name, "image": "x", "resources": LIMITS}]}}


def custom(api: str, kind: str, **spec: object) -> dict[str, Any]:
    """Return a custom resource."""
    return {"apiVersion": api, "kind": kind, "metadata": {"name": "it"}, "spec": spec}


PLAIN = {"spec": {"containers": [{"name": "head", "image": "x"}]}}
RAY = custom(
    "ray.io/v1",
    "RayCluster",
    headGroupSpec={"rayStartParams": {}, "template": PLAIN},
    workerGroupSpecs=[{"groupName": "gpu", "rayStartParams": {}, "template": template()}],
)
MODEL = {"model": {"modelFormat": {"name": "huggingface"}, "resources": LIMITS}}
SERVICE = custom("serving.kserve.io/v1beta1", "InferenceService", predictor=MODEL)
CUSTOM: Sequence[tuple[dict[str, Any], int]] = (
    (RAY, 1),
    (custom("batch.volcano.sh/v1alpha1", "Job", tasks=[{"template": template()}] * 2), 2),
    (
        custom(
            "kubeflow.org/v1",
            "PyTorchJob",
            pytorchReplicaSpecs={"Master": {"template": template()}, "Worker": {"template": PLAIN}},
        ),
        1,
    ),
    (
        custom(
            "leaderworkerset.x-k8s.io/v1",
            "LeaderWorkerSet",
            leaderWorkerTemplate={"size": 2, "workerTemplate": template()},
        ),
        1,
    ),
    (custom("kubeflow.org/v1", "Notebook", template=template()), 1),
    (
        custom(
            "jobset.x-k8s.io/v1alpha2",
            "JobSet",
            replicatedJobs=[{"template": {"spec": {"template": template()}}}],
        ),
        1,
    ),
    (SERVICE, 1),
    (custom("serving.kserve.io/v1beta1", "InferenceService", predictor=template()["spec"]), 1),
    (custom("serving.kserve.io/v1alpha1", "ServingRuntime", **template()["spec"]), 1),
    (custom("serving.kserve.io/v1alpha1", "LLMInferenceService", template=template()["spec"]), 1),
)  # fmt: skip


def amounts(value: object) -> list[Mapping[str, Any]]:
    """Return each `limits` in a value."""
    if isinstance(value, list):
        return [found for entry in value for found in amounts(entry)]
    if not isinstance(value, dict):
        return []
    own = [value["limits"]] if "limits" in value else []
    return own + [found for entry in value.values() for found in amounts(entry)]


@pytest.mark.parametrize(("document", "pods"), CUSTOM, ids=lambda value: str(value)[:60])
def test_pods_of_custom_resources_are_translated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: dict[str, Any], pods: int
) -> None:
    """All of them ask for shares, the rest stays, and the second time nothing changes."""
    nodes = nodes_file(tmp_path, NODE)
    listed = {"apiVersion": "v1", "kind": "List", "items": [document]}
    status, out, err = run(capsys, written(tmp_path, listed), nodes)
    found = yaml.safe_load(out)

    assert (status, amounts(found)) == (0, [SHARES] * pods), err
    assert "gpumem" not in err
    status, again, _ = run(capsys, written(tmp_path, found), nodes)
    assert (status, yaml.safe_load(again)) == (0, found)
    assert {**found, "spec": 0} == {**document, "spec": 0}


def test_kserves_model_may_ask_by_annotations_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model gets the resources, though it had none, and the annotation goes."""
    predictor = {"annotations": {"gpu-fraction": "0.5"}, "model": {"storageUri": "hf://a/b"}}
    service = custom("serving.kserve.io/v1beta1", "InferenceService", predictor=predictor)
    status, out, _ = run(capsys, written(tmp_path, service), nodes_file(tmp_path, NODE))
    found = yaml.safe_load(out)["spec"]["predictor"]

    assert status == 0
    assert found["model"] == {
        "storageUri": "hf://a/b",
        "resources": {"limits": {"cnvrg.io/metagpu": "50"}},
    }
    assert [*found["annotations"]] == ["metagpu.io/original-request"]


def test_kserves_annotations_stand_where_its_pods_get_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shares of two GPUs need an annotation, and a predictor has no metadata."""
    two = {"resources": {"limits": {**ASKED, "nvidia.com/gpu": 2}}}
    services = [
        custom("serving.kserve.io/v1beta1", "InferenceService", predictor={"model": two}),
        custom(
            "serving.kserve.io/v1alpha1",
            "LLMInferenceService",
            template={"containers": [{"name": "main", **two}]},
        ),
    ]
    _, out, _ = run(capsys, written(tmp_path, *services), nodes_file(tmp_path, NODE))
    service, llm = (document["spec"] for document in yaml.safe_load_all(out))

    assert service["predictor"]["annotations"]["gpus.metagpu.io/kserve-container"] == "2"
    assert llm["annotations"]["gpus.metagpu.io/main"] == "2"
    assert "affinity" in service["predictor"]
    assert "affinity" in llm["template"]


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (
            custom("argoproj.io/v1", "Workflow", templates=[{"container": {"resources": LIMITS}}]),
            "nvidia.com/gpumem at spec.templates[0].container.resources.limits is not translated",
        ),
        (
            custom("x.io/v1", "Train", annotations={"gpu-fraction": "0.5"}),
            "gpu-fraction at spec.annotations is not translated",
        ),
        (
            custom("kueue.x-k8s.io/v1beta1", "ClusterQueue", covered=["nvidia.com/gpumem"]),
            "write cnvrg.io/metagpu in its place",
        ),
        (
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "it"},
                "spec": {"hard": {"limits.nvidia.com/gpumem": "6k"}},
            },
            "for it: write requests.cnvrg.io/metagpu: 15 (409 MiB each) in its place",
        ),
    ],
)  # fmt: skip
def test_what_is_outside_of_pods_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    document: dict[str, Any],
    sentence: str,
) -> None:
    """A name that is in no pod stays, and fails the command with where it is and what to write."""
    status, out, err = run(capsys, written(tmp_path, document), nodes_file(tmp_path, NODE))

    assert (status, yaml.safe_load(out)) == (1, document)
    assert sentence in err


def test_names_of_nodes_are_no_names_of_hamis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names ask for nothing in a status, a taint or a label, nor where nodes count them."""
    labels = {"nvidia.com/gpu": "true"}
    taint = {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}], "labels": labels}
    pool = written(tmp_path, custom("karpenter.sh/v1", "NodePool", template=taint))
    assert run(capsys, pool, nodes_file(tmp_path, NODE))[::2] == (0, "")

    quota = custom("v1", "ResourceQuota", hard={"requests.nvidia.com/gpu": 2})
    quota["status"] = {"used": {"nvidia.com/gpumem": 1}}
    whole = node("w", "a100-40gb", "whole", more="resource: nvidia.com/gpu")

    assert run(capsys, written(tmp_path, quota), nodes_file(tmp_path, whole))[::2] == (0, "")


@pytest.mark.parametrize(
    ("asked", "params", "expected"),
    [
        (ASKED, {}, "1"),
        ({**ASKED, "nvidia.com/gpu": 2}, {}, "2"),
        ({"nvidia.com/gpu": 2}, {}, "2"),
        ({"cnvrg.io/metagpu": 50}, {}, "1"),  # written for shares already
        ({"cnvrg.io/metagpu": 50}, {"num-gpus": "3"}, "3"),
        ({"cpu": 1}, {}, None),
    ],
)
def test_ray_counts_gpus_and_not_shares(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    asked: Mapping[str, object],
    params: Mapping[str, str],
    expected: str | None,
) -> None:
    """KubeRay would take 20 shares for 20 GPUs: their number is written where the user has none."""
    worker = template()
    worker["spec"]["containers"][0]["resources"] = {"limits": dict(asked)}
    group = {"groupName": "gpu", "rayStartParams": dict(params), "template": worker}
    cluster = custom("ray.io/v1", "RayCluster", workerGroupSpecs=[group])
    status, out, err = run(capsys, written(tmp_path, cluster), nodes_file(tmp_path, NODE))
    [found] = yaml.safe_load(out)["spec"]["workerGroupSpecs"]

    assert (status, found["rayStartParams"].get("num-gpus")) == (0, expected)
    assert ("rayStartParams gets num-gpus" in err) == (expected is not None and not params)


def test_ray_counts_the_devices_of_claims(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """KubeRay reads no claim: the number of its devices is written for Ray."""
    worker = template()
    worker["spec"]["containers"][0]["resources"] = {"limits": {**ASKED, "nvidia.com/gpu": 2}}
    cluster = custom("ray.io/v1", "RayCluster", workerGroupSpecs=[{"template": worker}])
    manifest, nodes = written(tmp_path, cluster), nodes_file(tmp_path, NODE)
    _, found = yaml.safe_load_all(run(capsys, manifest, nodes, "--claims")[1])

    assert found["spec"]["workerGroupSpecs"][0]["rayStartParams"] == {"num-gpus": "2"}


@pytest.mark.parametrize("name", ["nvidia.com/mig-2g.10gb", "nvidia.com/gpu"])
def test_ray_counts_instances_and_whole_gpus_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """KubeRay reads these names and their numbers right."""
    instances = node("a", "a100-pcie-40gb", "mig")
    whole = node("w", "a100-40gb", "whole", more="resource: nvidia.com/gpu")
    worker = template()
    worker["spec"]["containers"][0]["resources"] = {"limits": {name: 2}}
    cluster = custom("ray.io/v1", "RayCluster", headGroupSpec={"template": worker})
    nodes = nodes_file(tmp_path, instances, whole)

    assert run(capsys, written(tmp_path, cluster), nodes)[::2] == (0, "")


def test_each_pod_of_an_object_is_named_by_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sentences, tables and claims tell the pods of an object apart."""
    worker, head = template(), template()
    for document, memory in ((worker, 90000), (head, 8000)):
        document["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpumem": memory}}
    job = custom(
        "batch.volcano.sh/v1alpha1", "Job", tasks=[{"template": head}, {"template": worker}]
    )
    manifest, nodes = written(tmp_path, job), nodes_file(tmp_path, NODE)
    status, out, err = run(capsys, manifest, nodes, "--claims")
    claim, _ = yaml.safe_load_all(out)

    assert status == 1
    assert "Job it, spec.tasks[1].template: container main: 90000 MiB" in err
    assert claim["metadata"]["name"] == "it-job-gpus"
    assert "Job it, spec.tasks[0].template" in run(capsys, manifest, nodes, "--explain")[1]


def test_fit_reads_the_same_pods() -> None:
    """Each pod has the name of its object, and its place among several."""
    read = [pods_in([KubeDocument("-", "document 1", document)]) for document in (RAY, SERVICE)]

    assert [[other["metadata"]["name"] for other in pods] for pods in read] == [
        ["it spec.headGroupSpec.template", "it spec.workerGroupSpecs[0].template"],
        ["it"],
    ]


def test_a_pod_is_found_once_and_a_schema_is_none() -> None:
    """A schema, or an object that only looks like a template, has no pod."""
    schema = {"spec": {"properties": {"spec": {"containers": {"type": "array"}}}}}
    sidecars = custom("apps.kruise.io/v1alpha1", "SidecarSet", containers=[{"name": "a"}])

    assert [place.path for place in places_in(pod(ASKED))] == [()]
    assert places_in({"kind": "CustomResourceDefinition", **schema}) == []
    assert places_in(sidecars) == []
