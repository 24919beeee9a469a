"""The janitor deletes rejected pods of a controller that asked for our shares, nothing else."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from msgspec.structs import replace

from metagpu.core.model.pods import KnownPod, Rejection
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.core.state.facts import CompetingPluginFound, PodsListed
from metagpu.plugins.cluster import janitor as module
from metagpu.plugins.cluster.janitor import removable_pods
from metagpu.plugins.cluster.settings import ClusterTiming, Feature
from metagpu.sim.apiserver.server import RecordedRequest, SimApiServer
from tests.plugins.cluster.rig import NODE, Scene, cluster_at_work
from tests.rigs.build import METAGPU, after, gpu, offered
from tests.rigs.waiting import becomes, skip

DEPLOY: Final = Path(__file__).parents[3] / "deploy"
FEATURES: Final = (Feature.PODS, Feature.POD_EVENTS)
OWNER: Final = ("ReplicaSet", "train-7d9f")
MESSAGE: Final = "Pod was rejected: Allocate failed due to no healthy devices present"
REJECTED: Final = KnownPod(
    *("u", "team", "train-1", "Failed", "ReplicaSet/train-7d9f"),
    owner_uid="o",
    owner_api="apps/v1",
    rejection=Rejection(MESSAGE, frozenset((METAGPU,)), "7"),
)
WHY: Final = REJECTED.rejection


@asynccontextmanager
async def at_work(
    tmp_path: Path,
    server: SimApiServer,
    feature: Feature = Feature.JANITOR,
    delay: float = 0.0,
    backoff: float = 0.01,
) -> AsyncIterator[Scene]:
    """Run the janitor on a node that offers shares."""
    timing = ClusterTiming(
        janitor_delay=delay, count_interval=0.0, reconcile_interval=0.0, backoff_first=backoff
    )
    async with cluster_at_work(tmp_path, *FEATURES, feature, server=server, timing=timing) as it:
        it.offer()
        yield it


def add(server: SimApiServer, name: str, **pod: Any) -> None:  # noqa: ANN401 - any field
    """Create a pod of a controller that asks for our shares, and reject it."""
    server.add_pod("team", name, NODE, **{"owner": OWNER, "requests": {METAGPU: 5}, **pod})
    server.reject_pod("team", name, MESSAGE)


def pods(server: SimApiServer) -> list[str]:
    """Return the names of all pods."""
    return [key[2] for key in server.store.objects if key[0] == "pods"]


def deletions(server: SimApiServer) -> list[RecordedRequest]:
    """Return the received requests for a deletion."""
    return [each for each in server.requests if each.method == "DELETE"]


def rules(name: str) -> list[dict[str, list[str]]]:
    """Return all rules of a file of `deploy/`."""
    documents = yaml.safe_load_all((DEPLOY / name).read_text())
    return [rule for it in documents for rule in it.get("rules") or ()]


def is_deletion_of_pods(rule: dict[str, list[str]]) -> bool:
    """Return whether a rule allows the deletion of pods."""
    return "pods" in rule["resources"] and bool(
        {"delete", "deletecollection", "*"} & {*rule["verbs"]}
    )


def snapshot_of(pod: KnownPod) -> Snapshot:
    """Return the snapshot of a node that offers shares, with a pod."""
    return after(PodsListed((pod,)), since=offered(gpu(0))[1])


def test_the_rejected_pod_of_a_controller_may_be_deleted() -> None:
    """A rejected pod with a controller that asked for our shares may be deleted."""
    assert removable_pods(snapshot_of(REJECTED)) == (REJECTED,)


@pytest.mark.parametrize(
    "pod",
    [
        replace(REJECTED, rejection=None),
        replace(REJECTED, owner="", owner_uid=""),
        replace(REJECTED, rejection=Rejection(MESSAGE, frozenset(("example.com/nic",)), "7")),
        replace(REJECTED, rejection=Rejection(MESSAGE, frozenset((METAGPU,)))),
    ],
    ids=["failed-otherwise", "without-a-controller", "of-another-plugin", "being-deleted"],
)
def test_no_other_pod_may_be_deleted(pod: KnownPod) -> None:
    """A pod that lacks one of the conditions stays."""
    assert removable_pods(snapshot_of(pod)) == ()


def test_pods_of_a_competing_plugins_resource_stay() -> None:
    """While another plugin serves the resource, its rejections are not ours."""
    snapshot = after(CompetingPluginFound(METAGPU, "a.sock"), since=snapshot_of(REJECTED))
    assert removable_pods(snapshot) == ()


def test_the_right_to_delete_pods_is_apart() -> None:
    """The janitor's file alone has the right to delete pods."""
    assert not [rule for rule in rules("rbac.yaml") if is_deletion_of_pods(rule)]
    assert [is_deletion_of_pods(rule) for rule in rules("janitor.yaml")] == [True]


