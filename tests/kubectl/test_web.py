"""`kubectl metagpu web`: the view of the cluster, and the page that has it."""

import json
import math
import re
import webbrowser
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

import metagpu as package
from metagpu.kubectl import web
from metagpu.kubectl.claims import ReadClaims
from metagpu.kubectl.judgement import waiting_pods
from metagpu.kubectl.obstacles import ClusterNode, Obstacle
from metagpu.kubectl.program import main, parser
from metagpu.kubectl.viewer import ClusterViewer
from metagpu.kubectl.web import ClusterView, serve_cluster
from metagpu.plugins.cluster.event_recorder import EventReason
from metagpu.plugins.web.recent_events import FREED, GRANTED
from metagpu.sim.kubelet.kubelet import SimPod
from tests.agent.test_status_api import NODE
from tests.kubectl.test_judgement import GPUS, SHARES, gpu, node
from tests.kubectl.test_program import BY_CLAIMS, Cluster, cluster
from tests.plugins.http.rig import exchanged
from tests.rigs.agent import METAGPU
from tests.rigs.waiting import becomes
from tests.web import views

PAGE_LINE = re.compile(
    r"^http://127\.0\.0\.1:(\d+)/ shows the GPUs of the cluster; Ctrl-C ends it$", re.MULTILINE
)


def pod(name: str, amount: object, resource: str = SHARES, **spec: object) -> Mapping[str, Any]:
    """Return a Pod of one container."""
    limits = {"resources": {"limits": {resource: str(amount)}}}
    metadata = {"namespace": "team", "name": name}
    return {"metadata": metadata, "spec": {"containers": [limits], **spec}}


def test_what_waits_has_the_sentence_of_why() -> None:
    """Pods without a node that ask for our resources are judged; all others are left out."""
    nodes = [node(gpu(0, 70), allocatable={"intel.com/qat": 1}), ClusterNode("plain")]
    pods = [
        pod("small", 20),
        pod("large", 50),
        pod("bound", 50, nodeName="gpu-1"),
        pod("other", 1, "intel.com/qat"),
        pod("unread", "many"),
        pod("misspelled", 1, "cnvrg.io/metagpus"),
    ]
    rows = {
        waiting_pod["pod"]: waiting_pod for waiting_pod in waiting_pods(pods, nodes, ReadClaims())
    }

    assert list(rows) == ["large", "misspelled", "small"]
    assert rows["large"]["namespace"] == "team"
    assert rows["large"]["reason"] == "full"
    assert "30 of 100 of cnvrg.io/metagpu are free" in rows["large"]["text"]
    assert "request at most 30" in rows["large"]["advice"]
    assert rows["misspelled"]["reason"] == "not_offered"
    assert rows["small"]["reason"] == "fits"
    assert "read the scheduler's message" in rows["small"]["advice"]
    counted = [ClusterNode("plain", allocatable={GPUS: 1}), node(gpu(0, 0))]
    assert waiting_pods([pod("of another plugin", 1, GPUS)], counted, ReadClaims()) == []


def test_the_pods_that_wait_in_the_pictures_are_judged_as_real_ones() -> None:
    """No row of the documentation's picture has a reason or a field that the code never makes."""
    [made] = waiting_pods([pod("large", 50)], [node(gpu(0, 70))], ReadClaims())
    shown = views.cluster_view()["waiting"]
    assert [entry["pod"] for entry in shown] == ["sweep-15", "train-70b"]
    for document in shown:
        assert document.keys() == made.keys()
        assert document["reason"].upper() in Obstacle.__members__


VARIABLE = re.compile(r"\S*[\d/]\S*|\bmain\b|\bGPU\b|[(),:;]")
"""Parts of a sentence that are names and numbers, or join two sentences."""


def test_the_sentences_of_the_pictures_are_those_of_the_product() -> None:
    """Every event of the documentation's pictures has a reason and words that the code makes."""
    files = Path(package.__file__).parent.rglob("*.py")
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    source = re.sub(r"\"\n\s*f?\"", "", source)
    events, texts = [], []
    for view in (views.node_view(), views.cluster_view()):
        events += view["events"]
        texts += [node["problem"] for node in view["nodes"]]
        statuses = [node["status"] for node in view["nodes"] if node["status"]]
        texts += [remark["text"] for status in statuses for remark in status["remarks"]]
        texts += [gpu["reason"] for status in statuses for gpu in status["gpus"]]
    assert {each["reason"] for each in events} <= {*EventReason, GRANTED, FREED}
    texts += [each["text"] for each in events]
    parts = {part.strip() for text in texts for part in VARIABLE.split(text)}
    long = {part for part in parts if part.count(" ") > 1}
    assert len(long) > 10
    assert {part for part in long if part not in source} == set()


