"""An MPS control daemon: its commands, its directories, and the limits of clients.

Each command is one run of NVIDIA's program, with one deadline; the commands are those of
`nvidia-cuda-mps-control(1)`. A share stands for one **unit** of a device's threads and memory; a
container with several units is one client.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import anyio
import msgspec
from msgspec.structs import replace

from metagpu.core.config.units import Bytes
from metagpu.core.contracts.programs import Daemons, DaemonSpec
from metagpu.core.errors import ProgramError
from metagpu.core.grants.grant import Grant, Mount
from metagpu.core.grants.injection import add_mount, memory_mib
from metagpu.core.model.gpu import MIB, Gpu
from metagpu.core.model.resource_claims import MpsLimits
from metagpu.core.model.shares import Share

PROGRAM: Final = "nvidia-cuda-mps-control"
PIPES: Final = "CUDA_MPS_PIPE_DIRECTORY"
_LOGS: Final = "CUDA_MPS_LOG_DIRECTORY"
SHM: Final = Path("/dev/shm")  # noqa: S108 - the path that MPS uses
_CGROUP: Final = "metagpu"
"""The cgroup of all control daemons, beside the kubelet's `kubepods`: no container's end, and no
limit of a container, concerns what is in it."""
_LOCK: Final = "control_lock"
"""The file in the pipe directory that NVIDIA's daemon locks while it runs, in every version."""
_PIPES_SIZE: Final = 16 * MIB
"""For sockets, a lock and a FIFO: none of them has content."""
_CUDA_SUCCESS: Final = "0"
_LONGEST_ANSWER: Final = 4096
"""Characters of an answer. The longest is a list of 60 clients; a container's root can answer in
the daemon's place."""


class MpsDirectories(msgspec.Struct, frozen=True):
    """The directories of one control daemon, below the run directory."""

    home: Path

    @classmethod
    def for_device(cls, run_dir: str, device: str) -> Self:
        """Return the directories of a device; the device's name is theirs."""
        return cls(Path(run_dir) / "mps" / device)

    @property
    def pipes(self) -> Path:
        """The directory where clients find the daemon. A container's root may write to it."""
        return self.home / "pipe"

    @property
    def logs(self) -> Path:
        """The directory of the logs of the daemon and its servers."""
        return self.home / "log"

    @property
    def shm(self) -> Path:
        """The directory that daemon and clients see as /dev/shm. All users may write."""
        return self.home / "shm"

    @property
    def pid_file(self) -> Path:
        """The file with the daemon's number, beside the directories that containers see."""
        return self.home / "pid"

    def create(self) -> None:
        """Create the missing directories, with modes that let every user's client in.

        Other users must be able to pass through the outer directories, since a server runs as the
        user of its clients; they need not list them.

        Raises:
            OSError: if the directories cannot be created.
        """
        for directory, mode in (
            (self.home.parent, 0o711),
            (self.home, 0o711),
            (self.pipes, 0o755),
            (self.logs, 0o755),
            (self.shm, 0o1777),
        ):
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(mode)

    def write_gpu(self, gpu: str) -> None:
        """Write down the GPU of a MIG device, whose name does not contain it."""
        self._gpu.write_text(gpu, encoding="ascii")

    def remove(self) -> None:
        """Remove the directories with their content: the device is gone."""
        shutil.rmtree(self.home, ignore_errors=True)

    def save_compute_mode(self, mode: str) -> None:
        """Save the compute mode to restore later, unless one is saved already."""
        with suppress(FileExistsError), self._compute_mode.open("x", encoding="ascii") as file:
            file.write(mode)

    def read_compute_mode(self) -> str | None:
        """Read the compute mode to restore; `None` if none is saved."""
        try:
            return self._compute_mode.read_text(encoding="ascii")
        except OSError:
            return None

    def discard_compute_mode(self) -> None:
        """Discard the saved compute mode: it is restored."""
        self._compute_mode.unlink(missing_ok=True)

    @property
    def _gpu(self) -> Path:
        return self.home / "gpu"

    @property
    def _compute_mode(self) -> Path:
        return self.home / "compute-mode"


def leftover_devices(run_dir: str, gpu: str) -> list[str]:
    """List the MIG devices of a GPU that have directories; some may be gone."""
    found = []
    for file in Path(run_dir).glob("mps/*/gpu"):
        with suppress(OSError):  # another task removes it
            if file.read_text(encoding="ascii") == gpu:
                found.append(file.parent.name)
    return found


