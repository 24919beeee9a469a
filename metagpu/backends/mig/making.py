"""One GPU's instances made and removed: room first, then the driver, which may be busy for long."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import anyio
import structlog
from anyio.abc import TaskGroup

from metagpu.backends.mig.ledger import Ledger, identity
from metagpu.core.errors import DriverError, DriverTimeout, InUse, NoRoom
from metagpu.core.mig import MigInstance, Placement
from metagpu.core.model import Lease
from metagpu.core.served import ServedGpu

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 2.0
"""Seconds before the driver is asked again that was busy: the first time, doubled to the last."""

log = structlog.get_logger()


@dataclass(slots=True)
class Maker:
    """Makes and removes instances, one thing at a time at each place; notes it in the ledger.

    Attributes:
        look: reads what there is, when somebody else must have been here.
        tell: tells what is known, before and after anything changes.
        done: called when there may be more to do.
        end_daemon: ends the MPS control daemon of an instance that is about to go.
        turn: held from asking NVML until what it answered is in the ledger.
        over: set when what is being made or removed is no more.
    """

    served: ServedGpu
    known: Ledger
    look: Callable[[], Awaitable[None]]
    tell: Callable[[], None]
    done: Callable[[], None]
    end_daemon: Callable[[str], Awaitable[None]]
    turn: anyio.Lock = field(default_factory=anyio.Lock)
    over: dict[str, anyio.Event] = field(default_factory=dict)

    @property
    def ledger(self) -> Ledger:
        """What is known, beside the GPU's state as it is now."""
        self.known.state = self.served.state
        return self.known

    def start(self, group: TaskGroup, slot: str, lease: Lease | None = None) -> None:
        """Begin to make an instance for a lease, or one of the layout."""
        self._begin(slot)
        self.known.making.add(slot)
        self.tell()  # who keeps the GPU after us shall know whose it is
        group.start_soon(self._make, slot, lease)

    async def remove(self, slot: str) -> DriverError | None:
        """Remove an instance of ours, unless somebody holds it by now; give what went wrong."""
        if slot in self.over or not self.ledger.is_loose(slot):
            return None

        instance = self.known.present[slot]
        self._begin(slot)
        self.tell()  # before the driver is asked: nobody shall be given what is going
        try:
            await self.end_daemon(slot)
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

    @property
    def _name(self) -> str:
        return str(self.served.state.gpu)

    async def _make(self, slot: str, lease: Lease | None) -> None:
        """Make an instance, or note why that cannot be."""
        begun = anyio.current_time()

        try:
            made = await self._attempt(slot, begun + self.known.terms.deadline)
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
                await self.look()  # somebody else has been here
                there = ", ".join(self.ledger.in_the_way(slot)) or "no instance"
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
        for slot in self.ledger.in_the_way(wanted):
            if slot in self.over and slot != wanted:
                await self.over[slot].wait()
            if slot not in self.ledger.present:
                continue
            if not self.ledger.is_loose(slot):
                raise NoRoom(f"instance {slot} is held, or is not ours")
            if (error := await self.remove(slot)) is not None:
                raise error

    async def _not_removed(
        self, slot: str, instance: MigInstance, error: DriverError
    ) -> DriverError:
        """Note it, and name who is on the instance if that is why."""
        with suppress(DriverError):
            pids = (await pids_on(self.served)).get(instance.number, ())
            if pids and isinstance(error, InUse):
                error = InUse(f"{error}: process {', '.join(map(str, pids))} runs on {slot}")

        if self.known.note_stuck(slot, str(error), anyio.current_time()):
            log.warning("an instance stays", gpu=self._name, instance=slot, error=str(error))
        return error

    def _begin(self, slot: str) -> None:
        self.over[slot] = anyio.Event()
        self.known.busy.add(slot)

    def _end(self, slot: str) -> None:
        """End what was done with an instance, and let everybody know."""
        self.known.busy.discard(slot)
        self.known.making.discard(slot)
        self.over.pop(slot).set()
        self.tell()
        self.done()


async def pids_on(served: ServedGpu) -> Mapping[int | None, Sequence[int]]:
    """Give the processes on a GPU, by NVML's number of the GPU instance that they are on.

    Raises:
        DriverError: if NVML does not say.
    """
    found: defaultdict[int | None, list[int]] = defaultdict(list)
    for process in await served.processes():
        found[process.gpu_instance].append(process.pid)
    return found
