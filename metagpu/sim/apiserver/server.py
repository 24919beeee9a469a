"""A small API server on a loopback port, with faults on demand.

The server has Nodes, Pods, ConfigMaps, Events and NodeFeatures. Faults: no answer, refusals,
throttling, watches that end, an expired history, renewed tokens.
"""

import json
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import yaml
from aiohttp import web

from metagpu.sim.apiserver.kinds import (
    NFD_GROUP,
    NODE_FEATURES,
    SimClaimStatus,
    SimNfd,
    SimResourceSlices,
    SimTokens,
    add_evictions,
    add_node_features,
    add_pod_logs,
    add_pod_proxy,
)
from metagpu.sim.apiserver.objects import ApiError, Object
from metagpu.sim.apiserver.rest import RestApi


class SimCluster(RestApi):
    """Nodes, Pods and ConfigMaps, and the writes of other components."""

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
        token: the token that clients must send, unless they send none and their path begins with
            the `key`.
        denied: (method, part of a path) of requests that are forbidden.
        failing: (method, part of a path) of requests that fail for now.
        rejected: parts of paths whose patches and new objects are invalid.
        failures: answers to the next requests of any kind.
        tokens: the tokens of ServiceAccounts.
        logs: the logs of pods, by their names.
        resource_slices: the slices of DRA drivers.
        claim_status: the status of ResourceClaims, as DRA drivers write it.
        nfd: Node Feature Discovery's master, `None` where NFD is not installed.
        nfd_active: whether NFD's master runs.
    """

    def __init__(self, token: str = "first") -> None:  # noqa: S107 - it guards nothing
        super().__init__()
        self.resource_slices = SimResourceSlices(self.store)
        self.claim_status = SimClaimStatus(self.store)
        self.nfd: SimNfd | None = None
        self.nfd_active = True
        self.requests: list[RecordedRequest] = []
        self.token, self.key = token, secrets.token_hex()
        self.denied: list[tuple[str, str]] = []
        self.failing: list[tuple[str, str]] = []
        self.rejected: list[str] = []
        self.failures: deque[ApiError] = deque()
        self.tokens = SimTokens()
        self.logs: dict[str, str] = {}
        self.port = 0

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

    # --- serving ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator["SimApiServer"]:
        """Serve on a port of the loopback interface, the same one each time."""
        app = web.Application(middlewares=[self._guarded])
        app.router.add_post(_EVENTS, self._create)
        add_node_features(app, self.store)
        self.resource_slices.add_routes(app)
        self.claim_status.add_routes(app)
        add_pod_proxy(app, self.store, self.tokens)
        add_evictions(app, self.store)
        add_pod_logs(app, self.logs)
        self.add_routes(app, f"/{self.key}")
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        try:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
            self.port = runner.addresses[0][1]
            yield self
        finally:
            self.end_watches()
            with anyio.CancelScope(shield=True):  # a cancelled cleanup leaves a session open
                await runner.cleanup()

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig with the current address and token; return its path."""
        path = folder / "kubeconfig"
        # kubectl sends no token without TLS; this path is as secret as the token.
        named, address = {"name": "sim"}, f"http://127.0.0.1:{self.port}/{self.key}"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "sim",
            "clusters": [{**named, "cluster": {"server": address}}],
            "users": [{**named, "user": {"token": self.token}}],
            "contexts": [{**named, "context": {"cluster": "sim", "user": "sim"}}],
        }
        path.write_text(yaml.safe_dump(content))
        return path

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401 - aiohttp's
        if request.path.startswith(f"/{self.key}/"):
            request, handler = await self._without_key(request)
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

    async def _without_key(self, request: web.Request) -> tuple[web.Request, Any]:
        """Return a request below the key's path as one with the token, and its handler."""
        headers = {"Authorization": f"Bearer {self.token}", **request.headers}
        path = request.rel_url.raw_path_qs.removeprefix(f"/{self.key}")
        found = request.clone(rel_url=path, headers=headers)
        found._match_info = match = await request.app.router.resolve(found)  # noqa: SLF001 - as aiohttp's own normalize_path_middleware
        return found, match.handler

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
