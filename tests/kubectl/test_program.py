"""`kubectl metagpu` at a simulated API server, with the daemon of one node behind it."""

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import anyio
import pytest
import yaml
from aiohttp import ClientSession, web
from anyio import to_thread

from metagpu import __version__
from metagpu.cli import live
from metagpu.cli.parser import completions
from metagpu.core.model.shares import ResourceClaimRef, ResourceName
from metagpu.core.state.facts import BackendSuspended, SharesClaimed
from metagpu.core.usage.lost_devices import LostDevices
from metagpu.display.table import CLEAR_SCREEN
from metagpu.kubectl import program
from metagpu.kubectl.program import main, parser
from metagpu.kubectl.viewer import KUBELET_FOLDER
from metagpu.plugins.cluster.settings import VIEWER
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimPod
from tests.agent.test_status_api import NODE, SYSTEM, StatusScene, serving
from tests.cli.test_mgctl import TtyText, interrupted_after
from tests.rigs.agent import METAGPU, QUICK

FRACTION = "fraction.metagpu.io"
FRACTION_DEVICES = (
    "device.driver == 'gpu.metagpu.io' && device.attributes['gpu.metagpu.io'].type == 'fraction'"
)
BY_CLAIMS = QUICK.replace("name: all", "name: all\n    gpus: {index: 0}").replace("10}", "20}") + (
    "  - name: claims\n"
    "    api: dra\n"
    "    backends: [{backend: fraction, resource: example.com/parts, sharesPerGpu: 10}]\n"
)
AGENT = {"app.kubernetes.io/name": "metagpu"}
DAEMON_OWNER = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "metagpu", "controller": True}
DAEMON_VOLUMES = [{"name": "kubelet", "hostPath": {"path": KUBELET_FOLDER}}]


@dataclass
class Cluster:
    """A cluster of one node with metagpu, and a user's kubeconfig."""

    scene: StatusScene
    kubeconfig: Path
    capsys: pytest.CaptureFixture[str]

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command; return its status and its output."""
        line = [*arguments, "--kubeconfig", str(self.kubeconfig)]
        self.capsys.readouterr()
        status = await to_thread.run_sync(main, line)
        return status, *self.capsys.readouterr()

    async def json(self, *arguments: str) -> Any:  # noqa: ANN401 - any JSON
        """Run a command for programs, and read its output."""
        status, out, err = await self.run(*arguments, "-o", "json")
        assert (status, err) == (0, ""), err
        return json.loads(out)

    async def report(self, request: web.Request) -> Any:  # noqa: ANN401 - any JSON
        """Return what the node's daemon answers to a request."""
        url = f"http://127.0.0.1:{self.scene.port}{request.path}"
        token = {"Metagpu-Token": request.headers["Metagpu-Token"]}
        async with ClientSession() as client, client.get(url, headers=token) as answer:
            return await answer.json()

    def add_pod(self, name: str, count: int, resource: str = METAGPU, **spec: object) -> None:
        """Add a Pod that waits for the scheduler."""
        limits = {"resources": {"limits": {resource: str(count)}}}
        content = {
            "metadata": {"labels": {"app": name}},
            "spec": {"containers": [{"name": "main", **limits}], **spec},
            "status": {"phase": "Pending"},
        }
        self.scene.server.store.put(("pods", "default", name), content)

    def add_claiming_pod(self, name: str, shares: int, says: str = "", count: int = 1) -> None:
        """Add a Pod that waits for a fraction by a template of its own name."""
        exactly = {
            "deviceClassName": FRACTION,
            "count": count,
            "capacity": {"requests": {"shares": str(shares)}},
        }
        devices = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
        store = self.scene.server.store
        selectors = [{"cel": {"expression": FRACTION_DEVICES}}]
        store.put(
            ("deviceclasses", "", FRACTION), {"metadata": {}, "spec": {"selectors": selectors}}
        )
        template = {"metadata": {}, "spec": {"spec": devices}}
        store.put(("resourceclaimtemplates", "default", name), template)
        claims = [{"name": "gpu", "resourceClaimTemplateName": name}]
        condition = {"type": "PodScheduled", "status": "False", "message": says}
        content = {
            "metadata": {},
            "spec": {"resourceClaims": claims, "containers": [{"name": "main"}]},
            "status": {"phase": "Pending", "conditions": [condition]},
        }
        store.put(("pods", "default", name), content)


