"""Speaks to an MPS control daemon: one command, one run of NVIDIA's program, one deadline.

The commands are those of `nvidia-cuda-mps-control(1)`.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import msgspec

from metagpu.core.companions import Companion, Companions
from metagpu.core.errors import ToolError

PROGRAM: Final = "nvidia-cuda-mps-control"
PIPES: Final = "CUDA_MPS_PIPE_DIRECTORY"
_LOGS: Final = "CUDA_MPS_LOG_DIRECTORY"
SHM: Final = Path("/dev/shm")  # noqa: S108 - where MPS has its shared memory


class Folders(msgspec.Struct, frozen=True):
    """What the control daemon of a GPU or MIG instance has to itself, below the run directory."""

    home: Path

    @classmethod
    def of(cls, run_dir: str, device: str) -> Self:
        """Give those of a device, which have its name."""
        return cls(Path(run_dir) / "mps" / device)

    @property
    def pipes(self) -> Path:
        """Where clients find it: its sockets and the file with its number."""
        return self.home / "pipe"

    @property
    def logs(self) -> Path:
        """Where it and its servers write what they do."""
        return self.home / "log"

    @property
    def shm(self) -> Path:
        """What it and its clients see as /dev/shm."""
        return self.home / "shm"

    def make(self) -> None:
        """Make them where they are missing, with modes that let every user's client in.

        Other users must be able to pass through the outer ones, since a server runs as the user of
        its clients; nobody else needs to see whose they are.

        Raises:
            OSError: if they cannot be made.
        """
        for folder, mode in (
            (self.home.parent, 0o711),
            (self.home, 0o711),
            (self.pipes, 0o755),
            (self.logs, 0o755),
            (self.shm, 0o1777),
        ):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(mode)

    def pid(self) -> int | None:
        """Read the number that the control daemon wrote down; `None` if there is none."""
        try:
            return int((self.pipes / "nvidia-cuda-mps-control.pid").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def note_gpu(self, gpu: str) -> None:
        """Note which GPU the device is an instance of: its own name does not tell."""
        self._gpu.write_text(gpu, encoding="ascii")

    def forget(self) -> None:
        """Remove them with all that is in them: the device is gone."""
        shutil.rmtree(self.home, ignore_errors=True)

    def note_mode(self, mode: str) -> None:
        """Note the compute mode to put back, unless one is noted already."""
        with suppress(FileExistsError), self._mode.open("x", encoding="ascii") as file:
            file.write(mode)

    def noted_mode(self) -> str | None:
        """Read the compute mode to put back; `None` if there is none."""
        try:
            return self._mode.read_text(encoding="ascii")
        except OSError:
            return None

    def forget_mode(self) -> None:
        """Forget the compute mode: it was put back."""
        self._mode.unlink(missing_ok=True)

    @property
    def _gpu(self) -> Path:
        return self.home / "gpu"

    @property
    def _mode(self) -> Path:
        return self.home / "compute-mode"


def devices_left_by(run_dir: str, gpu: str) -> list[str]:
    """Find the instances of a GPU that have folders, be they there still or not."""
    found = []
    for note in Path(run_dir).glob("mps/*/gpu"):
        with suppress(OSError):  # it is going
            if note.read_text(encoding="ascii") == gpu:
                found.append(note.parent.name)
    return found


def control_daemon(device: str, folders: Folders) -> Companion:
    """Describe the control daemon of a GPU or MIG device: in the foreground, blind for all others.

    One for each MIG device, named like this, is NVIDIA's own way (NVIDIA/k8s-device-plugin#572).
    """
    env: Mapping[str, str] = {
        "CUDA_VISIBLE_DEVICES": device,
        PIPES: str(folders.pipes),
        _LOGS: str(folders.logs),
    }
    return Companion(PROGRAM, ("-f",), env, folders.logs / "output.log", {SHM: folders.shm})


class Control(msgspec.Struct, frozen=True):
    """The commands to one control daemon.

    Attributes:
        deadline: seconds for each.
    """

    companions: Companions
    daemon: Companion
    deadline: float

    async def probe(self) -> None:
        """See whether it answers, with sense.

        Raises:
            ToolError: if not.
        """
        command = "get_default_active_thread_percentage"
        answer = await self._ask(command)
        try:
            float(answer)
        except ValueError:
            raise _senseless(command, answer) from None

    async def servers(self) -> Sequence[int]:
        """List its servers: none before the first client, and then one for each user.

        Raises:
            ToolError: if it does not answer, or without sense.
        """
        return await self._numbers("get_server_list")

    async def status(self, server: int) -> str:
        """Give what a server is, such as `ACTIVE` or `FAULT`.

        Raises:
            ToolError: if it does not answer.
        """
        return await self._ask(f"get_server_status {server}")

    async def clients(self, server: int) -> Sequence[int]:
        """List the processes that are clients of a server.

        Raises:
            ToolError: if it does not answer, or without sense.
        """
        return await self._numbers(f"get_client_list {server}")

    async def shut_down(self, server: int) -> None:
        """Let a server end once it has no clients; another is started when there is a new one.

        Raises:
            ToolError: if it does not answer.
        """
        await self._ask(f"shutdown_server {server}")

    async def quit(self) -> None:
        """Let it end with its servers, once these have no clients; it takes new ones no more.

        Raises:
            ToolError: if it does not answer or does not end in time.
        """
        await self._ask("quit")

    async def _ask(self, command: str) -> str:
        return await self.companions.ask(self.daemon, f"{command}\n", self.deadline)

    async def _numbers(self, command: str) -> Sequence[int]:
        answer = await self._ask(command)
        try:
            return [int(line) for line in answer.split()]
        except ValueError:
            raise _senseless(command, answer) from None


def _senseless(command: str, answer: str) -> ToolError:
    return ToolError(f"it answered {command} with {answer[:80]!r}")
