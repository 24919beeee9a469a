"""The limits of an MPS client: its part of a device's threads and memory. Pure.

A share stands for one **unit**; a container with several units is one client.
"""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from metagpu.backends.common.mps_daemon.control import PIPES, SHM, MpsDirectories
from metagpu.core.config.units import Bytes
from metagpu.core.grants.grant import Grant, Mount
from metagpu.core.grants.injection import add_mount, memory_mib
from metagpu.core.model.claim_sharing import MpsLimits
from metagpu.core.model.gpu import MIB, Gpu
from metagpu.core.model.shares import Share

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
