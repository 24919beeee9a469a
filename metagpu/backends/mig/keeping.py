"""One GPU's instances: made for who holds their shares, kept warm a while, then removed.

Level, not edge: a round compares what NVML lists with what is leased, and begins what is missing.
What is known is told as one `Stock`, which keeps everybody off in the same turn what is taken.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import anyio
import structlog
from anyio.abc import TaskGroup

from metagpu.backends.mig import daemons
from metagpu.backends.mig.daemons import Daemons, Device
from metagpu.backends.mig.ledger import LOOK, POLL, Ledger, Terms, identity
from metagpu.backends.mig.mode import Hindrance, MigMode
from metagpu.backends.mig.standing import Standing
from metagpu.backends.mig.turns import Turns
from metagpu.backends.mps_daemon.supervisor import Timing
from metagpu.core.errors import DriverError, DriverTimeout, InUse, NoRoom
from metagpu.core.mig import MigInstance, Placement, slot_of
from metagpu.core.model import Lease
from metagpu.core.served import ServedGpu
from metagpu.core.snapshot import GpuState

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 2.0
"""Seconds before the driver is asked again that was busy: the first time, doubled to the last."""
LEAVING: Final = 5.0
"""Seconds that removing idle instances may take at the end."""

log = structlog.get_logger()


@dataclass(slots=True)
class Keeping:
    """Keeps one GPU; all of it lives as long as `Backend.serve`.

    Attributes:
        run_dir: where control daemons of MPS have their folders.
        timing: of control daemons.
        turn: held from asking NVML until what it answered is in the ledger.
        over: set when what is being made or removed is no more.
        poked: set when there may be something to do.
    """

    served: ServedGpu
    terms: Terms
    mode: MigMode
    run_dir: str
    timing: Timing
    turn: anyio.Lock = field(default_factory=anyio.Lock)
    over: dict[str, anyio.Event] = field(default_factory=dict)
    poked: anyio.Event = field(default_factory=anyio.Event)
    turns: Turns = field(default_factory=Turns)
    alone: bool = False
    complaint: str = ""
    known: Ledger = field(init=False)
    daemons: Daemons = field(init=False)

    def __post_init__(self) -> None:
        kind = Ledger if self.terms.fixed is None else Standing
        self.known = kind(self.terms, self.served.backend, self.served.state)

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
                    await self._remove(slot)

    @property
    def _ledger(self) -> Ledger:
        """What is known, beside the GPU's state as it is now."""
        self.known.state = self.served.state
        return self.known

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
            if slot not in self.over:  # which of its replicas is waited for is all the same
                self._begin_to_make(slot)
                group.start_soon(self._make, slot, lease)
        for slot in self._ledger.absent(anyio.current_time()):
            self._begin_to_make(slot)
            group.start_soon(self._make, slot)
        for slot in self._ledger.unwanted(anyio.current_time()):
            group.start_soon(self._remove, slot)
        if why := self._ledger.why_none():
            self.served.suspend(why)
        else:
            self.served.resume()
        if dirty_since is not None and not self.over and not self._ledger.users:
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
        if not self.known.looked:
            self.served.suspend(str(error))

    async def _look(self) -> None:
        """Read what there is, and who is on what nobody holds; tell all of it."""
        gpu = self.served.gpu.id

        async with self.turn:
            before, lost = set(self.known.ours), self.known.lost
            listed = await self.served.mig.instances(gpu)
            self._ledger.take_in(listed, anyio.current_time())
        pids = await self._processes() if self._ledger.loose else {}
        self._ledger.see(pids, anyio.current_time())
        self.daemons.follow(daemons.present(self._ledger), daemons.wanted(self._ledger))
        self.daemons.tidy(self._ledger.users)
        self._tell()

        for device in self.known.ours - before:
            log.info("instance taken over", gpu=self._name, device=device)
        for share in self.known.lost - lost:
            log.warning("the instance of a pod is gone; its containers fail", share=share)

    async def _processes(self) -> Mapping[int | None, Sequence[int]]:
        found: defaultdict[int | None, list[int]] = defaultdict(list)
        for process in await self.served.processes():
            found[process.gpu_instance].append(process.pid)
        return found

    async def _make(self, slot: str, lease: Lease | None = None) -> None:
        """Make an instance for a lease, or one of the layout, or note why that cannot be."""
        begun = anyio.current_time()

        try:
            made = await self._attempt(slot, begun + self.terms.deadline)
        except DriverError as error:
            if lease is not None:
                self.known.note_failed(lease, str(error))
            self.known.note_unmade(slot, str(error), anyio.current_time())
            log.warning("no instance was made", gpu=self._name, instance=slot, error=str(error))
        else:
            took = f"{anyio.current_time() - begun:.3f}s"
            device = identity(made)
            log.info("instance made", gpu=self._name, instance=slot, device=device, took=took)
        finally:
            self._end(slot)

    async def _attempt(self, slot: str, until: float) -> MigInstance:
        """Make an instance, however often the driver has to be asked.

        Raises:
            DriverError: if it cannot be made, or not by then; says what is in the way.
        """
        number, place = self._wanted(slot)
        pause = FIRST_PAUSE

        while True:
            try:
                await self._make_room(slot)
                return await self._create(slot, number, place, until)
            except InUse:
                if anyio.current_time() + pause > until:
                    raise
            except NoRoom as error:
                await self._look()  # somebody else has been here
                there = ", ".join(self._ledger.in_the_way(slot)) or "no instance"
                raise NoRoom(f"{error}; on its slices: {there}") from None
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _wanted(self, slot: str) -> tuple[int, Placement]:
        """Say what NVML is to make, in its own numbers."""
        name, _, start = slot.rpartition("@")
        return next(
            (profile.number, place)
            for profile in self.served.state.gpu.mig_profiles
            if profile.name == name
            for place in profile.placements
            if place.start == int(start)
        )

    async def _create(self, slot: str, number: int, place: Placement, until: float) -> MigInstance:
        async with self.turn:
            left = max(until - anyio.current_time(), FIRST_PAUSE)
            try:
                made = await self.served.mig.create(self.served.gpu.id, number, place, left)
            except DriverTimeout:
                self.known.late.add(slot)  # it may be there after all: then it is ours
                raise
            self.known.present[slot] = made
            self.known.ours.add(identity(made))
            return made

    async def _make_room(self, wanted: str) -> None:
        """Remove what is idle on the slots of an instance.

        Raises:
            DriverError: if something stays.
        """
        for slot in self._ledger.in_the_way(wanted):
            if slot in self.over and slot != wanted:
                await self.over[slot].wait()
            if slot not in self._ledger.present:
                continue
            if not self._ledger.is_loose(slot):
                raise NoRoom(f"instance {slot} is held, or is not ours")
            if (error := await self._remove(slot)) is not None:
                raise error

    async def _remove(self, slot: str) -> DriverError | None:
        """Remove an instance of ours, unless somebody holds it by now; give what went wrong."""
        if slot in self.over or not self._ledger.is_loose(slot):
            return None

        instance = self.known.present[slot]
        self._begin(slot)
        self._tell()  # before the driver is asked: nobody shall be given what is going
        try:
            await self.daemons.end(slot)
            async with self.turn:
                if self.known.present.get(slot) != instance:
                    return None  # it went while we waited, and its number may be another's by now
                await self.served.mig.destroy(self.served.gpu.id, instance.number)
                del self.known.present[slot]
        except DriverError as error:
            return await self._not_removed(slot, instance, error)
        else:
            for known in (self.known.idle, self.known.users, self.known.stuck):
                known.pop(slot, None)
            device = identity(instance)
            self.served.removed(device)
            log.info("instance removed", gpu=self._name, instance=slot, device=device)
            return None
        finally:
            self._end(slot)

    async def _not_removed(
        self, slot: str, instance: MigInstance, error: DriverError
    ) -> DriverError:
        """Note it, and name who is on the instance if that is why."""
        with suppress(DriverError):
            pids = (await self._processes()).get(instance.number, ())
            if pids and isinstance(error, InUse):
                error = InUse(f"{error}: process {', '.join(map(str, pids))} runs on {slot}")

        if self.known.note_stuck(slot, str(error), anyio.current_time()):
            log.warning("an instance stays", gpu=self._name, instance=slot, error=str(error))
        return error

    def _told_of_clients(self, device: Device, why: str) -> None:
        """Take in whether the control daemon of an instance takes clients."""
        if self.known.control.get(device.uuid) == why:
            return
        self.known.control[device.uuid] = why
        if why:
            log.warning("MPS suspended", gpu=self._name, instance=device.slot, reason=why)
        else:
            log.info("MPS ready", gpu=self._name, instance=device.slot)
        self._tell()

    def _begin(self, slot: str) -> None:
        """Begin to make or remove an instance."""
        self.over[slot] = anyio.Event()
        self.known.busy.add(slot)

    def _begin_to_make(self, slot: str) -> None:
        """Begin to make an instance; who keeps the GPU after us shall know whose it is."""
        self._begin(slot)
        self.known.making.add(slot)
        self._tell()

    def _end(self, slot: str) -> None:
        """End what was done with an instance, and let everybody know."""
        self.known.busy.discard(slot)
        self.known.making.discard(slot)
        self.over.pop(slot).set()
        self._tell()
        self.poked.set()

    def _tell(self) -> None:
        """Tell all of it; who is asked for a share in this turn knows it already."""
        stock, state = self._ledger.stock(alone=self.alone), self.served.state
        if self.terms.fixed is None:  # instances of a layout are not in each other's way
            now = anyio.current_time()
            stock = self.turns.taken_in(stock, state, self.served.backend, now)
        self.served.tell(stock)


def _rests_on(state: GpuState) -> object:
    """Give what a round rests on: if it changes, there may be something to do."""
    leases = frozenset((i, it.since, it.holder is None) for i, it in state.leases.items())
    return leases, state.elsewhere, state.gpu, state.verdict.healthy, state.faults
