"""Judgement of a kubelet's answers, case by case."""

import pytest

from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import Holder, ResourceName, ShareId
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import (
    GpusFound,
    KubeletStarted,
    LeasesObserved,
    PodsListed,
    SharesClaimed,
)
from metagpu.plugins.kubelet import restart_guard
from metagpu.plugins.kubelet.checkpoint import AllocatedIds
from metagpu.plugins.kubelet.pod_list import parse_leases
from metagpu.plugins.kubelet.restart_guard import KubeletReadiness
from metagpu.plugins.kubelet.timing import TIMING
from tests.rigs.build import after, gpu, layout_of
from tests.rigs.logs import capture_module_logs

GPU = gpu(0)
LAYOUT = layout_of(GPU)
SHARE, OTHER = LAYOUT.shares[:2]
NODE = after(GpusFound((GPU,), at=0), LAYOUT.offer_fact)
ALICE = Holder("team", "alice", "main")
HELD = after(LeasesObserved({SHARE.id: ALICE}, at=1), since=NODE)
CLAIMED = after(SharesClaimed((SHARE,), at=0), since=NODE)
KUBELET = (0, 0, 100)
WEB = KnownPod("w", "team", "web", "Running")


def answer(at: float, *holders: ShareId, pods: tuple[str, ...] = ("web",)) -> LeasesObserved:
    """Return a list of alice's shares, and of pods without any."""
    listed = frozenset(("team", name) for name in (*pods, *(["alice"] if holders else [])))
    return LeasesObserved(dict.fromkeys(holders, ALICE), at, pods=listed)


def file(written_at: int, *ids: ShareId, uid: str = "uid") -> AllocatedIds:
    """Return a checkpoint that names ids of a pod."""
    names = dict.fromkeys(ids, ResourceName("cnvrg.io/metagpu"))
    return AllocatedIds({uid: frozenset(ids)} if ids else {}, names, 7, written_at)


def judged(
    judge: KubeletReadiness,
    at: float,
    answered: LeasesObserved | None,
    allocated: AllocatedIds | None,
    snapshot: Snapshot = HELD,
) -> LeasesObserved:
    """Return the judgement of a look."""
    return judge.judge(answered, at, allocated, snapshot, kubelet=KUBELET)


def ready() -> KubeletReadiness:
    """Return the judge of a kubelet that knows its pods."""
    judge = KubeletReadiness("node-1")
    assert judged(judge, 2, answer(2, SHARE.id), file(200, SHARE.id)).kubelet_ready
    return judge


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\x01garbage", b"\n\x05abc", b"\n\x02\n\x09", b"\x08\x01", b"\x00\xff"]
)
def test_bytes_that_are_no_list_are_an_error(data: bytes) -> None:
    """Bytes that the generated classes take for an empty list are refused."""
    with pytest.raises(ValueError, match=r"field|number|kind|type"):
        parse_leases(data, 1)


def test_a_field_of_a_newer_kubelet_is_no_error() -> None:
    """A well-formed field that is not known is passed over."""
    assert parse_leases(b"\x7a\x01x", 1) == LeasesObserved({}, 1)


def test_an_answer_that_would_end_all_leases_is_not_believed_at_once() -> None:
    """An empty list counts when it comes three times, while the checkpoint names a holder."""
    judge = ready()
    looks = [judged(judge, at, answer(at), file(200, SHARE.id)) for at in (3, 4, 5)]

    assert [look.kubelet_ready for look in looks] == [False, False, True]


def test_the_checkpoint_confirms_that_all_leases_ended() -> None:
    """An empty list counts at once where the checkpoint names no holder either."""
    assert judged(ready(), 3, answer(3), file(300)).kubelet_ready


def test_an_answer_that_ends_the_leases_of_ended_pods_is_believed_at_once() -> None:
    """The checkpoint names the pod of the last admission also after its end."""
    ended = PodsListed((KnownPod("uid", "team", "alice", "Succeeded"),))
    snapshot = after(ended, since=HELD)

    assert judged(ready(), 3, answer(3), file(200, SHARE.id), snapshot).kubelet_ready


