"""Reports of containers that take more of a GPU's time than their shares give.

The driver gives each process with work an equal part of the time, whatever its container's shares.
Nothing is slowed down or ended (docs/decisions/0088).
"""

from collections.abc import Awaitable, Callable, Mapping
from time import time
from typing import Final, NamedTuple

import anyio
import msgspec
import structlog
from msgspec.structs import replace

from metagpu.core.config.memory import ComputeEnforcement, ComputePolicy
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Holder
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.events import TimeExceeded
from metagpu.core.state.registry import Registry
from metagpu.core.usage.accounting import GpuUsage, HeldParts
from metagpu.core.usage.collector import NodeUsage
from metagpu.core.usage.enforcer import memory_guard_of
from metagpu.core.usage.lease_differences import describe_gpu
from metagpu.core.usage.timing import DEFAULT_TIMING, UsageTiming

FULL: Final = 90
"""Percent of its time from which a GPU has none left: below, everybody gets what they ask for."""
TOLERANCE: Final = 5
"""Percent of a GPU's time by which readings may be wrong."""
REPEAT: Final = 3600.0
"""Seconds after which a container that goes on is reported again."""
_WANTING: Final = 0.8
"""Part of an equal share of the time from which a process may want more."""


class TimeUse(NamedTuple):
    """The use of a GPU's time by a container.

    Attributes:
        part: of the GPU, from 0 to 1, that its shares are.
        used: percent of the GPU's time.
        processes: number of its processes with use.
    """

    part: float = 0.0
    used: int = 0
    processes: int = 0


def time_uses(
    state: GpuState,
    account: GpuUsage,
    percents: Mapping[int, int],
    guards: Mapping[str, MemoryGuard],
) -> Mapping[Holder | None, TimeUse]:
    """Return who uses a GPU's time, `None` for processes of no such container. Pure.

    The containers are those whose backend gives them no compute of their own.
    """
    measure, found, left = HeldParts(state), dict[Holder | None, TimeUse](), dict(percents)
    for usage in account.containers:
        if memory_guard_of(usage, guards) is MemoryGuard.ENFORCER:
            own = [left.pop(process.pid, 0) for process in usage.processes]
            part, used, processes = found.get(usage.holder, TimeUse())
            # No lease names an init container: the shares are its own while it runs.
            own_part = measure.of_container(usage) or sum(map(measure.of_share, usage.shares))
            part = max(part, own_part)
            found[usage.holder] = TimeUse(part, used + sum(own), processes + sum(map(bool, own)))
    found[None] = TimeUse(0.0, sum(left.values()), sum(map(bool, left.values())))
    return found


def excess(uses: Mapping[Holder | None, TimeUse]) -> Mapping[Holder, float]:
    """Return the percent of a GPU's time that is taken beyond shares. Pure.

    Nobody takes too much of a GPU with time left, or where nobody else wants more. A process with
    clearly less than an equal part asks for no more: the driver would have given it. What such
    containers leave is divided by the shares of the others.
    """
    active = {holder: use for holder, use in uses.items() if use.used}
    total = sum(use.used for use in active.values())
    if total < FULL:
        return {}

    parts = sum(use.part for use in active.values())
    equal = total / sum(use.processes for use in active.values())
    wanting = {
        holder for holder, use in active.items() if use.used >= _WANTING * equal * use.processes
    }
    takers = {
        holder: use
        for holder, use in active.items()
        if holder in wanting or use.used * parts > total * use.part
    }
    held = sum(use.part for use in takers.values())
    given = held and sum(use.used for use in takers.values()) / held
    over = {holder: use.used - use.part * given for holder, use in takers.items()}
    if all(over[holder] >= -TOLERANCE for holder in wanting):
        return {}
    return {holder: more for holder, more in over.items() if holder and more > TOLERANCE}


