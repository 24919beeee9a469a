"""Requests and watches of the API server; loaded only where one is used.

Objects stay plain data: for each watched Node, the models of kubernetes_asyncio cost thirty times
as much. The library's own client would copy each body and header part by part; its connection would
look for a proxy and for passwords in ~/.netrc before each request, in a thread each. So credentials
are the library's, and connections aiohttp's own.
"""

import re
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import aiohttp
import anyio
import msgspec
import yaml
from anyio import to_thread

from metagpu import __version__
from metagpu.core.contracts.programs import RunCommand
from metagpu.core.errors import ClusterError
from metagpu.plugins.cluster.credentials import (
    ConfigException,
    Configuration,
    load_credentials,
    proxy_of,
    tls_context,
)
from metagpu.plugins.cluster.settings import ClusterTiming

if TYPE_CHECKING:
    from metagpu.plugins.cluster.node_object import KubeObject

JSON: Final = "application/json"
_KEPT: Final = 60.0
"""Seconds that an unused connection stays open; Kubernetes' own servers close it after 90."""
_BUFFER: Final = 2**21
"""Bytes; a line of a watch, which is an object, has twice as many at most."""
TOKEN_AGE: Final = 300.0
"""Seconds after which a pod's token is read again: the API server counts requests with one whose
renewal, in the same file, is more than minutes old."""
REQUEST_TIMEOUT: Final = 10.0
"""Seconds for a request and its answer."""
RETRY_AFTER_LIMIT: Final = 300.0
"""The longest delay, in seconds, that the API server or a proxy may impose (`Retry-After`)."""
WATCH_SILENCE: Final = 150.0
"""Seconds without data after which a watch ends: bookmarks come every minute."""

_UNAUTHORIZED: Final = 401
_FORBIDDEN: Final = 403
_ERRORS: Final = 400
_TEXT_LIMIT: Final = 300


