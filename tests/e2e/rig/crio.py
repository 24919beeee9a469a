"""CRI-O, the container runtime of OpenShift, on the node in place of containerd."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.e2e.rig import debian, machine
from tests.e2e.rig.build import build_programs
from tests.e2e.rig.go_programs import GoPrograms
from tests.e2e.rig.images import BUSYBOX_IMAGE, PAUSE_IMAGE, run, write_images
from tests.e2e.rig.node import Node
from tests.e2e.rig.programs import Program
from tests.e2e.rig.settings import LOOPBACK
from tests.e2e.rig.tools import Tools
from tests.e2e.rig.waiting import wait_for

CRIO: Final = GoPrograms(
    "cri-o",
    "github.com/cri-o/cri-o",
    ("cmd/crio", "test/copyimg"),
    files=("pinns",),
    cgo=True,
    tags=("containers_image_openpgp", "containers_image_ostree_stub", "exclude_graphdriver_btrfs"),
)
"""The first test that asks for it builds it; no other needs it."""
STORAGE: Final = "vfs"
"""A copy of busybox for each container: it needs nothing of the machine's file system."""
START_S: Final = 60.0


def provide_crio() -> None:
    """Build CRI-O and unpack its monitor, unless the cache has them.

    Raises:
        RigError: this machine can get neither or one of them.
    """
    build_programs(CRIO)
    debian.provide("conmon", "conmon")


@contextmanager
def crio(node: Node) -> Iterator[None]:
    """Run the node's pods by CRI-O in the block, which begins and ends without pods.

    Raises:
        RigError: it did not start.
    """
    home = node.paths.home / "crio"
    home.mkdir()
    socket = home / "crio.sock"
    command = [str(CRIO.folder / "crio"), f"--config={_configured(node, home, socket)}"]
    paths = node.paths
    runtime = Program(
        "crio",
        [*command, "--config-dir="],
        logs=paths.logs,
        pids=paths.pids,
        launcher=_launcher(home),
    )
    _load_images(home)

    def listens() -> bool:
        runtime.require_alive()
        return socket.exists()

    runtime.start()
    try:
        wait_for("CRI-O to listen", listens, within_s=START_S)
        with node.configured_kubelet({"containerRuntimeEndpoint": f"unix://{socket}"}):
            yield
    finally:
        runtime.stop()
        machine.unmount_under(home)
        shutil.rmtree(home)


def _configured(node: Node, home: Path, socket: Path) -> Path:
    """Write the files of CRI-O; return the path of its configuration."""
    tools = Tools.cached()
    (home / "policy.json").write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
    sources = map(str, sorted((CRIO.folder / "pinns" / "src").glob("*.c")))
    run(["gcc", "-std=c99", "-o", str(home / "pinns"), *sources], home)
    path = home / "crio.conf"
    path.write_text(f"""
[crio]
root = "{home}/storage"
runroot = "{home}/run"
storage_driver = "{STORAGE}"
log_dir = "{home}/logs"
version_file = "{home}/version"
clean_shutdown_file = ""
[crio.api]
listen = "{socket}"
stream_address = "{LOOPBACK}"
stream_port = "0"
[crio.runtime]
cgroup_manager = "cgroupfs"
default_runtime = "runc"
pinns_path = "{home}/pinns"
namespaces_dir = "{home}/namespaces"
container_exits_dir = "{home}/exits"
container_attach_socket_dir = "{home}/attach"
disable_hostport_mapping = true
hooks_dir = []
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi", "{node.paths.cdi}"]
[crio.runtime.runtimes.runc]
runtime_path = "{tools.path("runc")}"
runtime_root = "{home}/runc"
monitor_path = "{debian.provide("conmon", "conmon")}"
monitor_cgroup = "pod"
[crio.image]
pause_image = "{PAUSE_IMAGE}"
signature_policy = "{home}/policy.json"
[crio.network]
network_dir = "{node.paths.network}"
plugin_dirs = ["{tools.cni_folder}"]
[crio.nri]
enable_nri = false
""")
    return path


def _launcher(home: Path) -> Sequence[str]:
    """Return what hides controllers without a hierarchy, in which CRI-O would set limits.

    A machine with cgroups of version 1 that lacks one is a machine in a virtual one.
    """
    usable = home / "cgroups"
    lines = Path("/proc/cgroups").read_text().splitlines()
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return ()
    usable.write_text("".join(f"{line}\n" for line in lines if line.split()[1] != "0"))
    script = 'mount --bind "$0" /proc/cgroups; exec "$@"'
    return ["unshare", "--mount", "--propagation=slave", "sh", "-ec", script, str(usable)]


def _load_images(home: Path) -> None:
    archive = home / "images.tar"
    write_images(Path(Tools.cached().path("busybox")), archive)
    copy = [str(CRIO.folder / "copyimg"), f"--root={home}/storage", f"--runroot={home}/run"]
    copy += [f"--storage-driver={STORAGE}", f"--signature-policy={home}/policy.json"]
    for image in (BUSYBOX_IMAGE, PAUSE_IMAGE):
        run(
            [*copy, f"--image-name={image}", f"--import-from=docker-archive:{archive}:{image}"],
            home,
        )
    archive.unlink()
