"""Reviews over TLS: what a client gets, and what it cannot do to others."""

import asyncio
import base64
import json
import socket
import ssl
import time
import tracemalloc
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import pytest
import structlog
import yaml
from anyio import to_thread
from anyio.lowlevel import checkpoint

from metagpu.translation import translate as translation
from metagpu.translation.node_offers import NodeGroups
from metagpu.translation.values import Translation, TranslationSettings
from metagpu.webhook import reviews, translator
from metagpu.webhook import server as webhook_server
from metagpu.webhook.server import ServingCertificate
from metagpu.webhook.settings import WebhookLimits, WebhookTiming
from metagpu.webhook.translator import Outcome, Translator
from tests.rigs.waiting import becomes, skip
from tests.webhook.rig import (
    NAME,
    Authority,
    FixedNodes,
    RawClient,
    patched,
    pod,
    review,
    webhook_at_work,
)

ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = 64
"""MiB of the program without a client."""
TWO_GPUS = {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "8000"}
TOO_LARGE = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "90000"}


async def test_a_request_becomes_shares(folder: Path, authority: Authority) -> None:
    """8000 MiB on each of two GPUs are 20 shares of 409 MiB on each, where shares have so many."""
    before = pod(TWO_GPUS)
    async with webhook_at_work(folder, authority) as webhook:
        response = await webhook.review(review(before, uid="of-this-request"))

    after = patched(before, response)
    assert response["uid"] == "of-this-request"
    assert response["allowed"] is True
    assert response["patchType"] == "JSONPatch"
    [container] = after["spec"]["containers"]
    assert container["resources"]["limits"] == {"cnvrg.io/metagpu": "40"}
    assert container["resources"]["requests"] == {"cnvrg.io/metagpu": "40"}
    original = json.loads(after["metadata"].pop("annotations")["metagpu.io/original-request"])
    assert original == {"main": TWO_GPUS}
    container["resources"] = before["spec"]["containers"][0]["resources"]
    assert [*after["spec"].pop("affinity")] == ["nodeAffinity"]
    assert after == before
    assert webhook.stats.outcomes[Outcome.TRANSLATED] == 1


async def test_a_translated_pod_is_left_as_it_is(folder: Path, authority: Authority) -> None:
    """A second call, after another webhook has changed the pod, changes nothing."""
    before = pod(TWO_GPUS)
    async with webhook_at_work(folder, authority) as webhook:
        once = patched(before, await webhook.review(review(before)))
        again = await webhook.review(review(once))

    assert "patch" not in again
    assert again["allowed"] is True


async def test_a_dry_run_is_answered_alike(folder: Path, authority: Authority) -> None:
    """`kubectl create --dry-run=server` shows what a creation would be."""
    async with webhook_at_work(folder, authority) as webhook:
        real = await webhook.review(review(pod(TWO_GPUS)))
        dry = await webhook.review(review(pod(TWO_GPUS), dry_run=True))

    assert dry == real


@pytest.mark.parametrize(
    "request_fields",
    [
        {"operation": "UPDATE"},
        {"subResource": "ephemeralcontainers"},
        {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}},
        {"operation": "DELETE", "object": None},
    ],
)
async def test_what_creates_no_pod_passes(
    folder: Path, authority: Authority, request_fields: dict[str, Any]
) -> None:
    """A registration of more than the creation of pods changes nothing else."""
    async with webhook_at_work(folder, authority) as webhook:
        response = await webhook.review(review(pod(TWO_GPUS), **request_fields))

    assert response == {"uid": "1", "allowed": True}


async def test_a_pod_without_such_a_request_passes(folder: Path, authority: Authority) -> None:
    """A pod that names what nodes offer is left as it is."""
    async with webhook_at_work(folder, authority) as webhook:
        response = await webhook.review(review(pod({"cnvrg.io/metagpu": "5"})))

    assert response == {"uid": "1", "allowed": True}
    assert webhook.stats.outcomes[Outcome.UNTOUCHED] == 1


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [
        ({"nvidia.com/gpu": "1"}, Outcome.UNTOUCHED),
        (TWO_GPUS, Outcome.TRANSLATED),
        ({"nvidia.com/gpumem": "8000"}, Outcome.TRANSLATED),
    ],
)
async def test_names_that_dra_serves_are_left(
    folder: Path, authority: Authority, limits: dict[str, str], outcome: Outcome
) -> None:
    """A name that the scheduler turns into a ResourceClaim is left, though no Node counts it."""
    settings = TranslationSettings(dra_resources=frozenset({"nvidia.com/gpu"}))
    async with webhook_at_work(folder, authority, settings) as webhook:
        response = await webhook.review(review(pod(limits)))

    assert response["allowed"] is True
    assert webhook.stats.outcomes[outcome] == 1


