"""The metagpu daemon as a process of the host, beside the kubelet."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from metagpu.agent.exchange import read_standby
from tests.e2e.rig.daemon import CALL_S, EXCHANGE_S, Daemon
from tests.e2e.rig.device_files import make_device_files
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.programs import Program
from tests.e2e.rig.settings import KUBELET_HOME
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.waiting import wait_for


class HostDaemon(Daemon):
    """A metagpu daemon with COUNT simulated GPUs of one MODEL."""

    def __init__(self, node: Node, configuration: str, *, model: str, count: int) -> None:
        paths = node.paths
        super().__init__(paths.home / "metagpu", paths.home / "devices")
        self.count = count
        self._node = node
        self._configuration_text = configuration
        self._configuration = paths.home / "metagpu.yaml"
        self.gpus: tuple[str, ...] = ("--simulate", f"{model}:{count}")
        """The options of the GPUs, which are simulated, or those of NVML."""
        self.environment: dict[str, str] = {}
        """Additions to the environment of the next start."""
        self.launcher: list[str] = []
        """A program of the next start, which becomes the daemon."""
        command = [sys.executable, "-m", "metagpu", "run"]
        command += ["--config", str(self._configuration)]
        command += ["--kubelet-dir", str(KUBELET_HOME / "device-plugins")]
        command += ["--run-dir", str(self.run_folder)]
        command += ["--dev-root", str(self.device_root)]
        command += ["--cdi-dir", str(paths.cdi)]
        # The daemon, and one that follows it and has a log of its own.
        self._program, self._other = (
            Program(
                name,
                command,
                logs=paths.logs,
                pids=paths.pids,
                environment=self.environment,
                folder=REPOSITORY,
                launcher=self.launcher,
            )
            for name in ("metagpu", "metagpu-successor")
        )

    def prepare(self) -> None:
        """Create the files of a real node: the configuration and the device files."""
        self._configuration.write_text(self._configuration_text)
        self.run_folder.mkdir()
        make_device_files(self.device_root, self.count)

    def uninstall(self, *options: str) -> list[Document]:
        """Remove what the daemon left; return each leftover with its result."""
        self._program.stop()
        folders = ("--config", str(self._configuration), *self.gpus, *self._options)
        places = ("--kubelet-dir", str(KUBELET_HOME / "device-plugins"), *self._run_dir_options)
        command = [sys.executable, "-m", "metagpu", "uninstall", "--yes", "-o", "json"]
        root = ("--root", str(self.run_folder.with_name("host")))
        done = subprocess.run(
            [*command, *folders, *places, *root, *options],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=CALL_S,
        )
        if not done.stdout:
            raise RigError(f"metagpu uninstall: {done.stderr}")
        found: list[Document] = json.loads(done.stdout)["leftovers"]
        return found

    def configure(self, configuration: str | None = None) -> None:
        """Write another configuration, or the usual one; a running daemon reloads it."""
        self._configuration.write_text(configuration or self._configuration_text)
        if self.alive:
            self._program.notify(signal.SIGHUP)

    @property
    def alive(self) -> bool:
        """Return whether the daemon runs."""
        return self._program.alive

    def require_no_crash(self) -> None:
        """Raise if the daemon ended by itself.

        Raises:
            EndedError: it did; the text is the end of its log.
        """
        self._program.require_no_crash()

    @property
    def pid(self) -> int | None:
        """Return the daemon's process id, a new one after a restart."""
        return self._program.pid

    def start(self, *options: str) -> None:
        """Start the daemon; the node shows its resources a little later.

        A later option replaces an earlier one of the same name, so OPTIONS may also replace.
        """
        self._options = options
        self._program.start(*self.gpus, *options)

    def exchange(self) -> None:
        """Start a daemon that waits for the node, and end the running one."""
        old, new = self._program, self._other
        known = _count_exchanges(new)
        new.start(*self.gpus, *self._options, "--take-over")

        def ready() -> bool:
            standby = read_standby(self.run_folder)
            return standby is not None and standby.ready

        wait_for("the next daemon to be ready", ready, within_s=EXCHANGE_S, pause_s=0.05)
        old.stop()
        wait_for(
            "the node to be taken",
            lambda: _count_exchanges(new) > known,
            within_s=EXCHANGE_S,
            pause_s=0.05,
        )
        self._program, self._other = new, old

    def simulate(self, node_file: str) -> tuple[str, ...]:
        """Return options of a start with the simulated GPUs of a node file, given as text."""
        path = self._node.paths.home / "node.yaml"
        path.write_text(node_file)
        return "--simulate", str(path)

    def features(self, *names: str) -> tuple[str, ...]:
        """Return options of a start with these features at the API server, and all rights."""
        if not names:
            return ()
        credentials = ("--node-name", self._node.name, "--kubeconfig", self._node.kubeconfig)
        return *credentials, "--cluster", ",".join(names)

    @property
    def log(self) -> str:
        """Return the log of all daemons of this node."""
        return self._program.log.read_text()

    @property
    def pod_socket(self) -> Path:
        """Return the path of the containers' socket on the machine."""
        return self.run_folder / "pod" / "mgctl.sock"

    def stop(self) -> None:
        """Stop the daemon as systemd would."""
        self._program.stop()

    def kill(self) -> None:
        """End the daemon as the kernel would when memory runs out."""
        self._program.kill()


def _count_exchanges(program: Program) -> int:
    """Return how often a program has taken a node, by its log."""
    if not program.log.exists():
        return 0
    return program.log.read_text(errors="replace").count("node taken")
