"""Requests to the API server: credentials, refusals, and their errors."""

import os
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from anyio import to_thread
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSListener

from metagpu.core.errors import ClusterError
from metagpu.host.programs import run_command
from metagpu.plugins.cluster import client as client_module
from metagpu.plugins.cluster.client import (
    REQUEST_TIMEOUT,
    RETRY_AFTER_LIMIT,
    TOKEN_AGE,
    WATCH_SILENCE,
    KubeClient,
    open_client,
    read_address,
)
from metagpu.plugins.cluster.credentials import Configuration, load_credentials, tls_context
from metagpu.plugins.cluster.settings import ClusterTiming
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import client_of, open_client_at
from tests.rigs.waiting import becomes, skip
from tests.webhook.rig import Authority

NODES = "/api/v1/nodes"


async def test_token_that_was_renewed_is_read_again(tmp_path: Path) -> None:
    """Credentials that are refused are read again, and the request is repeated."""
    server = SimApiServer()
    async with client_of(server, tmp_path) as client:
        await client.call("GET", NODES)
        server.token = "second"  # noqa: S105 - it guards nothing
        server.kubeconfig(tmp_path)
        answer = await client.call("GET", NODES)

    assert answer["items"] == []
    assert len(server.requests) == 3


@asynccontextmanager
async def in_a_pod(
    server: SimApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[KubeClient, list[None]]]:
    """Open a client as in a pod; yield it with a list that grows with each read of the token."""
    reads: list[None] = []

    async def load(kubeconfig: None, *others: Any) -> Configuration:  # noqa: ANN401 - as of the function
        reads.append(kubeconfig)
        return await load_credentials(tmp_path / "kubeconfig", *others)

    monkeypatch.setattr(client_module, "load_credentials", load)
    async with server.running(), open_client(None, run_command, ClusterTiming()) as client:
        server.kubeconfig(tmp_path)
        yield client, reads


async def test_a_pods_token_is_read_again_before_it_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that Kubernetes has renewed is used without a refusal of the old one."""
    server = SimApiServer()
    async with in_a_pod(server, tmp_path, monkeypatch) as (client, reads):
        for _ in range(3):
            await client.call("GET", NODES)
        assert len(reads) == 1
        server.token = "second"  # noqa: S105 - it guards nothing
        server.kubeconfig(tmp_path)
        skip(TOKEN_AGE)
        await client.call("GET", NODES)

    assert (len(server.requests), len(reads)) == (4, 2)


async def test_a_pods_watch_outlives_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection of before is closed after its last use."""
    server = SimApiServer()
    node = server.add_node("gpu-1")
    query = {"watch": "true", "resourceVersion": node["metadata"]["resourceVersion"]}
    monkeypatch.setattr(client_module, "TOKEN_AGE", 0.0)
    async with (
        in_a_pod(server, tmp_path, monkeypatch) as (client, reads),
        aclosing(client.watch(NODES, query)) as watch,
    ):
        for count, seen in enumerate(("first", "second"), 1):
            server.label("gpu-1", {"seen": seen})
            assert (await anext(watch))["object"]["metadata"]["labels"] == {"seen": seen}
            await client.call("GET", NODES)
            assert len(reads) == count + 1


async def test_a_watch_outlives_the_session_that_another_request_gives_up(tmp_path: Path) -> None:
    """Renewed credentials of one request end no other request."""
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


MISTYPED = """
apiVersion: v1
kind: Config
current-context: a
contexts: [{name: a, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://[fd00::1:6443"}}]
users: [{name: u, user: {token: t}}]
"""
"""A kubeconfig whose address lacks a bracket."""


async def test_credentials_that_stay_wrong_are_an_error(tmp_path: Path) -> None:
    """A request that is refused with fresh credentials too fails."""
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
        ("", "it is not a kubeconfig"),
        ("contexts: 3", "it is not a kubeconfig"),
        ("{", "while parsing a flow node expected the node content, but found '<stream end>'"),
        (MISTYPED, "Invalid IPv6 URL"),
    ],
)
async def test_kubeconfig_that_is_wrong_is_named(
    tmp_path: Path, text: str | None, problem: str
) -> None:
    """The error names a kubeconfig that is missing or no YAML."""
    path = tmp_path / "kubeconfig"
    if text is not None:
        await anyio.Path(path).write_text(text)

    async with open_client_at(path) as client:
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)
    assert str(refusal.value).startswith(f"no credentials in {path}: {problem}")


