"""Whether the kubelet that answers knows its pods: a restarted one lists none until it is told.

Leases never end on silence. A kubelet is believed that somebody has gone once it has had its time
and names a pod of the API server's, or once it leaves out nobody whom its own checkpoint names.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio import to_thread
from msgspec.structs import replace

from metagpu.core.facts import LeasesObserved
from metagpu.core.model import ShareId, gpu_of
from metagpu.core.snapshot import Snapshot
from metagpu.plugins.checkpoint import read_held
from metagpu.plugins.serving import identity_of

UNSETTLED: Final = 60.0
"""Seconds of answers, without a break, after which a kubelet that was started has its pods."""

_now = anyio.current_time
log = structlog.get_logger()


@dataclass(slots=True)
class Settling:
    """Judges the answers of the kubelets that come one after the other on a socket.

    Attributes:
        socket: where they answer.
        directory: the folder with the checkpoint, `None` to do without.
        node: ends the names of static pods, which a kubelet knows without the API server.
        settled: the one that answers now knows its pods, for good.
        since: from when on it has answered without a break, by the event loop's clock.
    """

    socket: Path
    directory: Path | None
    node: str
    clock: Callable[[], float] = time.time
    identity: tuple[int, int, int] | None = field(init=False, default=None)
    settled: bool = field(init=False, default=False)
    since: float | None = field(init=False, default=None)
    told: bool = field(init=False, default=False)

    async def judged(
        self, fact: LeasesObserved, pods: Iterable[str], snapshot: Snapshot
    ) -> LeasesObserved:
        """Say of an answer, in which these pods are named, whether it ends leases."""
        await self._recognise()
        if self.settled:
            return fact

        now = _now()
        self.since = now if self.since is None else self.since
        ripe = now - self.since >= UNSETTLED
        held = await to_thread.run_sync(read_held, self.directory) if self.directory else None
        if held is None:
            named = any(gpu_of(share) in snapshot.gpus for share in fact.holders)
            self.settled = ripe or named
        else:
            missing = {it for it in held - fact.holders.keys() if _matters(it, snapshot)}
            apis = any(not name.endswith(f"-{self.node}") for name in pods)
            self.settled = not missing or (ripe and apis)
            self._tell(len(missing))
        return replace(fact, settled=self.settled)

    def broken(self) -> None:
        """Note that the kubelet did not answer: what it says next is the first it says."""
        self.since = None

    async def _recognise(self) -> None:
        """Notice another kubelet; the first may have been there for long."""
        identity = await to_thread.run_sync(identity_of, self.socket)
        if identity is None or identity == self.identity:
            return
        first, self.identity = self.identity is None, identity
        self.settled, self.told, self.since = False, False, None
        if first:
            born = identity[2] / 1e9
            self.since = _now() - max(0.0, self.clock() - born)

    def _tell(self, missing: int) -> None:
        if not self.settled and not self.told:
            self.told = True
            log.warning(
                "the kubelet does not list all pods that its checkpoint names; no lease ends",
                shares=missing,
            )


def _matters(share: ShareId, snapshot: Snapshot) -> bool:
    """Tell whether an id is about a GPU of ours, or a MIG device, whoever gave it."""
    return gpu_of(share) in snapshot.gpus or share.startswith("MIG-")
