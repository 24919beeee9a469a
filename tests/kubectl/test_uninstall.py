"""`kubectl metagpu uninstall` at a simulated API server, and the pods that it makes."""

import copy
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from metagpu.cli import arguments
from metagpu.core.contracts.leftovers import Removal, Result
from metagpu.kubectl.uninstall import UNINSTALL, ClusterUninstall, cleaning_pod, read_report
from metagpu.kubectl.viewer import KUBELET_FOLDER
from metagpu.sim.apiserver.objects import Key, Object
from tests.agent.test_status_api import NODE, SYSTEM
from tests.kubectl.test_program import AGENT, DAEMON_OWNER, Cluster, cluster
from tests.rigs.waiting import skip

pytestmark = pytest.mark.long

STATIC = Path(__file__).parents[2] / "deploy" / "static.yaml"
LABELS = {"nvidia.com/gpu.present": "true"}
GONE = Removal("pod folder", "/var/lib/metagpu/pod", Result.REMOVED)
KEPT = Removal("pod folder", "/var/lib/metagpu/pod", Result.STAYS, "used by pod default/alice")
REJECTED = "Pod was rejected: Node didn't have enough resource: pods"
COUNTED = Removal("amounts", f"Node {NODE}: cnvrg.io/metagpu", Result.STAYS, "counted")


def shipped() -> Object:
    """Return the DaemonSet of the manifests, with its uid."""
    [found] = [one for one in yaml.safe_load_all(STATIC.read_text()) if one["kind"] == "DaemonSet"]
    found["metadata"]["uid"] = "of-metagpu"
    document: Object = found
    return document


class Nodes:
    """The controller of the DaemonSet, and the kubelets of three nodes."""

    def __init__(self, live_cluster: Cluster) -> None:
        self.server = live_cluster.scene.server
        self.left: dict[str, Sequence[Removal]] = {}
        self.error = ""
        self.notes: list[str] = []
        self.deaf: set[str] = set()
        """Nodes whose kubelet does nothing."""
        self.full: set[str] = set()
        """Nodes whose kubelet rejects each pod."""
        self.started: list[Object] = []
        self.server.admit, self.server.remove = self._admit, self._remove
        self.server.store.put(("daemonsets", SYSTEM, "metagpu"), shipped())
        self.server.label(NODE, LABELS)
        for name in ("gpu-2", "gpu-3"):
            self.server.add_node(name, {**LABELS, "metagpu.io/config": "small"})
            self.server.store.put(("pods", SYSTEM, f"agent-{name}"), _daemon(name))
        self.server.add_node("no-gpu")
        owner = {"ownerReferences": [{**DAEMON_OWNER, "uid": "of-metagpu"}]}
        agent = ("pods", SYSTEM, "agent")
        self.server.store.merge(agent, {"metadata": owner}, status=False, manager="daemonset")

    def _admit(self, said: Object, namespace: str) -> tuple[Key, Object]:
        pod = copy.deepcopy(said)
        pod["status"] = {"phase": "Pending"}
        return ("pods", namespace, pod["metadata"]["name"]), pod

    def _remove(self, key: Key) -> None:
        """Delete an object; a pod of a deaf node stays, terminating."""
        spec = self.server.store.objects[key].get("spec") or {}
        if key[0] != "pods" or spec.get("nodeName") not in self.deaf:
            self.server.store.delete(key)

    async def run(self) -> None:
        """End the daemons that no node selector allows, and the pods that clean."""
        while True:
            changed = self.server.next_change()
            template = self.server.store.objects["daemonsets", SYSTEM, "metagpu"]["spec"]
            selector = template["template"]["spec"].get("nodeSelector") or {}
            for pod in list(self.server.pods()):
                name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
                labels = pod["metadata"].get("labels") or {}
                if node in self.deaf:
                    continue
                if labels == AGENT and UNINSTALL in selector:
                    self.server.delete_pod(SYSTEM, name)
                elif UNINSTALL in labels and pod["status"]["phase"] == "Pending":
                    self._clean(pod)
            await changed.wait()

    def _clean(self, pod: Object) -> None:
        assert not [one for one in self.server.pods() if _runs_daemon(one, pod)]
        self.started.append(pod)
        name, removals = pod["metadata"]["name"], self.left.get(pod["spec"]["nodeName"], [GONE])
        stays = any(removal.result is Result.STAYS for removal in removals)
        report = {"leftovers": [removal.to_dict() for removal in removals], "notes": self.notes}
        error = json.dumps({"reason": "unreadable", "error": self.error})
        text = error if self.error else json.dumps(report, indent=2)
        self.server.logs[name] = f"a warning {{\n{text}\n"
        status = {"phase": "Failed" if stays or self.error else "Succeeded"}
        if pod["spec"]["nodeName"] in self.full:
            status = {"phase": "Failed", "reason": "OutOfpods", "message": REJECTED}
            self.server.denied.append(("GET", f"/{name}/log"))
        key = ("pods", SYSTEM, name)
        self.server.store.merge(key, {"status": status}, status=True, manager="kubelet")


