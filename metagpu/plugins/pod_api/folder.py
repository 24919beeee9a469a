"""The folder that containers with shares see: `mgctl` and its socket.

The folder is not in /run: distributions mount /run noexec, and containers inherit that. The folder
outlives the daemon and reboots, as do the mounts that the kubelet repeats.
"""

import platform
import shutil
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio import to_thread

from metagpu.core.errors import FileNotWritten, MetagpuError, PackageIncomplete
from metagpu.core.grants.injection import CLIENT_NAME

MGCTL_PROGRAMS: Final = Path(__file__).parents[2] / "programs"

log = structlog.get_logger()


class PodFolder:
    """The folder that is mounted into containers, prepared when it is first needed.

    Attributes:
        path: the folder, at the same path for the container runtime; `None` mounts none.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._installed: bool | None = None
        self._installing = anyio.Lock()

    async def prepare(self) -> Path | None:
        """Install mgctl in the folder, once; return the folder, or `None` if that failed.

        A failure is logged once; containers then start without mgctl.
        """
        # The layout and the server of the folder ask at the same time: two installations at once
        # would take each other's new file away.
        async with self._installing:
            if self.path is not None and self._installed is None:
                await self._install(self.path)
        return self.path if self._installed else None

    async def _install(self, path: Path) -> None:
        try:
            await to_thread.run_sync(install_mgctl, path)
            self._installed = True
        except MetagpuError as error:
            self._installed = False
            log.warning("mgctl installation failed", folder=str(path), error=str(error))


def install_mgctl(folder: Path, programs: Path = MGCTL_PROGRAMS) -> None:
    """Copy the `mgctl` of this architecture into the folder if missing; blocks.

    Raises:
        MetagpuError: the package has no such program, or the folder cannot be written.
    """
    program = programs / f"mgctl-{platform.machine()}"
    target = folder / CLIENT_NAME

    try:
        content = program.read_bytes()
    except OSError as error:
        raise PackageIncomplete(
            f"this installation has no {program.name} ({error.strerror}); build it with "
            "`make mgctl` before the package is built"
        ) from error

    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # for users of any number, whatever our own files are like
        if target.is_dir():
            # A container runtime creates a folder for a mount whose source is missing.
            target.rmdir()
        if not target.exists() or target.read_bytes() != content:
            # A rename: running containers keep their file, and none sees half of a new one.
            new = folder / f".{CLIENT_NAME}.new"
            shutil.copyfile(program, new)
            new.chmod(0o755)
            new.replace(target)
    except OSError as error:
        raise FileNotWritten(
            f"{error.filename or target} cannot be made: {error.strerror or error}; run as root, "
            "or name another folder with --pod-dir"
        ) from error
