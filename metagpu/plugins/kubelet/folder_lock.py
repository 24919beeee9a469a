"""The lock of a kubelet's folder: one metagpu for each kubelet.

The lock is on the folder itself. A lock file would be one file more in the folder, and a kubelet
that starts in a folder with files does not take the node for a new one (docs/development/kubelet.md
§2). The kernel releases the lock at any end of the process.
"""

import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import structlog
from anyio import to_thread

from metagpu.core.errors import AnotherDaemon, describe_error
from metagpu.core.runtime.files import file_identity
from metagpu.core.runtime.rate_limit import LogOnce

log = structlog.get_logger()


class FolderLock:
    """The lock of the folder at a path, which may appear later and be made again."""

    def __init__(self, folder: Path, period: float) -> None:
        self._folder = folder
        self._period = period
        self._lock: int | None = None
        self._locked: tuple[int, int] | None = None
        self._wanted = False
        self._failures = LogOnce()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold the lock of the present folder while the block lasts.

        Raises:
            AnotherDaemon: another metagpu holds it.
        """
        self._wanted = True
        try:
            await to_thread.run_sync(self._take)
            yield
        finally:
            self._wanted = False
            self._release()

    async def run(self) -> None:
        """Lock each folder that comes to the path while the lock is held, until cancelled.

        Raises:
            AnotherDaemon: another metagpu holds the new folder.
        """
        while True:
            await anyio.sleep(self._period)
            await to_thread.run_sync(self._take)

    def _take(self) -> None:
        """Lock the present folder, unless it is missing, locked by us, or given up."""
        identity = file_identity(self._folder)
        if not self._wanted or identity is None or identity[:2] == self._locked:
            return
        try:
            lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._report(error)
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise AnotherDaemon(
                f"another metagpu serves the kubelet of {self._folder}, with another --run-dir; "
                "stop it, or name another kubelet's folder with --kubelet-dir"
            ) from None
        except OSError as error:
            os.close(lock)
            self._report(error)
            return
        self._release()
        self._lock, self._locked = lock, identity[:2]

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = self._locked = None

    def _report(self, error: OSError) -> None:
        """Log that the folder cannot be locked; metagpu serves the kubelet all the same."""
        reason = describe_error(error)
        if self._failures.is_new(self._folder, reason):
            effect = "a second metagpu of another run folder is not noticed"
            log.warning(
                "kubelet folder not locked", folder=str(self._folder), error=reason, effect=effect
            )
