"""Judgement of a kubelet's answers: a lease never ends on silence.

A kubelet that has just started lists its pods one by one, or none for long, and it may have lost
its checkpoint. Nothing here waits, reads a file or a clock.
"""

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

import msgspec
import structlog
from msgspec.structs import replace

from metagpu.core.model.pods import PodIndex
from metagpu.core.model.shares import Holder, Lease, ShareId, gpu_of
from metagpu.core.model.snapshot import GpuState, Snapshot, once
from metagpu.core.state.facts import LeasesObserved
from metagpu.plugins.kubelet.checkpoint import MIG_PREFIX, AllocatedIds
from metagpu.plugins.kubelet.timing import TIMING, KubeletTiming

_REPETITIONS: Final = 3
"""Answers in a row of which the last is believed, if each would end all leases."""
_ABSENCES: Final = 2
"""Checkpoints in a row without an id, of which the last shows that the kubelet released it: one
that the kubelet writes while Allocate answers does not have the id yet."""

log = structlog.get_logger()


class _Naming(NamedTuple):
    """The latest checkpoint, and how many up to it do not name a lease's share."""

    version: tuple[int, int]
    absences: int


class KubeletReadiness(msgspec.Struct):
    """The judge of the kubelets that follow each other on a node.

    Attributes:
        node: the node's name. Names of static pods end with it; a kubelet knows these pods without
            the API server.
        timing: how long answers must last.
        ready: whether the present kubelet knows its pods.
        since: the event loop's time of the first answer without a break after it.
        doubted: the last answers in a row that would end all leases.
    """

    node: str
    timing: KubeletTiming = TIMING
    ready: bool = False
    since: float | None = None
    doubted: int = 0
    logged: bool = False
    _named: dict[tuple[ShareId, float], _Naming] = msgspec.field(default_factory=dict)
    _first_named: dict[str, float] = msgspec.field(default_factory=dict)
    """When a checkpoint first named each pod of the latest one, by uid."""
    _same_node: bool | None = None
    """Whether the API server's list has a pod of the kubelet's, once that is known."""
    _ran: frozenset[Holder] = frozenset()

    def restart(self) -> None:
        """Note that another kubelet runs: nothing that the last one said counts for it."""
        self.ready, self.since, self.doubted, self.logged = False, None, 0, False
        self._named.clear()

    def begin(
        self, allocated: AllocatedIds, at: float, kubelet: tuple[int, int, int] | None
    ) -> LeasesObserved:
        """Return what a checkpoint says about leases before the kubelet has answered.

        It ends none: a kubelet that has just started may write before it knows its pods.
        """
        self._note_pods(allocated, at)
        return LeasesObserved(
            {},
            at,
            kubelet_ready=False,
            allocated=allocated.resources,
            containers=allocated.containers,
            nodes=allocated.nodes,
            begins=True,
            confirms=_confirms(allocated, kubelet),
        )

    def _note_pods(self, allocated: AllocatedIds, at: float) -> None:
        self._first_named = {uid: self._first_named.get(uid, at) for uid in allocated.pods}

    def judge(
        self,
        answer: LeasesObserved | None,
        at: float,
        allocated: AllocatedIds | None,
        snapshot: Snapshot,
        *,
        running: Collection[Holder] = (),
        present: Collection[str] = (),
        kubelet: tuple[int, int, int] | None = None,
        starts: bool = False,
    ) -> LeasesObserved:
        """Return what one look at the kubelet says about leases.

        Args:
            answer: the kubelet's list of holders; `None` without a readable one.
            at: the event loop's time before the kubelet was asked.
            allocated: the kubelet's checkpoint, read after the answer; `None` if it is unknown.
            snapshot: the present leases, and the pods of the API server.
            running: holders whose containers are seen to run.
            present: uids of pods that are seen on this machine.
            kubelet: the identity of the kubelet's socket, which it makes when it starts.
            starts: whether the kubelet lists pods before it has made that socket.
        """
        confirms = _confirms(allocated, kubelet)
        if allocated is not None:
            self._note_pods(allocated, at)
        self._compare_pods(answer, allocated, snapshot.pods)
        # An absent pod may run on: only phases count.
        if self._same_node is False or (self._same_node is None and snapshot.pods.by_uid):
            pods = replace(snapshot.pods, asked=float("-inf"))
            snapshot = replace(snapshot, pods=pods)
        begins, released = not self.ready, self._released(at, allocated, snapshot, confirms)
        ended = self._ended_ids(allocated, answer, snapshot)
        released |= self._left_over(at, ended, snapshot)

        if answer is None:
            self.since = None
            answer = LeasesObserved({}, at, kubelet_ready=False)
        else:
            believed = self._believe(answer, allocated, released, snapshot, starts=starts)
            answer = replace(answer, kubelet_ready=believed)
        return replace(
            answer,
            allocated=allocated.resources if allocated else None,
            containers=allocated.containers if allocated else {},
            nodes=allocated.nodes if allocated else {},
            begins=begins,
            confirms=confirms,
            released=released,
            running=_running_ids(allocated, snapshot, present),
            ended=ended,
            stopped=self._stopped(running, snapshot),
        )

    def _compare_pods(
        self, answer: LeasesObserved | None, allocated: AllocatedIds | None, pods: PodIndex
    ) -> None:
        """Note whether the API server's list is of this node: one pod in common proves it.

        By another node's name, or of another cluster, a complete list lacks all pods of this one.
        A kubelet that lists none proves nothing, unless the list has none either.
        """
        listed = answer.pods if answer and pods.listed else ()
        named = allocated.pods if allocated else ()
        if not (pods.by_name.keys().isdisjoint(listed) and pods.by_uid.keys().isdisjoint(named)):
            self._same_node = True
        elif listed and self._same_node is None:
            self._same_node = False

    def _released(
        self,
        at: float,
        allocated: AllocatedIds | None,
        snapshot: Snapshot,
        confirms: bool,  # noqa: FBT001 - as in the fact
    ) -> frozenset[ShareId]:
        """Return the leased ids that this kubelet's checkpoint named, and names no more.

        An entry of a pod that has ended, as the API server reports, names nothing. For a grant
        whose pod is not known yet, it may be that of the ids' last holder: the lists that follow
        the grant make the kubelet write several checkpoints before it has the answer.
        The file that a kubelet finds at its start may be damaged, so that it takes nothing of it:
        for a lease with a holder, only checkpoints that it wrote itself count.
        """
        if allocated is None:
            return frozenset()
        named, version = dict[tuple[ShareId, float], _Naming](), allocated.version
        present = _Naming(version, 0)
        lasting = {
            i
            for uid, ids in allocated.pods.items()
            if not snapshot.pods.has_ended(uid, self._first_named[uid])
            for i in ids
        }

        for lease in _leases(snapshot):
            share, key = lease.share.id, (lease.share.id, lease.since)
            granted_only = lease.holder is None and not lease.from_checkpoint
            if lease.unanswered or lease.since >= at - granted_only * self.timing.written:
                continue
            before = self._named.get(key)
            if share in lasting or (before is None and share in allocated.resources):
                if confirms or lease.holder is None:
                    named[key] = present
            elif before is not None:
                named[key] = _Naming(version, before.absences + (before.version != version))
        self._named = named
        return frozenset(key[0] for key, naming in named.items() if naming.absences >= _ABSENCES)

    def _believe(
        self,
        answer: LeasesObserved,
        allocated: AllocatedIds | None,
        released: Collection[ShareId],
        snapshot: Snapshot,
        *,
        starts: bool,
    ) -> bool:
        """Return whether an answer may end leases; a ready kubelet stays ready."""
        gone = [
            lease
            for lease in _leases(snapshot)
            if lease.since < answer.at and lease.share.id not in answer.holders
        ]
        if self.ready:
            # Where all leases would end, and the checkpoint names one, the answer comes thrice. It
            # names the pod of the last admission after its end too.
            ids = allocated.resources if allocated else {}
            doubtful = not answer.holders and any(
                lease.holder and lease.share.id in ids and not _has_ended(lease, snapshot)
                for lease in gone
            )
            self.doubted = self.doubted + 1 if doubtful else 0
            return not doubtful or self.doubted >= _REPETITIONS

        if self.since is None or any(lease.unanswered for lease in _leases(snapshot)):
            self.since = answer.at  # pods are admitted one by one, and one waits
        knows_api_pods = any(not name.endswith(f"-{self.node}") for _, name in answer.pods)
        unseen = {
            f"{lease.holder.namespace}/{lease.holder.pod}"
            for lease in gone
            if lease.holder
            and lease.share.id not in released
            and (lease.holder.namespace, lease.holder.pod) not in answer.pods
            and not _has_ended(lease, snapshot)
        }
        missing = {_name(uid, snapshot) for uid in self._missing(answer, allocated, snapshot)}
        lasted = answer.at - self.since >= self.timing.readiness
        self.ready = not (missing or unseen or starts) or (knows_api_pods and lasted)
        if not self.ready and not self.logged:
            self.logged = True
            log.warning(
                "kubelet not ready",
                missing_pods=", ".join(sorted(missing | unseen)),
                reason="it does not list all pods that hold shares, or that its checkpoint names",
                effect="no lease ends",
            )
        return self.ready

    def _missing(
        self, answer: LeasesObserved, allocated: AllocatedIds | None, snapshot: Snapshot
    ) -> list[str]:
        """Return the uids of pods of the checkpoint that the answer does not have.

        The ids that a pod's init containers hold are never listed, but the others are.
        """
        return [
            uid
            for uid, ids in (allocated.pods.items() if allocated else ())
            if answer.holders.keys().isdisjoint(ids)  # the other way walks all holders
            and any(
                gpu_of(share_id) in snapshot.gpus or share_id.startswith(MIG_PREFIX)
                for share_id in ids
            )
            and not snapshot.pods.has_ended(uid, self._first_named[uid])
        ]

    def _ended_ids(
        self, allocated: AllocatedIds | None, answer: LeasesObserved | None, snapshot: Snapshot
    ) -> frozenset[ShareId]:
        """Return the ids that the checkpoint names for pods that have ended alone.

        A pod that the kubelet lists has not ended, unless the API server says so.
        """
        lasting = set[ShareId]()
        holders = answer.holders if answer else {}
        for uid, ids in allocated.pods.items() if allocated else ():
            is_listed = uid not in snapshot.pods.by_uid and not holders.keys().isdisjoint(ids)
            if is_listed or not snapshot.pods.has_ended(uid, self._first_named[uid]):
                lasting |= ids
        return frozenset(allocated.resources.keys() - lasting if allocated else ())

    def _left_over(
        self, at: float, ended: Collection[ShareId], snapshot: Snapshot
    ) -> frozenset[ShareId]:
        """Return the ids that only a checkpoint named, and for pods that have ended alone.

        The kubelet may write no other: it does so where a device plugin sends lists, and at
        admissions. A grant of an earlier daemon, to another pod, is written by then.
        """
        young = at - self.timing.written
        return frozenset(
            lease.share.id
            for lease in _leases(snapshot)
            if lease.holder is None and lease.from_checkpoint and lease.since < young
            if lease.share.id in ended
        )

    def needs_pods(self, snapshot: Snapshot) -> bool:
        """Return whether a complete list of pods would show that some have ended.

        They are pods of leases or of the latest checkpoint that the API server's list lacks.
        """
        pods = snapshot.pods
        return any(pods.may_have_ended(uid, at) for uid, at in self._first_named.items()) or any(
            pods.may_have_ended(lease.holder, lease.since)
            for lease in _leases(snapshot)
            if lease.holder
        )

    def _stopped(self, running: Collection[Holder], snapshot: Snapshot) -> frozenset[Holder]:
        """Return holders that ran and run no more, or whose pods have ended.

        Where containers cannot be seen, none ever ran.
        """
        unconfirmed = unconfirmed_holders(snapshot)
        self._ran = (self._ran | frozenset(running)) & unconfirmed
        ended = {
            lease.holder
            for lease in _leases(snapshot)
            if lease.holder in unconfirmed and _has_ended(lease, snapshot)
        }
        return (self._ran - frozenset(running)) | ended


