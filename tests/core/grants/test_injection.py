"""Grants of real GPUs, by each of NVIDIA's device list strategies."""

import re

import pytest

from metagpu.core.grants.grant import DeviceNode, Mount
from metagpu.core.grants.injection import CONTROL_NODES, DeviceListStrategy, Injection
from metagpu.core.model.gpu import Gpu
from tests.rigs.build import gpu

A, B = gpu(0), gpu(3)
ENVVAR = DeviceListStrategy.ENVVAR
MOUNTS = DeviceListStrategy.VOLUME_MOUNTS
CDI_CRI = DeviceListStrategy.CDI_CRI
CDI_ANNOTATIONS = DeviceListStrategy.CDI_ANNOTATIONS
EVERYTHING = frozenset({*CONTROL_NODES, *(f"/dev/nvidia{n}" for n in range(8))})
VOLUMES = "/var/run/nvidia-container-devices"


def injection(*strategies: DeviceListStrategy) -> Injection:
    """Make a node that has all device nodes and uses these strategies."""
    return Injection(strategies=frozenset(strategies), device_nodes_present=EVERYTHING)


@pytest.mark.parametrize(
    ("strategies", "visible"),
    [
        ([ENVVAR], f"{A.id},{B.id}"),
        ([MOUNTS], VOLUMES),
        ([CDI_CRI], "void"),
        ([CDI_ANNOTATIONS], "void"),
        ([ENVVAR, MOUNTS], f"{A.id},{B.id}"),
        ([ENVVAR, CDI_CRI], f"{A.id},{B.id}"),
        ([MOUNTS, CDI_ANNOTATIONS], VOLUMES),
    ],
)
def test_the_runtime_reads_one_variable(strategies: list[DeviceListStrategy], visible: str) -> None:
    """NVIDIA_VISIBLE_DEVICES names the GPUs, the mounts, or nothing where CDI does it."""
    assert injection(*strategies).grant([A, B]).envs == {"NVIDIA_VISIBLE_DEVICES": visible}


@pytest.mark.parametrize("strategies", [[MOUNTS], [ENVVAR, MOUNTS], [MOUNTS, CDI_CRI]])
def test_mounts_name_the_gpus(strategies: list[DeviceListStrategy]) -> None:
    """With volume mounts, each GPU is a mount of /dev/null at a path that names the GPU."""
    assert injection(*strategies).grant([A, B]).mounts == tuple(
        Mount(f"{VOLUMES}/{each.id}", "/dev/null") for each in (A, B)
    )


@pytest.mark.parametrize("strategies", [[ENVVAR], [CDI_CRI], [CDI_ANNOTATIONS]])
def test_nothing_else_mounts(strategies: list[DeviceListStrategy]) -> None:
    """Other strategies mount no GPUs."""
    assert injection(*strategies).grant([A]).mounts == ()


def test_cdi_names_go_to_the_runtime_by_the_kubelet() -> None:
    """With cdi-cri the grant carries CDI names of the GPUs, of the configured kind."""
    node = Injection(strategies=frozenset({CDI_CRI}), cdi_kind="example.com/gpu")
    grant = node.grant([A, B])

    assert grant.cdi_names == (f"example.com/gpu={A.id}", f"example.com/gpu={B.id}")
    assert grant.annotations == {}


def test_cdi_names_go_to_the_runtime_by_annotation() -> None:
    """With cdi-annotations one annotation carries the CDI names."""
    grant = injection(CDI_ANNOTATIONS).grant([A, B])

    assert list(grant.annotations.values()) == [f"metagpu.io/gpu={A.id},metagpu.io/gpu={B.id}"]
    assert grant.cdi_names == ()


def test_the_annotations_key_is_stable_and_legal() -> None:
    """The key depends on the GPUs alone, differs between sets, and Kubernetes takes it."""
    [[key], [again], [other]] = [
        injection(CDI_ANNOTATIONS).grant(gpus).annotations for gpus in ([A, B], [A, B], [A])
    ]
    prefix, _, name = key.partition("/")

    assert key == again != other
    assert prefix == "cdi.k8s.io"
    assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", name)


@pytest.mark.parametrize("strategies", [[CDI_CRI], [CDI_ANNOTATIONS], [ENVVAR, CDI_CRI]])
def test_where_cdi_adds_the_nodes_nobody_else_does(strategies: list[DeviceListStrategy]) -> None:
    """CDI's specification has the device nodes; naming them again would give them twice."""
    assert injection(*strategies).grant([A]).nodes == ()


def test_the_nodes_of_the_gpus_and_of_the_driver_are_named() -> None:
    """A container may open the driver's nodes and those of its own GPUs, no others."""
    assert injection(ENVVAR).grant([A, B]).nodes == tuple(
        DeviceNode(path, path, "rw") for path in (*CONTROL_NODES, "/dev/nvidia0", "/dev/nvidia3")
    )


def test_device_nodes_can_be_left_out() -> None:
    """With passDeviceSpecs off the runtime alone adds the nodes."""
    assert (
        Injection(pass_device_specs=False, device_nodes_present=EVERYTHING).grant([A]).nodes == ()
    )


@pytest.mark.parametrize(
    ("present", "of", "named"),
    [
        (set(), A, []),
        ({"/dev/nvidiactl"}, A, ["/dev/nvidiactl"]),
        ({"/dev/nvidia0", "/dev/nvidia1"}, A, ["/dev/nvidia0"]),
        ({"/dev/nvidia0"}, B, []),
        ({"/dev/nvidia0", "/dev/nvidiactl"}, gpu(0, minor=None), ["/dev/nvidiactl"]),
        ({"/dev/nvidia7"}, gpu(0, minor=7), ["/dev/nvidia7"]),
    ],
)
def test_a_node_that_is_not_there_is_not_named(
    present: set[str], of: Gpu, named: list[str]
) -> None:
    """A container with a device node that does not exist would not start."""
    nodes = Injection(device_nodes_present=frozenset(present)).grant([of]).nodes

    assert [node.host_path for node in nodes] == named


@pytest.mark.parametrize("strategy", DeviceListStrategy)
def test_mgctl_is_mounted_by_every_way(strategy: DeviceListStrategy) -> None:
    """The folder of program and socket is mounted, and the program by name if configured."""
    folder = Mount("/run/metagpu", "/pod", read_only=True)
    program = Mount("/usr/bin/mgctl", "/pod/mgctl", read_only=True)
    ways = frozenset({strategy})

    assert Injection(ways, pod_dir="/pod").grant([A]).mounts[-1:] == (folder,)
    both = Injection(ways, pod_dir="/pod", mgctl_path="/usr/bin/mgctl").grant([A]).mounts
    assert both[-2:] == (folder, program)


def test_the_hosts_dev_may_stand_elsewhere() -> None:
    """With a dev root, the container sees the usual path and the host is asked for its own."""
    node = Injection(
        dev_root="/run/nvidia/driver", device_nodes_present=frozenset({"/dev/nvidia0"})
    )

    assert node.grant([A]).nodes == (
        DeviceNode("/dev/nvidia0", "/run/nvidia/driver/dev/nvidia0", "rw"),
    )
