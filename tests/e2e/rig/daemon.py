"""The metagpu daemon as a process of the host, beside the kubelet, with simulated GPUs."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from metagpu.core.errors import MetagpuError
from metagpu.plugins import control
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.programs import Program
from tests.e2e.rig.settings import KUBELET_HOME, Places
from tests.e2e.rig.tools import REPOSITORY

CONTROL_DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
NULL_DEVICE = os.makedev(1, 3)
"""What stands in for each device file: anybody may open it and nothing comes of it."""

CALL_S = 30.0


class Daemon:
    """metagpu with COUNT simulated GPUs of one MODEL."""

    def __init__(self, places: Places, configuration: str, *, model: str, count: int) -> None:
        self.count = count
        self._configuration_text = configuration
        self._configuration = places.home / "metagpu.yaml"
        self._device_root = places.home / "devices"
        self._run_folder = places.home / "metagpu"
        self._options: tuple[str, ...] = ()
        command = [sys.executable, "-m", "metagpu", "run"]
        command += ["--config", str(self._configuration)]
        command += ["--simulate", f"{model}:{count}"]
        command += ["--kubelet-dir", str(KUBELET_HOME / "device-plugins")]
        command += ["--run-dir", str(self._run_folder)]
        command += ["--dev-root", str(self._device_root)]
        self._program = Program(
            "metagpu", command, logs=places.logs, pids=places.pids, folder=REPOSITORY
        )

    def prepare(self) -> None:
        """Make what the daemon finds on a real node: its configuration, the device files."""
        self._configuration.write_text(self._configuration_text)
        folder = self._device_root / "dev"
        folder.mkdir(parents=True)
        self._run_folder.mkdir()
        for name in (*(f"nvidia{index}" for index in range(self.count)), *CONTROL_DEVICES):
            device = folder / name
            os.mknod(device, stat.S_IFCHR, NULL_DEVICE)
            device.chmod(0o666)  # mknod's own mode is cut by the umask

    def configure(self, configuration: str | None = None) -> None:
        """Have the daemon take another configuration, or its own again: now, or when it starts."""
        self._configuration.write_text(configuration or self._configuration_text)
        if self.alive:
            self._program.notify(signal.SIGHUP)

    @property
    def alive(self) -> bool:
        """Whether the daemon runs."""
        return self._program.alive

    def require_alive(self) -> None:
        """Make sure that the daemon runs.

        Raises:
            EndedError: it does not; the text is the end of its log.
        """
        self._program.require_alive()

    @property
    def pid(self) -> int | None:
        """Its process: another one after a restart."""
        return self._program.pid

    def start(self, *options: str) -> None:
        """Start the daemon; what it offers shows on the node a little later.

        Of an option that is given twice the later one counts, so OPTIONS may also replace.
        """
        self._options = options
        self._program.start(*options)

    def start_again(self) -> None:
        """Start the daemon with the options that it was started with last."""
        self.start(*self._options)

    def runs_with(self, *options: str) -> bool:
        """Whether it runs, and was started with just these further options."""
        return self.alive and self._options == options

    @property
    def log(self) -> str:
        """All that it, and those before it, have logged on this node."""
        return self._program.log.read_text()

    @property
    def pod_socket(self) -> Path:
        """The socket that containers call, on the machine."""
        return self._run_folder / "pod" / "mgctl.sock"

    def stop(self) -> int | None:
        """Stop the daemon as systemd would, and return its exit status."""
        return self._program.stop()

    def kill(self) -> None:
        """End the daemon as the kernel would when memory runs out."""
        self._program.kill()

    def status(self) -> Document:
        """What the daemon says of GPUs, offers and leases."""
        document: Document = json.loads(self._ask("status", "--json"))
        return document

    def asked(self, command: str, **arguments: object) -> Document:
        """What the running daemon answers on its control socket: quicker than a program is.

        Raises:
            RigError: it does not, or not as one wants; the text is its own.
        """
        try:
            answer: Document = control.ask(self._run_folder, {"command": command, **arguments})
        except MetagpuError as error:
            raise RigError(str(error)) from error
        return answer

    def simulated_gpus(self) -> list[Document]:
        """The simulated GPUs as they really are, with the MIG instances on them."""
        gpus: list[Document] = self.asked("sim", steer={"do": "node"})["node"]["gpus"]
        return gpus

    def making(self, gpu: int, *how: str) -> None:
        """Say how making MIG instances on a GPU goes from now on, in the words of `sim making`."""
        self._simulate("making", str(gpu), *how)

    def fault(self, gpu: int, xid: int) -> None:
        """Make a simulated GPU report a driver error."""
        self._simulate("xid", str(gpu), str(xid))

    def recover(self, gpu: int) -> None:
        """Make a simulated GPU well again."""
        self._simulate("recover", str(gpu))

    def use(self, gpu: int, pid: int, mib: int) -> None:
        """Let a process of this machine have so much memory of a simulated GPU."""
        self._simulate("process", "add", str(gpu), str(pid), f"{mib}Mi")

    def free(self, gpu: int, pid: int) -> None:
        """Let a process have nothing of a simulated GPU any more."""
        self._simulate("process", "end", str(gpu), str(pid))

    def processes(self) -> Document:
        """Who uses what, as mgctl tells programs."""
        document: Document = json.loads(
            self._call("metagpu.mgctl", "get", "processes", "-o", "json", *self._where)
        )
        return document

    def _simulate(self, *arguments: str) -> None:
        self._ask("sim", *arguments)

    def _ask(self, command: str, *arguments: str) -> str:
        """Run a command of metagpu's own on the running daemon; return what it prints.

        Raises:
            RigError: it failed; the text is its own.
        """
        return self._call("metagpu", command, *self._where, *arguments)

    @property
    def _where(self) -> tuple[str, str]:
        return "--run-dir", str(self._run_folder)

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