@asynccontextmanager
async def cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str = QUICK
) -> AsyncIterator[Cluster]:
    """Run a node with two GPUs of ten shares, of which alice holds three."""
    async with serving(tmp_path, config) as scene:
        server = scene.server
        server.store.put(("serviceaccounts", SYSTEM, VIEWER), {"metadata": {}})
        make_daemon(server, "agent", scene.port)
        await scene.node.kubelet.admit(SimPod.single("alice", {METAGPU: 3}))
        await scene.node.wait_holders()
        server.add_pod("default", "alice", NODE, requests={METAGPU: 3})
        yield Cluster(scene, server.kubeconfig(tmp_path), capsys)


def make_daemon(server: SimApiServer, pod: str, port: int) -> None:
    """Make a pod of the system the daemon of its node, at a port."""
    ports = [{"name": "status-api", "containerPort": port}]
    content = {
        "metadata": {"labels": AGENT, "ownerReferences": [DAEMON_OWNER]},
        "spec": {"containers": [{"name": "metagpu", "ports": ports}], "volumes": DAEMON_VOLUMES},
    }
    server.store.merge(("pods", SYSTEM, pod), content, status=False, manager="daemonset")


def fields(rows: Sequence[Any], *names: str) -> list[tuple[Any, ...]]:
    """Return some fields of rows."""
    return [tuple(row[name] for name in names) for row in rows]


async def test_names_complete_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods, controllers, nodes, GPUs, namespaces and contexts are those of the cluster."""
    monkeypatch.setattr(program, "COMPLETION_TIMEOUT", 30.0)
    async with cluster(tmp_path, capsys) as live_cluster:
        server = live_cluster.scene.server
        server.add_pod("default", "web-1", NODE, owner=("Job", "web"))
        server.store.put(("namespaces", "", "team-a"), {"metadata": {}})
        start = ["--kubeconfig", str(live_cluster.kubeconfig)]

        async def completed(command: str, word: str, *before: str) -> Sequence[str]:
            words = [*command.split(), *start, *before, word]
            return await to_thread.run_sync(lambda: completions(parser(), words))

        assert await completed("why", "") == ["alice", "job/web", "web-1"]
        assert await completed("get pods", "al") == ["alice"]
        assert await completed("get pods", "a", "-n", "nowhere") == []
        assert await completed("get nodes", "") == [NODE]
        assert await completed("explain", "") == [NODE]
        assert await completed("cordon", f"{NODE}/") == [f"{NODE}/0", f"{NODE}/1"]
        assert await completed("get pods", "team", "--agent-namespace") == ["team-a"]
        assert await completed("top gpus", "", "--context") == ["sim"]


async def test_the_objects_of_all_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes, GPUs, pods and namespaces have what is held; selections and orders hold."""
    async with cluster(tmp_path, capsys) as live_cluster:
        nodes = await live_cluster.json("get", "nodes")
        assert fields(nodes["items"], "node", "gpus", "heldGpus", "held") == [
            (NODE, 2, 0.3, {METAGPU: 3})
        ]
        assert nodes["unanswered"] == []
        gpus = await live_cluster.json("get", "gpus", "--sort-by", "heldGpus")
        assert [row["heldGpus"] for row in gpus["items"]] == [0.3, 0]
        pods = await live_cluster.json("get", "pods")
        assert fields(pods["items"], "namespace", "pod", "shares") == [("default", "alice", 3)]
        assert (await live_cluster.json("get", "pods", "-n", "elsewhere"))["items"] == []
        assert (await live_cluster.json("get", "pods", "-A", "-l", "app=none"))["items"] == []
        names = await live_cluster.json("get", "namespaces")
        assert fields(names["items"], "namespace", "pods", "shares") == [
            ("default", 1, {METAGPU: 3})
        ]
        assert (await live_cluster.json("get", "gpus", "-l", "zone=none"))["items"] == []

        status, table, _ = await live_cluster.run("get", "pods", "-o", "wide")
        assert (status, table.split()[:2]) == (0, ["NAMESPACE", "POD"])
        assert "default" in table
        status, bars, _ = await live_cluster.run("top", "gpus")
        assert (status, "█" in bars) == (0, True)
        assert "\x1b" not in table + bars  # no colours in a pipe
        assert (await live_cluster.json("top", "gpus"))["items"] == (
            await live_cluster.json("get", "gpus")
        )["items"]
        status, bars, _ = await live_cluster.run("top", "gpus", "-A", "-o", "wide")
        assert (status, "█" in bars, "UUID" in bars) == (0, True, True)
        status, _, err = await live_cluster.run("get", "pods", "--sort-by", "share")
        assert (status, "did you mean shares?" in err) == (1, True)


