"""The kubelet's device-plugins folder, watched: sockets come and go in it, and so may it itself."""

import math
import os
from itertools import count
from pathlib import Path
from typing import Final

import anyio
import structlog
from asyncinotify import Inotify, Mask

from metagpu.core.errors import ConfigError, why
from metagpu.plugins.serving import identity_of

KUBELET_SOCKET: Final = "kubelet.sock"
DEFAULT_DIRECTORY: Final = Path("/var/lib/kubelet/device-plugins")
POLL: Final = 1.0
"""Seconds after which readers look again even if inotify said nothing."""
_PATH_LIMIT: Final = 107
"""Bytes of a unix socket's path (sun_path, less its closing zero)."""
_LONGEST_NAME: Final = len("metagpu--ffffffff-99999.sock")
"""Bytes of a socket's name in the folder, without the resource's name, which may be left out."""
_WHAT: Final = (
    Mask.CREATE | Mask.DELETE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE_SELF | Mask.MOVE_SELF
)


log = structlog.get_logger()


def check(path: Path) -> None:
    """Refuse what can never be the kubelet's folder; one that is not there yet may come.

    Raises:
        ConfigError: if it is no folder, or has no room for a socket's path.
    """
    longest, length = _PATH_LIMIT - _LONGEST_NAME - 1, len(os.fsencode(path))
    problem = ""

    if path.exists() and not path.is_dir():
        problem = f"{path} is no folder; name the kubelet's device-plugins folder"
    elif length > longest:
        problem = (
            f"{path} has {length} bytes, which leaves no room for a socket's path; allowed: "
            f"{longest} at most"
        )
    if problem:
        raise ConfigError(problem, file="--kubelet-dir")


class KubeletDirectory:
    """Says when a socket came or went in the folder; readers then look for themselves.

    inotify only wakes: what counts is what the folder holds when it is looked at.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._changed = anyio.Event()
        # Sockets of different daemons, one after the other or side by side, never share a name.
        self._names = (f"{os.getpid():x}-{number}" for number in count(1))

    @property
    def kubelet_socket(self) -> Path:
        """Where the kubelet takes registrations."""
        return self.path / KUBELET_SOCKET

    def kubelet(self) -> tuple[int, int, int] | None:
        """Identify the kubelet's present socket, `None` when there is none."""
        return identity_of(self.kubelet_socket)

    def fresh(self, resource: str) -> Path:
        """Give a socket path that was not used before, one for each time we register.

        The kubelet cannot tell two registrations under one path apart.
        """
        while True:
            ending = f"-{next(self._names)}.sock"
            room = _PATH_LIMIT - len(os.fsencode(self.path / f"metagpu-{ending}"))
            path = self.path / f"metagpu-{resource.replace('/', '_')[: max(room, 0)]}{ending}"
            if identity_of(path) is None:
                return path

    async def changed(self, within: float = POLL) -> None:
        """Wait until a socket may have come or gone, at most `within` seconds."""
        with anyio.move_on_after(within):
            await self._changed.wait()

    async def replaced(self, kubelet: tuple[int, int, int] | None, within: float) -> None:
        """Wait while the kubelet's socket stays this one, at most `within` seconds."""
        with anyio.move_on_after(within):
            while self.kubelet() == kubelet:
                await self.changed()

    async def watch(self) -> None:
        """Follow the folder for ever, through its absence and its being made anew."""
        told = False

        while True:
            try:
                with Inotify() as inotify:
                    await self._follow(inotify)
            except OSError as error:
                # Readers look every `POLL` seconds anyway.
                if not told:
                    told = True
                    mend = "raise fs.inotify.max_user_instances"
                    log.warning("no inotify: changes are seen late", error=why(error), mend=mend)
                await anyio.sleep(POLL)

    async def _follow(self, inotify: Inotify) -> None:
        """Follow what there is now, until the watched folder itself comes or goes."""
        with anyio.move_on_after(math.inf) as waiting:
            if not _add(inotify, self.path):
                # Not there yet: its nearest ancestor says when to look again.
                waiting.deadline = anyio.current_time() + POLL
                _add(inotify, _nearest(self.path))

            self._notice()
            async for event in inotify:
                if event.name is None or event.name.suffix == ".sock":
                    self._notice()
                if event.name is None or waiting.deadline < math.inf:
                    return

    def _notice(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _add(inotify: Inotify, path: Path) -> bool:
    try:
        inotify.add_watch(path, _WHAT)
    except OSError:
        return False
    return True


def _nearest(path: Path) -> Path:
    return next((parent for parent in path.parents if parent.is_dir()), Path("/"))
