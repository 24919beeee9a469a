"""The kubelet's checkpoint of devices and Allocate answers; read-only here.

The kubelet stores every answer to Allocate and replays the answer at each start of the container.
So the checkpoint has the values of running containers, whatever the configuration says today.
The checkpoint names the holder of each id before the API server has sent a single pod. An ended pod
stays in the file until the kubelet writes it again.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec.structs import replace

from metagpu.core.errors import describe_error
from metagpu.core.grants.injection import MEMORY
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.shares import ResourceName, ShareId, gpu_of
from metagpu.core.model.snapshot import AnsweredNodes
from metagpu.core.usage.accounting import NO_PROMISED_MEMORY, PromisedMemory
from metagpu.core.usage.lost_devices import AllocatedDevices
from metagpu.plugins.kubelet.paths import CHECKPOINT_FILE
from metagpu.plugins.kubelet.pb import v1beta1

MIG_PREFIX: Final = "MIG-"
"""The prefix of MIG devices' uuids."""
_NODE: Final = re.compile(rb"/dev/nvidia(\d+)")
"""The device node of a GPU in an answer: to decode all answers takes a hundred times as long."""

log = structlog.get_logger()

_ENTRY = {
    "pod_uid": "PodUID",
    "container": "ContainerName",
    "resource": "ResourceName",
    "answer": "AllocResp",
    "devices": "DeviceIDs",
}


class _Entry(msgspec.Struct, frozen=True, rename=_ENTRY):
    """One container's devices of one resource, and its ContainerAllocateResponse.

    `devices` has device ids by NUMA node; before Kubernetes 1.20 it was a list.
    """

    pod_uid: str
    container: str
    resource: str = ""
    answer: bytes = b""
    devices: dict[str, tuple[str, ...] | None] | tuple[str, ...] | None = None


_PARTS = {"entries": "PodDeviceEntries", "registered": "RegisteredDevices"}


class _Data(msgspec.Struct, frozen=True, rename=_PARTS):
    entries: tuple[_Entry, ...] | None = None
    registered: dict[str, msgspec.Raw] | None = None


class _Checkpoint(msgspec.Struct, frozen=True, rename={"data": "Data"}):
    data: _Data


class AllocatedIds(msgspec.Struct, frozen=True):
    """The ids of all devices that the kubelet has allocated, by its checkpoint.

    Attributes:
        pods: the ids of each pod, by its uid.
        containers: pod uid and name of the containers that have each id, init containers too.
        nodes: the device nodes of GPUs in the answers for the ids of each GPU.
        resources: the resource name of each id.
        inode, written_at: differ from one writing of the file to the next; the time is the file's
            modification time in nanoseconds.
    """

    pods: Mapping[str, frozenset[ShareId]]
    resources: Mapping[ShareId, ResourceName]
    inode: int
    written_at: int
    containers: Mapping[ShareId, frozenset[tuple[str, str]]] = msgspec.field(default_factory=dict)
    nodes: Mapping[GpuId, AnsweredNodes] = msgspec.field(default_factory=dict)

    @property
    def version(self) -> tuple[int, int]:
        """The identity of this writing of the file."""
        return self.inode, self.written_at


def read_allocated_ids(directory: Path) -> AllocatedIds | None:
    """Return the ids of all allocated devices; blocks.

    `None` where they are unknown: the file is missing or damaged.
    """
    try:
        with (directory / CHECKPOINT_FILE).open("rb") as file:
            status = os.fstat(file.fileno())
            found = _parse_ids(file.read())
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    return replace(found, inode=status.st_ino, written_at=status.st_mtime_ns)


