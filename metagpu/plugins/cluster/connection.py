"""A connection to the API server: aiohttp's, with the library's credentials.

The library's own client would copy each body and header part by part. Its connection would look for
a proxy and for passwords in ~/.netrc before each request, in a thread each.
"""

import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
from anyio import to_thread

from metagpu import __version__

if TYPE_CHECKING:
    from metagpu.plugins.cluster.library import Configuration
    from metagpu.plugins.cluster.node_object import KubeObject

JSON: Final = "application/json"
_KEPT: Final = 60.0
"""Seconds that an unused connection stays open; Kubernetes' own servers close it after 90."""
_BUFFER: Final = 2**21
"""Bytes; a line of a watch, which is an object, has twice as many at most."""


class ApiConnection:
    """Connections to one address with one set of credentials.

    Attributes:
        host: the address.
    """

    def __init__(
        self, configuration: "Configuration", tls: ssl.SSLContext, proxy: str | None
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
            headers={**headers, **{it["key"]: it["value"] for it in credentials}},
            timeout=timeout,
            proxy=self._proxy,
            server_hostname=self._configuration.tls_server_name,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


async def connect(configuration: "Configuration") -> ApiConnection:
    """Return a connection, which is made at the first request.

    Raises:
        OSError: the certificates cannot be read.
    """
    tls = await to_thread.run_sync(tls_context, configuration)
    proxy = await to_thread.run_sync(_proxy, configuration)
    return ApiConnection(configuration, tls, proxy)


def tls_context(configuration: "Configuration") -> ssl.SSLContext:
    """Return what judges the API server's certificate, and has ours. Blocks.

    Raises:
        OSError: a file cannot be read, or is no certificate.
    """
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.disable_strict_ssl_verification:
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _proxy(configuration: "Configuration") -> str | None:
    """Return the proxy that the kubeconfig names, or the environment. Blocks.

    On some systems the name of the host is looked up.
    """
    if configuration.proxy:
        return str(configuration.proxy)
    address = urlsplit(str(configuration.host))
    if address.hostname is None or proxy_bypass(address.hostname):
        return None
    return getproxies().get(address.scheme)
