"""The sync of the node's labels, by a NodeFeature or by patches of the Node."""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import structlog

from metagpu.core.errors import ClusterError
from metagpu.core.state.registry import Registry
from metagpu.plugins.cluster.config_follower import MIG_STATE_LABEL
from metagpu.plugins.cluster.gpu_labels import (
    METAGPU_PREFIX,
    Strategies,
    free_labels,
    node_labels,
)
from metagpu.plugins.cluster.node_feature import NodeFeature
from metagpu.plugins.cluster.node_object import (
    CONFLICT,
    KubeObject,
    conflicting_labels,
    labels_differ,
    nfd_labels,
    owned_labels,
    without_labels,
    writable_labels,
)
from metagpu.plugins.cluster.watch import NodePatcher

_LABEL_FIELD: Final = ".metadata.labels."

log = structlog.get_logger()


@dataclass(eq=False)
class LabelSync:
    """Compares the Node's labels with the wanted labels, and writes the differences.

    Attributes:
        strategies: the sharing strategy of each backend, by its name.
        mig_state: returns the answer to mig-manager's label, `None` for no answer.
        node_feature: the object that may carry the labels.
        shows_free: whether there are labels about what is free.
        by_nfd: whether that object carries the labels, where NFD runs.
        missing: the labels that NFD has not put on the Node yet.
    """

    patcher: NodePatcher
    registry: Registry
    mig_state: Callable[[], str | None]
    strategies: Strategies
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
        wanted = node_labels(snapshot, self.strategies)
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
            # An answer, not a feature: mig-manager may write it too.
            patched[MIG_STATE_LABEL] = state
        if labels_differ(node, patched) and not await self._hand_over(node):
            await self._write(patched, former)
        if not self.by_nfd:
            await self._delete_old_object(node)
        return recheck

    def report(self) -> dict[str, Any]:
        """Return the object with the labels, and the labels that the Node lacks."""
        carrier = self.node_feature
        carries = carrier.labels is not None
        return {
            "nodeFeature": f"{carrier.namespace}/{carrier.name}" if carries else None,
            "missingLabels": sorted(self.missing),
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
        return {it: mine[it] for it in missing if it in ours or carrier.overdue}

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
            conflicts = {it.removeprefix(_LABEL_FIELD) for it in error.fields} & wanted.keys()
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
