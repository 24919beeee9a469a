"""The backend `whole`: shares, preference and grant."""

import pytest
from msgspec.structs import replace

from metagpu.backends.whole.backend import WholeBackend, WholeOptions
from metagpu.core.contracts.backend import Options, installed_backends
from metagpu.core.grants.injection import CONTROL_NODES, DeviceListStrategy, Injection
from metagpu.core.model.gpu import MIB, Connection, Gpu, PciPath
from metagpu.core.model.shares import ResourceName, Share, ShareId, gpu_of
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.facts import GpuFaulted, SharesClaimed, TopologyRead
from tests.rigs.build import after, gpu, offered, share, topology

GPU = ResourceName("nvidia.com/gpu")
CONFIG = "version: metagpu/v1\npools: [{name: all, backends: [{backend: whole}]}]\n"
A, B, C, D = (gpu(index) for index in range(4))


def whole(injection: Injection | None = None, **options: str) -> WholeBackend:
    """Create the backend with some options."""
    return WholeBackend(WholeOptions(backend="whole", **options), injection or Injection())


def near(a: Gpu, b: Gpu) -> Connection:
    """Connect two GPUs by one PCI switch."""
    return Connection(PciPath.SWITCH if a.index // 2 == b.index // 2 else PciPath.SYSTEM, 0)


def node(*gpus: Gpu) -> Snapshot:
    """Offer GPUs whose connections are known."""
    _, snapshot = offered(*gpus, text=CONFIG)
    return after(TopologyRead(topology(gpus, near)), since=snapshot)


def of(snapshot: Snapshot, *gpus: Gpu) -> list[Share]:
    """Return the shares of some GPUs."""
    return [part for wanted in gpus for part in snapshot.gpus[wanted.id].shares]


def test_a_gpu_is_one_share_with_its_own_id() -> None:
    """The share's id is the GPU's uuid, as NVIDIA's plugin names it, and its memory is all."""
    [share] = whole().shares(A)

    assert share == Share(
        id=ShareId(A.id),
        gpu=A.id,
        resource=GPU,
        backend="whole",
        number=0,
        footprint=frozenset({"whole"}),
        memory=40960 * MIB,
    )
    assert gpu_of(share.id) == A.id


def test_the_resource_may_have_another_name() -> None:
    """Pods ask for nvidia.com/gpu unless the pool says otherwise."""
    assert whole().resources == (GPU,)
    assert whole(resource="example.com/gpu").resources == ("example.com/gpu",)
    assert whole(resource="example.com/gpu").shares(A)[0].resource == "example.com/gpu"


def test_a_gpu_in_mig_mode_is_not_given() -> None:
    """CUDA sees only the instances of a GPU in MIG mode, so the whole GPU is not usable."""
    assert not whole().shares(replace(A, mig_enabled=True))
    assert len(whole().shares(replace(A, mig_enabled=False))) == 1


def test_only_its_own_options_make_a_backend() -> None:
    """Options of another backend are a mistake of ours."""
    with pytest.raises(TypeError, match="whole cannot read Options"):
        WholeBackend.configured(Options(backend="other"), Injection())


def test_whole_is_an_entry_point() -> None:
    """The backend `whole` is an entry point of the installed package."""
    assert installed_backends()["whole"] is WholeBackend


def test_several_gpus_are_the_best_connected() -> None:
    """Of four GPUs two are taken that are on one PCI switch, the required one among them."""
    snapshot = node(A, B, C, D)
    free = of(snapshot, D, A, C, B)

    assert whole().prefer(free, (), 2, snapshot) == of(snapshot, A, B)
    assert whole().prefer(free, of(snapshot, D), 2, snapshot) == of(snapshot, C, D)
    assert whole().prefer(of(snapshot, B, C, D), (), 1, snapshot) == of(snapshot, B)


def test_faulty_gpus_come_last() -> None:
    """A GPU out of service is taken only when there are no others, or when it is required."""
    snapshot = after(GpuFaulted(A.id, "XID 79", at=1), since=node(A, B, C, D))
    free = of(snapshot, A, B, C, D)

    assert whole().prefer(free, (), 3, snapshot) == of(snapshot, B, C, D)
    assert whole().prefer(free, (), 4, snapshot) == of(snapshot, B, C, D, A)
    assert whole().prefer(free, of(snapshot, A), 2, snapshot) == of(snapshot, A, B)


def test_gpus_of_other_backends_come_last() -> None:
    """A GPU that another backend has just taken is avoided, before the kubelet knows of it."""
    snapshot = node(A, B, C, D)
    taken = SharesClaimed((share(A, 0),), at=1)
    snapshot = after(taken, since=snapshot)

    assert whole().prefer(of(snapshot, A, B, C, D), (), 3, snapshot) == of(snapshot, B, C, D)


def test_a_preference_never_fails() -> None:
    """A request has an answer with too few GPUs and without a topology."""
    _, snapshot = offered(A, B, text=CONFIG)
    free = of(snapshot, B, A)

    assert whole().prefer(free, (), 2, snapshot) == of(snapshot, A, B)
    assert whole().prefer(free, (), 5, snapshot) == of(snapshot, A, B)
    assert whole().prefer((), (), 1, snapshot) == []
    assert whole().prefer(free, of(snapshot, A, B), 1, snapshot) == of(snapshot, A)


async def test_a_grant_gives_gpus_and_their_memory() -> None:
    """A container sees its GPUs in the order of their index, and nothing of MetaGPU's."""
    snapshot = node(A, B)
    present = frozenset([*CONTROL_NODES, "/dev/nvidia0", "/dev/nvidia1"])
    grant = await whole(Injection(device_nodes_present=present)).grant(of(snapshot, B, A), snapshot)

    assert grant.envs == {
        "NVIDIA_VISIBLE_DEVICES": f"{A.id},{B.id}",
        "METAGPU_MEMORY_MIB": f"{A.id}=40960,{B.id}=40960",
    }
    assert [device.host_path for device in grant.nodes] == [
        *CONTROL_NODES,
        "/dev/nvidia0",
        "/dev/nvidia1",
    ]


async def test_a_grant_has_the_injection_of_the_node() -> None:
    """A grant has the injection's mounts and CDI names."""
    snapshot = node(A)
    strategies = frozenset({DeviceListStrategy.CDI_CRI, DeviceListStrategy.VOLUME_MOUNTS})
    grant = await whole(Injection(strategies=strategies)).grant(of(snapshot, A), snapshot)

    assert grant.cdi_names == (f"metagpu.io/gpu={A.id}",)
    assert len(grant.mounts) == 1
    assert grant.nodes == ()
