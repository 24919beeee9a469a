"""`kubectl metagpu translate`: manifests, nodes from a file and from the API server."""

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from metagpu.kubectl.pod_places import places_in
from metagpu.kubectl.program import main
from metagpu.plugins.cluster.gpu_labels import LabelSettings, node_labels
from metagpu.translation.values import NodeOffer
from tests.backends.mig.gpus import mig_gpu
from tests.kubectl.test_program import cluster
from tests.rigs.agent import METAGPU
from tests.rigs.build import gpu as build_gpu
from tests.rigs.build import offered
from tests.sim.allocation.slices import found, published
from tests.translation.nodes import node, pod

SEED = {"nvidia.com/gpu": 2, "nvidia.com/gpumem": 8000}
MIG = node("a100", "a100-pcie-40gb", "mig")
CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}}


def node_object(offer: NodeOffer) -> Mapping[str, object]:
    """Return a Node as the API has it."""
    amounts = {"cpu": "8", "memory": "64Gi"} | {
        key: str(count) for key, count in offer.allocatable.items()
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": offer.name, "labels": dict(offer.labels)},
        "status": {"allocatable": amounts},
    }


def workload(kind: str) -> dict[str, Any]:
    """Return a workload with the seed's pod as its template."""
    template = {key: value for key, value in pod(SEED).items() if key in ("metadata", "spec")}
    spec = {"replicas": 3, "template": template}
    if kind == "CronJob":
        spec = {"schedule": "@daily", "jobTemplate": {"spec": spec}}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": "work"}, "spec": spec}


def written(folder: Path, *documents: object) -> Path:
    """Write a manifest of several documents."""
    file = folder / "manifest.yaml"
    file.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    return file


def nodes_file(folder: Path, *offers: NodeOffer, form: str = "json") -> Path:
    """Write what `kubectl get nodes -o` prints."""
    file, items = folder / f"nodes.{form}", [node_object(offer) for offer in offers]
    listed = {"apiVersion": "v1", "kind": "List", "items": items}
    text = json.dumps(listed) if form == "json" else yaml.safe_dump(listed)
    file.write_text(text, encoding="utf-8")
    return file


def run(
    capsys: pytest.CaptureFixture[str], manifest: Path, nodes: Path, *more: str
) -> tuple[int, str, str]:
    """Run the command without a cluster; return its status and its output."""
    status = main(["translate", "-f", str(manifest), "--nodes", str(nodes), *more])
    return status, *capsys.readouterr()


