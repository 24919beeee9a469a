"""GPUs in containers by every `deviceListStrategy`, with a runtime that has CDI."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import CONFIGURATION, Cluster, Holding
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.host_daemon import HostDaemon
from tests.e2e.rig.nvidia_packages import CUDA, NVML, provide
from tests.e2e.rig.tools import Tools
from tests.e2e.rig.waiting import wait_for
from tests.rigs.nvml_library import NvmlLibrary

MOUNTED = "/var/run/nvidia-container-devices"
VISIBLE = {
    "envvar": "{gpu}",
    "volume-mounts": MOUNTED,
    "cdi-cri": "void",
    "cdi-annotations": "void",
}
"""NVIDIA_VISIBLE_DEVICES of a container, by strategy."""
COMMON = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
"""The device nodes of all GPUs."""

DRIVER = "550"
LIBRARIES = "usr/lib/x86_64-linux-gnu/nvidia/current"


@pytest.fixture
def configurable(cluster: Cluster) -> Iterator[Cluster]:
    """Return the cluster; restore its configuration afterwards."""
    yield cluster
    cluster.daemon.configure()


def give_by(cluster: Cluster, strategy: str) -> None:
    """Configure a strategy, and wait until the daemon has applied it."""

    def applied() -> int:
        return cluster.daemon.log.count("configuration applied")

    known = applied()
    cluster.daemon.configure(CONFIGURATION + f"deviceListStrategy: {strategy}\n")
    wait_for("the configuration to be applied", lambda: applied() > known, within_s=30)


def assert_nodes(held: Holding) -> None:
    """Assert that a container has the device nodes of its GPU, and of no other."""
    (index,) = held.gpu_indices
    nodes = {name for name in held.devices if name.startswith("nvidia")}
    assert nodes == COMMON | {f"nvidia{index}"}


@pytest.mark.long
@pytest.mark.usefixtures("each_runtime")
def test_a_container_has_its_gpu_by_every_strategy(configurable: Cluster) -> None:
    """A container has the nodes of its GPU alone, and what its strategy adds, also after a restart.

    A container that restarts needs no daemon for that.
    """
    cluster, held = configurable, {}
    for strategy, visible in VISIBLE.items():
        give_by(cluster, strategy)
        held[strategy] = cluster.run(strategy, 60)
        (gpu,) = held[strategy].shares_by_gpu

        assert_nodes(held[strategy])
        assert held[strategy].environment["NVIDIA_VISIBLE_DEVICES"] == visible.format(gpu=gpu)
        listing = cluster.execute(strategy, "sh", "-c", f"ls {MOUNTED} 2>/dev/null || true")
        assert listing.split() == ([gpu] if strategy == "volume-mounts" else [])
    assert len({holding.gpu_indices for holding in held.values()}) == len(VISIBLE)

    before = cluster.incarnations()
    cluster.daemon.kill()
    for strategy in VISIBLE:
        cluster.crash(strategy)
    wait_for(
        "all containers to restart",
        lambda: (
            (now := cluster.incarnations()).keys() == before.keys()
            and all(now[name] != before[name] for name in now)
        ),
        within_s=60,
    )
    assert {strategy: cluster.inspect_container(strategy) for strategy in VISIBLE} == held
    with cluster.wait_for_new_list():
        cluster.daemon.start_again()


@pytest.fixture
def driver(configurable: Cluster, daemon: HostDaemon) -> Iterator[Path]:
    """Lay NVIDIA's libraries beside the device nodes, as a driver's container has them.

    The daemon's NVML is a library of two imaginary GPUs: a daemon that simulates GPUs runs no
    programs of the host. Without a GPU NVIDIA's toolkit lists devices in this mode alone.
    """
    try:
        packages = [provide(package, DRIVER) for package in (CUDA, NVML)]
    except RigError as error:
        pytest.skip(f"NVIDIA's libraries of driver {DRIVER} were not tested: {error}")
    libraries = daemon.device_root / LIBRARIES
    for package in packages:
        shutil.copytree(package / LIBRARIES, libraries, symlinks=True, dirs_exist_ok=True)
    hook = Path(Tools.cached().path("nvidia-cdi-hook"))
    simulated = daemon.gpus
    daemon.gpus = ("--driver-root", str(daemon.device_root), "--nvidia-cdi-hook-path", str(hook))
    NvmlLibrary(daemon.device_root / "usr" / "lib64")
    daemon.environment |= {
        "PATH": os.pathsep.join([str(hook.parent), os.environ["PATH"]]),
        "NVIDIA_CTK_CDI_GENERATE_MODE": "management",
    }
    try:
        daemon.stop()
        daemon.start()
        configurable.await_amounts(200, 200)
        yield libraries
    finally:
        daemon.stop()
        daemon.gpus = simulated
        daemon.environment.clear()
        shutil.rmtree(daemon.device_root / "usr")


@pytest.mark.long
def test_a_container_has_the_drivers_libraries(configurable: Cluster, driver: Path) -> None:
    """NVIDIA's toolkit mounts libcuda and NVML of the driver, and its hooks make their links."""
    give_by(configurable, "cdi-cri")
    assert_nodes(configurable.run("cuda", 10))

    names = sorted(path.name for path in driver.iterdir())
    script = f"cd /{LIBRARIES} && sha256sum {' '.join(names)} && strings /etc/ld.so.cache"
    inside = configurable.execute("cuda", "sh", "-c", script).splitlines()
    for name in names:
        assert f"{hashlib.sha256((driver / name).read_bytes()).hexdigest()}  {name}" in inside
    assert {f"/{LIBRARIES}/libcuda.so.1", f"/{LIBRARIES}/libnvidia-ml.so.1"} <= set(inside)
    configurable.delete("cuda")
