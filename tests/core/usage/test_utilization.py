"""Turns of GPUs for readings that cost much."""

from metagpu.core.contracts.sensors import GpuSensors
from metagpu.core.model.gpu import GpuId
from metagpu.core.usage.utilization import ALWAYS_READ, ReadingTurns, SensorTurns

GPUS = tuple(GpuId(f"GPU-{number}") for number in range(8))


def read(turns: ReadingTurns[float], gpus: tuple[GpuId, ...], now: float) -> frozenset[GpuId]:
    """Read those that are due, and return them."""
    due = turns.due(gpus, now)
    for gpu in due:
        turns.add(gpu, now, now)
    return due


def test_all_gpus_are_read_at_first_and_then_one_at_a_time() -> None:
    """Each GPU has a value from the first time on; then the oldest one has its turn."""
    turns = ReadingTurns[float](300)
    assert read(turns, GPUS, 0) == set(GPUS)
    found = [read(turns, GPUS, 30 * number) for number in range(1, 9)]

    assert [len(due) for due in found] == [1] * 8
    assert frozenset().union(*found) == set(GPUS)


def test_of_few_gpus_every_one_is_read_each_time() -> None:
    """Values of nodes with one or two GPUs have no age."""
    turns = ReadingTurns[float](300)
    few = GPUS[:ALWAYS_READ]
    assert [read(turns, few, now) for now in range(3)] == [set(few)] * 3
    assert len(read(turns, GPUS[:3], 3)) == 1


def test_no_reading_is_older_than_its_limit() -> None:
    """A client that asks seldom gets values that were read for it."""
    turns, now = ReadingTurns[float](300), 0.0
    for period in (30, 30, 30, 200, 1, 1, 30, 200, 30, 400, 1, 200, 200) * 10:
        now += period
        read(turns, GPUS, now)
        assert all(now - (turns.latest(gpu) or 0) < 300 for gpu in GPUS)


def test_a_forgotten_gpu_is_read_next() -> None:
    """A GPU that was lost has no value of before, and waits for no turn."""
    turns = ReadingTurns[float](300)
    read(turns, GPUS, 0)
    turns.forget(GPUS[5])
    assert turns.latest(GPUS[5]) is None
    assert read(turns, GPUS, 1) == {GPUS[5]}

    turns.retain(GPUS[:3])
    assert [turns.latest(gpu) is None for gpu in GPUS] == [False] * 3 + [True] * 5


def test_a_late_answer_replaces_no_later_reading() -> None:
    """A counter never goes backwards because an older call came back last."""
    turns = SensorTurns(300)
    gpu, full = GPUS[0], GpuSensors(power=5, energy=20, pcie_replays=3)
    assert turns.complete(gpu, full, 2, was_read=True) == {gpu: full}
    assert turns.complete(gpu, GpuSensors(power=5, energy=10), 1, was_read=True) == {gpu: full}
    assert turns.complete(gpu, GpuSensors(power=5), 3, was_read=False) == {gpu: full}


def test_without_sensors_the_costly_ones_are_forgotten() -> None:
    """A GPU that is lost comes back with its own energy, or with none."""
    turns = SensorTurns(300)
    turns.add(GPUS[0], GpuSensors(energy=20, pcie_replays=3), 1)
    assert turns.complete(GPUS[0], None, 2, was_read=False) == {}
    assert turns.complete(GPUS[0], GpuSensors(), 3, was_read=False) == {GPUS[0]: GpuSensors()}