def containers(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the containers of an object with a pod."""
    spec = document["spec"]
    if "jobTemplate" in spec:
        spec = spec["jobTemplate"]["spec"]
    found = spec.get("template", document)["spec"]["containers"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_every_pod_of_a_manifest_is_translated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """Pods and the templates of workloads ask for instances; other objects stay."""
    kinds = ("Deployment", "Job", "StatefulSet", "CronJob")
    documents = [pod(SEED), CONFIG_MAP, *map(workload, kinds)]
    status, out, err = run(
        capsys, written(tmp_path, *documents), nodes_file(tmp_path, MIG, form=form)
    )
    found = list(yaml.safe_load_all(out))

    assert (status, err) == (0, "")
    assert [entry["kind"] for entry in found] == ["Pod", "ConfigMap", *kinds]
    assert found[1] == CONFIG_MAP
    for document in (found[0], *found[2:]):
        assert containers(document)[0]["resources"] == {"limits": {"nvidia.com/mig-2g.10gb": "2"}}
    assert found[2]["spec"]["replicas"] == 3


def test_the_output_translates_to_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON comes out as one object or a List, and goes in again by stdin, unchanged."""
    nodes = nodes_file(tmp_path, MIG)
    manifest = written(tmp_path, pod(SEED), CONFIG_MAP)
    _, once, _ = run(capsys, manifest, nodes, "-o", "json")
    monkeypatch.setattr("sys.stdin", io.StringIO(once))
    _, twice, _ = run(capsys, Path("-"), nodes, "-o", "json")

    assert json.loads(once)["kind"] == "List"
    assert once == twice
    _, single, _ = run(capsys, written(tmp_path, pod(SEED)), nodes, "-o", "json")
    assert json.loads(single)["kind"] == "Pod"


def test_an_anchor_is_a_value_of_each_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two containers of one `&anchor` are translated one by one; the second removal failed."""
    asked = pod(SEED, SEED)
    first, second = asked["spec"]["containers"]
    second["resources"] = first["resources"]
    manifest = written(tmp_path, asked)
    assert "&id001" in manifest.read_text(encoding="utf-8")
    status, out, err = run(capsys, manifest, nodes_file(tmp_path, MIG))

    assert (status, err) == (0, "")
    assert [container["resources"] for container in containers(yaml.safe_load(out))] == [
        {"limits": {"nvidia.com/mig-2g.10gb": "2"}}
    ] * 2


def test_an_impossible_pod_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is 1, stderr has what would fit, and the pod is printed as it was."""
    asked = pod({"nvidia.com/gpumem": 90000})
    status, out, err = run(capsys, written(tmp_path, asked), nodes_file(tmp_path, MIG))

    assert status == 1
    assert err.startswith("kubectl metagpu: Pod gpu-pod1: container c0: 90000 MiB of one GPU")
    assert yaml.safe_load(out) == asked


def test_a_request_that_cannot_be_read_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is 1, stderr has the reason, and the pod is printed as it was."""
    asked = pod({"nvidia.com/gpumem": "8000MiB"})
    status, out, err = run(capsys, written(tmp_path, asked), nodes_file(tmp_path, MIG))

    assert (status, "'8000MiB' is not a whole number" in err) == (1, True)
    assert yaml.safe_load(out) == asked


def test_warnings_are_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning does not fail the command, nor come between the documents."""
    asked = pod({**SEED, "nvidia.com/gpucores": 30})
    status, out, err = run(capsys, written(tmp_path, asked), nodes_file(tmp_path, MIG))

    assert status == 0
    assert "nvidia.com/gpucores: 30 has no effect" in err
    assert containers(yaml.safe_load(out))


def test_order_and_policy_are_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The order of techniques decides where a pod names none; an unknown one is refused."""
    manifest = written(tmp_path, pod(SEED))
    nodes = nodes_file(tmp_path, MIG, node("b", "a100-40gb"), node("c", "a30", "mig", gpus=8))
    _, fractions, _ = run(capsys, manifest, nodes, "--order", "hami-core,mig")
    _, spread, _ = run(capsys, manifest, nodes, "--policy", "spread")

    assert "cnvrg.io/metagpu: '40'" in fractions
    assert "nvidia.com/mig-2g.12gb: '2'" in spread
    status, _, err = run(capsys, manifest, nodes, "--order", "vgpu")
    assert (status, "'vgpu' names no techniques" in err) == (1, True)


def test_names_are_options_as_those_of_the_webhook(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command is given the names of HAMi's resources by the webhook's options."""
    asked = pod({"volcano.sh/vgpu-number": 2, "volcano.sh/vgpu-memory": 8000})
    names = (
        "--resource-name",
        "volcano.sh/vgpu-number",
        "--resource-mem",
        "volcano.sh/vgpu-memory",
    )
    status, out, _ = run(capsys, written(tmp_path, asked), nodes_file(tmp_path, MIG), *names)

    assert status == 0
    assert containers(yaml.safe_load(out))[0]["resources"] == {
        "limits": {"nvidia.com/mig-2g.10gb": "2"}
    }


def test_vocabularies_are_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A person asks for a translation: all vocabularies are on, and each can be left out."""
    asked = pod({}, annotations={"gpu-fraction": "0.5"})
    manifest, nodes = written(tmp_path, asked, pod(SEED)), nodes_file(tmp_path, MIG)
    _, both, _ = run(capsys, manifest, nodes)
    status, hamis, err = run(capsys, manifest, nodes, "--vocabularies", "hami")
    assert [containers(document)[0]["resources"] for document in yaml.safe_load_all(both)] == [
        {"limits": {"nvidia.com/mig-3g.20gb": "1"}},
        {"limits": {"nvidia.com/mig-2g.10gb": "2"}},
    ]
    assert (status, err, next(yaml.safe_load_all(hamis))) == (0, "", asked)

    assert run(capsys, manifest, nodes, "--vocabularies", "volcano")[0] == 1


def test_explain_shows_what_each_node_would_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each node and technique: the resources, their memory, and which was chosen."""
    asked = pod(SEED, nodeSelector={"nvidia.com/gpu.product": "NVIDIA-A100-PCIE-40GB"})
    nodes = nodes_file(tmp_path, MIG, node("t", "a30"), NodeOffer("plain"))
    status, out, _ = run(capsys, written(tmp_path, asked, CONFIG_MAP), nodes, "--explain")
    lines = out.splitlines()

    assert status == 0
    assert [line.split() for line in lines if line.startswith(" a100 ")] == [
        ["a100", "mig", "2", "of", "nvidia.com/mig-2g.10gb", "19712", "MiB", "3712", "MiB", "yes"]
    ]
    assert any("may not go there" in line for line in lines if line.startswith(" t "))
    assert "apiVersion" not in out


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        ("5:30", "'5:30'"),
        ("12:30:45", "'12:30:45'"),
        ("1:30.5", "'1:30.5'"),
        ("2026-01-02", "'2026-01-02'"),
        ("2026-01-02T03:04:05Z", "'2026-01-02T03:04:05Z'"),
        ("'y'", "'y'"),
        ("'1e3'", "'1e3'"),
        ("'0o17'", "'0o17'"),
        ("'null'", "'null'"),
        ("=", "'='"),
        ("12", "12"),
        ("0644", "420"),
        ("1.5", "1.5"),
        ("true", "true"),
        ("text", "text"),
    ],
)
def test_values_are_those_that_kubectl_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, printed: str
) -> None:
    """A time, a date and a quoted text stay text, and numbers numbers, as YAML and as JSON."""
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(f"kind: ConfigMap\ndata:\n  key: {value}\n", encoding="utf-8")
    nodes = nodes_file(tmp_path, MIG)

    assert run(capsys, manifest, nodes)[1] == f"kind: ConfigMap\ndata:\n  key: {printed}\n"
    _, as_json, _ = run(capsys, manifest, nodes, "-o", "json")
    assert json.loads(as_json)["data"] == yaml.safe_load(f"key: {printed}")


