"""The calling convention of NVML's C functions: codes, pointers, NVML's state."""

# ruff: noqa: N802 - functions carry the names of NVML's own

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import pynvml

from metagpu.sim.machine.error_texts import error_text
from metagpu.sim.machine.gpu import SimGpu
from metagpu.sim.machine.mig_state import SimComputeInstance, SimGpuInstance
from metagpu.sim.machine.node import SimNode

Argument: TypeAlias = Any
"""What pynvml passes to C: an object of ctypes, `byref` of one, or a plain number."""

SelfT = TypeVar("SelfT", bound="SimLibraryBase")
ParametersT = ParamSpec("ParametersT")


class NvmlReturn(Exception):
    """Raised to leave a function with another code than success."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def c_function(
    body: Callable[Concatenate[SelfT, ParametersT], None],
) -> Callable[Concatenate[SelfT, ParametersT], int]:
    """Return a C function of a body that raises NVML's codes."""

    @wraps(body)
    def function(self: SelfT, /, *args: ParametersT.args, **kwargs: ParametersT.kwargs) -> int:
        try:
            body(self, *args, **kwargs)
        except NvmlReturn as left:
            return left.code
        return int(pynvml.NVML_SUCCESS)

    return function


class FunctionSince:
    """A C function that the library has from a branch of the driver on.

    Attributes:
        function: the function, for a second name that is older.
    """

    def __init__(self, branch: int, function: Callable[..., int]) -> None:
        self.function = function
        self._branch = branch

    def __get__(self, library: "SimLibraryBase | None", _: type) -> Callable[..., int]:
        """Return the function of a library, and hide it while the driver is older."""
        if library is None:
            return self.function
        if library.node.driver_branch < self._branch:
            raise AttributeError(self.function.__name__)
        return MethodType(self.function, library)


def since(branch: int) -> Callable[[Callable[..., int]], FunctionSince]:
    """Return a decorator for C functions that came with a branch of the driver."""
    return partial(FunctionSince, branch)


def read_number(argument: Argument) -> int:
    """Read a number that was passed by value."""
    return argument if isinstance(argument, int) else int(argument.value)


def dereference(argument: Argument) -> Any:  # noqa: ANN401 - whatever ctypes object it is
    """Return the object behind a pointer; a null pointer is an invalid argument."""
    if argument is None:
        raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return getattr(argument, "_obj", argument)


def write_number(argument: Argument, value: float) -> None:
    """Write a number through a pointer."""
    dereference(argument).value = value


def write_pointer(argument: Argument, address: int) -> None:
    """Write an address through a pointer to a pointer."""
    ctypes.c_void_p.from_buffer(dereference(argument)).value = address


