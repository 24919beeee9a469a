"""`kubectl metagpu drain-gpu` at a simulated API server, and its pure decisions."""

import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from metagpu.core.errors import MetagpuError
from metagpu.core.reports.schema.gpus import GpuReport, PauseReport
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.runtime.rate_limit import Backoff
from metagpu.kubectl import drain
from metagpu.kubectl.drain import UNNAMED, GpuDrain, Holding, holdings_of, judge_pod
from metagpu.kubectl.node_commands import cordon_gpu
from metagpu.kubectl.viewer import AgentPod, ClusterViewer, NodeAnswer, Question
from metagpu.sim.apiserver.kinds import BUDGETS
from metagpu.sim.kubelet.kubelet import SimPod
from tests.agent.test_status_api import NODE
from tests.kubectl.test_program import Cluster, cluster
from tests.rigs.agent import METAGPU
from tests.rigs.reported import complete

pytestmark = pytest.mark.long

EVICTED = "/eviction"
HOLDING = {"nodeName": NODE, "containers": [{"resources": {"limits": {METAGPU: "1"}}}]}
"""The specification of a pod that may hold shares."""


@asynccontextmanager
async def draining(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Cluster]:
    """Run a node whose kubelet ends evicted pods; GPU 0 has one of each kind.

    Alice has no controller, bob one of a Deployment's, and the collector is a DaemonSet's.
    """
    async with cluster(tmp_path, capsys) as live_cluster, anyio.create_task_group() as group:
        server, kubelet = live_cluster.scene.server, live_cluster.scene.node.kubelet
        for name, owner in (("bob", ("ReplicaSet", "bob-1")), ("collector", ("DaemonSet", "dcgm"))):
            await kubelet.admit(SimPod.single(name, {METAGPU: 2}))
            pod = server.add_pod("default", name, NODE, owner=owner, requests={METAGPU: 2})
            pod["metadata"]["labels"] = {"app": name}
        await live_cluster.scene.node.wait_holders()

        async def end_pods() -> None:
            while True:
                changed = server.next_change()
                ended = [pod for pod in server.pods() if "deletionTimestamp" in pod["metadata"]]
                for name in (pod["metadata"]["name"] for pod in ended):
                    for pod in kubelet.pods:
                        if pod.name == name:
                            await kubelet.delete(pod)
                    server.delete_pod("default", name)
                await changed.wait()

        group.start_soon(end_pods)
        yield live_cluster
        group.cancel_scope.cancel()


def evictions(live_cluster: Cluster) -> list[str]:
    """Return the pods whose eviction was asked for, in order."""
    seen = [
        one.target for one in live_cluster.scene.server.requests if one.target.endswith(EVICTED)
    ]
    return [target.split("/")[-2] for target in seen]


def cordons(live_cluster: Cluster) -> list[str]:
    """Return the reasons of the Node's cordons."""
    annotations = live_cluster.scene.server.node(NODE)["metadata"].get("annotations") or {}
    return [text for key, text in annotations.items() if key.startswith("cordon.")]


