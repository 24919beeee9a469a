"""Requests to the API server; with its credentials the only user of kubernetes_asyncio.

Loaded only where there is one.

Objects stay plain data: the library's models cost thirty times as much for every watched Node.
"""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import msgspec
import yaml
from kubernetes_asyncio.client import ApiClient
from kubernetes_asyncio.config import ConfigException

from metagpu import __version__
from metagpu.core.errors import ClusterError
from metagpu.plugins.cluster.credentials import credentials

JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"
APPLY: Final = "application/apply-patch+yaml"
DEADLINE: Final = 10.0
"""Seconds for a request and its answer."""
LONGEST_PAUSE: Final = 300.0
"""Seconds that we wait at most because the API server, or what is before it, says so."""
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
        self._users = Counter[ApiClient]()
        self._host = ""
        self._opening = anyio.Lock()
        self._tries = 0
        self._failure: ClusterError | None = None

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
        try:
            async with self._answer(
                method, path, timeout, query=query or {}, body=body, content=content
            ) as response:
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

    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[Object, None]:
        """Give the events of a watch until the API server ends it.

        Raises:
            ClusterError: if it is refused, breaks or falls silent.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=DEADLINE, sock_read=SILENCE)
        try:
            async with self._answer("GET", path, timeout, query=query) as response:
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
        """Close all connections; nobody uses them any more."""
        for api in {*self._users, *([self._api] if self._api else [])}:
            await api.close()
        self._api = None

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own, which knows phases
        *,
        query: Mapping[str, str],
        body: Object | None = None,
        content: str = JSON,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Make one request, and give its answer while the block lasts."""
        for last in (False, True):
            async with self._session() as api:
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
                except (aiohttp.ClientError, OSError, TimeoutError):
                    self._give_up(api)  # another address or certificate may have been written
                    raise

                if last or response.status != _UNAUTHORIZED:
                    async with response:
                        yield response
                    return
                # A service account's token is renewed every hour, in the same file.
                response.release()
                self._give_up(api)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[ApiClient]:
        """Give the present session; it is open for the length of the block, whoever gives it up.

        A session that is closed under a request makes aiohttp fail in ways that are no errors of a
        connection.
        """
        api = await self._present()
        self._users[api] += 1
        try:
            yield api
        finally:
            self._users[api] -= 1
            if not self._users[api]:
                del self._users[api]
                if api is not self._api:
                    with anyio.CancelScope(shield=True):
                        await api.close()

    async def _present(self) -> ApiClient:
        """Give the present session, or open one; who waited while that failed fails alike.

        Else each of them would wait in turn for a program that hangs.
        """
        before = self._tries
        async with self._opening:
            if self._api is None:
                if self._failure is not None and self._tries != before:
                    raise ClusterError(str(self._failure)) from self._failure
                self._failure = None
                try:
                    self._api = await self._opened()
                except ClusterError as error:
                    self._failure = error
                    raise
                finally:
                    self._tries += 1
            return self._api

    def _give_up(self, api: ApiClient) -> None:
        """Have the next request read the credentials anew."""
        if self._api is api:
            self._api = None

    async def _opened(self) -> ApiClient:
        """Open a session with the credentials as they are now."""
        try:
            configuration = await credentials(self._kubeconfig)
            api = ApiClient(configuration)
        except (ConfigException, OSError, yaml.YAMLError) as error:
            where = self._kubeconfig or "the pod's service account"
            raise ClusterError(f"no credentials in {where}: {_line(error)}") from error
        self._host = str(configuration.host)
        api.user_agent = f"metagpu/{__version__}"
        return api

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
    return min(float(text), LONGEST_PAUSE) if text.isdecimal() else 0.0


def _line(error: Exception) -> str:
    return _short(str(error) or type(error).__name__)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_LIMIT else f"{line[: _TEXT_LIMIT - 1]}…"