async def test_why_a_pod_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`why` has the sentence that helps, and says what to change."""
    async with cluster(tmp_path, capsys) as live_cluster:
        live_cluster.add_pod("large", 11)
        live_cluster.add_pod("other", 1, "nvidia.com/gpu")
        live_cluster.scene.server.store.put(("nodes", "", "plain"), {"metadata": {}, "spec": {}})

        status, out, _ = await live_cluster.run("why", "other")
        assert status == 1
        assert "does not offer nvidia.com/gpu" in out
        assert "metagpu does not run there" in out
        status, out, _ = await live_cluster.run("why", "alice")
        assert (status, f"it runs on {NODE}" in out) == (0, True)
        status, _, err = await live_cluster.run("why", "nobody")
        assert (status, "there is no pod nobody" in err) == (1, True)
        answer = await live_cluster.json("fit", "-f", str(manifest(tmp_path, "small", 7)))
        assert [node["fits"] for node in answer["nodes"]] == [True, False]
        status, out, _ = await live_cluster.run("fit", "-f", str(manifest(tmp_path, "huge", 21)))
        assert (status, "request at most 20" in out) == (1, True)


async def test_why_names_a_device_that_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that holds a GPU that its node has no more, and a pod that waits beside it."""
    async with cluster(tmp_path, capsys) as live_cluster:
        loss = LostDevices("default", "alice", "main", "", ("GPU-gone",))
        watch = live_cluster.scene.node.agent.usage_service._lost
        lasting = property(lambda _: frozenset({loss}), lambda *_: None)  # a check finds nothing
        monkeypatch.setattr(type(watch), "found", lasting, raising=False)
        status, out, _ = await live_cluster.run("why", "alice", "-o", "json")
        answer = json.loads(out)
        assert (status, answer["reason"], answer["fix"]) == (1, "device_lost", loss.fix)
        assert "holds GPU-gone, gone or another's after" in answer["sentence"]

        live_cluster.add_pod("large", 18)
        status, out, _ = await live_cluster.run("why", "large", "-o", "json")
        answer = json.loads(out)
        assert answer["notes"] == [
            f"{NODE} counts what default/alice (main) requests, whose device is gone: {loss.fix}"
        ]


@pytest.mark.parametrize(
    ("asked", "owner"),
    [("job/train", ("Job", "train")), ("deploy/web", ("ReplicaSet", "web-5d8f"))],
)
async def test_why_a_controllers_pod_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str, owner: tuple[str, str]
) -> None:
    """`why` answers about the pod of a controller that is named by kind and name."""
    async with cluster(tmp_path, capsys) as live_cluster:
        live_cluster.add_pod("other", 1, "nvidia.com/gpu")
        pod = live_cluster.scene.server.store.get_object(("pods", "default", "other"))
        owners = [{"kind": owner[0], "name": owner[1], "controller": True}]
        labels = {"pod-template-hash": "5d8f"}
        metadata = {"labels": labels, "ownerReferences": owners}
        live_cluster.scene.server.store.put(
            ("pods", "default", "other"), {**pod, "metadata": metadata}
        )
        status, out, _ = await live_cluster.run("why", asked)
        assert (status, "default/other" in out) == (1, True)
        status, _, err = await live_cluster.run("why", "deployment/none")
        assert (status, "there is no pod of deployment none in" in err) == (1, True)


