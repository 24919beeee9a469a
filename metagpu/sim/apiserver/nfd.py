"""Node Feature Discovery's master, as far as labels of NodeFeature objects go.

Follows NFD's source. All objects of a node are merged in the order of their names; the last wins.
Labels that the Node already has are not written, and so not managed by NFD. Labels that NFD wrote
and no object has any more are removed; an annotation records which labels NFD wrote.
"""

import json
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from metagpu.sim.apiserver.objects import Key, Object, ObjectStore

GROUP: Final = "/apis/nfd.k8s-sigs.io/v1alpha1"
KIND: Final = "nodefeatures"
KEPT: Final = "nfd.node.kubernetes.io/feature-labels"
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
            for _, it in sorted(self.store.objects.items(), key=lambda pair: pair[0][2])
            if it.get("kind") == "NodeFeature" and it["metadata"]["labels"].get(_NODE_NAME) == name
            for label, value in it["spec"]["labels"].items()
            if label.partition("/")[0] not in self.denied
        }
        given = node["metadata"].get("labels") or {}
        kept = (node["metadata"].get("annotations") or {}).get(KEPT, "").split(",")

        labels: dict[str, str | None] = {it: v for it, v in wanted.items() if given.get(it) != v}
        labels |= {it: None for it in kept if it in given and it not in wanted}
        remembered = ",".join(sorted(wanted)) or None
        if labels or remembered != (",".join(kept) or None):
            patch = {"metadata": {"labels": labels, "annotations": {KEPT: remembered}}}
            self.store.merge(("nodes", "", name), patch, status=False, manager=_MANAGER)


def add_routes(app: web.Application, store: ObjectStore) -> None:
    """Add routes to read, apply and delete NodeFeatures by name."""
    path = f"{GROUP}/namespaces/{{namespace}}/{KIND}/{{name}}"

    async def discover(_: web.Request) -> web.StreamResponse:
        kinds = [{"name": KIND, "namespaced": True, "kind": "NodeFeature"}]
        return web.json_response({"kind": "APIResourceList", "resources": kinds})

    async def get(request: web.Request) -> web.StreamResponse:
        return web.json_response(store.get_object(_key(request)))

    async def apply(request: web.Request) -> web.StreamResponse:
        return web.json_response(
            store.apply_object(_key(request), json.loads(await request.read()))
        )

    async def delete(request: web.Request) -> web.StreamResponse:
        it = store.get_object(_key(request))
        store.delete(_key(request))
        return web.json_response(it)

    app.router.add_get(GROUP, discover)
    app.router.add_get(path, get)
    app.router.add_patch(path, apply)
    app.router.add_delete(path, delete)


def _key(request: web.Request) -> Key:
    return KIND, request.match_info["namespace"], request.match_info["name"]
