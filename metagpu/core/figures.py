"""Numbers that a backend tells of its GPUs, beside what is known of every GPU: for monitoring."""

import msgspec

from metagpu.core.gpu import GpuId


class FigureKind(msgspec.Struct, frozen=True):
    """What is told, of each GPU of a backend.

    Attributes:
        name: as monitoring names it, the backend first and the unit last: `mig_free_slices`.
        meaning: a sentence.
        labels: what tells a GPU's values apart, if there are several; few, and known beforehand.
    """

    name: str
    meaning: str
    labels: tuple[str, ...] = ()


class Figure(msgspec.Struct, frozen=True):
    """One value, now; `labels` are those of its kind, in that order."""

    kind: FigureKind
    gpu: GpuId
    value: float
    labels: tuple[str, ...] = ()
