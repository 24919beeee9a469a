"""The metagpu daemon of the node, with simulated GPUs: what a test does with it and reads of it.

`host_daemon` runs it as a process beside the kubelet, `pod_daemon` as the chart's DaemonSet.
"""

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from metagpu.core.errors import MetagpuError
from metagpu.core.model.gpu import MIB
from metagpu.plugins.control.client import send_request
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.tools import REPOSITORY

CALL_S = 30.0
EXCHANGE_S = 180.0


class Daemon(ABC):
    """A daemon with a run folder of the host, and device files below DEVICE_ROOT."""

    def __init__(self, run_folder: Path, device_root: Path) -> None:
        self.run_folder = run_folder
        self.device_root = device_root
        self._options: tuple[str, ...] = ()

    @abstractmethod
    def start(self, *options: str) -> None:
        """Start the daemon; the node shows its resources a little later.

        A later option replaces an earlier one of the same name, so OPTIONS may also replace.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the daemon in an orderly way, if it runs; nothing starts it again."""

    @abstractmethod
    def kill(self) -> None:
        """End the daemon as the kernel would when memory runs out."""

    @abstractmethod
    def exchange(self) -> None:
        """Start a daemon that waits for the node, and end the running one."""

    @abstractmethod
    def configure(self, configuration: str | None = None) -> None:
        """Write another configuration, or the usual one; a running daemon reloads it."""

    @abstractmethod
    def simulate(self, node_file: str) -> tuple[str, ...]:
        """Return options of a start with the simulated GPUs of a node file, given as text."""

    @abstractmethod
    def features(self, *names: str) -> tuple[str, ...]:
        """Return options of a start with these features at the API server."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Return whether the daemon runs."""

    @abstractmethod
    def require_no_crash(self) -> None:
        """Raise if the daemon ended by itself.

        Raises:
            EndedError: it did; the text is the end of its log.
        """

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """Return the daemon's process id, a new one after a restart."""

    @property
    @abstractmethod
    def log(self) -> str:
        """Return the log of all daemons of this node."""

    @property
    @abstractmethod
    def pod_socket(self) -> Path:
        """Return the path of the containers' socket on the machine."""

    def start_again(self) -> None:
        """Start the daemon with the options of its last start."""
        self.start(*self._options)

    def runs_with(self, *options: str) -> bool:
        """Return whether the daemon runs with just these further options."""
        return self.alive and self._options == options

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
        self.request("sim", change={"do": "xid", "gpu": str(gpu), "code": xid})

    def reset(self, gpu: int) -> None:
        """Reset a simulated GPU: the GPU answers again."""
        self._simulate("reset", str(gpu))

    def use(self, gpu: int, pid: int, mib: int) -> None:
        """Set the memory that a process of this machine uses on a simulated GPU."""
        started = {"do": "process", "change": "start", "gpu": str(gpu), "pid": pid}
        self.request("sim", change={**started, "memory": mib * MIB})

    def free(self, gpu: int, pid: int) -> None:
        """End the use of a simulated GPU by a process."""
        ended = {"do": "process", "change": "end", "gpu": str(gpu), "pid": pid}
        self.request("sim", change=ended)

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