def _daemon(node: str) -> Object:
    owner = {**DAEMON_OWNER, "uid": "of-metagpu"}
    return {
        "metadata": {"labels": AGENT, "ownerReferences": [owner]},
        "spec": {
            "nodeName": node,
            "containers": [{"name": "metagpu"}],
            "volumes": [{"name": "kubelet", "hostPath": {"path": KUBELET_FOLDER}}],
        },
    }


def _runs_daemon(pod: Object, beside: Object) -> bool:
    place = pod["spec"].get("nodeName"), pod["metadata"].get("labels")
    return place == (beside["spec"]["nodeName"], AGENT)


@asynccontextmanager
async def installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[tuple[Cluster, Nodes]]:
    """Run a cluster of three nodes with metagpu, and one without a GPU."""
    async with cluster(tmp_path, capsys) as live_cluster, anyio.create_task_group() as group:
        nodes = Nodes(live_cluster)
        group.start_soon(nodes.run)
        yield live_cluster, nodes
        group.cancel_scope.cancel()


async def test_one_command_ends_metagpu_and_cleans_each_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Daemons end first; what pods use stays, and the same command goes on when they have ended."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no helm is here
    async with installed(tmp_path, capsys) as (live_cluster, nodes):
        before = len(nodes.server.pods())
        status, out, _ = await live_cluster.run("uninstall", "--dry-run")
        assert (status, len(nodes.server.pods()), nodes.started) == (0, before, [])
        assert "default/alice" in out
        assert "this would end metagpu (kube-system/metagpu) on 3 nodes; on 1 of them pods" in out
        assert "on 2 of them it is unknown which pods hold shares" in out
        assert ["gpu-2", "unknown"] in map(str.split, out.splitlines())
        planned = await live_cluster.json("uninstall", "--dry-run")
        assert [end["pods"] for end in planned["nodes"]] == [["default/alice"], None, None]
        status, _, err = await live_cluster.run("uninstall")
        assert (status, "without a terminal, --yes is the consent" in err) == (2, True)
        assert nodes.started == []

        nodes.left, nodes.notes = {NODE: [GONE, KEPT, COUNTED]}, ["the API server was not asked"]
        status, out, _ = await live_cluster.run("uninstall", "--yes")
        assert status == 1
        assert f"{NODE}: removed 1 thing; 1 stays\n" in out
        assert "gpu-2: removed 1 thing\n" in out
        assert "used by pod default/alice" in out
        assert "run this command again once these reasons are gone" in out
        assert "gpu-2: the API server was not asked\n" in out
        assert {pod["spec"]["nodeName"] for pod in nodes.started} == {NODE, "gpu-2", "gpu-3"}
        assert [pod for pod in nodes.server.pods() if _cleans(pod)] == []

        nodes.left = {NODE: [GONE, COUNTED]}
        report = await live_cluster.json("uninstall", "--yes")
        assert [(end["node"], end["result"]) for end in report["nodes"]] == [
            (NODE, "removed"),
            ("gpu-2", "removed"),
            ("gpu-3", "removed"),
        ]
        assert report["daemonSets"] == ["kube-system/metagpu"]
        assert "delete the manifest" in report["next"]


def skip_waits(monkeypatch: pytest.MonkeyPatch, nodes: Nodes) -> None:
    """Skip the time of a command that waits for deaf nodes alone."""
    look, take = ClusterUninstall._nodes_with_daemons, ClusterUninstall._take_report

    async def looked(job: ClusterUninstall) -> set[str]:
        if (left := await look(job)) == nodes.deaf:
            skip(600)
        return left

    async def taken(job: ClusterUninstall, *of_pod: Any) -> None:  # noqa: ANN401 - as it is called
        await take(job, *of_pod)
        if {end.node for end, _ in job._nodes.values() if end.result == "planned"} == nodes.deaf:
            skip(600)

    monkeypatch.setattr(ClusterUninstall, "_nodes_with_daemons", looked)
    monkeypatch.setattr(ClusterUninstall, "_take_report", taken)