def test_the_limit_is_applied_apart_from_the_right() -> None:
    """A cluster that does not know the policy gets no right by the same command."""
    kinds = {
        name: {it["kind"] for it in yaml.safe_load_all((DEPLOY / name).read_text())}
        for name in ("janitor-policy.yaml", "janitor.yaml")
    }
    assert kinds == {
        "janitor-policy.yaml": {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"},
        "janitor.yaml": {"ClusterRole", "ClusterRoleBinding"},
    }


async def test_rejected_pods_go_and_their_controller_hears(tmp_path: Path) -> None:
    """Rejected pods are deleted as they were read; one Event of the controller counts them."""
    server = SimApiServer()
    for name in ("train-1", "train-2"):
        add(server, name)
    add(server, "bare", owner=None)
    add(server, "other", requests={"example.com/nic": 1})
    server.add_pod("team", "running", NODE, owner=OWNER, requests={METAGPU: 5})
    server.add_pod("team", "elsewhere", "gpu-2", owner=OWNER, requests={METAGPU: 5})
    server.reject_pod("team", "elsewhere", MESSAGE)
    first = dict(server.store.objects["pods", "team", "train-1"]["metadata"])

    async with at_work(tmp_path, server):
        await server.until(
            lambda: [e.get("series", {}).get("count") for e in server.events()] == [2]
        )

    assert pods(server) == ["bare", "other", "running", "elsewhere"]
    body = deletions(server)[0].body
    assert body["preconditions"] == {
        "uid": first["uid"],
        "resourceVersion": first["resourceVersion"],
    }
    [event] = server.events()
    assert (event["reason"], event["type"]) == ("RejectedPodDeleted", "Normal")
    assert (event["regarding"]["kind"], event["regarding"]["name"]) == OWNER
    assert event["note"] == (
        f"pod train-1 was deleted: node {NODE} rejected it; the kubelet starts none of its "
        f"containers: {MESSAGE}"
    )


async def test_a_dry_run_deletes_nothing(tmp_path: Path) -> None:
    """A dry run asks for the deletion as a dry run, once, and reports what would be deleted."""
    server = SimApiServer()
    add(server, "train-1")

    async with at_work(tmp_path, server, Feature.JANITOR_DRY_RUN) as it:
        await server.until(server.events)
        add(server, "train-2")
        await server.until(lambda: "count" in str(server.events()))
        assert it.cluster.report().features["janitor-dry-run"] == ""

    assert pods(server) == ["train-1", "train-2"]
    assert [each.body["dryRun"] for each in deletions(server)] == [["All"], ["All"]]
    assert server.events()[0]["reason"] == "RejectedPodFound"
    assert "pod train-1 would be deleted (dry run)" in server.events()[0]["note"]


async def test_a_pod_that_has_changed_is_not_deleted_by_what_was_read(tmp_path: Path) -> None:
    """A pod of the same name that is another pod by now stays, whatever was read before."""
    server = SimApiServer()
    add(server, "web-0", uid="old")

    async with at_work(tmp_path, server, delay=1e6) as it:
        await becomes(lambda: removable_pods(it.registry.snapshot))
        janitor = it.connection.janitor
        assert janitor is not None
        server.add_pod("team", "web-0", NODE, uid="new", owner=OWNER, requests={METAGPU: 5})
        [pod] = removable_pods(snapshot_of(replace(REJECTED, uid="old", name="web-0")))
        await janitor._delete(pod)

    assert pods(server) == ["web-0"]
    assert len(deletions(server)) == 1
    assert server.events() == []


async def test_pods_stay_for_a_while(tmp_path: Path) -> None:
    """A rejected pod can be looked at before it goes."""
    server = SimApiServer()
    add(server, "train-1")

    async with at_work(tmp_path, server, delay=1e6) as it:
        await becomes(lambda: removable_pods(it.registry.snapshot))
        janitor = it.connection.janitor
        assert janitor is not None
        wait = await janitor.reconcile()
        assert wait is not None
        assert 0 < wait <= 1e6
        assert pods(server) == ["train-1"]

        now = janitor.clock()
        janitor.clock = lambda: now + 1e6
        janitor.reconciler.trigger()
        await server.until(lambda: pods(server) == [])


async def test_deletions_have_a_rate(tmp_path: Path) -> None:
    """A storm's pods are deleted a few at once, then at a steady rate."""
    server = SimApiServer()
    for number in range(module.BURST + 5):
        add(server, f"train-{number}")

    async with at_work(tmp_path, server, delay=1e6) as it:
        await becomes(lambda: len(removable_pods(it.registry.snapshot)) == module.BURST + 5)
        janitor = it.connection.janitor
        assert janitor is not None
        assert await janitor.reconcile() is not None  # it has seen all of them
        now = janitor.clock() + 1e6
        janitor.clock = lambda: now
        janitor.reconciler.trigger()
        await server.until(lambda: len(pods(server)) == 5)
        await becomes(lambda: len(removable_pods(it.registry.snapshot)) == 5)
        assert await janitor.reconcile() == pytest.approx(module.REFILL)
        assert len(pods(server)) == 5


async def test_a_right_that_is_missing_is_named(tmp_path: Path) -> None:
    """Without the right to delete pods the report names it, and other features work."""
    server = SimApiServer()
    server.denied.append(("DELETE", "/pods"))
    add(server, "train-1")

    async with at_work(tmp_path, server) as it:
        await becomes(lambda: it.cluster.report().features["janitor"])
        assert "does not allow it" in it.cluster.report().features["janitor"]
        assert it.cluster.report().features["pod-events"] == ""

    assert pods(server) == ["train-1"]


async def test_a_pod_whose_deletion_is_refused_holds_up_no_other(tmp_path: Path) -> None:
    """A webhook may refuse pods for good, more than the rate allows: others go, it is reported."""
    server = SimApiServer()
    server.denied.append(("DELETE", "/pods/kept-"))
    kept = [f"kept-{number}" for number in range(module.BURST)]
    for name in kept:
        add(server, name)

    async with at_work(tmp_path, server) as it:
        await becomes(lambda: it.cluster.report().features["janitor"])
        janitor = it.connection.janitor
        assert janitor is not None
        janitor._rate = TokenBucket(2, 1 / 0.01)
        add(server, "train-1")
        await server.until(lambda: pods(server) == kept)
        await becomes(lambda: "/pods/kept-" in it.cluster.report().features["janitor"])


async def test_an_api_server_that_is_away_gets_one_request(tmp_path: Path) -> None:
    """An outage is not asked for each pod; afterwards all pods go."""
    server = SimApiServer()
    for number in range(5):
        add(server, f"train-{number}")

    async with at_work(tmp_path, server, delay=1e6, backoff=60.0) as it:
        await becomes(lambda: len(removable_pods(it.registry.snapshot)) == 5)
        janitor = it.connection.janitor
        assert janitor is not None
        await becomes(lambda: len(janitor._first_seen) == 5)
        # Whatever triggers the daemon's own run meanwhile: there is one at a time, and it fails.
        server.failing.append(("DELETE", "/pods/"))
        now = janitor.clock() + 1e6
        janitor.clock = lambda: now
        janitor.reconciler.trigger()
        await becomes(lambda: janitor.reconciler.problem)
        assert len(deletions(server)) == 1

        server.failing.clear()
        skip(60)
        await server.until(lambda: pods(server) == [])
