"""A watched object: no change is missed, whatever happens to lists and watches."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import anyio
import pytest

from metagpu.core.errors import ClusterError
from metagpu.core.runtime.rate_limit import Backoff
from metagpu.plugins.cluster import watch
from metagpu.plugins.cluster.client import KubeClient
from metagpu.plugins.cluster.settings import ClusterTiming
from metagpu.plugins.cluster.watch import NodePatcher, WatchedObject
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import NODE, client_of
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes, skip

NODES = "/api/v1/nodes"


@dataclass
class Reader:
    """A subscriber of the Node that counts its changes."""

    client: KubeClient
    changes: int = 0
    changed: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.watched = WatchedObject(self.client, NODES, NODE, self.count_change)

    def count_change(self) -> None:
        """Count a change."""
        self.changes += 1
        changed, self.changed = self.changed, anyio.Event()
        changed.set()

    def says(self) -> str | None:
        """Return the label that the tests change, `None` without a Node."""
        return (
            self.watched.object["metadata"]["labels"].get("it", "") if self.watched.object else None
        )

    async def until(self, value: str | None) -> None:
        """Wait until the label has a value."""
        with anyio.fail_after(30):
            while not self.watched.known or self.says() != value:
                await self.changed.wait()


@asynccontextmanager
async def reading(server: SimApiServer, tmp_path: Path) -> AsyncIterator[Reader]:
    """Watch the Node of a server until the block ends."""
    async with client_of(server, tmp_path) as client, anyio.create_task_group() as group:
        reader = Reader(client)
        group.start_soon(reader.watched.run)
        yield reader
        group.cancel_scope.cancel()


def watches(server: SimApiServer) -> int:
    """Return the number of watch requests."""
    return sum(each.target == f"{NODES}?watch" for each in server.requests)


def lists(server: SimApiServer) -> int:
    """Return the number of list requests."""
    return sum(each.target == NODES for each in server.requests)


async def test_object_is_followed_from_its_birth_to_its_end(tmp_path: Path) -> None:
    """One watch shows the absence, creation, changes and end of the object."""
    server = SimApiServer()
    async with reading(server, tmp_path) as reader:
        await reader.until(None)
        server.add_node(NODE, {"it": "1"})
        server.add_node("another", {"it": "9"})
        await reader.until("1")
        server.label(NODE, {"it": "2"})
        await reader.until("2")
        server.store.delete(("nodes", "", NODE))
        await reader.until(None)

    assert lists(server) == 1
    assert reader.changes == 4


async def test_watch_that_ends_goes_on_where_it_was(tmp_path: Path) -> None:
    """A server that ends a watch costs another watch, no list, and no change in between."""
    server = SimApiServer()
    server.add_node(NODE, {"it": "1"})

    async with reading(server, tmp_path) as reader:
        await server.until(lambda: watches(server) == 1)
        server.end_watches()
        server.label(NODE, {"it": "2"})
        await reader.until("2")

    assert lists(server) == 1
    assert watches(server) == 2


async def test_bookmark_is_no_change_but_moves_the_watch_on(tmp_path: Path) -> None:
    """A watch resumes after a bookmark, even if all before it is forgotten."""
    server = SimApiServer()
    server.add_node(NODE, {"it": "1"})

    async with reading(server, tmp_path) as reader:
        await server.until(lambda: watches(server) == 1)
        server.add_node("another")
        server.bookmark()
        await anyio.wait_all_tasks_blocked()
        server.end_watches()
        await server.until(lambda: watches(server) == 2)
        server.label(NODE, {"it": "2"})
        await reader.until("2")

    assert reader.changes == 2


async def test_forgotten_history_costs_a_list(tmp_path: Path) -> None:
    """A version that the server has forgotten (410) costs a silent list."""
    server = SimApiServer()
    server.add_node(NODE, {"it": "1"})

    with capture_module_logs(watch) as lines:
        async with reading(server, tmp_path) as reader:
            await server.until(lambda: watches(server) == 1)
            server.label(NODE, {"it": "2"})
            server.label(NODE, {"it": "3"})
            server.store.compact()
            server.end_watches()
            await reader.until("3")
            server.label(NODE, {"it": "4"})
            await reader.until("4")

    assert lines == []


async def test_server_that_goes_away_leaves_what_was_known(tmp_path: Path) -> None:
    """During an outage the known state stays, and one line reports it."""
    server = SimApiServer()
    server.add_node(NODE, {"it": "1"})

    with capture_module_logs(watch) as lines:
        async with reading(server, tmp_path) as reader:
            await reader.until("1")
            server.fail(500, times=6)
            server.end_watches()
            await server.until(lambda: len(server.failures) < 3)
            assert reader.says() == "1"
            assert "answers 500" in reader.watched.problem

            server.label(NODE, {"it": "2"})
            await reader.until("2")
            assert reader.watched.problem == ""

    assert [line["event"] for line in lines] == [
        "watch failed; the last known state stays",
        "watch recovered",
    ]


async def test_watches_that_break_at_once_are_delayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delays grow where only watches fail: lists cost the server most."""
    delays: list[float] = []

    class Recorded(Backoff):
        """A back-off whose delays are recorded, and skipped."""

        def next(self, at_least: float = 0.0) -> float:
            """Record the delay."""
            delays.append(super().next(at_least))
            return 0.0

    server = SimApiServer()
    server.add_node(NODE, {"it": "1"})
    server.store.oldest = server.store.version + 1000
    backoff = Recorded(first=1.0, longest=1000.0, jitter=True)
    monkeypatch.setattr(watch, "backoff_of", lambda _: backoff)
    async with reading(server, tmp_path):
        await server.until(lambda: watches(server) >= 6)

    assert all(later >= sooner for sooner, later in pairwise(delays))
    assert delays[4] >= 4 * delays[0]