@pytest.mark.parametrize(
    ("items", "printed"),
    [
        ("[]", "items: []"),
        ("[{host: a}]", "items:\n- host: a"),
        ("[{kind: A}, 3]", "items:\n- kind: A\n- 3"),
    ],
)
def test_a_custom_kind_of_items_is_no_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], items: str, printed: str
) -> None:
    """The object stays as it is; a list of objects gives them."""
    manifest, about = tmp_path / "manifest.yaml", "apiVersion: example.com/v1\nkind: AllowList\n"
    manifest.write_text(f"{about}items: {items}\n", encoding="utf-8")
    assert run(capsys, manifest, nodes_file(tmp_path, MIG))[1] == f"{about}{printed}\n"
    one = "{apiVersion: example.com/v1, kind: Allow}"
    manifest.write_text(f"{about}items: [{one}]\n", encoding="utf-8")
    printed = run(capsys, manifest, nodes_file(tmp_path, MIG))[1]
    assert printed == about.replace("AllowList", "Allow")


def test_keys_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers and truth values become what kubectl makes of them; none takes another's place."""
    manifest, nodes = tmp_path / "manifest.yaml", nodes_file(tmp_path, MIG)
    data = "&a {1: one, true: tru, 0x10: hex, 1.5: half, 2.0: two, no: never}"
    manifest.write_text(f"kind: ConfigMap\ndata: {data}\nmore: {{<<: *a}}\n", encoding="utf-8")
    expected = {"1": "one", "true": "tru", "16": "hex", "1.5": "half", "2": "two", "false": "never"}
    for read in (
        yaml.safe_load(run(capsys, manifest, nodes)[1]),
        json.loads(run(capsys, manifest, nodes, "-o", "json")[1]),
    ):
        assert read == {"kind": "ConfigMap", "data": expected, "more": expected}


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("containers: {name: a}", "Pod p: not as a pod has it: Expected `array | null`"),
        ("resourceClaims: [a]", "Pod p: not as a pod has it: Expected `object`, got `str`"),
        ("containers: [a]", "got `str` - at `$.spec.containers[0]`"),
        ("containers: [{resources: {limits: [a]}}]", "at `$.spec.containers[0].resources.limits`"),
        ("nodeSelector: {gpu: true}", "got `bool` - at `$.spec.nodeSelector[...]`"),
        ("affinity: {nodeAffinity: 1}", "at `$.spec.affinity.nodeAffinity`"),
        ("tolerations: 5", "got `int` - at `$.spec.tolerations`"),
        ("tolerations: [a]", "got `str` - at `$.spec.tolerations[0]`"),
        ("tolerations: [{key: [a]}]", "at `$.spec.tolerations[0].key`"),
    ],
)
def test_a_malformed_pod_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: str, sentence: str
) -> None:
    """The line names the file, the object and the place."""
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(f"kind: Pod\nmetadata: {{name: p}}\nspec: {{{spec}}}\n", encoding="utf-8")
    status, out, err = run(capsys, manifest, nodes_file(tmp_path, MIG))

    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"kubectl metagpu: {manifest}: 1: document 1: Pod p: ")
    assert sentence in err


