"""A watch on the kubelet's device-plugins folder and its sockets."""

import math
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

import anyio
import structlog
from asyncinotify import Inotify, Mask

from metagpu.core.errors import describe_error
from metagpu.core.runtime.files import file_identity
from metagpu.plugins.kubelet.paths import KUBELET_SOCKET, PATH_LIMIT

POLL: Final = 1.0
"""Seconds after which readers check again, also without an inotify event."""
_EVENTS: Final = (
    Mask.CREATE | Mask.DELETE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE_SELF | Mask.MOVE_SELF
)


log = structlog.get_logger()


class KubeletDirectory:
    """Reports when a socket may have come or gone in the folder.

    inotify only wakes the readers; each reader then checks the folder itself. The folder may come
    and go too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._changed = anyio.Event()
        # Sockets of different daemons, one after the other or side by side, never share a name.
        self._token = secrets.token_hex(4)
        self._names = (f"{self._token}-{number}" for number in count(1))

    @property
    def kubelet_socket(self) -> Path:
        """The socket of the kubelet's Registration service."""
        return self.path / KUBELET_SOCKET

    def kubelet_identity(self) -> tuple[int, int, int] | None:
        """Return the identity of the kubelet's present socket, `None` without one."""
        return file_identity(self.kubelet_socket)

    def new_socket_path(self, resource: str) -> Path:
        """Return a socket path that was not used before; each registration needs one.

        The kubelet cannot distinguish two registrations under one path.
        """
        while True:
            ending = f"-{next(self._names)}.sock"
            room = PATH_LIMIT - len(os.fsencode(self.path / f"metagpu-{ending}"))
            path = self.path / f"metagpu-{resource.replace('/', '_')[: max(room, 0)]}{ending}"
            if file_identity(path) is None:
                return path

    async def find_sockets_of_others(self, resource: str) -> Sequence[Path]:
        """Return the sockets of this resource that other daemons of metagpu made."""
        name = re.compile(rf"metagpu-{re.escape(resource.replace('/', '_'))}-([0-9a-f]+)-\d+\.sock")
        return [
            Path(path)
            async for path in anyio.Path(self.path).glob("metagpu-*.sock")
            if (made := name.fullmatch(path.name)) and made[1] != self._token
        ]

    async def remove_dead_sockets(self) -> None:
        """Remove the sockets of killed daemons of metagpu: nobody listens on them."""
        async for path in anyio.Path(self.path).glob("metagpu-*.sock"):
            if f"-{self._token}-" in path.name:
                continue  # of this daemon, which may not listen yet
            with suppress(OSError):
                try:
                    await (await anyio.connect_unix(path)).aclose()
                except ConnectionRefusedError:
                    await path.unlink(missing_ok=True)

    async def wait_changed(self, within: float = POLL) -> None:
        """Wait until a socket may have come or gone, for at most `within` seconds."""
        with anyio.move_on_after(within):
            await self._changed.wait()

    async def wait_kubelet_replaced(
        self, kubelet: tuple[int, int, int] | None, within: float
    ) -> None:
        """Wait until the kubelet has another socket, for at most `within` seconds."""
        with anyio.move_on_after(within):
            while self.kubelet_identity() == kubelet:
                await self.wait_changed()

    async def watch(self) -> None:
        """Watch the folder for ever, also while the folder is missing or recreated."""
        logged = False

        while True:
            try:
                with Inotify() as inotify:
                    await self._follow(inotify)
            except OSError as error:
                # Readers check every `POLL` seconds anyway.
                if not logged:
                    logged = True
                    log.warning(
                        "inotify unavailable",
                        error=describe_error(error),
                        effect=f"socket changes are seen within {POLL:g} s",
                        fix="raise fs.inotify.max_user_instances",
                    )
                await anyio.sleep(POLL)

    async def _follow(self, inotify: Inotify) -> None:
        """Watch the present folder until the folder itself comes or goes."""
        with anyio.move_on_after(math.inf) as waiting:
            if not _add(inotify, self.path):
                # The folder is missing: watch its nearest ancestor, and check again soon.
                waiting.deadline = anyio.current_time() + POLL
                _add(inotify, _nearest(self.path))

            self._notify()
            async for event in inotify:
                if event.name is None or event.name.suffix == ".sock":
                    self._notify()
                if event.name is None or waiting.deadline < math.inf:
                    return

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _add(inotify: Inotify, path: Path) -> bool:
    try:
        inotify.add_watch(path, _EVENTS)
    except OSError:
        return False
    return True


def _nearest(path: Path) -> Path:
    return next((parent for parent in path.parents if parent.is_dir()), Path("/"))
