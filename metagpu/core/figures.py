"""Numbers that a backend tells of its GPUs, beside what is known of every GPU: for monitoring."""

from dataclasses import dataclass

from metagpu.core.gpu import GpuId


@dataclass(frozen=True, slots=True)
class FigureKind:
    """What is told, of each GPU of a backend.

    Attributes:
        name: as monitoring names it, the backend first and the unit last: `mig_free_slices`.
        meaning: a sentence.
        labels: what tells a GPU's values apart, if there are several; few, and known beforehand.
    """

    name: str
    meaning: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """One value, now; `labels` are those of its kind, in that order."""

    kind: FigureKind
    gpu: GpuId
    value: float
    labels: tuple[str, ...] = ()
