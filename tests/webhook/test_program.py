"""The whole webhook beside an API server: nodes, certificate, metrics and probes."""

import json
import os
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import pytest
from anyio import to_thread

from metagpu.host.programs import run_command
from metagpu.plugins.cluster.event_recorder import BURST, MINOR, REFILL
from metagpu.plugins.cluster.settings import ClusterTiming
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.webhook.connection import PATH
from metagpu.webhook.program import BURST as BURST_OF_ALL
from metagpu.webhook.program import FAMILIES, RATE, Webhook
from metagpu.webhook.settings import WebhookSettings, WebhookTiming
from tests.rigs.waiting import becomes, until
from tests.webhook.rig import A100, LOOPBACK, NAME, Authority, pod, review

TIMING = WebhookTiming(
    drain=0.0, cluster=ClusterTiming(backoff_first=0.01, backoff_longest=0.05, spread=0.01)
)


def add_node(api: SimApiServer, name: str, shares: int) -> None:
    """Add a Node as metagpu labels it."""
    api.add_node(name, dict(A100.labels))
    api.report(name, {"cnvrg.io/metagpu": 200}, {"cpu": 8, "cnvrg.io/metagpu": shares})


@asynccontextmanager
async def program(
    api: SimApiServer,
    tmp_path: Path,
    folder: Path,
    *,
    events: bool = False,
) -> AsyncIterator[tuple[Webhook, aiohttp.ClientSession]]:
    """Run the webhook until the block ends, by the signal that Kubernetes sends."""
    settings = WebhookSettings(
        LOOPBACK, folder, LOOPBACK, api.kubeconfig(tmp_path), timing=TIMING, events=events
    )
    webhook = Webhook(settings, run_command)
    async with anyio.create_task_group() as group, aiohttp.ClientSession() as session:
        group.start_soon(webhook.run)
        await webhook.started()
        assert webhook.exporter is not None
        await becomes(lambda: webhook.exporter and webhook.exporter.server.port)
        await becomes(lambda: webhook.server.port)
        yield webhook, session
        os.kill(os.getpid(), signal.SIGTERM)


async def page(webhook: Webhook, session: aiohttp.ClientSession, path: str) -> tuple[int, str]:
    """Return status and text of a page."""
    assert webhook.exporter is not None
    url = f"http://127.0.0.1:{webhook.exporter.server.port}{path}"
    async with session.get(url) as response:
        return response.status, await response.text()


async def test_it_is_ready_with_nodes_and_a_certificate(tmp_path: Path, folder: Path) -> None:
    """/readyz names what is missing; /healthz does not care."""
    api = SimApiServer()
    add_node(api, "gpu-1", 200)
    api.denied.append(("GET", "/nodes"))
    (folder / "tls.key").rename(tmp_path / "key")
    async with api.running(), program(api, tmp_path, folder) as (webhook, session):

        async def says(*parts: str) -> bool:
            status, text = await page(webhook, session, "/readyz")
            return status == 503 and all(part in text for part in parts)

        await until(lambda: says("no certificate", "the nodes have not been read yet", "nodes"))
        assert (await page(webhook, session, "/healthz"))[0] == 200
        (tmp_path / "key").rename(folder / "tls.key")
        api.denied.clear()

        async def ready() -> bool:
            return await page(webhook, session, "/readyz") == (200, "ok\n")

        await until(ready)


async def test_nodes_come_change_and_go(tmp_path: Path, folder: Path) -> None:
    """Translations choose from the Nodes as they are; what offers nothing is not kept."""
    api = SimApiServer()
    add_node(api, "gpu-1", 200)
    api.add_node("cpu-1", {})
    async with api.running(), program(api, tmp_path, folder) as (webhook, _):
        nodes = webhook._nodes
        await becomes(lambda: nodes.known)
        assert {name: offer.allocatable for name, offer in nodes.groups.nodes.items()} == {
            "gpu-1": {"cnvrg.io/metagpu": 200}
        }
        await api.watched("/api/v1/nodes")
        before = nodes.version

        add_node(api, "gpu-0", 100)
        await becomes(lambda: set(nodes.groups.nodes) == {"gpu-0", "gpu-1"})
        assert nodes.version > before

        api.store.delete(("nodes", "", "gpu-1"))
        await becomes(lambda: set(nodes.groups.nodes) == {"gpu-0"})


