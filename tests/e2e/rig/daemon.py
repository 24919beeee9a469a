"""The metagpu daemon as a process of the host, beside the kubelet, with simulated GPUs."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from metagpu.core.errors import MetagpuError
from metagpu.plugins.control.client import send_request
from tests.e2e.rig.device_files import make_device_files
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.programs import Program
from tests.e2e.rig.settings import KUBELET_HOME, NodePaths
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.waiting import wait_for

CALL_S = 30.0
EXCHANGE_S = 60.0


class Daemon:
    """A metagpu daemon with COUNT simulated GPUs of one MODEL."""

    def __init__(self, paths: NodePaths, configuration: str, *, model: str, count: int) -> None:
        self.count = count
        self._configuration_text = configuration
        self._configuration = paths.home / "metagpu.yaml"
        self.device_root = paths.home / "devices"
        self.run_folder = paths.home / "metagpu"
        self._options: tuple[str, ...] = ()
        self.gpus: tuple[str, ...] = ("--simulate", f"{model}:{count}")
        """The options of the GPUs, which are simulated, or those of NVML."""
        self.environment: dict[str, str] = {}
        """Additions to the environment of the next start."""
        command = [sys.executable, "-m", "metagpu", "run"]
        command += ["--config", str(self._configuration)]
        command += ["--kubelet-dir", str(KUBELET_HOME / "device-plugins")]
        command += ["--run-dir", str(self.run_folder)]
        command += ["--dev-root", str(self.device_root)]
        command += ["--cdi-dir", str(paths.cdi)]
        # The daemon, and one that takes over from it and has a log of its own.
        self._program, self._other = (
            Program(
                name,
                command,
                logs=paths.logs,
                pids=paths.pids,
                environment=self.environment,
                folder=REPOSITORY,
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
        """Start a daemon that takes the node over from the running one, and end that."""
        old, new = self._program, self._other
        known = _count_exchanges(new)
        new.start(*self.gpus, *self._options, "--take-over")
        wait_for(
            "the node to be taken over",
            lambda: _count_exchanges(new) > known,
            within_s=EXCHANGE_S,
            pause_s=0.05,
        )
        self._program, self._other = new, old
        old.stop()

    def start_again(self) -> None:
        """Start the daemon with the options of its last start."""
        self.start(*self._options)

    def runs_with(self, *options: str) -> bool:
        """Return whether the daemon runs with just these further options."""
        return self.alive and self._options == options

    @property
    def log(self) -> str:
        """Return the log of all daemons of this node."""
        return self._program.log.read_text()

    @property
    def pod_socket(self) -> Path:
        """Return the path of the containers' socket on the machine."""
        return self.run_folder / "pod" / "mgctl.sock"

    def stop(self) -> int | None:
        """Stop the daemon as systemd would, and return its exit status."""
        return self._program.stop()

    def kill(self) -> None:
        """End the daemon as the kernel would when memory runs out."""
        self._program.kill()

    def status(self) -> Document:
        """Return the status of GPUs, offers and leases."""
        document: Document = json.loads(self._ask("status", "--json"))
        return document

    def request(self, command: str, **arguments: object) -> Document:
        """Send a command to the control socket; return the answer, without starting a program.

        Raises:
            RigError: the daemon does not answer, or answers with an error; the text is its own.
        """
        try:
            answer: Document = send_request(self.run_folder, {"command": command, **arguments})
        except MetagpuError as error:
            raise RigError(str(error)) from error
        return answer

    def simulated_gpus(self) -> list[Document]:
        """Return the simulated GPUs with their MIG instances."""
        gpus: list[Document] = self.request("sim", change={"do": "show"})["node"]["gpus"]
        return gpus

    def set_provisioning(self, gpu: int, *options: str) -> None:
        """Set the duration of creating MIG instances, by options of `sim provisioning`."""
        self._simulate("provisioning", str(gpu), *options)

    def fault(self, gpu: int, xid: int) -> None:
        """Report an XID of a simulated GPU."""
        self._simulate("xid", str(gpu), str(xid))

    def reset(self, gpu: int) -> None:
        """Reset a simulated GPU: the GPU answers again."""
        self._simulate("reset", str(gpu))

    def use(self, gpu: int, pid: int, mib: int) -> None:
        """Set the memory that a process of this machine uses on a simulated GPU."""
        self._simulate("process", "start", str(gpu), str(pid), f"{mib}Mi")

    def free(self, gpu: int, pid: int) -> None:
        """End the use of a simulated GPU by a process."""
        self._simulate("process", "end", str(gpu), str(pid))

    def processes(self) -> Document:
        """Return the processes as mgctl reports them in JSON."""
        document: Document = json.loads(
            self._call(
                "metagpu.cli.mgctl", "get", "processes", "-o", "json", *self._run_dir_options
            )
        )
        return document

    def _simulate(self, *arguments: str) -> None:
        self._ask("sim", *arguments)

    def _ask(self, command: str, *arguments: str) -> str:
        """Run a command of metagpu on the running daemon; return its output.

        Raises:
            RigError: the command failed; the text is its own.
        """
        return self._call("metagpu", command, *self._run_dir_options, *arguments)

    @property
    def _run_dir_options(self) -> tuple[str, str]:
        return "--run-dir", str(self.run_folder)

    def _call(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", program, *arguments],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=CALL_S,
        )
        if done.returncode != 0:
            raise RigError(f"{program} {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout


def _count_exchanges(program: Program) -> int:
    """Return how often a program has taken a node over, by its log."""
    if not program.log.exists():
        return 0
    return program.log.read_text(errors="replace").count("node taken over")