async def test_nodes_that_start_together_renew_their_watches_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch lasts from four to eight minutes, any time as likely as another."""
    lasts: list[int] = []
    enough = anyio.Event()

    async def watched(_: str, query: Mapping[str, str]) -> AsyncIterator[object]:
        lasts.append(int(query["timeoutSeconds"]))
        if len(lasts) == 2000:
            enough.set()
        yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "1"}}}

    server = SimApiServer()
    async with client_of(server, tmp_path, ClusterTiming(spread=0.0)) as client:
        monkeypatch.setattr(client, "watch", watched)
        async with anyio.create_task_group() as group:
            group.start_soon(WatchedObject(client, NODES, NODE, lambda: None).run)
            await enough.wait()
            group.cancel_scope.cancel()

    a_minute = Counter((seconds - 240) // 60 for seconds in lasts)
    assert a_minute.keys() <= {0, 1, 2, 3, 4}
    assert all(a_minute[minute] > 400 for minute in range(4))  # of 500, six deviations


@asynccontextmanager
async def patient_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[SimApiServer, Reader, Callable[[], bool]]]:
    """Run a reader with its first watch; a lost one begins again after ten minutes.

    The third of the tuple says whether the reader waits for that.
    """
    longest: list[float] = []

    def high(_: float, most: float) -> float:
        """Return the longest of the delays that chance may give."""
        longest.append(most)
        return most

    monkeypatch.setattr(watch, "random_between", high)
    server, timing = SimApiServer(), ClusterTiming(spread=600.0)
    server.add_node(NODE, {"it": "1"})
    async with client_of(server, tmp_path, timing) as client, anyio.create_task_group() as group:
        reader = Reader(client)
        group.start_soon(reader.watched.run)
        await server.until(lambda: watches(server) == 1)
        yield server, reader, lambda: 600.0 in longest
        group.cancel_scope.cancel()


@pytest.mark.parametrize("broken", [False, True])
async def test_a_lost_watch_is_followed_by_the_next_after_a_random_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, broken: bool
) -> None:
    """An API server that restarts ends the watches of all nodes: they do not return together."""
    async with patient_reader(tmp_path, monkeypatch) as (server, reader, waits):
        skip(watch.STABLE)
        server.label(NODE, {"it": "2"})
        if broken:
            server.store.compact()
        else:
            server.end_watches()
        await becomes(waits)
        await anyio.sleep(0.1)
        assert (lists(server), watches(server)) == (1, 1)

        skip(600)
        await server.until(lambda: watches(server) == 2)
        await reader.until("2")
        assert lists(server) == (2 if broken else 1)


async def test_a_list_that_is_requested_waits_for_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list shows which pods have ended, and does not wait until the next watch is due."""
    async with patient_reader(tmp_path, monkeypatch) as (server, reader, waits):
        server.end_watches()
        await becomes(waits)
        reader.watched.list_again()
        await server.until(lambda: lists(server) == 2)


async def test_a_watch_that_ends_in_time_is_renewed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a watch that the API server was asked for costs no time."""
    monkeypatch.setattr("metagpu.plugins.cluster.client.WATCH_SILENCE", 1e6)
    async with patient_reader(tmp_path, monkeypatch) as (server, reader, _):
        skip(watch.WATCH_TIMEOUT[1])
        await server.until(lambda: watches(server) == 2)
        server.label(NODE, {"it": "2"})
        await reader.until("2")
        assert lists(server) == 1


async def test_a_watch_that_works_ends_the_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a good watch the next failure is a first one, and its problem is named."""
    delays: list[float] = []

    class Recorded(Backoff):
        def next(self, at_least: float = 0.0) -> float:
            delays.append(super().next(at_least))
            return 0.0

    errors = [True, True, True, False, True]
    slow = {"type": "ERROR", "object": {"code": 500, "message": "etcd is slow"}}
    good = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "1"}}}

    async def watched(*_: object) -> AsyncIterator[object]:
        if not errors:
            await anyio.sleep_forever()
        yield slow if errors.pop(0) else good

    monkeypatch.setattr(watch, "backoff_of", lambda _: Recorded(first=1.0, longest=1000.0))
    async with client_of(SimApiServer(), tmp_path, ClusterTiming(spread=0.0)) as open_client:
        monkeypatch.setattr(open_client, "watch", watched)
        with capture_module_logs(watch) as lines:
            async with anyio.create_task_group() as group:
                group.start_soon(WatchedObject(open_client, NODES, NODE, lambda: None).run)
                await becomes(lambda: len(delays) == 4)
                group.cancel_scope.cancel()
    assert delays == [1, 2, 4, 1]
    assert lines[0]["error"] == "the watch of /api/v1/nodes ended: etcd is slow"


async def test_a_node_that_was_replaced_gets_nothing_of_the_former(tmp_path: Path) -> None:
    """A Node of the same name may be another machine."""
    server = SimApiServer()
    async with client_of(server, tmp_path) as client:
        node = WatchedObject(client, NODES, NODE, lambda: None)
        node.on_list([server.add_node(NODE)])
        server.store.delete(("nodes", "", NODE))
        server.add_node(NODE)
        with pytest.raises(ClusterError, match="UID in precondition"):
            await NodePatcher(client, node).apply("", {"metadata": {"labels": {"it": "1"}}})
    assert server.labels(NODE) == {}
