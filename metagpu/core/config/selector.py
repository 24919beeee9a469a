"""The selection of a pool's GPUs."""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec

from metagpu.core.config.units import Bytes, PciDevice
from metagpu.core.model.gpu import MIB, Gpu, parse_bus_id

_UUID: Final = re.compile(r"GPU(-[0-9a-f]{8})(-[0-9a-f]{4}){3}(-[0-9a-f]{12})")
"""The form of NVML: a uuid in another form would select no GPU."""
_MAX_TEXT: Final = 16 * 1024
"""Characters of one key, all its values together; every GPU is compared with all of them."""
_Check: TypeAlias = tuple[object, Callable[[Any], bool], str]
"""The accepted values, of which one has to match; the check of one; the reason if none does."""


class GpuSelector(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The criteria of a pool's GPUs; a selected GPU meets all that are given.

    Attributes:
        index: numbers and ranges, as `0-3,6`.
        uuid: one or several NVML uuids.
        pci: one or several bus ids, as `0000:07:00.0`, or with NVML's domain of eight digits.
        pci_device: one or several PCI ids of GPU models, device before vendor: `0x20B010DE`; or of
            the boards of one maker too: `0x20B010DE:0x134F10DE`.
        product: a pattern of the product name with `*` and `?`, in any case: `*A100*`.
        min_memory: the minimum of total memory, as `40Gi`.
        mig: whether the GPU supports MIG, be it on or off.
    """

    index: str | int | tuple[str | int, ...] | None = None
    uuid: str | tuple[str, ...] | None = None
    pci: str | tuple[str, ...] | None = None
    pci_device: str | int | tuple[str | int, ...] | None = None
    product: str | tuple[str, ...] | None = None
    min_memory: Bytes | None = None
    mig: bool | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, name) is None for name in self.__struct_fields__):
            raise ValueError("an empty selector selects nothing; write `gpus: all`")
        for name in self.__struct_fields__:
            _check_length(name, getattr(self, name))

        for part in _listed(self.index):
            _index_ranges(part)
        for name in _listed(self.pci):
            parse_bus_id(name)
        for part in _listed(self.pci_device):
            PciDevice.parse(part)
        for part in _listed(self.uuid):
            if not _UUID.fullmatch(part):
                raise ValueError(
                    f"{part!r} is not a uuid of a GPU; write one as `nvidia-smi -L` does"
                )
        if "" in _listed(self.product):
            raise ValueError("an empty `product` matches nothing; write a pattern like *A100*")

    def exclusion_reason(self, gpu: Gpu) -> str | None:
        """Return why a GPU is not selected, `None` for a selected one."""
        own = PciDevice(gpu.pci_device or 0, gpu.pci_subsystem)
        known = own if own.device else "unknown"
        checks: tuple[_Check, ...] = (
            (
                self.index,
                lambda part: any(gpu.index in numbers for numbers in _index_ranges(part)),
                f"index {gpu.index} is not in {_shown(self.index)}",
            ),
            (self.uuid, lambda part: gpu.id == part, f"uuid {gpu.id} is not listed"),
            (
                self.pci,
                lambda part: gpu.pci_bus_id == parse_bus_id(part),
                f"PCI bus id {gpu.pci_bus_id} is not listed",
            ),
            (
                self.pci_device,
                lambda part: PciDevice.parse(part).includes(own),
                f"PCI device id {known} is not {_shown(self.pci_device)}",
            ),
            (
                self.product,
                lambda part: fnmatchcase(gpu.name.lower(), part.lower()),
                f"{gpu.name} does not match {_shown(self.product)}{_nearly(gpu, self.product)}",
            ),
            (
                self.min_memory,
                lambda part: gpu.memory is not None and gpu.memory >= part,
                "the driver reports no memory"
                if gpu.memory is None
                else f"{_memory(gpu.memory)} of memory are less than "
                f"{_memory(self.min_memory or 0)}",
            ),
            (
                self.mig,
                lambda part: (gpu.mig_enabled is not None) is part,
                f"it {'does not support' if self.mig else 'supports'} MIG",
            ),
        )

        for wanted, fits, why in checks:
            if wanted is not None and not any(map(fits, _listed(wanted))):
                return why
        return None

    def __str__(self) -> str:
        names = zip(self.__struct_encode_fields__, self.__struct_fields__, strict=True)
        given = {key: getattr(self, name) for key, name in names}
        if self.min_memory is not None:
            given["minMemory"] = _memory(self.min_memory)
        return ", ".join(f"{k} {_shown(v)}" for k, v in given.items() if v is not None)


def _listed(value: Any) -> tuple[Any, ...]:  # noqa: ANN401 - one or several of anything
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def _check_length(name: str, value: object) -> None:
    if value == ():
        raise ValueError(f"the list `{name}` is empty and selects nothing; leave it out")
    if (length := len(_shown(value))) > _MAX_TEXT:
        raise ValueError(
            f"`{name}` has {length} characters; allowed: {_MAX_TEXT} at most. No node has so many "
            "GPUs"
        )


def _nearly(gpu: Gpu, product: object) -> str:
    """Return the pattern that would match a GPU, if only stars are missing."""
    parts = [part for part in _listed(product) if part.lower() in gpu.name.lower()]
    return f"; *{parts[0]}* would" if parts else ""


def _memory(size: int) -> str:
    """Return a size in bytes as MiB, with a fraction only where there is one."""
    return f"{size // MIB} MiB" if size % MIB == 0 else f"{size / MIB:.3f} MiB"


def _shown(value: object) -> str:
    shown = (str(part).lower() if isinstance(part, bool) else str(part) for part in _listed(value))
    return ",".join(shown)


@lru_cache(maxsize=256)
def _index_ranges(part: str | int) -> list[range]:
    """Parse `3`, `0-3` or `0-3,6`.

    Raises:
        ValueError: the value has another form.
    """
    found = []

    for piece in str(part).split(","):
        ends = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", piece)
        if ends is None or int(ends[2] or ends[1]) < int(ends[1]):
            raise ValueError(f"{part!r} is not an index; write one like 3, 0-3 or 0-3,6")
        found.append(range(int(ends[1]), int(ends[2] or ends[1]) + 1))

    return found