async def test_a_gpu_is_drained_in_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Budgets hold, what has no controller stays without force, and a second run goes on."""
    async with draining(tmp_path, capsys) as live_cluster:
        server, gpu = live_cluster.scene.server, f"{NODE}/0"
        status, out, err = await live_cluster.run("drain-gpu", gpu)
        assert (status, err.count("\n")) == (2, 1), err
        assert "would cordon GPU 0 of gpu-1 and evict 1 pod; without a terminal, --yes" in err
        assert "stays: no controller makes it again" in out
        status, out, _ = await live_cluster.run("drain-gpu", gpu, "--dry-run", "--force")
        assert (status, "would cordon GPU 0 of gpu-1 and evict 3 pods" in out) == (0, True)
        assert (cordons(live_cluster), evictions(live_cluster)) == ([], [])

        spec = {"selector": {"matchLabels": {"app": "bob"}}}
        none = {"disruptionsAllowed": 0, "desiredHealthy": 1, "currentHealthy": 1}
        server.store.put((BUDGETS, "default", "bobs"), {"spec": spec, "status": none})

        async def allow() -> None:
            await server.until(lambda: evictions(live_cluster) == ["bob", "bob"])
            one = {"status": {"disruptionsAllowed": 1}}
            server.store.merge((BUDGETS, "default", "bobs"), one, status=True, manager="test")

        async with anyio.create_task_group() as group:
            group.start_soon(allow)
            status, out, err = await live_cluster.run("drain-gpu", gpu, "--yes", "--reason", "fan")
        assert (status, cordons(live_cluster)) == (1, ["fan"])
        assert "default/bob waits: The disruption budget bobs needs 1 healthy pods" in out
        assert "default/bob has left GPU 0" in out
        assert "default/alice (no controller makes it again; --force evicts it)" in err
        assert "default/collector (of a DaemonSet; --force evicts it)" in err
        assert evictions(live_cluster) == ["bob"] * 3

        status, out, err = await live_cluster.run("drain-gpu", gpu, "--yes", "--force")
        assert (status, err, cordons(live_cluster)) == (0, "", ["fan"])
        assert "GPU 0 of gpu-1 is drained: nobody holds it" in out
        assert evictions(live_cluster)[3:] == ["alice", "collector"]
        status, out, _ = await live_cluster.run("drain-gpu", gpu)
        assert (status, "nobody holds GPU 0" in out) == (0, True)


async def test_a_terminal_is_asked_and_an_interrupt_leaves_the_cordon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No changes nothing; after Ctrl-C, and where time or right is short, the cordon stays."""
    async with draining(tmp_path, capsys) as live_cluster:
        answers, asked = ["n", "", "y"], list[str]()

        def answer(question: str) -> str:
            asked.append(question)
            if given := answers.pop(0):
                return given
            raise EOFError  # Ctrl-D

        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        monkeypatch.setattr("builtins.input", answer)
        for _ in range(2):
            status, _, err = await live_cluster.run("drain-gpu", f"{NODE}/0")
            assert (status, "no pod is evicted" in err, cordons(live_cluster)) == (1, True, [])
        assert asked == ["Cordon GPU 0 of gpu-1 and evict 1 pod? [y/N] "] * 2

        evict = ClusterViewer.evict

        async def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(ClusterViewer, "evict", interrupted)
        status, _, err = await live_cluster.run("drain-gpu", f"{NODE}/0")
        assert (status, "GPU 0 of gpu-1 stays cordoned" in err) == (130, True)
        assert cordons(live_cluster) == ["it is being drained"]

        monkeypatch.setattr(ClusterViewer, "evict", evict)
        live_cluster.scene.server.denied.append(("POST", EVICTED))
        status, _, err = await live_cluster.run("drain-gpu", f"{NODE}/0", "--yes", "--force")
        assert (status, "default/bob (not evicted: User" in err) == (1, True)
        live_cluster.scene.server.denied.clear()
        live_cluster.scene.server.failing.append(("POST", EVICTED))
        status, _, err = await live_cluster.run("drain-gpu", f"{NODE}/0", "--yes")
        assert (status, "bob (not evicted: a test made" in err) == (1, True)


def test_containers_of_a_resource_claim_hold_it_too() -> None:
    """All holders of a claim are counted, shares of a container once, and those of nobody yet."""
    lease = {"resource": METAGPU, "uuid": "GPU-a", "shares": 2, "holder": "a/one (main)"}
    claim = {**lease, "resourceClaim": "a/ours", "shares": 5, "sharers": ["b/two (main)"]}
    status = {"leases": [lease, claim, {**lease, "uuid": "GPU-b"}, {**lease, "holder": None}]}
    assert holdings_of(complete(status, StatusReport), "GPU-a") == [
        Holding(UNNAMED, "", 2),
        Holding(("a", "one"), "main", 7),
        Holding(("b", "two"), "main", 5),
    ]


