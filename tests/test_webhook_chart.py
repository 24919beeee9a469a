"""The webhook in the chart: who reaches it, what it may, and where its certificate comes from."""

import base64
import json
import shutil
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from anyio import to_thread
from cel_expr_python import cel

from metagpu.cli.arguments import parser
from metagpu.cli.options import Variable, resolve_environment
from metagpu.cli.webhook_options import webhook_of
from metagpu.translation.values import TranslationSettings
from metagpu.webhook.server import ServingCertificate
from tests.test_chart import helm as helm  # noqa: PLC0414 - a fixture
from tests.test_chart import script

ENDS = "metagpu.io/certificate-ends"
SERVICE = "metagpu-webhook.kube-system.svc"
PROMETHEUS = "networkPolicy.from[0].podSelector.matchLabels.app=prometheus"


def objects(helm: str, *values: str, version: str = "1.36.0") -> dict[str, Any]:
    """Return what the chart renders with a webhook, by kind; of each kind its own alone."""
    options = [part for word in ("webhook.enabled=true", *values) for part in ("--set", word)]
    text = script.render(helm, *options, "--show-only", "templates/webhook.yaml")
    if version != "1.36.0":
        text = script.render(helm, *options, "--kube-version", version)
    documents = [document for document in yaml.safe_load_all(text) if document]
    return {
        document["kind"]: document
        for document in documents
        if document["metadata"]["name"].startswith("metagpu-webh")
    }


def test_there_is_no_webhook_by_default(helm: str) -> None:
    """Without the value nothing stands in the way of pods."""
    assert "metagpu-webhook" not in script.render(helm)


def test_its_failure_is_nobody_elses(helm: str) -> None:
    """Only namespaces with the label, only creations of pods, never a failure."""
    [webhook] = objects(helm)["MutatingWebhookConfiguration"]["webhooks"]

    assert webhook["failurePolicy"] == "Ignore"
    assert webhook["timeoutSeconds"] == 2
    assert webhook["sideEffects"] == "None"
    assert webhook["reinvocationPolicy"] == "IfNeeded"
    assert webhook["namespaceSelector"] == {"matchLabels": {"metagpu.io/translate": "enabled"}}
    [rule] = webhook["rules"]
    assert (rule["operations"], rule["resources"]) == (["CREATE"], ["pods"])
    [condition] = webhook["matchConditions"]
    assert all(f"'{name}'" in condition["expression"] for name in TranslationSettings().names)


def reached(found: dict[str, Any], pods: Sequence[object]) -> list[bool]:
    """Return whether the registration's condition sends each pod to the webhook."""
    [webhook] = found["MutatingWebhookConfiguration"]["webhooks"]
    environment = cel.NewEnv(variables={"object": cel.Type.DYN})
    expression = environment.compile(webhook["matchConditions"][0]["expression"])
    return [expression.eval(data={"object": pod}).value() for pod in pods]


def test_kais_annotations_reach_it_by_a_value(helm: str) -> None:
    """KAI may be in the cluster: its pods never wait for the webhook unless a value says so."""
    both = objects(helm, "webhook.vocabularies={hami,kai}")
    hamis = {"name": "c", "resources": {"limits": {"nvidia.com/gpumem": "8k"}}}
    keys = ("team", "gpu-fraction", "gpu-memory", "nvidia.com/container.c.gpu-memory.limit")
    pods: list[dict[str, Any]] = [
        {"metadata": {}, "spec": {"containers": [{"name": "c"}]}},
        {"metadata": {}, "spec": {"containers": [hamis]}},
        *({"metadata": {"annotations": {key: "1"}}, "spec": {"containers": []}} for key in keys),
    ]

    assert reached(objects(helm), pods) == [False, True, False, False, False, False]
    assert reached(both, pods) == [False, True, False, True, True, True]
    env = both["Deployment"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "METAGPU_WEBHOOK_VOCABULARIES", "value": "hami,kai"} in env