async def test_why_a_pod_with_resource_claims_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A claim is compared with the devices of each node, and the scheduler's words are there."""
    async with cluster(tmp_path, capsys, BY_CLAIMS) as live_cluster:
        live_cluster.add_claiming_pod("small", 10, "cannot allocate all claims")
        live_cluster.add_claiming_pod("large", 11)
        live_cluster.add_claiming_pod("many", 1, count=2)
        status, out, _ = await live_cluster.run("why", "small")
        assert (status, f"fits on node {NODE}: 1 of 1 devices of {FRACTION} are free" in out) == (
            0,
            True,
        )
        assert "the scheduler says: cannot allocate all claims" in out
        assert "selectors and constraints" in out
        status, out, _ = await live_cluster.run("why", "large")
        assert status == 1
        assert f"the largest free part of a device of {FRACTION} is 10 shares, and 11 shares" in out
        status, out, _ = await live_cluster.run("why", "many")
        assert (status, f"1 devices of {FRACTION} are offered there, and 2" in out) == (1, True)
        registry = live_cluster.scene.node.agent.registry
        held = registry.snapshot.offers[ResourceName("example.com/parts")].shares.values()
        other = ResourceClaimRef("default", "other", "1")
        registry.apply(SharesClaimed(tuple(held)[:3], anyio.current_time(), resource_claim=other))
        status, out, _ = await live_cluster.run("why", "small")
        assert (status, "the largest free part" in out, "is 7 shares" in out) == (1, True, True)

        store = live_cluster.scene.server.store
        key = f"{FRACTION}.deviceclass.resource.k8s.io/devices"
        quota = {"hard": {key: "2"}, "used": {key: "2"}}
        store.put(("resourcequotas", "default", "devices"), {"metadata": {}, "status": quota})
        status, out, _ = await live_cluster.run("why", "small")
        text = f"the quota devices of the namespace allows 2 devices of {FRACTION}; 2 are used"
        assert (status, text in out) == (1, True)
        claims = {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "small-gpu"}]}
        store.merge(("pods", "default", "small"), {"status": claims}, status=True, manager="test")
        status, out, _ = await live_cluster.run("why", "small")
        assert (status, "quota" in out) == (1, False)

        store.delete(("resourceclaimtemplates", "default", "small"))
        status, out, _ = await live_cluster.run("why", "small")
        assert (status, "there is no ResourceClaimTemplate small" in out) == (1, True)
        live_cluster.scene.server.denied.append(("GET", "resourceclaimtemplates"))
        status, out, _ = await live_cluster.run("why", "large")
        assert (status, "not judged" in out, "cannot get" in out) == (1, True, True)


async def test_a_rejected_pod_and_a_refused_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rejected pod has its node's sentence; a controller without pods has that of the quota."""
    async with cluster(tmp_path, capsys) as live_cluster:
        store = live_cluster.scene.server.store
        live_cluster.add_pod("bob", 3, nodeName=NODE)
        live_cluster.scene.server.reject_pod(
            "default", "bob", "Allocate failed due to no share of GPU 0"
        )
        refusal = {
            "metadata": {},
            "reason": "FailedCreate",
            "involvedObject": {"kind": "ReplicaSet", "name": "web-1"},
            "message": 'pods "web-1-x" is forbidden: exceeded quota: shares',
        }
        store.put(("events", "default", "web-1.1"), refusal)

        status, out, _ = await live_cluster.run("why", "bob")
        assert status == 1
        assert f"{NODE} rejected it: Allocate failed due to no share of GPU 0" in out
        assert "another pod like it: fits on node" in out
        status, out, _ = await live_cluster.run("why", "web-1")
        assert (status, "exceeded quota" in out, "raise the quota" in out) == (1, True, True)

        quota = {"hard": {f"requests.{METAGPU}": "5"}, "used": {f"requests.{METAGPU}": "3"}}
        store.put(("resourcequotas", "default", "gpu"), {"metadata": {}, "status": quota})
        status, out, _ = await live_cluster.run("fit", "-f", str(manifest(tmp_path, "web", 4)))
        assert (status, "request at most 2" in out) == (1, True)
        status, out, _ = await live_cluster.run(
            "fit", "-f", str(manifest(tmp_path, "web", 4)), "-o", "json"
        )
        assert (status, json.loads(out)["reason"]) == (1, "quota_exceeded")


