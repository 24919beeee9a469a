"""NVML's queries about the connections between GPUs."""

# ruff: noqa: N802 - functions carry the names of NVML's own

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pynvml

from metagpu.sim.machine.gpu import SimGpu
from metagpu.sim.nvml.base import (
    Argument,
    NvmlReturn,
    SimLibraryBase,
    c_function,
    read_number,
    write_number,
    write_pci_address,
)

_SWITCH: Final = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
_SWITCH_ADDRESS: Final = "00000000:C4:00.0"  # of the first NVSwitch of a DGX A100


class TopologyFunctions(SimLibraryBase):
    """Connections: the PCI bus between two GPUs, and NVLinks."""

    @c_function
    def nvmlDeviceGetTopologyCommonAncestor(
        self, first: Argument, second: Argument, level: Argument
    ) -> None:
        """Return the level at which two GPUs meet on the PCI bus."""
        with self._gpu(first) as a, self._gpu(second) as b:
            write_number(level, self.node.pci_level(a, b))

    @c_function
    def nvmlDeviceGetNvLinkState(self, device: Argument, link: Argument, active: Argument) -> None:
        """Return whether an NVLink is up: an unconnected one is down."""
        with self._gpu(device) as gpu:
            ends = self.node.nvlinks(gpu)
            self._supported(bool(gpu.model.nvlinks or ends))
            if read_number(link) >= max(gpu.model.nvlinks, len(ends)):
                raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            write_number(active, read_number(link) < len(ends))

    @c_function
    def nvmlDeviceGetNvLinkRemoteDeviceType(
        self, device: Argument, link: Argument, kind: Argument
    ) -> None:
        """Return whether an NVLink leads to a GPU or an NVSwitch."""
        with self._link_end(device, link) as end:
            write_number(kind, _SWITCH if end is None else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)

    @c_function
    def nvmlDeviceGetNvLinkRemotePciInfo_v2(
        self, device: Argument, link: Argument, info: Argument
    ) -> None:
        """Return the PCI address of the other end of an NVLink."""
        with self._link_end(device, link) as end:
            write_pci_address(info, _SWITCH_ADDRESS if end is None else end.bus_id)

    @contextmanager
    def _link_end(self, device: Argument, link: Argument) -> Iterator[SimGpu | None]:
        """Yield the other end of an NVLink that is up."""
        with self._gpu(device) as gpu:
            ends = self.node.nvlinks(gpu)
            if read_number(link) >= len(ends):
                raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            yield ends[read_number(link)]
