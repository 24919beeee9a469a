"""Events: each event written once, repeated ones counted, within a rate limit."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from metagpu.core.errors import ClusterError
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.plugins.cluster import event_recorder as events
from metagpu.plugins.cluster.event_recorder import (
    EventData,
    EventReason,
    EventRecorder,
    ObjectReference,
)
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import QUICK, client_of
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes

HOT = EventData(
    ObjectReference("Node", "n", "uid"),
    EventReason.GPU_UNHEALTHY,
    "GPU 0: hot",
    "Judge",
    warning=True,
)


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@asynccontextmanager
async def recording(
    server: SimApiServer, tmp_path: Path, clock: Clock
) -> AsyncIterator[EventRecorder]:
    """Run a recorder that writes to a server until the block ends."""
    async with client_of(server, tmp_path) as client, anyio.create_task_group() as group:
        recorder = EventRecorder("metagpu-x", QUICK, clock, clock)
        group.start_soon(recorder.run, client)
        yield recorder
        group.cancel_scope.cancel()


async def test_event_has_all_that_kubernetes_wants(tmp_path: Path) -> None:
    """An Event has reporter, action, reason and object; a pod's is in its namespace."""
    server = SimApiServer()
    async with recording(server, tmp_path, Clock()) as recorder:
        recorder.record(
            EventData(
                ObjectReference("Pod", "p", "u", "team"),
                EventReason.GPU_MEMORY_EXCEEDED,
                "x" * 2000,
                "Warn",
            )
        )
        await server.until(server.events)

    event = server.events()[0]
    assert event["metadata"]["namespace"] == "team"
    assert event["regarding"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "p",
        "uid": "u",
        "namespace": "team",
    }
    assert event["eventTime"] == "1970-01-01T00:16:40.000000Z"
    assert (event["reportingInstance"], event["type"]) == ("metagpu-x", "Normal")
    assert len(event["note"]) == 1024


async def test_repeated_events_become_a_count(tmp_path: Path) -> None:
    """A repeated event raises the count of its Event at intervals; later a new Event begins."""
    server, clock = SimApiServer(), Clock()
    async with recording(server, tmp_path, clock) as recorder:
        recorder.record(HOT)
        await server.until(server.events)
        for _ in range(3):
            recorder.record(HOT)
        clock.now += QUICK.count_interval
        server.fail(503, times=1)
        recorder.record(HOT)
        await server.until(lambda: "series" in server.events()[0])
        await anyio.wait_all_tasks_blocked()
        assert server.events()[0]["series"]["count"] >= 2

        clock.now += events.DEDUP_WINDOW
        recorder.record(HOT)
        await server.until(lambda: len(server.events()) == 2)


async def test_a_node_whose_uid_is_known_later_has_one_event(tmp_path: Path) -> None:
    """The same event of a Node before and after its uid is known is one Event."""
    server = SimApiServer()
    cold = EventData(HOT.subject, EventReason.GPU_RECOVERED, "GPU 0: cold", "Judge")
    unknown = EventData(
        ObjectReference("Node", "n"), HOT.reason, HOT.note, HOT.action, warning=True
    )

    async with recording(server, tmp_path, Clock()) as recorder:
        for event in (unknown, HOT, cold):
            recorder.record(event)
        await server.until(lambda: any("cold" in each["note"] for each in server.events()))

        assert [each["note"] for each in server.events()] == ["GPU 0: hot", "GPU 0: cold"]


async def test_event_that_was_deleted_is_created_again(tmp_path: Path) -> None:
    """A count without its Event becomes a new one: Kubernetes deletes Events after an hour."""
    server, clock = SimApiServer(), Clock()
    async with recording(server, tmp_path, clock) as recorder:
        recorder.record(HOT)
        await server.until(server.events)
        server.store.delete(next(key for key in server.store.objects if key[0] == "events"))
        clock.now += QUICK.count_interval
        recorder.record(HOT)
        await server.until(server.events)


