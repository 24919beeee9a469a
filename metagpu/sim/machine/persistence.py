"""MIG modes and instances in a file, as a driver keeps them without a daemon."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.model.gpu import GpuId
from metagpu.sim.machine.gpu import SimGpu
from metagpu.sim.machine.mig_driver import MigDriverError, find_profile
from metagpu.sim.machine.mig_state import SimComputeInstance, SimGpuInstance
from metagpu.sim.machine.node import SimNode

_DRAFT: Final = ".new"


class SavedComputeInstance(msgspec.Struct, frozen=True):
    """A compute instance; `start` and `slices` are compute slices of its GPU instance."""

    number: int
    kind: int
    slices: int
    start: int
    uuid: str
    handle: int
    device: int


class SavedGpuInstance(msgspec.Struct, frozen=True):
    """A GPU instance: its ID, its profile's ID, and its first memory slice."""

    number: int
    profile: int
    start: int
    handle: int
    computes: tuple[SavedComputeInstance, ...]


class SavedGpu(msgspec.Struct, frozen=True):
    """MIG on one GPU: the mode now, the mode after a reset, and its instances."""

    enabled: bool
    pending: bool
    instances: tuple[SavedGpuInstance, ...]


class SavedNode(msgspec.Struct, frozen=True):
    """A node: the number of handles issued, and its GPUs by UUID."""

    handles: int
    gpus: dict[GpuId, SavedGpu]


class _SavingCondition(threading.Condition):
    """A node's lock that reads the state file, and writes it before each release.

    So the file has every change that NVML has answered, however the daemon ends, and two daemons
    have one driver. They do not lock each other out: one of them at a time changes instances.
    """

    def __init__(self, node: SimNode, file: Path) -> None:
        super().__init__()
        self._node = node
        self._file = file
        self._written = b""

    def __enter__(self) -> bool:
        """Take the lock, then read the changes of another process."""
        taken = super().__enter__()
        try:
            self._catch_up()
        except BaseException:
            super().__exit__(None, None, None)
            raise
        return taken

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the changes, then release the lock."""
        try:
            self._keep()
        finally:
            super().__exit__(kind, error, trace)

    def _catch_up(self) -> None:
        try:
            text = self._file.read_bytes()
        except FileNotFoundError:  # removed beside the daemon: this node goes on as it is
            return
        if self._written and text != self._written:
            _restore(self._node, msgspec.json.decode(text, type=SavedNode))
            self._written = text

    def _keep(self) -> None:
        gpus = {gpu.id: _saved(gpu) for gpu in self._node.gpus if gpu.model.has_mig}
        text = msgspec.json.encode(SavedNode(self._node.handles_issued, gpus))
        if text != self._written:
            draft = self._file.with_name(self._file.name + _DRAFT)
            draft.write_bytes(text)
            draft.replace(self._file)
            self._written = text


def persist(node: SimNode, file: Path) -> None:
    """Restore a node from its state file, and keep the file up to date from now on.

    Call this before any other use of the node. A GPU that is not in the file stays as it is.

    Raises:
        ConfigError: the file cannot be parsed or written.
    """
    try:
        if file.exists():
            _restore(node, msgspec.json.decode(file.read_bytes(), type=SavedNode))
        node.changed = _SavingCondition(node, file)
        with node.changed:
            pass  # from the first moment on
    except (OSError, msgspec.MsgspecError, MigDriverError) as error:
        reason = getattr(error, "strerror", None) or error
        why = f"cannot keep a simulated driver's instances: {reason}"
        raise ConfigError(why, ConfigReason.UNREADABLE, file=str(file)) from error


def _restore(node: SimNode, kept: SavedNode) -> None:
    node.handles_issued = kept.handles

    for gpu in node.gpus:
        if (known := kept.gpus.get(gpu.id)) is None:
            continue
        gpu.mig.enabled, gpu.mig.pending = known.enabled, known.pending
        gpu.mig.instances = {
            it.number: SimGpuInstance(
                it.number,
                find_profile(gpu, it.profile),
                it.start,
                it.handle,
                {
                    compute.number: SimComputeInstance(**msgspec.structs.asdict(compute))
                    for compute in it.computes
                },
            )
            for it in known.instances
        }


def _saved(gpu: SimGpu) -> SavedGpu:
    instances = tuple(
        SavedGpuInstance(
            it.number,
            it.profile.number,
            it.start,
            it.handle,
            tuple(
                SavedComputeInstance(
                    c.number, c.kind, c.slices, c.start, c.uuid, c.handle, c.device
                )
                for c in it.compute_instances.values()
            ),
        )
        for it in gpu.mig.instances.values()
    )
    return SavedGpu(gpu.mig.enabled, gpu.mig.pending, instances)
