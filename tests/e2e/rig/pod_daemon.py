"""The metagpu daemon as the pod of the chart's DaemonSet, on a node that has a label of its own."""

import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import yaml

from tests.e2e.rig import host_folders
from tests.e2e.rig.daemon import EXCHANGE_S, Daemon
from tests.e2e.rig.device_files import make_device_files
from tests.e2e.rig.errors import EndedError, RigError
from tests.e2e.rig.images import metagpu_image
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.programs import first_process
from tests.e2e.rig.release import CHART, DEVICE_ROOT, IMAGE, SYSTEM, Release
from tests.e2e.rig.service_address import service_address
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.waiting import wait_for

NAME: Final = "e2e"
_DAEMON_SET, _PROFILES = f"{NAME}-metagpu", f"{NAME}-profiles"
_LABEL, _ON = "metagpu-e2e", "pod"
_STARTED_S: Final = 120.0
_NODE_FILE: Final = host_folders.RUN_DIR / "simulation" / "node.yaml"


class PodDaemon(Daemon):
    """The DaemonSet of one release, whose pod runs while the node has the label.

    Its options are values of the chart, as `simulate=a100-40gb:8`. The release refers to a
    ConfigMap of the test's, so another configuration is no upgrade of the release.
    """

    def __init__(self, node: Node, configuration: str, *, model: str, count: int) -> None:
        super().__init__(host_folders.RUN_DIR, DEVICE_ROOT)
        self._node, self._count, self._configuration = node, count, configuration
        self._release = Release(node, NAME)
        self._values = (
            *(f"simulate={model}:{count}", f"nvidiaDevRoot={DEVICE_ROOT}"),
            *(f"config.name={_PROFILES}", f"nodeSelector.{_LABEL}={_ON}", "affinity=null"),
            *("removeLabelsOnExit=true", "privileges.mig=true"),
        )
        self._kills = 0
        self._runs = False
        self._installed: ExitStack | None = None

    def uninstall(self) -> None:
        """Remove the release and what its daemons left, if it was installed."""
        if self._installed is None:
            return
        self.stop()
        self._installed.close()
        self._installed = None

    def _install(self) -> None:
        with ExitStack() as stack:
            self._node.import_images(metagpu_image())
            stack.callback(host_folders.clear)
            make_device_files(DEVICE_ROOT, self._count)
            _NODE_FILE.parent.mkdir()
            self.configure()
            stack.enter_context(service_address())
            self._helm("install")
            stack.callback(self._release.helm, "uninstall", NAME, "--wait")
            self._installed = stack.pop_all()

    def _helm(self, action: str) -> None:
        """Install or upgrade the release; no pod runs, so there is nothing to wait for."""
        values = [part for value in (*self._values, *self._options) for part in ("--set", value)]
        self._release.helm(action, NAME, CHART, *IMAGE, *values)

    def start(self, *options: str) -> None:
        """Start the pod, if it does not run, and wait until its daemon answers."""
        if not self._runs:
            changed, self._options = self._options != options, options
            if self._installed is None:
                self._install()
            elif changed:
                self._helm("upgrade")
            self._label(f"{_LABEL}={_ON}")
            self._kills, self._runs = 0, True
        wait_for("the pod's daemon to answer", lambda: self.alive, within_s=_STARTED_S)

    def stop(self) -> None:
        """Remove the node's label, and wait for the end of the pod."""
        if self._runs:
            self._runs = False
            self._label(f"{_LABEL}-")
            wait_for("the end of the pod", lambda: not self._pods(), within_s=_STARTED_S)

    def kill(self) -> None:
        """Kill the container's process; the kubelet starts the container again."""
        if self._runs and (pid := self.pid) is not None:
            self._kills += 1
            os.kill(pid, signal.SIGKILL)
            ended = Path(f"/proc/{pid}")
            wait_for("the process to end", lambda: not ended.exists(), within_s=_STARTED_S)

    def exchange(self) -> None:
        """Roll the DaemonSet: another pod takes the node.

        The controller deletes a pod at once that is not ready yet.
        """
        self.await_rolled_out()
        self.change("rollout", "restart")
        self.await_rolled_out()

    def change(self, *command: str) -> None:
        """Run a command of kubectl on the DaemonSet; the last arguments may follow its name."""
        verb, rest = command[:2], command[2:]
        self._node.kubectl(*verb, f"daemonset/{_DAEMON_SET}", *rest, f"--namespace={SYSTEM}")

    def await_rolled_out(self) -> None:
        """Wait until one pod is left, of the newest revision, and has the node."""
        self.change("rollout", "status", f"--timeout={EXCHANGE_S:g}s")
        self._kills = 0

        def served() -> bool:
            return len(self._pods()) == 1 and self.alive

        wait_for("one pod to have the node", served, within_s=EXCHANGE_S)

    def waiting(self) -> list[str]:
        """Return the pods of the DaemonSet that are not ready."""
        pods = self._node.kubectl.list("pods", SYSTEM, self._release.of_daemons)
        return [
            pod["metadata"]["name"]
            for pod in pods
            if not any(
                each["type"] == "Ready" and each["status"] == "True"
                for each in pod["status"].get("conditions", ())
            )
        ]

    def configure(self, configuration: str | None = None, **others: str) -> None:
        """Write the ConfigMap, with other profiles; a running daemon follows it."""
        self._node.kubectl.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": _PROFILES, "namespace": SYSTEM},
                "data": {"default": configuration or self._configuration, **others},
            }
        )
        # A change of its own Node ends the random time that a daemon waits before it follows.
        for change in ("example.com/configured=", "example.com/configured-"):
            self._node.kubectl("annotate", "node", self._node.name, change)

    def simulate(self, node_file: str) -> tuple[str, ...]:
        """Return the value for a node file, in a folder that the pod mounts."""
        _NODE_FILE.write_text(node_file)
        return (f"simulate={_NODE_FILE}",)

    def features(self, *names: str) -> tuple[str, ...]:
        """Return values that turn all other features off; the configuration's stays on."""
        default: Mapping[str, bool] = yaml.safe_load(
            (REPOSITORY / CHART / "values.yaml").read_text()
        )["features"]
        wanted = {"config", *names}
        return tuple(
            f"features.{name}=false" for name, on in default.items() if on and name not in wanted
        )

    def runs_with(self, *options: str) -> bool:
        """Return whether a pod runs with these values whose container was never killed.

        The kubelet waits longer before each further start of a container.
        """
        return not self._kills and super().runs_with(*options)

    @property
    def alive(self) -> bool:
        """Return whether the pod's daemon answers."""
        try:
            return self._runs and bool(self.request("status"))
        except RigError:
            return False

    def require_no_crash(self) -> None:
        """Raise if the container was started again more often than the test killed it."""
        if self._runs and not self.alive:
            pods = self._pods()
            starts = [pod["restartCount"] for pod in pods.values()]
            if any(start > self._kills for start in starts):
                raise EndedError(f"containers were started again {starts} times:\n{self.log}")

    @property
    def pid(self) -> int | None:
        """Return the pid of the container's first process, of the newest pod."""
        for status in self._pods().values():
            if "running" in status["state"]:
                return first_process(status["containerID"].partition("://")[2])
        return None

    @property
    def log(self) -> str:
        """Return the logs of all pods that are not deleted."""
        logs = self._node.paths.home.glob(f"pod-logs/{SYSTEM}_{_DAEMON_SET}-*/*/*.log")
        return "".join(log.read_text(errors="replace") for log in sorted(logs))

    @property
    def pod_socket(self) -> Path:
        """Return the path of the containers' socket on the machine."""
        return host_folders.POD_DIR / "pod" / "mgctl.sock"

    def _label(self, change: str) -> None:
        self._node.kubectl("label", "node", self._node.name, change, "--overwrite")

    def _pods(self) -> Mapping[str, Document]:
        """Return the containers' statuses, by pod; a pod that ends is one too."""
        pods = self._node.kubectl.list("pods", SYSTEM, self._release.of_daemons)
        return {
            pod["metadata"]["name"]: status
            for pod in pods
            for status in pod["status"].get("containerStatuses", [{"restartCount": 0, "state": {}}])
        }