async def test_a_kubeconfig_that_can_be_read_once_is_refused(tmp_path: Path) -> None:
    """The error of a pipe, as a shell's `<(...)` is one, says so: credentials are read again."""
    path = tmp_path / "kubeconfig"
    os.mkfifo(path)
    async with open_client_at(path) as client:
        with pytest.raises(ClusterError, match="it is not a regular file, and it has to be read"):
            await client.call("GET", NODES)


async def test_pod_without_a_service_account_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the missing token of a pod."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with open_client_at(None) as client:
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)
    assert str(refusal.value) == (
        "no credentials in the pod's service account: Service host/port is not set."
    )


async def test_server_that_is_away_is_named_with_its_address(tmp_path: Path) -> None:
    """The error names the address, and the next request finds a server again."""
    server = SimApiServer()
    async with server.running():
        path = server.kubeconfig(tmp_path)

    async with open_client_at(path) as client:
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)
        assert refusal.value.status == 0
        assert str(refusal.value).startswith("the API server cannot be reached at ")

        async with server.running():
            await client.call("GET", NODES)


async def test_requests_that_fail_together_fail_alike(tmp_path: Path) -> None:
    """A request that closes the connection fails others as an unreachable server does."""
    server = SimApiServer()
    async with server.running():
        path = server.kubeconfig(tmp_path)
    refusals: list[str] = []

    async with open_client_at(path) as client, anyio.create_task_group() as group:

        async def ask() -> None:
            for _ in range(20):
                try:
                    await client.call("GET", NODES)
                except ClusterError as error:
                    refusals.append(str(error))

        for _ in range(5):
            group.start_soon(ask)

    assert len(refusals) == 100
    assert all(refusal.startswith("the API server cannot be reached at ") for refusal in refusals)


async def test_throttling_has_the_delay_of_the_server(tmp_path: Path) -> None:
    """The error has the server's delay and the request."""
    server = SimApiServer()
    async with client_of(server, tmp_path) as client:
        server.fail(429, retry=7)
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)

    assert refusal.value.retry_after == 7
    assert str(refusal.value) == (
        "the API server answers 429 to GET /api/v1/nodes: a test made the simulated API server fail"
    )


async def test_a_delay_of_hours_is_limited(tmp_path: Path) -> None:
    """The delay is limited: a proxy may have asked for it."""
    server = SimApiServer()
    async with client_of(server, tmp_path) as client:
        server.fail(503, retry=86400)
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)

    assert refusal.value.retry_after == RETRY_AFTER_LIMIT


NODES = "/api/v1/nodes"


