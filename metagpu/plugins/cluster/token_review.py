"""Reviews of viewers by the API server: of their tokens and their rights.

A viewer is who may get the status of this node, `nodestatuses.metagpu.io`: a right that exists for
this question alone. Tokens have an audience of their own, and are worth nothing elsewhere.
"""

import hashlib
from base64 import urlsafe_b64decode
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio
import msgspec
from anyio import to_thread

from metagpu.core.contracts.programs import RunCommand
from metagpu.core.errors import ClusterError
from metagpu.core.runtime.rate_limit import TokenBucket
from metagpu.plugins.cluster.settings import AUDIENCE, STATUS_ROLE, ClusterSettings

if TYPE_CHECKING:
    from types import ModuleType

    from metagpu.plugins.cluster.client import KubeClient

REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
GROUP: Final = "metagpu.io"
RESOURCE: Final = "nodestatuses"
"""The resource, named as the node, that a viewer must be allowed to get; it has no objects."""
REMEMBERED: Final = 60.0
"""Seconds for which a viewer's token is not reviewed again."""
DENIED: Final = 10.0
"""Seconds for which a refusal is not reviewed again: people wait for it to end."""
LONGEST_LIFE: Final = 7200
"""Seconds that a token may be for: who loses the right to create tokens keeps the last one."""
_MOST_REMEMBERED: Final = 256
_LONGEST: Final = 4096
"""Characters of a token; those of Kubernetes have about a thousand."""
_BURST: Final = 20
_RATE: Final = 2.0
"""Reviews a second for one address: anybody who reaches the port can invent tokens."""
_SOURCES: Final = 5
"""Addresses that may have as many at once."""


class _Answer(NamedTuple):
    """The reason why a token gives no access, empty for a viewer's, and its end."""

    problem: str
    until: float


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
        self._client: KubeClient | None = None
        self._rate = TokenBucket(_BURST * _SOURCES, _RATE * _SOURCES)
        self._rates: dict[str, TokenBucket] = {}
        self._renewals = TokenBucket(_BURST, _RATE)
        self._known: dict[bytes, _Answer] = {}
        self._accepted: dict[bytes, float] = {}

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

    async def check(self, token: str, source: str) -> str:
        """Return why a token gives no access, an empty text for a viewer's.

        Who invents tokens at one address delays the new tokens of that address.

        Raises:
            ConnectionError: the token or its user could not be reviewed; the message says why.
        """
        if problem := _claimed_problem(token):
            return problem
        key, now = hashlib.sha256(token.encode()).digest(), self._clock()
        if (known := self._known.get(key)) is not None and known.until > now:
            return known.problem
        if self._client is None:
            raise ConnectionError("this daemon is not connected to the API server yet")
        renews = self._accepted.get(key, 0) > now
        if not (self._renewals.take(now) if renews else self._may_review(source, now)):
            raise ConnectionError("too many new tokens at once; try again in a few seconds")
        try:
            user = await _review_token(self._client, token)
            if user is None:
                self._accepted.pop(key, None)
                # not remembered: invented tokens would fill the memory
                return "the API server does not accept this token; it may be too old"
            problem = await self._review_access(self._client, user)
        except ClusterError as error:
            raise ConnectionError(f"the token could not be reviewed: {error}") from error
        self._accepted = {
            token_key: end
            for token_key, end in self._accepted.items()
            if end > now and token_key != key
        }
        if not problem and len(self._accepted) < _MOST_REMEMBERED:
            self._accepted[key] = now + LONGEST_LIFE
        self._known = {
            digest: answer for digest, answer in self._known.items() if answer.until > now
        }
        if len(self._known) < _MOST_REMEMBERED:
            self._known[key] = _Answer(problem, now + (DENIED if problem else REMEMBERED))
        return problem

    def _may_review(self, source: str, now: float) -> bool:
        if source not in self._rates and len(self._rates) >= _MOST_REMEMBERED:
            self._rates.pop(next(iter(self._rates)))
        of_source = self._rates.setdefault(source, TokenBucket(_BURST, _RATE))
        return of_source.take(now) and self._rate.take(now)

    async def _review_access(self, client: "KubeClient", user: Mapping[str, Any]) -> str:
        """Return why a user may not read this node's status, an empty text if he may."""
        node, name = self._settings.node, user.get("username")
        attributes = {
            "verb": "get",
            "group": GROUP,
            "version": "v1",
            "resource": RESOURCE,
            "name": node,
        }
        spec = {
            "user": name,
            **{field: user[field] for field in ("uid", "groups", "extra") if user.get(field)},
            "resourceAttributes": attributes,
        }
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": spec,
        }
        answer = await client.call("POST", ACCESS_REVIEWS, body=body)
        if (answer.get("status") or {}).get("allowed") is True:
            return ""
        fix = f"bind the ClusterRole {STATUS_ROLE} to it"
        return f"user {name} may not get {RESOURCE}.{GROUP} {node}: {fix}"


async def _review_token(client: "KubeClient", token: str) -> Mapping[str, Any] | None:
    """Return the user of a token that is for us, `None` for any other token."""
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token, "audiences": [AUDIENCE]},
    }
    status = (await client.call("POST", REVIEWS, body=body)).get("status") or {}
    user = status.get("user") or {}
    is_ours = AUDIENCE in (status.get("audiences") or ()) and bool(user.get("username"))
    return user if status.get("authenticated") is True and is_ours else None


def _load_client() -> "ModuleType":
    from metagpu.plugins.cluster import client  # noqa: PLC0415 - 12 MB, behind the option

    return client


def _claimed_problem(token: str) -> str:
    """Return why a token is not even called one for us; costs no review."""
    claims = _claims(token)
    if not isinstance(audiences := claims.get("aud"), list):
        return f"a token for {AUDIENCE} is needed in the header Metagpu-Token"
    if AUDIENCE not in audiences:
        return f"the token is not for {AUDIENCE}"
    if not _life(claims) <= LONGEST_LIFE:
        return "the token is for more than two hours; create one without --duration"
    return ""


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
