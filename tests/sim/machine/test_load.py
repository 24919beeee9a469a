"""Time on a simulated GPU: shares of it, the queue of a frozen process, samples."""

import pytest

from metagpu.core.model.gpu import MIB
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.load import SAMPLE_PERIOD, SAMPLES_KEPT, SimWork, share_time
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node

SECOND = 6 * SAMPLE_PERIOD / 1e6


@pytest.fixture
def node() -> SimNode:
    """Return a node of one GPU whose clock stands still."""
    made = build_node("a100-40gb:1")
    made.turn_clock(0)
    return made


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        ([30, 60], [30, 60]),
        ([100, 100], [50, 50]),
        ([100, 20, 100], [40, 20, 40]),
        ([0, 100], [0, 100]),
        ([], []),
    ],
)
def test_a_gpu_is_shared_among_those_with_work(wanted: list[int], given: list[float]) -> None:
    """Each gets what it asks for, at most an equal part of what others leave."""
    assert share_time([SimWork(sm=percent) for percent in wanted]) == given


def test_a_frozen_process_leaves_its_time_to_others(node: SimNode) -> None:
    """The GPU belongs to the one that is left, and the sensors follow."""
    gpu, one, two = node.gpu(0), SimProcess(1, MIB, sm=80), SimProcess(2, MIB, sm=80)
    node.start_process(gpu, one)
    node.start_process(gpu, two)
    node.turn_clock(SECOND)
    assert (one.samples[-1], gpu.sensors.busy) == ((node.now, 50), 100)

    node.set_frozen(gpu, 1, frozen=True)
    node.turn_clock(SECOND)
    assert (one.samples[-1], two.samples[-1]) == (
        (node.now - 6 * SAMPLE_PERIOD, 50),
        (node.now, 80),
    )
    assert gpu.sensors.busy == 80


def test_the_gpu_goes_on_with_what_was_submitted(node: SimNode) -> None:
    """A frozen process has use until its queue is empty, and again when it continues."""
    gpu, process = node.gpu(0), SimProcess(1, MIB, sm=100, queue=SECOND / 4)
    node.start_process(gpu, process)
    node.set_frozen(gpu, 1, frozen=True)
    frozen_at = node.now
    node.turn_clock(SECOND)
    assert [(at - frozen_at) // SAMPLE_PERIOD for at, _ in process.samples][-3:] == [0, 1, 2]
    assert [percent for _, percent in process.samples][-3:] == [100, 100, 50]

    node.set_frozen(gpu, 1, frozen=False)
    node.turn_clock(SECOND / 6)
    assert process.samples[-1] == (node.now, 100)


def test_a_process_that_begins_frozen_has_no_past(node: SimNode) -> None:
    """Samples begin when it continues."""
    process = SimProcess(1, MIB, sm=100, frozen=True)
    node.start_process(node.gpu(0), process)
    node.turn_clock(SECOND)
    node.set_frozen(node.gpu(0), 1, frozen=False)
    node.turn_clock(SECOND)
    assert len(process.samples) == 6


def test_only_the_last_seconds_are_kept(node: SimNode) -> None:
    """A day is one step of the clock, and empties a queue."""
    gpu, busy = node.gpu(0), SimProcess(1, MIB, sm=10)
    frozen = SimProcess(2, MIB, sm=10, queue=60, frozen=True)
    node.start_process(gpu, busy)
    node.start_process(gpu, frozen)
    node.turn_clock(86_400)
    assert (len(busy.samples), len(frozen.samples), frozen.queue) == (SAMPLES_KEPT, 0, 0)
    assert node.now - busy.samples[-1][0] < SAMPLE_PERIOD
