"""ResourceClaims of the simulated cluster, their users and their controllers."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from metagpu.sim.apiserver.objects import Key, Object
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.cluster import claim_objects, pod_objects
from metagpu.sim.cluster.document_forms import COLLECTIONS, check_document
from metagpu.sim.cluster.inspection import view_claim
from metagpu.sim.cluster.views import ClaimView
from metagpu.sim.kubelet.claims import ClaimManager
from metagpu.sim.machine.gpu import SimError

_TIMEOUT: Final = 20.0
"""Seconds that a command waits for what becomes of its pods; the client waits 30."""


class ClusterClaims:
    """The claims of a cluster, with their classes and templates.

    Args:
        api: the API server.
        manager: knows which claims are prepared.
        gpus: returns the indices of the node's GPUs by uuid.
    """

    def __init__(
        self, api: SimApiServer, manager: ClaimManager, gpus: Callable[[], Mapping[str, int]]
    ) -> None:
        self._api, self._manager, self._gpus = api, manager, gpus

    def add_classes(self) -> None:
        """Create the DeviceClasses of the chart, unless a user has changed them."""
        for key, content in claim_objects.device_classes():
            if key not in self._api.store.objects:
                self._api.store.put(key, content)

    # ---- what a user may do ----------------------------------------------------------------

    async def create(self, documents: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        """Create objects; return their names once it is decided what becomes of pods.

        Raises:
            SimError: a document is not valid, or exists.
        """
        objects = self._api.store.objects
        contents = dict(map(self._content, documents))
        if known := [key for key in contents if key in objects]:
            kind, _, name = known[0]
            raise SimError(f"{name} exists in {kind}; end it first, or take another name")
        for key, content in contents.items():
            self._api.store.put(key, content)
        pods = [key for key in contents if key[0] == "pods"]

        def decided() -> bool:
            return all(key not in objects or pod_objects.is_settled(objects[key]) for key in pods)

        with suppress(TimeoutError):
            await self._api.until(decided, within=_TIMEOUT)
        return [f"{it['kind'].lower()}/{it['metadata']['name']}" for it in documents]

    def _content(self, document: Mapping[str, Any]) -> tuple[Key, Object]:
        check_document(document)
        collection, metadata = COLLECTIONS[document["kind"]], document["metadata"]
        namespaced = collection != "deviceclasses"
        namespace = str(metadata.get("namespace") or "default") if namespaced else ""
        created = pod_objects.timestamp(time.time())
        content: Object = {
            "metadata": {
                "annotations": metadata.get("annotations") or {},
                "creationTimestamp": created,
            },
            "spec": document["spec"],
            "status": {"phase": "Pending"} if collection == "pods" else {},
        }
        return (collection, namespace, str(metadata["name"])), content

    async def end(self, name: str, namespace: str) -> bool:
        """Delete a claim and the pods that use it; return whether they are gone.

        Raises:
            SimError: there is no such claim.
        """
        objects, key = self._api.store.objects, ("resourceclaims", namespace, name)
        if key not in objects:
            known = ", ".join(str(it) for it in self.views()) or "none"
            raise SimError(f"no claim {name} in namespace {namespace}; there are: {known}")
        pods = [it for it in self._api.pods() if key in claim_objects.claims_of(it)]
        deletion = {"metadata": {"deletionTimestamp": pod_objects.timestamp(time.time())}}
        for pod in pods:
            if pod_objects.node_of(pod):
                self._api.store.merge(
                    pod_objects.key_of(pod), deletion, status=False, manager="kubectl"
                )
            else:
                self._api.store.delete(pod_objects.key_of(pod))
        self._api.store.merge(key, deletion, status=False, manager="kubectl")
        with suppress(TimeoutError):
            await self._api.until(lambda: key not in objects, within=_TIMEOUT)
        return key not in objects

    def views(self) -> Sequence[ClaimView]:
        """Return all claims, the oldest first."""
        pods, gpus = self._api.pods(), self._gpus()
        found = []
        for claim in self._of("resourceclaims"):
            key = claim_objects.claim_key(claim)
            users = [it for it in pods if key in claim_objects.claims_of(it)]
            is_prepared = self._manager.is_prepared(claim["metadata"]["uid"])
            found.append(view_claim(claim, users, gpus, is_prepared=is_prepared))
        return found

    # ---- what controllers do ---------------------------------------------------------------

    def keep(self) -> None:
        """Make claims of templates, release those of ended pods, delete orphans."""
        pods = self._api.pods()
        for pod in pods:
            self._make_claims(pod)
        for claim in list(self._of("resourceclaims")):
            self._release(claim, pods)

    def _make_claims(self, pod: Object) -> None:
        store, namespace = self._api.store, pod["metadata"]["namespace"]
        for entry in claim_objects.unmade_claims(pod):
            template = store.objects.get(
                ("resourceclaimtemplates", namespace, entry["resourceClaimTemplateName"])
            )
            if template is None:
                continue
            name, content = claim_objects.claim_of_template(pod, entry, template)
            store.put(("resourceclaims", namespace, name), content)
            key = pod_objects.key_of(pod)
            made = claim_objects.made_from_template(store.objects[key], entry["name"], name)
            store.merge(key, made, status=True, manager="kube-controller-manager")

    def _release(self, claim: Object, pods: Sequence[Object]) -> None:
        key, manager = claim_objects.claim_key(claim), "kube-controller-manager"
        if patch := claim_objects.released(claim, pods):
            claim = self._api.store.merge(key, patch, status=True, manager=manager)
        unwanted = "deletionTimestamp" in claim["metadata"]
        if (unwanted and not claim["status"].get("reservedFor")) or claim_objects.is_orphan(
            claim, pods
        ):
            self._api.store.delete(key)

    def _of(self, collection: str) -> Iterable[Object]:
        return [it for key, it in self._api.store.objects.items() if key[0] == collection]
