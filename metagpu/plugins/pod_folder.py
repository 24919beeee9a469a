"""The folder that containers with shares see: `mgctl`, and the socket it calls the daemon on.

It is not in /run: distributions mount that so that no program runs from it, in containers too. It
outlives the daemon and the machine's restarts, as the mounts do that the kubelet repeats.
"""

import platform
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from metagpu.core.errors import MetagpuError
from metagpu.core.injection import CLIENT_NAME
from metagpu.plugins.control import DEFAULT_RUN_DIR
from metagpu.plugins.serving import identity_of

DEFAULT_POD_DIR: Final = Path("/var/lib/metagpu/pod")
SOCKET_NAME: Final = "mgctl.sock"
PROGRAMS: Final = Path(__file__).parents[1] / "programs"

_BACKLOG: Final = 128


def usual_folder(run_dir: Path) -> Path:
    """Say where the folder is; a daemon with a run directory of its own has it there."""
    return DEFAULT_POD_DIR if run_dir == DEFAULT_RUN_DIR else run_dir / "pod"


def furnish(folder: Path, programs: Path = PROGRAMS) -> None:
    """Put this machine's `mgctl` into the folder, if it is not there already; blocks.

    Raises:
        MetagpuError: if that cannot be done; says what is missing.
    """
    program = programs / f"mgctl-{platform.machine()}"
    place = folder / CLIENT_NAME

    try:
        wanted = program.read_bytes()
    except OSError as error:
        raise MetagpuError(
            f"this installation has no {program.name} ({error.strerror}); build it with "
            "`make mgctl` before the package is built"
        ) from error

    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # for users of any number, whatever our own files are like
        if place.is_dir():
            # A container runtime makes a folder of what it shall mount and does not find.
            place.rmdir()
        if not place.exists() or place.read_bytes() != wanted:
            # Containers go on with the file they have; a half-written one is nobody's.
            new = folder / f".{CLIENT_NAME}.new"
            shutil.copyfile(program, new)
            new.chmod(0o755)
            new.replace(place)
    except OSError as error:
        raise MetagpuError(
            f"{error.filename or place} cannot be made: {error.strerror or error}; run as root, or "
            "name another folder with --pod-dir"
        ) from error


@contextmanager
def listening(folder: Path) -> Iterator[socket.socket]:
    """Listen in the folder, for everybody, while the block lasts; one left behind is replaced.

    Raises:
        MetagpuError: if the socket cannot be made.
    """
    path = folder / SOCKET_NAME
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    identity = None

    try:
        try:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            path.chmod(0o666)  # users in containers have any number; who asks decides what is told
            listener.listen(_BACKLOG)
        except OSError as error:
            raise MetagpuError(
                f"cannot listen on {path}: {error.strerror or error}; run as root, or name another "
                "folder with --pod-dir"
            ) from error
        listener.settimeout(0)
        identity = identity_of(path)
        yield listener
    finally:
        listener.close()
        if identity is not None and identity_of(path) == identity:  # what others put there stays
            path.unlink(missing_ok=True)