def control_daemon_spec(device: str, directories: MpsDirectories, shared_memory: int) -> DaemonSpec:
    """Describe the control daemon of one GPU or MIG device, in the foreground.

    One daemon for each MIG device, named like this, is NVIDIA's own way
    (NVIDIA/k8s-device-plugin#572).

    Args:
        device: CUDA's name of the device.
        directories: of the daemon.
        shared_memory: the bytes of /dev/shm of the daemon and all its clients.
    """
    return DaemonSpec(
        PROGRAM,
        ("-f",),
        env={
            "CUDA_VISIBLE_DEVICES": device,
            PIPES: str(directories.pipes),
            _LOGS: str(directories.logs),
        },
        output=directories.logs / "output.log",
        pid_file=directories.pid_file,
        lock=directories.pipes / _LOCK,
        mounts={SHM: directories.shm},
        volumes={directories.pipes: _PIPES_SIZE, directories.shm: shared_memory},
        cgroup=f"{_CGROUP}/mps-{device}",
    )


class MpsControl(msgspec.Struct, frozen=True):
    """The commands to one control daemon, one after the other.

    NVIDIA's daemon takes one command at a time. It closes the connection of a second one unread,
    and the program that sent it prints nothing and ends with status 0, also for `quit`. So a
    daemon gets all commands of an agent through one of these.

    Attributes:
        deadline: seconds for each command.
    """

    daemons: Daemons
    daemon: DaemonSpec
    deadline: float
    _turn: anyio.Lock = msgspec.field(default_factory=anyio.Lock)

    async def probe(self) -> None:
        """Check that the daemon answers a command with a number.

        Raises:
            ProgramError: if it does not.
        """
        command = "get_default_active_thread_percentage"
        answer = await self._send(command)
        if not answer:
            raise ProgramError(f"no answer to {command}: it may be answering another program")
        try:
            float(answer)
        except ValueError:
            raise _unexpected(command, answer) from None

    async def servers(self) -> Sequence[int]:
        """List the servers: none before the first client, and then one for each user.

        Raises:
            ProgramError: if the daemon does not answer, or not with numbers.
        """
        command = "get_server_list"
        return _numbers(command, await self._ask(command))

    async def status(self, server: int) -> str:
        """Return the status of a server, such as `ACTIVE` or `FAULT`.

        Raises:
            ProgramError: if the daemon does not answer.
        """
        return await self._ask(f"get_server_status {server}")

    async def clients(self, server: int) -> Sequence[int]:
        """List the client processes of a server; none of one that has ended.

        Raises:
            ProgramError: if the daemon does not answer, or not with numbers.
        """
        command = f"get_client_list {server}"
        answer = await self._ask(command)
        return [] if answer == f"Server {server} not found" else _numbers(command, answer)

    async def servers_by_client(self) -> Mapping[int, int]:
        """List the client processes of all servers, each with its server.

        Raises:
            ProgramError: if the daemon does not answer, or not with numbers.
        """
        return {
            client: server
            for server in await self.servers()
            for client in await self.clients(server)
        }

    async def end_client(self, server: int, client: int) -> None:
        """End a client's work on the GPU; then no kill of its process harms other clients.

        The command waits for the kernels that run; the client's next call of CUDA fails.

        Raises:
            ProgramError: if the daemon does not answer in time, or with an error of CUDA.
        """
        command = f"terminate_client {server} {client}"
        answer = await self._ask(command)
        if answer.split()[-1:] != [_CUDA_SUCCESS]:
            raise _unexpected(command, answer)

    async def shut_down(self, server: int) -> None:
        """Shut a server down once it has no clients; a new client starts another server.

        Raises:
            ProgramError: if the daemon does not answer.
        """
        await self._send(f"shutdown_server {server}")

    async def quit(self) -> None:
        """Quit the daemon once its servers have no clients; refuse new clients.

        A daemon that answers another program meanwhile does not hear of it. The answer is the
        status with which the daemon ends: not 0 if one of its servers failed.

        Raises:
            ProgramError: if the daemon does not answer, does not end in time, or ends with a status
                that is not 0.
        """
        await self._send("quit")

    async def _ask(self, command: str) -> str:
        """Send a command, once more if the answer is empty: it may be lost."""
        return await self._send(command) or await self._send(command)

    async def _send(self, command: str) -> str:
        async with self._turn:
            answer = await self.daemons.send_command(self.daemon, f"{command}\n", self.deadline)
        if len(answer) > _LONGEST_ANSWER:
            raise _unexpected(command, answer)
        return answer


