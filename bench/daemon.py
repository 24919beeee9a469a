"""The daemon under test: the real one, in its own process on a simulated node."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from metagpu.plugins.control.client import send_request
from metagpu.plugins.kubelet.paths import CHECKPOINT_FILE

HERE: Final = Path(__file__).parents[1]
"""The root of this source tree."""
GPUS: Final = "a100-40gb:8"
RESOURCE: Final = "cnvrg.io/metagpu"
POOL: Final = """\
version: metagpu/v1
pools:
  - name: all
    backends: [{{backend: fraction, resource: cnvrg.io/metagpu, sharesPerGpu: {shares}}}]
"""
FOUR: Final = tuple(f"example.com/{name}" for name in "abcd")
FOUR_POOLS: Final = "version: metagpu/v1\npools:\n" + "".join(
    f"  - name: p{n}\n    gpus: {{index: {2 * n}-{2 * n + 1}}}\n"
    f"    backends: [{{backend: fraction, resource: {name}, sharesPerGpu: 100}}]\n"
    for n, name in enumerate(FOUR)
)

_TIMEOUT: Final = 120.0


class Daemon:
    """A running `metagpu run`.

    Attributes:
        kubelet_dir: its device-plugins folder.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        directory: Path,
        kubelet: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        self.kubelet_dir = directory / "kubelet"
        self._kubelet = kubelet
        self._run_dir = directory / "run"
        self._log = directory / "log"
        self._process = process

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    def end_by(self, end: signal.Signals) -> float:
        """Send a signal that ends it; return the seconds to the end of its process."""
        began = time.perf_counter()
        self._process.send_signal(end)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # `wait` polls
        return time.perf_counter() - began

    @property
    def socket(self) -> Path:
        """Return the socket of its only resource; wait until the socket is served."""
        return self.socket_of("*")

    def socket_of(self, resource: str) -> Path:
        """Return the socket of a resource; wait until the socket is served.

        Raises:
            RuntimeError: the daemon ends, or takes too long.
        """
        pattern = f"metagpu-{resource.replace('/', '_')}-*-*.sock"
        deadline = time.monotonic() + _TIMEOUT

        while not (found := sorted(self.kubelet_dir.glob(pattern))):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon does not serve:\n{self.log_tail}")
            time.sleep(0.01)
        return found[0]

    @property
    def pod_socket(self) -> Path:
        """Return the path of the socket of `mgctl` in containers."""
        return self._run_dir / "pod" / "mgctl.sock"

    @property
    def log_tail(self) -> str:
        """Return the end of its log."""
        return self._log.read_text()[-2000:]

    def ask(self, command: str, **request: object) -> object:
        """Send a command to its control socket; return the answer."""
        return send_request(self._run_dir, {"command": command, **request})

    def change_node(self, do: str, **fields: object) -> None:
        """Apply a command of `metagpu sim` to its simulated node."""
        self.ask("sim", change={"do": do, **fields})

    def stop(self) -> None:
        """End the daemon and its kubelet: SIGTERM, then SIGKILL after a timeout."""
        for process in (self._process, self._kubelet):
            if process is None:
                continue
            process.terminate()
            try:
                process.wait(_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def free_port() -> int:
    """Return a port of the loopback interface that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def folder() -> Iterator[Path]:
    """Yield a folder with a short path, for its sockets."""
    with tempfile.TemporaryDirectory(prefix="metagpu-bench-") as made:
        (Path(made) / "kubelet").mkdir()
        yield Path(made)


def start(
    directory: Path,
    *,
    config: str,
    simulate: str | None = GPUS,
    pod_resources: Path | None = None,
    kubelet: bool = True,
    further: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "metagpu"),
    root: Path = HERE,
) -> Daemon:
    """Start a daemon in a folder, with a minimal kubelet beside it; `with` ends both.

    Without `kubelet`, the caller has its own: the daemon serves nothing before a kubelet answers.
    `further` are options beside the usual ones, `environment` variables; `program` are Python's
    arguments, of a daemon in other surroundings; `root` is the source tree, another commit's where
    two are compared. Without `simulate` the daemon loads the machine's NVML. The daemon's log goes
    to a file there, at the default level: logging on a measured path is measured.
    """
    file = directory / "config.yaml"
    file.write_text(config)
    command = [sys.executable, *program, "run"]
    options = {
        **({"--simulate": simulate} if simulate else {}),
        "--config": file,
        # An older tree may not know this option, nor have a DRA driver that needs it.
        **({"--kubelet-root": directory} if root == HERE else {}),
        "--kubelet-dir": directory / "kubelet",
        "--pod-resources": pod_resources or directory / "none.sock",
        "--run-dir": directory / "run",
    }
    for name, value in {**options, **(further or {})}.items():
        command += [name, str(value)]

    checkpoint = directory / "kubelet" / CHECKPOINT_FILE
    if (
        kubelet and not checkpoint.exists()
    ):  # without one, nothing is granted until the kubelet writes it
        checkpoint.write_text('{"Data": {"PodDeviceEntries": [], "RegisteredDevices": {}}}')
    beside = [sys.executable, "-m", "bench.kubelets", str(directory / "kubelet")]
    with (directory / "log").open("ab") as log:
        other = subprocess.Popen(beside, stdout=log, stderr=log) if kubelet else None
        variables = {**_as_installed(directory, root), **(environment or {})}
        process = subprocess.Popen(command, cwd=root, stdout=log, stderr=log, env=variables)
    return Daemon(process, directory, other)


def _as_installed(directory: Path, root: Path) -> dict[str, str]:
    """Return an environment in which a source tree runs as when installed.

    Python keeps its bytecode, which the first start writes, and finds the tree's own entry points:
    those of another commit may name other modules.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"].items()
    lines = [
        line
        for group, entries in groups
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    distribution = directory / f"installed-{root.name}" / f"{project['name']}-0.dist-info"
    distribution.mkdir(parents=True, exist_ok=True)
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\n")
    (distribution / "entry_points.txt").write_text("\n".join(lines))

    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = [str(distribution.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONPYCACHEPREFIX": str(directory / "bytecode"),
    }
