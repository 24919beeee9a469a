"""metagpu as a service of the host: a boot by systemd, and no trace after its end."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from metagpu.cli.metagpu import main
from tests.e2e.cluster import (
    ALL_SHARES,
    CONFIGURATION,
    GPUS,
    MODEL,
    Cluster,
)
from tests.e2e.joined import Joined
from tests.e2e.rig import systemd
from tests.e2e.rig.host_daemon import HostDaemon
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.traces import traces
from tests.e2e.rig.waiting import wait_for

SOON_S = 90.0


@dataclass
class Service:
    """The service's files below a root, and the moment at which systemd starts the kubelet."""

    cluster: Cluster
    root: Path = field(init=False)

    def __post_init__(self) -> None:
        self.root = self.cluster.node.paths.home / "host"

    @property
    def kubelet_may_start(self) -> Path:
        """The file that systemd makes where it would start the kubelet."""
        return self.root / "kubelet-may-start"

    def install(self) -> None:
        """Install the service as an operator does, for this node's folders and GPUs."""
        assert main(["install", "--systemd", "--root", str(self.root)]) == 0
        daemon, home = self.cluster.daemon, self.cluster.node.paths.home
        (self.root / "etc/metagpu/metagpu.yaml").write_text(CONFIGURATION)
        settings = {
            "CONFIG": self.root / "etc/metagpu/metagpu.yaml",
            "SIMULATE": f"{MODEL}:{GPUS}",
            "RUN_DIR": daemon.run_folder,
            "DEV_ROOT": daemon.device_root,
        }
        variables = self.root / "etc/metagpu/metagpu.env"
        variables.write_text(
            "".join(f"METAGPU_{name}={value}\n" for name, value in settings.items())
        )
        units = self.root / "etc/systemd/system"
        for unit in units.glob("metagpu*.service"):
            unit.write_text(unit.read_text().replace("/etc/metagpu/", f"{variables.parent}/"))
        drop_in = units / "metagpu.service.d" / "here.conf"
        drop_in.parent.mkdir()
        # The rig's home and the code are in folders that the service would have for itself.
        drop_in.write_text(
            f"[Service]\nPrivateTmp=no\nReadWritePaths={home}\nWorkingDirectory={REPOSITORY}\n"
        )
        (units / "kubelet.service").write_text(
            "[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nRemainAfterExit=yes\n"
            f"ExecStart=/bin/touch {self.kubelet_may_start}\n"
        )
        (units / "multi-user.target").write_text(
            "[Unit]\nWants=metagpu.service kubelet.service\nAfter=metagpu.service kubelet.service\n"
        )


@pytest.fixture
def service(cluster: Cluster) -> Iterator[Service]:
    """Install the service; remove its files afterwards."""
    if why := systemd.missing():
        pytest.skip(why)
    live_service = Service(cluster)
    live_service.install()
    yield live_service
    shutil.rmtree(live_service.root)


def test_a_boot_loses_no_pod(service: Service) -> None:
    """Systemd starts the service before the kubelet; every pod of before has its shares again."""
    cluster, node = service.cluster, service.cluster.node
    holdings = {other.pod: other for other in cluster.run_all({"small": 30, "large": 150})}
    before = cluster.incarnations()

    node.power_off()
    cluster.daemon.kill()
    shutil.rmtree(cluster.daemon.run_folder)

    with systemd.booted(service.root, node.paths) as systemctl:
        wait_for("systemd to start the kubelet", service.kubelet_may_start.exists, within_s=SOON_S)
        assert systemctl("is-active", "metagpu") == "active"
        node.power_on()
        cluster.await_amounts(ALL_SHARES, ALL_SHARES)
        for name, holding in holdings.items():
            assert cluster.await_readmitted(name, before[name]), name
            assert cluster.inspect_container(name) == holding


def test_uninstall_leaves_no_trace(
    member: Joined, daemon: HostDaemon, traces_before: Mapping[str, object]
) -> None:
    """The node is as before the first daemon; a running pod goes on, and keeps what it uses."""
    cluster, node = member.cluster, member.node
    cluster.run("training", 30)
    member.await_condition("False")
    incarnation = cluster.incarnations()["training"]
    options = ("--node-name", node.name, "--kubeconfig", node.kubeconfig)
    daemon.kill()

    results = removed(daemon.uninstall(*options))
    assert {kind for kind, result in results if result == "stays"} == {"pod folder", "amounts"}
    assert {("socket", "removed"), ("labels", "removed"), ("conditions", "removed")} <= results
    assert cluster.incarnations() == {"training": incarnation}
    assert daemon.pod_socket.with_name("mgctl").exists()

    cluster.delete("training")
    results = removed(daemon.uninstall(*options))
    assert results <= {("pod folder", "removed"), ("run folder", "removed"), ("amounts", "stays")}
    assert traces(node, daemon.run_folder) == traces_before


def removed(leftovers: Sequence[Mapping[str, str]]) -> set[tuple[str, str]]:
    """Return kind and result of each leftover."""
    return {(leftover["kind"], leftover["result"]) for leftover in leftovers}
