"""ResourceClaims of the simulated cluster, their users and their controllers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from metagpu.sim.apiserver.objects import Key, Object
from metagpu.sim.apiserver.rest import APPLIED
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.cluster import claim_objects, pod_objects
from metagpu.sim.cluster.inspection import view_claim
from metagpu.sim.cluster.views import ClaimView
from metagpu.sim.kubelet.claims import ClaimManager
from metagpu.sim.machine.gpu import SimError

_OF_CHART: Final = {"app.kubernetes.io/managed-by": "Helm"}


def _is_of_chart(document: Object) -> bool:
    metadata = document["metadata"]
    is_applied = APPLIED in (metadata.get("annotations") or {})
    return not is_applied and _OF_CHART.items() <= (metadata.get("labels") or {}).items()


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
        """Create the chart's DeviceClasses for the drivers here; those of a user stay."""
        store = self._api.store
        drivers = {document["spec"]["driver"] for document in self._of("resourceslices")}
        for driver in sorted(drivers) or [claim_objects.DRIVER]:
            for key, content in claim_objects.device_classes(driver):
                before = store.objects.get(key)
                if before is None or (_is_of_chart(before) and before["spec"] != content["spec"]):
                    store.put(key, {**content, "metadata": {"labels": dict(_OF_CHART)}})

    def key(self, name: str, namespace: str) -> Key:
        """Return the key of a claim.

        Raises:
            SimError: there is no such claim.
        """
        key = ("resourceclaims", namespace, name)
        if key not in self._api.store.objects:
            known = ", ".join(str(view) for view in self.views()) or "none"
            raise SimError(f"no claim {name} in namespace {namespace}; there are: {known}")
        return key

    def users(self, claim: Key) -> Sequence[Key]:
        """Return the keys of the pods that use a claim."""
        pods = self._api.pods()
        return [pod_objects.key_of(pod) for pod in pods if claim in claim_objects.claims_of(pod)]

    def views(self) -> Sequence[ClaimView]:
        """Return all claims, the oldest first."""
        pods, gpus = self._api.pods(), self._gpus()
        found = []
        for claim in self._of("resourceclaims"):
            key = claim_objects.claim_key(claim)
            users = [pod for pod in pods if key in claim_objects.claims_of(pod)]
            is_prepared = self._manager.is_prepared(claim["metadata"]["uid"])
            found.append(view_claim(claim, users, gpus, is_prepared=is_prepared))
        return found

    # ---- what controllers do ---------------------------------------------------------------

    def keep(self) -> None:
        """Make classes, and claims of templates; release those of ended pods."""
        self.add_classes()
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
        if unwanted and not (claim.get("status") or {}).get("reservedFor"):
            self._api.store.delete(key)

    def _of(self, collection: str) -> Iterable[Object]:
        return [
            document for key, document in self._api.store.objects.items() if key[0] == collection
        ]
