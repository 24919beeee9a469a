"""Pods at a simulated API server: their proxy, tokens of accounts, and evictions.

Evictions follow the registry of Kubernetes 1.36: texts, codes and causes are its own.
"""

import json
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Container, Iterator
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


def add_pod_proxy(app: web.Application, store: ObjectStore, tokens: SimTokens) -> None:
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


BUDGETS = "poddisruptionbudgets"
_PATH = "/api/v1/namespaces/{namespace}/pods/{name}/eviction"
_NOW = "2026-11-23T03:00:00Z"


def add_evictions(app: web.Application, store: ObjectStore) -> None:
    """Add the route of evictions."""

    async def evict(request: web.Request) -> web.StreamResponse:
        body, info = json.loads(await request.read()), request.match_info
        key = ("pods", info["namespace"], info["name"])
        pod = store.get_object(key)
        options = body.get("deleteOptions") or {}
        uid = (options.get("preconditions") or {}).get("uid")
        if uid not in (None, pod["metadata"]["uid"]):
            raise ApiError(409, "Conflict", "Precondition failed: UID in precondition")
        for budget in _budgets(store, pod):
            _take(store, budget)
        patch = {"metadata": {"deletionTimestamp": _NOW, "deletionGracePeriodSeconds": 30}}
        store.merge(key, patch, status=False, manager="kubectl")
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)

    app.router.add_post(_PATH, evict)


def _budgets(store: ObjectStore, pod: Object) -> Iterator[Object]:
    labels = pod["metadata"].get("labels") or {}
    for (kind, namespace, _), it in list(store.objects.items()):
        if kind == BUDGETS and namespace == pod["metadata"]["namespace"]:
            wanted = it["spec"]["selector"]["matchLabels"]
            if wanted.items() <= labels.items():
                yield it


def _take(store: ObjectStore, budget: Object) -> None:
    """Take one disruption from a budget.

    Raises:
        ApiError: it allows none now.
    """
    name, status = budget["metadata"]["name"], budget["status"]
    if not status["disruptionsAllowed"]:
        message = "Cannot evict pod as it would violate the pod's disruption budget."
        refusal = ApiError(429, "TooManyRequests", message)
        needs = f"needs {status['desiredHealthy']} healthy pods and has {status['currentHealthy']}"
        text = f"The disruption budget {name} {needs} currently"
        refusal.status["details"]["causes"] = [{"reason": "DisruptionBudget", "message": text}]
        raise refusal
    allowed = {"status": {"disruptionsAllowed": status["disruptionsAllowed"] - 1}}
    key = (BUDGETS, budget["metadata"]["namespace"], name)
    store.merge(key, allowed, status=True, manager="disruption-controller")
