"""How a C function of NVML looks from below: return codes, pointers to fill, NVML's own state."""

# ruff: noqa: N802 - functions carry the names of NVML's own

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

import pynvml

from metagpu.sim.gpu import SimGpu
from metagpu.sim.instances import SimCompute, SimInstance
from metagpu.sim.node import SimNode
from metagpu.sim.texts import error_text

Argument: TypeAlias = Any
"""What pynvml passes to C: an object of ctypes, `byref` of one, or a plain number."""

SelfT = TypeVar("SelfT", bound="LibraryBase")
ParametersT = ParamSpec("ParametersT")

_SINCE: Final = {
    "nvmlDeviceGetMemoryInfo_v2": 510,
    "nvmlDeviceGetComputeRunningProcesses_v3": 535,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": 535,
    "nvmlDeviceSetMemoryLimits_v1": 615,
    "nvmlDeviceGetMemoryLimits_v1": 615,
}  # the branch of the driver whose library has the function first


class Return(Exception):
    """Raised to leave a function with another code than success."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def c_function(
    body: Callable[Concatenate[SelfT, ParametersT], None],
) -> Callable[Concatenate[SelfT, ParametersT], int]:
    """Make a function that returns NVML's code of one that raises it."""

    @wraps(body)
    def function(self: SelfT, /, *args: ParametersT.args, **kwargs: ParametersT.kwargs) -> int:
        try:
            body(self, *args, **kwargs)
        except Return as left:
            return left.code
        return int(pynvml.NVML_SUCCESS)

    return function


def number(argument: Argument) -> int:
    """Read a number that was passed by value."""
    return argument if isinstance(argument, int) else int(argument.value)


def target(argument: Argument) -> Any:  # noqa: ANN401 - whatever ctypes object it is
    """Give the object behind a pointer; a null pointer is an invalid argument."""
    if argument is None:
        raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return getattr(argument, "_obj", argument)


def fill(argument: Argument, value: float) -> None:
    """Write a number through a pointer."""
    target(argument).value = value


def fill_pointer(argument: Argument, address: int) -> None:
    """Write an address through a pointer to a pointer."""
    ctypes.c_void_p.from_buffer(target(argument)).value = address


def fill_text(argument: Argument, length: Argument, text: str) -> None:
    """Write a text into a buffer, with the zero that ends it."""
    if len(text) >= number(length):
        raise Return(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    target(argument).value = text.encode()


def fill_address(info: Argument, bus_id: str) -> None:
    """Write a place on the PCI bus into a structure."""
    pci = target(info)
    pci.busId, pci.busIdLegacy = bus_id.encode(), bus_id[4:].encode()
    pci.domain, pci.bus, pci.device = int(bus_id[:8], 16), int(bus_id[9:11], 16), 0


def address_in(argument: Argument) -> int:
    """Read the address that a handle stands for, 0 for a null one."""
    return ctypes.cast(argument, ctypes.c_void_p).value or 0


class _ErrorString:
    """`nvmlErrorString`: pynvml sets its `restype`, as it may with functions of C."""

    restype: object = None

    def __call__(self, code: Argument) -> bytes:
        return error_text(number(code)).encode()


class LibraryBase:
    """NVML's functions that are about NVML itself, and what all the others need.

    Args:
        node: the machine it runs on; several libraries may.
    """

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.nvmlErrorString = _ErrorString()
        self._initialised = 0
        self._load = 0

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401 - as of any object
        """Hide the functions that this driver's library does not have yet."""
        value = super().__getattribute__(name)

        if name in _SINCE and self.node.driver_branch < _SINCE[name]:
            raise AttributeError(name)
        return value

    @c_function
    def nvmlInitWithFlags(self, _flags: Argument) -> None:
        """Count one more user; fails as the driver does."""
        with self.node.changed:
            if self.node.failure is not None:
                raise Return(self.node.failure)

            if not self._initialised or self._load != self.node.loads:
                self._initialised, self._load = 0, self.node.loads
            self._initialised += 1

    @c_function
    def nvmlInit_v2(self) -> None:
        """Initialise, as older callers do."""
        if code := self.nvmlInitWithFlags(0):
            raise Return(code)

    @c_function
    def nvmlShutdown(self) -> None:
        """Count one user less; the last one takes the event sets along."""
        with self.node.changed:
            if not self._initialised:
                raise Return(pynvml.NVML_ERROR_UNINITIALIZED)
            self._initialised -= 1
            if not self._initialised:
                self._close()

    @c_function
    def nvmlSystemGetDriverVersion(self, version: Argument, length: Argument) -> None:
        """Give the driver's version."""
        with self._ready():
            fill_text(version, length, self.node.driver)

    @c_function
    def nvmlSystemGetNVMLVersion(self, version: Argument, length: Argument) -> None:
        """Give the library's version: CUDA's major number and the driver's."""
        with self._ready():
            fill_text(version, length, f"{self._cuda // 1000}.{self.node.driver}")

    @c_function
    def nvmlSystemGetCudaDriverVersion_v2(self, version: Argument) -> None:
        """Give the CUDA version as 1000 times major plus 10 times minor."""
        with self._ready():
            fill(version, self._cuda)

    @property
    def _cuda(self) -> int:
        """The CUDA version of the driver's branch (CUDA toolkit release notes, table 3)."""
        known = {
            615: 13040,
            580: 13000,
            575: 12090,
            570: 12080,
            565: 12070,
            560: 12060,
            550: 12040,
            535: 12020,
        }
        branch = self.node.driver_branch

        return next((cuda for since, cuda in known.items() if branch >= since), 11040)

    def _close(self) -> None:
        """Drop what the last user leaves behind."""

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Hold the node still, if NVML is initialised and the driver there."""
        with self.node.changed:
            self._check()
            yield

    def _check(self) -> None:
        if self.node.failure is not None:
            raise Return(self.node.failure)
        if not self._initialised or self._load != self.node.loads:
            raise Return(pynvml.NVML_ERROR_UNINITIALIZED)

    @contextmanager
    def _gpu(self, handle: Argument) -> Iterator[SimGpu]:
        """Hold the node still and give the GPU of a handle, if it answers."""
        with self._ready():
            gpu = self._answering(self._gpu_at(address_in(handle)))
            yield gpu

    def _gpu_at(self, address: int) -> SimGpu:
        for gpu in self.node.every_gpu:
            if gpu.handle == address:
                return gpu
        raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _compute_at(self, address: int) -> tuple[SimGpu, SimInstance, SimCompute] | None:
        """Find the MIG device of a handle."""
        return next(
            (
                (gpu, instance, compute)
                for gpu in self.node.gpus
                for instance, compute in gpu.mig.computes
                if compute.device == address
            ),
            None,
        )

    @contextmanager
    def _device(
        self, handle: Argument
    ) -> Iterator[tuple[SimGpu, tuple[SimInstance, SimCompute] | None]]:
        """Hold the node still and give a GPU, and what of it the handle of a MIG device means."""
        with self._ready():
            found = self._compute_at(address_in(handle))
            if found is None:
                yield self._answering(self._gpu_at(address_in(handle))), None
            else:
                yield self._answering(found[0]), found[1:]

    @staticmethod
    def _supported(answer: bool) -> None:  # noqa: FBT001 - it is the whole sentence
        if not answer:
            raise Return(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _answering(self, gpu: SimGpu) -> SimGpu:
        """Wait while the GPU hangs, then fail as it does."""
        while (left := gpu.hung_until - time.monotonic()) > 0:
            self.node.changed.wait(left)
        self._check()

        if gpu.failure is not None:
            raise Return(gpu.failure)
        return gpu