@asynccontextmanager
async def proxy(
    text: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    *,
    ends: bool = True,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve as a proxy that answers every request; yield its address and what it was asked."""
    asked: list[str] = []

    async def answer(stream: ByteStream) -> None:
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                head += await stream.receive()
            asked.append(head.partition(b"\r\n")[0].decode())
            await stream.send(text)
            if not ends:
                await anyio.sleep_forever()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    served = TLSListener(listener, tls) if tls else listener
    async with listener, anyio.create_task_group() as group:
        group.start_soon(served.serve, answer)
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - no query of Django's
        yield f"http://127.0.0.1:{port}", asked
        group.cancel_scope.cancel()


def kubeconfig(folder: Path, **cluster: str) -> Path:
    """Write a kubeconfig of a host that has no address, with further keys of its cluster."""
    path = SimApiServer().kubeconfig(folder)
    content = yaml.safe_load(path.read_text())
    content["clusters"][0]["cluster"] |= {"server": "http://api.invalid", **cluster}
    path.write_text(yaml.safe_dump(content))
    return path


async def test_passwords_of_a_netrc_file_concern_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of passwords for other programs does not make requests fail."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login somebody password else\n")
    monkeypatch.setenv("NETRC", str(netrc))

    async with client_of(SimApiServer(), tmp_path) as client:
        assert (await client.call("GET", NODES))["items"] == []


async def test_the_proxy_of_the_environment_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests go to the proxy that the environment names, but those to hosts that it exempts."""
    async with proxy() as (address, asked):
        monkeypatch.setenv("HTTP_PROXY", address)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        async with open_client_at(kubeconfig(tmp_path)) as client:
            assert await client.call("GET", NODES) == {}
        async with client_of(SimApiServer(), tmp_path) as client:
            await client.call("GET", NODES)

    assert asked == [f"GET http://api.invalid{NODES} HTTP/1.1"]


async def test_the_proxy_of_a_kubeconfig_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `proxy-url` of the kubeconfig replaces the environment's proxy."""
    async with proxy() as (address, asked), proxy() as (other, others):
        monkeypatch.setenv("HTTP_PROXY", other)
        async with open_client_at(kubeconfig(tmp_path, **{"proxy-url": address})) as client:
            await client.call("GET", NODES)

    assert (len(asked), others) == (1, [])


async def test_an_authority_needs_no_more_than_for_kubernetes_own_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extensions that Python 3.13 requires of certificates are not required here."""
    usual = ssl.create_default_context

    def strict(**arguments: Any) -> ssl.SSLContext:  # noqa: ANN401 - those of the function
        context = usual(**arguments)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    ca = str(Authority(tmp_path).certificate)  # no context of another test has this file
    path = kubeconfig(tmp_path, **{"certificate-authority": ca})
    credentials = await load_credentials(path, run_command, 10.0)
    context = await to_thread.run_sync(tls_context, credentials)

    assert context.verify_mode is ssl.CERT_REQUIRED
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT


async def test_requests_that_fail_share_one_tls_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed request costs no TLS context, unless a file of the credentials has changed."""
    made = list[ssl.SSLContext]()
    usual = ssl.create_default_context

    def count(**arguments: Any) -> ssl.SSLContext:  # noqa: ANN401 - those of the function
        made.append(usual(**arguments))
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", count)
    ca = str(Authority(tmp_path).certificate)
    closed = {"server": "https://127.0.0.1:1", "certificate-authority": ca}

    async with open_client_at(kubeconfig(tmp_path, **closed)) as client:
        for renewals in (1, 2):
            for _ in range(10):
                with pytest.raises(ClusterError, match="cannot be reached"):
                    await client.call("GET", NODES)
            assert len(made) == renewals
            Authority(tmp_path)

    assert made[0].get_ca_certs() != made[1].get_ca_certs()


def answer(status: str, body: str, *headers: str) -> bytes:
    """Write an answer of HTTP."""
    lines = f"HTTP/1.1 {status}", f"Content-Length: {len(body.encode())}", *headers
    return "\r\n".join((*lines, "", body)).encode()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (answer("502 Bad Gateway", "<html>"), "the API server answers 502 to GET {}: Bad Gateway"),
        (answer("400 Bad Request", "[]"), "the API server answers 400 to GET {}: Bad Request"),
        (answer("500 No", '{"error": "e"}'), "the API server answers 500 to GET {}: e"),
        (answer("200 OK", "<html>"), "the API server cannot be reached at http"),
    ],
    ids=["of a proxy", "no object", "of a Prometheus", "no JSON"],
)
async def test_an_answer_that_is_none_of_kubernetes_is_an_error(
    tmp_path: Path, text: bytes, problem: str
) -> None:
    """A proxy may answer in the API server's place, to a request and to a watch."""
    async with (
        proxy(text) as (address, _),
        open_client_at(kubeconfig(tmp_path, server=address)) as client,
    ):
        for attempt in (client.call("GET", NODES), anext(client.watch(NODES, {}))):
            with pytest.raises(ClusterError) as refusal:
                await attempt
            assert str(refusal.value).startswith(problem.format(NODES))


@pytest.mark.parametrize(("length", "shown"), [(300, "x" * 300), (301, "x" * 299 + "…")])
async def test_a_long_message_is_cut(tmp_path: Path, length: int, shown: str) -> None:
    """A message of pages would be a line of pages in the log."""
    body = f'{{"message": "{"x" * length}"}}'
    async with (
        proxy(answer("500 No", body)) as (address, _),
        open_client_at(kubeconfig(tmp_path, server=address)) as client,
    ):
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)
    assert refusal.value.message == shown


