"""A C `libnvidia-ml.so.1` of two imaginary GPUs, below the real pynvml.

`libnvidia-ml/nvml.c` is the library. Each test has a copy of it in a folder of its own, and the
file `control` beside the copy says how the library behaves, at any moment:

    library = NvmlLibrary(tmp_path / "nvml")
    library.fail("nvmlDeviceGetMemoryInfo_v2", 1, pynvml.NVML_ERROR_UNKNOWN)
    library.event(0, pynvml.nvmlEventTypeXidCriticalError, 79)

A process of metagpu without `--simulate` loads it with `library.environment`; a test's own process
loads it by `NvmlDriver(library.load())`.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

import anyio

from tests.rigs.waiting import until

SOURCE: Final = Path(__file__).parent / "libnvidia-ml" / "nvml.c"
NAME: Final = "libnvidia-ml.so.1"
_FLAGS: Final = ("-shared", "-fPIC", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


class NvmlLibrary:
    """A copy of the library, and its control file.

    Args:
        folder: where the copy is put; one library for each folder.
        missing: functions of NVML that this copy lacks, as an older driver's library does.
    """

    def __init__(self, folder: Path, missing: Iterable[str] = ()) -> None:
        folder.mkdir(exist_ok=True)
        self.path = folder / NAME
        self._lines: list[str] = []
        self._events = 0

        content = built().read_bytes()
        for name in missing:
            # The dynamic linker looks a name up by its hash, and then compares the text.
            assert content.count(b"\0" + name.encode() + b"\0")
            content = content.replace(
                b"\0" + name.encode() + b"\0", b"\0" + name.encode()[:-1] + b"~\0"
            )
        self.path.write_bytes(content)

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of a process that loads this library as the machine's own."""
        return {**os.environ, "LD_LIBRARY_PATH": str(self.path.parent)}

    def load(self) -> ctypes.CDLL:
        """Load the library into this process, for `NvmlDriver`."""
        return ctypes.CDLL(str(self.path))

    def fail(self, function: str, gpu: int | str, code: int) -> None:
        """Make a function return a code, until `work`.

        Args:
            function: its name in C; `*` for all functions about the GPU.
            gpu: an index, `*` for every GPU, `-` for a function about no GPU.
            code: a number of `nvmlReturn_t`.
        """
        self._write(f"fail {function} {gpu} {code}")

    def hang(self, function: str, gpu: int | str) -> None:
        """Make a function hang, until `work`; the arguments are those of `fail`."""
        self._write(f"hang {function} {gpu}")

    async def hangs(self) -> None:
        """Wait until a function that shall hang has been called."""

        async def is_so() -> bool:
            return await anyio.Path(self.path.with_name("hanging")).exists()

        await until(is_so, 30)

    def set(self, name: str, gpu: int | str, value: int) -> None:
        """Set a number that the library answers with; `setting` in the source has the names."""
        self._write(f"set {name} {gpu} {int(value)}")

    def add_process(self, gpu: int, pid: int, memory: int) -> None:
        """Put a process with some bytes of memory on a GPU."""
        self._write(f"process {gpu} {pid} {memory}")

    def event(
        self, gpu: int, kind: int, data: int = 0, where: tuple[int, int] | None = None
    ) -> None:
        """Raise an event of a GPU.

        Args:
            gpu: its index.
            kind: NVML's event type.
            data: the number of an XID.
            where: the numbers of a GPU instance and a compute instance.
        """
        self._events += 1
        instance = " {} {}".format(*where) if where else ""
        self._write(f"event {self._events} {gpu} {kind} {data}{instance}")

    def work(self) -> None:
        """End all failures and hanging calls."""
        self._lines = [line for line in self._lines if not line.startswith(("fail ", "hang "))]
        self._write()

    def _write(self, *lines: str) -> None:
        self._lines += lines
        new = self.path.with_name("control.new")
        new.write_text("\n".join(self._lines))
        new.replace(self.path.with_name("control"))  # never seen half written


@cache
def built() -> Path:
    """Build the library once for each text of its source; return its path."""
    made = hashlib.sha256(SOURCE.read_bytes() + repr(_FLAGS).encode()).hexdigest()[:16]
    path = SOURCE.parent / "build" / f"{made}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}")
        command = [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            *_FLAGS,
            "-s",
            str(SOURCE),
            "-o",
            str(half),
        ]
        subprocess.run(command, check=True)  # noqa: S603 - our own compiler, our own source
        half.replace(path)
    return path
