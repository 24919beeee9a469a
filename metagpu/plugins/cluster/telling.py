"""What the node tells, kept true at the API server: labels, taint, condition, free amounts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import anyio
import structlog

from metagpu.core.errors import ClusterError
from metagpu.core.model import ResourceName
from metagpu.core.registry import Registry
from metagpu.core.snapshot import Snapshot
from metagpu.plugins.cluster.choice import MIG_STATE
from metagpu.plugins.cluster.following import Followed
from metagpu.plugins.cluster.labels import labels
from metagpu.plugins.cluster.node import (
    MANAGER,
    Object,
    capacity_of,
    conditions_differ,
    conditions_of,
    healthy_of,
    labels_differ,
    ours_to_write,
    owned_labels,
    stale_amounts,
    taints_left,
)

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import Client

RISE: Final = 0.3
"""Seconds that a number waits to rise: until then the kubelet may not know the shares yet."""
PROMPT: Final = 0.02
"""Seconds between two looks for what has to be lowered: till then pods are sent by the old one."""
_CONFLICT: Final = 409
_LABEL_FIELD: Final = ".metadata.labels."
_APPLY: Final = "application/apply-patch+yaml"
_MERGE: Final = "application/merge-patch+json"

log = structlog.get_logger()


@dataclass(eq=False)
class Teller:
    """Compares the Node object with what is known, and writes what differs; nothing else.

    Attributes:
        mig_state: what to answer to mig-manager's label, `None` for nothing.
    """

    client: "Client"
    node: Followed
    registry: Registry
    mig_state: Callable[[], str | None]
    _refused: frozenset[str] = frozenset()
    _labelled: bool = False
    _lowered: dict[ResourceName, frozenset[str]] = field(default_factory=dict)

    async def label(self) -> None:
        """Apply the labels; those that others apply with other values are left to them."""
        node = self.node.object
        if node is None:
            return
        wanted, state = dict(labels(self.registry.snapshot)), self.mig_state()
        self._labelled |= bool(wanted)
        if not self._labelled:
            if state is None:
                return
            # What an earlier daemon said stays until we know better.
            given = node["metadata"].get("labels") or {}
            wanted = {name: given[name] for name in owned_labels(node) & given.keys()}
        if state is not None:
            wanted[MIG_STATE] = state

        mine = ours_to_write(node, wanted, self._refused)
        if not labels_differ(node, mine):
            return
        try:
            await self._apply("", {"metadata": {"labels": dict(mine)}})
        except ClusterError as error:
            refused = {it.removeprefix(_LABEL_FIELD) for it in error.fields} & mine.keys()
            if error.status != _CONFLICT or not refused:
                raise
            self._refused |= refused
            log.info("labels are left to who writes them already", labels=sorted(refused))
            await self._apply("", {"metadata": {"labels": dict(_without(mine, refused))}})

    async def lift_taint(self) -> None:
        """Take the startup taint away once the node tells of every resource."""
        node = self.node.object
        if node is None:
            return
        left = taints_left(node, capacity_of(self.registry.snapshot))
        if left is None:
            return
        # The list has no keys: it is written as a whole, and only over the one that was read.
        version = node["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, "spec": {"taints": left or None}}
        try:
            await self._patch("", body)
        except ClusterError as error:
            if error.status != _CONFLICT:
                raise
            return  # somebody was faster, and what they wrote has us look again
        log.info("the startup taint is lifted")

    async def judge(self) -> None:
        """Say in conditions how the GPUs are."""
        node, wanted = self.node.object, conditions_of(self.registry.snapshot)
        if node is None or not wanted or not conditions_differ(node, wanted):
            return
        conditions = [dict(each) for each in wanted]
        await self._apply("/status", {"status": {"conditions": conditions}}, force=True)

    async def lower(self) -> None:
        """Take from the node's allocatable amounts what cannot be had any more, at once."""
        if (node := self.node.object) is None:
            return
        amounts = stale_amounts(node, healthy_of(self.registry.snapshot), rising=False)
        await self._write(amounts)

    async def rise(self) -> None:
        """Give back what `lower` took, once the kubelet knows; its own numbers are not touched."""
        if not self._lowered:
            return
        await anyio.sleep(RISE)
        if (node := self.node.object) is None:
            return
        shown = _allocatable(node)
        self._lowered = {it: ours for it, ours in self._lowered.items() if shown.get(it) in ours}
        amounts = stale_amounts(node, healthy_of(self.registry.snapshot), rising=True)
        await self._write({it: n for it, n in amounts.items() if it in self._lowered})

    async def leave(self) -> None:
        """Take labels and condition back."""
        if self.node.object is None:
            return
        await self._apply("", {"metadata": {"labels": {}}})
        await self._apply("/status", {"status": {"conditions": []}}, force=True)

    async def _write(self, amounts: Mapping[ResourceName, int]) -> None:
        if not amounts:
            return
        before = _allocatable(self.node.object or {})
        numbers = {resource: str(count) for resource, count in amounts.items()}
        await self._patch("/status", {"status": {"allocatable": numbers}})
        # The number before counts too: what we are told may be older than what we have written.
        self._lowered |= {it: frozenset((before[it], n)) for it, n in numbers.items()}

    async def _patch(self, part: str, body: Object) -> None:
        await self.client.call("PATCH", self._path + part, body=body, content=_MERGE)

    async def _apply(self, part: str, said: Mapping[str, Any], *, force: bool = False) -> None:
        """Apply fields in our name: what we applied before and leave out now goes."""
        metadata = {"name": self.node.name, **said.get("metadata", {})}
        if self.node.object is not None:
            metadata["uid"] = self.node.object["metadata"].get("uid")  # or it would make a Node
        body = {"apiVersion": "v1", "kind": "Node", **said, "metadata": metadata}
        query = {"fieldManager": MANAGER, "force": "true" if force else "false"}
        await self.client.call("PATCH", self._path + part, query=query, body=body, content=_APPLY)

    @property
    def _path(self) -> str:
        return f"{self.node.path}/{self.node.name}"


def _allocatable(node: Object) -> Mapping[str, str]:
    shown: Mapping[str, str] = (node.get("status") or {}).get("allocatable") or {}
    return shown


def _without(values: Mapping[str, str], names: set[str]) -> Mapping[str, str]:
    return {name: value for name, value in values.items() if name not in names}


def look(snapshot: Snapshot) -> object:
    """Give what has to change for a look at the node to be worth it; cheap, it is taken often."""
    gpus = tuple(
        (
            *(state.gpu, state.verdict, state.withheld, state.suspended, state.paused),
            *(state.faults, state.broken),
            (state.cordon, state.leases) if state.cordon else None,  # what is free is shut then
        )
        for state in snapshot.gpus.values()
    )
    return gpus, snapshot.offers, snapshot.topology, snapshot.versions, snapshot.rivals
