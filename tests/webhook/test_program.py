"""The whole webhook beside an API server: nodes, certificate, metrics and probes."""

import os
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
from anyio import to_thread

from metagpu.host.programs import run_command
from metagpu.plugins.cluster.settings import ClusterTiming
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.webhook.messages import PATH
from metagpu.webhook.metrics import FAMILIES
from metagpu.webhook.program import Webhook
from metagpu.webhook.settings import WebhookSettings, WebhookTiming
from tests.rigs.waiting import becomes, until
from tests.webhook.rig import A100, LOOPBACK, NAME, Authority, pod, review

TIMING = WebhookTiming(
    drain=0.0, cluster=ClusterTiming(backoff_first=0.01, backoff_longest=0.05, min_watch=0.01)
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
            return status == 503 and all(it in text for it in parts)

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
        assert {name: it.allocatable for name, it in nodes.groups.nodes.items()} == {
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
