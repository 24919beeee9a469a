"""A Node object without a kubelet: the scheduler allocates claims and binds pods, and none runs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from metagpu.core.devices.devices import gpu_of_device
from tests.e2e.cluster import NAMESPACE
from tests.e2e.rig.api import Api
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.kubectl import Document, Kubectl
from tests.e2e.rig.node import Node
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.waiting import Found, wait_for

DRIVER = "gpu.metagpu.io"
NODE = "without-kubelet"
MARK = {"metagpu-e2e/node": NODE}
NODES, SLICES = "/api/v1/nodes", "/apis/resource.k8s.io/v1/resourceslices"
SETTLED_S, PAUSE_S = 60.0, 0.03
AT_ONCE = {"gracePeriodSeconds": 0}
"""The options of a deletion that waits for no kubelet."""


@dataclass(frozen=True)
class Allocation:
    """One device that the scheduler allocated to a claim.

    Attributes:
        consumed: the value of each consumed capacity.
    """

    request: str
    pool: str
    device: str
    consumed: Mapping[str, str]

    @property
    def gpu(self) -> str:
        """The GPU of the device."""
        return gpu_of_device(self.device)


def together(*parts: Iterable[Document], pool: str = NODE) -> list[Document]:
    """Return slices of several configurations as those of one node, in pools of one name."""
    found = [spec for part in parts for spec in part]
    counts = Counter(document["pool"]["name"] for document in found)
    return [
        {
            **document,
            "pool": {
                **document["pool"],
                "name": document["pool"]["name"].replace(NODE, pool, 1),
                "resourceSliceCount": counts[document["pool"]["name"]],
            },
        }
        for document in found
    ]


class FakeNode:
    """A Node object that the test keeps, and claims of pods that only land there."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        self._claims = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims"

    def __enter__(self) -> Self:
        """Create the Node, without a device."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "reason": "Test"}
        amounts = {"cpu": "100", "memory": "100Gi", "pods": "5000"}
        self._api.call(
            "POST",
            NODES,
            {
                "metadata": {"name": NODE, "labels": MARK},
                "spec": {"taints": [{"key": next(iter(MARK)), "effect": "NoSchedule"}]},
                "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]},
            },
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Delete the pods, their claims, the ResourceSlices and the Node."""
        self.clear()
        self._api.call("DELETE", f"{NODES}/{NODE}")

    def clear(self) -> None:
        """Delete all but the Node, and wait until claims and ResourceSlices are gone."""
        self.end(*(name for name, document in self._pods().items() if _is_here(document)))
        self._api.call("DELETE", f"{SLICES}?fieldSelector=spec.nodeName={NODE}")

    def publish(self, specs: Iterable[Mapping[str, Any]], first: int = 0) -> None:
        """Create ResourceSlices of these `spec`s, named by numbers from FIRST on.

        Raises:
            RigError: the API server refuses one, or drops a part of it.
        """
        for number, spec in enumerate(specs, first):
            metadata = {"name": f"{number:05x}-{NODE}"}
            stored = self._api.call("POST", SLICES, {"metadata": metadata, "spec": spec})
            if dropped := list(_missing(spec, stored["spec"], "spec")):
                raise RigError(f"the API server dropped {', '.join(dropped)}")

    def ask(
        self,
        name: str,
        *requests: Mapping[str, Any],
        constraints: Sequence[Document] = (),
        config: Sequence[Document] = (),
        group: str = "",
    ) -> None:
        """Create a claim and the pod that waits for it, in a PodGroup or in none."""
        lists = {"constraints": list(constraints), "config": list(config)}
        devices: Document = {"requests": list(requests), **lists}
        claim = {"metadata": {"name": name}, "spec": {"devices": devices}}
        self._api.call("POST", self._claims, claim)
        self._api.create(self._namespace, _pod(name, group))

    def settled(self, name: str) -> tuple[Allocation, ...]:
        """Wait for the scheduler's decision; return the devices, none where it found none."""

        def decided() -> Document:
            pod = self._pods()[name]
            conditions = {
                condition["type"]: condition for condition in pod["status"].get("conditions", ())
            }
            if "PodScheduled" not in conditions:
                raise RigError(f"{name} has no PodScheduled")
            return pod

        found = wait_for(
            f"{name} to be scheduled or not", decided, within_s=SETTLED_S, pause_s=PAUSE_S
        )
        return self.devices(name) if found["spec"].get("nodeName") else ()

    def allocate(
        self,
        name: str,
        *requests: Mapping[str, Any],
        constraints: Sequence[Document] = (),
        config: Sequence[Document] = (),
    ) -> tuple[Allocation, ...]:
        """Create a claim and its pod; return its devices, none where there are none."""
        self.ask(name, *requests, constraints=constraints, config=config)
        return self.settled(name)

    def await_allocated(self, name: str) -> tuple[Allocation, ...]:
        """Wait until a claim has devices, and return them."""
        return wait_for(
            f"{name} to be allocated",
            lambda: self.devices(name),
            within_s=SETTLED_S,
            pause_s=PAUSE_S,
        )

    def devices(self, name: str) -> tuple[Allocation, ...]:
        """Return the devices of a claim now, none without an allocation."""
        return allocations_of(self._api.call("GET", f"{self._claims}/{name}"))

    def claims(self) -> dict[str, Document]:
        """Return all claims, by name."""
        return self._api.objects(self._claims)

    def slices(self) -> list[Document]:
        """Return the `spec` of every ResourceSlice of the Node."""
        path = f"{SLICES}?fieldSelector=spec.nodeName={NODE}"
        return [entry["spec"] for entry in self._api.objects(path).values()]

    def end(self, *names: str) -> None:
        """Delete pods with their claims, and wait until the devices are free."""
        for name in names:
            self._api.call("DELETE", f"/api/v1/namespaces/{self._namespace}/pods/{name}", AT_ONCE)
            self._api.call("DELETE", f"{self._claims}/{name}")

        def gone() -> bool:
            if left := set(names) & self.claims().keys():
                raise RigError(f"left are {sorted(left)}")
            return True

        _await("claims to be deallocated", gone)

    def _pods(self) -> dict[str, Document]:
        return self._api.pods(self._namespace)