class ApiConnection:
    """Connections to one address with one set of credentials.

    Attributes:
        host: the address.
    """

    def __init__(
        self, configuration: Configuration, tls: ssl.SSLContext, proxy: str | None
    ) -> None:
        self.host = str(configuration.host)
        self._configuration = configuration
        self._proxy = proxy
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, keepalive_timeout=_KEPT),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": JSON, "User-Agent": f"metagpu/{__version__}"},
            read_bufsize=_BUFFER,
        )

    async def request(
        self,
        method: str,
        path: str,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own, which knows phases
        *,
        query: Mapping[str, str],
        body: "KubeObject | None",
        headers: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        """Send a request; the caller closes the answer.

        Raises:
            aiohttp.ClientError: the API server cannot be reached.
            OSError: as before.
            TimeoutError: it does not answer in time.
        """
        credentials = (await self._configuration.auth_settings()).values()
        return await self._session.request(
            method,
            f"{self.host}{path}?{urlencode(query)}" if query else f"{self.host}{path}",
            data=None if body is None else msgspec.json.encode(body),
            headers={
                **headers,
                **{credential["key"]: credential["value"] for credential in credentials},
            },
            timeout=timeout,
            proxy=self._proxy,
            server_hostname=self._configuration.tls_server_name,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


async def connect(configuration: Configuration) -> ApiConnection:
    """Return a connection, which is made at the first request.

    Raises:
        OSError: the certificates cannot be read.
    """
    tls = await to_thread.run_sync(tls_context, configuration)
    proxy = await to_thread.run_sync(proxy_of, configuration)
    return ApiConnection(configuration, tls, proxy)


async def read_address(address: str, query: Mapping[str, str], token: str) -> tuple[int, bytes]:
    """Read the status and the body of another address than the API server's.

    Raises:
        ClusterError: it cannot be reached.
    """
    configuration = Configuration(host=address)
    if token:
        configuration.api_key["BearerToken"] = f"Bearer {token}"
    api = await connect(configuration)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT)
    try:
        answer = await api.request("GET", "", timeout, query=query, body=None, headers={})
        return answer.status, await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        problem = str(error) or f"no answer within {REQUEST_TIMEOUT:g} s"
        raise ClusterError(re.sub("//[^/]*@", "//", f"{address}: {problem}")) from error
    finally:
        await api.close()


class KubeClient:
    """A client of the API server; rejected credentials are loaded again.

    Attributes:
        date: the time of the last answer by the API server's clock, in seconds since the epoch;
            `None` where it did not say.
    """

    def __init__(
        self,
        kubeconfig: Path | None,
        run_command: RunCommand,
        timing: ClusterTiming,
        context: str | None = None,
    ) -> None:
        self.timing = timing
        self.date: float | None = None
        self._context = context
        self._kubeconfig = kubeconfig
        self._run_command = run_command
        self._api: ApiConnection | None = None
        self._opened_at = 0.0
        self._users = Counter[ApiConnection]()
        self._host = ""
        self._opening = anyio.Lock()
        self._attempts = 0
        self._failure: ClusterError | None = None

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: "KubeObject | None" = None,
        content: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> "KubeObject":
        """Make one request and return the answer.

        Raises:
            ClusterError: the API server refuses the request, or does not answer in time.
        """
        raw = await self.read(
            method, path, query=query, body=body, content=content, headers=headers
        )
        try:
            answer: KubeObject = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise self._unreachable(error) from error
        return answer

    async def read(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: "KubeObject | None" = None,
        content: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Make one request and return the answer as it came.

        Raises:
            ClusterError: the API server refuses the request, or does not answer in time.
        """
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT)
        try:
            async with self._answer(
                method,
                path,
                timeout,
                query=query or {},
                body=body,
                headers={"Content-Type": content, **(headers or {})},
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error

        if response.status >= _ERRORS:
            raise _refusal(method, path, response, raw)
        return raw

    async def watch(
        self, path: str, query: Mapping[str, str]
    ) -> "AsyncGenerator[KubeObject, None]":
        """Yield the events of a watch until the API server ends it.

        Raises:
            ClusterError: the API server refuses the watch, breaks it, or falls silent.
        """
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=REQUEST_TIMEOUT, sock_read=WATCH_SILENCE
        )
        try:
            async with self._answer("GET", path, timeout, query=query) as response:
                if response.status >= _ERRORS:
                    raise _refusal("GET", path, response, await response.read())
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
        """Close all connections, after their last use."""
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
        body: "KubeObject | None" = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Make one request; its answer is open for the length of the block."""
        for is_last in (False, True):
            async with self._session() as api:
                try:
                    response = await api.request(
                        method, path, timeout, query=query, body=body, headers=headers or {}
                    )
                except (aiohttp.ClientError, OSError, TimeoutError):
                    self._discard(api)  # the file may have another address or certificate now
                    raise

                if is_last or response.status != _UNAUTHORIZED:
                    async with response:
                        self.date = _date(response.headers.get("Date", ""))
                        yield response
                    return
                # Kubernetes renews a service account's token every hour, in the same file.
                response.release()
                self._discard(api)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[ApiConnection]:
        """Provide the current session, open for the block even if it is discarded.

        aiohttp fails in unexpected ways, and not by connection errors, when a session is closed
        under a request.
        """
        api = await self._current()
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

    async def _current(self) -> ApiConnection:
        """Return the current session or open one; waiting requests share a failure.

        Otherwise each of these requests would wait in turn for a program that hangs.
        """
        if self._kubeconfig is None and anyio.current_time() >= self._opened_at + TOKEN_AGE:
            await self._give_up()
        if self._api is not None:
            return self._api  # even a free lock lets every other task run first
        before = self._attempts
        async with self._opening:
            if self._api is None:
                if self._failure is not None and self._attempts != before:
                    raise ClusterError(str(self._failure)) from self._failure
                self._failure = None
                try:
                    self._api = await self._open()
                except ClusterError as error:
                    self._failure = error
                    raise
                finally:
                    self._attempts += 1
            return self._api

    async def _give_up(self) -> None:
        """Close the present session, after the requests that use it."""
        api, self._api = self._api, None
        if api is not None and not self._users[api]:
            del self._users[api]
            await api.close()

    def _discard(self, api: ApiConnection) -> None:
        """Discard a session, so that the next request loads the credentials again."""
        if self._api is api:
            self._api = None

    async def _open(self) -> ApiConnection:
        """Open a session with the present credentials."""
        deadline = self.timing.credentials_timeout
        try:
            configuration = await load_credentials(
                self._kubeconfig, self._run_command, deadline, self._context
            )
            api = await connect(configuration)
        except (ConfigException, OSError, ValueError, yaml.YAMLError) as error:
            source = self._kubeconfig or "the pod's service account"
            raise ClusterError(f"no credentials in {source}: {_line(error)}") from error
        self._host, self._opened_at = api.host, anyio.current_time()
        return api

    def _unreachable(self, error: Exception) -> ClusterError:
        return ClusterError(f"the API server cannot be reached at {self._host}: {_line(error)}")


@asynccontextmanager
async def open_client(
    kubeconfig: Path | None,
    run_command: RunCommand,
    timing: ClusterTiming,
    context: str | None = None,
) -> AsyncIterator[KubeClient]:
    """Open a client, and close all its connections at the end of the block."""
    client = KubeClient(kubeconfig, run_command, timing, context)
    try:
        yield client
    finally:
        with anyio.CancelScope(shield=True):
            await client.close()


def _refusal(method: str, path: str, response: aiohttp.ClientResponse, raw: bytes) -> ClusterError:
    """Return the error of an answer: the API server's message, and the fix."""
    try:
        status = msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.DecodeError:
        status = {}
    details = status.get("details") or {}
    said = status.get("message") or status.get("error")  # the latter of a Prometheus behind it
    message = _short(str(said or response.reason or ""))

    if response.status == _UNAUTHORIZED:
        problem = f"the API server does not accept our credentials ({message}); renew them"
    elif response.status == _FORBIDDEN:
        problem = (
            f"the API server does not allow it: {message}; docs/permissions.md has the rule to "
            "add, or remove the feature from --cluster"
        )
    else:
        problem = f"the API server answers {response.status} to {method} {path}: {message}"
    return ClusterError(
        problem,
        message=message,
        status=response.status,
        retry_after=_seconds(response.headers.get("Retry-After", "")),
        fields=tuple(str(cause.get("field", "")) for cause in details.get("causes") or ()),
        causes=tuple(str(cause.get("message", "")) for cause in details.get("causes") or ()),
    )


def _date(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None


def _seconds(text: str) -> float:
    return min(float(text), RETRY_AFTER_LIMIT) if text.isdecimal() else 0.0


def _line(error: Exception) -> str:
    return _short(str(error) or type(error).__name__)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_LIMIT else f"{line[: _TEXT_LIMIT - 1]}…"
