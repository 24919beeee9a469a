"""Events: each news once, repeated ones counted, never more than a server likes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from metagpu.plugins.cluster import chore, events
from metagpu.plugins.cluster.events import News, Recorder, Subject
from metagpu.sim.apiserver import SimApiServer
from tests.plugins.cluster.rig import client_of

HOT = News(Subject("Node", "n", "uid"), "GPUOutOfService", "GPU 0: hot", "Judge", warning=True)


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


@asynccontextmanager
async def recording(
    server: SimApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> AsyncIterator[Recorder]:
    """Have a recorder tell a server what it hears while the block lasts."""
    monkeypatch.setattr(chore, "PAUSE", (0.01, 0.05))
    monkeypatch.setattr(chore, "LEAST", 0.0)
    async with client_of(server, tmp_path) as client, anyio.create_task_group() as group:
        recorder = Recorder(client, "metagpu-x", clock)
        group.start_soon(recorder.chore.run)
        yield recorder
        group.cancel_scope.cancel()


async def test_event_has_all_that_kubernetes_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Event names who tells, what was done, why, and of whom; a pod's is in its namespace."""
    server = SimApiServer()
    async with recording(server, tmp_path, monkeypatch, Clock()) as recorder:
        recorder.tell(News(Subject("Pod", "p", "u", "team"), "OverLimit", "x" * 2000, "Warn"))
        await server.until(server.events)

    told = server.events()[0]
    assert told["metadata"]["namespace"] == "team"
    assert told["regarding"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "p",
        "uid": "u",
        "namespace": "team",
    }
    assert told["eventTime"] == "1970-01-01T00:16:40.000000Z"
    assert (told["reportingInstance"], told["type"]) == ("metagpu-x", "Normal")
    assert len(told["note"]) == 1024


async def test_repeated_news_become_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same news again is a number on its Event, written now and then; after a while anew."""
    server, clock = SimApiServer(), Clock()
    async with recording(server, tmp_path, monkeypatch, clock) as recorder:
        recorder.tell(HOT)
        await server.until(server.events)
        for _ in range(3):
            recorder.tell(HOT)
        clock.now += events.COUNT_EVERY
        recorder.tell(HOT)
        await server.until(lambda: "series" in server.events()[0])
        await anyio.wait_all_tasks_blocked()
        assert server.events()[0]["series"]["count"] >= 2

        clock.now += events.MEMORY
        recorder.tell(HOT)
        await server.until(lambda: len(server.events()) == 2)


async def test_a_node_whose_uid_is_told_later_has_one_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """News of a Node are the same before and after the API server has told who it is."""
    server = SimApiServer()
    cold = News(HOT.subject, "GPUInService", "GPU 0: cold", "Judge")
    unknown = News(Subject("Node", "n"), HOT.reason, HOT.note, HOT.action, warning=True)

    async with recording(server, tmp_path, monkeypatch, Clock()) as recorder:
        for news in (unknown, HOT, cold):
            recorder.tell(news)
        await server.until(lambda: any("cold" in each["note"] for each in server.events()))

        assert [each["note"] for each in server.events()] == ["GPU 0: hot", "GPU 0: cold"]


async def test_event_that_was_deleted_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes deletes Events after an hour: a count without its Event becomes a new one."""
    server, clock = SimApiServer(), Clock()
    async with recording(server, tmp_path, monkeypatch, clock) as recorder:
        recorder.tell(HOT)
        await server.until(server.events)
        server.store.delete(next(key for key in server.store.objects if key[0] == "events"))
        clock.now += events.COUNT_EVERY
        recorder.tell(HOT)
        await server.until(server.events)


async def test_flood_is_cut_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More different news than a burst allows are dropped; time makes room again."""
    server, clock = SimApiServer(), Clock()
    async with recording(server, tmp_path, monkeypatch, clock) as recorder:
        for number in range(events.BURST + 5):
            recorder.tell(News(HOT.subject, "R", str(number), "Judge"))
        await server.until(lambda: len(server.events()) == events.BURST)
        with anyio.fail_after(30):
            while recorder.dropped < 5:  # noqa: ASYNC110 - what it asks has no event
                await anyio.sleep(0.005)

        clock.now += events.REFILL
        recorder.tell(HOT)
        await server.until(lambda: len(server.events()) == events.BURST + 1)


async def test_news_wait_for_a_server_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be told now is told later, in order, the oldest lost if there is too much."""
    server = SimApiServer()
    async with recording(server, tmp_path, monkeypatch, Clock()) as recorder:
        server.fail(503, times=3)
        for number in range(events.WAITING + 2):
            recorder.tell(News(HOT.subject, "R", str(number), "Judge"))
        await server.until(lambda: len(server.events()) == events.BURST)

    assert [each["note"] for each in server.events()][:2] == ["2", "3"]
    assert recorder.dropped >= 2


async def test_refused_event_does_not_hold_up_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Event that can never be told is given up."""
    server = SimApiServer()
    async with recording(server, tmp_path, monkeypatch, Clock()) as recorder:
        recorder.tell(News(HOT.subject, "", "no reason", "Judge"))
        recorder.tell(HOT)
        await server.until(lambda: [each["note"] for each in server.events()] == ["GPU 0: hot"])


async def test_one_subject_does_not_use_up_what_all_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who makes news all the time has some of it told; others go on, and in time they too."""
    server, clock = SimApiServer(), Clock()
    loud, quiet = (Subject("Pod", name, name, "team") for name in ("loud", "quiet"))
    async with recording(server, tmp_path, monkeypatch, clock) as recorder:
        recorder.each = 3
        for number in range(30):
            recorder.tell(News(loud, "R", str(number), "Judge"))
        recorder.tell(News(quiet, "R", "quiet", "Judge"))
        await server.until(lambda: any(each["note"] == "quiet" for each in server.events()))
        assert [each["note"] for each in server.events()] == ["0", "1", "2", "quiet"]
        assert recorder.dropped == 27

        clock.now += events.MEMORY
        recorder.tell(News(loud, "R", "30", "Judge"))
        await server.until(lambda: len(server.events()) == 5)


async def test_a_namespace_that_takes_no_events_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is ending, or has no quota left, refuses with 403: its news wait, others' do not."""
    server = SimApiServer()
    server.denied.append(("POST", "/namespaces/ending/"))
    async with recording(server, tmp_path, monkeypatch, Clock()) as recorder:
        for namespace in ("ending", "team"):
            recorder.tell(News(Subject("Pod", "p", "u", namespace), "R", namespace, "Judge"))
        await server.until(lambda: [each["note"] for each in server.events()] == ["team"])
        with anyio.fail_after(30):
            while "/namespaces/ending/" not in recorder.chore.problem:  # noqa: ASYNC110 - no event
                await anyio.sleep(0.005)

        server.denied.clear()
        await server.until(lambda: [each["note"] for each in server.events()] == ["team", "ending"])


async def test_long_texts_are_cut_as_kubernetes_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note has 1024 bytes, whatever its letters; a name ends before no dot with a dash."""
    server = SimApiServer()
    pod = Subject("Pod", "p" * 229 + "-0", "u", "team")
    async with recording(server, tmp_path, monkeypatch, Clock()) as recorder:
        recorder.tell(News(pod, "R", "x" + "\u00e9" * 2000, "Judge"))
        await server.until(server.events)

    [told] = server.events()
    assert len(told["note"].encode()) == 1023
    assert told["metadata"]["name"].startswith("p" * 229 + ".")
