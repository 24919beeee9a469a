"""A journal of what the API server reported of pods and of the Node's number, and its reading.

One object's `resourceVersion` is smaller than another's if it changed before: so the journal has
the order in which the scheduler heard of everything, and each refusal has a cause.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

from tests.e2e.cluster import NAMESPACE, Cluster
from tests.e2e.instances import REFUSED, failure
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.watch import Watch


class Cause(StrEnum):
    """The reason for which a pod was bound to a node that refused it."""

    LATE = "bound by a number that had fallen already"
    KUBELET = "bound by a number of the kubelet, above the one of metagpu before"
    BURST = "bound by the same number as another pod"
    END = "bound at an end that no number preceded"
    LIST = "bound alone, by a number of metagpu"


class What(StrEnum):
    """The kind of a change: of the Node's number, or of a pod's state."""

    NUMBER = "number"
    CREATED = "created"
    BOUND = "bound"
    ADMITTED = "admitted"
    DELETED = "deletion began"
    ENDED = "ended"
    REFUSED = "refused"


@dataclass(frozen=True)
class Entry:
    """One change.

    Attributes:
        version: the order of all changes.
        name: the pod, or who wrote the number.
        amount: the number, or the shares that the pod requests.
    """

    at: float
    version: int
    what: What
    name: str
    amount: int


@dataclass(frozen=True)
class Refusal:
    """A pod that the node refused, why it was bound, and what came after the number in between."""

    pod: Entry
    cause: Cause
    number: Entry
    between: Sequence[Entry]

    def __str__(self) -> str:
        late = f"{self.pod.at - self.number.at:.3f} s after {self.number.amount} by"
        others = ", ".join(f"{entry.name} {entry.what} ({entry.amount})" for entry in self.between)
        text = f"{self.pod.name} ({self.pod.amount}) {self.cause}: {late} {self.number.name}"
        return f"{text}; meanwhile {others or 'nothing'}"


@dataclass
class Journal:
    """The entries about one resource."""

    resource: str
    entries: list[Entry] = field(default_factory=list)
    _seen: set[tuple[str, What]] = field(default_factory=set)
    _number: tuple[int, str] | None = None

    def take_pod(self, at: float, kind: str, pod: Document) -> None:
        """Note what is new about a pod that requests the resource."""
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        size = int(pod["spec"]["containers"][0]["resources"]["limits"].get(self.resource, 0))
        if not size:
            return
        for what in _states(pod, kind):
            if (uid, what) not in self._seen:
                self._seen.add((uid, what))
                version = int(pod["metadata"]["resourceVersion"])
                self.entries.append(Entry(at, version, what, name, size))

    def take_node(self, at: float, _: str, node: Document) -> None:
        """Note the Node's number, and who wrote it."""
        text = node["status"].get("allocatable", {}).get(self.resource)
        number = None if text is None else (int(text), _writer(node, self.resource))
        if number != self._number and number is not None:
            version = int(node["metadata"]["resourceVersion"])
            self.entries.append(Entry(at, version, What.NUMBER, number[1], number[0]))
        self._number = number

    def refusals(self) -> Iterator[Refusal]:
        """Yield every refusal with its cause."""
        entries = sorted(self.entries, key=attrgetter("version", "at"))
        refused = {other.name for other in entries if other.what is What.REFUSED}
        numbers: list[Entry] = []
        held: dict[str, int] = {}
        between: list[Entry] = []
        for entry in entries:
            if entry.what is What.NUMBER:
                numbers.append(entry)
                between = []
            if entry.what is What.BOUND:
                if entry.name in refused:
                    free = numbers[-1].amount - sum(held.values())
                    cause = _cause(entry, numbers, between, free)
                    yield Refusal(entry, cause, numbers[-1], tuple(between))
                held[entry.name] = entry.amount
                between.append(entry)
            if entry.what is What.ENDED and held.pop(entry.name, 0):
                between.append(entry)


def _cause(pod: Entry, numbers: Sequence[Entry], between: Sequence[Entry], free: int) -> Cause:
    if free < pod.amount:
        return Cause.LATE
    before = numbers[-2:-1]
    if numbers[-1].name == "kubelet" and any(entry.amount < numbers[-1].amount for entry in before):
        return Cause.KUBELET
    if any(entry.what is What.BOUND for entry in between):
        return Cause.BURST
    return Cause.END if between else Cause.LIST


def _states(pod: Document, kind: str) -> Iterator[What]:
    status = pod["status"]
    yield What.CREATED
    if "nodeName" in pod["spec"]:
        yield What.BOUND
    if "startTime" in status and status["phase"] != "Failed":
        yield What.ADMITTED
    if "deletionTimestamp" in pod["metadata"]:
        yield What.DELETED
    if failure(pod).startswith(REFUSED):
        yield What.REFUSED
    if status["phase"] in {"Failed", "Succeeded"} or kind == "DELETED":
        yield What.ENDED


def _writer(node: Document, resource: str) -> str:
    for entry in node["metadata"].get("managedFields", ()):
        fields = entry.get("fieldsV1", {}).get("f:status", {}).get("f:allocatable", {})
        if f"f:{resource}" in fields:
            return str(entry["manager"])
    return "nobody"


@contextmanager
def journal(cluster: Cluster, resource: str) -> Iterator[Journal]:
    """Keep a journal until the block ends."""
    kept = Journal(resource)
    with ExitStack() as stack:
        pods, nodes = (stack.enter_context(cluster.node.api()) for _ in range(2))
        stack.enter_context(Watch(pods, f"/api/v1/namespaces/{NAMESPACE}/pods", kept.take_pod))
        stack.enter_context(Watch(nodes, "/api/v1/nodes", kept.take_node))
        yield kept
