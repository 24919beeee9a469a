"""Events about the node's GPUs: one Event for each problem of an operator."""

from typing import Final

import pytest

from metagpu.core.model.shares import ResourceName
from metagpu.core.model.snapshot import Versions
from metagpu.core.state.events import Event
from metagpu.core.state.facts import (
    BackendSuspended,
    CompetingPluginFound,
    DriverRead,
    GpuCordoned,
    GpuFaulted,
    GpuRecovered,
    GpusFound,
    GpuUncordoned,
    GpuUnheard,
    InstanceFaulted,
    InstanceRecovered,
    RegistrationProblemFound,
    UnreadableGpusFound,
)
from metagpu.plugins.cluster.event_recorder import ObjectReference
from metagpu.plugins.cluster.node_events import node_event_of, standing_problems
from tests.rigs.build import after, gpu

A: Final = gpu(0)
NODE: Final = ObjectReference("Node", "gpu-1", "u")
SNAPSHOT: Final = after(GpusFound((A,), at=0))
RESET: Final = BackendSuspended(A.id, "mig", "MIG waits for a reset", at=1, until_reset=True)


@pytest.mark.parametrize(
    ("event", "reason", "note", "warning"),
    [
        (GpuFaulted(A.id, "XID 79", 1), "GPUUnhealthy", f"GPU {A}: XID 79", True),
        (GpuRecovered(A.id, "quiet", 1), "GPURecovered", f"GPU {A}: quiet", False),
        (
            InstanceFaulted(A.id, "MIG-1", "XID 43", 1),
            "MIGDeviceUnhealthy",
            f"GPU {A}: MIG device MIG-1 alone: XID 43",
            True,
        ),
        (
            InstanceRecovered(A.id, "MIG-1", "it is gone", 1),
            "MIGDeviceRecovered",
            f"GPU {A}: MIG device MIG-1: it is gone",
            False,
        ),
        (
            GpuUnheard(A.id, "refused", 1),
            "GPUEventsUnavailable",
            f"GPU {A}: its XIDs are not heard: refused",
            True,
        ),
        (GpuCordoned(A.id, "fans", 1), "GPUCordoned", f"GPU {A}: fans", False),
        (GpuUncordoned(A.id, 1), "GPUUncordoned", f"GPU {A}: accepts new shares again", False),
        (RESET, "GPUResetNeeded", f"GPU {A}: MIG waits for a reset", True),
        (
            UnreadableGpusFound({1: "GPU 1: it hangs"}, at=1),
            "GPUUnreadable",
            "NVML counts GPUs that cannot be read: GPU 1: it hangs",
            True,
        ),
        (
            CompetingPluginFound(ResourceName("nvidia.com/gpu"), "x.sock"),
            "CompetingDevicePlugin",
            "nvidia.com/gpu is served by another device plugin on x.sock, not by metagpu",
            True,
        ),
        (
            RegistrationProblemFound(ResourceName("nvidia.com/gpu"), "the kubelet counts 0"),
            "RegistrationProblem",
            "nvidia.com/gpu: the kubelet counts 0",
            True,
        ),
    ],
)
def test_each_event_is_one_sentence_about_the_node(
    event: Event,
    reason: str,
    note: str,
    warning: bool,  # noqa: FBT001 - a case
) -> None:
    """Each event has a reason, a sentence, and a type."""
    written = node_event_of(event, SNAPSHOT, NODE)

    assert written is not None
    assert (written.subject, written.reason, written.note, written.warning) == (
        NODE,
        reason,
        note,
        warning,
    )


@pytest.mark.parametrize(
    "event", [BackendSuspended(A.id, "mps", "it starts", at=1), DriverRead(Versions("1"))]
)
def test_temporary_states_are_no_events(event: Event) -> None:
    """A backend that is not ready yet, or a version, makes no Event."""
    assert node_event_of(event, SNAPSHOT, NODE) is None


def test_gpus_that_wait_for_a_reset_already_are_reported() -> None:
    """A fault from before the subscription is found in the snapshot."""
    unreadable = UnreadableGpusFound({1: "GPU 1: it hangs"}, at=1)
    waiting = after(RESET, unreadable, since=SNAPSHOT)

    found = [event.reason for event in standing_problems(waiting, NODE)]
    assert found == ["GPUUnreadable", "GPUResetNeeded"]
    assert standing_problems(SNAPSHOT, NODE) == []