def _numbers(command: str, answer: str) -> Sequence[int]:
    try:
        return [int(line) for line in answer.split()]
    except ValueError:
        raise _unexpected(command, answer) from None


def _unexpected(command: str, answer: str) -> ProgramError:
    return ProgramError(f"unexpected answer to {command}: {answer[:80]!r}")


def format_pids(pids: Sequence[int]) -> str:
    """Format process ids for a message."""
    return ", ".join(map(str, pids))


DEFAULT_UNITS: Final = 100
MAX_UNITS: Final = 100
"""Of one device: MPS limits threads in whole percents."""
SERVER_MEMORY: Final = Bytes(64 * MIB)
"""For the MPS server itself: more than twice the 27 MiB seen on a V100 (nebuly-ai/nos#39)."""
SHARED_MEMORY: Final = Bytes(1024 * MIB)
"""For /dev/shm of all clients of a device: 16 times what a container has by default."""
LEAST_SHARED_MEMORY: Final = 64 * MIB
"""What NVIDIA's plugin gives to all clients of a node, and a runtime to a container."""

_VOLTA: Final = (7, 0)
_CLIENTS: Final = 48
_CLIENTS_BEFORE_VOLTA: Final = 16
MAX_CLIENTS: Final = 60
"""Client contexts of one GPU, by NVIDIA's documentation of MPS: 16 before Volta, then 48, and 60
with CUDA 13.1 and newer."""

THREADS: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


def check_number(name: str, value: int | None, most: int) -> None:
    """Check an optional number of a pool's options.

    Raises:
        ValueError: if the number is out of bounds; names the bounds.
    """
    if value is not None and not 1 <= value <= most:
        raise ValueError(f"{name} is {value}; allowed: 1 to {most}")


def check_shared_memory(size: Bytes) -> None:
    """Check the size of /dev/shm.

    Raises:
        ValueError: if the size is less than what MPS itself may need.
    """
    if size < LEAST_SHARED_MEMORY:
        raise ValueError(f"sharedMemory is {size} bytes; allowed: 64Mi or more")


def max_clients_of(gpu: Gpu, configured: int | None) -> int:
    """Return the clients that a whole GPU serves: as configured, or by architecture."""
    old = gpu.compute_capability is not None and gpu.compute_capability < _VOLTA
    return configured or (_CLIENTS_BEFORE_VOLTA if old else _CLIENTS)


def usable_memory(memory: int, server: int) -> int:
    """Return the bytes for clients, rounded down to whole MiB so that the limits fit."""
    return max(0, (memory - server) // MIB * MIB)


def grant_to_client(
    grant: Grant, directories: MpsDirectories, held: Sequence[Share], units: int
) -> Grant:
    """Add the control daemon's directories and the limits of the units to a grant.

    All limits are rounded down, so that those of all clients together are no more than there is.

    Args:
        grant: a grant of one device, the one of the control daemon.
        directories: of the control daemon.
        held: the container's shares of the device.
        units: the number of units of the device.
    """
    pipes, shm = str(directories.pipes), str(directories.shm)
    for mount in (Mount(pipes, pipes, read_only=False), Mount(str(SHM), shm, read_only=False)):
        grant = add_mount(grant, mount)
    return replace(
        grant,
        envs={
            **grant.envs,
            PIPES: pipes,
            THREADS: str(max(1, 100 * len(held) // units)),
            # The container sees one device, so MPS knows it as number 0.
            MEMORY: f"0={memory_mib(held)}M",
        },
    )


def limit_clients(grant: Grant, limits: MpsLimits) -> Grant:
    """Return the grant of a whole device with the limits of a claim, if there are any."""
    envs = dict(grant.envs)
    if limits.threads is not None:
        envs[THREADS] = str(limits.threads)
    if limits.memory_mib is not None:
        envs[MEMORY] = f"0={limits.memory_mib}M"
    return replace(grant, envs=envs)