async def test_an_impossible_request_is_admitted_with_a_warning(
    folder: Path, authority: Authority
) -> None:
    """The author reads why no node could serve the pod; the pod waits as it would without us."""
    async with webhook_at_work(folder, authority) as webhook:
        response = await webhook.review(review(pod(TOO_LARGE)))

    assert response["allowed"] is True
    assert "patch" not in response
    [warning] = response["warnings"]
    assert "90000" in warning
    assert webhook.stats.outcomes[Outcome.IMPOSSIBLE] == 1


async def test_an_unreadable_request_is_counted_as_one(folder: Path, authority: Authority) -> None:
    """The author reads why the pod is as it was."""
    async with webhook_at_work(folder, authority) as webhook:
        response = await webhook.review(review(pod({"nvidia.com/gpumem": "1500m"})))

    assert "patch" not in response
    assert ["'1500m' is not a whole number" in warning for warning in response["warnings"]] == [
        True
    ]
    assert webhook.stats.outcomes[Outcome.UNREADABLE] == 1


async def test_an_impossible_request_is_refused_where_settings_say_so(
    folder: Path, authority: Authority
) -> None:
    """With `--impossible refuse` the author gets the same sentence as an error."""
    settings = TranslationSettings(impossible="refuse")
    async with webhook_at_work(folder, authority, settings) as webhook:
        response = await webhook.review(review(pod(TOO_LARGE)))

    assert response["allowed"] is False
    assert response["status"]["code"] == 403
    assert "90000" in response["status"]["message"]
    assert webhook.stats.outcomes[Outcome.REFUSED] == 1


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"nvidia.com/gpumem": "1500m"}, "main: nvidia.com/gpumem: '1500m' is not a whole number"),
        ({"nvidia.com/gpumem": "lots"}, "main: nvidia.com/gpumem: 'lots' is not a whole number"),
        (
            {"nvidia.com/gpumem-percentage": "101"},
            "main: nvidia.com/gpumem-percentage: 101 is more than a GPU has",
        ),
        (
            {"nvidia.com/gpumem": "8000", "cnvrg.io/metagpu": "20"},
            "main asks for cnvrg.io/metagpu and for nvidia.com/gpumem; ask for one of them",
        ),
    ],
)
async def test_an_unreadable_request_is_refused_where_settings_say_so(
    folder: Path, authority: Authority, limits: dict[str, str], sentence: str
) -> None:
    """With `--impossible refuse` a request that cannot be read is refused, by key and value."""
    settings = TranslationSettings(impossible="refuse")
    async with webhook_at_work(folder, authority, settings) as webhook:
        response = await webhook.review(review(pod(limits)))

    assert response["allowed"] is False
    assert response["status"]["message"] == f"container {sentence}"
    assert "warnings" not in response
    assert webhook.stats.outcomes[Outcome.REFUSED] == 1


async def test_nothing_changes_before_the_nodes_are_known(
    folder: Path, authority: Authority
) -> None:
    """A pod is never called impossible because nobody has looked yet."""
    settings = TranslationSettings(impossible="refuse")
    async with webhook_at_work(folder, authority, settings) as webhook:
        webhook.nodes.known = False
        response = await webhook.review(review(pod(TOO_LARGE)))

    assert response == {"uid": "1", "allowed": True, "warnings": [translator.UNREADY]}