def test_an_annotation_without_a_value_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty mode is no mode."""
    asked = pod(SEED)
    asked["metadata"]["annotations"] = dict.fromkeys(
        ("nvidia.com/vgpu-mode", "hami.io/node-scheduler-policy", "nvidia.com/use-gputype")
    )
    status, out, err = run(capsys, written(tmp_path, asked), nodes_file(tmp_path, MIG))

    assert (status, err) == (0, "")
    assert "nvidia.com/mig-2g.10gb: '2'" in out


async def test_nodes_of_the_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file of nodes, the user's kubeconfig reads them; nothing is created."""
    async with cluster(tmp_path, capsys) as live_cluster:
        fractions = node("gpu-1", "a100-40gb")
        content = {key: part for key, part in node_object(fractions).items() if key != "kind"}
        live_cluster.scene.server.store.put(("nodes", "", "gpu-1"), content)
        asked = pod({"nvidia.com/gpumem": 8000})
        status, out, err = await live_cluster.run("translate", "-f", str(written(tmp_path, asked)))

        assert (status, err) == (0, "")
        assert containers(yaml.safe_load(out))[0]["resources"]["limits"] == {METAGPU: "20"}
        assert "gpu-pod1" not in json.dumps(live_cluster.scene.server.store.dump())


# --- claims ---------------------------------------------------------------------------------------