@once
def unconfirmed_holders(snapshot: Snapshot) -> frozenset[Holder]:
    """Return the holders of leases that the present kubelet may not know."""
    return frozenset(
        lease.holder for lease in _leases(snapshot) if lease.holder and lease.unconfirmed
    )


def unlisted_pods(
    snapshot: Snapshot, allocated: AllocatedIds | None, before: float
) -> Collection[str]:
    """Return pods of the checkpoint that hold old leases, and that no list names."""
    ids = {
        lease.share.id
        for lease in _leases(snapshot)
        if lease.holder is None and lease.since < before
    }
    named = allocated.pods if ids and allocated else {}
    return [uid for uid, its in named.items() if not ids.isdisjoint(its)]


def may_change_soon(state: GpuState, pods: PodIndex) -> bool:
    """Return whether a pod that is unknown holds shares of a GPU."""
    return bool(state.allocated.keys() - state.leases.keys()) or any(
        lease.holder is None or (pods.listed and pods.find(lease.holder, None) is None)
        for lease in state.leases.values()
    )


def has_ended_pod(state: GpuState, pods: PodIndex) -> bool:
    """Return whether a pod that has ended holds shares: its lease ends soon."""
    return any(
        lease.holder is not None and pods.has_ended(lease.holder, lease.since)
        for lease in state.leases.values()
    )


