"""metagpu as a DaemonSet with NVIDIA's own MPS programs, and a client in a pod."""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from metagpu.core.contracts.programs import DaemonProcess
from metagpu.core.errors import MetagpuError
from metagpu.host import processes
from metagpu.plugins.control.client import send_request
from tests.e2e.cluster import NAMESPACE, Cluster, Incarnation, pod
from tests.e2e.mps_agent import DRIVER_ROOT, HOST_PROCESS, MEMORY
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import BUSYBOX_IMAGE
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.programs import command_line, end_processes, running_processes
from tests.e2e.rig.settings import KUBELET_HOME
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.waiting import wait_for

NAME, RESOURCE = "metagpu", "nvidia.com/gpu.mps"
SOON_S = 60.0
CONFIGURATION = """\
version: metagpu/v1
mgctl: {inPods: false}
pools: [{name: all, backends: [{backend: mps, unitsPerGpu: 10}]}]
"""
SECURITY = {
    "allowPrivilegeEscalation": False,
    "seccompProfile": {"type": "RuntimeDefault"},
    "capabilities": {
        "drop": ["ALL"],
        "add": ["SYS_ADMIN", "SYS_PTRACE", "SYS_CHROOT", "DAC_OVERRIDE", "FOWNER"],
    },
}
"""The rights of a container with MPS; no other is needed."""
CLIENT = """
import os, select
log = os.open(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/log", os.O_WRONLY | os.O_NONBLOCK)
print("connected", flush=True)
ends = select.poll()
ends.register(log, 0)
ends.poll()
"""
"""A client that ends with the control daemon: it has the pipe open to which CUDA's clients log.

On the socket `control` the daemon would wait for a CUDA program, and answer nobody else.
"""


