"""A discrete-event model of a stock scheduler and kubelet in front of one node's offers.

The scheduler knows a number for each resource, some time late, and subtracts what it has bound.
The kubelet admits one pod after the other, and fails a pod that finds too little: its controller
creates another one, later each time.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import fmean, quantiles
from typing import NamedTuple, Protocol

SCHEDULING_S = 0.003
"""The scheduler's time for one pod."""
BINDING_S = 0.01
"""From a binding to the kubelet, and from the failure of a pod to the scheduler."""
ADMISSION_S = 0.01
"""The kubelet's time for one pod."""
RELEASE_S = 0.03
"""From a pod's end to the plugin, which hears of it from the API server as the scheduler does, and
then asks the kubelet."""
POLLED_RELEASE_S = 5.0
"""The same, in the mean, where the plugin asks the kubelet every ten seconds."""
TERMINATION_S = 1.5
"""From the deletion of a pod, which the plugin may know of, to its end."""
CONTAINERS_END_S = 1.0
"""From the end of a pod's containers, which the plugin may know of, to that of the pod [measured,
Kubernetes 1.34]; of pods that end by themselves."""
STATUS_PERIOD_S = 10.0
"""The kubelet's `nodeStatusUpdateFrequency`: it writes its own count of what is listed."""
STATUS_S = 0.03
"""From the kubelet's count to the number at the scheduler [measured: 10 to 50 ms]."""

BackOff = Callable[[int], float]
"""Seconds from the failure of a pod, which had so many before, to the pod that replaces it."""


def restart_back_off(failures: int) -> float:
    """Return the back-off of a controller that is in no hurry: it doubles, up to a minute."""
    return min(60.0, 2.0**failures)


def job_back_off(failures: int) -> float:
    """Return the back-off of an index of a Job [`job_controller.go` of Kubernetes 1.36]."""
    return min(600.0, 10.0 * 2.0**failures)


@dataclass(eq=False)
class Pod:
    """One request, and its failures so far. Times are seconds.

    Attributes:
        deleted: whether the pod is deleted at its time; the others end by themselves.
    """

    resource: str
    size: int
    arrives: float
    stays: float
    deleted: bool = True
    failures: int = 0


class Node(Protocol):
    """The plugin's side: what it offers, and where pods go."""

    def amounts(self) -> Mapping[str, int]:
        """Return the number of each resource that the Node should show."""

    def listed(self) -> Mapping[str, int]:
        """Return the number of each resource that the kubelet counts: what is listed Healthy."""

    def admit(self, pod: Pod) -> bool:
        """Admit a pod as kubelet and plugin together do; return whether it fitted."""

    def announce(self, pod: Pod) -> None:
        """Note that a pod terminates; it holds its shares until `release`."""

    def release(self, pod: Pod, now: float) -> None:
        """End a pod: the kubelet may give its shares to another one."""

    def advance(self, now: float) -> float:
        """Change what is on offer by leases and clock; return when to be called again."""

    def use(self) -> float:
        """Return the part of the GPUs that pods hold."""


class Outcome(NamedTuple):
    """The results of one run.

    Attributes:
        refusals: failed pods for each placed one.
        use: the mean part of the GPUs that is held.
        wait: the mean of the seconds from a pod's arrival to its admission, or to the end.
        late: the 95th percentile of these.
    """

    refusals: float
    use: float
    wait: float
    late: float


