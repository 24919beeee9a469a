"""Values of a translation: what nodes offer, how it is done, and what comes out."""

from collections.abc import Mapping
from typing import Any, Final, Self

import msgspec

from metagpu.core.model.quantities import whole_number

Object = Mapping[str, Any]

TECHNIQUES: Final = ("mig", "hami-core", "mps", "whole")
"""HAMi's modes, and whole GPUs."""
POLICIES: Final = ("binpack", "spread")


class NodeOffer(msgspec.Struct, frozen=True):
    """One Node, as far as a translation needs it.

    Attributes:
        allocatable: the extended resources of the Node alone, as counts.
    """

    name: str
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    allocatable: Mapping[str, int] = msgspec.field(default_factory=dict)

    @classmethod
    def from_node(cls, node: Object) -> Self:
        """Read a Node of the API."""
        metadata = node.get("metadata") or {}
        amounts = (node.get("status") or {}).get("allocatable") or {}
        return cls(
            metadata.get("name") or "",
            dict(metadata.get("labels") or {}),
            {
                name: count
                for name, amount in amounts.items()
                if "/" in name and (count := whole_number(amount)) is not None
            },
        )


class TranslationSettings(msgspec.Struct, frozen=True):
    """The names that pods use, and the choices that a pod leaves open.

    The names are HAMi's.

    Attributes:
        gpu: the resource with the number of GPUs.
        memory: the resource with the MiB of each GPU; `memory_percentage` and `cores` are percents,
            and `priority` is HAMi's own.
        order: the techniques, by preference, for pods that name none: of `mig`, `hami-core`, `mps`
            and `whole`.
        policy: `binpack` or `spread`, for pods that name neither.
        impossible: `warn` or `refuse`: what becomes of a pod that no node could serve.
        vocabularies: those that pods are read in, by the names of `VOCABULARIES`.
        dra_resources: names that DRA serves, which no Node counts: they are left as those of nodes.
    """

    gpu: str = "nvidia.com/gpu"
    memory: str = "nvidia.com/gpumem"
    memory_percentage: str = "nvidia.com/gpumem-percentage"
    cores: str = "nvidia.com/gpucores"
    order: tuple[str, ...] = ("mig", "hami-core", "mps")
    policy: str = "binpack"
    impossible: str = "warn"
    priority: str = "nvidia.com/priority"
    vocabularies: tuple[str, ...] = ("hami",)
    dra_resources: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """All resource names that a translation replaces."""
        return (self.gpu, self.memory, self.memory_percentage, self.cores, self.priority)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The resource names of memory."""
        return (self.memory, self.memory_percentage)


class Translation(msgspec.Struct, frozen=True):
    """The outcome for one pod.

    Attributes:
        operations: a JSON Patch (RFC 6902); empty where the pod is left untouched.
        warnings: sentences for the pod's author.
        unreadable: why the request cannot be read, as a warning says too; empty where it can.
        impossible: why no node could serve the pod, and what would fit; `None` where one could.
    """

    operations: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
    unreadable: str = ""
    impossible: str | None = None
