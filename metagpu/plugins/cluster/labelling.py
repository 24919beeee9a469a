"""The node's labels, kept true: by a NodeFeature where there is NFD, else by patching the Node."""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import structlog

from metagpu.core.errors import ClusterError
from metagpu.core.registry import Registry
from metagpu.plugins.cluster.choice import MIG_STATE
from metagpu.plugins.cluster.labels import OURS, labels
from metagpu.plugins.cluster.node import (
    Object,
    disowned,
    labels_differ,
    others_labels,
    ours_to_write,
    owned_labels,
    taken_by_nfd,
)
from metagpu.plugins.cluster.node_feature import NodeFeature
from metagpu.plugins.cluster.writing import CONFLICT, Writer

_LABEL_FIELD: Final = ".metadata.labels."

log = structlog.get_logger()


@dataclass(eq=False)
class Labeller:
    """Compares the Node's labels with what is known, and writes what differs.

    Attributes:
        mig_state: what to answer to mig-manager's label, `None` for nothing.
        node_feature: the object that may carry them.
        by_nfd: whether it shall, where it can.
        missing: the labels that NFD has not put on the Node yet.
    """

    writer: Writer
    registry: Registry
    mig_state: Callable[[], str | None]
    node_feature: NodeFeature
    by_nfd: bool = True
    missing: frozenset[str] = frozenset()
    _refused: frozenset[str] = frozenset()
    _labelled: bool = False
    _retired: bool = False

    async def label(self) -> float | None:
        """Say what is true; labels that others write with other values are left to them."""
        node = self.writer.node.object
        if node is None:
            return None
        wanted, state = labels(self.registry.snapshot), self.mig_state()
        self._labelled |= bool(wanted)
        again, former = None, _given_before(node)
        if self._labelled:
            patched, again = await self._to_patch(node, wanted, former)
        elif state is None:
            return None
        else:  # what an earlier daemon said stays until we know better
            given = node["metadata"].get("labels") or {}
            patched = {name: given[name] for name in owned_labels(node) & given.keys()}

        if state is not None:
            patched[MIG_STATE] = state  # an answer, not a feature: mig-manager may write it too
        if labels_differ(node, patched) and not await self._handed_over(node):
            await self._write(patched, former)
        if not self.by_nfd:
            await self._retire(node)
        return again

    def report(self) -> dict[str, Any]:
        """Say what carries the labels, and which are not on the Node yet."""
        carrier = self.node_feature
        carries = carrier.carried is not None
        return {
            "nodeFeature": f"{carrier.namespace}/{carrier.name}" if carries else None,
            "labelsMissing": sorted(self.missing),
        }

    async def leave(self) -> None:
        """Take all labels back.

        Raises:
            ClusterError: if the API server does not answer, or does not allow it.
        """
        if self.writer.node.object is None:
            return
        await self.writer.apply("", {"metadata": {"labels": {}}})
        if self.node_feature.usable:  # an answer to its writing may not have come
            await self.node_feature.remove()

    async def _to_patch(
        self, node: Object, wanted: Mapping[str, str], former: AbstractSet[str]
    ) -> tuple[dict[str, str], float | None]:
        """Give the labels to be patched, all or what NFD does not do; and when to look again."""
        if self.by_nfd and await self.node_feature.opened():
            beside = await self._carried(node, wanted)
            if beside is not None:
                return dict(beside), self.node_feature.due(self.missing)
        self.missing = frozenset()
        return dict(ours_to_write(node, wanted, self._refused, former)), None

    async def _carried(self, node: Object, wanted: Mapping[str, str]) -> Mapping[str, str] | None:
        """Have the NodeFeature carry the labels; give those to be patched beside it.

        `None` if it cannot.
        """
        carrier = self.node_feature
        before = frozenset(carrier.carried or ())
        kept = taken_by_nfd(node)
        # NFD would write over what others have said, where a patch of ours meets their refusal.
        self._refused |= others_labels(node, wanted, kept | before)
        mine = ours_to_write(node, wanted, self._refused, before)
        missing = mine.keys() - (kept & node["metadata"].get("labels", {}).keys())
        if not await carrier.carry(mine, frozenset(missing)):
            return None

        self.missing = frozenset(missing)
        ours = owned_labels(node)
        return {it: mine[it] for it in missing if it in ours or carrier.late}

    async def _handed_over(self, node: Object) -> bool:
        """Give up what we have applied ourselves and NFD keeps by now; tell whether there was any.

        The labels stay as they are; left out of what we apply they would go, for a moment.
        """
        given = taken_by_nfd(node) & owned_labels(node) & (self.node_feature.carried or {}).keys()
        if not given:
            return False
        # The list is written as a whole, and only over the one that was read.
        version = node["metadata"]["resourceVersion"]
        fields = {"resourceVersion": version, "managedFields": disowned(node, given)}
        try:
            await self.writer.patch("", {"metadata": fields})
        except ClusterError as error:
            if error.status != CONFLICT:
                raise
        else:
            log.info("labels are Node Feature Discovery's to keep now", labels=len(given))
        return True  # the Node that comes of it has us look again

    async def _write(self, wanted: Mapping[str, str], former: AbstractSet[str]) -> None:
        """Apply labels; those that others manage with another value are theirs.

        But for `former`: an NFD that has gone, or that has lost our object, manages them no more.
        """
        try:
            await self.writer.apply("", {"metadata": {"labels": dict(wanted)}})
        except ClusterError as error:
            clashes = {it.removeprefix(_LABEL_FIELD) for it in error.fields} & wanted.keys()
            if error.status != CONFLICT or not clashes:
                raise
            if refused := clashes - former:
                self._refused |= refused
                log.info("labels are left to who writes them already", labels=sorted(refused))
            rest = {name: value for name, value in wanted.items() if name not in refused}
            force = bool(clashes & former)
            await self.writer.apply("", {"metadata": {"labels": rest}}, force=force)

    async def _retire(self, node: Object) -> None:
        """Delete the object of an earlier daemon, if its labels show that there is one."""
        if not self._retired and _given_before(node):
            await self.node_feature.remove()
            self._retired = True


def _given_before(node: Object) -> frozenset[str]:
    """Name the labels that NFD has put on the node, if ours are among them."""
    kept = taken_by_nfd(node)
    return kept if any(name.startswith(OURS) for name in kept) else frozenset()