@pytest.mark.parametrize(
    ("kind", "extra", "force", "stays", "ends"),
    [
        ("Job", {}, False, "", False),
        ("DaemonSet", {}, False, "of a DaemonSet", False),
        ("DaemonSet", {}, True, "", False),
        ("", {}, False, "no controller", False),
        ("", {}, True, "", False),
        ("", {"deletionTimestamp": "2026-11-23T03:00:00Z"}, False, "", True),
        ("", {"annotations": {"kubernetes.io/config.mirror": "1"}}, True, "a static pod", False),
    ],
)
def test_what_a_drain_does_with_a_pod(
    kind: str, extra: Mapping[str, Any], *, force: bool, stays: str, ends: bool
) -> None:
    """Pods that would not come back, or come back at once, stay without force."""
    owners = [{"kind": kind, "name": "its", "controller": True}] if kind else []
    pod = {"metadata": {"uid": "1", "ownerReferences": owners, **extra}, "spec": HOLDING}
    drained_pod = judge_pod(("team", "pod"), pod, NODE, force=force)
    assert (drained_pod.stays.startswith(stays), bool(drained_pod.stays), drained_pod.ends) == (
        True,
        bool(stays),
        ends,
    )
    assert drained_pod.is_evicted == (not stays and not ends)
    assert judge_pod(("team", "pod"), None, NODE, force=force).ends


@pytest.mark.parametrize(
    ("spec", "evicted"),
    [
        ({"resourceClaims": [{"name": "gpu"}]}, True),
        ({"initContainers": HOLDING["containers"]}, True),
        ({"containers": [{"resources": {"limits": {"cpu": "1"}}}, {}]}, False),
    ],
)
def test_a_pod_that_requests_no_device_stays(spec: Mapping[str, Any], *, evicted: bool) -> None:
    """A false report of a node ends no pod that could hold none of its GPUs, with force too."""
    pod = {"metadata": {"uid": "1"}, "spec": {"nodeName": NODE, **spec}}
    drained_pod = judge_pod(("team", "database"), pod, NODE, force=True)
    assert (drained_pod.is_evicted, "requests no device" in drained_pod.stays) == (
        evicted,
        not evicted,
    )


def test_a_pod_of_the_same_name_on_another_node_is_not_evicted() -> None:
    """A daemon may report a pod that has gone, whose name a StatefulSet has given again."""
    owners = [{"kind": "StatefulSet", "name": "train", "controller": True}]
    pod = {"metadata": {"uid": "2", "ownerReferences": owners}, "spec": {"nodeName": "gpu-2"}}
    drained_pod = judge_pod(("team", "train-0"), pod, NODE, force=True)
    assert (drained_pod.ends, drained_pod.is_evicted, drained_pod.uid) == (True, False, "")


class ScriptedViewer(ClusterViewer):
    """A viewer whose daemon gives one answer after the other, the last one for ever."""

    def __init__(self, *holders: Sequence[str] | None) -> None:
        self.answers = list(holders)
        self.asked: list[str] = []
        self.evicted: list[str] = []
        self.uids: list[str] = []
        self.generation = 1
        self.lingering = set[str]()

    async def agents(self) -> Sequence[AgentPod]:
        """Return the daemon that replaced the first."""
        return [AgentPod(NODE, "system", "after", 1, ready=True)]

    async def ask(  # type: ignore[override]
        self,
        _: Question[StatusReport],
        agents: Iterable[AgentPod],
        deadline: float | None = None,  # noqa: ARG002 - the viewer has it
    ) -> Sequence[NodeAnswer[StatusReport]]:
        """Return the next answer."""
        self.asked += [agent.name for agent in agents]
        holders = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if holders is None:
            return [NodeAnswer(NODE, problem="it restarts")]
        leases = [
            {"uuid": "GPU-a", "shares": 1, "holder": f"team/{holder} (main)"} for holder in holders
        ]
        gpus = [{"uuid": "GPU-a" if "gone" not in holders else "GPU-b"}]
        report = complete({"leases": leases, "gpus": gpus}, StatusReport)
        return [NodeAnswer(NODE, report)]

    async def get(self, path: str) -> Mapping[str, Any] | None:
        """Return a pod of a Job, `None` once it is evicted and the daemon has said so."""
        name = path.rpartition("/")[2]
        if name in self.evicted and name not in self.lingering:
            return None
        self.lingering.discard(name)
        owner = {"kind": "Job", "name": "its", "controller": True}
        metadata = {"uid": f"{name}{self.generation}", "ownerReferences": [owner]}
        return {"metadata": metadata, "spec": HOLDING}

    async def evict(self, _: str, name: str, uid: str) -> None:
        """Note the eviction."""
        self.evicted.append(name)
        self.uids.append(uid)


