"""The objects of a simulated cluster, as other components write them."""

from collections.abc import Mapping

from metagpu.sim.apiserver.nfd import KIND
from metagpu.sim.apiserver.objects import Object, ObjectStore


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
            "capacity": {it: str(n) for it, n in capacity.items()},
            "allocatable": {it: str(n) for it, n in allocatable.items()},
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
        limits = {it: str(count) for it, count in (requests or {}).items()}
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
        return [it for key, it in self.store.objects.items() if key[0] == "pods"]

    def node_features(self) -> list[Object]:
        """Return all NodeFeatures."""
        return [it for key, it in self.store.objects.items() if key[0] == KIND]

    def events(self) -> list[Object]:
        """Return all Events, the oldest first."""
        return [it for key, it in self.store.objects.items() if key[0] == "events"]
