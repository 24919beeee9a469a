"""The objects of a simulated API server by REST: found, listed, watched, written.

It has what `kubectl` needs to get, apply and delete objects of the kinds below.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import anyio
from aiohttp import web

from metagpu.core.errors import MetagpuError
from metagpu.sim.apiserver.objects import (
    KINDS,
    ApiError,
    Key,
    Object,
    ObjectSelection,
    ObjectStore,
)

_BETA: Final = ("resource.k8s.io/v1beta1", "resource.k8s.io/v1beta2")
_IN_BETA: Final = ("ResourceClaim", "ResourceClaimTemplate", "DeviceClass")


def _kinds_by_api() -> Iterator[tuple[str, Mapping[str, str]]]:
    for api in dict.fromkeys(document.api for document in KINDS.values()):
        yield api, {kind.collection: name for name, kind in KINDS.items() if kind.api == api}
    for api in _BETA:
        yield api, {KINDS[name].collection: name for name in _IN_BETA}
    yield "events.k8s.io/v1", {"events": "Event"}


SERVED: Final = dict(_kinds_by_api())
"""The kinds by version and collection."""
_FIXED: Final = frozenset(("pods", "resourceclaims", "resourceclaimtemplates"))
"""The collections of objects whose specification nobody changes."""


class Target(NamedTuple):
    """The object or the collection of a request; a collection has no name."""

    api: str
    key: Key

    @classmethod
    def of(cls, request: web.Request) -> "Target":
        """Return that of a request.

        Raises:
            ApiError: there is no such collection.
        """
        info = request.match_info
        api = info["api"].removeprefix("api/").removeprefix("apis/")
        if info["collection"] not in SERVED.get(api, {}):
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        return cls(api, (info["collection"], info.get("namespace", ""), info.get("name", "")))

    def typed(self, document: Object, suffix: str = "") -> Object:
        """Return an object with its kind, in the version that is asked for."""
        kind = SERVED[self.api][self.key[0]]
        found = {**document, "apiVersion": self.api, "kind": f"{kind}{suffix}"}
        if self.api == _BETA[0] and kind == "ResourceClaim" and "spec" in document:
            found["spec"] = _in_beta(document["spec"])
        if self.api == _BETA[0] and kind == "ResourceClaimTemplate" and "spec" in document:
            found["spec"] = {**document["spec"], "spec": _in_beta(document["spec"]["spec"])}
        return found


def _in_beta(spec: Object) -> Object:
    """Return the specification of a claim as v1beta1 has it, without `exactly`."""
    devices = spec.get("devices") or {}
    requests = [
        {
            **{name: value for name, value in document.items() if name != "exactly"},
            **document.get("exactly", {}),
        }
        for document in devices.get("requests") or ()
    ]
    return {**spec, "devices": {**devices, "requests": requests}}


def discovery(prefix: str) -> Iterator[tuple[str, Object]]:
    """Yield the documents by which kubectl finds the kinds, with their paths.

    Args:
        prefix: of all paths, as the OpenAPI document names others.
    """
    paths = {api: f"api/{api}" if api == "v1" else f"apis/{api}" for api in SERVED}
    groups: dict[str, Object] = {}
    for group, slash, version in (api.partition("/") for api in SERVED):
        if slash:
            found = groups.setdefault(group, {"name": group, "versions": []})
            found["versions"].append({"groupVersion": f"{group}/{version}", "version": version})
    yield "/version", {"major": "1", "minor": "36", "gitVersion": "v1.36.3"}
    yield "/api", {"kind": "APIVersions", "versions": ["v1"]}
    yield "/apis", {"kind": "APIGroupList", "apiVersion": "v1", "groups": [*groups.values()]}
    root = {
        document: {"serverRelativeURL": f"{prefix}/openapi/v3/{document}"}
        for document in paths.values()
    }
    yield "/openapi/v3", {"paths": root}
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    for api, path in paths.items():
        resources = [
            {"name": collection, "singularName": kind.lower(), "kind": kind, "verbs": verbs}
            | {"namespaced": KINDS[kind].namespaced, "shortNames": KINDS[kind].short.split()}
            for collection, kind in SERVED[api].items()
        ]
        lists = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api}
        yield f"/{path}", {**lists, "resources": resources}
        group, _, version = api.rpartition("/")
        patches = {
            f"/{path}/{collection}/{{name}}": {
                "patch": {
                    # Says that the server itself refuses unknown fields: kubectl then does not ask.
                    "parameters": [{"name": "fieldValidation", "in": "query"}],
                    "x-kubernetes-group-version-kind": {
                        "group": group, "version": version, "kind": kind,
                    },
                }
            }
            for collection, kind in SERVED[api].items()
        }  # fmt: skip
        about = {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.36.3"}}
        yield f"/openapi/v3/{path}", {**about, "paths": patches}


MERGE: Final = "application/merge-patch+json"
APPLY: Final = "application/apply-patch+yaml"
STRATEGIC: Final = "application/strategic-merge-patch+json"
_BASE: Final = "/{api:api/v1|apis/[^/]+/[^/]+}"
_LISTS: Final = (f"{_BASE}/{{collection}}", f"{_BASE}/namespaces/{{namespace}}/{{collection}}")
APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
"""The annotation with what a user last said of an object."""


class RestApi:
    """The routes of all objects.

    Attributes:
        store: the objects.
        admit: returns a new object as it is stored, with its key; `None` where nobody creates any.
        remove: deletes an object.
    """

    def __init__(self) -> None:
        self.store = ObjectStore()
        self.store.changed = self.wake
        self.admit: Callable[[Object, str], tuple[Key, Object]] | None = None
        self.remove: Callable[[Key], None] = self.store.delete
        self._changed = anyio.Event()
        self._ending = anyio.Event()
        self._bookmarks = 0

    def add_routes(self, app: web.Application, prefix: str) -> None:
        """Add the routes; a request's path may have a prefix that is not seen here."""
        for path, document in discovery(prefix):
            app.router.add_get(path, partial(_answer, document))
        for path in _LISTS:
            app.router.add_get(path, self._list)
            app.router.add_post(path, self._create_any)
            for method, handler in (
                ("GET", self._get),
                ("PATCH", self._patch),
                ("PUT", self._replace),
                ("DELETE", self._delete),
            ):
                app.router.add_route(method, f"{path}/{{name}}", handler)
            app.router.add_patch(f"{path}/{{name}}/{{part:status}}", self._patch)

    def bookmark(self) -> None:
        """Send every watch a bookmark."""
        self._bookmarks += 1
        self.wake()

    def end_watches(self) -> None:
        """End all watches, as a server that restarts does."""
        ending, self._ending = self._ending, anyio.Event()
        ending.set()
        self.wake()

    def wake(self) -> None:
        """Wake all that wait for a change, as each request and each change does."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def next_change(self) -> anyio.Event:
        """Return the event of the next request or change; take it before looking."""
        return self._changed

    async def _list(self, request: web.Request) -> web.StreamResponse:
        target = Target.of(request)
        selection = ObjectSelection.of(
            *target.key[:2],
            request.query.get("fieldSelector", ""),
            request.query.get("labelSelector", ""),
        )
        if request.query.get("watch"):
            return await self._watch(request, selection)
        metadata = {"resourceVersion": str(self.store.version)}
        items = [target.typed(document) for document in self.store.select(selection)]
        return web.json_response(target.typed({"metadata": metadata, "items": items}, "List"))

    async def _get(self, request: web.Request) -> web.StreamResponse:
        target = Target.of(request)
        return web.json_response(target.typed(self.store.get_object(target.key)))

    async def _watch(self, request: web.Request, selection: ObjectSelection) -> web.StreamResponse:
        """Send the changes of some objects since a version."""
        target = Target.of(request)
        seen = int(request.query.get("resourceVersion") or self.store.version)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        ending, bookmarks = self._ending, self._bookmarks

        async def send(kind: str, document: Object) -> None:
            event = {
                "type": kind,
                "object": document if kind == "ERROR" else target.typed(document),
            }
            await response.write(json.dumps(event).encode() + b"\n")

        timeout = anyio.move_on_after(float(request.query.get("timeoutSeconds", "inf")))
        with suppress(ConnectionResetError), timeout:  # a client may go while there is a change
            while not ending.is_set():
                changed = self._changed
                if seen < self.store.oldest:
                    await send("ERROR", ApiError(410, "Expired", "too old resource version").status)
                    break
                latest = self.store.version  # what comes while this sends is for the next round
                for _, kind, about, document in self.store.history[seen - latest :] * (
                    seen < latest
                ):
                    if selection.contains(about, document):
                        await send(kind, document)
                seen = latest
                if bookmarks != self._bookmarks:
                    bookmarks = self._bookmarks
                    await send("BOOKMARK", {"metadata": {"resourceVersion": str(seen)}})
                await changed.wait()
        return response

    async def _patch(self, request: web.Request) -> web.StreamResponse:
        target, body = Target.of(request), json.loads(await request.read())
        key = target.key
        status, manager = "part" in request.match_info, request.query.get("fieldManager", "metagpu")
        applied = (body.get("metadata", {}).get("annotations") or {}).get(APPLIED)

        if request.content_type == APPLY:
            force = request.query.get("force") == "true"
            document = self.store.apply(key, body, status=status, manager=manager, force=force)
        elif request.content_type == STRATEGIC and applied:  # of `kubectl apply`: all that it said
            said = json.loads(applied)
            said["metadata"].setdefault("annotations", {})[APPLIED] = applied
            document = self._put(key, said)
        elif request.content_type in {MERGE, STRATEGIC}:
            document = self.store.merge(key, body, status=status, manager=manager)
        else:
            raise ApiError(415, "UnsupportedMediaType", f"{request.content_type} is unknown")
        return web.json_response(target.typed(document))

    async def _replace(self, request: web.Request) -> web.StreamResponse:
        target = Target.of(request)
        return web.json_response(
            target.typed(self._put(target.key, json.loads(await request.read())))
        )

    def _put(self, key: Key, said: Object) -> Object:
        """Replace what a user said of an object."""
        self.store.get_object(key)
        return self.store.put(key, self.changed(key, self._admitted(said, key[1])[1]))

    def changed(self, key: Key, content: Object) -> Object:
        """Return an object as it is after a user's change: what others wrote of it stays.

        Raises:
            ApiError: nobody changes that.
        """
        before = self.store.objects.get(key)
        if before is None:
            return content
        old, new = before.get("spec") or {}, content.get("spec") or {}
        if key[0] == "pods" and "nodeName" in old:
            new = {**new, "nodeName": old["nodeName"]}
        fixed = _fixed_part(key, old)
        if fixed != _fixed_part(key, new):
            problem = f"{content['kind'].lower()} {key[2]} exists with another {fixed[0]}"
            raise ApiError(422, "Invalid", f"{problem}; end it first")
        kept, said = before["metadata"], content["metadata"]
        created = kept.get("creationTimestamp", said["creationTimestamp"])
        metadata = {**kept, **said, "creationTimestamp": created}
        for name, last in _last_said(kept).items():
            known = (kept.get(name) or {}).items()
            others = {each: value for each, value in known if each not in last}
            metadata[name] = {**others, **(said.get(name) or {})}
        spec = {"spec": new} if "spec" in content else {}
        return {**content, **spec, "metadata": metadata, "status": before.get("status") or {}}

    async def _create_any(self, request: web.Request) -> web.StreamResponse:
        target = Target.of(request)
        key, content = self._admitted(json.loads(await request.read()), target.key[1])
        if key in self.store.objects:
            raise ApiError(409, "AlreadyExists", f'{key[0]} "{key[2]}" already exists')
        if request.query.get("dryRun") != "All":
            content = self.store.put(key, content)
        return web.json_response(target.typed(content), status=201)

    def _admitted(self, said: Object, namespace: str) -> tuple[Key, Object]:
        if self.admit is None:
            raise ApiError(405, "MethodNotAllowed", "the server does not allow this method")
        try:
            return self.admit(said, namespace)
        except MetagpuError as error:
            raise ApiError(422, "Invalid", str(error)) from None

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read() or b"{}")
        target = Target.of(request)
        document = self.store.get_object(target.key)
        for name, wanted in (body.get("preconditions") or {}).items():
            if document["metadata"][name] != wanted:
                raise ApiError(409, "Conflict", f"Precondition failed: {name} in precondition")
        if body.get("dryRun") != ["All"]:
            self.remove(target.key)
        return web.json_response(target.typed(document))


def _fixed_part(key: Key, spec: Object) -> tuple[str, object]:
    """Return the part of a specification that nobody changes, with its name."""
    if key[0] == "jobs":
        return "completionMode", spec.get("completionMode") or "NonIndexed"
    return "spec", spec if key[0] in _FIXED else None


def _last_said(metadata: Object) -> Mapping[str, Object]:
    """Return the labels and annotations that a user last applied, if anybody knows."""
    said: Object = {}
    with suppress(AttributeError, LookupError, TypeError, ValueError):
        said = dict(json.loads(metadata["annotations"][APPLIED])["metadata"])
    return {name: said.get(name) or {} for name in ("labels", "annotations")}


async def _answer(document: Object, _: web.Request) -> web.StreamResponse:
    return web.json_response(document)
