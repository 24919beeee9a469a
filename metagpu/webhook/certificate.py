"""The certificate of the webhook, read from files whenever they change.

A pair that cannot be used changes nothing: the last good one stays in force.
"""

import ssl
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog
from anyio import to_thread

from metagpu.agent.config_watch import changes
from metagpu.core.errors import describe_error

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
_ROUNDS: Final = 8
"""Flights of a handshake, of which TLS has four at most."""

log = structlog.get_logger()

Changes = Callable[[Sequence[Path]], AsyncGenerator[None, None]]


class _Loaded(NamedTuple):
    context: ssl.SSLContext
    expires: float


class ServingCertificate:
    """The certificate in force, and the context of TLS that presents it.

    Args:
        folder: the folder of `tls.crt` and `tls.key`.
        clock: the time, in seconds since the epoch.

    Attributes:
        context: the context to listen with; new connections get the certificate in force.
        error: why the files cannot be used, empty if they can.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.time,
        watch: Changes = changes,
    ) -> None:
        self.error = f"{folder} has not been read yet"
        self._files = folder / CERTIFICATE, folder / KEY
        self._clock = clock
        self._watch = watch
        self._loaded: _Loaded | None = None
        self.context = _server_context()
        self.context.sni_callback = self._choose

    @property
    def expires(self) -> float:
        """The end of the certificate in force, in seconds since the epoch; 0 without one."""
        return self._loaded.expires if self._loaded else 0.0

    @property
    def problem(self) -> str:
        """The reason for which no client can trust the webhook now, empty for none."""
        if self._loaded is None:
            return f"no certificate: {self.error}"
        if self._loaded.expires <= self._clock():
            return f"the certificate has expired, and there is no other in {self._files[0].parent}"
        return ""

    async def run(self) -> None:
        """Read the files whenever they change, until cancelled."""
        async with aclosing(self._watch(self._files)) as changed:
            async for _ in changed:
                await self.reload()

    async def reload(self) -> None:
        """Put the files in force, or log why they cannot be used."""
        before = self._loaded
        try:
            self._loaded = await to_thread.run_sync(_load, *self._files)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            problem = f"{self._files[0].parent}: {describe_error(error)}"
            if problem != self.error:
                effect = "the last valid one stays in force" if before else "reviews are refused"
                log.error("certificate rejected", error=problem, effect=effect)
            self.error = problem
            return
        self.error = ""
        if before is None or before.expires != self._loaded.expires:
            log.info("certificate in force", expires=_date(self._loaded.expires))

    def _choose(self, connection: Any, *_: object) -> int | None:  # noqa: ANN401 - the ssl module's own
        """Choose the context of the certificate in force for a new connection."""
        if self._loaded is None:
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        connection.context = self._loaded.context
        return None


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # the API server resumes no session
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load(certificate: Path, key: Path) -> _Loaded:
    """Load a pair and check it as a client would; blocks.

    Raises:
        OSError: a file cannot be read, the key is not the certificate's, or a client would not
            accept it.
        ValueError: as the latter.
    """
    context = _server_context()
    context.load_cert_chain(certificate, key, password=_no_password)
    return _Loaded(context, _expiry(context, certificate))


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody is here to type a password")


def _expiry(context: ssl.SSLContext, certificate: Path) -> float:
    """Return the certificate's end, by a handshake in memory that trusts it.

    Python reads the dates of a certificate in no other way.

    Raises:
        ssl.SSLError: it has expired, is not valid yet, or is none of a server.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = trusting.wrap_bio(to_client, to_server)

    for _ in range(_ROUNDS):
        for side in (client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
        if found := client.getpeercert() if client.version() else None:
            return float(ssl.cert_time_to_seconds(str(found["notAfter"])))
    raise ValueError("no handshake with this certificate comes to an end")


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
