"""Labels by a NodeFeature object, where Node Feature Discovery (NFD) runs.

NFD's master puts the labels of such an object on its Node, and removes them with the object. Only
that master needs the right to write Nodes for them. The Node owns the object, so a Node's end
deletes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import anyio
import structlog

from metagpu.core.errors import ClusterError
from metagpu.plugins.cluster.node_object import APPLY_PATCH, FIELD_MANAGER
from metagpu.plugins.cluster.watch import WatchedObject

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

GROUP: Final = "/apis/nfd.k8s-sigs.io/v1alpha1"
NODE_NAME: Final = "nfd.node.kubernetes.io/node-name"
"""The label that names the Node of a NodeFeature."""
RETRY_PERIOD: Final = 600.0
"""Seconds before the next check for NFD, where it is missing or refuses our object."""
_FORBIDDEN: Final = 403
_NOT_FOUND: Final = 404
_INVALID: Final = frozenset((400, 422))
"""Answers of an NFD whose kind does not fit our object."""

log = structlog.get_logger()


@dataclass(eq=False)
class NodeFeature:
    """The NodeFeature object with our labels.

    Attributes:
        node: the Node of the labels, which owns the object.
        namespace: the object's namespace.
        labels: the object's labels, `None` without an object of ours.
        problem: why NFD does not write our labels although it runs; empty without a problem.
    """

    client: "KubeClient"
    node: WatchedObject
    namespace: str
    labels: Mapping[str, str] | None = None
    problem: str = ""
    _available: bool | None = None
    _checked_at: float = 0.0
    _changed_at: float = 0.0
    _written_at: float = 0.0

    @property
    def name(self) -> str:
        """The object's name; GPU Feature Discovery's sorts after it, and so wins."""
        return f"{FIELD_MANAGER}-{self.node.name}"

    @property
    def usable(self) -> bool:
        """True while NFD runs and accepts our object, as far as is known."""
        return self._available is True

    @property
    def overdue(self) -> bool:
        """Return whether NFD has had these labels for longer than `nfd_timeout`."""
        return anyio.current_time() >= self._changed_at + self.client.timing.nfd_timeout

    def recheck_after(self, missing: frozenset[str]) -> float | None:
        """Return the seconds until the next check for missing labels, `None` without any."""
        return self.client.timing.nfd_timeout if missing else None

    async def check_available(self) -> bool:
        """Return whether NFD runs and accepts our object; read the object the first time.

        Raises:
            ClusterError: the API server does not answer, or answers something else.
        """
        retry_at = self._checked_at + RETRY_PERIOD
        if self._available or (self._available is False and anyio.current_time() < retry_at):
            return bool(self._available)

        self._checked_at = anyio.current_time()
        try:
            answer = await self.client.call("GET", GROUP)
            kinds = [it.get("name") for it in answer.get("resources") or ()]
            self._available = "nodefeatures" in kinds and await self._read()
        except ClusterError as error:
            self._suspend(error)
        if self._available:
            log.info("node labels written by NFD", object=f"{self.namespace}/{self.name}")
        return bool(self._available)

    async def write(self, labels: Mapping[str, str], missing: frozenset[str]) -> bool:
        """Write exactly these labels to the object; return whether the object has them.

        Args:
            labels: the values by name.
            missing: labels that NFD has not put on the Node yet. After a while the object is
                written again, because another client may have deleted it.

        Raises:
            ClusterError: the API server does not answer, or answers something else.
        """
        same, now = labels == self.labels, anyio.current_time()
        # Values may change with each pod; what NFD is late with are names.
        named = self.labels is not None and labels.keys() == self.labels.keys()
        timeout = self.client.timing.nfd_timeout
        if named and missing and self.overdue:
            self.problem = self._overdue_problem(missing)
        elif named and not missing:
            self.problem = ""
        if same and (not missing or now < self._written_at + timeout):
            return True

        uid = self.node.object["metadata"].get("uid") if self.node.object else None
        body: Mapping[str, Any] = {
            "apiVersion": "nfd.k8s-sigs.io/v1alpha1",
            "kind": "NodeFeature",
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "labels": {
                    NODE_NAME: self.node.name,
                    "app.kubernetes.io/managed-by": FIELD_MANAGER,
                },
                "ownerReferences": [
                    {"apiVersion": "v1", "kind": "Node", "name": self.node.name, "uid": uid}
                ],
            },
            "spec": {"labels": dict(labels)},
        }
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        try:
            await self.client.call("PATCH", self._path, query=query, body=body, content=APPLY_PATCH)
        except ClusterError as error:
            self._suspend(error)
            return False
        self._changed_at, self._written_at = self._changed_at if named else now, now
        self.labels = dict(labels)
        return True

    async def remove(self) -> None:
        """Delete the object, if possible: NFD removes its labels from the Node.

        Raises:
            ClusterError: the API server does not answer, or answers something else.
        """
        self.labels = None
        try:
            await self.client.call("DELETE", self._path)
        except ClusterError as error:
            if error.status not in (_FORBIDDEN, _NOT_FOUND):
                raise

    @property
    def _path(self) -> str:
        return f"{GROUP}/namespaces/{self.namespace}/nodefeatures/{self.name}"

    async def _read(self) -> bool:
        try:
            found = await self.client.call("GET", self._path)
        except ClusterError as error:
            if error.status != _NOT_FOUND:
                raise
        else:
            self.labels = (found.get("spec") or {}).get("labels") or {}
        self._changed_at = self._written_at = anyio.current_time()
        return True

    def _suspend(self, error: ClusterError) -> None:
        """Patch labels for a while; raise an error that may be over at the next request."""
        if error.status not in {_FORBIDDEN, _NOT_FOUND, *_INVALID}:
            raise error
        self._available, self._checked_at, self.labels = False, anyio.current_time(), None
        self.problem = "" if error.status == _NOT_FOUND else f"{error}; labels are patched"
        if self.problem:
            log.warning("nodefeature rejected; labels are patched", error=str(error))

    def _overdue_problem(self, missing: frozenset[str]) -> str:
        return (
            f"nfd-master has not put {len(missing)} of our labels on the node within "
            f"{self.client.timing.nfd_timeout:g} s ({min(missing)} …); metagpu patches them. Check "
            "that nfd-master runs, and its denyLabelNs, labelWhiteList and restrictions"
        )
