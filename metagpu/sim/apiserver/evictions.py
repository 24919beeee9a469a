"""Evictions of a simulated API server, and the budgets that refuse them.

Follows the registry of Kubernetes 1.36: texts, codes and causes are its own.
"""

import json
from collections.abc import Iterator

from aiohttp import web

from metagpu.sim.apiserver.objects import ApiError, Object, ObjectStore

BUDGETS = "poddisruptionbudgets"
_PATH = "/api/v1/namespaces/{namespace}/pods/{name}/eviction"
_NOW = "2026-11-23T03:00:00Z"


def add_routes(app: web.Application, store: ObjectStore) -> None:
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
