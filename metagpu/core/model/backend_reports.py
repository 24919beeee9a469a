"""Values that backends report of their GPUs: metrics, and free capacity of MIG."""

import msgspec

from metagpu.core.model.gpu import Gpu, GpuId
from metagpu.core.model.shares import Holder


class MetricKind(msgspec.Struct, frozen=True):
    """One metric that a backend reports of each of its GPUs.

    Attributes:
        name: the name of the metric, the backend first and the unit last: `mig_free_slices`.
        meaning: the HELP text, one sentence.
        labels: the label names that distinguish several values of one GPU.
    """

    name: str
    meaning: str
    labels: tuple[str, ...] = ()


class BackendMetric(msgspec.Struct, frozen=True):
    """One value of a metric; `labels` are the label values, in the order of its kind."""

    kind: MetricKind
    gpu: GpuId
    value: float
    labels: tuple[str, ...] = ()


class DefragMove(msgspec.Struct, frozen=True):
    """A pod whose move would free a place for a profile that fits on no GPU.

    Attributes:
        profile: the profile that would fit after the move, at `freed_slot`.
        holder: the container that would have to move, `None` where the kubelet has not named it.
        slot: the instance that the container holds, as `1g.5gb@4`.
        target_slot: the place it could have instead, on `target_gpu`.
    """

    profile: str
    freed_slot: str
    holder: Holder | None
    slot: str
    target_gpu: Gpu
    target_slot: str


class FreeCapacity(msgspec.Struct, frozen=True):
    """The free capacity of one GPU.

    Attributes:
        largest: the largest profile that could be placed now, `None` where none fits.
        largest_slices: the memory slices that this profile occupies, 0 where none fits.
        free_slices: memory slices that nothing occupies, of `slices`; they need not be adjacent.
        closed: whether the GPU grants nothing now, whatever its free capacity.
        moves: for each profile that fits on no GPU, the cheapest move that would help, if that
            move is on this GPU.
    """

    gpu: Gpu
    largest: str | None
    largest_slices: int
    free_slices: int
    slices: int
    closed: bool = False
    moves: tuple[DefragMove, ...] = ()
