"""Fixtures for all tests: blocking calls fail a test, and random numbers repeat."""

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
import structlog
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import settings

from metagpu.nvml.driver import NvmlDriver

# A background job of a shell ignores SIGINT, and so would every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Bytecode is kept, as where metagpu is installed, also where the environment of a container says
# otherwise: without it each worker rewrites all assertions again, and each daemon that a test
# starts compiles the package.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The terminals of the tests follow codes, also where the tests run without a terminal.
os.environ["TERM"] = "xterm"

settings.register_profile("same", deadline=None, derandomize=True, database=None)
# To look for more: pytest --hypothesis-profile search
settings.register_profile("search", deadline=None, max_examples=2000)
# One piece of `make fuzz`: about a minute on one core, other inputs for each seed.
settings.register_profile("piece", deadline=None, max_examples=1200, database=None)
settings.load_profile("same")

PIECE = "METAGPU_PIECE"
"""Environment variable: a number that chooses some of the long tests; without it all run."""
PIECES = 10
"""Pieces of all long tests: in as many runs with successive numbers each long test runs once."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the long tests of other pieces, of those that pytest has selected by mark."""
    if piece := os.environ.get(PIECE):
        long = [item for item in items if item.get_closest_marker("long")]
        kept = long[int(piece) % PIECES :: PIECES]
        others = {*long} - {*kept}
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=[*others])
        names = ", ".join(item.name for item in kept) or "none"
        print(f"piece {piece}: {names} of {len(long)} long tests")  # noqa: T201 - for the log


def pytest_collection_finish() -> None:
    """Keep the collector from all that was loaded: each full pass looked at 8000 tests again."""
    gc.collect()
    gc.freeze()


_STAT = ("os.stat",)
_FILES = ("os.stat", "os.unlink", "os.mkdir")

_MAY_BLOCK = (
    # What stands in the kubelet's folder: a look at a local file system that is in memory, done
    # here rather than in a thread so that looking and acting have nothing between them.
    ("metagpu/core/runtime/files.py", {"file_identity"}, _STAT),
    ("metagpu/plugins/kubelet/directory.py", {"_nearest"}, _STAT),
    ("metagpu/plugins/kubelet/endpoint.py", {"run"}, _STAT),
    # A socket file has to be there when the block begins and gone when it ends.
    ("metagpu/core/runtime/listener.py", {"unix_listener", "remove_socket"}, _FILES),
    ("metagpu/plugins/control/socket.py", {"_listener"}, _FILES),
    # The daemon finds backends before it has a loop, and loads them then or in the thread that
    # reads a configuration; tests do so when they need some.
    (
        "metagpu/core/contracts/backend.py",
        {"installed_backends", "_load"},
        # Without os.listdir, a change in site-packages while tests run leaves no backend at all:
        # importlib.metadata swallows the error and remembers a folder without packages.
        ("os.stat", "os.listdir", "io.TextIOWrapper.read"),
    ),
    # Coverage, where it is measured, holds a lock of its own while threads of ours run beside.
    ("coverage/collector.py", {"lock_data"}, ("threading.Lock.acquire",)),
    # Tracebacks are drawn with their source by structlog's defaults alone; the daemon's are plain.
    ("structlog/dev.py", {"__call__"}, ("os.stat", "io.TextIOWrapper.read")),
    # Credentials are read in a thread, on a loop of its own that serves nothing else.
    ("metagpu/plugins/cluster/credentials.py", {"_configure"}, ()),
    # The files of the page are read before anything is served.
    (
        "metagpu/plugins/web/server.py",
        {"read_page_files"},
        ("os.stat", "io.BufferedReader.read"),
    ),
    # It is called when there is something to read, though its descriptor is a blocking one.
    ("asyncinotify/__init__.py", {"_get"}, ("os.read",)),
    # Simulators may block, also where a command of ours runs one in its own loop.
    ("metagpu/sim/machine/containers.py", {"start", "end", "name", "add_process"}, ()),
    ("metagpu/sim/cluster/containers.py", {"_begin", "_finish"}, ()),
    # A node's configuration is a small file, read at start and when an operator says so.
    (
        "metagpu/agent/config_source.py",
        {"read"},
        ("os.stat", "os.listdir", "io.BufferedReader.read"),
    ),
)
"""Where (file and functions) which calls are legitimate on the loop, all if none is named."""


@pytest.fixture(autouse=True, scope="session")
def blockbuster() -> Iterator[BlockBuster]:
    """Detect blocking calls of metagpu on the loop; simulators and tests may block.

    The detector replaces 58 functions: once, and not for each test.
    """
    with blockbuster_ctx("metagpu", excluded_modules=["metagpu.sim"]) as buster:
        for file, functions, calls in _MAY_BLOCK:
            for call in calls or buster.functions:
                buster.functions[call].can_block_in(file, functions)
        yield buster


@pytest.fixture(autouse=True)
def logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo a command's logging settings after its test, whose stderr is closed then.

    Logs go where pytest shows them beside a failure, and not to stdout, where a daemon of the test
    would write amid what a command prints. A logger that caches its settings at its first use would
    keep them for all tests that follow. Tracebacks are plain, as the daemon's: structlog's own draw
    all variables, for up to three seconds of processor time.
    """
    configure = structlog.configure

    def uncached(**settings: Any) -> None:  # noqa: ANN401 - structlog's own
        configure(**{**settings, "cache_logger_on_first_use": False})

    *processors, _ = structlog.get_config()["processors"]
    plain = structlog.dev.ConsoleRenderer(
        colors=False, exception_formatter=structlog.dev.plain_traceback
    )
    shown = logging.getLogger("metagpu")
    shown.setLevel(logging.DEBUG)
    uncached(processors=[*processors, plain], logger_factory=lambda *_: shown)
    monkeypatch.setattr(structlog, "configure", uncached)
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True, scope="session")
def unhurried_nvml() -> Iterator[None]:
    """Raise the deadline of NVML's calls: a machine that stands still for some seconds may miss it.

    Commands that simulate GPUs name none.
    """
    library, _, timing = NvmlDriver.__init__.__defaults__ or ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NvmlDriver.__init__, "__defaults__", (library, 30.0, timing))
        yield


@pytest.fixture(autouse=True)
def nvml_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the texts of error codes after a test: pynvml keeps those of the first library."""
    texts = dict(pynvml.NVMLError._errcode_to_string)
    monkeypatch.setattr(pynvml.NVMLError, "_errcode_to_string", texts)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Create a folder with a short name for the test: a socket's path has 107 bytes at most.

    pytest's own lies below TMPDIR and carries the names of the user and the test.
    """
    folder = Path(tempfile.mkdtemp(prefix="mg", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
