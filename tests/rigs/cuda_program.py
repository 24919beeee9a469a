"""A program on a GPU, by CUDA's driver API alone: lines on its input are what it does.

    take MIB    allocates memory and keeps it
    spin MS     keeps all multiprocessors busy
    fault       writes to an address that nobody has
    threads     prints the multiprocessors that it may use
    memory      prints the MiB that are free for it

Each line has one line of output: `ok`, a number, or the name of CUDA's error.
"""

import ctypes
import sys
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial
from typing import Final

MULTIPROCESSORS: Final = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT."""
KERNELS: Final = b"""
.version 6.0
.target sm_50
.address_size 64

.visible .entry fault()
{
    .reg .b64 %address;
    .reg .b32 %value;
    mov.u64 %address, 4096;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}

.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .u64 %now, %end;
    .reg .pred %early;
    ld.param.u64 %end, [nanoseconds];
    mov.u64 %now, %globaltimer;
    add.u64 %end, %end, %now;
again:
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %early, %now, %end;
    @%early bra again;
    ret;
}
"""


class CudaError(Exception):
    """An error of CUDA, by its name."""


class Cuda:
    """A context on the first GPU that CUDA shows."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._device, self._module = c_int(), c_void_p()

    def begin(self) -> str:
        """Create the context, and load the kernels."""
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(self._device), 0)
        self._call("cuCtxCreate_v2", byref(c_void_p()), 0, self._device)
        self._call("cuModuleLoadData", byref(self._module), KERNELS)
        return "ready"

    def take(self, mib: int) -> str:
        """Allocate memory, and write to all of it."""
        address, size = c_uint64(), c_size_t(mib << 20)
        self._call("cuMemAlloc_v2", byref(address), size)
        self._call("cuMemsetD8_v2", address, 1, size)
        return "ok"

    def spin(self, ms: int) -> str:
        """Run a kernel for some time."""
        self._launch("spin", 1024, c_uint64(ms * 1_000_000))
        return "ok"

    def fault(self) -> str:
        """Run a kernel that faults."""
        self._launch("fault", 1)
        return "ok"

    def threads(self) -> str:
        """Return the multiprocessors."""
        count = c_int()
        self._call("cuDeviceGetAttribute", byref(count), MULTIPROCESSORS, self._device)
        return str(count.value)

    def memory(self) -> str:
        """Return the MiB of free memory."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return str(free.value >> 20)

    def _launch(self, name: str, blocks: int, *arguments: c_uint64) -> None:
        kernel = c_void_p()
        self._call("cuModuleGetFunction", byref(kernel), self._module, name.encode())
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(uint64) for uint64 in arguments))
        sizes = (c_uint(blocks), *map(c_uint, (1, 1, 32, 1, 1, 0)))
        self._call("cuLaunchKernel", kernel, *sizes, None, pointers, None)
        self._call("cuCtxSynchronize")

    def _call(self, function: str, *arguments: object) -> None:
        if code := getattr(self._cuda, function)(*arguments):
            name = c_char_p()
            self._cuda.cuGetErrorName(code, byref(name))
            raise CudaError((name.value or str(code).encode()).decode())


def answer(act: Callable[[], object]) -> None:
    """Write a line about what was done."""
    try:
        line = act()
    except CudaError as error:
        line = error
    print(line, flush=True)  # noqa: T201 - the program's answers


def main() -> None:
    """Do what the lines of the input say, until its end."""
    cuda = Cuda()
    answer(cuda.begin)
    for line in sys.stdin:
        command, *words = line.split()
        answer(partial(getattr(cuda, command), *map(int, words)))


if __name__ == "__main__":
    main()