async def test_all_daemons_are_checked_and_one_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`doctor` names the node, the code and the fix; `explain` has what the node offers."""
    async with cluster(tmp_path, capsys) as live_cluster:
        status, out, _ = await live_cluster.run("doctor")
        assert (status, "1 node, no problem" in out) == (0, True)
        live_cluster.scene.node.node.raise_xid(live_cluster.scene.node.node.gpu(0), 79)
        await live_cluster.scene.node.until(20, 10)
        status, out, _ = await live_cluster.run("doctor")
        assert (status, "MG403" in out, "GPU 0" in out) == (1, True, True)
        status, out, _ = await live_cluster.run("explain", NODE)
        assert (status, METAGPU in out) == (0, True)
        status, _, err = await live_cluster.run("explain", "nowhere")
        assert (status, "does not run on a node nowhere" in err) == (1, True)


async def test_gpu_nodes_without_a_daemon_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`doctor` warns of Nodes with a GPU's label, or our amounts, where no daemon runs."""
    async with cluster(tmp_path, capsys) as live_cluster:
        server = live_cluster.scene.server
        for name, labels, capacity in (
            ("labelled", {"nvidia.com/gpu.present": "true", "zone": "a"}, {}),
            ("found-by-nfd", {"feature.node.kubernetes.io/pci-10de.present": "true"}, {}),
            ("counted", {}, {METAGPU: "20", "cpu": "64"}),
            ("was-counted", {}, {METAGPU: "0"}),
            ("plain", {"nvidia.com/gpu.present": "false"}, {"intel.com/qat": "1"}),
        ):
            content = {"metadata": {"labels": labels}, "status": {"capacity": capacity}}
            server.store.put(("nodes", "", name), content)
        status, out, _ = await live_cluster.run("doctor", "-o", "json")
        found = {row["node"]: row["checks"] for row in json.loads(out)}
        assert (status, set(found)) == (0, {NODE, "counted", "found-by-nfd", "labelled"})
        [check] = found["counted"]
        assert (check["result"], f"counts 20 of {METAGPU}" in check["finding"]) == ("warning", True)
        assert "nvidia.com/gpu.present" in found["labelled"][0]["finding"]
        assert "tolerations of the DaemonSet" in check["fix"]
        status, out, _ = await live_cluster.run("doctor", "-l", "zone=a")
        assert (status, "labelled" in out, "counted" in out) == (0, True, False)

        server.denied.append(("GET", "/api/v1/nodes"))
        status, out, err = await live_cluster.run("doctor")
        assert (status, "1 node, no problem" in out) == (0, True)
        assert "nodes without a daemon are not looked for: " in err


async def test_get_takes_names_and_prints_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`get` does what hands used to kubectl expect of it."""
    async with cluster(tmp_path, capsys) as live_cluster:
        for command, line in (
            (("pods", "alice", "-o", "name"), "pod/alice"),
            (("nodes", "-o", "name"), f"node/{NODE}"),
            (("gpus", f"{NODE}/0", "-o", "name"), f"{NODE}/0"),
            (("namespaces", "-o", "name"), "namespace/default"),
        ):
            status, out, _ = await live_cluster.run("get", *command)
            assert (status, out.splitlines()[-1]) == (0, line)
        _, out, _ = await live_cluster.run("get", "pods", "alice", "--no-headers")
        assert "NAMESPACE" not in out
        assert out.split()[:2] == ["default", "alice"]
        _, out, err = await live_cluster.run("get", "pods", "-n", "elsewhere")
        assert ("NAMESPACE" in out, err) == (
            False,
            "No pods hold GPU shares in namespace elsewhere.\n",
        )
        status, _, err = await live_cluster.run("get", "pods", "bob")
        assert (status, "pod bob holds no GPU shares in namespace default" in err) == (1, True)
        status, _, err = await live_cluster.run("get", "gpus", f"{NODE}/7")
        assert (status, f"{NODE}/7 is not among the gpus" in err) == (1, True)
        server = live_cluster.scene.server
        server.add_pod(SYSTEM, "silent", "gpu-2")["status"]["podIP"] = "127.0.0.1"
        make_daemon(server, "silent", 1)
        status, _, err = await live_cluster.run("get", "nodes", "gpu-2")
        assert (status, "not among" in err, "gpu-2: " in err) == (0, False, True)
        status, out, _ = await live_cluster.run("version")
        assert (status, f"metagpu {__version__} on 1 node\n" in out) == (0, True)
        with pytest.raises(SystemExit):
            await live_cluster.run("get", "pods", "-o", "jsonpath={.items}")
        assert "no jsonpath here: give -o json to jq" in capsys.readouterr().err


async def test_a_suspended_gpu_is_not_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`top` and `get gpus` say which backend is suspended, and why."""
    async with cluster(tmp_path, capsys) as live_cluster:
        gpu = next(iter(live_cluster.scene.node.agent.registry.snapshot.gpus))
        live_cluster.scene.node.agent.registry.apply(
            BackendSuspended(gpu, "fraction", "waits for a reset", at=0)
        )
        for command in (("top", "nodes"), ("get", "gpus")):
            _, out, _ = await live_cluster.run(*command)
            assert "GPU 0: fraction suspended: waits for a reset" in " ".join(out.split())


