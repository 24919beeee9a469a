"""What is told of the node's GPUs: one Event for each thing that an operator should know."""

from typing import Final

import pytest

from metagpu.core.facts import (
    BackendSuspended,
    DriverRead,
    GpuCordoned,
    GpuFaulted,
    GpuRecovered,
    GpusFound,
    GpuUncordoned,
    InstanceFaulted,
    InstanceRecovered,
    RivalMet,
)
from metagpu.core.model import ResourceName
from metagpu.core.news import Event
from metagpu.core.snapshot import Versions
from metagpu.plugins.cluster.events import Subject
from metagpu.plugins.cluster.node_news import news_of, resets
from tests.build import after, gpu

A: Final = gpu(0)
NODE: Final = Subject("Node", "gpu-1", "u")
SNAPSHOT: Final = after(GpusFound((A,), at=0))
RESET: Final = BackendSuspended(A.id, "mig", "MIG waits for a reset", at=1, reset=True)


@pytest.mark.parametrize(
    ("event", "reason", "note", "warning"),
    [
        (GpuFaulted(A.id, "XID 79", 1), "GPUOutOfService", f"GPU {A}: XID 79", True),
        (GpuRecovered(A.id, "quiet", 1), "GPUBackInService", f"GPU {A}: quiet", False),
        (
            InstanceFaulted(A.id, "MIG-1", "XID 43", 1),
            "MIGDeviceOutOfService",
            f"GPU {A}: MIG device MIG-1 alone: XID 43",
            True,
        ),
        (
            InstanceRecovered(A.id, "MIG-1", "it is gone", 1),
            "MIGDeviceFaultOver",
            f"GPU {A}: MIG device MIG-1: it is gone",
            False,
        ),
        (GpuCordoned(A.id, "fans", 1), "GPUCordoned", f"GPU {A}: fans", False),
        (GpuUncordoned(A.id, 1), "GPUUncordoned", f"GPU {A}: gives new shares again", False),
        (RESET, "GPUResetNeeded", f"GPU {A}: MIG waits for a reset", True),
        (
            RivalMet(ResourceName("nvidia.com/gpu"), "x.sock"),
            "RivalPlugin",
            "nvidia.com/gpu is served by another device plugin on x.sock, not by us",
            True,
        ),
    ],
)
def test_each_news_is_one_sentence_about_the_node(
    event: Event,
    reason: str,
    note: str,
    warning: bool,  # noqa: FBT001 - a case
) -> None:
    """Reason, sentence, and whether somebody should look."""
    told = news_of(event, SNAPSHOT, NODE)

    assert told is not None
    assert (told.subject, told.reason, told.note, told.warning) == (NODE, reason, note, warning)


@pytest.mark.parametrize(
    "event", [BackendSuspended(A.id, "mps", "it starts", at=1), DriverRead(Versions("1"))]
)
def test_what_passes_by_itself_is_not_told(event: Event) -> None:
    """A backend that is not ready yet, or a version, is nobody's trouble."""
    assert news_of(event, SNAPSHOT, NODE) is None


def test_gpus_that_wait_for_a_reset_already_are_told() -> None:
    """What happened before anybody listened is found in the snapshot."""
    waiting = after(RESET, since=SNAPSHOT)

    assert [news.reason for news in resets(waiting, NODE)] == ["GPUResetNeeded"]
    assert resets(SNAPSHOT, NODE) == []
