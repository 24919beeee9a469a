"""A small API server on a loopback port, with faults on demand.

The server has Nodes, Pods, ConfigMaps, Events and NodeFeatures. Faults: no answer, refusals,
throttling, watches that end, an expired history, renewed tokens.
"""

import json
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import yaml
from aiohttp import web

from metagpu.sim.apiserver.kinds import (
    CLASSES,
    NFD_GROUP,
    NODE_FEATURES,
    SLICES_PATH,
    SimClaimStatus,
    SimNfd,
    SimResourceSlices,
    SimTokens,
    add_evictions,
    add_node_features,
    add_pod_proxy,
)
from metagpu.sim.apiserver.objects import ApiError, Object, ObjectSelection, ObjectStore


class SimCluster:
    """Nodes, Pods and ConfigMaps, and the writes of other components.

    Attributes:
        store: the objects.
    """

    def __init__(self) -> None:
        self.store = ObjectStore()

    def add_node(
        self, name: str, labels: Mapping[str, str] | None = None, **spec: object
    ) -> Object:
        """Add a Node with these labels, as its kubelet does."""
        content = {"metadata": {"labels": dict(labels or {})}, "spec": spec, "status": {}}
        return self.store.put(("nodes", "", name), content)

    def node(self, name: str) -> Object:
        """Return a Node."""
        return self.store.objects["nodes", "", name]

    def labels(self, name: str) -> Mapping[str, str]:
        """Return a Node's labels."""
        found: Mapping[str, str] = self.node(name)["metadata"].get("labels") or {}
        return found

    def label(self, name: str, labels: Mapping[str, str | None], by: str = "kubectl") -> None:
        """Set or remove labels of a Node, as a person does."""
        patch = {"metadata": {"labels": dict(labels)}}
        self.store.merge(("nodes", "", name), patch, status=False, manager=by)

    def report(
        self, name: str, capacity: Mapping[str, int], allocatable: Mapping[str, int]
    ) -> None:
        """Write a Node's capacity and allocatable, as its kubelet does."""
        status = {
            "capacity": {resource: str(n) for resource, n in capacity.items()},
            "allocatable": {resource: str(n) for resource, n in allocatable.items()},
        }
        key = ("nodes", "", name)
        self.store.merge(key, {"status": status}, status=True, manager="kubelet")

    def configure(self, namespace: str, name: str, data: Mapping[str, str]) -> None:
        """Write a ConfigMap."""
        self.store.put(("configmaps", namespace, name), {"data": dict(data)})

    def add_pod(
        self,
        namespace: str,
        name: str,
        node: str,
        annotations: Mapping[str, str] | None = None,
        *,
        uid: str = "",
        phase: str = "Running",
        owner: tuple[str, str] | None = None,
        requests: Mapping[str, int] | None = None,
    ) -> Object:
        """Add a Pod that is bound to a node, or replace one."""
        metadata: Object = {"annotations": dict(annotations or {})}
        if uid:
            metadata["uid"] = uid
        if owner is not None:
            metadata["ownerReferences"] = [
                {
                    "apiVersion": "batch/v1" if owner[0] == "Job" else "apps/v1",
                    "kind": owner[0],
                    "name": owner[1],
                    "controller": True,
                    "uid": "of-the-owner",
                }
            ]
        limits = {resource: str(count) for resource, count in (requests or {}).items()}
        spec = {
            "nodeName": node,
            "containers": [{"name": "main", "resources": {"limits": limits}}],
        }
        content = {"metadata": metadata, "spec": spec, "status": {"phase": phase}}
        return self.store.put(("pods", namespace, name), content)

    def reject_pod(self, namespace: str, name: str, message: str) -> None:
        """Fail a Pod as its kubelet does where a device plugin refuses the request."""
        status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}
        patch = {"status": status}
        self.store.merge(("pods", namespace, name), patch, status=True, manager="kubelet")

    def delete_pod(self, namespace: str, name: str) -> None:
        """Delete a Pod, as the API server does once its kubelet has ended it."""
        self.store.delete(("pods", namespace, name))

    def pods(self) -> list[Object]:
        """Return all Pods, the oldest first."""
        return [document for key, document in self.store.objects.items() if key[0] == "pods"]

    def node_features(self) -> list[Object]:
        """Return all NodeFeatures."""
        return [document for key, document in self.store.objects.items() if key[0] == NODE_FEATURES]

    def events(self) -> list[Object]:
        """Return all Events, the oldest first."""
        return [document for key, document in self.store.objects.items() if key[0] == "events"]


