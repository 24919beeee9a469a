"""Labels by way of a NodeFeature object, where Node Feature Discovery (NFD) is installed.

NFD's master puts the labels of such objects on their Node, and takes them away with the object. So
nobody but that master needs the right to write Nodes for them, and they go with the Node, which
owns the object.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import anyio
import structlog

from metagpu.core.errors import ClusterError
from metagpu.plugins.cluster.following import Followed
from metagpu.plugins.cluster.node import MANAGER

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import Client

GROUP: Final = "/apis/nfd.k8s-sigs.io/v1alpha1"
NODE_NAME: Final = "nfd.node.kubernetes.io/node-name"
"""The label by which NFD knows which Node an object is about."""
PATIENCE: Final = 60.0
"""Seconds that NFD's master has to put labels on the Node; then they are patched beside it."""
AGAIN: Final = 600.0
"""Seconds before NFD is looked for again where it was not, or where we may not write."""
_FORBIDDEN: Final = 403
_NOT_FOUND: Final = 404
_INVALID: Final = frozenset((400, 422))
"""Answers to an object that this NFD's kind has no place for."""
_APPLY: Final = "application/apply-patch+yaml"

log = structlog.get_logger()


@dataclass(eq=False)
class NodeFeature:
    """The object that carries our labels.

    Attributes:
        node: the Node that it is about, and that owns it.
        namespace: where it stands.
        carried: the labels that it has, `None` while there is none of ours.
        problem: why labels do not go this way although NFD is there; empty if they do.
    """

    client: "Client"
    node: Followed
    namespace: str
    carried: Mapping[str, str] | None = None
    problem: str = ""
    _there: bool | None = None
    _asked: float = 0.0
    _since: float = 0.0
    _applied: float = 0.0

    @property
    def name(self) -> str:
        """What it is called: sorted before GPU Feature Discovery's, so that that one's wins."""
        return f"{MANAGER}-{self.node.name}"

    @property
    def usable(self) -> bool:
        """Whether NFD is there, and lets us write, as far as is known."""
        return self._there is True

    @property
    def late(self) -> bool:
        """Whether NFD has had these labels for longer than it needs to put them on the Node."""
        return anyio.current_time() >= self._since + PATIENCE

    def due(self, missing: frozenset[str]) -> float | None:
        """Say after how many seconds to look for missing labels again."""
        return PATIENCE if missing else None

    async def opened(self) -> bool:
        """Tell whether NFD is there and we may write; what it has of us is known then.

        Raises:
            ClusterError: if the API server does not answer, or says something else.
        """
        if self._there or (self._there is False and anyio.current_time() < self._asked + AGAIN):
            return bool(self._there)

        self._asked = anyio.current_time()
        try:
            answer = await self.client.call("GET", GROUP)
            kinds = [it.get("name") for it in answer.get("resources") or ()]
            self._there = "nodefeatures" in kinds and await self._read()
        except ClusterError as error:
            self._give_up(error)
        if self._there:
            log.info("labels go by a NodeFeature", object=f"{self.namespace}/{self.name}")
        return bool(self._there)

    async def carry(self, labels: Mapping[str, str], missing: frozenset[str]) -> bool:
        """Let it have these labels and no others; tell whether it has.

        Args:
            labels: by name.
            missing: those that NFD has not put on the Node: after a while the object is written
                again, for somebody may have deleted it.

        Raises:
            ClusterError: if the API server does not answer, or says something else.
        """
        same, now = labels == self.carried, anyio.current_time()
        if same and missing and self.late:
            self.problem = _late(missing)
        elif same and not missing:
            self.problem = ""
        if same and (not missing or now < self._applied + PATIENCE):
            return True

        uid = self.node.object["metadata"].get("uid") if self.node.object else None
        body: Mapping[str, Any] = {
            "apiVersion": "nfd.k8s-sigs.io/v1alpha1",
            "kind": "NodeFeature",
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "labels": {NODE_NAME: self.node.name, "app.kubernetes.io/managed-by": MANAGER},
                "ownerReferences": [
                    {"apiVersion": "v1", "kind": "Node", "name": self.node.name, "uid": uid}
                ],
            },
            "spec": {"labels": dict(labels)},
        }
        query = {"fieldManager": MANAGER, "force": "true"}
        try:
            await self.client.call("PATCH", self._path, query=query, body=body, content=_APPLY)
        except ClusterError as error:
            self._give_up(error)
            return False
        self._since, self._applied = self._since if same else now, now
        self.carried = dict(labels)
        return True

    async def remove(self) -> None:
        """Delete it, if it is there and we may: NFD takes its labels off the Node.

        Raises:
            ClusterError: if the API server does not answer, or says something else.
        """
        self.carried = None
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
            self.carried = (found.get("spec") or {}).get("labels") or {}
        self._since = self._applied = anyio.current_time()
        return True

    def _give_up(self, error: ClusterError) -> None:
        """Go on without it for a while, unless the API server may answer better at once."""
        if error.status not in {_FORBIDDEN, _NOT_FOUND, *_INVALID}:
            raise error
        self._there, self._asked, self.carried = False, anyio.current_time(), None
        self.problem = "" if error.status == _NOT_FOUND else f"{error}; labels are patched"
        if self.problem:
            log.warning("labels cannot go by a NodeFeature", error=str(error))


def _late(missing: frozenset[str]) -> str:
    """Say that NFD's master does not do its part."""
    return (
        f"nfd-master has not put {len(missing)} of our labels on the node within {PATIENCE:g} s "
        f"({min(missing)} …); they are patched. See that it runs, and its denyLabelNs, "
        "labelWhiteList and restrictions"
    )
