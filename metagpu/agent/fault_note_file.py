"""The file of the note of faults and cordons, in the run folder.

The note is a help, never a need: what is wrong with it is logged, and the daemon goes on.
"""

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio import to_thread

from metagpu.core.errors import FaultNoteUnusable, MetagpuError, describe_error
from metagpu.core.health.verdicts import SIZE_LIMIT, FaultNote, decode, encode
from metagpu.core.health.watch import HealthWatch
from metagpu.core.runtime.rate_limit import LogOnce
from metagpu.core.state.registry import Registry

FILE_NAME: Final = "faults.json"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

log = structlog.get_logger()


@dataclass
class FaultNoteFile:
    """Reads the note at a start, and writes it at each change.

    Attributes:
        folder: the run folder, which a reboot empties.
        read_boot_id: reads the id of this boot of the machine.
        retry_delay: seconds from a note that could not be written to the next try.
    """

    folder: Path
    registry: Registry
    health: HealthWatch
    read_boot_id: Callable[[], str] = _BOOT_ID.read_text
    retry_delay: float = 1.0
    _failures: LogOnce = field(default_factory=LogOnce)

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / FILE_NAME

    async def load(self) -> None:
        """Pass the last daemon's note to the health watch, if it can be used."""
        if (found := await self._read_usable()) is not None:
            self.health.adopt(*found)

    async def save(self) -> None:
        """Write the present note, for the daemon after this one."""
        if self.health.surveyed.is_set():
            await self._is_kept(self.health.note)

    async def _is_kept(self, note: FaultNote) -> bool:
        """Write a note; log a failure once, and return whether it is written."""
        try:
            await to_thread.run_sync(self._write, note)
        except OSError as error:
            problem = describe_error(error)
            if self._failures.is_new(FILE_NAME, problem):
                log.warning(
                    "note of faults not written",
                    file=str(self.path),
                    error=problem,
                    effect="the next daemon does not know the latest faults and cordons",
                )
            return False
        self._failures.clear(FILE_NAME)
        return True

    async def _read_usable(self) -> tuple[FaultNote, float] | None:
        try:
            return await to_thread.run_sync(self._read)
        except FileNotFoundError:
            return None
        except (OSError, MetagpuError) as error:
            log.warning(
                "note of faults ignored",
                file=str(self.path),
                error=str(error),
                fix="check `metagpu status`: earlier faults may be forgotten",
            )
            return None

    async def follow(self) -> None:
        """Write the note at each change until cancelled; a failure is tried again soon."""
        await self.health.surveyed.wait()
        written: FaultNote | None = None
        async for _ in self.registry.watch(lambda _: self.health.note):
            while (note := self.health.note) != written:
                if await self._is_kept(note):
                    written = note
                else:
                    await anyio.sleep(self.retry_delay)

    def _read(self) -> tuple[FaultNote, float]:
        """Return the note, and the time at which it was written."""
        # Neither a link nor a pipe, and nothing that another user has written.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise FaultNoteUnusable("it is not a file of this user")
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise FaultNoteUnusable("other users may write it")
            text = file.read(SIZE_LIMIT + 1)
        if len(text) > SIZE_LIMIT:
            raise FaultNoteUnusable(f"it is larger than {SIZE_LIMIT} bytes")
        return decode(text, self.read_boot_id().strip()), status.st_mtime

    def _write(self, note: FaultNote) -> None:
        fresh = self.path.with_suffix(".new")
        with suppress(FileNotFoundError):
            fresh.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(fresh, flags, 0o600), "wb") as file:
            file.write(encode(note, self.read_boot_id().strip()))
        fresh.replace(self.path)