@dataclass(eq=False)
class Cluster:
    """Scheduler, kubelet and controllers around one node.

    The scheduler tries a pod that waits again when its resource's number rises or a pod of the
    resource ends, at once: Kubernetes has no back-off for these while it is idle, since 1.33.

    Attributes:
        delay: seconds until the scheduler knows the node's numbers; `None` for a kubelet that
            reports them every ten seconds by itself. It does so beside the plugin, too.
        raise_delay: the same for a number that rises, in addition.
        announced: whether the plugin knows which pods are about to end.
        release: seconds from a pod's end until the plugin knows it.
        back_off: the delay of the controller that replaces failed pods.
    """

    node: Node
    delay: float | None
    raise_delay: float = 0.1
    announced: bool = False
    release: float = RELEASE_S
    back_off: BackOff = restart_back_off
    now: float = 0.0
    admitted: int = 0
    refusals: int = 0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: "count[int]" = field(default_factory=count)
    _queue: deque[Pod] = field(default_factory=deque)
    _waiting: dict[str, list[Pod]] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)
    _sent: dict[str, int] = field(default_factory=dict)
    _bound: Counter[str] = field(default_factory=Counter)
    _arrived: deque[Pod] = field(default_factory=deque)
    _waits: list[float] = field(default_factory=list)
    _use: float = 0.0
    _begins: float = 0.0
    _wake_at: float = 0.0

    def run(self, pods: Sequence[Pod], begins: float, ends: float) -> Outcome:
        """Run until all pods have arrived; return the results from `begins` on."""
        self._begins = begins
        self._seen = dict(self.node.amounts())
        self._sent = dict(self._seen)
        self._advance()
        self._at(STATUS_PERIOD_S, self._report)
        for pod in pods:
            self._at(pod.arrives, partial(self._enqueue, pod))

        while self._events and self._events[0][0] <= ends:
            at, _, event = heapq.heappop(self._events)
            self._add_use(at)
            self.now = at
            event()
        self._add_use(ends)
        late = [
            other for those in self._waiting.values() for other in those if other.arrives >= begins
        ]
        waits = [*self._waits, *(ends - other.arrives for other in late)]
        placed = max(1, len(self._waits))
        use = self._use / (ends - begins)
        return Outcome(self.refusals / placed, use, fmean(waits), quantiles(waits, n=20)[-1])

    def _add_use(self, until: float) -> None:
        self._use += self.node.use() * max(0.0, until - max(self.now, self._begins))

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _in(self, seconds: float, event: Callable[[], None]) -> None:
        self._at(self.now + seconds, event)

    def _enqueue(self, pod: Pod) -> None:
        self._queue.append(pod)
        if len(self._queue) == 1:
            self._in(SCHEDULING_S, self._schedule)

    def _schedule(self) -> None:
        pod = self._queue.popleft()
        if self._bound[pod.resource] + pod.size <= self._seen[pod.resource]:
            self._bound[pod.resource] += pod.size
            self._in(BINDING_S, partial(self._arrive, pod))
        else:
            self._waiting.setdefault(pod.resource, []).append(pod)
        if self._queue:
            self._in(SCHEDULING_S, self._schedule)

    def _retry(self, resource: str) -> None:
        for pod in self._waiting.pop(resource, ()):
            self._enqueue(pod)

    def _arrive(self, pod: Pod) -> None:
        self._arrived.append(pod)
        if len(self._arrived) == 1:
            self._in(ADMISSION_S, self._admit)

    def _admit(self) -> None:
        pod = self._arrived.popleft()
        if self.node.admit(pod):
            self.admitted += 1
            if self.now >= self._begins:
                self._waits.append(self.now - pod.arrives)
            self._in(pod.stays, partial(self._delete, pod))
        else:
            self.refusals += self.now >= self._begins
            self._in(BINDING_S, partial(self._free, pod))
            self._in(self.back_off(pod.failures), partial(self._enqueue, pod))
            pod.failures += 1
        self._advance()
        if self._arrived:
            self._in(ADMISSION_S, self._admit)

    def _delete(self, pod: Pod) -> None:
        if self.announced:
            self.node.announce(pod)
            self._advance()
        last = TERMINATION_S if pod.deleted else CONTAINERS_END_S
        self._in(last, partial(self._end, pod))

    def _end(self, pod: Pod) -> None:
        self.node.release(pod, self.now)
        self._in(self.release, self._advance)
        self._free(pod)

    def _free(self, pod: Pod) -> None:
        self._bound[pod.resource] -= pod.size
        self._retry(pod.resource)

    def _advance(self) -> None:
        """Change what is on offer, and send the numbers that changed."""
        self._wake_at = self.node.advance(self.now)
        if self._wake_at < float("inf"):
            self._at(self._wake_at, partial(self._wake, self._wake_at))
        if self.delay is None:
            return
        for resource, amount in self.node.amounts().items():
            if amount != (before := self._sent[resource]):
                self._sent[resource] = amount
                late = self.raise_delay if amount > before else 0.0
                self._in(self.delay + late, partial(self._see, resource))

    def _wake(self, at: float) -> None:
        if at == self._wake_at:  # a later call asked for another time
            self._advance()

    def _report(self) -> None:
        """Show the kubelet's own count; the plugin corrects it as soon as it sees it."""
        self._in(STATUS_S, partial(self._overwrite, self.node.listed()))
        self._in(STATUS_PERIOD_S, self._report)

    def _overwrite(self, listed: Mapping[str, int]) -> None:
        for resource, amount in listed.items():
            self._show(resource, amount)
            if self.delay is not None and amount != self.node.amounts()[resource]:
                self._in(self.delay, partial(self._see, resource))

    def _see(self, resource: str) -> None:
        """Show a number to the scheduler: the present one, as a late patch has it too."""
        self._show(resource, self.node.amounts()[resource])

    def _show(self, resource: str, amount: int) -> None:
        before, self._seen[resource] = self._seen[resource], amount
        if amount > before:
            self._retry(resource)