def test_an_older_api_server_gets_no_conditions(helm: str) -> None:
    """Before Kubernetes 1.28 all pods of the labelled namespaces are reviewed."""
    [webhook] = objects(helm, version="1.27.0")["MutatingWebhookConfiguration"]["webhooks"]
    assert "matchConditions" not in webhook


def test_it_reads_nodes_and_nothing_else(helm: str) -> None:
    """The account has one rule; the pods have no privilege."""
    found = objects(helm)
    assert found["ClusterRole"]["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}
    ]
    pod = found["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert found["Deployment"]["spec"]["replicas"] == 2
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_its_pods_are_no_daemons(helm: str) -> None:
    """Selectors of the DaemonSet, its NetworkPolicy and its monitors do not select them."""
    labels = objects(helm)["Deployment"]["spec"]["template"]["metadata"]["labels"]
    rendered = [
        script.render(
            helm, f"--set=webhook.enabled=true,{PROMETHEUS},metrics.{monitor}.enabled=true"
        )
        for monitor in ("podMonitor", "serviceMonitor")
    ]
    selected = {}
    for document in yaml.safe_load_all("---\n".join(rendered)):
        spec = (document or {}).get("spec") or {}
        selector = spec.get("podSelector") or spec.get("selector")
        if selector and not document["metadata"]["name"].startswith("metagpu-webhook"):
            selected[document["kind"]] = selector.get("matchLabels", selector)

    assert {"DaemonSet", "NetworkPolicy", "PodMonitor", "ServiceMonitor"} <= selected.keys()
    assert not [kind for kind, entry in selected.items() if entry.items() <= labels.items()]


def test_it_has_a_monitor_of_its_own(helm: str) -> None:
    """With the chart's PodMonitor the webhook has one too, for the port of its metrics."""
    assert "PodMonitor" not in objects(helm)
    found = objects(
        helm, PROMETHEUS, "metrics.podMonitor.enabled=true", "metrics.podMonitor.labels.team=a"
    )
    pod = found["Deployment"]["spec"]["template"]
    monitor = found["PodMonitor"]
    assert monitor["metadata"]["labels"]["team"] == "a"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in pod["spec"]["containers"][0]["ports"]}