async def test_a_delay_that_is_no_number_is_none(tmp_path: Path) -> None:
    """A proxy may name the time of the next attempt by a date."""
    later = answer("503 No", "{}", "Retry-After: Wed, 21 Oct 2026 07:28:00 GMT")
    async with (
        proxy(later) as (address, _),
        open_client_at(kubeconfig(tmp_path, server=address)) as client,
    ):
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)
    assert (refusal.value.status, refusal.value.retry_after) == (503, 0)


@pytest.mark.parametrize("watched", [False, True])
async def test_a_silent_server_is_given_up(tmp_path: Path, *, watched: bool) -> None:
    """A request waits for seconds, and a watch for minutes: bookmarks come each minute."""
    ended = anyio.Event()
    # The head of an answer alone: a watch has begun.
    text = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with (
        proxy(text, ends=False) as (address, asked),
        anyio.create_task_group() as group,
        open_client_at(kubeconfig(tmp_path, server=address)) as client,
    ):

        async def ask() -> None:
            with pytest.raises(ClusterError, match=r"cannot be reached at .*: \w*Timeout"):
                await (anext(client.watch(NODES, {})) if watched else client.call("GET", NODES))
            ended.set()

        group.start_soon(ask)
        await becomes(lambda: asked)
        for _ in range(100):
            if ended.is_set():
                break
            skip(WATCH_SILENCE if watched else REQUEST_TIMEOUT)
            await anyio.sleep(0.02)
        assert ended.is_set()
        group.cancel_scope.cancel()


async def test_an_address_is_named_without_its_password() -> None:
    """The address of a Prometheus may have a password, which no error repeats."""
    with pytest.raises(ClusterError) as problem:
        await read_address("http://somebody:secret@127.0.0.1:1", {}, "")
    assert str(problem.value).startswith("http://127.0.0.1:1: ")
    assert "secret" not in str(problem.value)


@pytest.mark.parametrize(("token", "status"), [("first", 200), ("", 401), ("other", 401)])
async def test_an_address_gets_the_token(token: str, status: int) -> None:
    """A Prometheus may want a token."""
    async with SimApiServer().running() as server:
        read = await read_address(f"http://127.0.0.1:{server.port}{NODES}", {}, token)
    assert read[0] == status


async def test_a_renewed_certificate_of_ours_is_used(tmp_path: Path) -> None:
    """The files of our certificate are renewed in their place, as an authority's are."""
    authority, ours = Authority(tmp_path), tmp_path / "ours"
    configuration = Configuration()
    configuration.ssl_ca_cert = str(authority.certificate)
    configuration.cert_file, configuration.key_file = str(ours / "tls.crt"), str(ours / "tls.key")
    contexts = []
    for _ in range(2):
        authority.issue(ours)
        contexts += [await to_thread.run_sync(tls_context, configuration) for _ in range(2)]
    assert contexts[0] is contexts[1]
    assert contexts[1] is not contexts[2]
    assert contexts[0].verify_mode is ssl.CERT_REQUIRED

    await anyio.Path(ours / "tls.crt").write_text("nonsense")
    with pytest.raises(OSError, match="PEM"):
        await to_thread.run_sync(tls_context, configuration)


async def test_a_kubeconfig_may_ask_for_no_judgement(tmp_path: Path) -> None:
    """`insecure-skip-tls-verify` takes every certificate, of any name."""
    path = kubeconfig(tmp_path)
    content = yaml.safe_load(path.read_text())
    content["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = True
    path.write_text(yaml.safe_dump(content))
    credentials = await load_credentials(path, run_command, 10.0)
    context = await to_thread.run_sync(tls_context, credentials)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)


async def test_a_kubeconfig_may_name_the_server_that_it_means(tmp_path: Path) -> None:
    """With `tls-server-name` the address may be that of a tunnel, which no certificate has."""
    authority, theirs = Authority(tmp_path), tmp_path / "theirs"
    authority.issue(theirs, name="DNS:kubernetes.default")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(theirs / "tls.crt", theirs / "tls.key")
    async with proxy(tls=tls) as (address, _):
        server = {"server": address.replace("http", "https")}
        server |= {"certificate-authority": str(authority.certificate)}
        async with open_client_at(
            kubeconfig(tmp_path, **server, **{"tls-server-name": "kubernetes.default"})
        ) as client:
            assert await client.call("GET", NODES) == {}
