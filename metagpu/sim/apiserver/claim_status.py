"""The status of ResourceClaims at a simulated API server, as drivers write it.

Follows Kubernetes 1.36: server-side apply of `status.devices`, whose entries have driver,
pool, device and share as their keys.
"""

import copy
import json
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from metagpu.sim.apiserver.objects import ApiError, Object, ObjectStore

_APPLY: Final = "application/apply-patch+yaml"
_PATH: Final = "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}/status"
_KIND: Final = "resourceclaims"

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
            raise ApiError(415, "UnsupportedMediaType", f"{request.content_type} is not known here")
        info, body = request.match_info, json.loads(await request.read())
        key = (_KIND, info["namespace"], info["name"])
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