def _confirms(allocated: AllocatedIds | None, kubelet: tuple[int, int, int] | None) -> bool:
    """Return whether the present kubelet wrote a checkpoint."""
    return bool(allocated and kubelet and allocated.written_at > kubelet[2])


def _leases(snapshot: Snapshot) -> Iterator[Lease]:
    """Yield the leases of the device plugin API: the kubelet's list ends no others."""
    for state in snapshot.gpus.values():
        yield from (lease for lease in state.leases.values() if lease.resource_claim is None)


def _has_ended(lease: Lease, snapshot: Snapshot) -> bool:
    """Return whether the pod of a lease is known to have ended."""
    return lease.holder is not None and snapshot.pods.has_ended(lease.holder, lease.since)


def _name(uid: str, snapshot: Snapshot) -> str:
    """Return namespace and name of a pod, its uid where the API server lists none."""
    pod = snapshot.pods.by_uid.get(uid)
    return str(pod) if pod is not None else f"uid {uid}"


def _running_ids(
    allocated: AllocatedIds | None, snapshot: Snapshot, present: Collection[str]
) -> frozenset[ShareId]:
    """Return the ids that the checkpoint names for pods that are still there."""
    known = snapshot.pods.by_uid
    pods = allocated.pods if allocated else {}
    return frozenset(
        share
        for uid, ids in pods.items()
        if (not known[uid].ended if uid in known else uid in present)
        for share in ids
    )