def test_it_holds_up_no_drain_and_no_rollout(helm: str) -> None:
    """A pod that does not answer may be evicted, and new pods are spread among themselves."""
    found = objects(helm)
    assert found["PodDisruptionBudget"]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    [spread] = found["Deployment"]["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert spread["matchLabelKeys"] == ["pod-template-hash"]


DAY = 86_400


@pytest.mark.parametrize(
    ("days_left", "kept"), [(3000, "old"), (1300, "old"), (1200, ""), (-1, ""), (None, "")]
)
def test_an_upgrade_renews_a_certificate_that_ends(
    helm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    days_left: int | None,
    kept: str,
) -> None:
    """In the last third of its days another one takes its place; until then both are trusted."""
    ends = {} if days_left is None else {ENDS: f"{time.time() + days_left * DAY:.0f}"}
    old = dict.fromkeys(("tls.crt", "tls.key"), "b2xk") | {"ca.crt": encoded("the old authority")}
    present = {"metadata": {"annotations": ends}, "data": old}
    chart = tmp_path / "chart"
    shutil.copytree(script.CHART, chart)
    (chart / "present.json").write_text(json.dumps(present))
    template = chart / "templates" / "webhook.yaml"
    text = template.read_text()
    lookup = 'lookup "v1" "Secret" .Release.Namespace $secret'
    assert lookup in text
    template.write_text(text.replace(lookup, '.Files.Get "present.json" | fromJson'))
    monkeypatch.setattr(script, "CHART", chart)

    found = objects(helm)
    secret = found["Secret"]
    [webhook] = found["MutatingWebhookConfiguration"]["webhooks"]
    trusted = base64.b64decode(webhook["clientConfig"]["caBundle"]).decode()
    assert (secret["data"] == old) == bool(kept)
    assert "the old authority" in trusted
    if not kept:
        assert base64.b64decode(secret["data"]["ca.crt"]).decode() in trusted
        left = int(secret["metadata"]["annotations"][ENDS]) - time.time()
        assert left == pytest.approx(3650 * DAY, abs=DAY)
    else:
        assert secret["metadata"]["annotations"] == ends


def encoded(text: str) -> str:
    """Return a text as a Secret has it."""
    return base64.b64encode(text.encode()).decode()


def test_the_values_reach_the_program(helm: str) -> None:
    """Each variable of the Deployment is one of an option, and its value is a good one."""
    names = {"gpu": "g", "memory": "m", "memoryPercentage": "p", "cores": "c", "priority": "r"}
    found = objects(
        helm,
        "webhook.order={mps,hami-core}",
        "webhook.policy=spread",
        "webhook.impossible=refuse",
        "dra.enabled=true",
        "dra.extendedResources={nvidia.com/gpu,nvidia.com/mig-1g.5gb}",
        *(f"webhook.names.{key}=example.com/{value}" for key, value in names.items()),
    )
    [container] = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    environment = {document["name"]: document["value"] for document in container["env"]}
    args = parser().parse_args(["webhook"])
    read = {
        name
        for variable in vars(args).values()
        if isinstance(variable, Variable)
        for name in variable.names
    }
    assert environment.keys() <= read

    resolve_environment(args, environment)
    settings = webhook_of(args)
    assert settings.translation == TranslationSettings(
        gpu="example.com/g",
        memory="example.com/m",
        memory_percentage="example.com/p",
        cores="example.com/c",
        priority="example.com/r",
        order=("mps", "hami-core"),
        policy="spread",
        impossible="refuse",
        dra_resources=frozenset({"nvidia.com/gpu", "nvidia.com/mig-1g.5gb"}),
    )
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert settings.metrics is not None
    assert (settings.address.port, settings.metrics.port) == (ports["reviews"], ports["metrics"])
    assert str(settings.certificate) == container["volumeMounts"][0]["mountPath"]


async def test_the_charts_certificate_is_that_of_the_service(helm: str, tmp_path: Path) -> None:
    """The API server trusts it by the caBundle, and the webhook puts it in force."""
    found = await to_thread.run_sync(objects, helm)
    for name, text in found["Secret"]["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
    [webhook] = found["MutatingWebhookConfiguration"]["webhooks"]
    certificate = ServingCertificate(tmp_path)
    await certificate.reload()
    assert certificate.problem == ""

    authority = base64.b64decode(webhook["clientConfig"]["caBundle"]).decode()
    trusting = ssl.create_default_context(cadata=authority)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = certificate.context.wrap_bio(to_server, to_client, server_side=True)
    client = trusting.wrap_bio(to_client, to_server, server_hostname=SERVICE)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = client.getpeercert()
    assert shown is not None
    assert ("DNS", SERVICE) in shown["subjectAltName"]


def test_cert_manager_and_secrets_of_others(helm: str) -> None:
    """The other two ways render no key, and the webhook trusts their authority."""
    found = objects(helm, "webhook.certificate.from=cert-manager")
    assert "Secret" not in found
    assert found["Certificate"]["spec"]["issuerRef"] == {
        "name": "metagpu-webhook",
        "kind": "Issuer",
    }
    annotations = found["MutatingWebhookConfiguration"]["metadata"]["annotations"]
    assert annotations == {"cert-manager.io/inject-ca-from": "kube-system/metagpu-webhook"}

    own = ("webhook.certificate.from=secret", "webhook.certificate.secret=mine")
    with pytest.raises(ValueError, match="caBundle"):
        objects(helm, *own)
    found = objects(helm, *own, "webhook.certificate.caBundle=QUJD")
    assert "Secret" not in found
    [webhook] = found["MutatingWebhookConfiguration"]["webhooks"]
    assert webhook["clientConfig"]["caBundle"] == "QUJD"
    [volume] = found["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert volume["secret"]["secretName"] == "mine"
