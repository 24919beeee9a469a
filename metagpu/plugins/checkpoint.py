"""What the kubelet keeps on disk of who holds what, and what they were told; never written here.

It keeps every answer to Allocate, and replays it at each start of the container: whatever the
configuration says today, a container was told what stands there.
It knows who holds which id before the API server has told it of a single pod, and forgets an ended
pod only with its next writing.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import structlog

from metagpu.core.errors import why
from metagpu.core.gpu import MIB, GpuId
from metagpu.core.injection import MEMORY
from metagpu.core.lost import Given
from metagpu.core.model import ShareId
from metagpu.core.usage import NOTHING_TOLD, Told
from metagpu.plugins.pb import v1beta1

FILE: Final = "kubelet_internal_checkpoint"
SOCKET: Final = "kubelet.sock"
"""Stands beside it."""
MIG: Final = "MIG-"
"""Begins the uuids of MIG devices."""

log = structlog.get_logger()

_ENTRY = {
    "pod_uid": "PodUID",
    "container": "ContainerName",
    "answer": "AllocResp",
    "devices": "DeviceIDs",
}


class _Entry(msgspec.Struct, frozen=True, rename=_ENTRY):
    """What one container holds of one resource; `answer` is a ContainerAllocateResponse.

    `devices` are by NUMA node; before Kubernetes 1.20 they were a list.
    """

    pod_uid: str
    container: str
    answer: bytes = b""
    devices: dict[str, tuple[str, ...] | None] | tuple[str, ...] | None = None


class _Data(msgspec.Struct, frozen=True, rename={"entries": "PodDeviceEntries"}):
    entries: tuple[_Entry, ...] | None = None


class _Checkpoint(msgspec.Struct, frozen=True, rename={"data": "Data"}):
    data: _Data


def read_held(directory: Path) -> frozenset[ShareId] | None:
    """Read the ids that the kubelet has noted as given to containers; blocks.

    None where that cannot be known: it is not the kubelet's folder, or the file is damaged.
    """
    try:
        return frozenset(_ids((directory / FILE).read_bytes()))
    except FileNotFoundError:
        return frozenset() if (directory / SOCKET).exists() else None
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def read_given(directory: Path) -> tuple[Given, ...] | None:
    """Read which MIG devices containers were told for which shares; blocks.

    None where that cannot be known.
    """
    try:
        return tuple(_given((directory / FILE).read_bytes()))
    except Exception:  # noqa: BLE001 - as in `read_told`, which has told of it at the start
        return None


def _given(text: bytes) -> Iterator[Given]:
    for entry in msgspec.json.decode(text, type=_Checkpoint).data.entries or ():
        devices = frozenset(name for name, _ in _memory(entry) if name.startswith(MIG))
        if devices:
            yield Given(entry.pod_uid, entry.container, frozenset(_held(entry)), devices)


def _ids(text: bytes) -> Iterator[ShareId]:
    for entry in msgspec.json.decode(text, type=_Checkpoint).data.entries or ():
        yield from _held(entry)


def _held(entry: _Entry) -> Iterator[ShareId]:
    devices = entry.devices or ()
    parts = devices.values() if isinstance(devices, dict) else (devices,)
    for part in parts:
        yield from map(ShareId, part or ())


def _memory(entry: _Entry) -> Iterator[tuple[str, int]]:
    """Give what a container was told of each device, in MiB."""
    envs = v1beta1.ContainerAllocateResponse.parse(entry.answer).envs
    for part in filter(None, envs.get(MEMORY, "").split(",")):
        device, _, mib = part.partition("=")
        yield device, int(mib)


def read_told(directory: Path) -> Told:
    """Read how much memory of each GPU containers were told; blocks.

    One that cannot be read is told of and passed over; on a new node there is none.
    """
    path = directory / FILE
    told: defaultdict[tuple[str, str, GpuId], int] = defaultdict(int)

    try:
        entries = msgspec.json.decode(path.read_bytes(), type=_Checkpoint).data.entries or ()
        for entry in entries:
            for device, mib in _memory(entry):
                told[entry.pod_uid, entry.container, GpuId(device)] += mib * MIB
    except FileNotFoundError:
        return NOTHING_TOLD
    except Exception as error:  # noqa: BLE001 - protobuf fails in many ways, and all mean the same
        log.warning(
            "the kubelet's checkpoint cannot be read: containers that are older than this daemon "
            "are held to shares of the present size",
            file=str(path),
            why=why(error),
        )
        return NOTHING_TOLD
    return dict(told)