async def test_a_fault_of_ours_lets_the_pod_pass(
    folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in the translation costs a warning and a line in the log, and no pod."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(translator, "translate_among", broken)
    async with webhook_at_work(folder, authority) as webhook:
        with structlog.testing.capture_logs() as logs:
            response = await webhook.review(review(pod(TWO_GPUS)))
        monkeypatch.setattr(translator, "translate_among", translation.translate_among)
        next_one = await webhook.review(review(pod(TWO_GPUS)))

    assert response == {"uid": "1", "allowed": True, "warnings": [translator.FAILED]}
    assert [log["event"] for log in logs] == ["translation failed"]
    assert "patch" in next_one


async def test_equal_requests_are_translated_once(
    folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods of one Job cost one translation until the nodes change; their names do not matter."""
    calls = []

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return translation.translate_among(*arguments)  # type: ignore[arg-type] # it passes them on

    monkeypatch.setattr(translator, "translate_among", counted)
    async with webhook_at_work(folder, authority) as webhook:
        for name in ("a", "b", "c"):
            one = pod(TWO_GPUS)
            one["metadata"]["name"] = name
            one["spec"]["volumes"] = [{"name": f"kube-api-access-{name}"}]
            assert "patch" in await webhook.review(review(one, uid=name))
        assert len(calls) == 1

        webhook.nodes.groups, webhook.nodes.version = NodeGroups(), 1
        response = await webhook.review(review(pod(TWO_GPUS)))
    assert len(calls) == 2
    assert "patch" not in response


async def test_long_warnings_are_cut(
    folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings that are together too long for the API server have its length each, in one line."""
    found = Translation(warnings=tuple(f"{n}\n" + "x" * 999 for n in range(99)))
    monkeypatch.setattr(translator, "translate_among", lambda *_: found)
    async with webhook_at_work(folder, authority) as webhook:
        response = await webhook.review(review(pod(TWO_GPUS)))

    assert len(response["warnings"]) == 15
    assert all(len(warning) == 256 and "\n" not in warning for warning in response["warnings"])
    assert sum(map(len, response["warnings"])) <= 4096


async def test_a_long_warning_is_kept_whole(
    folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server cuts no warning unless all are too long: the advice at the end stays."""
    text = "a reason " * 60 + "and the advice"
    found = Translation(impossible=text, warnings=(text, "another one"))
    monkeypatch.setattr(translator, "translate_among", lambda *_: found)
    async with webhook_at_work(folder, authority) as webhook:
        response = await webhook.review(review(pod(TWO_GPUS)))

    assert response["warnings"] == [text, "another one"]


NESTED = b'{"apiVersion":' + b"[" * 100_000
DEEP_POD = (
    review(None).replace(
        b'"object": null', b'"object": {"spec": {"affinity": ' + b'{"a":' * 50_000 + b"1"
    )
    + b"}" * 50_002
)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"{}",
        b"[]",
        NESTED,
        DEEP_POD,
        review(pod(TWO_GPUS)).replace(b"admission.k8s.io/v1", b"admission.k8s.io/v1beta1"),
        review([1, 2]),
        review({"metadata": {}, "spec": {"containers": [{"resources": 7}]}}),
        review({"metadata": {"annotations": {"a": 1}}, "spec": {"containers": []}}),
        b"\xff\xfe" + review(pod(TWO_GPUS)),
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_a_malformed_review_harms_nobody_else(
    folder: Path, authority: Authority, body: bytes
) -> None:
    """A body that is no review gets 400, and the next review its answer on the same connection."""
    async with webhook_at_work(folder, authority) as webhook:
        with structlog.testing.capture_logs() as logs:
            status, answer = await webhook.post(body)
        good = await webhook.review(review(pod(TWO_GPUS)))

    assert (status, bool(answer)) == (400, True)
    assert logs == []
    assert "patch" in good
    assert webhook.stats.outcomes[Outcome.MALFORMED] == 1


async def test_patch_is_base64_of_a_list(folder: Path, authority: Authority) -> None:
    """The API server takes a patch as base64 of a JSON Patch."""
    async with webhook_at_work(folder, authority) as webhook:
        response = await webhook.review(review(pod(TWO_GPUS)))

    operations = json.loads(base64.b64decode(response["patch"], validate=True))
    assert {operation["op"] for operation in operations} <= {"add", "remove", "replace"}


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /mutate HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        (b"POST /else HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", 404),
        (b"POST /mutate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"POST /mutate HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"POST /mutate HTTP/1.1\r\nHost: a\r\nContent-Length: %s\r\n\r\n" % (b"0" * 5001), 413),
        (b"nonsense\r\n\r\n", 400),
        (b"POST /mutate HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 400),
    ],
)
async def test_other_requests_are_refused(
    folder: Path, authority: Authority, head: bytes, status: int
) -> None:
    """No request but a POST of a length within the limits is read."""
    limits = WebhookLimits(body=1000)
    async with webhook_at_work(folder, authority, limits=limits) as webhook:
        client = await webhook.connect()
        await client.write(head)
        assert await client.status() == status


async def test_a_body_that_does_not_come_is_given_up(folder: Path, authority: Authority) -> None:
    """A client that announces a body has few seconds to send it."""
    timing = WebhookTiming(request=600, drain=0)
    async with webhook_at_work(folder, authority, timing=timing) as webhook:
        client = await webhook.connect()
        await client.send(b"{", announced=11)
        await becomes(lambda: webhook.server.busy == 1)
        skip(601)
        assert await client.status() == 400


async def test_requests_that_come_together_are_answered_in_order(
    folder: Path, authority: Authority
) -> None:
    """Requests in one write, the last of them in pieces, get their answers one after the other."""
    body = review(pod(TWO_GPUS))
    whole = b"POST /mutate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with webhook_at_work(folder, authority) as webhook:
        client = await webhook.connect()
        await client.write(b"GET /else HTTP/1.1\r\nHost: a\r\n\r\n" + 2 * whole + whole[:-1])
        assert [await client.status() for _ in range(3)] == [404, 200, 200]
        await becomes(lambda: webhook.server.busy == 1)
        await client.send_more(whole[-1:])
        assert await client.status() == 200
        await becomes(lambda: webhook.server.busy == 0)


@pytest.mark.parametrize("sent", [b"", b"POST /mut", b"whole"])
async def test_an_idle_connection_ends(folder: Path, authority: Authority, sent: bytes) -> None:
    """A client that sends no whole request for long is gone, whatever it had before."""
    timing = WebhookTiming(keep_alive=600, drain=0)
    async with webhook_at_work(folder, authority, timing=timing) as webhook:
        client = await webhook.connect()
        if sent == b"whole":
            await client.send(review(pod(TWO_GPUS)))
            assert await client.status() == 200
        else:
            await client.write(sent)
        [connection] = webhook.server._open
        await becomes(lambda: connection.connected)
        skip(1201)
        assert await client.ended()


async def test_a_client_that_reads_nothing_ends(folder: Path, authority: Authority) -> None:
    """Answers that nobody reads do not pile up, whatever the client does with its own side."""
    body = review(pod(TWO_GPUS))
    async with webhook_at_work(folder, authority) as webhook, anyio.create_task_group() as group:
        client = await webhook.connect()

        client.pause()

        async def send_for_ever() -> None:
            with suppress(ConnectionError):
                while True:
                    await client.send(body)

        group.start_soon(send_for_ever)
        [connection] = webhook.server._open
        await becomes(lambda: connection.connected)
        await becomes(lambda: not webhook.server.connections)
        group.cancel_scope.cancel()


async def test_a_client_that_waits_for_no_answer_ends(folder: Path, authority: Authority) -> None:
    """Hundreds of requests in one write keep the loop from nobody: they get no answer."""
    async with webhook_at_work(folder, authority) as webhook:
        client = await webhook.connect()
        await client.write(b"GET / HTTP/1.1\r\nHost:\r\n\r\n" * 600)
        assert await client.ended()
        assert "patch" in await webhook.review(review(pod(TWO_GPUS)))


async def test_nothing_follows_the_answer_to_another_method(
    folder: Path, authority: Authority
) -> None:
    """The answer to HEAD has no body elsewhere: the next answer would be read as one."""
    async with webhook_at_work(folder, authority) as webhook:
        client = await webhook.connect()
        await client.write(b"HEAD /mutate HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await client.status() == 405
        assert await client.ended()


async def test_announced_bodies_take_nothing(folder: Path, authority: Authority) -> None:
    """A body that is announced and does not come keeps no other review out, no large one either."""
    limits = WebhookLimits()
    large = pod(TWO_GPUS)
    large["spec"]["volumes"] = [{"name": "x" * limits.small}]
    async with webhook_at_work(folder, authority) as webhook:
        clients = [await webhook.connect() for _ in range(limits.bodies // limits.body + 1)]
        for client in clients:
            await client.send(b"{", announced=limits.body)
        await becomes(lambda: webhook.server.busy == len(clients))

        assert "patch" in await webhook.review(review(large))
        assert "patch" in await webhook.review(review(pod(TWO_GPUS)))


async def test_bytes_that_came_are_limited(folder: Path, authority: Authority) -> None:
    """Of large bodies only so many bytes are read at once; small ones are read always."""
    small, large = review(pod(TWO_GPUS)), review(pod(TWO_GPUS, note="x" * 1000))
    limits = WebhookLimits(small=len(small), bodies=len(large) + 10)
    async with webhook_at_work(folder, authority, limits=limits) as webhook:
        client = await webhook.connect()
        await client.send(large[:-1], announced=len(large))
        await becomes(lambda: webhook.server.reading == len(large) - 1)

        assert (await webhook.post(large))[0] == 503
        assert (await webhook.post(small))[0] == 200
        await client.send_more(large[-1:])
        assert await client.status() == 200
        assert (await webhook.post(large))[0] == 200
        await becomes(lambda: webhook.server.reading == 0)


async def test_a_crowd_keeps_no_other_out(folder: Path, authority: Authority) -> None:
    """Of too many connections the oldest without an answer goes, whatever it has sent."""
    limits = WebhookLimits(connections=8)
    body = review(pod(TWO_GPUS))
    async with webhook_at_work(folder, authority, limits=limits) as webhook:
        idle, reading = await webhook.connect(), await webhook.connect()
        await idle.send(body)
        assert await idle.status() == 200
        await reading.send(body[:100], announced=len(body))
        await becomes(lambda: webhook.server.busy == 1)

        crowd = []
        for number in range(20):
            client = await webhook.connect(tls=bool(number % 2))
            await client.write(b"P")
            crowd.append(client)
        for client in crowd[: -limits.connections + 2]:
            assert await client.ended()
        assert webhook.server.connections == limits.connections

        await reading.send_more(body[100:])
        assert await reading.status() == 200
        await idle.send(body)
        assert await idle.status() == 200


async def test_a_crowd_of_a_pod_keeps_no_review_out(folder: Path, authority: Authority) -> None:
    """Hundreds of connections of one address, in any state, wait behind those of the API server."""
    limits = WebhookLimits(connections=64, burst=80, rate=4.0)
    body = review(pod(TWO_GPUS))
    async with webhook_at_work(folder, authority, limits=limits) as webhook:
        crowd = ExitStack()
        for _ in range(400):
            client = crowd.enter_context(socket.socket())
            client.bind(("127.0.0.2", 0))
            client.connect(("127.0.0.1", webhook.server.port))
            client.send(b"\x16")
        await becomes(lambda: webhook.server.connections == limits.connections)

        # In the order of their arrival, the first review would wait for more than a minute.
        with crowd:
            for _ in range(3):
                assert (await webhook.post(body))[0] == 200


async def test_connections_with_answers_keep_no_review_out(
    folder: Path, authority: Authority
) -> None:
    """A pod that has had answers on all connections does not keep those of others from theirs."""
    limits = WebhookLimits(connections=8)
    body = review(pod(TWO_GPUS))
    async with webhook_at_work(folder, authority, limits=limits) as webhook:
        for _ in range(limits.connections):
            client = await webhook.connect(source="127.0.0.2")
            await client.send(body)
            assert await client.status() == 200
        good = await webhook.connect()
        for _ in range(2 * limits.connections):
            await (await webhook.connect(source="127.0.0.2")).write(b"P")

        await good.send(body)
        assert await good.status() == 200


@pytest.mark.parametrize(("source", "namespace"), [("127.0.0.2", "team-a"), ("127.0.0.1", "b")])
async def test_expensive_reviews_of_one_delay_no_other(
    folder: Path,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    namespace: str,
) -> None:
    """Hundreds of reviews of an address, or a namespace, wait behind the first of another one."""
    monkeypatch.setattr(webhook_server, "_ANSWERING", 0.0)
    body = review(pod(TWO_GPUS), namespace=namespace)
    answered: list[bytes] = []
    async with webhook_at_work(folder, authority) as webhook:
        translate = webhook.server.answer

        def answer(asked: bytes) -> translator.ReviewAnswer:
            answered.append(asked)
            return translate(asked)

        webhook.server.answer = answer
        crowd = [await webhook.connect(source=source) for _ in range(40)]
        good = await webhook.connect()
        for client in crowd:
            await client.send(body)
        await good.send(review(pod(TWO_GPUS), uid="good"))
        assert await good.status() == 200
        assert len(answered) < len(crowd)


async def test_requests_during_the_drain_are_answered(folder: Path, authority: Authority) -> None:
    """After SIGTERM requests still come for a moment; each answer is its connection's last."""
    body = review(pod(TWO_GPUS))
    async with webhook_at_work(folder, authority, timing=WebhookTiming(drain=600)) as webhook:
        before = await webhook.connect()
        await before.send(body)
        assert await before.status() == 200
        webhook.serving.cancel()
        await anyio.wait_all_tasks_blocked()

        new = await webhook.connect()
        for client in (before, new):
            await client.send(body)
            assert await client.status() == 200
            assert await client.ended()
        skip(601)
        await becomes(lambda: not webhook.server.port)
        assert webhook.server.connections == 0


async def test_failed_handshakes_leave_nothing(folder: Path, authority: Authority) -> None:
    """Clients that end, or that trust nobody, are forgotten: the drain waits for none of them."""
    async with webhook_at_work(folder, authority) as webhook:
        for number in range(6):
            with suppress(OSError):
                _, writer = await asyncio.open_connection(
                    "127.0.0.1",
                    webhook.server.port,
                    ssl=ssl.create_default_context() if number % 2 else None,
                )
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                writer.close()
        assert (await webhook.post(review(pod(TWO_GPUS))))[0] == 200  # it was accepted after them
        await becomes(lambda: webhook.server.connections <= 1)


async def test_a_handshake_goes_on_during_the_drain(folder: Path, authority: Authority) -> None:
    """An API server that was about to connect at SIGTERM is served, as one that connects later."""
    goes_on = anyio.Event()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, to_server = await asyncio.open_connection("127.0.0.1", webhook.server.port)

        async def forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                if source is upstream:
                    await goes_on.wait()
                sink.write(data)
            sink.close()

        await asyncio.gather(forward(reader, to_server), forward(upstream, writer))

    async with webhook_at_work(folder, authority, timing=WebhookTiming(drain=600)) as webhook:
        async with await asyncio.start_server(relay, "127.0.0.1", 0) as between:
            port = between.sockets[0].getsockname()[1]
            connecting = asyncio.create_task(
                asyncio.open_connection("127.0.0.1", port, ssl=webhook.trust, server_hostname=NAME)
            )
            await becomes(lambda: webhook.server.connections == 1)
            webhook.serving.cancel()
            await anyio.wait_all_tasks_blocked()
            goes_on.set()

            client = RawClient(*await connecting)
            await client.send(review(pod(TWO_GPUS)))
            assert await client.status() == 200
            assert await client.ended()
        skip(601)
        await becomes(lambda: not webhook.server.port)


# --- what one pod may take ------------------------------------------------------------------------


def crowded(containers: int) -> dict[str, Any]:
    """Return a pod whose containers all ask."""
    found = pod(TWO_GPUS)
    [one] = found["spec"]["containers"]
    found["spec"]["containers"] = [{**one, "name": f"c{number}"} for number in range(containers)]
    return found


def choosy(terms: int) -> dict[str, Any]:
    """Return a pod with an affinity of so many terms, and as many expressions."""
    one = {"matchExpressions": [{"key": "x", "operator": "DoesNotExist"}]}
    required = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [one] * terms}
    }
    return {
        **(document := pod(TWO_GPUS)),
        "spec": {**document["spec"], "affinity": {"nodeAffinity": required}},
    }


@pytest.mark.parametrize(
    ("asked", "excess"),
    [
        (crowded(reviews.MOST_CONTAINERS), ""),
        (crowded(reviews.MOST_CONTAINERS + 1), "256 containers"),
        (choosy(reviews.MOST_TERMS // 2 - 2), ""),
        (choosy(reviews.MOST_TERMS // 2 + 1), "256 terms and expressions"),
        (pod(TWO_GPUS) | {"else": [{}] * reviews.MOST_VALUES}, "50000 values"),
    ],
    ids=["containers", "containers+1", "terms", "terms+1", "values"],
)
def test_the_work_for_one_pod_is_limited(asked: dict[str, Any], excess: str) -> None:
    """A pod beyond the limits is admitted as it is, and its author reads which limit it was."""
    answer = Translator(FixedNodes(), TranslationSettings()).answer(review(asked))
    response = json.loads(answer.body)["response"]

    assert response["allowed"] is True
    if excess:
        assert answer.outcome is Outcome.UNTOUCHED
        assert "patch" not in response
        [warning] = response["warnings"]
        assert excess in warning
        assert "unchanged" in warning
    else:
        assert answer.outcome in {Outcome.TRANSLATED, Outcome.IMPOSSIBLE}


def test_kais_annotations_are_read_by_a_setting() -> None:
    """KAI's own webhook and scheduler may be there: only a setting takes such pods from them."""
    asked = pod({}) | {"metadata": {"annotations": {"gpu-fraction": "0.5"}}}
    wrong = pod({}) | {"metadata": {"annotations": {"gpu-fraction": "2"}}}
    both = TranslationSettings(vocabularies=("hami", "kai"))

    def outcome(asked: object, settings: TranslationSettings) -> Outcome:
        return Translator(FixedNodes(), settings).answer(review(asked)).outcome

    assert outcome(asked, TranslationSettings()) is Outcome.UNTOUCHED
    assert outcome(asked, both) is Outcome.TRANSLATED
    assert outcome(wrong, both) is Outcome.UNREADABLE
    refusing = TranslationSettings(vocabularies=both.vocabularies, impossible="refuse")
    assert outcome(wrong, refusing) is Outcome.REFUSED


@pytest.mark.parametrize("where", ["affinity", "containers", "annotations"])
def test_a_large_pod_takes_little_memory(where: str) -> None:
    """A pod of the largest size, of the smallest values, takes less than three times its size."""
    values = b"[" + b"{}," * 1_300_000 + b"{}]"
    names = b"{" + b",".join(b'"%d":""' % number for number in range(340_000)) + b"}"
    spec = b'{"containers":[]}'
    metadata = b"{}"
    if where == "affinity":
        spec = b'{"containers":[],"affinity":{"a":' + values + b"}}"
    elif where == "containers":
        spec = b'{"containers":' + values + b"}"
    else:
        metadata = b'{"annotations":' + names + b"}"
    one = b'{"metadata":' + metadata + b',"spec":' + spec + b"}"
    body = review(None).replace(b'"object": null', b'"object": ' + one)
    assert 3_000_000 < len(body) < WebhookLimits().body
    subject = Translator(FixedNodes(), TranslationSettings())
    tracemalloc.start()
    try:
        answer = subject.answer(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert answer.outcome is Outcome.UNTOUCHED
    assert peak < 3 * len(body)


async def test_an_idle_connection_takes_little_memory(folder: Path, authority: Authority) -> None:
    """A connection takes less than 64 KiB of Python's memory: asyncio's own buffer alone is 256."""
    count = 20
    async with webhook_at_work(folder, authority) as webhook:
        body = review(pod(TWO_GPUS))
        await webhook.review(body)

        def connect() -> list[ssl.SSLSocket]:
            address = ("127.0.0.1", webhook.server.port)
            return [
                webhook.trust.wrap_socket(socket.create_connection(address), server_hostname=NAME)
                for _ in range(count)
            ]

        tracemalloc.start()
        try:
            clients = await to_thread.run_sync(connect)
            await becomes(lambda: webhook.server.connections == count + 1)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        for client in clients:
            client.close()

    assert held < count * 64 * 1024


async def test_what_waits_for_its_turn_reads_little_ahead(
    folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what a client sends before it has its answer, the rest stays in the network."""
    async with webhook_at_work(folder, authority) as webhook:
        monkeypatch.setattr(webhook.server, "on_whole", lambda *_: None)
        client = await webhook.connect()
        await client.send(review(pod(TWO_GPUS)))
        await becomes(lambda: webhook.server.busy == 1)
        await client.write(b"x" * 400_000)
        [connection] = webhook.server._open
        tls = connection._transport._ssl_protocol  # type: ignore[union-attr]

        await becomes(lambda: tls._get_read_buffer_size() > 0)
        for _ in range(100):
            await checkpoint()
        assert tls._get_read_buffer_size() <= 32 * 1024


def test_limits_together_are_less_than_the_memory_of_the_chart() -> None:
    """Bodies, connections and the largest pod at once, beside the program itself, fit its limit."""
    values = yaml.safe_load((ROOT / "deploy/chart/values.yaml").read_text())
    limit = int(values["webhook"]["resources"]["limits"]["memory"].removesuffix("Mi"))
    limits = WebhookLimits()
    of_connections = limits.connections * (limits.small + 64 * 1024)
    largest = 3 * limits.body
    assert (of_connections + limits.bodies + largest) // 2**20 + PROGRAM < limit


DAY = 86_400.0
BODY = review(pod({"nvidia.com/gpumem": "8000"}))


def mounted(folder: Path, source: Path, name: str) -> None:
    """Replace the files of a folder as the kubelet does with a Secret: by a link to a folder."""
    folder.mkdir(exist_ok=True)
    source.rename(folder / name)
    fresh = folder / "..data_tmp"
    fresh.symlink_to(name)
    fresh.rename(folder / "..data")
    for file in ("tls.crt", "tls.key"):
        if not (folder / file).is_symlink():
            (folder / file).symlink_to(f"..data/{file}")


async def test_a_new_certificate_serves_new_connections(
    tmp_path: Path, authority: Authority
) -> None:
    """A renewed Secret is in force without a restart, and no request is lost meanwhile."""
    authority.issue(tmp_path / "first", days=7)
    authority.issue(tmp_path / "second", days=30)
    mounted(tmp_path / "tls", tmp_path / "first", "..1")

    async with webhook_at_work(tmp_path / "tls", authority) as webhook:
        before = webhook.certificate.expires
        await webhook.review(BODY)
        mounted(tmp_path / "tls", tmp_path / "second", "..2")
        await becomes(lambda: webhook.certificate.expires != before)
        await webhook.review(BODY)  # on the connection that was open
        _, writer = await asyncio.open_connection(
            "127.0.0.1", webhook.server.port, ssl=webhook.trust, server_hostname=NAME
        )
        shown = writer.get_extra_info("peercert")
        writer.transport.abort()

    assert ssl.cert_time_to_seconds(shown["notAfter"]) == webhook.certificate.expires
    assert webhook.certificate.expires - time.time() == pytest.approx(30 * DAY, abs=DAY)


@pytest.mark.parametrize("fault", ["expired", "other key", "no file", "no certificate"])
async def test_a_bad_pair_changes_nothing(folder: Path, authority: Authority, fault: str) -> None:
    """The last good certificate stays in force, one line of the log says why, and only one."""
    certificate = ServingCertificate(folder)
    await certificate.reload()
    before = certificate.expires

    def spoil() -> None:
        if fault == "expired":
            authority.issue(folder, days=-1)
        elif fault == "other key":
            authority.issue(folder.parent / "other")
            (folder.parent / "other" / "tls.key").replace(folder / "tls.key")
        elif fault == "no file":
            (folder / "tls.crt").unlink()
        else:
            (folder / "tls.crt").write_text("no certificate")

    await to_thread.run_sync(spoil)
    with structlog.testing.capture_logs() as logs:
        await certificate.reload()
        await certificate.reload()

    assert [log["event"] for log in logs] == ["certificate rejected"]
    assert str(folder) in certificate.error
    assert certificate.expires == before
    assert certificate.problem == ""


async def test_an_expired_certificate_is_a_problem(folder: Path) -> None:
    """A webhook whose certificate has expired is not ready: no client would trust it."""
    now = time.time()
    certificate = ServingCertificate(folder, clock=lambda: now)
    assert "no certificate" in certificate.problem
    await certificate.reload()
    assert certificate.problem == ""
    now += 8 * DAY
    assert "expired" in certificate.problem


async def test_without_a_certificate_no_handshake_succeeds(
    tmp_path: Path, authority: Authority
) -> None:
    """Before the first good pair clients get an alert of TLS; with it they get their answer."""
    (tmp_path / "tls").mkdir()
    async with webhook_at_work(tmp_path / "tls", authority) as webhook:
        with pytest.raises(aiohttp.ClientConnectorError):
            await webhook.review(BODY)
        await to_thread.run_sync(authority.issue, tmp_path / "tls")
        await becomes(lambda: webhook.certificate.expires)
        await webhook.review(BODY)
