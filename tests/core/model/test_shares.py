"""The glossary's values, their texts, and what follows from them alone."""

import pytest

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.contracts.driver import RecoveryAction
from metagpu.core.errors import (
    DriverError,
    DriverTimeout,
    DriverUnavailable,
    GpuLost,
    KubeletError,
    MetagpuError,
    ProgramError,
    ProgramMissing,
)
from metagpu.core.model.gpu import Connection, PciPath, Topology
from metagpu.core.model.request_errors import (
    FractionSplit,
    GpuUnhealthy,
    RequestError,
    ShareTaken,
    TooManyReplicas,
    UnknownShare,
)
from metagpu.core.model.shares import Holder, ShareId, Verdict, gpu_of
from metagpu.core.model.snapshot import GpuState
from tests.rigs.build import gpu, share

WRONG = ConfigReason.INVALID_VALUE

A = gpu(0)


def test_an_id_names_its_gpu() -> None:
    """A share's id names its GPU, also the id of a whole GPU."""
    assert gpu_of(share(A, 7).id) == A.id
    assert gpu_of(ShareId(A.id)) == A.id


def test_equal_shares_are_one_in_a_set() -> None:
    """Shares differ in any of their fields; equal shares are found by each other."""
    assert {share(A, 1), share(A, 1), share(A, 2)} == {share(A, 1), share(A, 2)}
    assert share(A, 1) != share(A, 1, memory_mib=1)


def test_people_read_gpus_and_holders() -> None:
    """Messages name a GPU by index and uuid, a holder by namespace, pod and container."""
    assert str(gpu(3)) == f"3 ({gpu(3).id})"
    assert str(Holder("team", "alice", "main")) == "team/alice (main)"


def test_an_idle_gpu_has_no_owner() -> None:
    """A GPU without leases has no owner."""
    assert GpuState(A, Verdict(healthy=True, since=0)).owner is None


@pytest.mark.parametrize(
    ("connection", "text"),
    [
        (Connection(), "?"),
        (Connection(PciPath.BOARD), "PSB"),
        (Connection(PciPath.SWITCH, nvlinks=0), "PIX"),
        (Connection(PciPath.SWITCHES), "PXB"),
        (Connection(PciPath.HOST_BRIDGE), "PHB"),
        (Connection(PciPath.NUMA_NODE), "NODE"),
        (Connection(PciPath.SYSTEM), "SYS"),
        (Connection(PciPath.SYSTEM, nvlinks=12, switched=True), "NV12"),
        (Connection(nvlinks=2), "NV2"),
    ],
)
def test_connections_are_named_as_nvidia_smi_does(connection: Connection, text: str) -> None:
    """The name of a connection is that of its NVLinks, else of its PCI path."""
    assert str(connection) == text


def test_a_topology_is_the_same_both_ways() -> None:
    """Two GPUs have one connection in either order; other pairs are unknown."""
    other, third = gpu(1), gpu(2)
    near = Connection(PciPath.SWITCH)
    topology = Topology({frozenset((A.id, other.id)): near})

    assert topology.between(A.id, other.id) == topology.between(other.id, A.id) == near
    assert topology.between(A.id, third.id) == Connection()


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (RecoveryAction.NONE, "none"),
        (RecoveryAction.GPU_RESET, "GPU reset"),
        (RecoveryAction.NODE_REBOOT, "node reboot"),
        (RecoveryAction.DRAIN_AND_RESET, "drain and reset"),
        (RecoveryAction.RECOVER_IMEX_DOMAIN, "recover IMEX domain"),
    ],
)
def test_recovery_actions_are_words(action: RecoveryAction, text: str) -> None:
    """NVML's recovery actions are described in words."""
    assert str(action) == text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("wrong", WRONG), "wrong"),
        (ConfigError("wrong", WRONG, file="f"), "f: wrong"),
        (ConfigError("wrong", WRONG, file="f", line=3, path="a.b"), "f: 3: a.b: wrong"),
        (
            UnknownShare("r/x", "GPU-1::m00"),
            (
                "r/x: no share has the id 'GPU-1::m00'; the list of shares was sent again, a new "
                "pod will get one that exists"
            ),
        ),
        (GpuUnhealthy("r/x", "0 (GPU-1)", "XID 79"), "r/x: GPU 0 (GPU-1) is unhealthy: XID 79"),
        (
            ShareTaken("GPU-1::m00", "GPU 0 is in use"),
            "share GPU-1::m00 cannot be granted: GPU 0 is in use",
        ),
    ],
)
def test_errors_have_problem_and_fix(error: MetagpuError, text: str) -> None:
    """An error's text has the problem and the fix."""
    assert str(error) == text


@pytest.mark.parametrize(
    ("kind", "above"),
    [
        (ConfigError, MetagpuError),
        (RequestError, MetagpuError),
        (DriverError, MetagpuError),
        (KubeletError, MetagpuError),
        (UnknownShare, RequestError),
        (GpuUnhealthy, RequestError),
        (ShareTaken, RequestError),
        (FractionSplit, RequestError),
        (TooManyReplicas, RequestError),
        (ProgramError, MetagpuError),
        (ProgramMissing, ProgramError),
        (DriverUnavailable, DriverError),
        (GpuLost, DriverError),
        (DriverTimeout, DriverError),
    ],
)
def test_the_class_of_an_error_names_the_person_who_fixes_it(
    kind: type[MetagpuError], above: type[MetagpuError]
) -> None:
    """Each error has the base class of those that the same person can fix."""
    assert kind.__bases__ == (above,)
