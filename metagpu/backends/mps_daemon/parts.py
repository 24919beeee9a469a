"""What a client of MPS has of a GPU or MIG instance: its part of the threads and of the memory.

Pure. A **unit** is what a share stands for; a container that has several is one client still.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from metagpu.backends.mps_daemon.control import PIPES, SHM, Folders
from metagpu.core.gpu import MIB, Gpu
from metagpu.core.grant import Grant, Mount
from metagpu.core.injection import memory_mib
from metagpu.core.model import Lease, Share
from metagpu.core.units import Bytes

UNITS: Final = 100
MOST_UNITS: Final = 100
"""Of one device: threads are given in whole percents."""
SERVER_MEMORY: Final = Bytes(64 * MIB)
"""For the MPS server itself: more than twice the 27 MiB seen on a V100 (nebuly-ai/nos#39)."""

_VOLTA: Final = (7, 0)
_CLIENTS: Final = 48
_CLIENTS_BEFORE_VOLTA: Final = 16
MOST_CLIENTS: Final = 60
"""Client contexts of one GPU, by NVIDIA's documentation of MPS: 16 before Volta, then 48, and 60
with CUDA 13.1 and newer."""

THREADS: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


def check_number(name: str, value: int | None, most: int) -> None:
    """Check a number that a pool gives, if it gives one.

    Raises:
        ValueError: if it is out of bounds; says which are.
    """
    if value is not None and not 1 <= value <= most:
        raise ValueError(f"{name} is {value}; allowed: 1 to {most}")


def clients_of(gpu: Gpu, most: int | None) -> int:
    """Say how many clients a whole GPU serves at once: `most`, or what its architecture allows."""
    old = gpu.compute_capability is not None and gpu.compute_capability < _VOLTA
    return most or (_CLIENTS_BEFORE_VOLTA if old else _CLIENTS)


def usable(memory: int, server: int) -> int:
    """Say how many bytes there are for clients, in whole MiB: so no rounding adds to it."""
    return max(0, (memory - server) // MIB * MIB)


def containers(leases: Iterable[Lease]) -> int:
    """Count the containers that hold these; one whose name is not known yet by when it came."""
    return len({lease.holder or lease.since for lease in leases})


def as_client(grant: Grant, folders: Folders, held: Sequence[Share], units: int) -> Grant:
    """Add to what a container gets the way to the control daemon, and limits to its units.

    All limits are rounded down, so that those of all clients together are no more than there is.

    Args:
        grant: gives it one device, the one whose control daemon has these folders.
        folders: of that control daemon.
        held: the shares that the container has of it.
        units: into how many the device is cut.
    """
    return replace(
        grant,
        envs={
            **grant.envs,
            PIPES: str(folders.pipes),
            THREADS: str(max(1, 100 * len(held) // units)),
            # The container sees one device, so MPS knows it as number 0.
            MEMORY: f"0={memory_mib(held)}M",
        },
        mounts=(
            *grant.mounts,
            Mount(str(folders.pipes), str(folders.pipes), read_only=False),
            Mount(str(SHM), str(folders.shm), read_only=False),
        ),
    )