@pytest.mark.parametrize("same", [True, False])
def test_pods_that_a_list_of_another_node_lacks_have_not_ended(*, same: bool) -> None:
    """By a wrong name of the node, the API server's list has none of the kubelet's pods.

    A kubelet that has just started may list none of its pods, or one without shares.
    """
    listed = PodsListed((WEB,) if same else (), asked=3)
    snapshot, checkpoint = after(listed, since=HELD), file(50, SHARE.id)
    judge = KubeletReadiness("node-1")
    judge.begin(checkpoint, 2, KUBELET)
    for at, pods in ((4, ("web",)), (5, ())):
        look = judged(judge, at, answer(at, pods=pods), checkpoint, snapshot)
        assert look.kubelet_ready is same
        assert (SHARE.id in look.ended) is same
        judge.restart()


def test_a_kubelet_without_pods_proves_no_list_to_be_of_this_node() -> None:
    """A daemon and a kubelet start together, and the API server lists another node's pods."""
    judge, named = KubeletReadiness("node-1"), file(50, SHARE.id)
    snapshot = after(judge.begin(named, 2, KUBELET), PodsListed((WEB,), asked=3), since=NODE)
    for at in (4, 5 + TIMING.written, 6 + TIMING.readiness):
        look = judged(judge, at, answer(at, pods=()), named, snapshot)
        assert not look.kubelet_ready
        assert not look.ended
        assert not look.released

    assert judged(judge, 70, answer(70), named, snapshot).released == {SHARE.id}


def test_a_list_without_the_mirror_of_a_static_pod_ends_nothing() -> None:
    """The mirror may be deleted, and is made again: the kubelet alone knows its static pods.

    It has just started, and has not admitted the pod again.
    """
    judge, named = KubeletReadiness("node-1"), file(50, SHARE.id, uid="f" * 32)
    snapshot = after(judge.begin(named, 2, KUBELET), PodsListed((WEB,), asked=3), since=NODE)
    for at in (4, 5 + TIMING.written):
        look = judged(judge, at, answer(at), named, snapshot)
        assert not look.kubelet_ready
        assert not look.ended
        assert not look.released


def test_another_list_ends_the_doubt() -> None:
    """Empty lists count only one after the other."""
    judge, looks = ready(), []
    for at, ids in enumerate(((), (), (SHARE.id,), ()), start=3):
        looks.append(judged(judge, at, answer(at, *ids), file(200, SHARE.id)).kubelet_ready)

    assert looks == [False, False, True, False]


def test_a_claim_that_two_checkpoints_dropped_has_ended() -> None:
    """A checkpoint that named a claim, and two that do not, show that its pod is gone."""
    judge = ready()
    files = [file(200, SHARE.id), file(300), file(300), file(400)]
    looks = [judged(judge, at, answer(at), ids, CLAIMED) for at, ids in enumerate(files, start=3)]

    assert [look.released for look in looks] == [set(), set(), set(), {SHARE.id}]


def test_a_claim_of_an_ended_pod_has_ended() -> None:
    """Three checkpoints that name a claim for a pod that the API server reports as ended count."""
    judge, files = ready(), [file(100 * at, SHARE.id) for at in (3, 4, 4, 5)]
    snapshot = after(PodsListed((KnownPod("uid", "team", "alice", "Succeeded"),)), since=CLAIMED)
    judged(judge, 2, answer(2), file(150), NODE)  # the claim is a new one
    looks = [judged(judge, at, answer(at), ids, snapshot) for at, ids in enumerate(files, start=3)]

    assert [look.released for look in looks] == [set(), set(), set(), {SHARE.id}]


def test_a_claim_that_was_not_named_yet_has_not_ended() -> None:
    """Checkpoints without a claim show nothing before one has named it."""
    judge = KubeletReadiness("node-1")
    looks = [judged(judge, at, answer(at), file(100 * at), CLAIMED) for at in (3, 4, 5, 6)]

    assert not any(look.released for look in looks)


