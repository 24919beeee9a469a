"""The uninstallation of docs/upgrade.md, command by command, and a node as before."""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from tests.e2e.cluster import RESOURCE, Cluster, idle_pod
from tests.e2e.instances import PREFIX, mig_pod
from tests.e2e.rig import host_folders
from tests.e2e.rig.device_files import make_device_files, make_mig_device_files
from tests.e2e.rig.host_daemon import HostDaemon
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.release import DEVICE_ROOT, DEVICES, GPU_LABEL, SYSTEM, Release, inline, released
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.traces import traces
from tests.e2e.rig.waiting import wait_for

PAGE = REPOSITORY / "docs" / "upgrade.md"
MANIFEST = REPOSITORY / "deploy" / "uninstall.yaml"
SOON_S = 60.0
PODS_NODE = "gpu-1"
"""The node of the page."""
FRACTIONS, SMALL = 200, "1g.5gb"

CONFIGURATION = f"""\
version: metagpu/v1
deviceListStrategy: cdi-cri
pools:
  - name: fractions
    gpus: {{index: 0-1}}
    backends: [{{backend: fraction, resource: {RESOURCE}, sharesPerGpu: 100}}]
  - name: mig
    gpus: {{index: 2-3}}
    backends: [{{backend: mig, profiles: [{SMALL}, 2g.10gb], keepWarm: 1h}}]
"""
SIMULATION = host_folders.RUN_DIR / "simulation"
NODE_FILE, DRIVER_STATE = SIMULATION / "node.yaml", SIMULATION / "driver.json"
GPUS = (
    "gpus: [{model: a100-40gb, count: 2}, {model: a100-40gb, count: 2, mig: true}]\n"
    f"stateFile: {DRIVER_STATE}\n"
)
"""Simulated GPUs, with instances that outlive each daemon."""


class Page:
    """The commands of the page's section, and its manifest, for one node."""

    def __init__(self, release: Release, folder: Path) -> None:
        self._release = release
        text = PAGE.read_text().partition("\n## Uninstall\n")[2]
        commands, *_ = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        self.commands = [
            shlex.split(line.removeprefix("$ "), comments=True)
            for line in commands.replace(PODS_NODE, release.node.name).splitlines()
        ]
        manifest = MANIFEST.read_text().replace(PODS_NODE, release.node.name)
        self.manifest: Document = yaml.safe_load(manifest)
        self._file = folder / "metagpu-uninstall.yaml"

    def add_variables(self, **values: str) -> None:
        """Add variables to the pod's container."""
        (container,) = self.manifest["spec"]["containers"]
        container["env"] += [{"name": name, "value": text} for name, text in values.items()]

    def run(self, commands: Sequence[Sequence[str]]) -> None:
        """Run commands of the page."""
        self._file.write_text(json.dumps(self.manifest))
        programs: dict[str, Callable[..., str]] = {
            "helm": self._release.helm,
            "kubectl": self._release.node.kubectl,
        }
        for program, *arguments in commands:
            programs[program](
                *(
                    str(self._file) if argument == self._file.name else argument
                    for argument in arguments
                )
            )

    def await_end(self) -> str:
        """Wait for the end of the pod; return its phase and its log."""
        kubectl, name = self._release.node.kubectl, self.manifest["metadata"]["name"]

        def ended() -> str:
            phase = str(kubectl.get("pod", name, SYSTEM)["status"]["phase"])
            return phase if phase in ("Succeeded", "Failed") else ""

        phase = wait_for("the uninstallation to end", ended, within_s=SOON_S)
        return f"{phase}: {kubectl('logs', name, f'--namespace={SYSTEM}')}"


@pytest.fixture
def installed(
    node: Node, daemon: HostDaemon, cluster: Cluster
) -> Iterator[tuple[Release, dict[str, object]]]:
    """Install the chart as the page names it; yield it, and the node as it was before."""
    del cluster  # no pod of another test runs
    node.kubectl("delete", "--ignore-not-found", "-f", str(REPOSITORY / "deploy/static.yaml"))
    node.kubectl("label", "node", node.name, f"{GPU_LABEL}=true")
    # What other tests left is none of this one's.
    daemon.uninstall("--node-name", node.name, "--kubeconfig", node.kubeconfig)
    host_folders.clear()
    before = dict(traces(node, host_folders.RUN_DIR))
    make_device_files(DEVICE_ROOT, 4)
    make_mig_device_files(DEVICE_ROOT, (2, 3))
    SIMULATION.mkdir()
    NODE_FILE.write_text(GPUS)
    options = (
        *inline(CONFIGURATION),
        *("--set", f"simulate={NODE_FILE},cdi.enabled=true,privileges.mig=true"),
        *DEVICES,
    )
    with released(node, "metagpu", *options) as release:
        release.await_free()
        yield release, before


def test_the_uninstallation_of_the_page_leaves_the_node_as_it_was(
    installed: tuple[Release, dict[str, object]], daemon: HostDaemon, tmp_path: Path
) -> None:
    """Pods run on and keep what they use; after their end nothing of metagpu is left."""
    release, before = installed
    cluster = Cluster(release.node, daemon)
    cluster.await_amounts(FRACTIONS, FRACTIONS)
    cluster.start(
        idle_pod("training", 50), mig_pod("held", PREFIX + SMALL), mig_pod("gone", PREFIX + SMALL)
    )
    cluster.delete("gone")
    running = cluster.incarnations()
    holding = cluster.inspect_container("training")
    assert len(instances()) == 2
    assert len(holding.gpu_devices) == 1
    seen = traces(release.node, host_folders.RUN_DIR)
    assert {name for name, value in seen.items() if value != before[name]} >= {
        *("sockets", "labels", "conditions", "CDI files", "pod folder")
    }

    page = Page(release, tmp_path)
    page.add_variables(METAGPU_SIMULATE=str(NODE_FILE))
    upgrade, delete_daemons, apply, wait, delete, uninstall = page.commands
    page.run([upgrade, delete_daemons, apply])
    log = page.await_end()
    assert log.startswith("Failed"), log
    assert "used by pod cnvrg/held and 1 others" in log
    assert len(instances()) == 1  # that of no pod is gone
    cluster.crash("training")  # CDI gives a container that starts again what it had
    wait_for(
        "the container to start again",
        lambda: cluster.incarnations().get("training", running["training"]) != running["training"],
        within_s=SOON_S,
    )
    assert cluster.inspect_container("training") == holding
    assert cluster.incarnations()["held"] == running["held"]

    cluster.delete("training", "held")
    page.run([delete, apply, wait])
    log = page.await_end()
    page.run([delete, uninstall])
    assert log.startswith("Succeeded"), log
    assert release.node.resource(RESOURCE)[1] == 0
    assert not instances()
    shutil.rmtree(SIMULATION)  # the hardware, as it were
    assert release.node.kubectl("get", KINDS, "--all-namespaces", release.selector) == ""
    assert traces(release.node, host_folders.RUN_DIR) == before


KINDS = ",".join(
    (
        *("daemonsets", "configmaps", "serviceaccounts", "networkpolicies"),
        *("roles", "rolebindings", "clusterroles", "clusterrolebindings"),
        *("validatingadmissionpolicies", "validatingadmissionpolicybindings"),
    )
)
"""What a release creates at the API server."""


def instances() -> list[Document]:
    """Return the MIG instances that the driver has, while no daemon runs too."""
    gpus = json.loads(DRIVER_STATE.read_text())["gpus"]
    return [instance for gpu in gpus.values() for instance in gpu["instances"]]
