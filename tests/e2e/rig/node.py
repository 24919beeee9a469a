"""One Kubernetes node with its control plane, from first start to last trace.

`with Node(tools) as node:` does all of it. Inside, a test may treat the node as nodes are
treated in real life: restart its kubelet, cut its power.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.e2e.rig import health, host_folders, machine, numa, settings
from tests.e2e.rig.api import Api
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import write_images
from tests.e2e.rig.kubectl import Document, Kubectl
from tests.e2e.rig.pki import Pki
from tests.e2e.rig.programs import Program, end_leftovers
from tests.e2e.rig.settings import API_URL, NODE_NAME, NodePaths
from tests.e2e.rig.tools import Tools
from tests.e2e.rig.waiting import wait_for

START_S = 60.0
READY_S = 90.0
KEEP_LOGS = "METAGPU_E2E_LOGS"
"""Environment variable: a folder that gets a copy of all logs when the node stops."""


_running: list["Node"] = []


@contextmanager
def running_node() -> Iterator["Node"]:
    """Start the node of this process; yield the one that runs if there is one."""
    if _running:
        yield _running[0]
        return
    with Node(Tools.cached()) as node:
        _running.append(node)
        try:
            yield node
        finally:
            _running.clear()


class Node:
    """A one-node cluster on loopback. There is at most one on a machine."""

    def __init__(self, tools: Tools) -> None:
        self.paths = NodePaths(Path(tempfile.gettempdir()) / "metagpu-e2e")
        self.name = NODE_NAME
        self._tools = tools
        self._pki = Pki(self.paths.home / "pki", API_URL)
        self.kubeconfig = self._pki.kubeconfig("admin")
        cache = self.paths.home / "kubectl-cache"
        self.kubectl = Kubectl(tools.path("kubectl"), self.kubeconfig, str(cache))
        self._lock: machine.Lock | None = None
        paths, pki = self.paths, self._pki
        self.etcd = self._program("etcd", settings.etcd_command(paths, tools))
        self.apiserver = self._program(
            "kube-apiserver", settings.apiserver_command(paths, tools, pki)
        )
        self.controllers = self._program(
            "kube-controller-manager", settings.controller_manager_command(paths, tools, pki)
        )
        self.scheduler = self._program("kube-scheduler", settings.scheduler_command(tools, pki))
        self.containerd = self._program(
            "containerd",
            settings.containerd_command(paths, tools),
            {"PATH": tools.search_path()},
        )
        self.kubelet = self._program("kubelet", settings.kubelet_command(paths, tools, pki))

    def _program(
        self,
        name: str,
        command: Iterable[str],
        environment: dict[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> Program:
        logs, pids = self.paths.logs, self.paths.pids
        return Program(
            name,
            list(command),
            logs=logs,
            pids=pids,
            environment=environment,
            launcher=launcher,
        )

    def __enter__(self) -> Self:
        """Start everything, and wait until the node is Ready.

        Raises:
            RigError: this machine is in use, or something did not start.
        """
        try:
            self.acquire_machine()
        except BaseException:
            self.release_machine()
            raise
        try:
            self._start()
        except BaseException as error:
            print(f"the node did not start: {error}\n{self.diagnose()}", file=sys.stderr)
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop everything and leave the machine as it was found."""
        self.stop()

    def acquire_machine(self) -> None:
        """Require a machine that is free for a node; remove leftovers of earlier runs.

        Raises:
            RigError: the machine is in use, or not prepared.
        """
        if os.geteuid() != 0:
            raise RigError("a kubelet mounts and makes cgroups: run this as root")
        if missing := self._tools.missing():
            raise RigError(
                f"not prepared: {', '.join(missing)} missing; "
                "run `python -m tests.e2e.rig prepare` first"
            )
        self._lock = machine.lock()
        end_leftovers(self.paths.pids)
        machine.refuse_foreign_kubelet()
        machine.clean(self.paths)
        for port in settings.PORTS:
            machine.require_free_port(port)

    def _start(self) -> None:
        paths = self.paths
        paths.create()
        machine.record_state(paths)
        host_folders.mount(paths.home)
        self._pki.create(self.name)
        settings.write_configuration(paths, self._tools, self._pki)
        self.etcd.start()
        self.containerd.start()
        self.apiserver.start()
        self._load_images()
        self._await_healthy(self.apiserver, self._api_is_ready)
        self.controllers.start()
        self.scheduler.start()
        self.start_kubelet()
        self.kubectl.await_namespace("default")

    def stop(self) -> None:
        """End all programs and containers, and remove what they left on the machine."""
        try:
            self.kubelet.stop()
            # In the order of their dependencies, the store last.
            for program in (self.scheduler, self.controllers, self.apiserver, self.etcd):
                program.kill()
            self.containerd.kill()
            destination = os.environ.get(KEEP_LOGS)
            if destination and self.paths.logs.exists():
                shutil.copytree(self.paths.logs, destination, dirs_exist_ok=True)
            end_leftovers(self.paths.pids)
            machine.clean(self.paths)
        finally:
            self.release_machine()

    def release_machine(self) -> None:
        """Release the machine for another run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def start_kubelet(self) -> None:
        """Start the kubelet, and wait until the API server has its Ready status."""
        started = time.time()
        self.kubelet.start()
        self._await_healthy(self.kubelet, health.kubelet_is_healthy)
        wait_for(
            "the kubelet to report Ready", lambda: self._ready_since(started), within_s=READY_S
        )

    def stop_kubelet(self) -> None:
        """Stop the kubelet alone; containers run on."""
        self.kubelet.stop()

    def restart_kubelet(self) -> None:
        """Restart the kubelet as `systemctl restart kubelet` does."""
        self.stop_kubelet()
        self.start_kubelet()

    @contextmanager
    def configured_kubelet(self, changes: Mapping[str, object]) -> Iterator[None]:
        """Run a kubelet with CHANGES of its configuration for the length of the block."""
        self.stop_kubelet()
        try:
            self._configure_kubelet(changes)
            self.start_kubelet()
            yield
        finally:
            self.stop_kubelet()
            self._configure_kubelet({})
            self.start_kubelet()

    @contextmanager
    def aligning_kubelet(self, changes: Mapping[str, object]) -> Iterator[None]:
        """Run a kubelet with CHANGES of its configuration, on a machine of two NUMA nodes.

        For the length of the block, and without pods before and after it.
        """
        usual, nodes = self.kubelet, self.paths.home / "numa"
        numa.write_nodes(nodes, numa.halves())
        self.stop_kubelet()
        numa.share_home()
        self.kubelet = self._program("kubelet", usual.command, launcher=numa.launcher(nodes))
        try:
            self._configure_kubelet(changes)
            self.start_kubelet()
            yield
        finally:
            self.stop_kubelet()
            self.kubelet = usual
            machine.unmount_under(settings.KUBELET_HOME)
            shutil.rmtree(nodes)
            self._configure_kubelet({})
            self.start_kubelet()

    def _configure_kubelet(self, changes: Mapping[str, object]) -> None:
        settings.write_kubelet_configuration(self.paths, self._pki, changes)
        # A kubelet does not start with the state file of another CPU policy.
        (settings.KUBELET_HOME / "cpu_manager_state").unlink(missing_ok=True)

    def credentials(self, namespace: str, account: str, node: str = NODE_NAME) -> str:
        """Write a kubeconfig with a ServiceAccount's token on a node; return its path.

        The token names its node to the API server, as the token of a pod there does. Without
        NODE it names none.
        """
        bound = ("--bound-object-kind=Node", f"--bound-object-name={node}") if node else ()
        token = self.kubectl("create", "token", account, f"--namespace={namespace}", *bound)
        return self._pki.token_kubeconfig(f"{account}-{node or 'nowhere'}", token.strip())

    def start_api(self) -> None:
        """Start the API server again, and wait until it is ready."""
        self.apiserver.start()
        self._await_healthy(self.apiserver, self._api_is_ready)

    @contextmanager
    def gated(self, *gates: str, apis: Sequence[str] = ()) -> Iterator[None]:
        """Run the control plane with feature gates, and APIs that are off by default.

        For the length of the block, and without objects of these APIs after it. The kubelet is
        away meanwhile: one that was refused by an API server may wait a minute to try again.
        """
        enabled = f"--feature-gates={','.join(f'{gate}=true' for gate in gates)}"
        served = [f"--runtime-config={','.join(f'{name}=true' for name in apis)}"] if apis else []
        self._restart_control_plane([enabled], [enabled, *served])
        try:
            yield
        finally:
            self._restart_control_plane([], [])

    def _restart_control_plane(self, options: Sequence[str], of_server: Sequence[str]) -> None:
        """Start API server, controllers and scheduler again, with further options."""
        self.stop_kubelet()
        for program in (self.scheduler, self.controllers, self.apiserver):
            program.stop()
        self.apiserver.start(*of_server)
        self._await_healthy(self.apiserver, self._api_is_ready)
        self.controllers.start(*options)
        self.scheduler.start(*options)
        self.start_kubelet()

    def power_off(self) -> None:
        """Cut the power: kubelet, containerd and every container are gone at once.

        Everything in a real node's memory is gone too: the runtime's state and all
        mounts. Disks stay: images, containerd's data, the kubelet's home with its
        checkpoint, and socket files without a listener. The control plane, on
        other machines in real life, runs on. The caller kills a daemon beside the kubelet.
        """
        self.kubelet.kill()
        self.containerd.kill()
        machine.end_containers(self.paths)
        machine.unmount_under(settings.KUBELET_HOME)
        machine.unmount_under(self.paths.home)
        shutil.rmtree(self.paths.containerd_state)

    def power_on(self) -> None:
        """Boot after `power_off`: containerd, then the kubelet, until the node is Ready."""
        self.containerd.start()
        self._await_healthy(self.containerd, self._containerd_answers)
        self.start_kubelet()

    def api(self) -> Api:
        """Return a client of the API server for many requests."""
        pki = self._pki
        return Api(API_URL, pki.certificate("ca"), pki.certificate("admin"), pki.key("admin"))

    def resource(self, name: str) -> tuple[int | None, int | None]:
        """Return capacity and allocatable of a resource, by the API server."""
        status = self.kubectl.get("node", self.name)["status"]
        amounts = (status[part].get(name) for part in ("capacity", "allocatable"))
        capacity, allocatable = (None if a is None else int(a) for a in amounts)
        return capacity, allocatable

    def diagnose(self) -> str:
        """Return pods, Events and logs, for the report of a failure."""
        if not self.apiserver.alive:
            return health.describe_logs(self.paths.logs, ("etcd", "containerd", "kube-apiserver"))
        logs = health.describe_logs(self.paths.logs, ("kubelet", "metagpu"))
        return f"{health.describe_cluster(self.kubectl)}\n{logs}"

    def _load_images(self) -> None:
        archive = self.paths.home / "images.tar"
        write_images(Path(self._tools.path("busybox")), archive)
        self._await_healthy(self.containerd, self._containerd_answers)
        self.import_images(archive)
        archive.unlink()

    def import_images(self, archive: Path) -> None:
        """Import the images of an archive into the container runtime."""
        self._ctr("images", "import", str(archive))

    def push_image(self, archive: Path, image: str, address: str) -> None:
        """Push an image of an archive, for all its processors, to a registry of this machine."""
        self._ctr("images", "import", "--all-platforms", "--no-unpack", str(archive))
        self._ctr("images", "tag", "--force", image, address)
        self._ctr("images", "push", "--plain-http", address)
        self._ctr("images", "rm", address)  # so that the kubelet pulls it

    def tag_image(self, image: str, other: str) -> None:
        """Name an image once more; that name stays when its own gets another image."""
        self._ctr("images", "tag", "--force", f"docker.io/library/{image}", other)

    def _ctr(self, *arguments: str) -> str:
        address = f"--address={self.paths.containerd_socket}"
        command = [self._tools.path("ctr"), address, "--namespace=k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RigError(f"ctr {arguments[0]} failed: {done.stderr.strip()}")
        return done.stdout

    def _containerd_answers(self) -> bool:
        return bool(self._ctr("version"))

    def _api_is_ready(self) -> bool:
        return self.kubectl("get", "--raw", "/readyz") == "ok"

    def _ready_since(self, moment: float) -> Document | None:
        """Return the node's Ready condition, when it is true and reported after MOMENT."""
        for condition in self.kubectl.get("node", self.name)["status"].get("conditions", ()):
            if condition["type"] == "Ready" and condition["status"] == "True":
                beat = datetime.fromisoformat(condition["lastHeartbeatTime"])
                return dict(condition) if beat.timestamp() > moment else None
        return None

    @staticmethod
    def _await_healthy(program: Program, probe: Callable[[], bool]) -> None:
        def healthy() -> bool:
            program.require_alive()
            return probe()

        wait_for(f"{program.name} to be healthy", healthy, within_s=START_S)