async def test_a_gpu_is_cordoned_from_afar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`cordon` returns once the daemon follows, `why` names it, and `uncordon` ends it."""
    async with cluster(tmp_path, capsys) as live_cluster:
        live_cluster.add_pod("large", 8)
        status, out, _ = await live_cluster.run("cordon", f"{NODE}/1", "--reason", "fan")
        assert (status, "is cordoned; 0 shares are still in use" in out) == (0, True)
        status, out, _ = await live_cluster.run("why", "large")
        assert (status, "GPU 1 is cordoned: fan" in out) == (1, True)
        status, out, _ = await live_cluster.run("uncordon", f"{NODE}/1")
        assert (status, "gives new shares again" in out) == (0, True)
        annotations = live_cluster.scene.server.node(NODE)["metadata"]["annotations"]
        assert not [key for key in annotations if key.startswith("cordon.")]

        for name, text in (
            (NODE, "write NODE/GPU"),
            (f"{NODE}/9", "there are: 0, 1"),
            ("gone/1", "does not run on a node gone"),
            (f"{NODE}/0", "GPU 0 of gpu-1 is not cordoned"),
        ):
            status, _, err = await live_cluster.run("uncordon", name)
            assert (status, text in err) == (1, True), err
        live_cluster.scene.server.denied.append(("PATCH", "/api/v1/nodes"))
        status, _, err = await live_cluster.run("cordon", f"{NODE}/0")
        assert (status, "cannot patch" in err) == (1, True)


@pytest.mark.parametrize("command", [("get", "nodes"), ("get", "gpus", "-w"), ("top", "nodes")])
async def test_a_node_without_an_answer_has_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Sequence[str]
) -> None:
    """The table has the other nodes; without any answer the status is 1, with `-w` too."""
    async with cluster(tmp_path, capsys) as live_cluster:
        server = live_cluster.scene.server
        server.add_pod(SYSTEM, "silent", "gpu-2")["status"]["podIP"] = "127.0.0.1"
        make_daemon(server, "silent", 1)
        status, out, err = await live_cluster.run(*command)
        assert (status, f" {NODE} " in out) == (0, True)
        assert err.startswith("kubectl metagpu: gpu-2: ")
        server.store.delete(("pods", SYSTEM, "agent"))
        assert (await live_cluster.run(*command))[0] == 1


async def test_top_at_a_terminal_without_codes_is_drawn_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TERM=dumb a table is printed as into a file, and once."""
    monkeypatch.setenv("TERM", "dumb")
    async with cluster(tmp_path, capsys) as live_cluster:
        server = live_cluster.scene.server
        server.add_pod(SYSTEM, "silent", "gpu-2")["status"]["podIP"] = "127.0.0.1"
        make_daemon(server, "silent", 1)
        screen = TtyText()
        monkeypatch.setattr(sys, "stdout", screen)
        interrupted_after(2, monkeypatch)
        assert (await live_cluster.run("top", "nodes"))[0] == 0
        assert screen.getvalue().count(NODE) == 1
        assert "\x1b" not in screen.getvalue()


@asynccontextmanager
async def second_daemon(
    live_cluster: Cluster, answer: Callable[[web.Request], Awaitable[web.Response]]
) -> AsyncIterator[None]:
    """Answer as the daemon of another node, gpu-2, while the block lasts."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = live_cluster.scene.server
    server.add_pod(SYSTEM, "other", "gpu-2")["status"]["podIP"] = "127.0.0.1"
    server.store.put(("nodes", "", "gpu-2"), {"metadata": {"name": "gpu-2"}})
    make_daemon(server, "other", runner.addresses[0][1])
    try:
        yield
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("report", ["null", "[]", "5", "<html>"])
async def test_an_answer_without_a_report_costs_its_node_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], report: str
) -> None:
    """Another program at the port ends no command."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=report, content_type="application/json")

    async with cluster(tmp_path, capsys) as live_cluster, second_daemon(live_cluster, answer):
        for command in (["get", "pods"], ["top", "nodes"]):
            status, out, err = await live_cluster.run(*command)
            assert (status, NODE in out) == (0, True)
            assert err.startswith("kubectl metagpu: gpu-2: no report of a daemon")
        status, out, _ = await live_cluster.run("doctor")
        assert (status, "no report of a daemon" in out) == (1, True)


