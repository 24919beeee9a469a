"""The machine below the simulated NVML."""

import pynvml
import pytest

from metagpu.core.contracts.driver import RecoveryAction
from metagpu.core.model.gpu import GpuId
from metagpu.sim.machine.gpu import SimError
from metagpu.sim.machine.gpu_models import GPU_MODELS
from metagpu.sim.machine.node import SimEventSet, SimNode


def node_of(count: int, model: str = "a100-40gb", seed: str = "show") -> SimNode:
    """Create a node with some GPUs of one model."""
    node = SimNode(seed=seed)
    for _ in range(count):
        node.add_gpu(GPU_MODELS[model])
    return node


def test_the_same_node_has_the_same_uuids() -> None:
    """A uuid follows from seed, slot and model, so a restart changes none."""
    ids = [gpu.id for gpu in node_of(8).gpus]

    assert ids == [gpu.id for gpu in node_of(8).gpus]
    assert len({*ids, *(gpu.id for gpu in node_of(8, seed="other").gpus)}) == 16


def test_a_slot_is_not_given_twice() -> None:
    """A GPU that replaces a removed one has another uuid."""
    node = node_of(2)
    gone = node.gpu(1)
    node.remove_gpu(gone)
    new = node.add_gpu(GPU_MODELS["a100-40gb"])

    assert new.id != gone.id
    assert new.bus_id != gone.bus_id


def test_two_gpus_with_one_uuid_are_refused() -> None:
    """A second GPU with an existing uuid is refused."""
    node = node_of(1)

    with pytest.raises(SimError, match="two GPUs"):
        node.add_gpu(GPU_MODELS["t4"], gpu_id=GpuId(node.gpu(0).id))


@pytest.mark.parametrize(
    ("count", "message"),
    [(0, "has none"), (1, "has 0"), (8, "no GPU 9 here: this node has 0-7")],
)
def test_a_gpu_that_is_not_there(count: int, message: str) -> None:
    """The error lists the existing GPUs."""
    with pytest.raises(SimError, match=message):
        node_of(count).gpu("9")


def test_a_gpu_is_found_by_index_and_uuid() -> None:
    """A GPU is found by its index, for users, and by its uuid, for programs."""
    node = node_of(3)

    assert node.gpu(2) is node.gpu("2") is node.gpu(node.gpus[2].id)


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 68, 69, 92, 94, 109])
def test_an_application_error_needs_nothing(code: int) -> None:
    """After application errors and informational XIDs the GPU is healthy."""
    node = node_of(1)
    node.raise_xid(node.gpu(0), code)

    assert node.gpu(0).recovery_action == RecoveryAction.NONE
    assert node.gpu(0).failure is None


@pytest.mark.parametrize("code", [48, 64, 74, 95, 119, 120, 140])
def test_a_hardware_error_needs_a_reset(code: int) -> None:
    """After a hardware error the GPU answers, and needs a reset."""
    node = node_of(1)
    node.raise_xid(node.gpu(0), code)

    assert node.gpu(0).recovery_action == RecoveryAction.GPU_RESET
    assert node.gpu(0).failure is None


def test_a_gpu_off_the_bus_answers_no_more() -> None:
    """XID 79 loses the GPU and needs a reboot; a reset repairs the simulated GPU."""
    node = node_of(1)
    gpu = node.gpu(0)
    node.raise_xid(gpu, 79)

    assert gpu.failure == pynvml.NVML_ERROR_GPU_IS_LOST
    assert gpu.recovery_action == RecoveryAction.NODE_REBOOT
    node.reset_gpu(gpu)
    assert node.gpu(0).failure is None
    assert node.gpu(0).recovery_action == RecoveryAction.NONE


def test_rows_are_remapped_by_a_reset() -> None:
    """XID 63 leaves a row pending until a reset; a T4 has no rows to remap."""
    node = node_of(1)
    node.raise_xid(node.gpu(0), 63)
    assert node.gpu(0).rows == [0, 1, 1, 0]
    node.reset_gpu(node.gpu(0))
    assert node.gpu(0).rows == [0, 1, 0, 0]

    old = node_of(1, "t4")
    old.raise_xid(old.gpu(0), 63)
    assert old.gpu(0).rows == [0, 0, 0, 0]


def test_a_change_of_the_action_is_one_event() -> None:
    """The same recovery action again is no event."""
    node = node_of(1)
    listener = SimEventSet({0: pynvml.nvmlEventTypeGpuRecoveryAction})
    node.event_sets.append(listener)
    node.set_recovery_action(node.gpu(0), RecoveryAction.DRAIN_P2P)
    node.set_recovery_action(node.gpu(0), RecoveryAction.DRAIN_P2P)

    assert len(listener.queue) == 1
