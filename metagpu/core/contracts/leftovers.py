"""Leftovers: made by metagpu on a node or at the API server, and left by its end."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from metagpu.core.contracts.backend import Backend
from metagpu.core.contracts.driver import Driver
from metagpu.core.contracts.programs import Daemons
from metagpu.core.errors import DriverError, MetagpuError, describe_error
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import Holder
from metagpu.core.model.snapshot import Snapshot


async def _nothing() -> None:
    pass


class Leftover(msgspec.Struct, frozen=True):
    """One thing that is left, and how to remove it.

    Attributes:
        kind: what it is, such as "MPS control daemon".
        where: its place, such as a path or the name of an object.
        remove: removes it; raises a `MetagpuError` or an `OSError` if it stays.
        stays: why it is not removed; empty if it can be.
        forced: whether it can be removed all the same, at the cost of pods.
    """

    kind: str
    where: str
    remove: Callable[[], Awaitable[None]] = _nothing
    stays: str = ""
    forced: bool = False


class Result(StrEnum):
    """The end of a leftover."""

    FOUND = "found"
    REMOVED = "removed"
    STAYS = "stays"


class Removal(msgspec.Struct, frozen=True):
    """The result of one leftover, with its reason."""

    kind: str
    where: str
    result: Result
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the removal as plain data."""
        return {
            "kind": self.kind,
            "where": self.where,
            "result": str(self.result),
            "reason": self.reason,
        }


class AbandonedNode(msgspec.Struct, frozen=True):
    """The node, as a search for leftovers sees it.

    Attributes:
        run_dir: the daemon's run folder.
        snapshot: GPUs and leases.
        assignments: the backends of the configuration, each with a GPU.
        holders: the containers with shares by the kubelet's list, also of GPUs that cannot be
            read; `None` where it does not say.
    """

    run_dir: Path
    daemons: Daemons
    driver: Driver
    snapshot: Snapshot
    assignments: Sequence[tuple[Gpu, Backend]]
    holders: Collection[Holder] | None

    @property
    def used_by(self) -> str:
        """The pods for which something has to stay; empty if none holds a share."""
        if self.holders is None:
            return "the kubelet does not say which pods hold shares"
        if not self.holders:
            return ""
        first, *others = sorted({f"{holder.namespace}/{holder.pod}" for holder in self.holders})
        return f"used by pod {first}" + (f" and {len(others)} others" if others else "")


async def settle(found: Leftover, *, wanted: bool, force: bool) -> Removal:
    """Remove a leftover if that is wanted and possible; return what became of it."""
    kept = found.stays and not (force and found.forced)
    if kept:
        hint = "; --force removes it" if found.forced else ""
        return Removal(found.kind, found.where, Result.STAYS, f"{found.stays}{hint}")
    if not wanted:
        return Removal(found.kind, found.where, Result.FOUND)
    try:
        await found.remove()
    except (MetagpuError, DriverError) as error:
        return Removal(found.kind, found.where, Result.STAYS, str(error))
    except OSError as error:
        return Removal(found.kind, found.where, Result.STAYS, describe_error(error))
    return Removal(found.kind, found.where, Result.REMOVED)