async def test_a_report_without_a_field_costs_the_commands_that_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that needs the field names node and field in one line; all others go on."""
    async with cluster(tmp_path, capsys) as live_cluster:

        async def answer(request: web.Request) -> web.Response:
            report = await live_cluster.report(request)
            for gpu in report["gpus"]:
                del gpu["healthy"]
            return web.json_response(report)

        line = "kubectl metagpu: gpu-2: its daemon does not report the field healthy of "
        async with second_daemon(live_cluster, answer):
            for kind in ("nodes", "gpus"):
                status, out, err = await live_cluster.run("get", kind)
                assert (status, "gpu-2" in out, err.count("\n")) == (0, False, 1), err
                assert err.startswith(f"{line}UsedGpuReport (docs/status.md): update metagpu")
            for kind in ("pods", "namespaces"):
                assert (await live_cluster.run("get", kind, "-A"))[::2] == (0, "")
            status, out, _ = await live_cluster.run("doctor", "-o", "json")
            assert (status, "the field healthy of GpuReport" in out) == (0, True)
            status, _, err = await live_cluster.run("explain", "gpu-2")
            assert (status, err.startswith(f"{line}GpuReport"), err.count("\n")) == (1, True, 1)
            assert (await live_cluster.run("drain-gpu", "gpu-2/0", "--dry-run"))[::2] == (0, "")


async def test_the_row_of_a_silent_node_returns_to_top(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`top` draws without the node, asks it in the background, and leaves nothing behind."""
    screen, released = TtyText(), Event()

    def pause(_: float) -> None:
        tables = screen.getvalue().split(CLEAR_SCREEN)[1:]
        if len(tables) == 3:
            assert all("gpu-2: no answer within 4 s" in table for table in tables)
            released.set()
        if " gpu-2 " in tables[-1] or len(tables) > 500:
            raise KeyboardInterrupt
        sleep(0.02)

    async with cluster(tmp_path, capsys) as live_cluster:

        async def answer(request: web.Request) -> web.Response:
            await to_thread.run_sync(released.wait, 60.0)
            return web.json_response(await live_cluster.report(request))

        async with second_daemon(live_cluster, answer):
            monkeypatch.setattr(sys, "stdout", screen)
            monkeypatch.setattr(live, "sleep", pause)
            status, _, err = await live_cluster.run("top", "nodes", "--timeout", "4s")
            assert (status, err) == (0, "")
            assert " gpu-2 " in screen.getvalue().split(CLEAR_SCREEN)[-1]


@pytest.mark.parametrize("name", ["a/b/c", "..", "", "a?b", "A", "a b"])
def test_what_no_object_is_named_is_a_wrong_argument(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The API server would be asked for another object, or for a list."""
    for line in (["why", name], ["why", "a", "-n", f"{name}/"], ["top", "pods", "-n", f"{name}/"]):
        with pytest.raises(SystemExit, match="2"):
            main(line)
        assert "is not a name" in capsys.readouterr().err


async def test_missing_rights_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user without rights reads which role to ask for, in one line."""
    async with cluster(tmp_path, capsys) as live_cluster:
        live_cluster.scene.server.denied.append(("POST", "serviceaccounts"))
        status, _, err = await live_cluster.run("get", "nodes")
        assert (status, "ask for the roles metagpu-viewer" in err) == (1, True)
        live_cluster.scene.server.denied.append(("GET", "/api/v1/pods"))
        status, _, err = await live_cluster.run("get", "nodes")
        assert (status, "--agent-namespace" in err, err.count("\n")) == (1, True, 1)


def test_without_a_kubeconfig_the_error_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a kubeconfig nor a pod: one line says so."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert main(["get", "nodes"]) == 1
    assert "give --kubeconfig, or set KUBECONFIG" in capsys.readouterr().err


def manifest(folder: Path, name: str, count: int) -> Path:
    """Write a Deployment whose pod requests shares."""
    container = {"name": "main", "resources": {"limits": {METAGPU: count}}}
    content = {
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
