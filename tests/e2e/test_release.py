"""A release as its users get it: from its files alone, through a registry, on a real node.

`make release-check` has the files of `make release`; otherwise they are made of these sources.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from metagpu import __version__
from tests.e2e.cluster import ALL_SHARES, GPUS, MODEL, NAMESPACE, Cluster, idle_pod
from tests.e2e.rig.debian import provide
from tests.e2e.rig.device_files import make_device_files
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.host_daemon import HostDaemon
from tests.e2e.rig.images import ARCHITECTURES, metagpu_image, run
from tests.e2e.rig.node import Node
from tests.e2e.rig.programs import Program, tail
from tests.e2e.rig.release import DEVICE_ROOT, DEVICES, Release, released
from tests.e2e.rig.tools import REPOSITORY, Tools
from tests.e2e.rig.waiting import wait_for

GIVEN = "METAGPU_RELEASE"
"""Environment variable: the folder with the files of `make release`."""
RELEASE_BEFORE = "e659d7b"
"""The commit of the release before; until there is one, that of the last chart for users."""
REGISTRY_PORT = 25000
ADDRESS = f"127.0.0.1:{REGISTRY_PORT}"
CHARTS = f"oci://{ADDRESS}/charts"
NAME = "taken"
SOON_S = 60.0


@dataclass(frozen=True)
class Published:
    """A registry of this machine that has the images and the chart of a release."""

    files: Path
    digest: str
    """The digest of the image's index."""

    @property
    def chart(self) -> tuple[str, ...]:
        """Return helm's arguments for the chart, after its name."""
        return (f"--version={__version__}", "--plain-http")

    @property
    def image(self) -> tuple[str, str]:
        """Return helm's option for the image, by digest."""
        return "--set", f"image.repository={ADDRESS}/metagpu,image.digest={self.digest}"


class Plugin:
    """kubectl with the plugin that krew has installed from the files of a release."""

    def __init__(self, files: Path, home: Path, kubeconfig: Path) -> None:
        tools = Tools.cached()
        self._kubectl, self._kubeconfig = tools.path("kubectl"), kubeconfig
        path = f"{home}/krew/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._variables = {"KREW_ROOT": f"{home}/krew", "XDG_CACHE_HOME": str(home), "PATH": path}
        archive = files / f"kubectl-metagpu-{__version__}.tar.gz"
        options = (f"--manifest={files}/metagpu.yaml", f"--archive={archive}")
        run([tools.path("krew"), "install", *options], home, **self._variables)

    def __call__(self, *arguments: str) -> str:
        """Run `kubectl metagpu ARGUMENTS`; return its output."""
        command = [self._kubectl, "metagpu", *arguments, f"--kubeconfig={self._kubeconfig}"]
        return run(command, REPOSITORY.parent, **self._variables)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a release."""
    if given := os.environ.get(GIVEN):
        if not Path(given).is_dir():
            pytest.fail(f"there is no {given}: run `make release` first")
        return Path(given)
    images, target = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("release")
    for architecture in ARCHITECTURES.values():
        (images / f"{architecture}.tar").symlink_to(metagpu_image(architecture=architecture))
    run([sys.executable, "docs/manpages.py"], REPOSITORY)
    command = [sys.executable, "-m", "deploy.release", "--rehearsal"]
    run([*command, f"--images={images}", f"--target={target}"], REPOSITORY)
    return target


@pytest.fixture(scope="module")
def published(files: Path, node: Node) -> Iterator[Published]:
    """Run Debian's registry, and push image and chart there by containerd and helm."""
    try:
        program = provide("docker-registry", "docker-registry")
    except RigError as error:
        pytest.skip(f"the release was not installed from a registry: {error}")
    folder = node.paths.home / "registry"
    folder.mkdir()
    settings = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder)}},
        "http": {"addr": ADDRESS},
    }
    (folder / "config.yml").write_text(json.dumps(settings))
    command = [program, "serve", str(folder / "config.yml")]
    registry = Program("registry", command, logs=node.paths.logs, pids=node.paths.pids)
    registry.start()
    try:
        yield _publish(files, node)
    except RigError as error:
        raise RigError(f"{error}\n{tail(registry.log)}") from error
    finally:
        registry.stop()
        shutil.rmtree(folder)


def _publish(files: Path, node: Node) -> Published:
    [archive] = files.glob("*.oci.tar")
    with tarfile.open(archive) as tar:
        index = tar.extractfile("index.json")
        assert index is not None
        [image] = json.load(index)["manifests"]
    name = image["annotations"]["io.containerd.image.name"]

    def push() -> bool:
        node.push_image(archive, name, f"{ADDRESS}/metagpu:{__version__}")
        return True

    wait_for("the registry to take the image", push, within_s=SOON_S)
    helm = Release(node, NAME).helm
    helm("push", str(files / f"metagpu-{__version__}.tgz"), CHARTS, "--plain-http")
    return Published(files, image["digest"])