MERGE: Final = "application/merge-patch+json"
APPLY: Final = "application/apply-patch+yaml"
_NODE: Final = "/api/v1/nodes"
_PODS: Final = "/api/v1/pods"
_POD: Final = "/api/v1/namespaces/{namespace}/pods/{name}"
_CONFIG_MAPS: Final = "/api/v1/namespaces/{namespace}/configmaps"
_LISTED: Final = tuple(
    f"/api/v1/namespaces/{{namespace}}/{collection}"
    for collection in ("pods", "resourcequotas", "events")
)
_CLAIMS: Final = "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims"
_TEMPLATES: Final = "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaimtemplates"
_EVENTS: Final = "/apis/events.k8s.io/v1/namespaces/{namespace}/events"
_EVENT_FIELDS: Final = (
    "eventTime", "reportingController", "reportingInstance", "action", "reason", "type", "note",
)  # fmt: skip
_NOTE_LIMIT: Final = 1024
_WRITES: Final = frozenset(("PATCH", "POST"))
_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True)
class RecordedRequest:
    """A received request; `target` is its path, with `?watch` for a watch."""

    method: str
    target: str
    body: Any = None
    content: str = ""


class SimApiServer(SimCluster):
    """The API server of a cluster; its objects outlive `running`, as a real one's do.

    Attributes:
        requests: all received requests.
        token: the token that clients must send.
        denied: (method, part of a path) of requests that are forbidden.
        failing: (method, part of a path) of requests that fail for now.
        rejected: parts of paths whose patches and new objects are invalid.
        failures: answers to the next requests of any kind.
        tokens: the tokens of ServiceAccounts.
        resource_slices: the slices of DRA drivers.
        claim_status: the status of ResourceClaims, as DRA drivers write it.
        nfd: Node Feature Discovery's master, `None` where NFD is not installed.
        nfd_active: whether NFD's master runs.
    """

    def __init__(self, token: str = "first") -> None:  # noqa: S107 - it guards nothing
        super().__init__()
        self.store.changed = self.wake
        self.resource_slices = SimResourceSlices(self.store)
        self.claim_status = SimClaimStatus(self.store)
        self.nfd: SimNfd | None = None
        self.nfd_active = True
        self.requests: list[RecordedRequest] = []
        self.token = token
        self.denied: list[tuple[str, str]] = []
        self.failing: list[tuple[str, str]] = []
        self.rejected: list[str] = []
        self.failures: deque[ApiError] = deque()
        self.tokens = SimTokens()
        self.port = 0
        self._changed = anyio.Event()
        self._ending = anyio.Event()
        self._bookmarks = 0

    def install_nfd(self, *, works: bool = True) -> SimNfd:
        """Install Node Feature Discovery, or its resource kinds alone."""
        self.nfd, self.nfd_active = SimNfd(self.store), works
        return self.nfd

    async def until(self, seen: Callable[[], object], *, within: float = 30.0) -> None:
        """Wait until a predicate holds; each request and each change evaluates it again.

        Raises:
            TimeoutError: the predicate did not hold in time.
        """
        with anyio.fail_after(within):
            while not seen():
                changed = self._changed
                await changed.wait()

    async def watched(self, collection: str, *, times: int = 1) -> None:
        """Wait until a collection, like `/api/v1/pods`, has been watched so many times."""
        target = f"{collection}?watch"
        await self.until(
            lambda: sum(request.target == target for request in self.requests) >= times
        )

    # --- what can go wrong ------------------------------------------------------------------------

    def fail(self, code: int, times: int = 1, *, retry: int = 0, reason: str = "Error") -> None:
        """Refuse the next requests of any kind."""
        refusal = ApiError(code, reason, "a test made the simulated API server fail", retry=retry)
        self.failures.extend([refusal] * times)

    def bookmark(self) -> None:
        """Send every watch a bookmark."""
        self._bookmarks += 1
        self.wake()

    def end_watches(self) -> None:
        """End all watches, as a server that restarts does."""
        ending, self._ending = self._ending, anyio.Event()
        ending.set()
        self.wake()

    # --- serving ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator["SimApiServer"]:
        """Serve on a port of the loopback interface, the same one each time."""
        app = web.Application(middlewares=[self._guarded])
        classes = CLASSES
        for path in (_NODE, _PODS, _CONFIG_MAPS, SLICES_PATH, classes):
            app.router.add_get(path, self._list)
        app.router.add_patch(_NODE + "/{name}", self._patch)
        app.router.add_patch(_NODE + "/{name}/{part:status}", self._patch)
        app.router.add_delete(_POD, self._delete_pod)
        app.router.add_patch(_POD, self._patch)
        app.router.add_post(_EVENTS, self._create)
        app.router.add_patch(_EVENTS + "/{name}", self._patch)
        for path in _LISTED:
            app.router.add_get(path, self._list)
        for path in (_NODE + "/{name}", _POD, _CLAIMS + "/{name}", _TEMPLATES + "/{name}"):
            app.router.add_get(path, self._get)
        add_node_features(app, self.store)
        self.resource_slices.add_routes(app)
        self.claim_status.add_routes(app)
        add_pod_proxy(app, self.store, self.tokens)
        add_evictions(app, self.store)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            self.end_watches()
            await runner.cleanup()

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig with the current address and token; return its path."""
        path = folder / "kubeconfig"
        named = {"name": "sim"}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "sim",
            "clusters": [{**named, "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{**named, "user": {"token": self.token}}],
            "contexts": [{**named, "context": {"cluster": "sim", "user": "sim"}}],
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def wake(self) -> None:
        """Wake all that wait for a change, as each request and each change does."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def next_change(self) -> anyio.Event:
        """Return the event of the next request or change; take it before looking."""
        return self._changed

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401 - aiohttp's
        watching = "?watch" if request.query.get("watch") else ""
        body = json.loads(await request.read() or b"null")
        came = RecordedRequest(request.method, request.path + watching, body, request.content_type)
        self.requests.append(came)
        self.wake()

        try:
            self._check(request)
            answer: web.StreamResponse = await handler(request)
            if self.nfd is not None and self.nfd_active and request.method != "GET":
                self.nfd.work()
        except ApiError as refusal:
            headers = {"Retry-After": str(refusal.retry)} if refusal.retry else {}
            answer = web.json_response(refusal.status, status=refusal.code, headers=headers)
        self.wake()
        return answer

    def _check(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            raise ApiError(401, "Unauthorized", "Unauthorized")
        if self.failures:
            raise self.failures.popleft()
        if self.nfd is None and request.path.startswith(NFD_GROUP):
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        if request.method in _WRITES and any(part in request.path for part in self.rejected):
            raise ApiError(422, "Invalid", "status: Required value")
        if any(request.method == method and part in request.path for method, part in self.failing):
            raise ApiError(503, "ServiceUnavailable", "a test made the simulated API server fail")
        for method, part in self.denied:
            if request.method == method and part in request.path:
                message = f'User "sim" cannot {method.lower()} {request.path}'
                raise ApiError(403, "Forbidden", message)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        selection = ObjectSelection.of(
            request.path.rpartition("/")[2],
            request.match_info.get("namespace", ""),
            request.query.get("fieldSelector", ""),
            request.query.get("labelSelector", ""),
        )
        if request.query.get("watch"):
            return await self._watch(request, selection)
        return web.json_response(
            {
                "kind": "List",
                "metadata": {"resourceVersion": str(self.store.version)},
                "items": list(self.store.select(selection)),
            }
        )

    async def _get(self, request: web.Request) -> web.StreamResponse:
        collection = request.path.split("/")[-2]
        key = (collection, request.match_info.get("namespace", ""), request.match_info["name"])
        return web.json_response(self.store.get_object(key))

    async def _watch(self, request: web.Request, selection: ObjectSelection) -> web.StreamResponse:
        """Send the changes of some objects since a version."""
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        ending, bookmarks = self._ending, self._bookmarks

        async def send(kind: str, entry: Object) -> None:
            await response.write(json.dumps({"type": kind, "object": entry}).encode() + b"\n")

        timeout = anyio.move_on_after(float(request.query["timeoutSeconds"]))
        with suppress(ConnectionResetError), timeout:  # a client may go while there is a change
            while not ending.is_set():
                changed = self._changed
                if seen < self.store.oldest:
                    await send("ERROR", ApiError(410, "Expired", "too old resource version").status)
                    break
                latest = self.store.version  # what comes while this sends is for the next round
                for version, kind, about, document in list(self.store.history):
                    if version > seen and selection.contains(about, document):
                        await send(kind, document)
                seen = latest
                if bookmarks != self._bookmarks:
                    bookmarks = self._bookmarks
                    await send("BOOKMARK", {"metadata": {"resourceVersion": str(seen)}})
                await changed.wait()
        return response

    async def _patch(self, request: web.Request) -> web.StreamResponse:
        info, body = request.match_info, json.loads(await request.read())
        collection = request.path.removesuffix("/status").split("/")[-2]
        key = (collection, info.get("namespace", ""), info["name"])
        status, manager = "part" in info, request.query.get("fieldManager", "metagpu")

        if request.content_type == APPLY:
            force = request.query.get("force") == "true"
            document = self.store.apply(key, body, status=status, manager=manager, force=force)
        elif request.content_type == MERGE:
            document = self.store.merge(key, body, status=status, manager=manager)
        else:
            raise ApiError(415, "UnsupportedMediaType", f"{request.content_type} is unknown")
        return web.json_response(document)

    async def _delete_pod(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read() or b"{}")
        key = ("pods", request.match_info["namespace"], request.match_info["name"])
        document = self.store.get_object(key)
        for name, wanted in body.get("preconditions", {}).items():
            if document["metadata"][name] != wanted:
                raise ApiError(409, "Conflict", f"Precondition failed: {name} in precondition")
        if body.get("dryRun") != ["All"]:
            self.store.delete(key)
        return web.json_response(document)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body, namespace = json.loads(await request.read()), request.match_info["namespace"]
        regarding = body.get("regarding", {})
        missing = [name for name in _EVENT_FIELDS if not body.get(name)]
        if missing or len(body["note"].encode()) > _NOTE_LIMIT:
            raise ApiError(422, "Invalid", f"Event is invalid: {missing or 'note: too long'}")
        if not _NAME.fullmatch(body["metadata"]["name"]):
            raise ApiError(422, "Invalid", "metadata.name: a lowercase RFC 1123 subdomain")
        if regarding.get("namespace", "default") != namespace:
            raise ApiError(422, "Invalid", "regarding.namespace: does not match event.namespace")
        key = ("events", namespace, str(body["metadata"]["name"]))
        if key in self.store.objects:
            raise ApiError(409, "AlreadyExists", f'events.events.k8s.io "{key[2]}" already exists')
        return web.json_response(self.store.put(key, body), status=201)