def write_text(argument: Argument, length: Argument, text: str) -> None:
    """Write a zero-terminated text into a buffer."""
    if len(text) >= read_number(length):
        raise NvmlReturn(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    dereference(argument).value = text.encode()


def write_pci_address(info: Argument, bus_id: str) -> None:
    """Write a PCI address into a structure."""
    pci = dereference(info)
    pci.busId, pci.busIdLegacy = bus_id.encode(), bus_id[4:].encode()
    pci.domain, pci.bus, pci.device = int(bus_id[:8], 16), int(bus_id[9:11], 16), 0


def read_address(argument: Argument) -> int:
    """Return the address in a handle, 0 for a null handle."""
    return ctypes.cast(argument, ctypes.c_void_p).value or 0


class _ErrorString:
    """`nvmlErrorString`: pynvml sets its `restype`, as it may with functions of C."""

    restype: object = None

    def __call__(self, code: Argument) -> bytes:
        return error_text(read_number(code)).encode()


class SimLibraryBase:
    """NVML's functions about NVML itself, and helpers for all other functions.

    Args:
        node: the machine; several libraries may share one.
    """

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.nvmlErrorString = _ErrorString()
        self._initialised = 0
        self._load = 0

    @c_function
    def nvmlInitWithFlags(self, _flags: Argument) -> None:
        """Initialise NVML: count one more user, or fail as the driver does."""
        with self.node.changed:
            if self.node.failure is not None:
                raise NvmlReturn(self.node.failure)

            if not self._initialised or self._load != self.node.driver_loads:
                self._initialised, self._load = 0, self.node.driver_loads
            self._initialised += 1

    @c_function
    def nvmlInit_v2(self) -> None:
        """Initialise NVML, as older callers do."""
        if code := self.nvmlInitWithFlags(0):
            raise NvmlReturn(code)

    @c_function
    def nvmlShutdown(self) -> None:
        """Shut NVML down: count one user less; the last one frees the event sets."""
        with self.node.changed:
            if not self._initialised:
                raise NvmlReturn(pynvml.NVML_ERROR_UNINITIALIZED)
            self._initialised -= 1
            if not self._initialised:
                self._close()

    @c_function
    def nvmlSystemGetDriverVersion(self, version: Argument, length: Argument) -> None:
        """Return the driver's version."""
        with self._ready():
            write_text(version, length, self.node.driver)

    @c_function
    def nvmlSystemGetNVMLVersion(self, version: Argument, length: Argument) -> None:
        """Return the library's version: CUDA's major number and the driver's."""
        with self._ready():
            write_text(version, length, f"{self._cuda // 1000}.{self.node.driver}")

    @c_function
    def nvmlSystemGetCudaDriverVersion_v2(self, version: Argument) -> None:
        """Return the CUDA version as 1000 times major plus 10 times minor."""
        with self._ready():
            write_number(version, self._cuda)

    @property
    def _cuda(self) -> int:
        """Return the CUDA version of the driver's branch.

        Source: CUDA toolkit release notes, table 3.
        """
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
        """Free what belongs to the last user."""

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Hold the node's lock if NVML is initialised and the driver loaded."""
        with self.node.changed:
            self._check()
            yield

    def _check(self) -> None:
        if self.node.failure is not None:
            raise NvmlReturn(self.node.failure)
        if not self._initialised or self._load != self.node.driver_loads:
            raise NvmlReturn(pynvml.NVML_ERROR_UNINITIALIZED)

    @contextmanager
    def _gpu(self, handle: Argument) -> Iterator[SimGpu]:
        """Hold the node's lock and yield the GPU of a handle, if the GPU answers."""
        with self.node.changed:
            self._check()
            yield self._answering(self._gpu_at(read_address(handle)))

    def _gpu_at(self, address: int) -> SimGpu:
        for gpu in self.node.all_gpus:
            if gpu.handle == address:
                return gpu
        raise NvmlReturn(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _compute_at(self, address: int) -> tuple[SimGpu, SimGpuInstance, SimComputeInstance] | None:
        """Return the MIG device of a handle, or None."""
        return next(
            (
                (gpu, instance, compute)
                for gpu in self.node.gpus
                for instance, compute in gpu.mig.compute_instances
                if compute.device == address
            ),
            None,
        )

    @contextmanager
    def _device(
        self, handle: Argument
    ) -> Iterator[tuple[SimGpu, tuple[SimGpuInstance, SimComputeInstance] | None]]:
        """Hold the node's lock and yield a handle's GPU, and its MIG device if it is one."""
        with self._ready():
            found = self._compute_at(read_address(handle))
            if found is None:
                yield self._answering(self._gpu_at(read_address(handle))), None
            else:
                yield self._answering(found[0]), found[1:]

    @staticmethod
    def _supported(answer: bool) -> None:  # noqa: FBT001 - it is the whole sentence
        if not answer:
            raise NvmlReturn(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _answering(self, gpu: SimGpu) -> SimGpu:
        """Wait while the GPU hangs, then raise its failure."""
        while (left := gpu.hung_until - time.monotonic()) > 0:
            self.node.changed.wait(left)
        self._check()

        if gpu.failure is not None:
            raise NvmlReturn(gpu.failure)
        return gpu
