"""One GPU's instances: made for who holds their shares, kept warm a while, then removed.

Level, not edge: a round compares what NVML lists with what is leased, and begins what is missing.
What is known is told as one `Stock`, which keeps everybody off in the same turn what is taken.
"""

from dataclasses import dataclass, field
from typing import Final

import anyio
import structlog
from anyio.abc import TaskGroup

from metagpu.backends.mig import daemons, telling
from metagpu.backends.mig.daemons import Daemons, Device
from metagpu.backends.mig.ledger import LOOK, POLL, Ledger, Terms
from metagpu.backends.mig.making import Maker, pids_on
from metagpu.backends.mig.mode import Hindrance, MigMode
from metagpu.backends.mig.standing import Standing
from metagpu.backends.mig.turns import Turns
from metagpu.backends.mps_daemon.supervisor import Timing
from metagpu.core.errors import DriverError
from metagpu.core.mig import slot_of
from metagpu.core.served import ServedGpu
from metagpu.core.snapshot import GpuState

LEAVING: Final = 5.0
"""Seconds that removing idle instances may take at the end."""

log = structlog.get_logger()


@dataclass(slots=True)
class Keeping:
    """Keeps one GPU; all of it lives as long as `Backend.serve`.

    Attributes:
        run_dir: where control daemons of MPS have their folders.
        timing: of control daemons.
        poked: set when there may be something to do.
    """

    served: ServedGpu
    terms: Terms
    mode: MigMode
    run_dir: str
    timing: Timing
    poked: anyio.Event = field(default_factory=anyio.Event)
    turns: Turns = field(default_factory=Turns)
    alone: bool = False
    complaint: str = ""
    maker: Maker = field(init=False)
    daemons: Daemons = field(init=False)

    def __post_init__(self) -> None:
        kind = Ledger if self.terms.fixed is None else Standing
        known = kind(self.terms, self.served.backend, self.served.state)
        self.maker = Maker(self.served, known, self._look, self._tell, self._poke, self._end_daemon)

    async def run(self) -> None:
        """Keep the GPU until cancelled; then remove what nobody holds, unless it is a layout's."""
        try:
            async with anyio.create_task_group() as group:
                self.daemons = Daemons(
                    self.served, self.run_dir, self.timing, self._told_of_clients, group
                )
                while True:
                    self.poked = anyio.Event()
                    seen = _rests_on(self.served.state)
                    pause = await self._round(group)
                    await self._wait(seen, pause)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(LEAVING):
                for slot in [] if self.terms.fixed is not None else list(self._ledger.idle):
                    await self.maker.remove(slot)

    @property
    def _ledger(self) -> Ledger:
        return self.maker.ledger

    @property
    def _name(self) -> str:
        return str(self.served.state.gpu)

    async def _wait(self, seen: object, pause: float) -> None:
        async with anyio.create_task_group() as group:

            async def changed() -> None:
                await self.served.until(lambda state: _rests_on(state) != seen)
                group.cancel_scope.cancel()

            group.start_soon(changed)
            with anyio.move_on_after(pause):
                await self.poked.wait()
            group.cancel_scope.cancel()

    async def _round(self, group: TaskGroup) -> float:
        """Do what is to be done now; say after how many seconds there may be more to do."""
        dirty_since = self.served.since_last_lease  # what ends later is not seen by this look
        try:
            hindrance = self._nothing() or await self.mode.hindrance()
            self.alone = hindrance is None
            await self._look()
            if hindrance is not None:
                self.served.suspend(hindrance.why, reset=hindrance.reset)
                return LOOK
        except DriverError as error:
            self._complain(error)
            return POLL

        self.complaint = ""
        for lease in list(self._ledger.waiting()):
            slot = slot_of(lease.share.id)
            if slot not in self.maker.over:  # which of its replicas is waited for is all the same
                self.maker.start(group, slot, lease)
        for slot in self._ledger.absent(anyio.current_time()):
            self.maker.start(group, slot)
        for slot in self._ledger.unwanted(anyio.current_time()):
            group.start_soon(self.maker.remove, slot)
        if why := self._ledger.why_none():
            self.served.suspend(why)
        else:
            self.served.resume()
        if dirty_since is not None and not self.maker.over and not self._ledger.users:
            self.served.returned(dirty_since)
        now = anyio.current_time()
        return min(self._ledger.pause(now), self.turns.pause(now))

    def _nothing(self) -> Hindrance | None:
        """Say if the GPU has nothing to offer here: then its mode is nobody's business."""
        names = {profile.name for profile in self.served.state.gpu.mig_profiles}
        if names & self.terms.allowed:
            return None
        return Hindrance("it has none of the MIG profiles of its pool")

    def _complain(self, error: DriverError) -> None:
        if str(error) != self.complaint:
            self.complaint = str(error)
            log.warning("MIG instances are not known", gpu=self._name, error=str(error))
        if not self._ledger.looked:
            self.served.suspend(str(error))

    async def _look(self) -> None:
        """Read what there is, and who is on what nobody holds; tell all of it."""
        gpu = self.served.gpu.id

        async with self.maker.turn:
            before, lost = set(self._ledger.ours), self._ledger.lost
            listed = await self.served.mig.instances(gpu)
            self._ledger.take_in(listed, anyio.current_time())
        pids = await pids_on(self.served) if self._ledger.loose else {}
        self._ledger.see(pids, anyio.current_time())
        self.daemons.follow(daemons.present(self._ledger), daemons.wanted(self._ledger))
        self.daemons.tidy(self._ledger.users)
        self._tell()

        for device in self._ledger.ours - before:
            log.info("instance taken over", gpu=self._name, device=device)
        for share in self._ledger.lost - lost:
            log.warning("the instance of a pod is gone; its containers fail", share=share)

    def _poke(self) -> None:
        self.poked.set()

    async def _end_daemon(self, slot: str) -> None:
        await self.daemons.end(slot)

    def _told_of_clients(self, device: Device, why: str) -> None:
        """Take in whether the control daemon of an instance takes clients."""
        if self._ledger.control.get(device.uuid) == why:
            return
        self._ledger.control[device.uuid] = why
        if why:
            log.warning("MPS suspended", gpu=self._name, instance=device.slot, reason=why)
        else:
            log.info("MPS ready", gpu=self._name, instance=device.slot)
        self._tell()

    def _tell(self) -> None:
        """Tell all of it; who is asked for a share in this turn knows it already."""
        stock, state = telling.stock(self._ledger, alone=self.alone), self.served.state
        if self.terms.fixed is None:  # instances of a layout are not in each other's way
            now = anyio.current_time()
            stock = self.turns.taken_in(stock, state, self.served.backend, now)
        self.served.tell(stock)


def _rests_on(state: GpuState) -> object:
    """Give what a round rests on: if it changes, there may be something to do."""
    leases = frozenset((i, it.since, it.holder is None) for i, it in state.leases.items())
    return leases, state.elsewhere, state.gpu, state.verdict.healthy, state.faults