async def test_an_api_server_that_is_away_changes_no_answer(tmp_path: Path, folder: Path) -> None:
    """Known nodes stay, and the webhook stays ready; a metric says that the watch fails."""
    api = SimApiServer()
    add_node(api, "gpu-1", 200)
    async with api.running(), program(api, tmp_path, folder) as (webhook, session):
        await api.watched("/api/v1/nodes")
        api.failing.append(("GET", "/nodes"))
        api.end_watches()
        await becomes(lambda: webhook._nodes.problem)
        assert set(webhook._nodes.groups.nodes) == {"gpu-1"}
        assert await page(webhook, session, "/readyz") == (200, "ok\n")
        _, text = await page(webhook, session, "/metrics")
        assert "metagpu_webhook_nodes_watched 0.0" in text


async def test_metrics_count_reviews(tmp_path: Path, folder: Path, authority: Authority) -> None:
    """The page has every family, each review by its outcome, and the metrics of the process."""
    trust = await to_thread.run_sync(
        lambda: ssl.create_default_context(cafile=str(authority.certificate))
    )
    api = SimApiServer()
    add_node(api, "gpu-1", 200)
    async with api.running(), program(api, tmp_path, folder) as (webhook, session):
        await becomes(lambda: not webhook.problems())
        for amount in ("8000", "9000", "90000"):
            async with session.post(
                f"https://127.0.0.1:{webhook.server.port}{PATH}",
                data=review(pod({"nvidia.com/gpumem": amount})),
                ssl=trust,
                server_hostname=NAME,
            ) as response:
                assert response.status == 200
        _, text = await page(webhook, session, "/metrics")

    for family in FAMILIES:
        assert f"# TYPE {family.name} {family.type}" in text
    for outcome, count in (("translated", 2), ("impossible", 1), ("untouched", 0)):
        assert f'metagpu_webhook_reviews_total{{outcome="{outcome}"}} {count}.0' in text
    assert "metagpu_webhook_review_duration_seconds_count 3.0" in text
    assert "metagpu_webhook_connections 1.0" in text
    assert "metagpu_webhook_nodes 1.0" in text
    assert "process_resident_memory_bytes" in text


OWNER: Final = {
    "apiVersion": "apps/v1",
    "kind": "ReplicaSet",
    "name": "train-7d",
    "uid": "u-1",
    "controller": True,
}
Send = Callable[[bytes], Awaitable[dict[str, Any]]]


def huge(amount: int = 90000, **metadata: object) -> dict[str, Any]:
    """Return a pod that no node could serve."""
    found = pod({"nvidia.com/gpumem": str(amount)})
    found["metadata"] |= metadata
    return found


def owned(amount: int = 90000) -> dict[str, Any]:
    """Return such a pod of a ReplicaSet, which the API server names after the review."""
    found = huge(amount, ownerReferences=[OWNER])
    del found["metadata"]["name"]
    return found


@asynccontextmanager
async def serving(
    api: SimApiServer, folder: Path, authority: Authority, *, events: bool = True
) -> AsyncIterator[Send]:
    """Run the webhook beside an API server; yield what sends it a review."""
    trust = await to_thread.run_sync(
        lambda: ssl.create_default_context(cafile=str(authority.certificate))
    )
    add_node(api, "gpu-1", 200)
    async with (
        api.running(),
        program(api, folder.parent, folder, events=events) as (webhook, session),
    ):
        await becomes(lambda: not webhook.problems())
        url = f"https://127.0.0.1:{webhook.server.port}{PATH}"

        async def send(body: bytes) -> dict[str, Any]:
            async with session.post(url, data=body, ssl=trust, server_hostname=NAME) as response:
                assert response.status == 200
                answer = json.loads(await response.read())
            found: dict[str, Any] = answer["response"]
            return found

        yield send


