"""Events of a session's GPUs, but for those that are lost: with one of them no wait succeeds."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial

import anyio
import structlog

from metagpu.core.driver import DriverEvent, GpuUnavailable
from metagpu.core.errors import DriverError, DriverTimeout, DriverUnavailable, GpuLost
from metagpu.core.gpu import GpuId
from metagpu.nvml.reading import read_memory
from metagpu.nvml.session import SLICE, Known, Session

log = structlog.get_logger()


async def hear(session: Session, deadline: float) -> Sequence[DriverEvent]:
    """Wait for events of any GPU, at most one second; empty when nothing happened."""
    # Who holds the lock replaces the set itself; a survey may hold it for long.
    if session.spoiled and not session.registering.locked():
        async with session.registering:
            await stop_listening(session, (), deadline)
    if not any(known.heard for known in session.gpus.values()):
        await anyio.sleep(SLICE)
        return ()

    try:
        return await session.wait.call(session.take, SLICE + deadline, session.interrupt)
    except GpuLost:
        return await _who_is_lost(session, deadline)


async def stop_listening(session: Session, lost: Collection[GpuId], deadline: float) -> None:
    """Keep lost GPUs out of the event set, and replace it if it is spoiled or holds them.

    The caller holds `Session.registering`. A failure is told and leaves the set spoiled, for the
    next call to try again.

    Raises:
        DriverUnavailable: if NVML as a whole is gone.
    """
    gone = [session.gpus[gpu] for gpu in lost if gpu in session.gpus]
    session.spoiled |= any(known.heard for known in gone)

    for known in gone:
        known.heard, known.lost, known.ailing = 0, True, True
    if session.spoiled and session.events is not None:
        await _renew(session, deadline)


async def _who_is_lost(session: Session, deadline: float) -> Sequence[DriverEvent]:
    """Find out whom NVML means when it only says that a GPU of the event set is lost."""
    lost: list[GpuId] = []

    async def ask(gpu: GpuId, known: Known) -> None:
        with suppress(DriverError):
            try:
                await known.lane.call(partial(read_memory, known.handle), deadline)
            except (GpuLost, DriverTimeout):
                lost.append(gpu)

    async with anyio.create_task_group() as group:
        for gpu, known in session.gpus.items():
            if known.heard:
                group.start_soon(ask, gpu, known)

    # While it is in the set, NVML answers with the same error at once.
    async with session.registering:
        await stop_listening(session, lost, deadline)
    if lost:
        return tuple(GpuUnavailable(gpu) for gpu in lost)

    await anyio.sleep(SLICE)
    # A set that could not be replaced still holds whom we know: that is no news.
    return () if session.spoiled else (GpuUnavailable(None),)


async def _renew(session: Session, deadline: float) -> None:
    if not session.wait.idle:
        session.interrupt()
    try:
        await session.wait.call(session.renew, SLICE + deadline)
    except DriverUnavailable:
        raise
    except DriverError as error:
        if str(error) not in session.complaints:
            session.complaints.add(str(error))
            log.warning("the NVML event set cannot be replaced yet", error=str(error))
    else:
        session.complaints.clear()