@lru_cache(maxsize=1)  # read at each look at the kubelet, written at each Allocate
def _parse_ids(text: bytes) -> AllocatedIds:
    pods = defaultdict[str, set[ShareId]](set)
    resources: dict[ShareId, ResourceName] = {}
    containers = defaultdict[ShareId, set[tuple[str, str]]](set)
    numbers = defaultdict[ShareId, frozenset[int]](frozenset)
    for entry in msgspec.json.decode(text, type=_Checkpoint).data.entries or ():
        ids = list(_device_ids(entry))
        pods[entry.pod_uid].update(ids)
        resources.update(dict.fromkeys(ids, ResourceName(entry.resource)))
        named = frozenset(map(int, _NODE.findall(entry.answer)))
        # An answer with fewer has none of a node that was missing: it tells nothing.
        tells = len(named) >= len({gpu_of(share) for share in ids})
        for share in ids:
            containers[share].add((entry.pod_uid, entry.container))
            numbers[share] |= named if tells else frozenset()
    return AllocatedIds(
        {uid: frozenset(ids) for uid, ids in pods.items()},
        resources,
        0,
        0,
        {share: frozenset(its) for share, its in containers.items()},
        _by_gpu(numbers),
    )


def _by_gpu(numbers: Mapping[ShareId, frozenset[int]]) -> Mapping[GpuId, AnsweredNodes]:
    found = defaultdict[tuple[GpuId, frozenset[int]], set[ShareId]](set)
    for share, named in numbers.items():
        if named:
            found[gpu_of(share), named].add(share)
    by_gpu = defaultdict[GpuId, dict[frozenset[int], frozenset[ShareId]]](dict)
    for (gpu, named), shares in found.items():
        by_gpu[gpu][named] = frozenset(shares)
    return by_gpu


def read_registered_resources(directory: Path) -> frozenset[ResourceName] | None:
    """Return the resources that the kubelet counts, also without a plugin; blocks.

    `None` where they are unknown.
    """
    try:
        text = (directory / CHECKPOINT_FILE).read_bytes()
        known = msgspec.json.decode(text, type=_Checkpoint).data.registered or {}
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    return frozenset(map(ResourceName, known))


def read_allocated_devices(directory: Path) -> tuple[AllocatedDevices, ...] | None:
    """Return the GPUs and MIG devices in the answers for containers' shares; blocks.

    `None` where they are unknown.
    """
    try:
        return tuple(_allocated((directory / CHECKPOINT_FILE).read_bytes()))
    except Exception:  # noqa: BLE001 - as in `read_promised_memory`, which has logged it
        return None


def _allocated(text: bytes) -> Iterator[AllocatedDevices]:
    for entry in msgspec.json.decode(text, type=_Checkpoint).data.entries or ():
        devices = frozenset(name for name, _ in _memory(entry))
        if devices:
            yield AllocatedDevices(
                entry.pod_uid, entry.container, frozenset(_device_ids(entry)), devices
            )


def _device_ids(entry: _Entry) -> Iterator[ShareId]:
    devices = entry.devices or ()
    parts = devices.values() if isinstance(devices, dict) else (devices,)
    for part in parts:
        yield from map(ShareId, part or ())


def _memory(entry: _Entry) -> Iterator[tuple[str, int]]:
    """Yield each device of an answer with its promised memory in MiB."""
    envs = v1beta1.ContainerAllocateResponse.parse(entry.answer).envs
    for part in filter(None, envs.get(MEMORY, "").split(",")):
        device, _, mib = part.partition("=")
        yield device, int(mib)


def read_promised_memory(directory: Path) -> PromisedMemory:
    """Return the memory of each GPU that containers were promised, in bytes; blocks.

    An unreadable checkpoint is logged and counts as empty; a new node has no checkpoint.
    """
    path = directory / CHECKPOINT_FILE
    promised: defaultdict[tuple[str, str, GpuId], int] = defaultdict(int)

    try:
        entries = msgspec.json.decode(path.read_bytes(), type=_Checkpoint).data.entries or ()
        for entry in entries:
            for device, mib in _memory(entry):
                promised[entry.pod_uid, entry.container, GpuId(device)] += mib * MIB
    except FileNotFoundError:
        return NO_PROMISED_MEMORY
    except Exception as error:  # noqa: BLE001 - protobuf fails in many ways, and all mean the same
        log.warning(
            "kubelet checkpoint unreadable",
            file=str(path),
            error=describe_error(error),
            effect="limits of running containers follow the present size of shares",
        )
        return NO_PROMISED_MEMORY
    return dict(promised)