async def test_the_controller_gets_an_event(folder: Path, authority: Authority) -> None:
    """A Deployment's author, who sees no warning, finds an Event of its ReplicaSet."""
    api = SimApiServer()
    async with serving(api, folder, authority) as send:
        response = await send(review(owned()))
        await api.until(api.events)

    [event] = api.events()
    assert event["regarding"] == {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "name": "train-7d",
        "uid": "u-1",
        "namespace": "team-a",
    }
    assert event["metadata"]["namespace"] == "team-a"
    assert (event["reason"], event["type"]) == ("GPURequestImpossible", "Warning")
    assert [event["note"]] == response["warnings"]


async def test_a_pod_without_a_controller_is_named(folder: Path, authority: Authority) -> None:
    """An owner that is no controller is not the pod's author."""
    api = SimApiServer()
    async with serving(api, folder, authority) as send:
        await send(review(huge(ownerReferences=[{**OWNER, "controller": False}])))
        await api.until(api.events)

    [event] = api.events()
    assert event["regarding"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "train",
        "namespace": "team-a",
    }


async def test_what_gets_no_event(folder: Path, authority: Authority) -> None:
    """Dry runs, pods without any name, and what is translated or unreadable write none."""
    nameless = huge()
    del nameless["metadata"]["name"]
    api = SimApiServer()
    async with serving(api, folder, authority) as send:
        await send(review(owned(), dry_run=True))
        await send(review(nameless))
        await send(review(pod({"nvidia.com/gpumem": "8000"})))
        await send(review(pod({"nvidia.com/gpumem": "1500m"})))
        await send(review(huge(90001)))  # the last one
        await api.until(api.events)

    assert ["90001" in event["note"] for event in api.events()] == [True]


async def test_without_the_option_nothing_is_written(folder: Path, authority: Authority) -> None:
    """By default the webhook sends the API server nothing but reads."""
    api = SimApiServer()
    async with serving(api, folder, authority, events=False) as send:
        assert (await send(review(owned())))["warnings"]

    assert {request.method for request in api.requests} == {"GET"}


async def test_a_storm_writes_few_events(folder: Path, authority: Authority) -> None:
    """Pods of one controller are one Event; ever new sentences stay within the namespace's rate."""
    api = SimApiServer()
    async with serving(api, folder, authority) as send:
        began = anyio.current_time()
        for _ in range(50):
            await send(review(owned()))
        await api.until(api.events)
        assert len(api.events()) == 1
        for number in range(100):
            await send(review(huge(90000 + number, name=f"pod-{number}")))
        await send(review(huge(), namespace="team-b"))  # after all others
        await api.until(
            lambda: any(event["metadata"]["namespace"] == "team-b" for event in api.events())
        )
        took = anyio.current_time() - began

    assert 1 < len(api.events()) <= (BURST + took / REFILL) * MINOR + 2


async def test_invented_namespaces_write_few_events(folder: Path, authority: Authority) -> None:
    """A client that invents namespaces meets the rate of all together."""
    api = SimApiServer()
    async with serving(api, folder, authority) as send:
        began = anyio.current_time()
        for number in range(BURST_OF_ALL + 20):
            await send(review(huge(), namespace=f"team-{number}"))
        await api.until(lambda: len(api.events()) >= BURST_OF_ALL)
        assert len(api.events()) <= BURST_OF_ALL + RATE * (anyio.current_time() - began)


@pytest.mark.parametrize("field", ["name", "uid", "kind", "apiVersion"])
async def test_names_that_kubernetes_refuses_take_no_memory(
    folder: Path, authority: Authority, field: str
) -> None:
    """A webhook sees owners before anybody has checked them."""
    api = SimApiServer()
    async with serving(api, folder, authority) as send:
        await send(review(huge(ownerReferences=[{**OWNER, field: "x" * 254}])))
        await send(review(huge(90001)))  # the last one
        await api.until(api.events)

    assert ["90001" in event["note"] for event in api.events()] == [True]


@pytest.mark.parametrize("broken", ["denied", "failing"])
async def test_a_failing_api_server_delays_no_review(
    folder: Path, authority: Authority, broken: str
) -> None:
    """Reviews are answered while Events cannot be written; once they can, one is."""
    api = SimApiServer()
    getattr(api, broken).append(("POST", "/events"))
    async with serving(api, folder, authority) as send:
        for _ in range(20):
            assert (await send(review(owned())))["allowed"] is True
        assert api.events() == []
        getattr(api, broken).clear()
        await api.until(api.events)
