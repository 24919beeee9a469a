"""ResourceSlices and the status of ResourceClaims at a simulated API server.

Follows Kubernetes 1.36. Fields of features that are off are dropped without an error. Drivers write
`status.devices` by server-side apply: driver, pool, device and share are the keys of its entries.
"""

import copy
import json
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from metagpu.sim.apiserver.objects import ApiError, Key, Object, ObjectStore

SLICES_PATH: Final = "/apis/resource.k8s.io/v1/resourceslices"
CLASSES: Final = "/apis/resource.k8s.io/v1/deviceclasses"
_KIND: Final = "resourceslices"
_WRITTEN_AT: Final = "2026-11-23T03:00:00Z"


@dataclass
class SimResourceSlices:
    """The collection of ResourceSlices.

    Attributes:
        dropped: the fields of features that are off, as `consumesCounters`.
        refused: the pools whose slices are not valid.
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
        if spec["pool"]["name"] in self.refused:
            raise ApiError(422, "Invalid", "spec: a test made it invalid")
        if spec.get("sharedCounters") and spec.get("devices"):
            raise ApiError(422, "Invalid", "spec: only one of sharedCounters and devices")
        if (before := self.store.objects.get(key)) is not None:
            content["metadata"]["uid"] = before["metadata"]["uid"]
            fixed = [
                (it["driver"], it["nodeName"], it["pool"]["name"]) for it in (before["spec"], spec)
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
        self.store.get_object(_key(name))
        return web.json_response(self.put(name, json.loads(await request.read())))

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        it = self.store.get_object(_key(request.match_info["name"]))
        self.store.delete(_key(request.match_info["name"]))
        return web.json_response(it)

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
                key: self._without_dropped(it)
                for key, it in value.items()
                if key not in self.dropped
            }
        return [self._without_dropped(it) for it in value] if isinstance(value, list) else value


def _key(name: str) -> Key:
    return _KIND, "", name


_APPLY: Final = "application/apply-patch+yaml"
_PATH: Final = "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}/status"
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
        app.router.add_patch(_PATH, self._patch)

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
        kept = [it for it in claim["status"].get("devices") or () if identity(it) not in mine]
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
        for it in wanted:
            if identity(it) not in allocated:
                raise ApiError(422, "Invalid", f"status.devices: Invalid value: {identity(it)}")
        if len(set(map(identity, wanted))) < len(wanted):
            raise ApiError(422, "Invalid", "status.devices: Duplicate value")


def identity(it: Object) -> Identity:
    """Return what tells an entry, or a result of an allocation, from the others."""
    return it["driver"], it["pool"], it["device"], it.get("shareID")
