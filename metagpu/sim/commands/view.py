"""A simulated node as plain values, for JSON and tables."""

import time

import msgspec
import pynvml

from metagpu.core.model.gpu import MIB
from metagpu.sim.machine.foreign_instances import placement_name
from metagpu.sim.machine.gpu import SimGpu
from metagpu.sim.machine.node import SimNode


class ProcessView(msgspec.Struct, frozen=True):
    """A process; `memory` in bytes, `None` when NVML does not know it."""

    pid: int
    memory: int | None
    gi: int | None = None
    ci: int | None = None


class InstanceView(msgspec.Struct, frozen=True):
    """A MIG instance: its ID, its placement such as `2g.10gb@4`, its devices' UUIDs."""

    gi: int
    placement: str
    uuids: tuple[str, ...]


class GpuView(msgspec.Struct, frozen=True):
    """A GPU: memory in bytes; `state` is `ok`, `hung`, `lost` or `failing`.

    `mig` is `none`, `off`, `on`, or either of them `until reset`. `nvlinks` counts the connected
    links; GPUs with one `pci_switch` share it.
    """

    index: int
    uuid: str
    model: str
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
    """A node: its driver, and one entry per GPU."""

    driver: str
    driver_loaded: bool
    gpus: tuple[GpuView, ...]


def view_node(node: SimNode) -> NodeView:
    """Return the view of a node as it is now."""
    with node.changed:
        gpus = tuple(_view(node, index, gpu) for index, gpu in enumerate(node.gpus))
        return NodeView(node.driver, node.failure is None, gpus)


def _view(node: SimNode, index: int, gpu: SimGpu) -> GpuView:
    return GpuView(
        index=index,
        uuid=gpu.id,
        model=gpu.model.key,
        numa=gpu.numa,
        state=_state(gpu),
        recovery_action=str(gpu.recovery_action),
        memory=gpu.model.memory * MIB,
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
                placement_name(gpu, instance),
                tuple(compute.uuid for compute in instance.compute_instances.values()),
            )
            for number, instance in sorted(gpu.mig.instances.items())
        ),
    )


def _mig(gpu: SimGpu) -> str:
    if not gpu.model.has_mig:
        return "none"
    mode = "on" if gpu.mig.enabled else "off"
    return mode if gpu.mig.enabled == gpu.mig.pending else f"{mode} until reset"


def _state(gpu: SimGpu) -> str:
    if gpu.failure is not None:
        return "lost" if gpu.failure == pynvml.NVML_ERROR_GPU_IS_LOST else "failing"
    return "hung" if gpu.hung_until > time.monotonic() else "ok"
