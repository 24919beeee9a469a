"""What a driver has of MIG while no daemon runs: modes and instances, kept in a file."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from metagpu.core.errors import ConfigError
from metagpu.core.gpu import GpuId
from metagpu.sim.cutting import Refusal, profile_of
from metagpu.sim.gpu import SimGpu
from metagpu.sim.instances import SimCompute, SimInstance
from metagpu.sim.node import SimNode

_DRAFT: Final = ".new"


class KeptCompute(msgspec.Struct, frozen=True):
    """A compute instance; `start` and `slices` are compute slices of its GPU instance."""

    number: int
    kind: int
    slices: int
    start: int
    uuid: str
    handle: int
    device: int


class KeptInstance(msgspec.Struct, frozen=True):
    """A GPU instance: NVML's numbers of it and of its profile, and its first memory slice."""

    number: int
    profile: int
    start: int
    handle: int
    computes: tuple[KeptCompute, ...]


class KeptGpu(msgspec.Struct, frozen=True):
    """MIG on one GPU: the mode now, the mode after a reset, and its instances."""

    enabled: bool
    pending: bool
    instances: tuple[KeptInstance, ...]


class KeptNode(msgspec.Struct, frozen=True):
    """A node: how many handles it has given, and its GPUs by uuid."""

    handles: int
    gpus: dict[GpuId, KeptGpu]


class _Lasting(threading.Condition):
    """A node's lock that has the file right before it is let go of.

    So what NVML has answered is kept, however the daemon ends.
    """

    def __init__(self, node: SimNode, file: Path) -> None:
        super().__init__()
        self._node = node
        self._file = file
        self._written = b""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what has changed, then let go."""
        try:
            self._keep()
        finally:
            super().__exit__(kind, error, trace)

    def _keep(self) -> None:
        gpus = {gpu.id: _kept(gpu) for gpu in self._node.gpus if gpu.board.mig}
        text = msgspec.json.encode(KeptNode(self._node.handles, gpus))
        if text != self._written:
            draft = self._file.with_name(self._file.name + _DRAFT)
            draft.write_bytes(text)
            draft.replace(self._file)
            self._written = text


def keep(node: SimNode, file: Path) -> None:
    """Give a node what the file keeps, if there is one, and keep it there from now on.

    To be called before anybody else has the node. A GPU that the file does not know stays as it is.

    Raises:
        ConfigError: if the file cannot be understood, or written.
    """
    try:
        if file.exists():
            _recall(node, msgspec.json.decode(file.read_bytes(), type=KeptNode))
        node.changed = _Lasting(node, file)
        with node.changed:
            pass  # from the first moment on
    except (OSError, msgspec.MsgspecError, Refusal) as error:
        reason = getattr(error, "strerror", None) or error
        why = f"cannot keep a simulated driver's instances: {reason}"
        raise ConfigError(why, file=str(file)) from error


def _recall(node: SimNode, kept: KeptNode) -> None:
    node.handles = kept.handles

    for gpu in node.gpus:
        if (known := kept.gpus.get(gpu.id)) is None:
            continue
        gpu.mig.enabled, gpu.mig.pending = known.enabled, known.pending
        gpu.mig.present = {
            it.number: SimInstance(
                it.number,
                profile_of(gpu, it.profile),
                it.start,
                it.handle,
                {
                    compute.number: SimCompute(**msgspec.structs.asdict(compute))
                    for compute in it.computes
                },
            )
            for it in known.instances
        }


def _kept(gpu: SimGpu) -> KeptGpu:
    instances = tuple(
        KeptInstance(
            it.number,
            it.profile.number,
            it.start,
            it.handle,
            tuple(
                KeptCompute(c.number, c.kind, c.slices, c.start, c.uuid, c.handle, c.device)
                for c in it.computes.values()
            ),
        )
        for it in gpu.mig.present.values()
    )
    return KeptGpu(gpu.mig.enabled, gpu.mig.pending, instances)
