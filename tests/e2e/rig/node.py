"""One Kubernetes node with its control plane, from first start to last trace.

`with Node(tools) as node:` is the whole of it. Inside, the node can be treated
as nodes are in real life: its kubelet restarted, its power cut.
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

from tests.e2e.rig import health, machine, numa, settings
from tests.e2e.rig.api import Api
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.images import write_images
from tests.e2e.rig.kubectl import Document, Kubectl
from tests.e2e.rig.pki import Pki
from tests.e2e.rig.programs import Program, end_leftovers
from tests.e2e.rig.settings import API_URL, NODE_NAME, Places
from tests.e2e.rig.tools import Tools
from tests.e2e.rig.waiting import wait_for

START_S = 60.0
READY_S = 90.0
KEEP_LOGS = "METAGPU_E2E_LOGS"
"""Environment variable: a folder that gets a copy of all logs when the node stops."""


class Node:
    """A one-node cluster on loopback. There is at most one on a machine."""

    def __init__(self, tools: Tools) -> None:
        self.places = Places(Path(tempfile.gettempdir()) / "metagpu-e2e")
        self.name = NODE_NAME
        self._tools = tools
        self._pki = Pki(self.places.home / "pki", API_URL)
        self.kubeconfig = self._pki.kubeconfig("admin")
        cache = self.places.home / "kubectl-cache"
        self.kubectl = Kubectl(tools.path("kubectl"), self.kubeconfig, str(cache))
        self._lock: machine.Lock | None = None
        places, pki = self.places, self._pki
        self.etcd = self._program("etcd", settings.etcd_command(places, tools))
        self.apiserver = self._program(
            "kube-apiserver", settings.apiserver_command(places, tools, pki)
        )
        self.controllers = self._program(
            "kube-controller-manager", settings.controller_manager_command(places, tools, pki)
        )
        self.scheduler = self._program("kube-scheduler", settings.scheduler_command(tools, pki))
        self.containerd = self._program(
            "containerd",
            settings.containerd_command(places, tools),
            {"PATH": tools.search_path()},
        )
        self.kubelet = self._program("kubelet", settings.kubelet_command(places, tools, pki))

    def _program(
        self,
        name: str,
        command: Iterable[str],
        environment: dict[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> Program:
        logs, pids = self.places.logs, self.places.pids
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
            self.take_the_machine()
        except BaseException:
            self.give_back_the_machine()
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

    def take_the_machine(self) -> None:
        """Make sure that the machine is free for a node, of leftovers of earlier runs too.

        Raises:
            RigError: it is not, or not prepared.
        """
        if os.geteuid() != 0:
            raise RigError("a kubelet mounts and makes cgroups: run this as root")
        if missing := self._tools.missing():
            raise RigError(
                f"not prepared: {', '.join(missing)} missing; "
                "run `python -m tests.e2e.rig prepare` first"
            )
        self._lock = machine.lock()
        end_leftovers(self.places.pids)
        machine.refuse_foreign_kubelet()
        machine.clean(self.places)
        for port in settings.PORTS:
            machine.refuse_taken(port)

    def _start(self) -> None:
        places = self.places
        places.make()
        machine.claim(places)
        self._pki.make(self.name)
        settings.write_configuration(places, self._tools, self._pki)
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
            # In the order in which they need each other, the store last.
            for program in (self.scheduler, self.controllers, self.apiserver, self.etcd):
                program.kill()
            self.containerd.kill()
            destination = os.environ.get(KEEP_LOGS)
            if destination and self.places.logs.exists():
                shutil.copytree(self.places.logs, destination, dirs_exist_ok=True)
            end_leftovers(self.places.pids)
            machine.clean(self.places)
        finally:
            self.give_back_the_machine()

    def give_back_the_machine(self) -> None:
        """Let another run have the machine."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def start_kubelet(self) -> None:
        """Start the kubelet, and wait until it has told the API server that it is Ready."""
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
        """What `systemctl restart kubelet` does."""
        self.stop_kubelet()
        self.start_kubelet()

    @contextmanager
    def aligning_kubelet(self, changes: Mapping[str, object]) -> Iterator[None]:
        """Have a kubelet with CHANGES of its configuration, on a machine of two NUMA nodes.

        For the length of the block, and without pods before and after it.
        """
        usual, nodes = self.kubelet, self.places.home / "numa"
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
        settings.write_kubelet_configuration(self.places, self._pki, changes)
        # A kubelet does not start on what another policy has noted.
        (settings.KUBELET_HOME / "cpu_manager_state").unlink(missing_ok=True)

    def credentials(self, namespace: str, account: str) -> str:
        """Write a kubeconfig with a ServiceAccount's token; give its path."""
        token = self.kubectl("create", "token", account, f"--namespace={namespace}")
        return self._pki.token_kubeconfig(account, token.strip())

    def start_api(self) -> None:
        """Start the API server that was ended, and wait until it is ready."""
        self.apiserver.start()
        self._await_healthy(self.apiserver, self._api_is_ready)

    def power_off(self) -> None:
        """Cut the power: kubelet, containerd and every container are gone at once.

        Gone too is what lies in memory on a real node: the runtime's state and all
        mounts. Disks stay: images, containerd's data, the kubelet's home with its
        checkpoint, and the socket files nobody listens on any more. The control plane,
        which would be elsewhere, runs on. A daemon beside the kubelet is the caller's.
        """
        self.kubelet.kill()
        self.containerd.kill()
        machine.end_containers(self.places)
        machine.unmount_under(settings.KUBELET_HOME)
        machine.unmount_under(self.places.home)
        shutil.rmtree(self.places.containerd_state)

    def power_on(self) -> None:
        """Boot after `power_off`: containerd, then the kubelet, until the node is Ready."""
        self.containerd.start()
        self._await_healthy(self.containerd, self._containerd_answers)
        self.start_kubelet()

    def api(self) -> Api:
        """The API server, for who asks it often."""
        pki = self._pki
        return Api(API_URL, pki.certificate("ca"), pki.certificate("admin"), pki.key("admin"))

    def resource(self, name: str) -> tuple[int | None, int | None]:
        """Capacity and allocatable of a resource, as the API server has them."""
        status = self.kubectl.get("node", self.name)["status"]
        amounts = (status[part].get(name) for part in ("capacity", "allocatable"))
        capacity, allocatable = (None if a is None else int(a) for a in amounts)
        return capacity, allocatable

    def diagnose(self) -> str:
        """What a person wants to see first when something went wrong."""
        if not self.apiserver.alive:
            return health.logged(self.places.logs, ("etcd", "containerd", "kube-apiserver"))
        logs = health.logged(self.places.logs, ("kubelet", "metagpu"))
        return f"{health.told(self.kubectl)}\n{logs}"

    def _load_images(self) -> None:
        archive = self.places.home / "images.tar"
        write_images(Path(self._tools.path("busybox")), archive)
        self._await_healthy(self.containerd, self._containerd_answers)
        self._ctr("images", "import", str(archive))
        archive.unlink()

    def _ctr(self, *arguments: str) -> str:
        address = f"--address={self.places.containerd_socket}"
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
        """The node's Ready condition, when it is true and reported after MOMENT."""
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