@pytest.fixture
def release_before(
    published: Published,  # noqa: ARG001 - the registry that has the image
    node: Node,
    daemon: HostDaemon,
    tmp_path: Path,
) -> Iterator[Release]:
    """Install the chart of the release before, with simulated GPUs.

    Its image comes from the registry too: a kubelet that pulls an image takes another name of the
    same bytes, which was there before, for one that has to be pulled.
    """
    try:
        run(["git", "archive", f"--output={tmp_path}/chart.tar", RELEASE_BEFORE], REPOSITORY)
    except RigError as error:
        pytest.skip(f"no chart was upgraded: {error}")
    with tarfile.open(tmp_path / "chart.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    daemon.stop()
    make_device_files(DEVICE_ROOT, GPUS)
    simulated = ("--set", f"simulate={MODEL}:{GPUS},image.repository={ADDRESS}/metagpu")
    chart = str(tmp_path / "deploy" / "chart")
    with released(node, NAME, *simulated, *DEVICES, chart=chart) as release:
        yield release


def test_checksums_and_provenance_name_the_files(files: Path) -> None:
    """Each file of the folder is listed with its digest, in both."""
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=files, check=True
    )
    listed = {line.split()[1] for line in (files / "SHA256SUMS").read_text().splitlines()}
    [provenance] = files.glob("*-provenance.json")
    subjects = {one["name"] for one in json.loads(provenance.read_text())["subject"]}
    assert listed == {file.name for file in files.iterdir()} - {"SHA256SUMS"}
    assert {name for name in subjects if "/" not in name} - {"metagpu"} == listed - {
        provenance.name
    }


@pytest.mark.long
def test_the_wheel_runs_in_a_clean_environment(files: Path, tmp_path: Path) -> None:
    """Pip installs the wheel with what it asks for, and the demonstration runs without a GPU."""
    [wheel] = files.glob("*.whl")
    run([sys.executable, "-m", "venv", str(tmp_path)], tmp_path)
    run([str(tmp_path / "bin" / "pip"), "install", "--quiet", str(wheel)], tmp_path)
    programs = tmp_path / "bin"
    assert __version__ in run([str(programs / "metagpu"), "--version"], tmp_path)
    assert "cnvrg.io/metagpu" in run([str(programs / "metagpu"), "demo"], tmp_path)


@pytest.mark.long
def test_a_release_is_upgraded_from_a_registry_and_back(
    release_before: Release, published: Published, daemon: HostDaemon, tmp_path: Path
) -> None:
    """A pod keeps its shares over the upgrade by digest and its rollback; krew's plugin sees it."""
    release, cluster = release_before, Cluster(release_before.node, daemon)
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)
    cluster.start(idle_pod("holds", 50))
    before, held = cluster.incarnations(), cluster.inspect_container("holds")

    release.upgrade(*published.chart, *published.image, chart=f"{CHARTS}/metagpu")
    assert _image(release).endswith(f"{ADDRESS}/metagpu@{published.digest}")
    kubectl = Plugin(published.files, tmp_path, Path(release.node.kubeconfig))
    assert __version__ in kubectl("version")
    pods = json.loads(kubectl("get", "pods", "-A", "-o", "json"))["items"]
    assert [(pod["namespace"], pod["pod"], pod["shares"]) for pod in pods] == [
        (NAMESPACE, "holds", 50)
    ]

    release.helm("rollback", NAME, "--wait", "--timeout=120s")
    tagged = f"{ADDRESS}/metagpu:{__version__}"
    wait_for("the image before", lambda: _image(release) == tagged, within_s=SOON_S)
    assert cluster.incarnations() == before
    assert cluster.inspect_container("holds") == held


def test_a_signature_of_the_image_is_checked(published: Published, tmp_path: Path) -> None:
    """Cosign takes the signature of the key that signed the digest, and of no other."""
    image = f"{ADDRESS}/metagpu@{published.digest}"

    def cosign(*arguments: str) -> str:
        # Without Sigstore's services, which keep a public log: the keys are thrown away.
        options = ("--new-bundle-format=false", "--allow-http-registry")
        command = [Tools.cached().path("cosign"), *arguments, *options, image]
        return run(command, tmp_path, COSIGN_PASSWORD="")

    for name in ("ours", "other"):
        command = ("generate-key-pair", f"--output-key-prefix={name}")
        run([Tools.cached().path("cosign"), *command], tmp_path, COSIGN_PASSWORD="")
    cosign("sign", "--key=ours.key", "--use-signing-config=false", "--tlog-upload=false", "--yes")
    [signed] = json.loads(cosign("verify", "--key=ours.pub", "--insecure-ignore-tlog"))
    assert signed["critical"]["image"]["docker-manifest-digest"] == published.digest
    with pytest.raises(RigError, match="signature"):
        cosign("verify", "--key=other.pub", "--insecure-ignore-tlog")


def _image(release: Release) -> str:
    """Return the image of the only daemon's container, as its pod names it."""
    (pod,) = release.daemons().values()
    (container,) = pod["spec"]["containers"]
    return str(container["image"])
