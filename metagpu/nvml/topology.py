"""The connections between GPUs, read once for each set of GPUs.

A GPU's NVLinks are read in the GPU's own worker, a pair's PCI path in a worker of the pair: a call
that hangs or fails leaves that pair unknown, and no other. The next survey reads failed ones again,
and also a GPU whose NVLinks are all down: an NVSwitch machine's Fabric Manager may start later.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Final, NamedTuple

import anyio
import pynvml

from metagpu.core.errors import DriverError
from metagpu.core.model.gpu import (
    Connection,
    Gpu,
    GpuId,
    PciPath,
    Topology,
    normalize_bus_id,
)
from metagpu.nvml.errors import (
    CONCLUSIVE,
    FAILURES,
    NOT_REPORTED,
    error_code,
    or_none,
)
from metagpu.nvml.queries import Handle
from metagpu.nvml.session_gpu import SessionGpu
from metagpu.nvml.worker import NvmlWorker

_NO_SUCH_LINK: Final = NOT_REPORTED | {pynvml.NVML_ERROR_INVALID_ARGUMENT}
_PATHS: Final = {path.value: path for path in PciPath}


class NvLinks(NamedTuple):
    """The active NVLinks of a GPU.

    Attributes:
        switched: the number of links to NVSwitches.
        peers: the number of links to the device at each PCI address.
        is_final: whether another read cannot find more links.
    """

    switched: int
    peers: Mapping[str, int]
    is_final: bool


class TopologyReader:
    """Reads and keeps the connections between the GPUs of one NVML session."""

    def __init__(self) -> None:
        self._pair_workers: dict[frozenset[GpuId], NvmlWorker] = {}
        self._links: dict[GpuId, NvLinks] = {}
        self._paths: dict[frozenset[GpuId], PciPath | None] = {}

    @property
    def workers(self) -> Iterable[NvmlWorker]:
        """The workers of the GPU pairs."""
        return self._pair_workers.values()

    async def read(
        self, gpus: Sequence[Gpu], known: Mapping[GpuId, SessionGpu], deadline: float
    ) -> Topology:
        """Read missing connections, in `deadline` seconds at most; return all known ones.

        This never fails. A GPU that was missing in between is read again.
        """
        present = {gpu.id for gpu in gpus}
        self._links = {gpu: links for gpu, links in self._links.items() if gpu in present}
        self._paths = {pair: path for pair, path in self._paths.items() if pair <= present}
        until = anyio.current_time() + deadline

        async with anyio.create_task_group() as group:
            for position, gpu in enumerate(gpus if len(gpus) > 1 else ()):
                group.start_soon(self._read_links, gpu.id, known[gpu.id], until)
                group.start_soon(self._read_paths, gpu, gpus[position + 1 :], known, until)

        found = {frozenset((a.id, b.id)): self._between(a, b) for a, b in combinations(gpus, 2)}
        return Topology({pair: it for pair, it in found.items() if it != Connection()})

    async def _read_links(self, gpu: GpuId, known: SessionGpu, until: float) -> None:
        links = self._links.get(gpu)
        if links is None or not links.is_final:
            with suppress(DriverError):
                left = until - anyio.current_time()
                self._links[gpu] = await known.worker.call(partial(read_links, known.handle), left)

    async def _read_paths(
        self, gpu: Gpu, others: Sequence[Gpu], known: Mapping[GpuId, SessionGpu], until: float
    ) -> None:
        for other in others:
            pair = frozenset((gpu.id, other.id))
            left = until - anyio.current_time()
            if pair in self._paths or left <= 0:
                continue

            worker = self._pair_workers.setdefault(
                pair, NvmlWorker(f"GPU {gpu.index} with GPU {other.index}")
            )
            read = partial(read_path, known[gpu.id].handle, known[other.id].handle)
            with suppress(DriverError):
                self._paths[pair] = await worker.call(read, left)

    def _between(self, a: Gpu, b: Gpu) -> Connection:
        path = self._paths.get(frozenset((a.id, b.id)))
        of_a, of_b = self._links.get(a.id), self._links.get(b.id)
        if of_a is None or of_b is None:
            return Connection(path)

        # Where the two ends report different numbers, the smaller one counts.
        direct = min(of_a.peers.get(b.pci_bus_id, 0), of_b.peers.get(a.pci_bus_id, 0))
        switched = min(of_a.switched, of_b.switched)
        return Connection(path, direct + switched, switched > 0)


def read_path(a: Handle, b: Handle) -> PciPath | None:
    """Return the PCI path between two GPUs: the longer one, if the two answers differ."""
    levels = [
        or_none(pynvml.nvmlDeviceGetTopologyCommonAncestor, *ends) for ends in ((a, b), (b, a))
    ]
    return None if None in levels else _PATHS.get(max(levels))


def read_links(handle: Handle) -> NvLinks:
    """Read a GPU's NVLinks; a link whose read fails counts as down."""
    up, down, failed = 0, 0, 0
    switched, peers = 0, Counter[str]()

    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
                down += 1
                continue
            peer = _far_end(handle, link)
        except FAILURES as failure:
            if error_code(failure) in CONCLUSIVE:
                raise
            failed += error_code(failure) not in _NO_SUCH_LINK
            continue

        up += 1
        switched += peer is None
        peers.update([peer] if peer else ())

    return NvLinks(switched, peers, is_final=not failed and (up > 0 or down == 0))


def _far_end(handle: Handle, link: int) -> str | None:
    """Return the PCI address of an NVLink's far end, `None` for an NVSwitch.

    The switch itself does not matter: all GPUs on NVSwitches reach each other.
    """
    kind = or_none(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return None

    address: str = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
    return normalize_bus_id(address) if ":" in address else ""
