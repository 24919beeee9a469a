"""How the GPUs are connected, read once for each set of them.

NVML is asked about a GPU's NVLinks in the GPU's own lane, and about a pair's place on the PCI bus
in a lane of the pair: whatever hangs or fails leaves that pair unknown, and no other. What could
not be read is asked again at the next survey, and so is a GPU whose NVLinks are all down: the
Fabric Manager of an NVSwitch machine may not be up yet.
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
from metagpu.core.gpu import Connection, Gpu, GpuId, PciPath, Topology
from metagpu.nvml.codes import CONCLUSIVE, FAILURES, UNSAID, code_of, if_said
from metagpu.nvml.lane import Lane
from metagpu.nvml.reading import Handle, bus_id
from metagpu.nvml.session import Known

_NO_SUCH_LINK: Final = UNSAID | {pynvml.NVML_ERROR_INVALID_ARGUMENT}
_PATHS: Final = {path.value: path for path in PciPath}


class Links(NamedTuple):
    """Where the NVLinks of a GPU lead that are up.

    Attributes:
        switched: how many lead to NVSwitches.
        peers: how many lead to the device at each PCI address.
        settled: whether asking again would tell nothing new.
    """

    switched: int
    peers: Mapping[str, int]
    settled: bool


class Wiring:
    """The connections between the GPUs of one NVML session, as far as they have been read."""

    def __init__(self) -> None:
        self._lanes: dict[frozenset[GpuId], Lane] = {}
        self._links: dict[GpuId, Links] = {}
        self._paths: dict[frozenset[GpuId], PciPath | None] = {}

    @property
    def lanes(self) -> Iterable[Lane]:
        """The lanes of the pairs that NVML was asked about."""
        return self._lanes.values()

    async def read(
        self, gpus: Sequence[Gpu], known: Mapping[GpuId, Known], deadline: float
    ) -> Topology:
        """Read what is not known yet, within `deadline` seconds in all; give all that is known.

        Never fails. A GPU that was away since the last time is asked anew.
        """
        here = {gpu.id for gpu in gpus}
        self._links = {gpu: links for gpu, links in self._links.items() if gpu in here}
        self._paths = {pair: path for pair, path in self._paths.items() if pair <= here}
        until = anyio.current_time() + deadline

        async with anyio.create_task_group() as group:
            for place, gpu in enumerate(gpus if len(gpus) > 1 else ()):
                group.start_soon(self._read_links, gpu.id, known[gpu.id], until)
                group.start_soon(self._read_paths, gpu, gpus[place + 1 :], known, until)

        told = {frozenset((a.id, b.id)): self._between(a, b) for a, b in combinations(gpus, 2)}
        return Topology({pair: found for pair, found in told.items() if found != Connection()})

    async def _read_links(self, gpu: GpuId, known: Known, until: float) -> None:
        links = self._links.get(gpu)
        if links is None or not links.settled:
            with suppress(DriverError):
                left = until - anyio.current_time()
                self._links[gpu] = await known.lane.call(partial(read_links, known.handle), left)

    async def _read_paths(
        self, gpu: Gpu, others: Sequence[Gpu], known: Mapping[GpuId, Known], until: float
    ) -> None:
        for other in others:
            pair = frozenset((gpu.id, other.id))
            left = until - anyio.current_time()
            if pair in self._paths or left <= 0:
                continue

            lane = self._lanes.setdefault(pair, Lane(f"GPU {gpu.index} with GPU {other.index}"))
            read = partial(read_path, known[gpu.id].handle, known[other.id].handle)
            with suppress(DriverError):
                self._paths[pair] = await lane.call(read, left)

    def _between(self, a: Gpu, b: Gpu) -> Connection:
        path = self._paths.get(frozenset((a.id, b.id)))
        of_a, of_b = self._links.get(a.id), self._links.get(b.id)
        if of_a is None or of_b is None:
            return Connection(path)

        # Where the two ends count differently, the smaller number is believed.
        direct = min(of_a.peers.get(b.pci_bus_id, 0), of_b.peers.get(a.pci_bus_id, 0))
        switched = min(of_a.switched, of_b.switched)
        return Connection(path, direct + switched, switched > 0)


def read_path(a: Handle, b: Handle) -> PciPath | None:
    """Find where two GPUs meet on the PCI bus: the farther place, if the two answers differ."""
    levels = [
        if_said(pynvml.nvmlDeviceGetTopologyCommonAncestor, *ends) for ends in ((a, b), (b, a))
    ]
    return None if None in levels else _PATHS.get(max(levels))


def read_links(handle: Handle) -> Links:
    """Follow a GPU's NVLinks; one that fails is taken for one that is down."""
    up, down, failed = 0, 0, 0
    switched, peers = 0, Counter[str]()

    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
                down += 1
                continue
            peer = _far_end(handle, link)
        except FAILURES as failure:
            if code_of(failure) in CONCLUSIVE:
                raise
            failed += code_of(failure) not in _NO_SUCH_LINK
            continue

        up += 1
        switched += peer is None
        peers.update([peer] if peer else ())

    return Links(switched, peers, settled=not failed and (up > 0 or down == 0))


def _far_end(handle: Handle, link: int) -> str | None:
    """Give the PCI address where an NVLink ends, `None` for an NVSwitch.

    Which switch it is does not matter: whoever is on one reaches everybody who is on any.
    """
    kind = if_said(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return None

    address: str = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
    return bus_id(address) if ":" in address else ""
