"""Requests to the API server: the only user of kubernetes_asyncio, and loaded only with one.

Objects stay plain data: the library's models cost thirty times as much for every watched Node.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import msgspec
import yaml
from anyio import to_thread
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import (
    ConfigException,
    load_incluster_config,
    load_kube_config,
)

from metagpu import __version__
from metagpu.core.errors import ClusterError

JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"
APPLY: Final = "application/apply-patch+yaml"
DEADLINE: Final = 10.0
"""Seconds for a request and its answer."""
SILENCE: Final = 150.0
"""Seconds without a word after which a watch is given up: bookmarks come every minute."""

_UNAUTHORIZED: Final = 401
_FORBIDDEN: Final = 403
_ERRORS: Final = 400
_TEXT_LIMIT: Final = 300

Object = Mapping[str, Any]
"""Something of the API server as plain data."""


class Client:
    """The API server, with credentials that are read anew when they are not accepted."""

    def __init__(self, kubeconfig: Path | None) -> None:
        self._kubeconfig = kubeconfig
        self._api: ApiClient | None = None
        self._host = ""
        self._opening = anyio.Lock()

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = JSON,
    ) -> Object:
        """Make one request and give the answer.

        Raises:
            ClusterError: if it is refused, or there is no answer in time.
        """
        timeout = aiohttp.ClientTimeout(total=DEADLINE)
        response = await self._send(
            method, path, timeout, query=query or {}, body=body, content=content
        )
        try:
            async with response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error

        if response.status >= _ERRORS:
            raise _refused(method, path, response, raw)
        try:
            answer: Object = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise self._unreachable(error) from error
        return answer

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Object]:
        """Give the events of a watch until the API server ends it.

        Raises:
            ClusterError: if it is refused, breaks or falls silent.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=DEADLINE, sock_read=SILENCE)
        response = await self._send("GET", path, timeout, query=query)

        try:
            async with response:
                if response.status >= _ERRORS:
                    raise _refused("GET", path, response, await response.read())
                async for line in response.content:
                    yield msgspec.json.decode(line)
        except (
            aiohttp.ClientError,
            OSError,
            TimeoutError,
            ValueError,
            msgspec.DecodeError,
        ) as error:
            raise self._unreachable(error) from error

    async def close(self) -> None:
        """Close all connections."""
        async with self._opening:
            if self._api is not None:
                await self._api.close()
            self._api = None

    async def _send(
        self,
        method: str,
        path: str,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own, which knows phases
        *,
        query: Mapping[str, str],
        body: Object | None = None,
        content: str = JSON,
    ) -> aiohttp.ClientResponse:
        for last in (False, True):
            api = await self._opened()
            try:
                response: aiohttp.ClientResponse = await api.call_api(
                    path,
                    method,
                    query_params=list(query.items()),
                    header_params={"Accept": JSON, "Content-Type": content},
                    body=body,
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                    _request_timeout=timeout,
                )
            except (RuntimeError, AssertionError) as error:
                # So aiohttp tells that another request has closed the session meanwhile.
                await self._drop(api)
                raise self._unreachable(ConnectionError("the connection was closed")) from error
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                await self._drop(api)  # another address or certificate may have been written
                raise self._unreachable(error) from error
            if last or response.status != _UNAUTHORIZED:
                return response

            # A service account's token is renewed every hour, in the same file.
            response.release()
            await self._drop(api)
        raise AssertionError

    async def _opened(self) -> ApiClient:
        async with self._opening:
            if self._api is None:
                try:
                    configuration = await to_thread.run_sync(_credentials, self._kubeconfig)
                    self._api = ApiClient(configuration)
                except (ConfigException, OSError, yaml.YAMLError) as error:
                    where = self._kubeconfig or "the pod's service account"
                    raise ClusterError(f"no credentials in {where}: {_line(error)}") from error
                self._host = str(configuration.host)
                self._api.user_agent = f"metagpu/{__version__}"
            return self._api

    async def _drop(self, api: ApiClient) -> None:
        async with self._opening:
            if self._api is api:
                self._api = None
                await api.close()

    def _unreachable(self, error: Exception) -> ClusterError:
        return ClusterError(f"the API server cannot be reached at {self._host}: {_line(error)}")


@asynccontextmanager
async def connected(kubeconfig: Path | None) -> AsyncIterator[Client]:
    """Give a client that leaves nothing open behind the block."""
    client = Client(kubeconfig)
    try:
        yield client
    finally:
        with anyio.CancelScope(shield=True):
            await client.close()


def _credentials(kubeconfig: Path | None) -> Configuration:
    """Read address and credentials; blocks, and may start the program that a kubeconfig names."""
    configuration = Configuration()
    if kubeconfig is None:
        load_incluster_config(configuration, try_refresh_token=False)  # type: ignore[no-untyped-call] # it has no types
    elif not kubeconfig.is_file():
        raise ConfigException("there is no such file")
    else:
        asyncio.run(load_kube_config(str(kubeconfig), client_configuration=configuration))
    return configuration


def _refused(method: str, path: str, response: aiohttp.ClientResponse, raw: bytes) -> ClusterError:
    """Say what the API server says, and what mends it."""
    try:
        said = msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.DecodeError:
        said = {}
    details = said.get("details") or {}
    message = _short(str(said.get("message") or response.reason or ""))

    if response.status == _UNAUTHORIZED:
        problem = f"the API server does not accept our credentials ({message}); renew them"
    elif response.status == _FORBIDDEN:
        problem = (
            f"the API server does not allow it: {message}; docs/permissions.md has the rule to "
            "add, or take the use out of --cluster"
        )
    else:
        problem = f"the API server answers {response.status} to {method} {path}: {message}"
    return ClusterError(
        problem,
        status=response.status,
        retry_after=_seconds(response.headers.get("Retry-After", "")),
        fields=tuple(str(cause.get("field", "")) for cause in details.get("causes") or ()),
    )


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() else 0.0


def _line(error: Exception) -> str:
    return _short(str(error) or type(error).__name__)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_LIMIT else f"{line[: _TEXT_LIMIT - 1]}…"