async def test_the_view_has_what_daemons_and_api_server_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A look has reports, labels, events and what waits; a change is one if something differs."""
    async with cluster(tmp_path, capsys) as live_cluster:
        live_cluster.add_pod("large", 21)
        server = live_cluster.scene.server
        server.label(NODE, {"zone": "a", "feature.node.kubernetes.io/cpu": "x"})
        view = ClusterView(ClusterViewer(live_cluster.scene.client), interval=60)
        assert await view.check() == ""
        shown = await view.read()
        asked = len(server.requests)
        assert await view.read() is shown
        assert len(server.requests) == asked  # who asks again soon gets the same
        view._interval = 0.1

        [row] = shown["nodes"]
        assert (shown["kind"], row["name"], row["problem"]) == ("cluster", NODE, "")
        assert row["labels"]["zone"] == "a"
        assert "feature.node.kubernetes.io/cpu" not in row["labels"]
        assert row["status"]["offers"][METAGPU]["free"] == 17
        assert row["usage"]["containers"][0]["pod"] == "alice"
        assert [(w["pod"], w["reason"]) for w in shown["waiting"]] == [("large", "too_large")]

        assert "events" not in row["status"]

        changes = view.changes()

        async def event_of(pod: str) -> Mapping[str, Any]:
            with anyio.fail_after(30):
                while True:
                    for event in (await view.read())["events"]:
                        if f"default/{pod} has " in event["text"]:
                            return dict(event)
                    await anext(changes)

        assert (await event_of("alice"))["node"] == NODE
        steady = view.changes()

        async def fail_at_a_change() -> None:
            await anext(steady)
            pytest.fail("a change without a difference")

        def looks() -> int:
            return sum(each.target == "/api/v1/pods" for each in server.requests)

        before = looks()
        async with anyio.create_task_group() as group:
            group.start_soon(fail_at_a_change)
            await server.until(lambda: looks() >= before + 3)
            group.cancel_scope.cancel()
        await live_cluster.scene.node.kubelet.admit(SimPod.single("bob", {METAGPU: 2}))
        assert (await event_of("bob"))["reason"] == "GPUSharesGranted"
        await changes.aclose()

        server.fail(503, times=1000)  # the agent asks too
        await anyio.sleep(0.1)
        [row] = (await view.read())["nodes"]
        assert (row["status"], "a test made" in row["problem"]) == (None, True)


async def test_pods_that_wait_by_resource_claims(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod whose claim names our class waits with the scheduler's words; others' classes do not.

    Claims are read once for several looks; without the right to read them one line says so.
    """
    monkeypatch.setattr(web, "OBJECTS_AGE", math.inf)
    async with cluster(tmp_path, capsys, BY_CLAIMS) as live_cluster:
        server = live_cluster.scene.server
        live_cluster.add_claiming_pod("large", 11, "cannot allocate all claims")
        live_cluster.add_claiming_pod("foreign", 1)
        of_foreign = server.store.objects["resourceclaimtemplates", "default", "foreign"]
        [request] = of_foreign["spec"]["spec"]["devices"]["requests"]
        request["exactly"]["deviceClassName"] = "gpu.nvidia.com"
        view = ClusterView(ClusterViewer(live_cluster.scene.client), interval=0)
        assert await view.check() == ""
        [row] = (await view.read())["waiting"]
        assert (row["pod"], row["reason"]) == ("large", "full")
        assert "is 10 shares, and 11 shares are requested" in row["text"]
        assert row["scheduler"] == "cannot allocate all claims"

        def reads() -> int:
            return sum("resourceclaimtemplates" in each.target for each in server.requests)

        before = reads()
        assert (await view.read())["waiting"] == [row]
        assert (before, reads()) == (2, 2)

        server.denied.append(("GET", "deviceclasses"))
        view = ClusterView(ClusterViewer(live_cluster.scene.client), interval=0)
        assert "cannot get" in await view.check()
        shown = await view.read()
        assert (shown["waiting"], shown["nodes"][0]["problem"]) == ([], "")
        assert shown["lacking"].startswith("pods that wait by ResourceClaims are not shown: ")


async def test_the_page_of_a_user_with_few_rights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who may not list all pods sees those of the context's namespace, or none."""
    async with cluster(tmp_path, capsys) as live_cluster:
        live_cluster.add_pod("large", 21)
        denied, viewer = (
            live_cluster.scene.server.denied,
            ClusterViewer(live_cluster.scene.client, "kube-system"),
        )
        denied.append(("GET", "/api/v1/pods"))
        view = ClusterView(viewer, namespaces=["", "default"])
        assert await view.check() == ""
        assert [w["pod"] for w in (await view.read())["waiting"]] == ["large"]

        denied.append(("GET", "/api/v1/namespaces/default/pods"))
        view = ClusterView(viewer, namespaces=["", "default"])
        assert "cannot get /api/v1/namespaces/default/pods" in await view.check()
        shown = await view.read()
        assert (shown["waiting"], shown["nodes"][0]["problem"]) == ([], "")
        assert METAGPU in shown["nodes"][0]["status"]["offers"]
        assert "cannot get /api/v1/namespaces/default/pods" in shown["lacking"]
        status, _, err = await live_cluster.run(
            "web", "-n", "default", "--agent-namespace", "kube-system"
        )
        assert (status, "cannot get" in err, err.count("\n")) == (1, True, 1)


