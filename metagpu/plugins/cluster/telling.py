"""What the node tells, kept true at the API server: taint, condition, free amounts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import anyio
import structlog

from metagpu.core.errors import ClusterError
from metagpu.core.model import ResourceName
from metagpu.core.registry import Registry
from metagpu.core.snapshot import Snapshot
from metagpu.plugins.cluster.following import Followed
from metagpu.plugins.cluster.node import (
    Object,
    capacity_of,
    conditions_differ,
    conditions_of,
    healthy_of,
    stale_amounts,
    taints_left,
)
from metagpu.plugins.cluster.writing import CONFLICT, Writer

RISE: Final = 0.3
"""Seconds that a number waits to rise: until then the kubelet may not know the shares yet."""
PROMPT: Final = 0.02
"""Seconds between two looks for what has to be lowered: till then pods are sent by the old one."""

log = structlog.get_logger()


@dataclass(eq=False)
class Teller:
    """Compares the Node object with what is known, and writes what differs; nothing else.

    Attributes:
        writer: knows the Node, and writes it.
    """

    writer: Writer
    registry: Registry
    _lowered: dict[ResourceName, frozenset[str]] = field(default_factory=dict)

    @property
    def node(self) -> Followed:
        """The Node as it was told."""
        return self.writer.node

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
            await self.writer.patch("", body)
        except ClusterError as error:
            if error.status != CONFLICT:
                raise
            return  # somebody was faster, and what they wrote has us look again
        log.info("the startup taint is lifted")

    async def judge(self) -> None:
        """Say in conditions how the GPUs are."""
        node, wanted = self.node.object, conditions_of(self.registry.snapshot)
        if node is None or not wanted or not conditions_differ(node, wanted):
            return
        conditions = [dict(each) for each in wanted]
        await self.writer.apply("/status", {"status": {"conditions": conditions}}, force=True)

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
        """Take the condition back.

        Raises:
            ClusterError: if the API server does not answer, or does not allow it.
        """
        if self.node.object is not None:
            await self.writer.apply("/status", {"status": {"conditions": []}}, force=True)

    async def _write(self, amounts: Mapping[ResourceName, int]) -> None:
        if not amounts:
            return
        before = _allocatable(self.node.object or {})
        numbers = {resource: str(count) for resource, count in amounts.items()}
        await self.writer.patch("/status", {"status": {"allocatable": numbers}})
        # The number before counts too: what we are told may be older than what we have written.
        self._lowered |= {it: frozenset((before[it], n)) for it, n in numbers.items()}


def _allocatable(node: Object) -> Mapping[str, str]:
    shown: Mapping[str, str] = (node.get("status") or {}).get("allocatable") or {}
    return shown


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
