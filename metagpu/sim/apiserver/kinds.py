"""Kinds of objects with rules of their own at a simulated API server.

- NodeFeatures, as Node Feature Discovery's master treats their labels, by its source. All objects
  of a node are merged in the order of their names; the last wins. Labels that the Node already has
  are not written, and so not managed by NFD. Labels that NFD wrote and no object has any more are
  removed; an annotation records which labels NFD wrote.
- Pods: their proxy, tokens of accounts, and evictions, with the texts, codes and causes of
  Kubernetes 1.36.
- ResourceSlices and the status of ResourceClaims, by Kubernetes 1.36. Fields of features that are
  off are dropped without an error. Drivers write `status.devices` by server-side apply: driver,
  pool, device and share are the keys of its entries.
"""

import copy
import json
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
from aiohttp import web

from metagpu.sim.apiserver.objects import ApiError, Key, Object, ObjectStore

NFD_GROUP: Final = "/apis/nfd.k8s-sigs.io/v1alpha1"
NODE_FEATURES: Final = "nodefeatures"
NFD_LABELS: Final = "nfd.node.kubernetes.io/feature-labels"
_NODE_NAME: Final = "nfd.node.kubernetes.io/node-name"
_MANAGER: Final = "nfd-master"


@dataclass
class SimNfd:
    """NFD's master; it runs when a test calls `sync`.

    Attributes:
        denied: namespaces of labels that its configuration denies.
    """

    store: ObjectStore
    denied: set[str] = field(default_factory=set)

    def work(self) -> None:
        """Sync the labels of every Node."""
        for key, node in list(self.store.objects.items()):
            if key[0] == "nodes":
                self._put_right(key[2], node)

    def _put_right(self, name: str, node: Object) -> None:
        wanted = {
            label: value
            for _, document in sorted(self.store.objects.items(), key=lambda pair: pair[0][2])
            if document.get("kind") == "NodeFeature"
            and document["metadata"]["labels"].get(_NODE_NAME) == name
            for label, value in document["spec"]["labels"].items()
            if label.partition("/")[0] not in self.denied
        }
        given = node["metadata"].get("labels") or {}
        kept = (node["metadata"].get("annotations") or {}).get(NFD_LABELS, "").split(",")

        labels: dict[str, str | None] = {
            label: v for label, v in wanted.items() if given.get(label) != v
        }
        labels |= {label: None for label in kept if label in given and label not in wanted}
        remembered = ",".join(sorted(wanted)) or None
        if labels or remembered != (",".join(kept) or None):
            patch = {"metadata": {"labels": labels, "annotations": {NFD_LABELS: remembered}}}
            self.store.merge(("nodes", "", name), patch, status=False, manager=_MANAGER)


def add_node_features(app: web.Application, store: ObjectStore) -> None:
    """Add routes to read, apply and delete NodeFeatures by name."""
    path = f"{NFD_GROUP}/namespaces/{{namespace}}/{NODE_FEATURES}/{{name}}"

    async def discover(_: web.Request) -> web.StreamResponse:
        kinds = [{"name": NODE_FEATURES, "namespaced": True, "kind": "NodeFeature"}]
        return web.json_response({"kind": "APIResourceList", "resources": kinds})

    async def get(request: web.Request) -> web.StreamResponse:
        return web.json_response(store.get_object(_feature_key(request)))

    async def apply(request: web.Request) -> web.StreamResponse:
        return web.json_response(
            store.apply_object(_feature_key(request), json.loads(await request.read()))
        )

    async def delete(request: web.Request) -> web.StreamResponse:
        document = store.get_object(_feature_key(request))
        store.delete(_feature_key(request))
        return web.json_response(document)

    app.router.add_get(NFD_GROUP, discover)
    app.router.add_get(path, get)
    app.router.add_patch(path, apply)
    app.router.add_delete(path, delete)


def _feature_key(request: web.Request) -> Key:
    return NODE_FEATURES, request.match_info["namespace"], request.match_info["name"]


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
        common = [audience for audience in of_token if audience in audiences]
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
        document = store.get_object(("pods", request.match_info["namespace"], pod))
        address = (document.get("status") or {}).get("podIP")
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


def add_pod_logs(app: web.Application, logs: Mapping[str, str]) -> None:
    """Add the logs of pods, by their names."""

    async def read(request: web.Request) -> web.StreamResponse:
        return web.Response(text=logs.get(request.match_info["name"], ""))

    app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}/log", read)


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
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        patch = {"metadata": {"deletionTimestamp": now, "deletionGracePeriodSeconds": 30}}
        store.merge(key, patch, status=False, manager="kubectl")
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)

    app.router.add_post(_PATH, evict)


def _budgets(store: ObjectStore, pod: Object) -> Iterator[Object]:
    labels = pod["metadata"].get("labels") or {}
    for (kind, namespace, _), document in list(store.objects.items()):
        if kind == BUDGETS and namespace == pod["metadata"]["namespace"]:
            wanted = document["spec"]["selector"]["matchLabels"]
            if wanted.items() <= labels.items():
                yield document


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


SLICES_PATH: Final = "/apis/resource.k8s.io/v1/resourceslices"
CLASSES: Final = "/apis/resource.k8s.io/v1/deviceclasses"
_KIND: Final = "resourceslices"
_WRITTEN_AT: Final = "2026-11-23T03:00:00Z"


