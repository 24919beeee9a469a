"""The new daemon's side of an exchange: it takes over from the old one."""

from dataclasses import dataclass, field
from typing import Protocol

import anyio
import structlog

from metagpu.agent.config_loader import ConfigLoader
from metagpu.agent.exchange import ExchangeTiming, HandedState
from metagpu.agent.layout_manager import LayoutManager
from metagpu.agent.predecessor import Predecessor
from metagpu.core.errors import TakeoverFailed
from metagpu.core.health.fault_note import FaultNote
from metagpu.core.model.offers import Api
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import LeasesHandedOver
from metagpu.core.state.gpu_state import NOT_READY
from metagpu.core.state.registry import Registry
from metagpu.plugins.kubelet.succession import Succession

log = structlog.get_logger()


class _Health(Protocol):
    @property
    def surveyed(self) -> anyio.Event: ...

    def adopt(self, last: FaultNote) -> None: ...


@dataclass
class Takeover:
    """Prepares beside the old daemon, and takes its node over in one step.

    Attributes:
        health: knows when the GPUs are read, and gets the old daemon's faults.
        leases_observed: set once the kubelet's leases are read.
        call_stats: knows which lists the kubelet reads.
        first_leases: the longest wait for the kubelet's leases, in seconds.
        granted: set once this daemon may manage GPUs and register.
        finished: set once the old daemon has given the node away.
        succession: how to register what the old daemon has, `None` without one.
    """

    registry: Registry
    health: _Health
    layout_manager: LayoutManager
    config_loader: ConfigLoader
    call_stats: KubeletCallStats
    leases_observed: anyio.Event
    first_leases: float
    timing: ExchangeTiming
    granted: anyio.Event = field(default_factory=anyio.Event)
    finished: anyio.Event = field(default_factory=anyio.Event)
    succession: Succession | None = None

    async def run(self, predecessor: Predecessor) -> None:
        """Take the node over; the old daemon releases its locks next.

        Raises:
            TakeoverFailed: the old daemon goes on, or the kubelet does not read the lists.
            ConfigError: the configuration does not fit the GPUs.
        """
        runner = self.layout_manager.backend_runner
        runner.leaves_gpus = True  # as long as the old daemon may go on
        await self.health.surveyed.wait()
        with anyio.move_on_after(self.first_leases):
            await self.leases_observed.wait()

        state = await predecessor.begin()
        began = anyio.current_time()
        await self._apply(state)
        await self._wait_ready()
        offers = self.registry.snapshot.offers_of(Api.DEVICE_PLUGIN)
        self.succession = Succession(offers.keys() & set(state.listed), predecessor)
        self.granted.set()
        await self._wait_listed(self.succession)
        await predecessor.finish()
        self.finished.set()
        runner.leaves_gpus = False
        lasted = f"{anyio.current_time() - began:.3f}s"
        log.info("kubelet reads the new lists", after=lasted, leases=len(state.leases))

    async def grant_at_once(self) -> None:
        """Begin without an exchange; the wait for the node may have been long."""
        await self.config_loader.reload(again=False)
        self.granted.set()

    async def _apply(self, state: HandedState) -> None:
        """Apply what only the old daemon knew, and manage the GPUs."""
        if state.note is not None:
            self.health.adopt(state.note)
        if state.choice is not None:
            await self.config_loader.follow_cluster(state.choice)
        await self.layout_manager.apply()
        self.registry.apply(LeasesHandedOver(state.leases, anyio.current_time()))

    async def _wait_ready(self) -> None:
        """Wait until backends have their GPUs ready: no share is refused for the exchange."""
        with anyio.move_on_after(self.timing.ready):
            async for ready in self.registry.watch(_is_ready):
                if ready:
                    return

    async def _wait_listed(self, succession: Succession) -> None:
        stats = self.call_stats
        with anyio.move_on_after(self.timing.lists):
            while not all(stats.of_resource(it).listed for it in succession.resources):
                if succession.failure is not None:
                    raise succession.failure
                await anyio.sleep(self.timing.poll)  # the counters have no event
            return
        raise TakeoverFailed(f"the kubelet did not read the lists within {self.timing.lists:g} s")


def _is_ready(snapshot: Snapshot) -> bool:
    return not any(
        pause.reason == NOT_READY
        for state in snapshot.gpus.values()
        for pause in state.suspended.values()
    )
