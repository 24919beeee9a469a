"""The daemons among pods that carry their label, as a table and at a simulated API server."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from metagpu.core.errors import MetagpuError
from metagpu.kubectl.agent_pods import SELECTOR, choose_agents
from metagpu.kubectl.commands import report_silence
from metagpu.kubectl.output import silent_nodes
from metagpu.kubectl.viewer import NodeAnswer
from metagpu.plugins.cluster.settings import VIEWER
from tests.agent.test_status_api import NODE, SYSTEM
from tests.kubectl.test_program import AGENT, DAEMON_OWNER, DAEMON_VOLUMES, Cluster, cluster
from tests.rigs.agent import METAGPU

EVIL = "team-evil"
MANIFEST = Path(__file__).parents[2] / "deploy" / "static.yaml"


def pod(name: str, namespace: str = SYSTEM, **changes: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any field
    """Return the pod of a daemon, ready, with another owner, folder or state."""
    metadata = {
        "name": name,
        "namespace": namespace,
        "ownerReferences": changes.get("owners", [DAEMON_OWNER]),
        **changes.get("metadata", {}),
    }
    ready = {"type": "Ready", "status": str(changes.get("ready", True))}
    return {
        "metadata": metadata,
        "spec": {"nodeName": NODE, "volumes": changes.get("volumes", DAEMON_VOLUMES)},
        "status": {"conditions": [ready]},
    }


@pytest.mark.parametrize("ready_first", [True, False])
def test_of_two_daemons_of_a_node_the_ready_one_is_asked(*, ready_first: bool) -> None:
    """While a node is handed over, its ready daemon answers; pods that end are asked no more."""
    pods = [pod("new"), pod("old", ready=False)]
    ending = pod("gone", metadata={"deletionTimestamp": "now"})
    [chosen] = choose_agents([*(pods if ready_first else pods[::-1]), ending])
    assert chosen.name == "new"


@pytest.mark.parametrize(
    "changes",
    [
        {"owners": []},
        {"owners": [{**DAEMON_OWNER, "kind": "ReplicaSet"}]},
        {"owners": [{**DAEMON_OWNER, "controller": False}]},
        {"volumes": []},
        {"volumes": [{"name": "device-plugins", "emptyDir": {}}]},
        {"volumes": [{"hostPath": {"path": "/data/var/lib/kubelet/device-plugins"}}]},
    ],
)
@pytest.mark.parametrize("namespace", [SYSTEM, EVIL])
def test_a_pod_with_the_label_alone_is_no_daemon(
    changes: Mapping[str, Any], namespace: str
) -> None:
    """Without a DaemonSet, or the kubelet's folder, a pod is ignored wherever it is."""
    [chosen] = choose_agents([pod("agent"), pod("forged", namespace, **changes)])
    assert (chosen.namespace, chosen.name) == (SYSTEM, "agent")


def test_the_manifests_pods_are_daemons() -> None:
    """The DaemonSet of the chart makes pods that are recognized, with their port."""
    documents = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    [template] = [it["spec"]["template"] for it in documents if it["kind"] == "DaemonSet"]
    daemon = pod("agent", metadata={"labels": template["metadata"]["labels"]})
    [chosen] = choose_agents([{**daemon, "spec": {**template["spec"], "nodeName": NODE}}])
    assert chosen.port > 0
    key, _, value = SELECTOR.partition("=")
    assert template["metadata"]["labels"][key] == value


def test_silent_nodes_are_named() -> None:
    """Nodes of one problem have one line with their names, of which a long list is cut."""
    silent = [NodeAnswer(f"n{number}", None, "timed out") for number in range(9)]
    assert list(silent_nodes([*silent[:2], NodeAnswer("good", {})])) == ["n0, n1: timed out"]
    assert list(silent_nodes(silent)) == ["n0, n1, n2, n3, n4 and 4 more: timed out"]
    assert report_silence(silent) == 1
    assert report_silence([*silent, NodeAnswer("good", {})]) == 0
    assert report_silence([]) == 0


def test_daemons_of_several_namespaces_are_refused() -> None:
    """One line names the namespaces and the option; none is preferred by its name or order."""
    with pytest.raises(MetagpuError, match=rf"{SYSTEM}, {EVIL} .*--agent-namespace"):
        choose_agents([pod("agent"), pod("forged", EVIL)])


def forge(it: Cluster, **changes: Any) -> None:  # noqa: ANN401 - any field
    """Add a tenant's pod with label, account and port of a daemon."""
    store, forged = it.scene.server.store, pod("forged", EVIL, **changes)
    port = {"name": "status-api", "containerPort": 9}  # nobody listens there
    store.put(("serviceaccounts", EVIL, VIEWER), {"metadata": {}})
    content = {
        **forged,
        "metadata": {**forged["metadata"], "labels": AGENT},
        "spec": {**forged["spec"], "containers": [{"name": "metagpu", "ports": [port]}]},
        "status": {**forged["status"], "podIP": "127.0.0.1"},
    }
    store.put(("pods", EVIL, "forged"), content)


async def test_a_tenant_forges_no_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenant's labelled pod is not asked; with root's rights its namespace has to be chosen."""
    async with cluster(tmp_path, capsys) as it:
        forge(it, volumes=[])
        nodes = await it.json("get", "nodes")
        assert [(row["node"], row["held"]) for row in nodes["items"]] == [(NODE, {METAGPU: 3})]
        status, out, _ = await it.run("drain-gpu", f"{NODE}/0", "--dry-run")
        assert (status, "alice" in out) == (0, True)
        asked = [each.target for each in it.scene.server.requests]
        assert not [target for target in asked if EVIL in target]

        forge(it)
        status, _, err = await it.run("get", "nodes")
        assert (status, f"{SYSTEM}, {EVIL} have" in err, err.count("\n")) == (1, True, 1)
        status, out, _ = await it.run("get", "nodes", "--agent-namespace", SYSTEM, "-o", "json")
        assert (status, len(json.loads(out[out.index("{\n") :])["items"])) == (0, 1)
        status, _, err = await it.run("drain-gpu", f"{NODE}/0", "--yes")
        assert (status, "--agent-namespace" in err) == (1, True)

        it.scene.server.store.delete(("pods", SYSTEM, "agent"))
        forge(it, volumes=[])
        status, _, err = await it.run("get", "nodes")
        assert (status, "in any namespace is a daemon of metagpu" in err) == (1, True)


async def test_a_namespace_without_a_token_costs_its_nodes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nodes whose daemons no viewer may ask have the reason as their problem."""
    async with cluster(tmp_path, capsys) as it:
        it.add_pod("small", 1)
        it.scene.server.denied.append(("POST", "serviceaccounts"))
        status, out, _ = await it.run("get", "nodes", "-o", "json")
        [silent] = json.loads(out[out.index("{\n") :])["unanswered"]
        assert (status, silent["node"]) == (1, NODE)
        assert "ask for the roles metagpu-viewer" in silent["problem"]
        status, out, _ = await it.run("why", "small")
        assert (status, "its daemon gives no status" in out, "ask for the roles" in out) == (
            1,
            True,
            True,
        )
