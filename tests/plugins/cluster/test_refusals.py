"""Refused requests: Events of the pod, its controller and the Node, and no storm of them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest
import yaml
from aiohttp import web
from msgspec.structs import replace

from metagpu.core.model.pods import KnownPod, Rejection
from metagpu.core.model.request_errors import (
    DeviceOccupied,
    FractionSplit,
    GpuUnhealthy,
    RequestError,
    TooManyReplicas,
)
from metagpu.core.model.shares import ResourceClaimRef
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.core.state.events import AllocationRefused, ClaimRefusalEnded, ResourceClaimRefused
from metagpu.core.state.facts import CompetingPluginFound, PodsListed
from metagpu.plugins.cluster import event_recorder, refusals
from metagpu.plugins.cluster.pods import PODS
from metagpu.plugins.cluster.refusals import (
    CLAIM_FORGOTTEN,
    CLAIM_LASTS,
    EXPIRES,
    REMEMBERED,
    RefusalMatcher,
    controller_of,
    pod_refusal_events,
    removable_pods,
)
from metagpu.plugins.cluster.settings import ClusterTiming, Feature
from metagpu.sim.apiserver.objects import ApiError
from metagpu.sim.apiserver.server import RecordedRequest, SimApiServer
from tests.plugins.cluster.rig import NODE, Scene, cluster_at_work
from tests.rigs.build import METAGPU, after, gpu, offered
from tests.rigs.waiting import becomes, skip

REPLICA_SET: Final = ("ReplicaSet", "train-7d9f")
SPLIT: Final = FractionSplit(METAGPU, 60, "GPU 0: 50, GPU 1: 10", "GPU 0: 50, GPU 1: 10")
FEATURES: Final = (Feature.EVENTS, Feature.PODS, Feature.POD_EVENTS)


def kubelets(error: RequestError) -> str:
    """Return the kubelet's message of a pod that our error rejected."""
    return (
        "Pod was rejected: Allocate failed due to rpc error: code = FailedPrecondition desc = "
        f"{error}, which is unexpected"
    )


def reject(server: SimApiServer, name: str, error: RequestError = SPLIT, **pod: Any) -> None:  # noqa: ANN401 - any field
    """Create a pod that asks for our shares, and reject it for our error."""
    server.add_pod("team", name, NODE, phase="Pending", requests={METAGPU: 60}, **pod)
    server.reject_pod("team", name, kubelets(error))


def seen(server: SimApiServer) -> list[tuple[str, str, int]]:
    """Return kind, name and count of each Event's object."""
    return [
        (
            event["regarding"]["kind"],
            event["regarding"]["name"],
            event.get("series", {}).get("count", 1),
        )
        for event in server.events()
    ]


async def test_a_storm_of_refusals_is_three_events(tmp_path: Path) -> None:
    """A controller's refused pods are one Event each of the first pod, controller and Node."""
    timing = ClusterTiming(count_interval=0.0)
    async with cluster_at_work(tmp_path, *FEATURES, timing=timing) as scene:
        await scene.server.watched(PODS)
        for number in range(40):
            scene.registry.events.publish(AllocationRefused.of(METAGPU, SPLIT))
            reject(scene.server, f"train-{number}", owner=REPLICA_SET)
            counted = {("ReplicaSet", "train-7d9f", number + 1), ("Node", NODE, number + 1)}
            await scene.server.until(
                partial(lambda wanted: wanted <= set(seen(scene.server)), counted)
            )

        assert sorted(seen(scene.server)) == [
            ("Node", NODE, 40),
            ("Pod", "train-0", 1),
            ("ReplicaSet", "train-7d9f", 40),
        ]
        by_kind = {each["regarding"]["kind"]: each for each in scene.server.events()}
        assert by_kind["Pod"]["note"] == str(SPLIT)
        assert by_kind["ReplicaSet"]["note"] == f"pod train-0 on node {NODE}: {SPLIT}"
        assert by_kind["ReplicaSet"]["regarding"] == {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "name": "train-7d9f",
            "uid": "of-the-owner",
            "namespace": "team",
        }
        assert {each["reason"] for each in scene.server.events()} == {"GPURequestRefused"}
        assert scene.cluster.report().pod_events_dropped == 0