async def test_a_right_that_is_withdrawn_costs_no_node_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While Pods may not be listed, all nodes are shown with one line; then the pods again."""
    async with cluster(tmp_path, capsys) as live_cluster:
        live_cluster.add_pod("large", 21)
        denied, viewer = (
            live_cluster.scene.server.denied,
            ClusterViewer(live_cluster.scene.client, "kube-system"),
        )
        view = ClusterView(viewer, namespaces=["default"], interval=0)
        assert await view.check() == ""
        right = ("GET", "/api/v1/namespaces/default/pods")
        denied.append(right)
        shown = await view.read()
        [row] = shown["nodes"]
        assert (row["problem"], METAGPU in row["status"]["offers"]) == ("", True)
        assert shown["waiting"] == []
        assert shown["lacking"].startswith("pods that wait are not shown: ")
        assert "cannot get /api/v1/namespaces/default/pods" in shown["lacking"]

        denied.remove(right)
        shown = await view.read()
        assert ([w["pod"] for w in shown["waiting"]], shown["lacking"]) == (["large"], "")


async def test_daemons_that_may_not_be_listed_again_still_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Daemons that were found are asked, while one line says that no others are looked for."""
    monkeypatch.setattr(web, "OBJECTS_AGE", 0.0)
    async with cluster(tmp_path, capsys) as live_cluster:
        view = ClusterView(
            ClusterViewer(live_cluster.scene.client), namespaces=["default"], interval=0
        )
        assert await view.check() == ""
        live_cluster.scene.server.denied.append(("GET", "/api/v1/pods"))
        shown = await view.read()
        [row] = shown["nodes"]
        assert (row["name"], row["problem"], METAGPU in row["status"]["offers"]) == (NODE, "", True)
        assert shown["lacking"].startswith("new nodes are not looked for: ")
        assert "cannot get /api/v1/pods" in shown["lacking"]


@asynccontextmanager
async def page(live_cluster: Cluster, *arguments: str) -> AsyncIterator[int]:
    """Serve the page until the block ends; yield its port."""
    words = ["web", "--address", "127.0.0.1:0", *arguments]
    args = await to_thread.run_sync(lambda: parser().parse_args(words))
    live_cluster.capsys.readouterr()
    async with anyio.create_task_group() as group:
        group.start_soon(serve_cluster, args, ClusterViewer(live_cluster.scene.client), [""])
        with anyio.fail_after(30):
            out = ""  # the agent beside may still log
            while not (line := PAGE_LINE.search(out)):
                await anyio.sleep(0.01)
                out += live_cluster.capsys.readouterr().out
        yield int(line[1])
        group.cancel_scope.cancel()


async def test_the_page_is_served_to_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page and its view are served; a taken port and another site's name are refused."""
    started: list[str] = []
    monkeypatch.setattr(webbrowser, "open", started.append)
    async with cluster(tmp_path, capsys) as live_cluster, page(live_cluster, "--open") as port:

        async def get(path: str, host: str = "localhost") -> tuple[int, bytes]:
            request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
            answer = await exchanged(port, request)
            return answer.status, answer.body

        status, body = await get("/api/v1/view")
        await becomes(lambda: started == [f"http://127.0.0.1:{port}/"])
        assert (status, json.loads(body)["nodes"][0]["name"]) == (200, NODE)
        assert (await get("/"))[0] == 200
        assert (await get("/api/v1/view", "rebound.example"))[0] == 403
        status, _, err = await live_cluster.run("web", "--address", f"127.0.0.1:{port}")
        assert (status, "give --address another port" in err, err.count("\n")) == (1, True, 1)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("web --address 0.0.0.0:80", "'0.0.0.0:80' is not a port of the loopback"),
        ("web --address :8400", "write one as in 127.0.0.1:8400"),
        ("web --address gpu-1:8400", "is not a port of the loopback"),
        ("web --interval 0.1", "'0.1' has no unit; write one like 0.1s"),
        ("web --interval 0.1s", "'0.1s' is too short; write 0.5s or more"),
        ("web --interval nan", "'nan' is not a duration"),
        ("get nodes --timeout 0s", "'0s' is too short; write 0.1s or more"),
        ("drain-gpu gpu-1/0 --timeout -1", "'-1' is not a duration"),
        ("drain-gpu gpu-1/0 --timeout nan", "'nan' is not a duration"),
    ],
)
def test_wrong_arguments_are_one_line(
    line: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An address that others reach, or a time that is none, is refused with the reason."""
    with pytest.raises(SystemExit) as end:
        main(line.split())
    err = capsys.readouterr().err
    assert (end.value.code, text in err, err.count("\n")) == (2, True, 1)
