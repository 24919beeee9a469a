"""Reviews over TLS: what a client gets, and what it cannot do to others."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from metagpu.translation import translate as translation
from metagpu.translation.node_groups import NodeGroups
from metagpu.translation.values import Translation, TranslationSettings
from metagpu.webhook import translator
from metagpu.webhook.settings import WebhookLimits, WebhookTiming
from metagpu.webhook.translator import Outcome
from tests.rigs.waiting import becomes, skip
from tests.webhook.rig import Authority, patched, pod, review, webhook_at_work

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
    assert ["'1500m' is no whole number" in it for it in response["warnings"]] == [True]
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
    assert [it["event"] for it in logs] == ["translation failed"]
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
    """A warning has one line and the length that the API server keeps; there are few of them."""
    found = Translation(warnings=tuple(f"{n}\n" + "x" * 999 for n in range(99)))
    monkeypatch.setattr(translator, "translate_among", lambda *_: found)
    async with webhook_at_work(folder, authority) as webhook:
        response = await webhook.review(review(pod(TWO_GPUS)))

    assert len(response["warnings"]) == 15
    assert all(len(it) == 256 and "\n" not in it for it in response["warnings"])
    assert sum(map(len, response["warnings"])) <= 4096


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
    assert {it["op"] for it in operations} <= {"add", "remove", "replace"}


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /mutate HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        (b"POST /else HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", 404),
        (b"POST /mutate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"POST /mutate HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"POST /mutate HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\n\r\n", 503),
        (b"nonsense\r\n\r\n", 400),
        (b"POST /mutate HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 400),
    ],
)
async def test_other_requests_are_refused(
    folder: Path, authority: Authority, head: bytes, status: int
) -> None:
    """No request but a POST of a length within the limits is read."""
    limits = WebhookLimits(body=1000, bodies=500)
    async with webhook_at_work(folder, authority, limits=limits) as webhook:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            webhook.server.port,
            ssl=webhook.trust,
            server_hostname="metagpu-webhook.kube-system.svc",
        )
        writer.write(head)
        with anyio.fail_after(30):
            line = await reader.readline()
        writer.transport.abort()

    assert line.startswith((f"HTTP/1.1 {status} ".encode(), f"HTTP/1.0 {status} ".encode()))


async def test_a_body_that_does_not_come_is_given_up(folder: Path, authority: Authority) -> None:
    """A client that announces a body has few seconds to send it, and then its memory is free."""
    timing = WebhookTiming(request=600, drain=0)
    body = review(pod(TWO_GPUS))
    limits = WebhookLimits(bodies=len(body) + 10)
    async with webhook_at_work(folder, authority, timing=timing, limits=limits) as webhook:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            webhook.server.port,
            ssl=webhook.trust,
            server_hostname="metagpu-webhook.kube-system.svc",
        )
        writer.write(b"POST /mutate HTTP/1.1\r\nHost: a\r\nContent-Length: 11\r\n\r\n")
        with anyio.fail_after(30):
            while (await webhook.post(body))[0] != 503:
                pass  # the announced body has its part of the memory
        skip(601)
        with anyio.fail_after(30):
            assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        assert (await webhook.post(body))[0] == 200
        writer.transport.abort()


async def test_a_crowd_keeps_no_other_out(folder: Path, authority: Authority) -> None:
    """Of too many connections the idlest goes; the API server's own answers on."""
    limits = WebhookLimits(connections=8)
    async with webhook_at_work(folder, authority, limits=limits) as webhook:
        await webhook.review(review(pod(TWO_GPUS)))
        writers = []
        for number in range(30):
            tls: dict[str, Any] = {
                "ssl": webhook.trust,
                "server_hostname": "metagpu-webhook.kube-system.svc",
            }
            _, writer = await asyncio.open_connection(
                "127.0.0.1", webhook.server.port, **(tls if number % 2 else {})
            )
            writers.append(writer)
            assert "patch" in await webhook.review(review(pod(TWO_GPUS)))
        assert webhook.server.connections <= 8
        assert webhook.session.connector is not None
        for writer in writers:
            writer.transport.abort()
        await becomes(lambda: webhook.server.connections <= 1)
        assert webhook.stats.outcomes[Outcome.TRANSLATED] == 31


async def test_requests_during_the_drain_are_answered(folder: Path, authority: Authority) -> None:
    """After SIGTERM the Service may still send requests for a moment; they get their answers."""
    async with webhook_at_work(folder, authority, timing=WebhookTiming(drain=600)) as webhook:
        await webhook.review(review(pod(TWO_GPUS)))
        webhook.serving.cancel()
        await anyio.wait_all_tasks_blocked()

        assert "patch" in await webhook.review(review(pod(TWO_GPUS)))  # on the open connection
        _, writer = await asyncio.open_connection("127.0.0.1", webhook.server.port)
        writer.close()
        skip(601)
        await becomes(lambda: not webhook.server.port)
        assert webhook.server.connections == 0