@contextmanager
def fake_node(node: Node) -> Iterator[FakeNode]:
    """Keep a Node without a kubelet beside the one of the tests, with all DeviceClasses."""
    with dra_objects(node.kubectl), node.api() as api, FakeNode(api, NAMESPACE) as fake:
        yield fake


@contextmanager
def dra_objects(kubectl: Kubectl) -> Iterator[None]:
    """Create the DeviceClasses, rights and policies of DRA until the block ends."""
    manifest = (REPOSITORY / "deploy" / "dra.yaml").read_text()
    kubectl.apply(manifest)
    try:
        yield
    finally:
        kubectl("delete", "-f", "-", feed=manifest)


def exactly(name: str, kind: str, count: int = 1, **more: object) -> Document:
    """Return a request of COUNT devices of a class, with further fields."""
    return {"name": name, "exactly": {"deviceClassName": kind, "count": count, **more}}


def capacity(**amounts: object) -> Document:
    """Return the field of a request that names an amount of a capacity."""
    return {"requests": {name: str(amount) for name, amount in amounts.items()}}


def _pod(name: str, group: str) -> Document:
    main = {"name": "main", "image": BUSYBOX_IMAGE, "resources": {"claims": [{"name": "gpu"}]}}
    return {
        "metadata": {"name": name},
        "spec": {
            "containers": [main],
            "nodeSelector": MARK,
            "tolerations": [{"operator": "Exists"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
            **({"schedulingGroup": {"podGroupName": group}} if group else {}),
        },
    }


def _await(condition: str, probe: Callable[[], Found | None]) -> Found:
    return wait_for(condition, probe, within_s=SETTLED_S, pause_s=PAUSE_S)


def _is_here(pod: Document) -> bool:
    return bool(pod["spec"].get("nodeSelector") == MARK)


def allocations_of(claim: Document) -> tuple[Allocation, ...]:
    """Return the devices of a ResourceClaim, none without an allocation."""
    devices = claim.get("status", {}).get("allocation", {}).get("devices", {})
    return tuple(
        Allocation(
            result["request"], result["pool"], result["device"], result.get("consumedCapacity", {})
        )
        for result in devices.get("results", ())
    )


def _missing(sent: object, stored: object, path: str) -> Iterable[str]:
    """Yield the paths of what was sent and is not stored."""
    if isinstance(sent, Mapping) and isinstance(stored, Mapping):
        for key, value in sent.items():
            if key not in stored:
                yield f"{path}.{key}"
            else:
                yield from _missing(value, stored[key], f"{path}.{key}")
    elif isinstance(sent, Sequence) and isinstance(stored, Sequence) and not isinstance(sent, str):
        if len(sent) != len(stored):
            yield path
        for number, (one, other) in enumerate(zip(sent, stored, strict=False)):
            yield from _missing(one, other, f"{path}[{number}]")