class Overuse(msgspec.Struct, frozen=True):
    """The time of a GPU that a container takes beyond its shares.

    Attributes:
        at: the event loop's time of the last reading.
        seconds: of a whole GPU that it took beyond its shares.
        since: since when it takes more without a break; `None` while it does not.
        lasting: the seconds since then; `None` until the pool's window has passed.
        reported: when it was last reported.
    """

    at: float
    seconds: float = 0.0
    since: float | None = None
    lasting: float | None = None
    reported: float | None = None

    def after(self, more: float, now: float, window: float, gap: float) -> "Overuse":
        """Return the state after a reading of what it takes beyond its shares, in percent.

        A reading stands for the time since the one before, `gap` seconds at most.
        """
        since = (now if self.since is None else self.since) if more else None
        return replace(
            self,
            at=now,
            seconds=self.seconds + min(now - self.at, gap) * more / 100,
            since=since,
            lasting=None if since is None or now - since < window else now - since,
        )

    @property
    def is_due(self) -> bool:
        """True if a report is due now, which comes once in an hour at most."""
        is_new = self.reported is None or self.at - self.reported >= REPEAT
        return self.lasting is not None and is_new


def describe_excess(event: TimeExceeded, snapshot: Snapshot) -> str:
    """Describe the time that a container takes beyond its shares."""
    return (
        f"container {event.holder.container or 'of unknown name'} has taken {event.used:.0f} % of "
        f"the time of {describe_gpu(event.gpu, snapshot)} for {event.seconds:.0f} s: its "
        f"shares give {event.given:.0f} % while other containers want more"
    )


log = structlog.get_logger()


class ComputeWatch:
    """A watch for containers that take more of a GPU's time than their shares give.

    Attributes:
        found: the containers that are looked at, on each GPU.

    Args:
        usage: collects the usage of all GPUs.
        settings: returns the present compute settings of a GPU's pool.
    """

    def __init__(
        self,
        registry: Registry,
        usage: Callable[[], Awaitable[NodeUsage]],
        settings: Callable[[GpuId], ComputeEnforcement],
        guards: Mapping[str, MemoryGuard],
        timing: UsageTiming = DEFAULT_TIMING,
    ) -> None:
        self.found: dict[tuple[GpuId, Holder], Overuse] = {}
        self._registry = registry
        self._usage = usage
        self._settings = settings
        self._guards = guards
        self._period = timing.compute_period

    async def run(self) -> None:
        """Read the use periodically, until cancelled."""
        while True:
            await anyio.sleep(self._period)
            await self._check()

    async def _check(self) -> None:
        settings = {gpu: self._settings(gpu) for gpu in self._registry.snapshot.gpus}
        watched = {gpu for gpu, of in settings.items() if of.policy is ComputePolicy.REPORT}
        usage = await self._usage() if watched else NodeUsage(at=0)
        snapshot, now = self._registry.snapshot, anyio.current_time()
        # What could not be read now stays as it was.
        found = {
            (gpu, holder): known
            for (gpu, holder), known in self.found.items()
            if gpu in watched and gpu not in usage.utilization
        }
        for gpu in watched & usage.utilization.keys() & snapshot.gpus.keys():
            percents = usage.utilization[gpu]
            uses = time_uses(snapshot.gpus[gpu], usage.gpus[gpu], percents, self._guards)
            over = excess(uses)
            for holder in filter(None, uses):
                more, window = over.get(holder, 0.0), settings[gpu].window
                before = self.found.get((gpu, holder)) or Overuse(now)
                current = before.after(more, now, window, 2 * self._period)
                if current.is_due:
                    used = uses[holder].used
                    self._report(gpu, holder, used, used - more, current.lasting or 0.0)
                    current = replace(current, reported=now)
                found[gpu, holder] = current
        self.found = found

    def _report(
        self, gpu: GpuId, holder: Holder, used: float, given: float, seconds: float
    ) -> None:
        snapshot = self._registry.snapshot
        pod = snapshot.pods.find(holder, None)
        event = TimeExceeded(gpu, holder, pod.uid if pod else None, used, given, seconds, at=time())
        reason = describe_excess(event, snapshot)
        log.warning("gpu time exceeded", container=str(holder), reason=reason)
        self._registry.events.publish(event)
