"""The sync of the node's labels, by a NodeFeature or by patches of the Node.

Where Node Feature Discovery (NFD) runs, its master puts the labels of a NodeFeature object on its
Node, and removes them with the object. Only that master needs the right to write Nodes for them.
The Node owns the object, so a Node's end deletes it.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import anyio
import structlog

from metagpu.core.errors import ClusterError
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.config_follower import MIG_STATE_LABEL, runs_mig_manager
from metagpu.plugins.cluster.gpu_labels import (
    METAGPU_PREFIX,
    LabelSettings,
    free_labels,
    node_labels,
)
from metagpu.plugins.cluster.node_object import (
    APPLY_PATCH,
    CONFLICT,
    FIELD_MANAGER,
    KubeObject,
    conflicting_labels,
    labels_differ,
    nfd_labels,
    owned_labels,
    without_labels,
    writable_labels,
)
from metagpu.plugins.cluster.watch import NodePatcher, WatchedObject

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient


_LABEL_FIELD: Final = ".metadata.labels."

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
            kinds = [resource.get("name") for resource in answer.get("resources") or ()]
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


@dataclass(eq=False)
class LabelSync:
    """Compares the Node's labels with the wanted labels, and writes the differences.

    Attributes:
        settings: returns what the labels depend on beside the snapshot.
        mig_state: returns the answer to mig-manager's label, `None` for no answer.
        node_feature: the object that may carry the labels.
        shows_free: whether there are labels about what is free.
        by_nfd: whether that object carries the labels, where NFD runs.
        missing: the labels that NFD has not put on the Node yet.
    """

    patcher: NodePatcher
    registry: Registry
    mig_state: Callable[[], str | None]
    settings: Callable[[], LabelSettings]
    node_feature: NodeFeature
    shows_free: bool = False
    by_nfd: bool = True
    missing: frozenset[str] = frozenset()
    _conflicting: frozenset[str] = frozenset()
    _has_labels: bool = False
    _old_object_deleted: bool = False

    async def reconcile(self) -> float | None:
        """Write the labels that differ, except those of other clients."""
        node = self.patcher.node.object
        if node is None:
            return None
        snapshot, state = self.registry.snapshot, self.mig_state()
        wanted = node_labels(snapshot, self.settings())
        if wanted and self.shows_free:
            wanted = {**wanted, **free_labels(snapshot)}
        self._has_labels |= bool(wanted)
        recheck, former = None, _former_nfd_labels(node)
        if self._has_labels:
            patched, recheck = await self._labels_to_patch(node, wanted, former)
        elif state is None:
            return None
        else:  # the labels of an earlier daemon stay until ours are known
            current = node["metadata"].get("labels") or {}
            patched = {name: current[name] for name in owned_labels(node) & current.keys()}

        if state is not None:
            # An answer, not a feature: mig-manager may write it too, and may have gone since.
            patched[MIG_STATE_LABEL] = state
            if not runs_mig_manager(node["metadata"].get("labels") or {}):
                former |= {MIG_STATE_LABEL}
        if labels_differ(node, patched) and not await self._hand_over(node):
            await self._write(patched, former)
        if not self.by_nfd:
            await self._delete_old_object(node)
        return recheck

    def report(self) -> dict[str, Any]:
        """Return the object with the labels, and missing ones: fields of a report."""
        carrier = self.node_feature
        carries = carrier.labels is not None
        return {
            "node_feature": f"{carrier.namespace}/{carrier.name}" if carries else None,
            "missing_labels": sorted(self.missing),
        }

    async def remove(self) -> None:
        """Remove all our labels.

        Raises:
            ClusterError: the API server does not answer, or refuses the change.
        """
        if self.patcher.node.object is None:
            return
        await self.patcher.apply("", {"metadata": {"labels": {}}})
        if self.node_feature.usable:  # its last write may have succeeded without an answer
            await self.node_feature.remove()

    async def _labels_to_patch(
        self, node: KubeObject, wanted: Mapping[str, str], former: AbstractSet[str]
    ) -> tuple[dict[str, str], float | None]:
        """Return the labels to patch and the delay of a recheck, in seconds.

        The labels are all, or those that NFD does not write.
        """
        if self.by_nfd and await self.node_feature.check_available():
            rest = await self._write_by_nfd(node, wanted)
            if rest is not None:
                return dict(rest), self.node_feature.recheck_after(self.missing)
        self.missing = frozenset()
        return dict(writable_labels(node, wanted, self._conflicting, former)), None

    async def _write_by_nfd(
        self, node: KubeObject, wanted: Mapping[str, str]
    ) -> Mapping[str, str] | None:
        """Write the labels to the NodeFeature; return those to patch besides.

        `None` means that the object was not written.
        """
        carrier = self.node_feature
        before = frozenset(carrier.labels or ())
        by_nfd = nfd_labels(node)
        # NFD would overwrite the values of other clients; a patch of ours would meet a conflict.
        self._conflicting |= conflicting_labels(node, wanted, by_nfd | before)
        mine = writable_labels(node, wanted, self._conflicting, before)
        missing = mine.keys() - (by_nfd & node["metadata"].get("labels", {}).keys())
        if not await carrier.write(mine, frozenset(missing)):
            return None

        self.missing = frozenset(missing)
        ours = owned_labels(node)
        return {name: mine[name] for name in missing if name in ours or carrier.overdue}

    async def _hand_over(self, node: KubeObject) -> bool:
        """Disown the labels that NFD manages by now; return whether there were any.

        The labels keep their values. Left out of our next apply, they would vanish for a moment.
        """
        managed = nfd_labels(node) & owned_labels(node) & (self.node_feature.labels or {}).keys()
        if not managed:
            return False
        # The list is written as a whole, and only over the version that was read.
        version = node["metadata"]["resourceVersion"]
        fields = {"resourceVersion": version, "managedFields": without_labels(node, managed)}
        try:
            await self.patcher.patch("", {"metadata": fields})
        except ClusterError as error:
            if error.status != CONFLICT:
                raise
        else:
            log.info("labels handed over to Node Feature Discovery", labels=len(managed))
        return True  # the changed Node triggers the next run

    async def _write(self, wanted: Mapping[str, str], former: AbstractSet[str]) -> None:
        """Apply labels, but those that other clients manage with other values.

        `former` labels are taken over: an NFD that has gone, or has lost our object, does not
        manage them any more.
        """
        try:
            await self.patcher.apply("", {"metadata": {"labels": dict(wanted)}})
        except ClusterError as error:
            conflicts = {field.removeprefix(_LABEL_FIELD) for field in error.fields} & wanted.keys()
            if error.status != CONFLICT or not conflicts:
                raise
            if others := conflicts - former:
                self._conflicting |= others
                log.info("labels of other field managers skipped", labels=sorted(others))
            rest = {name: value for name, value in wanted.items() if name not in others}
            force = bool(conflicts & former)
            await self.patcher.apply("", {"metadata": {"labels": rest}}, force=force)

    async def _delete_old_object(self, node: KubeObject) -> None:
        """Delete the object of an earlier daemon, if the Node has its labels."""
        if not self._old_object_deleted and _former_nfd_labels(node):
            await self.node_feature.remove()
            self._old_object_deleted = True


def _former_nfd_labels(node: KubeObject) -> frozenset[str]:
    """Return the labels that NFD has put on the node, if ours are among them."""
    names = nfd_labels(node)
    return names if any(name.startswith(METAGPU_PREFIX) for name in names) else frozenset()