def claimed(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    asked: object,
    *nodes: NodeOffer,
    more: str = "",
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the template and the object that `--claims` prints."""
    options = ("--claims", *more.split())
    status, out, err = run(capsys, written(folder, asked), nodes_file(folder, *nodes), *options)
    assert (status, err) == (0, "")
    template, document = yaml.safe_load_all(out)
    assert (template["apiVersion"], template["kind"]) == (
        "resource.k8s.io/v1",
        "ResourceClaimTemplate",
    )
    return template, document


def alternatives(template: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return class and selector of each alternative of the only request."""
    [asked] = template["spec"]["spec"]["devices"]["requests"]
    return [
        (
            document["deviceClassName"],
            document["selectors"][0]["cel"]["expression"].partition("'].")[2],
        )
        for document in asked["firstAvailable"]
    ]


def test_claims_have_the_alternatives_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The profile of each model with the least waste comes first, then a fraction."""
    nodes = (MIG, node("b", "a100-40gb"), node("c", "a30", "mig", gpus=8))
    template, document = claimed(capsys, tmp_path, pod(SEED), *nodes)
    [main] = document["spec"]["containers"]
    name = template["metadata"]["name"]

    assert alternatives(template) == [
        ("mig.metagpu.io", "profile == '2g.10gb'"),
        ("mig.metagpu.io", "profile == '2g.12gb'"),
        ("fraction.metagpu.io", "resource == 'cnvrg.io/metagpu'"),
        ("fraction.metagpu.io", "resource == 'cnvrg.io/metagpu'"),
    ]
    [asked] = template["spec"]["spec"]["devices"]["requests"]
    assert {entry["count"] for entry in asked["firstAvailable"]} == {2}
    assert [entry["capacity"]["requests"] for entry in asked["firstAvailable"][2:]] == [
        {"shares": "20"},
        {"memory": "8000Mi"},
    ]
    assert document["spec"]["resourceClaims"] == [
        {"name": "gpus", "resourceClaimTemplateName": name}
    ]
    assert main["resources"] == {"claims": [{"name": "gpus", "request": main["name"]}]}
    assert "affinity" not in document["spec"]


def test_claims_follow_order_and_driver(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--order` decides the order; with NVIDIA's driver its classes and attributes are named."""
    nodes = (MIG, node("b", "a100-40gb"))
    order = "--order hami-core,mig"
    template, _ = claimed(capsys, tmp_path, pod(SEED), *nodes, more=order)
    assert [name for name, _ in alternatives(template)] == [
        "fraction.metagpu.io",
        "fraction.metagpu.io",
        "mig.metagpu.io",
    ]
    nvidia = "--claims-driver gpu.nvidia.com"
    template, _ = claimed(capsys, tmp_path, workload("Deployment"), MIG, more=nvidia)
    [asked] = template["spec"]["spec"]["devices"]["requests"]
    [only] = asked["firstAvailable"]
    assert template["metadata"]["name"] == "work-gpus"
    assert only["deviceClassName"] == "mig.nvidia.com"
    expression = only["selectors"][0]["cel"]["expression"]
    assert expression == "device.attributes['gpu.nvidia.com'].profile == '2g.10gb'"


def test_claims_keep_what_is_not_theirs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other resources and claims of a container stay, and each container has its own request."""
    asked = pod(SEED, resourceClaims=[{"name": "net", "resourceClaimName": "net"}])
    [first] = asked["spec"]["containers"]
    first["resources"]["limits"]["cpu"] = "1"
    first["resources"]["claims"] = [{"name": "net"}]
    plain = {"name": "plain", "image": "x", "resources": {"limits": {"cpu": "2"}}}
    asked["spec"]["containers"].append(plain)
    _, document = claimed(capsys, tmp_path, asked, MIG)
    one, two = document["spec"]["containers"]

    assert two == plain
    assert one["resources"]["limits"] == {"cpu": "1"}
    assert [claim["name"] for claim in one["resources"]["claims"]] == ["net", "gpus"]
    assert [claim["name"] for claim in document["spec"]["resourceClaims"]] == ["net", "gpus"]


def test_the_claim_has_a_name_that_is_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pod's own claims keep their names, and its containers name the right one."""
    own = [{"name": name, "resourceClaimName": "net"} for name in ("gpus", "gpus-2")]
    _, document = claimed(capsys, tmp_path, pod(SEED, resourceClaims=own), MIG)
    [main] = document["spec"]["containers"]

    assert [claim["name"] for claim in document["spec"]["resourceClaims"]] == [
        "gpus",
        "gpus-2",
        "gpus-3",
    ]
    assert [claim["name"] for claim in main["resources"]["claims"]] == ["gpus-3"]


def sizes(*each: int) -> Sequence[Mapping[str, int]]:
    """Return the limits of containers: MiB of one GPU, a whole GPU for 0."""
    return [{"nvidia.com/gpumem": number} if number else {"nvidia.com/gpu": 1} for number in each]


ONE = node("b", "a100-40gb", gpus=1)
BOTH = node("b", "a100-40gb", "fraction}, {backend: mps", gpus=1)
MIG_GPU = node("a100", "a100-pcie-40gb", "mig", gpus=1)


@pytest.mark.parametrize(
    ("asked", "nodes", "warned"),
    [
        (sizes(0, 0), [ONE], True),
        (sizes(0, 0), [ONE, node("c", "a100-40gb")], False),
        (sizes(20000, 30000), [ONE], True),
        (sizes(20000, 10000), [ONE], False),
        (sizes(20000, 30000), [BOTH], True),  # a GPU has shares of one backend at a time
        (sizes(20000, 10000), [BOTH], False),
        (sizes(15000, 30000), [MIG_GPU], True),
        (sizes(15000, 15000), [MIG_GPU], False),
        (sizes(15000, 30000), [MIG], False),
    ],
)
def test_a_claim_that_no_node_has_at_once_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    asked: Sequence[Mapping[str, int]],
    nodes: Sequence[NodeOffer],
    warned: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """An init container and the one after it are served in turn, but by names in limits alone."""
    document = pod(*asked)
    document["spec"]["initContainers"] = [document["spec"]["containers"].pop(0)]
    manifest, offers = written(tmp_path, document), nodes_file(tmp_path, *nodes)
    assert run(capsys, manifest, offers)[::2] == (0, "")
    status, _, err = run(capsys, manifest, offers, "--claims")
    assert status == 0
    assert ("init container c0: a claim holds the devices" in err) == warned

    document["spec"]["initContainers"][0]["restartPolicy"] = "Always"
    _, _, err = run(capsys, written(tmp_path, document), offers, "--claims")
    assert "a claim holds" not in err  # it runs beside the others, and no node serves it either way


def named(document: dict[str, Any], name: str, **metadata: str) -> dict[str, Any]:
    """Return an object with another name."""
    return {**document, "metadata": {"name": name, **metadata}}


def template_names(
    folder: Path, capsys: pytest.CaptureFixture[str], *asked: object
) -> Sequence[str]:
    """Return the names of the templates that `--claims` prints, as the pods claim them."""
    options = (nodes_file(folder, MIG), "--claims")
    _, out, _ = run(capsys, written(folder, *asked), *options)
    documents = list(yaml.safe_load_all(out))
    made = [
        document
        for document in documents
        if document["kind"] == "ResourceClaimTemplate" and "kept" not in document
    ]
    found = [document["metadata"]["name"] for document in made]
    claims = [
        place.pod(document)["spec"]["resourceClaims"]
        for document in documents
        for place in places_in(document)
    ]
    assert [own["resourceClaimTemplateName"] for [own] in claims] == found
    return found


def test_the_templates_of_one_namespace_have_different_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kind is in the name where another object has it, also a template of the manifest."""
    job, deployment = (named(workload(kind), "train") for kind in ("Job", "Deployment"))
    elsewhere = named(workload("Job"), "train", namespace="a")
    other = named(workload("Job"), "train-job")
    kept = {"kind": "ResourceClaimTemplate", "metadata": {"name": "work-gpus"}, "kept": True}
    asked = (job, deployment, elsewhere, other, job, workload("Job"), kept)
    assert template_names(tmp_path, capsys, *asked) == [
        "train-job-2-gpus",
        "train-deployment-gpus",
        "train-gpus",
        "train-job-gpus",
        "train-job-3-gpus",
        "work-job-gpus",
    ]


def test_the_templates_of_long_names_have_different_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are cut where a name may end, and are the same each time."""
    long = [named(workload("Job"), f"{'a' * 48}.{'b' * 20}-{end}") for end in "xy"]
    first, second = template_names(tmp_path, capsys, *long)
    assert first != second
    assert template_names(tmp_path, capsys, *long[::-1]) == [second, first]
    assert all(re.fullmatch("a{48}-[0-9a-f]{8}-gpus", text) for text in (first, second))


def test_names_that_dra_serves_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that a DeviceClass serves stays, as at the webhook, though no Node counts it."""
    asked = pod({"nvidia.com/gpu": 1})
    nodes = nodes_file(tmp_path, node("b", "a100-40gb"))
    manifest = written(tmp_path, asked)
    _, translated, _ = run(capsys, manifest, nodes)
    _, left, _ = run(capsys, manifest, nodes, "--dra-resources", "nvidia.com/gpu")

    assert containers(yaml.safe_load(translated))[0]["resources"] != {
        "limits": {"nvidia.com/gpu": 1}
    }
    assert yaml.safe_load(left) == asked


def test_an_impossible_pod_has_no_claim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pod is printed as it was, with the sentence, and no template."""
    asked = pod({"nvidia.com/gpumem": 90000})
    status, out, err = run(capsys, written(tmp_path, asked), nodes_file(tmp_path, MIG), "--claims")
    assert (status, yaml.safe_load(out)) == (1, asked)
    assert "90000" in err


DRA = """\
version: metagpu/v1
pools:
  - name: all
    api: dra
    backends: [{BACKEND}]
"""


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("backend: mig, profiles: [1g.5gb, 2g.10gb, 7g.40gb]", ("mig.metagpu.io", {})),
        ("backend: fraction, sharesPerGpu: 100", ("fraction.metagpu.io", {"shares": "20"})),
        ("backend: fraction, memoryUnit: 1Gi", ("fraction.metagpu.io", {"memory": "8Gi"})),
    ],
)
def test_the_scheduler_allocates_what_a_claim_asks_for(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    backend: str,
    device: tuple[str, dict[str, str]],
) -> None:
    """A pool with DRA serves the claim, by the slices that its daemon publishes."""
    config = DRA.replace("BACKEND", backend)
    gpu = mig_gpu() if "mig" in backend else build_gpu(0)
    _, snapshot = offered(gpu, text=config)
    offer = NodeOffer("node-1", node_labels(snapshot, LabelSettings({})))
    template, _ = claimed(capsys, tmp_path, pod({"nvidia.com/gpumem": 8000}), offer)
    wanted = {"metadata": {"name": "c", "namespace": "default"}, "spec": template["spec"]["spec"]}
    result = found(published(config, gpu), wanted)

    assert result is not None
    [[one]] = result
    assert (one.device_class, dict(one.consumed or {})) == device
    if device[0] == "mig.metagpu.io":
        assert "mig-2g10gb" in one.id.device
