"""A journal of what the API server reported of our ResourceSlices, with the times."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.e2e.cluster import Cluster
from tests.e2e.fake_node import DRIVER
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.waiting import wait_for
from tests.e2e.rig.watch import Watch

BEGUN_S = 20.0

Slices = Mapping[str, Document]
"""ResourceSlices, by name."""


@dataclass
class SliceJournal:
    """Our slices after each change, each with the time at which the API server reported it.

    Times are seconds since the epoch.
    """

    states: list[tuple[float, Slices]] = field(default_factory=list)

    def take(self, at: float, kind: str, it: Document) -> None:
        """Note one change."""
        if it["spec"]["driver"] != DRIVER:
            return
        now = dict(self.states[-1][1]) if self.states else {}
        name = it["metadata"]["name"]
        if kind == "DELETED":
            now.pop(name, None)
        else:
            now[name] = it
        self.states.append((at, now))

    def first(self, condition: Callable[[Slices], object]) -> float | None:
        """Return when a condition held first."""
        return next((at for at, now in tuple(self.states) if condition(now)), None)

    def longest_gap(self, until: float) -> float:
        """Return for how many seconds a pool that was complete before was not, at most."""
        known, since, longest = set[str](), dict[str, float](), 0.0
        for at, now in tuple(self.states):
            if at > until:
                break
            longest = max((longest, *(at - it for it in since.values())))
            known |= (complete := complete_pools(now.values()))
            since = {pool: since.get(pool, at) for pool in known - complete}
        return longest


def complete_pools(slices: Collection[Document]) -> set[str]:
    """Return the pools whose slices are all there, and of one generation."""
    pools = dict[str, list[Document]]()
    for it in slices:
        pools.setdefault(it["spec"]["pool"]["name"], []).append(it["spec"]["pool"])
    return {
        name
        for name, parts in pools.items()
        if len({it["generation"] for it in parts}) == 1
        and {it["resourceSliceCount"] for it in parts} == {len(parts)}
    }


def taints_of(slices: Collection[Document], uuid: str) -> dict[str, set[str]]:
    """Return the keys of the taints of each device of a GPU that can be held."""
    return {
        device["name"]: {it["key"] for it in device.get("taints", ())}
        for it in slices
        for device in it["spec"].get("devices", ())
        if device["name"].startswith(uuid.lower()) and not device["name"].endswith("-monitor")
    }


@contextmanager
def slice_journal(cluster: Cluster) -> Iterator[SliceJournal]:
    """Keep a journal until the block ends, which begins with the slices that are there."""
    kept = SliceJournal()
    path = "/apis/resource.k8s.io/v1/resourceslices"
    with cluster.node.api() as api, Watch(api, path, kept.take):
        wait_for("the watch to begin", lambda: kept.states, within_s=BEGUN_S)
        yield kept
