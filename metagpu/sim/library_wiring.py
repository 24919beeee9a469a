"""NVML's questions about how GPUs are connected."""

# ruff: noqa: N802 - functions carry the names of NVML's own

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pynvml

from metagpu.sim.gpu import SimGpu
from metagpu.sim.library_base import (
    Argument,
    LibraryBase,
    Return,
    c_function,
    fill,
    fill_address,
    number,
)

_SWITCH: Final = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
_SWITCH_ADDRESS: Final = "00000000:C4:00.0"  # of the first NVSwitch of a DGX A100


class Wiring(LibraryBase):
    """Where two GPUs meet on the PCI bus, and where NVLinks lead."""

    @c_function
    def nvmlDeviceGetTopologyCommonAncestor(
        self, first: Argument, second: Argument, level: Argument
    ) -> None:
        """Tell where two GPUs meet on the PCI bus."""
        with self._gpu(first) as a, self._gpu(second) as b:
            fill(level, self.node.pci_level(a, b))

    @c_function
    def nvmlDeviceGetNvLinkState(self, device: Argument, link: Argument, active: Argument) -> None:
        """Tell whether an NVLink is up: one that leads nowhere is down."""
        with self._gpu(device) as gpu:
            ends = self.node.nvlinks(gpu)
            self._supported(bool(gpu.board.nvlinks or ends))
            if number(link) >= max(gpu.board.nvlinks, len(ends)):
                raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            fill(active, number(link) < len(ends))

    @c_function
    def nvmlDeviceGetNvLinkRemoteDeviceType(
        self, device: Argument, link: Argument, kind: Argument
    ) -> None:
        """Tell whether an NVLink leads to a GPU or an NVSwitch."""
        with self._link_end(device, link) as end:
            fill(kind, _SWITCH if end is None else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)

    @c_function
    def nvmlDeviceGetNvLinkRemotePciInfo_v2(
        self, device: Argument, link: Argument, info: Argument
    ) -> None:
        """Describe the place on the PCI bus of who is at the other end of an NVLink."""
        with self._link_end(device, link) as end:
            fill_address(info, _SWITCH_ADDRESS if end is None else end.bus_id)

    @contextmanager
    def _link_end(self, device: Argument, link: Argument) -> Iterator[SimGpu | None]:
        """Give who is at the other end of an NVLink, if it is up."""
        with self._gpu(device) as gpu:
            ends = self.node.nvlinks(gpu)
            if number(link) >= len(ends):
                raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            yield ends[number(link)]
