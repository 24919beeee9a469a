"""A simulated node as people and programs see it: plain values, ready for JSON or a table."""

import time

import msgspec
import pynvml

from metagpu.core.gpu import MIB
from metagpu.sim.foreign import place_of
from metagpu.sim.gpu import SimGpu
from metagpu.sim.node import SimNode


class ProcessView(msgspec.Struct, frozen=True):
    """A process; `memory` in bytes, `None` when the driver does not say."""

    pid: int
    memory: int | None
    gi: int | None = None
    ci: int | None = None


class InstanceView(msgspec.Struct, frozen=True):
    """A MIG instance: `gi` its number, `place` as in `2g.10gb@4`, and its MIG devices' uuids."""

    gi: int
    place: str
    uuids: tuple[str, ...]


class GpuView(msgspec.Struct, frozen=True):
    """A GPU: memory in bytes; `state` is `ok`, `hung`, `lost` or `failing`.

    `mig` is `none`, `off`, `on`, or either of them `until reset`.
    `nvlinks` are those that lead somewhere; GPUs of one `pci_switch` are on the same one.
    """

    index: int
    uuid: str
    board: str
    numa: int
    state: str
    recovery_action: str
    memory: int
    used: int
    ecc_corrected: int
    ecc_uncorrected: int
    pci_switch: int
    nvlinks: int
    processes: tuple[ProcessView, ...] = ()
    mig: str = "none"
    instances: tuple[InstanceView, ...] = ()


class NodeView(msgspec.Struct, frozen=True):
    """A node: a row for each GPU."""

    driver: str
    driver_loaded: bool
    gpus: tuple[GpuView, ...]


def describe(node: SimNode) -> NodeView:
    """Show a node as it is now."""
    with node.changed:
        gpus = tuple(_view(node, index, gpu) for index, gpu in enumerate(node.gpus))
        return NodeView(node.driver, node.failure is None, gpus)


def _view(node: SimNode, index: int, gpu: SimGpu) -> GpuView:
    return GpuView(
        index=index,
        uuid=gpu.id,
        board=gpu.board.key,
        numa=gpu.numa,
        state=_state(gpu),
        recovery_action=str(gpu.recovery_action),
        memory=gpu.board.memory * MIB,
        used=gpu.used,
        ecc_corrected=gpu.ecc_corrected,
        ecc_uncorrected=gpu.ecc_uncorrected,
        pci_switch=gpu.pci_switch,
        nvlinks=len(node.nvlinks(gpu)),
        processes=tuple(
            ProcessView(process.pid, process.memory, process.gi, process.ci)
            for process in gpu.processes.values()
        ),
        mig=_mig(gpu),
        instances=tuple(
            InstanceView(
                number,
                place_of(gpu, instance),
                tuple(compute.uuid for compute in instance.computes.values()),
            )
            for number, instance in sorted(gpu.mig.present.items())
        ),
    )


def _mig(gpu: SimGpu) -> str:
    if not gpu.board.mig:
        return "none"
    mode = "on" if gpu.mig.enabled else "off"
    return mode if gpu.mig.enabled == gpu.mig.pending else f"{mode} until reset"


def _state(gpu: SimGpu) -> str:
    if gpu.failure is not None:
        return "lost" if gpu.failure == pynvml.NVML_ERROR_GPU_IS_LOST else "failing"
    return "hung" if gpu.hung_until > time.monotonic() else "ok"