async def test_an_event_whose_answer_was_lost_is_written_once(tmp_path: Path) -> None:
    """The second request has the name of the first, and counts as its answer."""
    server = SimApiServer()
    async with recording(server, tmp_path, Clock()) as recorder:
        await becomes(lambda: recorder._client)
        call, lost = recorder.client.call, [ClusterError("the connection broke")]

        async def lossy(*args: Any, **options: Any) -> Mapping[str, Any]:  # noqa: ANN401 - as of `call`
            answer = await call(*args, **options)
            if lost:
                raise lost.pop()
            return answer

        recorder.client.call = lossy  # type: ignore[method-assign]
        recorder.record(HOT)
        await becomes(lambda: not recorder._queue)

    assert [each["note"] for each in server.events()] == ["GPU 0: hot"]
    assert [each.method for each in server.requests] == ["POST", "POST"]
    assert not recorder.problem


async def test_flood_is_limited_and_counted(tmp_path: Path) -> None:
    """Different Events beyond the burst are dropped and counted; later Events pass again."""
    server, clock = SimApiServer(), Clock()
    async with recording(server, tmp_path, clock) as recorder:
        for number in range(events.BURST + 5):
            recorder.record(EventData(HOT.subject, EventReason.GPU_CORDONED, str(number), "Judge"))
        await server.until(lambda: len(server.events()) == events.BURST)
        await becomes(lambda: recorder.dropped >= 5)

        clock.now += events.REFILL
        recorder.record(HOT)
        await server.until(lambda: len(server.events()) == events.BURST + 1)


async def test_events_wait_for_a_server_that_is_away(tmp_path: Path) -> None:
    """Events of an outage are written later, in order; the oldest are dropped at the limit."""
    server = SimApiServer()
    async with recording(server, tmp_path, Clock()) as recorder:
        server.fail(503, times=3)
        for number in range(events.QUEUE_LIMIT + 2):
            recorder.record(EventData(HOT.subject, EventReason.GPU_CORDONED, str(number), "Judge"))
        await server.until(lambda: len(server.events()) == events.BURST)

    assert [each["note"] for each in server.events()][:2] == ["2", "3"]
    assert recorder.dropped >= 2


async def test_what_a_connection_left_is_written_by_the_next(tmp_path: Path) -> None:
    """An Event whose request was cut off waits for no other Event."""
    server = SimApiServer()
    async with client_of(server, tmp_path) as client, anyio.create_task_group() as group:
        recorder = EventRecorder("metagpu-x", replace(QUICK, backoff_first=1e9), Clock(), Clock())
        server.fail(503, times=1)
        recorder.record(HOT)
        async with anyio.create_task_group() as first:
            first.start_soon(recorder.run, client)
            await becomes(lambda: recorder.problem)
            first.cancel_scope.cancel()
        group.start_soon(recorder.run, client)
        await server.until(server.events)
        group.cancel_scope.cancel()


async def test_refused_event_does_not_hold_up_the_next(tmp_path: Path) -> None:
    """An Event that the server refuses is dropped."""
    server = SimApiServer()
    async with recording(server, tmp_path, Clock()) as recorder:
        unnamed = EventData(HOT.subject, "", "no reason", "Judge")  # type: ignore[arg-type]
        recorder.record(unnamed)
        recorder.record(HOT)
        await server.until(lambda: [each["note"] for each in server.events()] == ["GPU 0: hot"])


async def test_one_subject_does_not_use_up_what_all_have(tmp_path: Path) -> None:
    """One noisy object has a part of the rate; other objects keep theirs."""
    server, clock = SimApiServer(), Clock()
    loud, quiet = (ObjectReference("Pod", name, name, "team") for name in ("loud", "quiet"))
    async with recording(server, tmp_path, clock) as recorder:
        recorder.per_subject = 3
        for number in range(30):
            recorder.record(EventData(loud, EventReason.GPU_CORDONED, str(number), "Judge"))
        recorder.record(EventData(quiet, EventReason.GPU_CORDONED, "quiet", "Judge"))
        await server.until(lambda: any(each["note"] == "quiet" for each in server.events()))
        assert [each["note"] for each in server.events()] == ["0", "1", "2", "quiet"]
        assert recorder.dropped == 27

        clock.now += events.DEDUP_WINDOW
        recorder.record(EventData(loud, EventReason.GPU_CORDONED, "30", "Judge"))
        await server.until(lambda: len(server.events()) == 5)