@pytest.mark.parametrize("names_it", [True, False])
def test_the_last_holder_of_the_same_ids_releases_no_claim(*, names_it: bool) -> None:
    """Lists that follow a grant make the kubelet write before it has the answer."""
    judge, granted = ready(), 10.0
    ended = PodsListed((KnownPod("uid", "team", "alice", "Succeeded"),))
    snapshot = after(ended, SharesClaimed((SHARE,), at=granted), since=NODE)
    judged(judge, 5, answer(5), file(200, SHARE.id), NODE)
    before = [SHARE.id] if names_it else []
    files = [file(200, SHARE.id), *(file(300 + n, *before) for n in range(4))]
    for n, ids in enumerate(files):
        at = granted + 0.01 * (n + 1)
        assert not judged(judge, at, answer(at), ids, snapshot).released

    for n in range(4):
        at = granted + TIMING.written + n + 1
        written = file(400 + n, SHARE.id, uid="next")
        assert not judged(judge, at, answer(at), written, snapshot).released


def test_a_claim_that_waits_for_hardware_is_not_released() -> None:
    """While Allocate waits, a checkpoint that drops the last holder says nothing."""
    judge = ready()
    waiting = after(SharesClaimed((SHARE,), at=1, unanswered=True), since=NODE)
    judged(judge, 3, answer(3), file(200, SHARE.id), waiting)
    looks = [judged(judge, at, answer(at), file(100 * at), waiting) for at in (4, 5, 6)]

    assert not any(look.released for look in looks)


def test_a_file_that_the_kubelet_did_not_write_releases_no_holder() -> None:
    """The file of an earlier kubelet may be one that this kubelet does not take."""
    judge = KubeletReadiness("node-1")
    files = [file(50, SHARE.id), file(200), file(300), file(400)]
    looks = [judged(judge, at, answer(at), ids) for at, ids in enumerate(files, start=3)]

    assert not any(look.released or look.kubelet_ready for look in looks)
    assert [look.confirms for look in looks] == [False, True, True, True]


def test_a_waiting_allocate_delays_the_belief_in_a_new_kubelet() -> None:
    """Pods are admitted one by one: the time counts from the end of a wait in Allocate."""
    judge, long = KubeletReadiness("node-1"), TIMING.readiness
    waiting = after(SharesClaimed((OTHER,), at=1, unanswered=True), since=HELD)
    looks = [(3, waiting), (3 + long, waiting), (4 + long, HELD), (3 + 2 * long, HELD)]
    believed = [
        judged(judge, at, answer(at), file(200, SHARE.id), snapshot).kubelet_ready
        for at, snapshot in looks
    ]

    assert believed == [False, False, False, True]


def test_an_ended_pod_is_not_missing() -> None:
    """A pod that the API server reports as ended needs not be listed."""
    ended = PodsListed((KnownPod("uid", "team", "alice", "Failed"),))
    snapshot = after(ended, since=HELD)

    judge = KubeletReadiness("node-1")
    assert judged(judge, 3, answer(3), file(200, SHARE.id), snapshot).kubelet_ready


def test_an_init_container_of_a_listed_pod_is_not_missing() -> None:
    """A pod is listed although its init containers' shares are not."""
    judge = KubeletReadiness("node-1")

    assert judged(judge, 3, answer(3, SHARE.id), file(200, SHARE.id, OTHER.id)).kubelet_ready


def test_a_running_pod_keeps_its_init_containers_shares() -> None:
    """The API server knows that the pod behind a claim runs."""
    running = PodsListed((KnownPod("uid", "team", "alice", "Pending"),))
    fact = judged(ready(), 3, answer(3), file(200, SHARE.id), after(running, since=CLAIMED))

    assert fact.running == {SHARE.id}


@pytest.mark.parametrize(
    ("pods", "ended"),
    [
        (None, set()),
        ([KnownPod("uid", "team", "alice", "Running")], set()),
        ([KnownPod("uid", "team", "alice", "Succeeded")], {SHARE.id, OTHER.id}),
        ([WEB], {SHARE.id, OTHER.id}),
    ],
)
def test_the_checkpoint_may_name_a_pod_that_has_ended(
    pods: list[KnownPod] | None, ended: set[ShareId]
) -> None:
    """The API server says that it has; without one every pod of the checkpoint counts."""
    snapshot = HELD if pods is None else after(PodsListed(tuple(pods), asked=3), since=HELD)
    named = file(200, SHARE.id, OTHER.id)

    assert judged(ready(), 3, answer(3), named, snapshot).ended == ended


