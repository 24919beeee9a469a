"""Parts of GPUs that a node offers, by its labels and its allocatable resources."""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from metagpu.translation.values import NodeOffer

MIG: Final = "mig"
FRACTION: Final = "fraction"
MPS: Final = "mps"
WHOLE: Final = "whole"
_TECHNIQUES: Final = frozenset((MIG, FRACTION, MPS, WHOLE))
"""Each has the name of its backend. Time-slices have no memory of their own."""
PRODUCT: Final = "nvidia.com/gpu.product"
GPU_COUNT: Final = "nvidia.com/gpu.count"
GPU_MEMORY: Final = "nvidia.com/gpu.memory"
_INSTANCE: Final = re.compile(r"nvidia\.com/mig-\d+g\..+")


class OfferedPart(msgspec.Struct, frozen=True):
    """Shares of one resource on a node.

    Attributes:
        technique: `MIG`, `FRACTION`, `MPS` or `WHOLE`.
        memory: MiB of one share, rounded down.
        per_gpu: shares of the GPU with the most of them.
        gpus: GPUs of the node that have such shares.
        most: the most shares that pods could hold at once, if they held nothing else.
        gpu_memory: MiB of a GPU, 0 where they are not known.
        slices: compute slices of an instance, 0 where they are not known.
    """

    resource: str
    technique: str
    memory: int
    per_gpu: int
    gpus: int
    most: int
    gpu_memory: int
    slices: int = 0

    @property
    def room(self) -> int:
        """The most MiB that one request may have of a GPU.

        A share's memory is rounded down: all shares are the whole GPU all the same.
        """
        if self.technique in (MIG, WHOLE):
            return self.memory
        rounded_up = self.per_gpu * (self.memory + 1) - 1
        return max(self.per_gpu * self.memory, min(self.gpu_memory, rounded_up))


def parts_of(node: NodeOffer) -> tuple[OfferedPart, ...]:
    """Return what a node offers, as far as its labels describe it."""
    return tuple(_parts(node))


def label_of(resource: str, key: str) -> str:
    """Return the label of metagpu that describes a resource."""
    return f"metagpu.io/{resource.replace('/', '_')}.{key}"


def memory_label(resource: str) -> str:
    """Return the label with the MiB of an instance; metagpu writes it as others do."""
    return f"{resource}.memory" if _INSTANCE.fullmatch(resource) else label_of(resource, "memory")


def _parts(node: NodeOffer) -> Iterator[OfferedPart]:
    instances = "-MIG-" in node.labels.get(PRODUCT, "")  # they stand for GPUs in the labels
    gpu_memory = 0 if instances else _number(node, GPU_MEMORY)
    for resource, allocatable in node.allocatable.items():
        gpus = _number(node, label_of(resource, "gpus")) or _number(node, GPU_COUNT)
        backend = node.labels.get(label_of(resource, "backend"), "")
        technique = backend or _of_others(resource, node)
        if technique not in _TECHNIQUES or not gpus:
            continue
        per_gpu = 1
        if technique in (FRACTION, MPS):
            per_gpu = _number(node, label_of(resource, "replicas"))
        memory = _memory(resource, technique, node)
        most = per_gpu * gpus
        if technique == MIG:
            places = _number(node, label_of(resource, "replicas")) * gpus
            counted = _number(node, f"{resource}.count") * _number(node, f"{resource}.replicas")
            most = counted or max(places, allocatable)
        if memory and per_gpu:
            slices = _number(node, f"{resource}.slices.gi")
            yield OfferedPart(resource, technique, memory, per_gpu, gpus, most, gpu_memory, slices)


def _of_others(resource: str, node: NodeOffer) -> str:
    """Return the technique of a resource that GPU Feature Discovery describes."""
    if _INSTANCE.fullmatch(resource):
        return MIG
    alone = node.labels.get("nvidia.com/gpu.replicas", "1") in ("0", "1")
    if resource == "nvidia.com/gpu" and alone and "-MIG-" not in node.labels.get(PRODUCT, ""):
        return WHOLE
    return ""


def _memory(resource: str, technique: str, node: NodeOffer) -> int:
    """Return the MiB of a share, 0 where a share has none of its own."""
    if own := _number(node, label_of(resource, "memory")):
        return own
    if technique == WHOLE:
        return _number(node, GPU_MEMORY)
    if technique == MIG and _number(node, f"{resource}.replicas") == 1:
        return _number(node, f"{resource}.memory")
    return 0


def _number(node: NodeOffer, label: str) -> int:
    text = node.labels.get(label, "")
    return int(text) if text.isdecimal() else 0