async def test_each_controller_hears_of_its_own(tmp_path: Path) -> None:
    """Two controllers have an Event each, a bare pod its own, another plugin's pod none."""
    async with cluster_at_work(tmp_path, Feature.PODS, Feature.POD_EVENTS) as scene:
        await scene.server.watched(PODS)
        scene.registry.events.publish(AllocationRefused.of(METAGPU, SPLIT))
        reject(scene.server, "one", owner=REPLICA_SET)
        reject(scene.server, "two", owner=("Job", "batch"))
        reject(scene.server, "bare")
        scene.server.add_pod("team", "other", NODE, phase="Pending")
        scene.server.reject_pod("team", "other", "Pod was rejected: another plugin's reason")
        await scene.server.until(lambda: len(scene.server.events()) == 5)

        assert {(kind, name) for kind, name, _ in seen(scene.server)} == {
            *(("Pod", "one"), ("ReplicaSet", "train-7d9f")),
            *(("Pod", "two"), ("Job", "batch"), ("Pod", "bare")),
        }


async def test_one_storm_leaves_room_for_other_events(tmp_path: Path) -> None:
    """Refusals of a controller's many causes use a part of its limits alone."""
    async with cluster_at_work(tmp_path, Feature.PODS, Feature.POD_EVENTS) as scene:
        await scene.server.watched(PODS)
        limit = int(event_recorder.PER_POD * event_recorder.MINOR)
        for number in range(3 * limit):
            refusal = AllocationRefused(METAGPU, f"Cause{number}", f"cause <{number}>")
            scene.registry.events.publish(refusal)
            scene.server.add_pod("team", f"p{number}", NODE, owner=REPLICA_SET)
            scene.server.reject_pod("team", f"p{number}", f"desc = {refusal.reason}, which is")
        await becomes(lambda: scene.cluster.report().pod_events_dropped == 5 * limit)

        assert len(scene.server.events()) == limit


def test_what_helps_is_in_the_note() -> None:
    """The note has the reason and, where the reason has none, what would help."""
    pod = KnownPod("u", "team", "alice", "Failed")
    refusal = AllocationRefused.of(METAGPU, GpuUnhealthy(METAGPU, "0", "XID 79"))
    [event] = pod_refusal_events(pod, refusal, NODE)

    assert event.note == (
        "cnvrg.io/metagpu: GPU 0 is unhealthy: XID 79; a new pod gets shares of another GPU, as "
        "soon as one has enough of them free"
    )


def test_a_request_that_can_never_be_met_has_its_own_reason() -> None:
    """A request that no end of a pod would help has another reason than one that waits."""
    refusal = AllocationRefused.of(METAGPU, TooManyReplicas(METAGPU, 2))
    [event] = pod_refusal_events(KnownPod("u", "team", "alice", "Failed"), refusal, NODE)

    assert event.reason == "GPURequestTooLarge"
    assert "ask for 1" in event.note


def rejected(uid: str, error: RequestError = SPLIT) -> KnownPod:
    """Return a pod that our error rejected."""
    return KnownPod(uid, "team", "web-0", "Failed", rejection=Rejection(kubelets(error)))


def matcher_at_work(clock: Callable[[], float] = lambda: 0.0) -> RefusalMatcher:
    """Return a matcher that has seen the first list, of no pods."""
    matcher = RefusalMatcher(clock)
    assert matcher.match([]) == []
    return matcher