@pytest.mark.parametrize(
    ("pods", "granted", "released"),
    [
        (None, False, set()),
        ([KnownPod("uid", "team", "alice", "Running")], False, set()),
        ([KnownPod("uid", "team", "alice", "Succeeded")], True, set()),
        ([KnownPod("uid", "team", "alice", "Succeeded")], False, {SHARE.id}),
        ([WEB], False, {SHARE.id}),
    ],
)
def test_what_a_checkpoint_alone_named_ends_with_its_pod(
    pods: list[KnownPod] | None, *, granted: bool, released: set[ShareId]
) -> None:
    """No other checkpoint is needed, unless the ids were granted again since."""
    judge, named = KubeletReadiness("node-1"), file(200, SHARE.id)
    begun = judge.begin(named, 2, KUBELET)
    snapshot = after(begun, since=NODE)
    if granted:
        snapshot = after(SharesClaimed((SHARE,), at=3), since=snapshot)
    if pods is not None:
        snapshot = after(PodsListed(tuple(pods), asked=3), since=snapshot)
    early, late = (2 + TIMING.written, 2.1 + TIMING.written)

    assert judged(judge, early, answer(early), named, snapshot).released == set()
    assert judged(judge, late, answer(late), named, snapshot).released == released


def test_a_pod_that_a_complete_list_lacks_has_ended() -> None:
    """A pod deleted while the kubelet was down is in no list: nobody waits for it."""
    gone = after(KubeletStarted(KUBELET), PodsListed((WEB,), asked=3), since=HELD)

    assert judged(KubeletReadiness("node-1"), 4, answer(4), file(50), gone).kubelet_ready


def test_a_list_requested_before_a_pod_came_shows_nothing_of_its_end() -> None:
    """The pods of leases are asked for again: a late watch may lack a pod that runs."""
    judge = KubeletReadiness("node-1")
    early = after(KubeletStarted(KUBELET), PodsListed((), asked=0.5), since=HELD)
    assert not judged(judge, 4, answer(4), file(50), early).kubelet_ready
    assert judge.needs_pods(early)

    listed = after(PodsListed((KnownPod("uid", "team", "alice", "Running"),), asked=5), since=early)
    assert not judged(judge, 6, answer(6), file(50), listed).kubelet_ready
    assert not judge.needs_pods(listed)


def test_the_log_names_the_pods_that_a_kubelet_does_not_list() -> None:
    """An operator reads which pods the leases of the node wait for."""
    running = after(PodsListed((KnownPod("other", "team", "bob", "Running"),)), since=HELD)
    with capture_module_logs(restart_guard) as logs:
        judged(KubeletReadiness("node-1"), 4, answer(4), file(50, OTHER.id, uid="other"), running)

    assert [log["missing_pods"] for log in logs] == ["team/alice, team/bob"]


def test_a_static_pod_has_not_ended_while_the_kubelet_lists_it() -> None:
    """The API server has it under another uid."""
    snapshot = after(PodsListed((), asked=3), since=HELD)
    named = file(200, SHARE.id, OTHER.id)

    assert judged(ready(), 3, answer(3, SHARE.id), named, snapshot).ended == set()


def test_a_container_that_ran_and_runs_no_more_has_stopped() -> None:
    """A forgotten holder whose container is seen to end does not hold its shares."""
    snapshot = after(KubeletStarted((0, 0, 1)), since=HELD)
    judge = KubeletReadiness("node-1")
    unseen = judge.judge(answer(2), 2, None, snapshot)
    seen = judge.judge(answer(3), 3, None, snapshot, running={ALICE})
    stopped = judge.judge(answer(4), 4, None, snapshot)

    assert [observed.stopped for observed in (unseen, seen, stopped)] == [set(), set(), {ALICE}]
