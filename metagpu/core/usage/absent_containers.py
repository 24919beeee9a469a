"""Detection of leases whose container has run and runs no longer.

The kubelet keeps a share for its container as long as it lists the pod, also while the container
fails again and again, or while the kubelet waits for a container runtime that does not answer. Only
the kubelet can end such a lease: the watch reports it.
"""

from collections.abc import Awaitable, Callable, Collection
from time import time

import anyio
import structlog

from metagpu.core.model.shares import Holder
from metagpu.core.state.events import ContainerAbsent
from metagpu.core.state.registry import Registry
from metagpu.core.usage.lease_differences import (
    claims_of_holders,
    describe_absence,
    shares_of_holders,
)
from metagpu.core.usage.timing import DEFAULT_TIMING, UsageTiming

log = structlog.get_logger()

RunningHolders = Callable[[Collection[Holder]], Awaitable[Collection[Holder]]]
"""Returns those of some holders whose containers are seen to run."""


class AbsentContainerWatch:
    """A watch for holders whose cgroup has gone, or has no process.

    A holder that was never seen to run is unknown: its cgroup may not be visible, and its image may
    still be on its way. So is a holder whose pod was created again under its name.

    Attributes:
        last_seen: the event loop's time when each holder was last seen to run.
        found: the holders that are absent now.
    """

    def __init__(
        self, registry: Registry, running: RunningHolders, timing: UsageTiming = DEFAULT_TIMING
    ) -> None:
        self.last_seen: dict[Holder, float] = {}
        self.found: dict[Holder, ContainerAbsent] = {}
        self._claims = claims_of_holders(registry.snapshot)
        self._registry = registry
        self._running = running
        self._timing = timing

    async def run(self) -> None:
        """Check all holders periodically, until cancelled."""
        while True:
            await anyio.sleep(self._timing.absent_period)
            await self._check()

    async def _check(self) -> None:
        asked = claims_of_holders(self._registry.snapshot)
        running = await self._running(asked.keys()) if asked else ()
        now, claims = anyio.current_time(), claims_of_holders(self._registry.snapshot)
        self.last_seen = {
            it: seen
            for it, seen in self.last_seen.items()
            if claims.get(it) == self._claims.get(it)
        }
        self.last_seen |= {
            it: now for it in running if it in claims and claims[it] == asked.get(it)
        }
        self._claims = claims
        absent = {
            it: now - seen
            for it, seen in self.last_seen.items()
            if now - seen >= self._timing.absent_after
        }
        self.found = {it: event for it, event in self.found.items() if it in absent}
        for holder in absent.keys() - self.found.keys():
            self._report(holder, absent[holder])

    def _report(self, holder: Holder, seconds: float) -> None:
        snapshot = self._registry.snapshot
        shares = shares_of_holders(snapshot)[holder]
        pod = snapshot.pods.find(holder, None)
        event = ContainerAbsent(holder, pod.uid if pod else None, shares, seconds, at=time())
        self.found[holder] = event
        log.warning(
            "container of a lease absent",
            container=str(holder),
            reason=describe_absence(event, snapshot),
            fix=f"kubectl describe pod -n {holder.namespace} {holder.pod}",
        )
        self._registry.events.publish(event)