@pytest.mark.parametrize("again", [True, False])
def test_a_rejected_pod_is_matched_once(again: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A pod's status may come again, and a pod of the same name may be another pod."""
    matcher = matcher_at_work()
    refusal = AllocationRefused.of(METAGPU, SPLIT)
    matcher.remember(refusal)
    pod, other = rejected("u-1"), rejected("u-2")

    assert matcher.match([pod]) == [(pod, refusal)]
    expected = [] if again else [(other, refusal)]
    assert matcher.match([pod] if again else [other]) == expected


def test_a_pod_that_was_rejected_before_the_start_has_no_event() -> None:
    """A restart reports nothing twice, and a later refusal alike is not an old pod's."""
    matcher = RefusalMatcher(lambda: 0.0)
    assert matcher.match([rejected("old")]) == []
    matcher.remember(AllocationRefused.of(METAGPU, SPLIT))

    found = matcher.match([rejected("old"), rejected("new")])
    assert [pod.uid for pod, _ in found] == ["new"]


def test_a_pod_without_a_refusal_is_examined_once() -> None:
    """A pod that nothing matched when its rejection appeared is nobody's later."""
    matcher = matcher_at_work()
    assert matcher.match([rejected("u-1")]) == []
    matcher.remember(AllocationRefused.of(METAGPU, SPLIT))
    assert matcher.match([rejected("u-1")]) == []


def test_a_refusal_expires() -> None:
    """A sentence of minutes ago is not why a pod is rejected now; a repeated one is recent."""
    now = [0.0]
    matcher = matcher_at_work(lambda: now[0])
    matcher.remember(AllocationRefused.of(METAGPU, SPLIT))
    now[0] = EXPIRES + 1
    assert matcher.match([rejected("u-1")]) == []

    matcher.remember(AllocationRefused.of(METAGPU, SPLIT))
    now[0] += EXPIRES
    assert len(matcher.match([rejected("u-1"), rejected("u-2")])) == 1


def test_a_storm_of_one_cause_leaves_the_refusals_of_others() -> None:
    """Many sentences of one resource and cause drop none of another resource or cause."""
    matcher = matcher_at_work()
    quiet = AllocationRefused.of(METAGPU, SPLIT)
    matcher.remember(quiet)
    for number in range(1000):
        matcher.remember(AllocationRefused(METAGPU, "Storm", f"cause <{number}>"))

    pod = rejected("u-1")
    assert matcher.match([pod]) == [(pod, quiet)]


@pytest.mark.parametrize(("more", "known"), [(REMEMBERED - 1, True), (REMEMBERED, False)])
def test_sentences_of_one_cause_are_remembered_up_to_a_number(more: int, *, known: bool) -> None:
    """The oldest goes first, and one that is repeated is the newest."""
    matcher = matcher_at_work()
    first = AllocationRefused.of(METAGPU, SPLIT)
    others = [replace(first, reason=f"cause <{number}>") for number in range(more)]
    for refusal in (others[0], first, *others):
        matcher.remember(refusal)
    assert bool(matcher.match([rejected("u-1")])) is known


def test_examined_pods_cost_no_comparison() -> None:
    """At a change of another pod no sentence is compared with thousands of rejected pods."""

    class Message(str):
        __slots__ = ()

        def __contains__(self, sentence: object) -> bool:
            compared.append(str(sentence))
            return False

    compared: list[str] = []
    matcher = matcher_at_work()
    for number in range(10):
        matcher.remember(AllocationRefused(METAGPU, "Storm", f"cause <{number}>"))
    pods = [
        KnownPod(f"u{number}", "team", "p", "Failed", rejection=Rejection(Message()))
        for number in range(20)
    ]
    matcher.match(pods)
    assert len(compared) == 200
    matcher.match(pods)
    assert len(compared) == 200


CLAIM: Final = ResourceClaimRef("team", "half", "uid-1")
OCCUPIED: Final = ResourceClaimRefused(
    CLAIM, DeviceOccupied, str(DeviceOccupied("0", "gpu-0-fraction", 50, 40))
)


def naming(uid: str, namespace: str = "team", claim: str = "half", **more: Any) -> KnownPod:  # noqa: ANN401 - any field
    """Return a pod whose container names a ResourceClaim."""
    claims = {"main": frozenset({(claim, "gpu")})}
    return KnownPod(uid, namespace, f"pod-{uid}", claims=claims, **more)


async def test_a_claim_that_is_refused_for_a_minute_has_an_event(tmp_path: Path) -> None:
    """Each pod that names it gets one, with what would help; the kubelet's own came at once."""
    async with cluster_at_work(tmp_path, Feature.POD_EVENTS) as scene:
        publish = scene.registry.events.publish
        scene.registry.apply(
            PodsListed(
                (
                    *(naming("a"), naming("b"), naming("c", claim="other"), naming("d", "alice")),
                    naming("e", phase="Succeeded"),
                )
            )
        )
        await becomes(lambda: scene.cluster.report().connected)
        for _ in range(3):
            publish(OCCUPIED)
            await anyio.wait_all_tasks_blocked()
            skip(CLAIM_LASTS / 2)
        await scene.server.until(lambda: len(scene.server.events()) == 2)

        assert sorted(seen(scene.server)) == [("Pod", "pod-a", 1), ("Pod", "pod-b", 1)]
        event = scene.server.events()[0]
        assert (event["reason"], event["type"]) == ("GPUClaimRefused", "Warning")
        assert event["note"] == (
            "the pod waits for ResourceClaim half: GPU 0: device gpu-0-fraction has 40 free "
            "shares of 50 needed; it is prepared as soon as enough of them are free"
        )


async def test_a_claim_that_was_prepared_meanwhile_has_no_event(tmp_path: Path) -> None:
    """A minute counts from the first refusal since the claim was prepared or unprepared."""
    async with cluster_at_work(tmp_path, Feature.POD_EVENTS) as scene:
        publish = scene.registry.events.publish
        scene.registry.apply(PodsListed((naming("a"), naming("b", claim="other"))))
        await becomes(lambda: scene.cluster.report().connected)
        other = msgspec.structs.replace(OCCUPIED, claim=ResourceClaimRef("team", "other", "uid-2"))
        publish(OCCUPIED)
        publish(other)
        publish(ClaimRefusalEnded(CLAIM))
        await anyio.wait_all_tasks_blocked()
        skip(CLAIM_LASTS)
        publish(OCCUPIED)
        publish(other)
        await scene.server.until(scene.server.events)
        assert seen(scene.server) == [("Pod", "pod-b", 1)]


def test_a_claim_that_nothing_is_heard_of_is_refused_for_the_first_time() -> None:
    """The kubelet repeats a refused call within 90 s: a longer gap is the end of a refusal."""
    now = [0.0]
    matcher = matcher_at_work(lambda: now[0])
    pods = [naming("a")]

    def refused_at(at: float) -> bool:
        now[0] = at
        return bool(matcher.match_claim(OCCUPIED, pods))

    assert not refused_at(0)
    assert refused_at(CLAIM_LASTS)
    later = CLAIM_LASTS + CLAIM_FORGOTTEN + 1
    assert not refused_at(later)
    assert refused_at(later + CLAIM_LASTS)


DEPLOY: Final = Path(__file__).parents[3] / "deploy"
POD_FEATURES: Final = (Feature.PODS, Feature.POD_EVENTS)
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
    async with cluster_at_work(
        tmp_path, *POD_FEATURES, feature, server=server, timing=timing
    ) as scene:
        scene.offer()
        yield scene


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
    return [rule for document in documents for rule in document.get("rules") or ()]


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
        name: {document["kind"] for document in yaml.safe_load_all((DEPLOY / name).read_text())}
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

    async with at_work(tmp_path, server, Feature.JANITOR_DRY_RUN) as scene:
        await server.until(server.events)
        add(server, "train-2")
        await server.until(lambda: "count" in str(server.events()))
        assert scene.cluster.report().features["janitor-dry-run"] == ""

    assert pods(server) == ["train-1", "train-2"]
    assert [each.body["dryRun"] for each in deletions(server)] == [["All"], ["All"]]
    assert server.events()[0]["reason"] == "RejectedPodFound"
    assert "pod train-1 would be deleted (dry run)" in server.events()[0]["note"]


async def test_a_pod_that_has_changed_is_not_deleted_by_what_was_read(tmp_path: Path) -> None:
    """A pod of the same name that is another pod by now stays; one that has gone is no error."""
    server = SimApiServer()
    add(server, "web-0", uid="old")

    async with at_work(tmp_path, server, delay=1e6) as scene:
        await becomes(lambda: removable_pods(scene.registry.snapshot))
        janitor = scene.connection.janitor
        assert janitor is not None
        server.add_pod("team", "web-0", NODE, uid="new", owner=OWNER, requests={METAGPU: 5})
        [pod] = removable_pods(snapshot_of(replace(REJECTED, uid="old", name="web-0")))
        await janitor._delete(pod)
        assert pods(server) == ["web-0"]
        server.delete_pod("team", "web-0")
        await janitor._delete(pod)

    assert len(deletions(server)) == 2
    assert server.events() == []


async def test_pods_stay_for_a_while(tmp_path: Path) -> None:
    """A rejected pod can be looked at before it goes."""
    server = SimApiServer()
    add(server, "train-1")

    async with at_work(tmp_path, server, delay=1e6) as scene:
        await becomes(lambda: removable_pods(scene.registry.snapshot))
        janitor = scene.connection.janitor
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
    for number in range(refusals.BURST + 5):
        add(server, f"train-{number}")

    async with at_work(tmp_path, server, delay=1e6) as scene:
        await becomes(lambda: len(removable_pods(scene.registry.snapshot)) == refusals.BURST + 5)
        janitor = scene.connection.janitor
        assert janitor is not None
        assert await janitor.reconcile() is not None  # it has seen all of them
        now = janitor.clock() + 1e6
        janitor.clock = lambda: now
        janitor.reconciler.trigger()
        await server.until(lambda: len(pods(server)) == 5)
        await becomes(lambda: len(removable_pods(scene.registry.snapshot)) == 5)
        assert await janitor.reconcile() == pytest.approx(refusals.REFILL)
        assert len(pods(server)) == 5


async def test_a_right_that_is_missing_is_named(tmp_path: Path) -> None:
    """Without the right to delete pods the report names it, and other features work."""
    server = SimApiServer()
    server.denied.append(("DELETE", "/pods"))
    add(server, "train-1")

    async with at_work(tmp_path, server) as scene:
        await becomes(lambda: scene.cluster.report().features["janitor"])
        assert "does not allow it" in scene.cluster.report().features["janitor"]
        assert scene.cluster.report().features["pod-events"] == ""

    assert pods(server) == ["train-1"]


async def test_a_pod_whose_deletion_is_refused_holds_up_no_other(tmp_path: Path) -> None:
    """A webhook may refuse pods for good, more than the rate allows: others go, it is reported."""
    server = SimApiServer()
    server.denied.append(("DELETE", "/pods/kept-"))
    kept = [f"kept-{number}" for number in range(refusals.BURST)]
    for name in kept:
        add(server, name)

    async with at_work(tmp_path, server) as scene:
        await becomes(lambda: scene.cluster.report().features["janitor"])
        janitor = scene.connection.janitor
        assert janitor is not None
        janitor._rate = TokenBucket(2, 1 / 0.01)
        add(server, "train-1")
        await server.until(lambda: pods(server) == kept)
        await becomes(lambda: "/pods/kept-" in scene.cluster.report().features["janitor"])


async def test_an_api_server_that_is_away_gets_one_request(tmp_path: Path) -> None:
    """An outage is not asked for each pod; afterwards all pods go."""
    server = SimApiServer()
    for number in range(5):
        add(server, f"train-{number}")

    async with at_work(tmp_path, server, delay=1e6, backoff=60.0) as scene:
        await becomes(lambda: len(removable_pods(scene.registry.snapshot)) == 5)
        janitor = scene.connection.janitor
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


class _Unplugged(SimApiServer):
    """An API server that hangs up on each deletion."""

    unplugged = True

    def _check(self, request: web.Request) -> None:
        super()._check(request)
        if request.method == "DELETE" and self.unplugged and request.transport:
            request.transport.abort()
            raise ApiError(500, "Error", "nobody gets this answer")


async def test_an_api_server_that_hangs_up_is_asked_for_one_pod(tmp_path: Path) -> None:
    """No answer is the same for every pod, and no refusal of one."""
    server = _Unplugged()
    for number in range(5):
        add(server, f"train-{number}")

    async with at_work(tmp_path, server, delay=1e6, backoff=60.0) as scene:
        await becomes(lambda: len(removable_pods(scene.registry.snapshot)) == 5)
        janitor = scene.connection.janitor
        assert janitor is not None
        await becomes(lambda: len(janitor._first_seen) == 5)
        now = janitor.clock() + 1e6
        janitor.clock = lambda: now
        janitor.reconciler.trigger()
        await becomes(lambda: janitor.reconciler.problem)
        assert len({each.target for each in deletions(server)}) == 1

        server.unplugged = False
        skip(60)
        await server.until(lambda: pods(server) == [])


def test_the_latest_refusal_is_the_pods() -> None:
    """A sentence may be a part of another one."""
    now = [0.0]
    matcher = matcher_at_work(lambda: now[0])
    for at, reason in enumerate(("5 shares are free", "5 shares are free on GPU 0")):
        now[0] = at
        matcher.remember(AllocationRefused(METAGPU, f"Cause{at}", reason))
    message = "desc = 5 shares are free on GPU 0, which is"
    found = KnownPod("u", "team", "p", "Failed", rejection=Rejection(message))
    [(_, refusal)] = matcher.match([found])
    assert refusal.cause == "Cause1"


def test_a_controller_without_a_group_is_of_the_core() -> None:
    """A ReplicationController's API version has no group."""
    pod = replace(REJECTED, owner="ReplicationController/r", owner_api="")
    controller = controller_of(pod)
    assert controller is not None
    assert (controller.api_version, controller.uid) == ("v1", "o")