@pytest.fixture
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "delays", lambda: Backoff(0.01, 0.01))


def drain_of(viewer: ScriptedViewer, *, yes: bool, whole_timeout: float = 30.0) -> GpuDrain:
    """Return the drain of a GPU whose daemon is about to be replaced."""
    args = Namespace(yes=yes, force=False, whole_timeout=whole_timeout)
    agent = AgentPod(NODE, "system", "before", 1, ready=True)
    return GpuDrain(args, viewer, agent, complete({"uuid": "GPU-a"}, GpuReport))


@pytest.mark.usefixtures("_short_pauses")
@pytest.mark.parametrize(
    ("yes", "rounds", "evicted", "problem"),
    [
        (True, (["a"], ["a", "late"], ["late"], []), ["a", "late"], ""),
        (False, (["a"], ["late"]), ["a"], "team/late .it came meanwhile"),
        (True, (["a"], None, ["a"], []), ["a"], ""),
        (True, (["a"], ["gone"], ["a"], []), ["a"], ""),
        (True, (["a"],), ["a"], "is still held: team/a .after 0.3 s."),
    ],
)
async def test_a_drain_meets_what_comes_meanwhile(
    *, yes: bool, rounds: Sequence[Sequence[str] | None], evicted: Sequence[str], problem: str
) -> None:
    """Late pods need consent too, a daemon may be replaced, and each pod is evicted once."""
    viewer = ScriptedViewer(*rounds)
    gpu_drain = drain_of(viewer, yes=yes, whole_timeout=0.3 if "0.3" in problem else 30.0)
    await gpu_drain.look()
    with pytest.raises(MetagpuError, match=problem) if problem else nullcontext():
        await gpu_drain.evict()
    assert viewer.evicted == evicted
    assert ("after" in viewer.asked) == (None in rounds or ["gone"] in rounds)


@pytest.mark.usefixtures("_short_pauses")
async def test_a_daemon_that_has_just_started_frees_no_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A report without pods that the API server knows as running is no news."""
    viewer = ScriptedViewer(["a"], [], ["a"], [])
    viewer.lingering.add("a")
    gpu_drain = drain_of(viewer, yes=True)
    await gpu_drain.look()
    viewer.lingering.add("a")
    await gpu_drain.evict()
    assert (viewer.evicted, viewer.lingering) == (["a"], set())
    said = capsys.readouterr().out
    assert said.index("its daemon does not name team/a now") < said.index("team/a has left")
    assert len(viewer.asked) == 4


async def test_a_cordon_waits_for_a_gpu_that_is_not_reported() -> None:
    """A daemon that has just started reports no GPUs: the command waits for its next report."""
    gpu = complete({"uuid": "GPU-a"}, GpuReport)
    cordon = PauseReport("fan", "", reset=False)
    reports = [[], [replace(gpu, cordon=cordon)]]

    class Starting(ScriptedViewer):
        async def annotate_node(self, *_: object) -> None:
            """Cordon the GPU."""

        async def ask(  # type: ignore[override]
            self, *_: object
        ) -> Sequence[NodeAnswer[StatusReport]]:
            return [NodeAnswer(NODE, replace(complete({}, StatusReport), gpus=reports.pop(0)))]

    agent = AgentPod(NODE, "system", "starting", 1, ready=True)
    found = await cordon_gpu(Starting(), agent, gpu, "fan", 30.0)
    assert (found.cordon, reports) == (cordon, [])


@pytest.mark.usefixtures("_short_pauses")
async def test_a_name_is_another_pods_after_the_question() -> None:
    """A pod that was made again before the cordon is new: it needs consent, and its own uid."""
    viewer = ScriptedViewer(["a"], ["a"], ["a"], [])
    gpu_drain = drain_of(viewer, yes=True)
    assert await gpu_drain.look() == [("team", "a")]
    assert await gpu_drain.look() == []
    viewer.generation = 2
    assert await gpu_drain.look() == [("team", "a")]
    await gpu_drain.evict()
    assert viewer.uids == ["a2"]
