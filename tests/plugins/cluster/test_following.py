"""One object, followed: nothing is missed, whatever becomes of lists and watches."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import anyio
import pytest

from metagpu.plugins.cluster import chore, following
from metagpu.plugins.cluster.client import Client
from metagpu.plugins.cluster.following import Followed
from metagpu.sim.apiserver import SimApiServer
from tests.heard import heard
from tests.plugins.cluster.rig import NODE, client_of

NODES = "/api/v1/nodes"


@dataclass
class Reader:
    """Somebody who follows the Node, and counts how often it was news."""

    client: Client
    news: int = 0
    changed: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.it = Followed(self.client, NODES, NODE, self.stir)

    def stir(self) -> None:
        """Hear that it changed."""
        self.news += 1
        changed, self.changed = self.changed, anyio.Event()
        changed.set()

    def says(self) -> str | None:
        """Give the label that the tests change, `None` without a Node."""
        return self.it.object["metadata"]["labels"].get("it", "") if self.it.object else None

    async def until(self, value: str | None) -> None:
        """Wait until the label is so."""
        with anyio.fail_after(30):
            while not self.it.known or self.says() != value:
                await self.changed.wait()


@asynccontextmanager
async def reading(
    server: SimApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Reader]:
    """Follow the Node of a server while the block lasts."""
    monkeypatch.setattr(chore, "PAUSE", (0.01, 0.05))
    monkeypatch.setattr(following, "SHORT", 0.01)

    async with client_of(server, tmp_path) as client, anyio.create_task_group() as group:
        reader = Reader(client)
        group.start_soon(reader.it.run)
        yield reader
        group.cancel_scope.cancel()


def watches(server: SimApiServer) -> int:
    """Count the watches that were begun."""
    return sum(each.what == f"{NODES}?watch" for each in server.requests)


def lists(server: SimApiServer) -> int:
    """Count the lists that were asked for."""
    return sum(each.what == NODES for each in server.requests)


async def test_object_is_followed_from_its_birth_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it is not there is known too; its making, change and end are seen by one watch."""
    server = SimApiServer()
    async with reading(server, tmp_path, monkeypatch) as reader:
        await reader.until(None)
        server.add_node(NODE, {"it": "1"})
        server.add_node("another", {"it": "9"})
        await reader.until("1")
        server.label(NODE, {"it": "2"})
        await reader.until("2")
        server.store.delete(("nodes", "", NODE))
        await reader.until(None)

    assert lists(server) == 1
    assert reader.news == 4


async def test_watch_that_ends_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that ends a watch costs another watch, no list, and no change in between."""
    server = SimApiServer()
    server.add_node(NODE, {"it": "1"})

    async with reading(server, tmp_path, monkeypatch) as reader:
        await server.until(lambda: watches(server) == 1)
        server.end_watches()
        server.label(NODE, {"it": "2"})
        await reader.until("2")

    assert lists(server) == 1
    assert watches(server) == 2


async def test_bookmark_is_no_news_but_moves_the_watch_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a bookmark a watch goes on from there, even if all before it is forgotten."""
    server = SimApiServer()
    server.add_node(NODE, {"it": "1"})

    async with reading(server, tmp_path, monkeypatch) as reader:
        await server.until(lambda: watches(server) == 1)
        server.add_node("another")
        server.bookmark()
        await anyio.wait_all_tasks_blocked()
        server.end_watches()
        await server.until(lambda: watches(server) == 2)
        server.label(NODE, {"it": "2"})
        await reader.until("2")

    assert reader.news == 2


async def test_forgotten_history_costs_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that knows the version no more (410) is asked for the whole again, silently."""
    server = SimApiServer()
    server.add_node(NODE, {"it": "1"})

    with heard(following) as lines:
        async with reading(server, tmp_path, monkeypatch) as reader:
            await server.until(lambda: watches(server) == 1)
            server.label(NODE, {"it": "2"})
            server.label(NODE, {"it": "3"})
            server.store.compact()
            server.end_watches()
            await reader.until("3")
            server.label(NODE, {"it": "4"})
            await reader.until("4")

    assert lines == []


async def test_server_that_goes_away_leaves_what_was_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While refusals last, what was told stays, and one line says so."""
    server = SimApiServer()
    server.add_node(NODE, {"it": "1"})

    with heard(following) as lines:
        async with reading(server, tmp_path, monkeypatch) as reader:
            await reader.until("1")
            server.fail(500, times=6)
            server.end_watches()
            await server.until(lambda: len(server.failures) < 3)
            assert reader.says() == "1"
            assert "answers 500" in reader.it.problem

            server.label(NODE, {"it": "2"})
            await reader.until("2")
            assert reader.it.problem == ""

    assert [line["event"] for line in lines] == [
        "what is known stays",
        "the API server answers again",
    ]


async def test_watches_that_break_at_once_are_begun_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where lists are allowed and watches are not, the pauses grow: lists cost a server most."""
    pauses: list[float] = []

    class Noted(chore.Pauses):
        """Pauses that are noted, and not waited for."""

        def next(self, at_least: float = 0.0) -> float:
            """Note how long it should be."""
            pauses.append(super().next(at_least))
            return 0.0

    server = SimApiServer()
    server.add_node(NODE, {"it": "1"})
    server.store.oldest = server.store.version + 1000
    async with reading(server, tmp_path, monkeypatch):
        monkeypatch.setattr(chore, "PAUSE", (1.0, 1000.0))
        monkeypatch.setattr(following, "Pauses", Noted)
        await server.until(lambda: watches(server) >= 6)

    assert all(later >= sooner for sooner, later in pairwise(pauses))
    assert pauses[4] >= 4 * pauses[0]
