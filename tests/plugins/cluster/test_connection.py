"""The connection to the API server: whose certificates, passwords and proxies are used."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from anyio.abc import SocketAttribute, SocketStream

from metagpu.host.programs import run_command
from metagpu.plugins.cluster.connection import tls_context
from metagpu.plugins.cluster.credentials import load_credentials
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import client_of, open_client_at

NODES = "/api/v1/nodes"


@asynccontextmanager
async def proxy() -> AsyncIterator[tuple[str, list[str]]]:
    """Serve as a proxy that answers every request; yield its address and what it was asked."""
    asked: list[str] = []

    async def answer(stream: SocketStream) -> None:
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                head += await stream.receive()
            asked.append(head.partition(b"\r\n")[0].decode())
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, answer)
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
    path = SimApiServer().kubeconfig(tmp_path)
    context = tls_context(await load_credentials(path, run_command, 10.0))

    assert context.verify_mode is ssl.CERT_REQUIRED
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
