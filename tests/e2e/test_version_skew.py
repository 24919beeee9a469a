"""The previous commit's daemon and this one's, each as the successor of the other."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import GPUS, NAMESPACE, RESOURCE, Cluster, idle_pod
from tests.e2e.instances import PREFIX
from tests.e2e.rig import host_folders
from tests.e2e.rig.device_files import make_device_files
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.host_daemon import HostDaemon
from tests.e2e.rig.images import METAGPU_IMAGE, metagpu_image, previous_sources
from tests.e2e.rig.node import Node
from tests.e2e.rig.release import DEVICE_ROOT, DEVICES, SYSTEM, Release, inline, released
from tests.e2e.rig.waiting import wait_for
from tests.e2e.test_exchange import arrivals, await_ended, phases

NAME = "skew"
REPOSITORY, OLD, NEW = METAGPU_IMAGE.partition(":")[0], "previous", METAGPU_IMAGE.partition(":")[2]
SHARED, MPS, WHOLE, SMALL = (
    *("nvidia.com/gpu.shared", "nvidia.com/gpu.mps", "nvidia.com/gpu"),
    f"{PREFIX}1g.5gb",
)
CONFIGURATION = f"""\
version: metagpu/v1
pools:
  - name: fractions
    gpus: {{index: 0-2}}
    backends: [{{backend: fraction, resource: {RESOURCE}, sharesPerGpu: 100, metagpuEnv: true}}]
  - name: others
    gpus: {{index: 3-5}}
    backends:
      - {{backend: timeslice, resource: {SHARED}, replicas: 4}}
      - {{backend: mps, resource: {MPS}}}
      - {{backend: whole, resource: {WHOLE}}}
  - name: mig
    gpus: {{index: 6-7}}
    backends: [{{backend: mig, profiles: [1g.5gb, 2g.10gb]}}]
"""
SIMULATION = host_folders.RUN_DIR / "simulation"
NODE_FILE = f"""\
gpus: [{{model: a100-40gb, count: 6}}, {{model: a100-40gb, count: 2, mig: true}}]
stateFile: {SIMULATION}/driver.json
"""
HELD = {
    "fraction": (RESOURCE, 50),
    "timeslice": (SHARED, 1),
    "mps": (MPS, 30),
    "whole": (WHOLE, 1),
    "mig": (SMALL, 1),
}
"""A pod of each backend: resource and shares."""
ARRIVALS = 15
SOON_S = 180.0


@pytest.fixture
def old_release(
    node: Node, daemon: HostDaemon, cluster: Cluster, tmp_path: Path
) -> Iterator[Release]:
    """Install the chart and the image of the last commit that had another daemon."""
    try:
        commit = previous_sources(tmp_path)
    except RigError as error:
        pytest.skip(f"the previous daemon was not tested: {error}")
    print(f"the previous daemon is that of {commit}")
    del cluster  # no pod of another test runs
    daemon.stop()
    node.import_images(metagpu_image(tmp_path))
    node.tag_image(METAGPU_IMAGE, f"docker.io/library/{REPOSITORY}:{OLD}")
    make_device_files(DEVICE_ROOT, GPUS)
    SIMULATION.mkdir()
    (SIMULATION / "node.yaml").write_text(NODE_FILE)
    values = f"simulate={SIMULATION}/node.yaml,image.tag={OLD},privileges.mig=true"
    options = ("--set", values, *DEVICES, *inline(CONFIGURATION))
    with released(node, NAME, *options, chart=str(tmp_path / "deploy" / "chart")) as release:
        release.await_free()
        yield release


@pytest.mark.long
def test_pods_run_on_over_an_upgrade_and_its_rollback(
    old_release: Release, daemon: HostDaemon
) -> None:
    """Pods of all backends run on, and new ones arrive, in both directions."""
    release, cluster = old_release, Cluster(old_release.node, daemon)
    cluster.await_amounts(300, 300)
    cluster.start(*(idle_pod(name, shares, of) for name, (of, shares) in HELD.items()))
    before = cluster.incarnations()
    held = {name: cluster.inspect_container(name) for name in HELD}

    with arrivals(cluster, ARRIVALS):
        release.upgrade("--set", f"image.tag={NEW}")
    assert_taken_over(release, NEW)
    await_arrived(cluster)
    with arrivals(cluster, ARRIVALS):
        release.helm("rollback", NAME, "--wait", "--timeout=300s")
    assert_taken_over(release, OLD)
    await_arrived(cluster)

    assert cluster.incarnations() == before
    assert {name: cluster.inspect_container(name) for name in HELD} == held
    cluster.await_amounts(300, 300)


def assert_taken_over(release: Release, tag: str) -> None:
    """Assert that the daemon of an image has the node."""
    (pod,) = release.daemons().values()
    (container,) = pod["spec"]["containers"]
    assert container["image"] == f"{REPOSITORY}:{tag}"
    log = ("logs", pod["metadata"]["name"], f"--namespace={SYSTEM}")
    wait_for(
        "the daemon to have the node",
        lambda: "node taken" in release.node.kubectl(*log),
        within_s=SOON_S,
    )


def await_arrived(cluster: Cluster) -> None:
    """Wait until all pods that arrived have ended, almost all of them well, and delete them."""
    await_ended(cluster, ARRIVALS, exchanges=1)
    cluster.kubectl("delete", "pods", *phases(cluster), f"--namespace={NAMESPACE}", "--wait=false")