class MpsPods:
    """A DaemonSet of metagpu with one GPU under MPS, and pods with shares of the GPU."""

    def __init__(self, cluster: Cluster, driver_root: Path) -> None:
        self._cluster, self.kubectl = cluster, cluster.kubectl
        self._driver_root = driver_root
        self.run_dir = cluster.node.paths.home / "mps"

    def prepare(self) -> None:
        """Create the run directory, on a mount that is shared, as the host's are with systemd."""
        self.run_dir.mkdir(mode=0o755)
        for options in (["--bind", str(self.run_dir)], ["--make-shared"]):
            subprocess.run(["mount", *options, str(self.run_dir)], check=True)
        (self.run_dir / "metagpu.yaml").write_text(CONFIGURATION)

    def apply(self, image: str = BUSYBOX_IMAGE, **annotations: str) -> None:
        """Create or change the DaemonSet."""
        command = [sys.executable, "-m", "tests.e2e.mps_agent", "run", "--simulate=a100-40gb:1"]
        command += [f"--config={self.run_dir}/metagpu.yaml", f"--run-dir={self.run_dir}"]
        container = {
            "name": "main",
            "image": image,
            "command": command,
            "workingDir": str(REPOSITORY),
            "securityContext": SECURITY,
            "resources": {"limits": {"memory": str(MEMORY)}},
            "env": [
                {"name": DRIVER_ROOT, "value": str(self._driver_root)},
                {"name": HOST_PROCESS, "value": str(os.getpid())},
            ],
        }
        run_dir = host_path(self.run_dir)
        run_dir[1]["mountPropagation"] = "HostToContainer"
        others = [run_dir, host_path(self._driver_root)]
        others += [host_path(KUBELET_HOME / name) for name in ("device-plugins", "pod-resources")]
        labels = {"app": NAME}
        template = {
            "metadata": {"labels": labels, "annotations": annotations},
            "spec": spec_with_python(container, *others) | {"hostPID": True},
        }
        self.kubectl.apply(
            {
                "apiVersion": "apps/v1",
                "kind": "DaemonSet",
                "metadata": {"name": NAME, "namespace": NAMESPACE},
                "spec": {"selector": {"matchLabels": labels}, "template": template},
            }
        )

    def start_client(self) -> None:
        """Start a pod with shares of the GPU that is connected to the control daemon."""
        container = {
            "name": "main",
            "image": BUSYBOX_IMAGE,
            "command": [sys.executable, "-c", CLIENT],
            "resources": {"limits": {RESOURCE: "3"}},
        }
        self.kubectl.apply(pod("client") | {"spec": spec_with_python(container)})
        wait_for("the client to be connected", self._client_is_connected, within_s=SOON_S)

    def client(self) -> Incarnation:
        """Return the incarnation of the client's container."""
        return self._cluster.incarnations()["client"]

    def control_daemon(self) -> DaemonProcess:
        """Return the running control daemon."""
        (file,) = self.run_dir.glob("mps/*/pid")
        found = processes.read_process(processes.read_pid(file) or 0)
        if found is None or "-f" not in found.arguments:
            raise RigError("no control daemon runs")
        return found.process

    def agent(self) -> int:
        """Return the pid of metagpu that serves the GPU's shares.

        Raises:
            RigError: none does.
        """
        try:
            status = send_request(self.run_dir, {"command": "status"})
        except MetagpuError as error:
            raise RigError(str(error)) from error
        if any(gpu.get("suspended") for gpu in status["gpus"]) or not status["gpus"]:
            raise RigError(f"the GPU does not serve: {status['gpus']}")
        if len(pids := self._agents()) != 1:
            raise RigError(f"processes of metagpu: {pids}")
        return pids[0]

    def await_another(self, agent: int) -> None:
        """Wait until another metagpu than this one serves."""
        wait_for("another metagpu to serve", lambda: self.agent() != agent, within_s=SOON_S)

    def last_end(self) -> str:
        """Return why the container of metagpu ended the last time."""
        (document,) = self.kubectl.list("pods", NAMESPACE, f"--selector=app={NAME}")
        (status,) = document["status"]["containerStatuses"]
        return str(status["lastState"].get("terminated", {}).get("reason"))

    def remove(self) -> None:
        """Remove the DaemonSet and the client, and end the control daemon, which outlives both."""
        with suppress(RigError):
            self.kubectl("delete", "daemonset", NAME, f"--namespace={NAMESPACE}", "--wait")
        self._cluster.clear()
        with suppress(RigError, ValueError):  # none was started
            daemon = self.control_daemon().pid
            end_processes({daemon: command_line(daemon)})
        subprocess.run(["umount", "--recursive", "--lazy", str(self.run_dir)], check=False)
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def _client_is_connected(self) -> bool:
        return "connected" in self.kubectl("logs", "client", f"--namespace={NAMESPACE}")

    @staticmethod
    def _agents() -> list[int]:
        return [pid for pid, words in running_processes().items() if "tests.e2e.mps_agent" in words]


Volume = tuple[Document, Document]
"""A volume of a pod, and its mount in a container."""


def host_path(path: Path, inside: Path | None = None) -> Volume:
    """Return a volume with a folder of the host, and its mount, by default at the same path."""
    inside = inside or path
    name = "".join(text if text.isalnum() else "-" for text in str(inside).lower()).strip("-")
    volume = {"name": name[-60:].strip("-"), "hostPath": {"path": str(path)}}
    return volume, {"name": volume["name"], "mountPath": str(inside)}


def spec_with_python(container: Document, *others: Volume) -> Document:
    """Return a pod's spec of one container with the host's Python, and with other volumes."""
    folders = {
        Path(text) for text in (sys.prefix, sys.base_prefix, str(REPOSITORY), *sys.path) if text
    }
    tops = [folder for folder in folders if folder.is_dir() and folders.isdisjoint(folder.parents)]
    system = {"/usr": "/usr", "/lib": "/usr/lib", "/lib64": "/usr/lib64"}
    pairs = [host_path(Path(path), Path(inside)) for inside, path in system.items()]
    pairs += [host_path(top) for top in sorted(tops)]
    for _, mount in pairs:
        mount["readOnly"] = True
    pairs += others
    return {
        "containers": [container | {"volumeMounts": [mount for _, mount in pairs]}],
        "volumes": [volume for volume, _ in pairs],
        "terminationGracePeriodSeconds": 5,
    }
