"""The pod proxy of the simulated API server, and the tokens of accounts."""

import json
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from aiohttp import web

from metagpu.sim.apiserver.objects import ApiError, Object, ObjectStore

_PROXY: Final = "/api/v1/namespaces/{namespace}/pods/{pod}/proxy/{path:.*}"
_TOKEN: Final = "/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"  # noqa: S105 - a path
_REVIEW: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCESS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
_VIEWER: Final = "system:serviceaccount:kube-system:metagpu-viewer"
_KEPT: Final = frozenset(("authorization", "host", "connection", "accept-encoding"))
"""Headers that the API server does not pass on as they are."""


@dataclass
class SimTokens:
    """Tokens of ServiceAccounts, by their text, with their user and audiences.

    Attributes:
        readers: the nodes whose status a user may get, `None` for all.
    """

    issued: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    readers: dict[str, Container[str] | None] = field(default_factory=lambda: {_VIEWER: None})

    def issue(
        self, namespace: str, name: str, audiences: list[str], *, life: int | None = 600
    ) -> str:
        """Create a token for seconds, in the shape of a signed one; `None` is for ever."""
        user, now = f"system:serviceaccount:{namespace}:{name}", int(time.time())
        claims: Object = {"sub": user, "aud": audiences, "iat": now}
        if life is not None:
            claims["exp"] = now + life
        parts = [_encoded({"alg": "none"}), _encoded(claims), secrets.token_urlsafe(16)]
        self.issued[token := ".".join(parts)] = (user, audiences)
        return token

    def review(self, token: str, audiences: list[str]) -> Object:
        """Return the status of a TokenReview."""
        user, of_token = self.issued.get(token, ("", []))
        common = [it for it in of_token if it in audiences]
        if not common:
            return {"authenticated": False, "error": "invalid bearer token"}
        identity = {
            "username": user,
            "uid": f"uid of {user}",
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "extra": {"authentication.kubernetes.io/credential-id": ["JTI=1"]},
        }
        return {"authenticated": True, "user": identity, "audiences": common}

    def review_access(self, spec: Object) -> Object:
        """Return the status of a SubjectAccessReview for the status of a node."""
        asked = {**spec["resourceAttributes"]}
        node, nodes = asked.pop("name"), self.readers.get(spec["user"], ())
        what = {
            "verb": "get",
            "group": "metagpu.io",
            "version": "v1",
            "resource": "nodestatuses",
        }
        return {"allowed": asked == what and (nodes is None or node in nodes)}


def add_routes(app: web.Application, store: ObjectStore, tokens: SimTokens) -> None:
    """Add routes of the pod proxy, of tokens and of their reviews."""
    sessions: list[aiohttp.ClientSession] = []

    async def proxy(request: web.Request) -> web.StreamResponse:
        pod, _, port = request.match_info["pod"].partition(":")
        it = store.get_object(("pods", request.match_info["namespace"], pod))
        address = (it.get("status") or {}).get("podIP")
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _KEPT}
        url = f"http://{address}:{port}/{request.match_info['path']}"
        try:
            async with sessions[0].get(url, headers=headers) as answer:
                body = await answer.read()
                content = answer.headers.get("content-type", "text/plain")
                return web.Response(
                    status=answer.status, body=body, headers={"content-type": content}
                )
        except aiohttp.ClientError as error:
            message = f"error trying to reach service: {error}"
            raise ApiError(503, "ServiceUnavailable", message) from error

    async def issue(request: web.Request) -> web.StreamResponse:
        where, body = request.match_info, json.loads(await request.read())
        key = ("serviceaccounts", where["namespace"], where["name"])
        store.get_object(key)
        token = tokens.issue(where["namespace"], where["name"], body["spec"]["audiences"])
        return web.json_response({**body, "status": {"token": token}}, status=201)

    async def review(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        spec = body["spec"]
        status = tokens.review(spec["token"], spec["audiences"])
        return web.json_response({**body, "status": status}, status=201)

    async def review_access(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        status = tokens.review_access(body["spec"])
        return web.json_response({**body, "status": status}, status=201)

    async def open_session(_: web.Application) -> None:
        sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

    async def close_session(_: web.Application) -> None:
        await sessions.pop().close()

    app.on_startup.append(open_session)
    app.on_cleanup.append(close_session)
    app.router.add_get(_PROXY, proxy)
    app.router.add_post(_TOKEN, issue)
    app.router.add_post(_REVIEW, review)
    app.router.add_post(_ACCESS, review_access)


def _encoded(value: Object) -> str:
    return urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")