@dataclass
class SimResourceSlices:
    """The collection of ResourceSlices.

    Attributes:
        dropped: the fields of features that are off, as `consumesCounters`.
        refused: the names of counter sets and devices that are not valid.
        dry_runs: whether every webhook of slices supports dry runs.
    """

    store: ObjectStore
    dropped: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    dry_runs: bool = True

    def put(self, name: str, body: Object, *, dry_run: bool = False) -> Object:
        """Create or replace a slice, or return what it would be.

        Raises:
            ApiError: the slice is not valid, or changes what cannot be changed.
        """
        content, key = self._stored(body), (_KIND, "", name)
        spec = content["spec"]
        contents = (*(spec.get("sharedCounters") or ()), *(spec.get("devices") or ()))
        if not self.refused.isdisjoint(part["name"] for part in contents):
            raise ApiError(422, "Invalid", "spec: a test made it invalid")
        if spec.get("sharedCounters") and spec.get("devices"):
            raise ApiError(422, "Invalid", "spec: only one of sharedCounters and devices")
        if (before := self.store.objects.get(key)) is not None:
            content["metadata"]["uid"] = before["metadata"]["uid"]
            fixed = [
                (spec_version["driver"], spec_version["nodeName"], spec_version["pool"]["name"])
                for spec_version in (before["spec"], spec)
            ]
            if fixed[0] != fixed[1]:
                raise ApiError(422, "Invalid", "spec: driver, nodeName and pool.name are immutable")
        return content if dry_run else self.store.put(key, content)

    def add_routes(self, app: web.Application) -> None:
        """Add the routes of writes and deletions."""
        app.router.add_post(SLICES_PATH, self._create)
        app.router.add_put(SLICES_PATH + "/{name}", self._replace)
        app.router.add_delete(SLICES_PATH + "/{name}", self._delete)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        name = body["metadata"]["name"]
        if (_KIND, "", name) in self.store.objects:
            raise ApiError(409, "AlreadyExists", f'resourceslices "{name}" already exists')
        dry_run = request.query.get("dryRun") == "All"
        if dry_run and not self.dry_runs:
            raise ApiError(400, "BadRequest", 'admission webhook "a" does not support dry run')
        return web.json_response(self.put(name, body, dry_run=dry_run), status=201)

    async def _replace(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.store.get_object(_device_key(name))
        return web.json_response(self.put(name, json.loads(await request.read())))

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        document = self.store.get_object(_device_key(request.match_info["name"]))
        self.store.delete(_device_key(request.match_info["name"]))
        return web.json_response(document)

    def _stored(self, body: Object) -> Object:
        content = copy.deepcopy(body)
        content["spec"] = self._without_dropped(content["spec"])
        for device in content["spec"].get("devices") or ():
            for taint in device.get("taints") or ():
                taint["timeAdded"] = _WRITTEN_AT
        return content

    def _without_dropped(self, value: Any) -> Any:  # noqa: ANN401 - any JSON
        if isinstance(value, dict):
            return {
                key: self._without_dropped(inner)
                for key, inner in value.items()
                if key not in self.dropped
            }
        return (
            [self._without_dropped(inner) for inner in value] if isinstance(value, list) else value
        )


def _device_key(name: str) -> Key:
    return _KIND, "", name


_APPLY: Final = "application/apply-patch+yaml"
_SLICES: Final = "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}/status"
_CLAIM_KIND: Final = "resourceclaims"

Identity = tuple[object, ...]


@dataclass
class SimClaimStatus:
    """The status of claims.

    Attributes:
        dropped: whether the feature gate DRAResourceClaimDeviceStatus is off.
        driver_rights: whether the caller may patch `resourceclaims/driver`.
    """

    store: ObjectStore
    dropped: bool = False
    driver_rights: bool = True
    _applied: dict[tuple[str, str], set[Identity]] = field(default_factory=dict)

    def add_routes(self, app: web.Application) -> None:
        """Add the route of patches."""
        app.router.add_patch(_SLICES, self._patch)

    async def _patch(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != _APPLY:
            raise ApiError(415, "UnsupportedMediaType", f"{request.content_type} is unknown")
        info, body = request.match_info, json.loads(await request.read())
        key = (_CLAIM_KIND, info["namespace"], info["name"])
        before = self.store.get_object(key)
        if body["metadata"].get("uid") not in (None, before["metadata"]["uid"]):
            raise ApiError(409, "Conflict", "Precondition failed: UID in precondition")
        if self.dropped:
            return web.json_response(before)

        claim = copy.deepcopy(before)
        wanted = body["status"]["devices"]
        self._check(claim, wanted)
        owner = before["metadata"]["uid"], request.query["fieldManager"]
        mine = self._applied.get(owner, set()) | set(map(identity, wanted))
        kept = [
            device
            for device in claim["status"].get("devices") or ()
            if identity(device) not in mine
        ]
        claim["status"]["devices"] = [*kept, *wanted]
        self._applied[owner] = set(map(identity, wanted))
        return web.json_response(before if claim == before else self.store.put(key, claim))

    def _check(self, claim: Object, wanted: list[Object]) -> None:
        if not self.driver_rights:
            message = (
                "status.devices: Forbidden: changing status.devices requires "
                'resource="resourceclaims/driver", verb="[associated-node:patch '
                'arbitrary-node:patch]" permission: not allowed'
            )
            raise ApiError(422, "Invalid", message)
        allocation = claim["status"].get("allocation") or {"devices": {"results": []}}
        allocated = set(map(identity, allocation["devices"]["results"]))
        for document in wanted:
            if identity(document) not in allocated:
                raise ApiError(
                    422, "Invalid", f"status.devices: Invalid value: {identity(document)}"
                )
        if len(set(map(identity, wanted))) < len(wanted):
            raise ApiError(422, "Invalid", "status.devices: Duplicate value")


def identity(document: Object) -> Identity:
    """Return what tells an entry, or a result of an allocation, from the others."""
    return document["driver"], document["pool"], document["device"], document.get("shareID")