async def test_a_node_that_cannot_be_cleaned_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one line: a daemon or pod that stays, one that does not start, and a failure."""
    monkeypatch.setenv("PATH", str(tmp_path))
    async with installed(tmp_path, capsys) as (live_cluster, nodes):
        skip_waits(monkeypatch, nodes)
        nodes.deaf = {"gpu-2"}
        status, out, _ = await live_cluster.run("uninstall", "--yes", "--timeout", "600s")
        assert (status, "gpu-2: its daemon has not ended within 600 s" in out) == (1, True)
        assert "gpu-3: removed 1 thing" in out

        nodes.server.delete_pod(SYSTEM, "agent-gpu-2")
        status, out, _ = await live_cluster.run("uninstall", "--yes", "--timeout", "600s")
        problem = "gpu-2: the pod that cleans it has not ended within 600 s (Pending)"
        assert (status, problem in out) == (1, True)
        assert out.endswith("run this command again to go on\n")

        nodes.full = {"gpu-3"}
        status, out, _ = await live_cluster.run("uninstall", "--yes", "--timeout", "600s")
        assert (status, "gpu-2: the pod of an earlier run has not ended\n" in out) == (1, True)
        assert f"gpu-3: {REJECTED}\n" in out
        assert f"{NODE}: removed 1 thing\n" in out

        nodes.server.denied, nodes.full = [], set()
        nodes.deaf, nodes.error = set(), "/etc/metagpu/profiles: no profile is chosen"
        status, out, _ = await live_cluster.run("uninstall", "--yes")
        assert status == 1
        assert f"gpu-2: `metagpu uninstall` failed: {nodes.error}" in out


async def test_the_release_of_helm_is_removed_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Helm removes its objects, of each release, once every node is clean, and not before."""
    called = tmp_path / "called"
    helm = tmp_path / "helm"
    helm.write_text(f"#!/bin/sh\necho $KUBECONFIG $* >> {called}\n")
    helm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    async with installed(tmp_path, capsys) as (live_cluster, nodes):
        of_helm = {"metadata": {"annotations": {"meta.helm.sh/release-name": "gpus"}}}
        daemons = ("daemonsets", SYSTEM, "metagpu")
        nodes.server.store.merge(daemons, of_helm, status=False, manager="helm")
        nodes.left = {"gpu-3": [KEPT]}
        status, _, _ = await live_cluster.run("uninstall", "--yes")
        assert (status, called.exists()) == (1, False)

        nodes.left = {}
        status, out, _ = await live_cluster.run("uninstall", "--yes")
        assert (status, "metagpu is removed" in out) == (0, True)
        line = f"{live_cluster.kubeconfig} uninstall gpus --namespace kube-system\n"
        assert called.read_text() == line

        for number, annotations in enumerate(({"meta.helm.sh/release-name": "h100"}, {})):
            other, name = shipped(), f"metagpu-{number}"
            other["metadata"] |= {"name": name, "uid": name, "annotations": annotations}
            nodes.server.store.put(("daemonsets", SYSTEM, name), other)
        status, out, _ = await live_cluster.run("uninstall", "--yes")
        assert (status, "delete the manifest that made kube-system/metagpu-1\n" in out) == (0, True)
        assert called.read_text() == line + line + line.replace("gpus", "h100")


async def test_a_cluster_without_metagpu_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says that no DaemonSet is metagpu's."""
    async with cluster(tmp_path, capsys) as live_cluster:
        status, _, err = await live_cluster.run("uninstall")
        assert (status, err.count("\n")) == (1, 1)
        assert "metagpu is not installed in this cluster" in err


def _cleans(pod: Object) -> bool:
    return UNINSTALL in (pod["metadata"].get("labels") or {})


def test_the_pod_of_a_node_has_what_the_daemon_had() -> None:
    """Image, folders, account and privileges are the daemon's; label and selector are not."""
    daemon_set = shipped()
    template = daemon_set["spec"]["template"]["spec"]
    template["nodeSelector"] = {UNINSTALL: "true", "pool": "gpu"}
    labels = {"metagpu.io/config": "small", "nvidia.com/mig.config": "all-balanced"}
    node = {"metadata": {"name": "gpu-1", "labels": labels}}
    pod = cleaning_pod(daemon_set, node, force=True)
    [container], [daemon] = pod["spec"]["containers"], template["containers"]

    assert container["command"][0] == "metagpu"
    args = arguments.parser().parse_args(container["command"][1:])
    assert (args.command, args.yes, args.force, args.output) == ("uninstall", True, True, "json")
    for part in ("image", "securityContext", "volumeMounts"):
        assert container[part] == daemon[part]
    for part in ("volumes", "serviceAccountName", "hostPID", "priorityClassName"):
        assert pod["spec"][part] == template[part]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert values["METAGPU_PROFILE"] == "small"
    assert values["METAGPU_MIG_CONFIG"] == "all-balanced"
    assert {"nodeSelector", "affinity"}.isdisjoint(pod["spec"])
    assert {"ports", "readinessProbe", "livenessProbe"}.isdisjoint(container)
    assert pod["metadata"]["labels"] == {UNINSTALL: "metagpu"}  # no pod of the DaemonSet's
    assert pod["spec"]["nodeName"] == "gpu-1"


def test_names_of_long_nodes_are_shortened() -> None:
    """Two nodes of 253 characters have pods of two names that Kubernetes takes."""
    names = set()
    for last in "ab":
        node: Mapping[str, Any] = {"metadata": {"name": "n" * 252 + last}}
        names.add(cleaning_pod(shipped(), node)["metadata"]["name"])
    assert len(names) == 2
    assert max(map(len, names)) <= 253


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ("", None),
        ("{broken\n", None),
        ('warning {"a": 1}\n{"leftovers": [], "notes": []}\n', {"leftovers": [], "notes": []}),
        ('{"error": "no"}\nmore\n', {"error": "no"}),
        ('{"event": "x"}\n', None),
    ],
)
def test_the_report_is_found_in_a_log(log: str, found: object) -> None:
    """Lines of the log around the report do not hide it."""
    assert read_report(log) == found
