"""Requests to the API server: credentials, refusals, and what is said of them."""

from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from metagpu.core.errors import ClusterError
from metagpu.plugins.cluster.client import LONGEST_PAUSE, connected
from metagpu.sim.apiserver import SimApiServer
from tests.plugins.cluster.rig import client_of

NODES = "/api/v1/nodes"


async def test_token_that_was_renewed_is_read_again(tmp_path: Path) -> None:
    """Credentials that are accepted no more are read anew, and the request is made again."""
    server = SimApiServer()
    async with client_of(server, tmp_path) as client:
        await client.call("GET", NODES)
        server.token = "second"  # noqa: S105 - it guards nothing
        server.kubeconfig(tmp_path)
        answer = await client.call("GET", NODES)

    assert answer["items"] == []
    assert len(server.requests) == 3


async def test_a_watch_outlives_the_session_that_another_request_gives_up(tmp_path: Path) -> None:
    """Credentials that are read anew for one request end no other that is under way."""
    server = SimApiServer()
    node = server.add_node("gpu-1")
    query = {
        "watch": "true",
        "fieldSelector": "metadata.name=gpu-1",
        "resourceVersion": node["metadata"]["resourceVersion"],
        "timeoutSeconds": "60",
    }

    async with client_of(server, tmp_path) as client, aclosing(client.watch(NODES, query)) as watch:
        server.label("gpu-1", {"seen": "first"})
        assert (await anext(watch))["object"]["metadata"]["labels"] == {"seen": "first"}

        server.token = "second"  # noqa: S105 - it guards nothing
        server.kubeconfig(tmp_path)
        await client.call("GET", NODES)
        server.label("gpu-1", {"seen": "second"})
        assert (await anext(watch))["object"]["metadata"]["labels"] == {"seen": "second"}


async def test_credentials_that_stay_wrong_are_told(tmp_path: Path) -> None:
    """A request that is refused with fresh credentials too is given up."""
    server = SimApiServer()
    async with client_of(server, tmp_path) as client:
        server.token = "other"  # noqa: S105 - it guards nothing
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)

    assert refusal.value.status == 401
    assert str(refusal.value) == (
        "the API server does not accept our credentials (Unauthorized); renew them"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "there is no such file"),
        ("", "it is no kubeconfig"),
        ("contexts: 3", "it is no kubeconfig"),
        ("{", "while parsing a flow node expected the node content, but found '<stream end>'"),
    ],
)
async def test_kubeconfig_that_is_wrong_is_named(
    tmp_path: Path, text: str | None, problem: str
) -> None:
    """A kubeconfig that is missing or no YAML is named in the error."""
    path = tmp_path / "kubeconfig"
    if text is not None:
        await anyio.Path(path).write_text(text)

    async with connected(path) as client:
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)
    assert str(refusal.value).startswith(f"no credentials in {path}: {problem}")


async def test_pod_without_a_service_account_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a pod has no token, that is said."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with connected(None) as client:
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)
    assert str(refusal.value) == (
        "no credentials in the pod's service account: Service host/port is not set."
    )


async def test_server_that_is_away_is_told_with_its_address(tmp_path: Path) -> None:
    """Without an answer the error names the address, and the next request finds a server again."""
    server = SimApiServer()
    async with server.running():
        path = server.kubeconfig(tmp_path)

    async with connected(path) as client:
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)
        assert refusal.value.status == 0
        assert str(refusal.value).startswith("the API server cannot be reached at ")

        async with server.running():
            await client.call("GET", NODES)


async def test_requests_that_fail_together_fail_alike(tmp_path: Path) -> None:
    """One that closes the connection takes no other down but as a server that cannot be reached."""
    server = SimApiServer()
    async with server.running():
        path = server.kubeconfig(tmp_path)
    refusals: list[str] = []

    async with connected(path) as client, anyio.create_task_group() as group:

        async def ask() -> None:
            for _ in range(20):
                try:
                    await client.call("GET", NODES)
                except ClusterError as error:
                    refusals.append(str(error))

        for _ in range(5):
            group.start_soon(ask)

    assert len(refusals) == 100
    assert all(it.startswith("the API server cannot be reached at ") for it in refusals)


async def test_throttling_says_how_long_to_wait(tmp_path: Path) -> None:
    """What the server asks for is in the error, and so is what was asked of it."""
    server = SimApiServer()
    async with client_of(server, tmp_path) as client:
        server.fail(429, retry=7)
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)

    assert refusal.value.retry_after == 7
    assert str(refusal.value) == (
        "the API server answers 429 to GET /api/v1/nodes: the simulated API server was told to"
    )


async def test_no_server_has_us_wait_for_hours(tmp_path: Path) -> None:
    """What is asked for is kept within a limit: it may come from a proxy that knows no better."""
    server = SimApiServer()
    async with client_of(server, tmp_path) as client:
        server.fail(503, retry=86400)
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)

    assert refusal.value.retry_after == LONGEST_PAUSE
