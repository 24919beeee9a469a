"""Reviews of viewers' tokens by the API server.

A viewer is who may create tokens of one ServiceAccount: the rights to that are Kubernetes' own, and
such a token, with an audience of its own, is worth nothing elsewhere.
"""

import hashlib
from base64 import urlsafe_b64decode
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
from anyio import to_thread

from metagpu.core.contracts.programs import RunCommand
from metagpu.core.errors import ClusterError
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.plugins.cluster.settings import AUDIENCE, VIEWER, ClusterSettings

if TYPE_CHECKING:
    from types import ModuleType

    from metagpu.plugins.cluster.client import KubeClient

REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
REMEMBERED: Final = 60.0
"""Seconds for which a reviewed token is not reviewed again."""
LONGEST_LIFE: Final = 7200
"""Seconds that a token may be for: who loses the right to create tokens keeps the last one."""
_MOST_REMEMBERED: Final = 256
_LONGEST: Final = 4096
"""Characters of a token; those of Kubernetes have about a thousand."""
_BURST: Final = 20
_RATE: Final = 2.0
"""Reviews a second: anybody who reaches the port can invent tokens."""


class TokenReviewer:
    """Checks that tokens are a viewer's; `run` holds the connection to the API server.

    Args:
        clock: returns the event loop's time.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        run_command: RunCommand,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._settings = settings
        self._run_command = run_command
        self._clock = clock
        self._viewer = f"system:serviceaccount:{settings.namespace}:{VIEWER}"
        self._client: KubeClient | None = None
        self._rate = TokenBucket(_BURST, _RATE)
        self._known: dict[bytes, float] = {}

    async def run(self) -> None:
        """Hold the connection until cancelled."""
        library = await to_thread.run_sync(_load_client)
        settings = self._settings
        async with library.open_client(
            settings.kubeconfig, self._run_command, settings.timing
        ) as client:
            self._client = client
            try:
                await anyio.sleep_forever()
            finally:
                self._client = None

    async def check(self, token: str) -> str:
        """Return why a token gives no access, an empty text for a viewer's.

        Raises:
            ConnectionError: the token could not be reviewed; the message says why.
        """
        if problem := self._foreign(token):
            return problem
        key, now = hashlib.sha256(token.encode()).digest(), self._clock()
        if self._known.get(key, 0.0) > now:
            return ""
        if self._client is None:
            raise ConnectionError("this daemon is not connected to the API server yet")
        if not self._rate.take(now):
            raise ConnectionError("too many new tokens at once; try again in a few seconds")
        if not await self._review(self._client, token):
            return f"the API server does not accept this token of {self._viewer}; it may be too old"
        self._known = {it: until for it, until in self._known.items() if until > now}
        if len(self._known) < _MOST_REMEMBERED:
            self._known[key] = now + REMEMBERED
        return ""

    def _foreign(self, token: str) -> str:
        """Return why a token is not even called a viewer's; costs no review."""
        claims = _claims(token)
        audiences = claims.get("aud")
        if claims.get("sub") != self._viewer or not isinstance(audiences, list):
            return f"a token of {self._viewer} is needed in the header Metagpu-Token"
        if AUDIENCE not in audiences:
            return f"the token is not for {AUDIENCE}"
        if not _life(claims) <= LONGEST_LIFE:
            return "the token is for more than two hours; create one without --duration"
        return ""

    async def _review(self, client: "KubeClient", token: str) -> bool:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }
        try:
            answer = await client.call("POST", REVIEWS, body=body)
        except ClusterError as error:
            raise ConnectionError(f"the token could not be reviewed: {error}") from error
        status = answer.get("status") or {}
        user = (status.get("user") or {}).get("username")
        return (
            status.get("authenticated") is True
            and user == self._viewer
            and AUDIENCE in (status.get("audiences") or ())
        )


def _load_client() -> "ModuleType":
    from metagpu.plugins.cluster import client  # noqa: PLC0415 - 12 MB, behind the option

    return client


def _life(claims: Mapping[str, Any]) -> float:
    """Return the seconds for which a token was issued, `inf` for one without an end."""
    begin, end = claims.get("iat"), claims.get("exp")
    return end - begin if isinstance(begin, int) and isinstance(end, int) else inf


def _claims(token: str) -> Mapping[str, Any]:
    """Return what a token says of itself, unproven; nothing for another text."""
    parts = token.split(".")
    if len(token) > _LONGEST or len(parts) != 3:  # noqa: PLR2004 - header, claims, signature
        return {}
    try:
        raw = urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (ValueError, msgspec.DecodeError):
        return {}
