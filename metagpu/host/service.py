"""metagpu as a service of the host: its files, and its reports to systemd.

The files come with the package, out of deploy/systemd; their functions block. Reports follow
sd_notify(3).
"""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

import anyio
import msgspec

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.errors import FileNotWritten, PackageIncomplete

UNITS: Final = Path("etc/systemd/system")
SETTINGS: Final = Path("etc/metagpu")
"""Both below the root of a system."""
_PACKAGED: Final = Path(__file__).parents[1] / "systemd"
_CHECKED_OUT: Final = Path(__file__).parents[2] / "deploy" / "systemd"
_PROGRAM: Final = "/usr/local/bin/metagpu"
"""The program's path in the units as they are packaged."""
_TARGETS: Final = {
    "metagpu.service": UNITS,
    "metagpu.env": SETTINGS,
    "metagpu.yaml": SETTINGS,
}
_DROP_IN: Final = "metagpu-mps.conf", UNITS / "metagpu.service.d" / "mps.conf"


class FileState(StrEnum):
    """A file of the service, compared with the one of this version."""

    MISSING = "missing"
    SAME = "same"
    CHANGED = "changed"


class ServiceFile(msgspec.Struct, frozen=True):
    """One file of the service, as this version has it."""

    path: Path
    content: str

    @property
    def state(self) -> FileState:
        """The file on this machine, compared."""
        try:
            found = self.path.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return FileState.MISSING
        except OSError:  # something else is at its place, or only others may read it
            return FileState.CHANGED
        return FileState.SAME if found == self.content else FileState.CHANGED

    def write(self) -> None:
        """Write the file.

        Raises:
            MetagpuError: it cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(self.content, encoding="utf-8")
        except OSError as error:
            raise FileNotWritten(
                f"cannot write {error.filename or self.path}: {error.strerror}; run as root, or "
                "name another --root"
            ) from error


def service_files(program: Path, root: Path = Path("/"), *, mps: bool) -> Sequence[ServiceFile]:
    """Return the files for a program at a path; with `mps`, also the drop-in for MPS.

    Raises:
        MetagpuError: this installation has no such files.
    """
    folder = _PACKAGED if _PACKAGED.exists() else _CHECKED_OUT
    targets = {name: place / name for name, place in _TARGETS.items()}
    if mps:
        targets |= dict([_DROP_IN])
    try:
        return [
            ServiceFile(
                root / target,
                (folder / name).read_text(encoding="utf-8").replace(_PROGRAM, str(program)),
            )
            for name, target in targets.items()
        ]
    except OSError as error:
        raise PackageIncomplete(
            f"this installation has no {error.filename}: install metagpu from its wheel"
        ) from error


def read_environment(file: Path) -> dict[str, str]:
    """Return the variables in a service's environment file; none without the file.

    Raises:
        MetagpuError: the file cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", ConfigReason.UNREADABLE) from error
    pairs = (line.strip().partition("=") for line in lines if not line.lstrip().startswith("#"))
    return {name.strip(): value.strip().strip("\"'") for name, found, value in pairs if found}


_SOCKET: Final = "NOTIFY_SOCKET"
_WATCHDOG: Final = "WATCHDOG_USEC"
"""Microseconds after which systemd takes a silent process for one that hangs."""


async def report_state(ready: anyio.Event, environment: Mapping[str, str] | None = None) -> None:
    """Report that this process is ready, and again and again that its loop turns.

    Returns at once where no systemd wants to know.
    """
    environment = os.environ if environment is None else environment
    if not (address := environment.get(_SOCKET)):
        return
    if address.startswith("@"):  # a socket without a file
        address = f"\0{address[1:]}"

    async with anyio.create_task_group() as group:
        if period := environment.get(_WATCHDOG):
            group.start_soon(_report_turns, address, int(period) / 2e6)
        await ready.wait()
        _send(address, b"READY=1")


async def _report_turns(address: str, period: float) -> None:
    while True:
        _send(address, b"WATCHDOG=1")
        await anyio.sleep(period)


def _send(address: str, message: bytes) -> None:
    """Send one message without waiting: a lost one costs no pod anything."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(0)
        sender.sendto(message, address)