def rejected(namespace: str, number: int) -> EventData:
    """Build an Event that a pod's author may repeat at will, of one pod for each number."""
    pod = ObjectReference("Pod", f"noisy-{number}", f"u{number}", namespace)
    return EventData(
        pod, EventReason.GPU_MEMORY_ANNOTATION_REJECTED, f"no {number}", "Configure", minor=True
    )


def killed(namespace: str, number: int = 0) -> EventData:
    """Build the Event of an ended process."""
    pod = ObjectReference("Pod", f"greedy-{number}", f"g{number}", namespace)
    return EventData(
        pod, EventReason.GPU_PROCESS_SIGNALED, f"process {number} ended", "End", warning=True
    )


async def test_a_tenants_noise_hides_no_end_of_another_tenants_process(tmp_path: Path) -> None:
    """Rates count for a namespace: what one tenant repeats costs no other an Event."""
    server = SimApiServer()
    async with recording(server, tmp_path, Clock()) as recorder:
        for number in range(60):
            recorder.record(rejected("evil", number))
        await server.until(lambda: len(server.events()) == events.BURST // 2)
        for number in range(10):
            recorder.record(killed("victim", number))
        await server.until(lambda: len(server.events()) == events.BURST // 2 + 10)


async def test_rejected_annotations_leave_a_part_of_the_limits(tmp_path: Path) -> None:
    """Minor Events use half of a namespace's rate and half of a pod's Events."""
    server = SimApiServer()
    async with recording(server, tmp_path, Clock()) as recorder:
        recorder.per_subject = 4
        pod = killed("team").subject
        for number in range(60):
            recorder.record(replace(rejected("team", number), subject=pod))
        for number in range(20):
            recorder.record(rejected("team", number))
        for number in range(4):
            recorder.record(replace(killed("team", number), subject=pod))
        await server.until(
            lambda: sum(each["reason"] == "GPUProcessSignaled" for each in server.events()) >= 2
        )


async def test_an_ended_process_is_written_before_rejected_annotations(tmp_path: Path) -> None:
    """After an outage the end of a process comes first, however much noise came before it."""
    server = SimApiServer()
    async with recording(server, tmp_path, Clock()) as recorder:
        server.fail(503, times=3)
        recorder.record(killed("victim", 1))
        for number in range(events.QUEUE_LIMIT * 3):
            recorder.record(rejected("evil", number))
        recorder.record(killed("victim", 2))
        await server.until(lambda: len(server.events()) > 2)

        assert [each["note"] for each in server.events()][:2] == [
            "process 1 ended",
            "process 2 ended",
        ]


async def test_a_namespace_that_takes_no_events_holds_up_no_other(tmp_path: Path) -> None:
    """Events wait for a namespace that answers 403; those of others do not."""
    server = SimApiServer()
    server.denied.append(("POST", "/namespaces/ending/"))
    async with recording(server, tmp_path, Clock()) as recorder:
        for namespace in ("ending", "team"):
            recorder.record(
                EventData(
                    ObjectReference("Pod", "p", "u", namespace),
                    EventReason.GPU_CORDONED,
                    namespace,
                    "Judge",
                )
            )
        await server.until(lambda: [each["note"] for each in server.events()] == ["team"])
        await becomes(lambda: "/namespaces/ending/" in recorder.problem)

        server.denied.clear()
        await server.until(lambda: [each["note"] for each in server.events()] == ["team", "ending"])


async def test_long_texts_are_truncated_as_kubernetes_counts(tmp_path: Path) -> None:
    """A note has at most 1024 bytes of UTF-8; a name does not end with a dash."""
    server = SimApiServer()
    pod = ObjectReference("Pod", "p" * 229 + "-0", "u", "team")
    async with recording(server, tmp_path, Clock()) as recorder:
        recorder.instance = "metagpu-" + "n" * 253
        note = "x\ud800y" + "\u00e9" * 2000
        recorder.record(EventData(pod, EventReason.GPU_CORDONED, note, "Judge"))
        await server.until(server.events)

    [event] = server.events()
    assert len(event["note"].encode()) == 1023
    assert event["note"].startswith("x?y")
    assert len(event["reportingInstance"]) == 128
    assert event["metadata"]["name"].startswith("p" * 229 + ".")


@pytest.mark.parametrize("name", ["A B/../ü", "", "-.-", "web-0", "a" * 229 + ".-b"])
async def test_an_owners_name_is_free_text(tmp_path: Path, name: str) -> None:
    """An Event about an object of any name has a name that Kubernetes accepts."""
    server = SimApiServer()
    owner = ObjectReference("Anything", name, "u", "team")
    async with recording(server, tmp_path, Clock()) as recorder:
        recorder.record(EventData(owner, EventReason.GPU_CORDONED, "note", "Judge"))
        await server.until(server.events)

    assert server.events()[0]["regarding"]["name"] == name


async def test_events_that_can_never_be_accepted_cost_the_rate_too(tmp_path: Path) -> None:
    """A refused Event is asked once for each key, within the rate, and logged once."""
    server = SimApiServer()
    pod = ObjectReference("Pod", "p", "u", "team")
    with capture_module_logs(events) as lines:
        async with recording(server, tmp_path, Clock()) as recorder:
            server.rejected.append("/events")
            for number in range(events.BURST + 5):
                for _ in range(3):
                    recorder.record(EventData(pod, EventReason.GPU_CORDONED, str(number), "Judge"))
            await becomes(lambda: not recorder._queue)

    assert len(server.requests) == events.BURST
    assert recorder.dropped == 3 * 5
    assert [line["event"] for line in lines] == ["event rejected"]


async def test_a_count_that_can_never_be_accepted_is_written_once(tmp_path: Path) -> None:
    """A count that the API server refuses is not written at each repetition."""
    server, clock = SimApiServer(), Clock()
    async with recording(server, tmp_path, clock) as recorder:
        recorder.record(HOT)
        await server.until(server.events)
        server.rejected.append("/events")
        for _ in range(5):
            clock.now += QUICK.count_interval
            recorder.record(HOT)
        await becomes(lambda: not recorder._queue)

    assert [each.method for each in server.requests] == ["POST", "PATCH"]


async def test_unlimited_events_leave_an_object_its_limit(tmp_path: Path) -> None:
    """Events without a limit do not use up that of their object."""
    server = SimApiServer()
    pod = ObjectReference("Pod", "p", "u", "team")
    async with recording(server, tmp_path, Clock()) as recorder:
        recorder.per_subject = 2
        for number in range(events.BURST):
            note = f"GPU {number} is hot"
            recorder.record(
                EventData(pod, EventReason.GPU_UNHEALTHY, note, "CheckHealth", unlimited=True)
            )
        recorder.record(
            EventData(pod, EventReason.GPU_DEVICE_LOST, "lost", "CheckHealth", warning=True)
        )
        await server.until(lambda: len(server.events()) == events.BURST + 1)

    assert server.events()[-1]["reason"] == "GPUDeviceLost"


async def test_a_count_is_exact_and_written_once_an_interval(tmp_path: Path) -> None:
    """A request that failed counts nothing twice, and a repetition soon after waits."""
    server, clock = SimApiServer(), Clock()
    cold = replace(HOT, note="GPU 0: cold")
    async with recording(server, tmp_path, clock) as recorder:
        recorder.record(HOT)
        await server.until(server.events)
        clock.now += QUICK.count_interval
        server.fail(503)
        recorder.record(HOT)
        await becomes(lambda: not recorder._queue and not recorder.problem)
        recorder.record(HOT)
        recorder.record(cold)
        await server.until(lambda: len(server.events()) == 2)

    assert [each.method for each in server.requests] == ["POST", "PATCH", "PATCH", "POST"]
    assert server.events()[0]["series"]["count"] == 2


async def test_an_event_that_is_created_again_keeps_no_other(tmp_path: Path) -> None:
    """Events begin anew in the order of their times, also where Kubernetes has deleted one."""
    server, clock = SimApiServer(), Clock()
    cold = replace(HOT, note="GPU 0: cold")
    async with recording(server, tmp_path, clock) as recorder:
        recorder.record(HOT)
        recorder.record(cold)
        await server.until(lambda: len(server.events()) == 2)
        clock.now += events.DEDUP_WINDOW - 1
        server.store.delete(next(key for key in server.store.objects if key[0] == "events"))
        recorder.record(HOT)
        await server.until(lambda: len(server.events()) == 2)
        clock.now += 1
        recorder.record(cold)
        await server.until(lambda: [e["note"] for e in server.events()].count(cold.note) == 2)


async def test_all_namespaces_together_have_a_limit_where_it_is_set(tmp_path: Path) -> None:
    """Clients that invent namespaces get no more Events than others."""
    server = SimApiServer()
    async with recording(server, tmp_path, Clock()) as recorder:
        recorder.overall = TokenBucket(3, 1e-9)
        for number in range(8):
            recorder.record(killed(f"team-{number}"))
        await becomes(lambda: not recorder._queue)
    assert (len(server.events()), recorder.dropped) == (3, 5)


async def test_namespaces_of_before_take_no_memory(tmp_path: Path) -> None:
    """The rate of a namespace is forgotten once it has all its tokens again."""
    server, clock = SimApiServer(), Clock()
    async with recording(server, tmp_path, clock) as recorder:
        for number in range(8):
            recorder.record(killed(f"team-{number}"))
        await becomes(lambda: len(recorder._rates) == 8 and not recorder._queue)
        clock.now += events.REFILL + 1
        recorder.record(HOT)
        await becomes(lambda: not recorder._queue)
        assert len(recorder._rates) == 1


async def test_a_fault_of_ours_costs_one_event(tmp_path: Path) -> None:
    """A recorder that starts again after an unforeseen error does not begin with its cause."""
    server = SimApiServer()
    async with client_of(server, tmp_path) as client, anyio.create_task_group() as group:
        recorder, call = EventRecorder("metagpu-x", QUICK, Clock(), Clock()), client.call

        async def broken(*_: object, **__: object) -> Mapping[str, Any]:
            client.call = call  # type: ignore[method-assign]
            raise KeyError("unforeseen")

        client.call = broken  # type: ignore[method-assign]
        recorder.record(HOT)
        recorder.record(killed("team"))
        with pytest.raises(KeyError):
            await recorder.run(client)
        group.start_soon(recorder.run, client)
        await server.until(server.events)
        group.cancel_scope.cancel()
    assert [each["note"] for each in server.events()] == ["process 0 ended"]


async def test_what_does_not_fit_into_the_queue_is_counted() -> None:
    """The namespace with most Events loses its oldest."""
    recorder = EventRecorder("metagpu-x", QUICK, Clock(), Clock())
    recorder.record(killed("quiet"))
    for number in range(events.QUEUE_LIMIT + 1):
        recorder.record(killed("loud", number))
    notes = [data.note for data in recorder._queue if data.subject.namespace == "loud"]
    assert (recorder.dropped, notes[0]) == (2, "process 2 ended")
    assert len(notes) == events.QUEUE_LIMIT - 1


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_an_event_that_is_hopeless_holds_up_no_other(tmp_path: Path, status: int) -> None:
    """The namespace of an Event may be gone, and a policy may refuse it."""
    server = SimApiServer()
    async with recording(server, tmp_path, Clock()) as recorder:
        server.fail(status)
        recorder.record(HOT)
        recorder.record(killed("team"))
        await server.until(server.events)
    assert [each["note"] for each in server.events()] == ["process 0 ended"]
