"""Leases as the kubelet lists them: its PodResources service, turned into facts.

The kubelet never reports that a share was released; it only stops listing the share.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator
from itertools import chain
from pathlib import Path
from socket import gethostname
from typing import Final, NamedTuple

import anyio
import structlog
from anyio import to_thread
from grpclib.exceptions import GRPCError, StreamTerminatedError
from msgspec.structs import replace

from metagpu.core.availability.conflict import conflicting_shares
from metagpu.core.errors import describe_error
from metagpu.core.model.offers import Api
from metagpu.core.model.shares import Holder, ShareId
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.state.events import CheckpointRequested, PodEnded, PodListRequested
from metagpu.core.state.facts import (
    EarlierLeases,
    GpusFound,
    KubeletStarted,
    LeasesObserved,
    SharesClaimed,
    SharesOffered,
)
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet.checkpoint import read_allocated_ids
from metagpu.plugins.kubelet.paths import CHECKPOINT_FILE, Identity, KubeletFiles, find_files
from metagpu.plugins.kubelet.pod_list import (
    RequestsOf,
    holders_by_request,
    no_requests,
    read_leases,
)
from metagpu.plugins.kubelet.restart_guard import (
    KubeletReadiness,
    has_ended_pod,
    may_change_soon,
    unconfirmed_holders,
    unlisted_pods,
)
from metagpu.plugins.kubelet.timing import TIMING, KubeletTiming


class _Seen(NamedTuple):
    """Everything that one look at the kubelet judges.

    Attributes:
        checkpoint: the identity of the kubelet's checkpoint, `None` for an unreadable one.
    """

    answer: LeasesObserved | None
    checkpoint: tuple[int, int] | None
    kubelet: tuple[Identity, Identity]
    snapshot: Snapshot

    def equals(self, other: "_Seen") -> bool:
        """Return whether another look judged the same."""
        return (
            self.snapshot is other.snapshot
            and self[1:3] == other[1:3]
            and self.answer is not None
            and other.answer is not None
            and replace(self.answer, at=other.answer.at) == other.answer
        )


UNREAD: Final = "the kubelet's checkpoint and its list of pods are not read yet"
UNREADABLE: Final = "neither the kubelet's checkpoint nor its list of pods can be read"

log = structlog.get_logger()

Running = Callable[[Collection[Holder]], Awaitable[Collection[Holder]]]
"""Returns those of some holders whose containers are seen to run."""


Present = Callable[[Collection[str]], Awaitable[Collection[str]]]
"""Returns the uids of those of some pods that are seen on this machine."""


async def see_none(_: object) -> tuple[()]:
    """Return nothing: nothing is known of containers and pods."""
    return ()


class LeaseFollower:
    """Keeps the registry's leases as the kubelet's list and its checkpoint tell.

    Attributes:
        known: set once the leases are known that a kubelet gave before this daemon started.

    Args:
        registry: receives the facts.
        socket: the kubelet's PodResources socket.
        clock: returns the event loop's time.
        directory: the kubelet's folder for device plugins, which has its checkpoint.
        node: this node's name; this machine's name by default.
        timing: periods and deadlines.
        running: tells which containers run.
        present: tells which pods are here.
        requests_of: returns the requests of a ResourceClaim's shares.
    """

    def __init__(
        self,
        registry: Registry,
        socket: Path,
        *,
        directory: Path,
        node: str = "",
        timing: KubeletTiming = TIMING,
        clock: Callable[[], float] = anyio.current_time,
        running: Running = see_none,
        present: Present = see_none,
        requests_of: RequestsOf = no_requests,
    ) -> None:
        self._registry = registry
        self._socket = socket
        self._directory = directory
        self._timing = timing
        self._clock = clock
        self._running = running
        self._present = present
        self._requests_of = requests_of
        self._readiness = KubeletReadiness((node or gethostname()).lower(), timing)
        self._kubelet: tuple[Identity, Identity] = (None, None)
        self._believed: tuple[Identity, Identity] = (None, None)
        """The last kubelet that knew its pods."""
        self._silent = False
        """Whether the last question had no answer."""
        self._settled: _Seen | None = None
        """The last look, if it changed nothing and waited for nothing: an equal one is the same."""
        self._files = KubeletFiles()
        self._failures = LogOnce()
        self.known = anyio.Event()
        self._triggered = anyio.Event()
        self._urgent = anyio.Event()
        self._looking = anyio.Lock()
        self._looked_at = float("-inf")
        """When the last look began that the kubelet answered."""

    async def run(self) -> None:
        """Look at the kubelet until cancelled.

        Until the first good look, nothing is granted: pods may hold it.

        The kubelet is asked at once; soon after every grant, change of the offer or start of a
        kubelet; at once at the end of a pod that holds shares (where the API server reports pods),
        and for a GPU that is found; and periodically, more often while shares are unavailable, or
        while it is not known who holds what. One that lists no pods is asked ever more rarely, and
        when its files change.
        """
        kinds = SharesClaimed, SharesOffered, KubeletStarted, PodEnded, GpusFound
        delay = 0.0

        async def receive() -> None:
            async for event in events:
                if not isinstance(event, PodEnded | GpusFound):
                    self._triggered.set()
                    self._settled = None  # of another snapshot: it would keep those shares
                elif isinstance(event, GpusFound) or self._silent or self._holds_shares(event):
                    self._urgent.set()

        with self._registry.events.subscribe(*kinds) as events:
            async with anyio.create_task_group() as group:
                group.start_soon(receive)

                while True:
                    self._triggered, self._urgent = anyio.Event(), anyio.Event()
                    async with self._looking:
                        await self.look()
                    delay = await self._wait(self._next_delay(delay))

    async def refresh(self) -> None:
        """Look at the kubelet until it answers; callers of the same moment share one look."""
        called = self._clock()
        async with self._looking:
            while self._looked_at < called:
                await self.look()
                if self._silent:
                    await anyio.sleep(self._timing.settle)

    async def _wait(self, delay: float) -> float:
        """Wait until the next look is due; return the delay, 0 after a trigger.

        The kubelet lists a granted pod some time later. A pod that has ended at the API server has
        ended at the kubelet before, and the scheduler tries waiting pods in this very moment.
        """
        async with anyio.create_task_group() as group:

            async def wait_triggered() -> None:
                nonlocal delay
                with anyio.move_on_after(delay) as waiting:
                    await self._triggered.wait()
                if not waiting.cancelled_caught:
                    delay = 0.0
                    await anyio.sleep(self._timing.settle)
                group.cancel_scope.cancel()

            async def wait_changed() -> None:
                nonlocal delay
                files, listed = self._files, self._registry.snapshot.pods.listed
                while files == self._files and listed == self._registry.snapshot.pods.listed:
                    await anyio.sleep(self._timing.settle)
                    files = await self._identify()
                delay = 0.0
                group.cancel_scope.cancel()

            group.start_soon(wait_triggered)
            if self._rests():
                group.start_soon(wait_changed)
            await self._urgent.wait()
            delay = 0.0
            await anyio.sleep(self._timing.after_end)
            group.cancel_scope.cancel()
        return delay

    def _holds_shares(self, event: PodEnded) -> bool:
        """Return whether an ended pod holds shares; most never did."""
        pod = event.pod
        return any(
            lease.holder is not None
            and (lease.holder.namespace, lease.holder.pod) == (pod.namespace, pod.name)
            for state in self._registry.snapshot.gpus.values()
            for lease in state.leases.values()
        )

    async def look(self) -> None:
        """Ask the kubelet once, read its checkpoint, and apply what they say.

        Without an answer, the checkpoint of a kubelet that may not know its pods still counts.
        """
        await self._meet_kubelet()
        kubelet = self._files.kubelet
        if not self._readiness.ready:
            await self._begin_leases()

        asked = self._clock()
        answer = await self._ask(asked)
        allocated = await to_thread.run_sync(read_allocated_ids, self._directory)
        running = await self._see_running()
        old = asked - self._timing.readiness
        present = await self._present(unlisted_pods(self._registry.snapshot, allocated, old))
        if (await self._identify()).kubelet != kubelet:
            answer = None  # it may be the last kubelet's, and the file the next one's
            allocated = None
        if answer is None and self._readiness.ready:
            return
        self._looked_at = asked
        snapshot = self._registry.snapshot
        seen = _Seen(answer, allocated.version if allocated else None, kubelet, snapshot)
        if self._settled is not None and seen.equals(self._settled):
            return

        fact = self._readiness.judge(
            answer,
            asked,
            allocated,
            snapshot,
            running=running,
            present=present,
            kubelet=kubelet[1],
            starts=self._starts(kubelet),
        )
        changed = self._registry.apply(fact)
        self._note_known(known=fact.kubelet_ready or allocated is not None)
        if needs_pods := self._readiness.needs_pods(self._registry.snapshot):
            self._registry.events.publish(PodListRequested(self._clock()))
        if self._readiness.ready:
            self._believed = kubelet
        if answer is not None:
            needs_checkpoint = self._request_checkpoint(answer)
            self._log_unconfirmed()
            waits = changed or needs_pods or needs_checkpoint or self._waits()
            self._settled = None if waits else seen

    async def _meet_kubelet(self) -> None:
        """Look at the kubelet's files: a new kubelet is not bound by what another said."""
        self._files = await self._identify()
        kubelet, known = self._files.kubelet, self._registry.snapshot.kubelet
        if kubelet != self._kubelet:
            self._kubelet = kubelet
            self._readiness.restart()
        if kubelet[1] is not None and (known is None or kubelet[1][2] > known[2]):
            # Before it is asked: what it says now is not of an earlier kubelet.
            self._registry.apply(KubeletStarted(kubelet[1]))

    async def _ask(self, asked: float) -> LeasesObserved | None:
        """Return the kubelet's list of holders, `None` after any error: leases stay then."""
        answer = None
        try:
            answer = await read_leases(self._socket, asked, self._timing.poll_deadline)
            snapshot = self._registry.snapshot
            named = holders_by_request(answer.of_claims, snapshot, self._requests_of)
            answer = replace(answer, of_claims=named)
            self._failures.clear(self._socket)
        except Exception as error:  # noqa: BLE001 - leases stay after any error
            # A timeout has no text of its own.
            if self._failures.is_new(self._socket, reason := describe_error(error)):
                _log_failure(error, self._socket, reason)
        self._silent = answer is None
        return answer

    async def _begin_leases(self) -> None:
        """Begin the leases that the checkpoint names: the kubelet may answer late.

        Without a file and without a kubelet nothing of ours is given to anybody.
        """
        files, now = self._files, self._clock()
        allocated = await to_thread.run_sync(read_allocated_ids, self._directory)
        if (await self._identify()).kubelet != files.kubelet:
            return  # the next look is soon
        if allocated is not None:
            self._registry.apply(self._readiness.begin(allocated, now, files.kubelet[1]))
        absent = files.checkpoint is None and files.kubelet[1] is None
        if allocated is not None or absent:
            self._note_known(known=True)

    def _note_known(self, *, known: bool) -> None:
        """Note whether the leases of earlier are known; once they are, they stay so."""
        if known:
            self.known.set()
            self._registry.apply(EarlierLeases(""))
            if self._failures.clear("unknown"):
                log.info("leases known")
        elif not self.known.is_set() and self._failures.is_new("unknown", ""):
            self._registry.apply(EarlierLeases(UNREADABLE))
            log.warning(
                "leases unknown",
                reason=UNREADABLE,
                effect="no share is granted",
                socket=str(self._socket),
                checkpoint=str(self._directory / CHECKPOINT_FILE),
            )

    async def _see_running(self) -> Collection[Holder]:
        holders = unconfirmed_holders(self._registry.snapshot)
        return await self._running(holders) if holders else ()

    def _starts(self, kubelet: tuple[Identity, Identity]) -> bool:
        """Return whether a kubelet lists pods and has no plugin socket of its own yet.

        A kubelet reads its checkpoint with that: until then its list has no shares.
        """
        lister, socket = self._believed
        return socket is not None and kubelet[0] != lister and kubelet[1] in (None, socket)

    async def _identify(self) -> KubeletFiles:
        return await to_thread.run_sync(find_files, self._socket, self._directory)

    def _waits(self) -> bool:
        """Return whether time alone, or what no answer shows, can change a lease."""
        snapshot = self._registry.snapshot
        return (
            not self._readiness.ready
            or bool(self._readiness.doubted or unconfirmed_holders(snapshot))
            or any(
                has_ended_pod(state, snapshot.pods) or may_change_soon(state, snapshot.pods)
                for state in snapshot.gpus.values()
            )
        )

    def _request_checkpoint(self, answer: LeasesObserved) -> bool:
        """Request a checkpoint of the kubelet while one can decide about a lease."""
        states = self._registry.snapshot.gpus.values()
        held = (i for state in states for i in chain(_allocated_shares(state), state.allocated))
        needed = not self._readiness.ready or any(i not in answer.holders for i in held)
        if needed:
            self._registry.events.publish(CheckpointRequested())
        return needed

    def _log_unconfirmed(self) -> None:
        """Warn of pods that the kubelet lists without the shares that they hold."""
        holders = unconfirmed_holders(self._registry.snapshot) if self._readiness.ready else ()
        pods = ", ".join(sorted({f"{holder.namespace}/{holder.pod}" for holder in holders}))
        if not pods:
            self._failures.clear("forgotten")
        elif self._failures.is_new("forgotten", pods):
            log.warning(
                "kubelet forgot devices",
                pods=pods,
                reason="it started without its checkpoint",
                effect="they keep their shares while this daemon runs",
                fix="delete these pods before the next restart of metagpu",
            )

    def _next_delay(self, delay: float) -> float:
        """Return the delay to the next look, after one with this delay."""
        timing, snapshot = self._timing, self._registry.snapshot
        states = snapshot.gpus.values()
        if self._rests():
            return min(max(2 * delay, timing.settle), timing.contended_period)
        if not self._readiness.ready or self._readiness.doubted:
            return timing.settle
        contended = any(conflicting_shares(gpu) for gpu in states if gpu.api is Api.DEVICE_PLUGIN)
        longest = timing.contended_period if contended else timing.poll_period
        if self._settled is not None and self._settled.snapshot is snapshot:
            return longest
        if any(has_ended_pod(state, snapshot.pods) for state in states):
            return min(max(2 * delay, timing.after_end), longest)
        if any(may_change_soon(state, snapshot.pods) for state in states):
            # A pod is being admitted: ask soon, then later.
            return min(max(2 * delay, timing.settle), longest)
        return longest

    def _rests(self) -> bool:
        """Return whether no pods are listed, and only changed files can say more.

        A grant is judged by the checkpoint once that may name it, and a container is seen to end.
        """
        snapshot, young = self._registry.snapshot, self._clock() - 2 * self._timing.written
        return (
            self._silent
            and not self._readiness.ready
            and not unconfirmed_holders(snapshot)
            and not any(
                lease.since > young
                for state in snapshot.gpus.values()
                for lease in state.leases.values()
            )
        )


def _allocated_shares(state: GpuState) -> Iterator[ShareId]:
    """Yield the leased shares of a GPU that the kubelet lists by their ids."""
    return (i for i, lease in state.leases.items() if lease.resource_claim is None)


def _log_failure(error: Exception, socket: Path, reason: str) -> None:
    """Log a failed request; an unexpected error with its traceback."""
    expected = isinstance(error, OSError | GRPCError | StreamTerminatedError)
    log.warning(
        "pod resources unavailable",
        socket=str(socket),
        error=reason,
        effect="leases stay as they are",
        exc_info=None if expected else error,
    )
