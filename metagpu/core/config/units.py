"""Values with units: durations (`30s`), memory (`1Gi`), PCI ids."""

import re
from fractions import Fraction
from typing import Any, Final, NamedTuple, Self

from metagpu.core.model.quantities import quantity_value

_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES: Final = {
    "": 1,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}


_LONGEST_TEXT: Final = 40
"""The characters of a value that a message repeats."""
_YEAR: Final = 365 * 86400.0
_MOST_BYTES: Final = 2**60
"""An exbibyte: no GPU has as much, and sums of such amounts fit into 64 bits."""


class Duration(float):
    """A duration in seconds."""

    @classmethod
    def parse(cls, text: object) -> Self:
        """Parse `250ms`, `30s`, `5m`, `1h`, or 0.

        Raises:
            ValueError: the text has another form, no unit, or is longer than a year.
        """
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h)?", str(text).strip())
        if found is None:
            raise ValueError(
                f"{_shown(text)} is not a duration; write one like 250ms, 30s, 5m or 1h"
            )
        seconds = float(found[1]) * _SECONDS[found[2] or "s"]
        if seconds > _YEAR:
            raise ValueError(f"{_shown(text)} is longer than a year; write at most 8760h")
        if seconds and not found[2]:
            raise ValueError(f"{_shown(text)} has no unit; write one like {found[1]}s")
        return cls(seconds)

    def __str__(self) -> str:
        return f"{float(self):g}s"


class Quantity(int):
    """An amount of memory as Kubernetes writes it: a number alone is of bytes."""

    @classmethod
    def parse(cls, text: object) -> Self:
        """Parse a Kubernetes quantity such as `1Gi`, `16G` or `5e9`, or a number of bytes.

        Raises:
            ValueError: the text has another form, or is more than an exbibyte.
        """
        written = str(text).strip()
        if len(written) <= _LONGEST_TEXT and written.isascii() and written.isdecimal():
            amount = int(written)  # as most amounts of ResourceClaims are
        else:
            found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?", written)
            if found is not None and len(found[1]) > _LONGEST_TEXT:
                exact: Fraction | None = Fraction(_MOST_BYTES + 1)
            elif found is not None:
                exact = Fraction(found[1]) * _BYTES[found[2] or ""]
            else:
                exact = quantity_value(written)
            if exact is None or exact < 0:
                raise ValueError(
                    f"{_shown(text)} is not an amount of memory; write one like 512Mi, 1Gi or 16G"
                )
            amount = int(exact)
        if amount > _MOST_BYTES:
            raise ValueError(
                f"{_shown(text)} is more memory than any GPU has; write at most 1048576Ti"
            )
        return cls(amount)


class Bytes(Quantity):
    """An amount of memory in bytes, as a person writes it: it has a unit."""

    @classmethod
    def parse(cls, text: object) -> Self:
        """Parse `512Mi`, `1Gi`, `16G` or another Kubernetes quantity with a unit, or 0.

        Raises:
            ValueError: the text has another form, no unit, or is more than an exbibyte.
        """
        written = str(text).strip()
        amount = super().parse(text)
        if amount and re.fullmatch(r"[0-9.]+", written):
            examples = f"{written}Mi or {written}Gi"
            raise ValueError(f"{_shown(text)} has no unit; write one like {examples}")
        return amount


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


class PciDevice(NamedTuple):
    """The PCI ids of a GPU, and of its board where that counts, in NVML's form.

    The device is in the upper 16 bits, the vendor in the lower.
    """

    device: int
    subsystem: int | None = None

    @classmethod
    def parse(cls, text: object) -> Self:
        """Parse `0x20B010DE`, `0x20B010DE:0x134F10DE`, or numbers.

        YAML makes numbers of them without quotes.

        Raises:
            ValueError: the value has none of these forms.
        """
        numbers = [_pci_number(part) for part in str(text).strip().split(":")]
        if len(numbers) > len(cls._fields) or not all(0 <= part < 2**32 for part in numbers):
            raise ValueError(
                f"{text!r} is not a PCI device id; write one like 0x20B010DE: device, then vendor; "
                "the board's may follow: 0x20B010DE:0x134F10DE"
            )
        return cls(*numbers)

    def includes(self, gpu: "PciDevice") -> bool:
        """Return whether a GPU has these ids."""
        return self.device == gpu.device and self.subsystem in (None, gpu.subsystem)

    def __str__(self) -> str:
        return ":".join(f"0x{part:08X}" for part in self if part is not None)


def _pci_number(text: str) -> int:
    found = re.fullmatch(r"0[xX]([0-9a-fA-F]{8})|(\d+)", text)
    return int(found[1], 16) if found and found[1] else int(found[2]) if found else -1


def decode_unit(wanted: type, value: object) -> Any:  # noqa: ANN401 - the shape of msgspec's hook
    """Decode values with units for msgspec (its `dec_hook`)."""
    if issubclass(wanted, (Duration, Quantity)):
        return wanted.parse(value)

    raise NotImplementedError(f"no unit {wanted}")
