"""The uninstallation by one command, and a node as before."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metagpu.core.grants import cdi
from tests.e2e.cluster import RESOURCE, Cluster, idle_pod
from tests.e2e.instances import PREFIX, mig_pod
from tests.e2e.rig import host_folders
from tests.e2e.rig.device_files import make_device_files, make_mig_device_files
from tests.e2e.rig.host_daemon import HostDaemon
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.node import Node
from tests.e2e.rig.release import DEVICE_ROOT, DEVICES, GPU_LABEL, Release, inline, released
from tests.e2e.rig.tools import REPOSITORY, Tools
from tests.e2e.rig.traces import traces
from tests.e2e.rig.waiting import wait_for

SOON_S = 60.0
UNINSTALL_S = 600.0
FRACTIONS, SMALL = 200, "1g.5gb"

CONFIGURATION = f"""\
version: metagpu/v1
deviceListStrategy: cdi-cri
startHook: fail
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


def uninstall(release: Release, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `kubectl metagpu uninstall` of this tree, with helm at hand."""
    command = [sys.executable, "-m", "metagpu.kubectl.program", "uninstall", *options]
    helm = Path(Tools.cached().path("helm")).parent
    environment = {"KUBECONFIG": release.node.kubeconfig, "PATH": f"{helm}:{os.environ['PATH']}"}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=UNINSTALL_S,
        env=os.environ | environment,
    )


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


@pytest.mark.long
def test_one_command_leaves_the_node_as_it_was(
    installed: tuple[Release, dict[str, object]], daemon: HostDaemon
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

    specification = host_folders.CDI_DIR / cdi.FILE_NAME
    assert cdi.HOOK_NAME in specification.read_text()
    planned = uninstall(release, "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "cnvrg/held, cnvrg/training" in planned.stdout
    assert len(release.daemons()) == 1
    done = uninstall(release, "--yes")
    assert done.returncode == 1, done
    assert "used by pod cnvrg/held and 1 others" in " ".join(done.stdout.split())
    assert release.daemons() == {}
    assert len(instances()) == 1  # that of no pod is gone
    assert cdi.HOOK_NAME not in specification.read_text()
    cluster.crash("training")  # CDI gives a container that starts again what it had
    wait_for(
        "the container to start again",
        lambda: cluster.incarnations().get("training", running["training"]) != running["training"],
        within_s=SOON_S,
    )
    assert cluster.inspect_container("training") == holding
    assert cluster.incarnations()["held"] == running["held"]

    cluster.delete("training", "held")
    done = uninstall(release, "--yes")
    assert done.returncode == 0, done
    assert "metagpu is removed" in done.stdout
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
