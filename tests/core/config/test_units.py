"""Durations and amounts of memory as people write them."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metagpu.core.config.units import Bytes, Duration, PciDevice, Quantity, decode_unit


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("30s", 30),
        ("5m", 300),
        ("1h", 3600),
        ("1.5h", 5400),
        ("0s", 0),
        (" 7 s ", 7),
        ("0", 0),
        (0, 0),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    """A duration is a number with ms, s, m or h; 0 needs no unit."""
    assert Duration.parse(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "1d", "1 min", "1h30m", "1e3s", "inf", "nan", True, None, [1]]
)
def test_no_durations(text: object) -> None:
    """Other values are refused with an example of a duration."""
    with pytest.raises(ValueError, match="is not a duration; write one like 250ms, 30s, 5m or 1h"):
        Duration.parse(text)


@pytest.mark.parametrize("number", ["12", 12, 1.5, "1024.0"])
def test_a_number_has_a_unit(number: object) -> None:
    """A number that could be seconds or milliseconds is refused with an example."""
    with pytest.raises(ValueError, match=r"has no unit; write one like [\d.]+s$"):
        Duration.parse(number)
    with pytest.raises(ValueError, match=r"has no unit; write one like [\d.]+Mi or [\d.]+Gi$"):
        Bytes.parse(number)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1Ki", 2**10),
        ("512Mi", 2**29),
        ("1Gi", 2**30),
        ("1.5Gi", 3 * 2**29),
        ("2Ti", 2**41),
        ("5e9", 5 * 10**9),
        ("1P", 10**15),
        ("2500000k", 25 * 10**8),
        ("+.5Gi", 2**29),
        ("1K", 1000),
        ("16M", 16 * 10**6),
        ("16G", 16 * 10**9),
        ("1T", 10**12),
        ("1048576", 2**20),
        (1048576, 2**20),
        (" 1 Gi ", 2**30),
        ("9007199254740993", 2**53 + 1),
        ("8796093022208.5Ki", 2**53 + 512),
    ],
)
def test_amounts_of_memory(text: object, count: int) -> None:
    """An amount is a Kubernetes quantity, a claim's also a number of bytes, exact at any size."""
    assert Quantity.parse(text) == count
    if not str(text).isdecimal():
        assert Bytes.parse(text) == count


@pytest.mark.parametrize("text", ["", "Gi", "-1Gi", "1Gb", "1gi", "1 GiB", "1e", False, None])
def test_no_amounts_of_memory(text: object) -> None:
    """Other values are refused with an example of an amount."""
    with pytest.raises(
        ValueError, match="is not an amount of memory; write one like 512Mi, 1Gi or"
    ):
        Bytes.parse(text)


@given(st.integers(0, 2**20), st.sampled_from(["", "Ki", "Mi", "Gi", "Ti", "K", "M", "G", "T"]))
def test_whole_amounts_are_exact(count: int, unit: str) -> None:
    """A whole number of any unit is exactly that many bytes."""
    factor = Quantity.parse(f"1{unit}")

    assert Quantity.parse(f"{count}{unit}") == count * factor


@given(st.text() | st.integers() | st.floats() | st.booleans() | st.none())
def test_whatever_is_read_is_a_unit_or_refused(value: object) -> None:
    """Reading ends in an amount that is not negative or a ValueError, nothing else."""
    for unit in (Duration, Bytes, Quantity):
        with suppress(ValueError):
            assert unit.parse(value) >= 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(60, "60s"), (0.25, "0.25s"), (3600, "3600s"), (1.5, "1.5s")]
)
def test_a_duration_is_written_in_seconds(seconds: float, text: str) -> None:
    """A duration is written in the form that a file takes."""
    assert str(Duration(seconds)) == text
    assert Duration.parse(text) == seconds


def test_only_our_units_are_decoded() -> None:
    """An unknown type is a programming error, not an error of the file."""
    assert decode_unit(Bytes, "1Ki") == 1024
    assert decode_unit(Duration, "1m") == 60
    with pytest.raises(NotImplementedError, match="complex"):
        decode_unit(complex, "1")


@pytest.mark.parametrize("text", ["0x20B010DE", "0x20b010de", 0x20B010DE, "548409566"])
def test_pci_devices(text: object) -> None:
    """A GPU model is given by PCI ids, device before vendor, which YAML reads as a number."""
    assert PciDevice.parse(text) == (0x20B010DE, None)
    assert str(PciDevice.parse(text)) == "0x20B010DE"


def test_pci_devices_of_a_board() -> None:
    """A board's ids may follow, as in mig-parted 0.15; without them every board is included."""
    board, model = PciDevice.parse("0x20B010DE:0x134F10DE"), PciDevice.parse("0x20B010DE")

    assert tuple(board) == (0x20B010DE, 0x134F10DE)
    assert str(board) == "0x20B010DE:0x134F10DE"
    assert model.includes(board)
    assert not board.includes(model)
    assert not board.includes(PciDevice(0x20B010DE, 0x146310DE))


@pytest.mark.parametrize(
    "text", ["20B010DE", "0x20B0", "", True, None, -1, 2**32, "0x20B010DE:", "1:2:3"]
)
def test_no_pci_devices(text: object) -> None:
    """Other values are refused with an example of PCI ids."""
    with pytest.raises(
        ValueError, match="is not a PCI device id; write one like 0x20B010DE: device"
    ):
        PciDevice.parse(text)


@pytest.mark.parametrize(
    ("unit", "text", "problem"),
    [
        (Duration, "9" * 300, "is longer than a year; write at most 8760h"),
        (Duration, "8761h", "is longer than a year; write at most 8760h"),
        (Bytes, "9" * 4000, "is more memory than any GPU has; write at most 1048576Ti"),
        (Bytes, "9" * 4000 + "Gi", "is more memory than any GPU has; write at most 1048576Ti"),
        (Bytes, "1048577Ti", "is more memory than any GPU has; write at most 1048576Ti"),
        (Duration, "\u0663s", "is not a duration"),
        (Bytes, "\u0663", "is not an amount of memory"),
    ],
)
def test_values_beyond_all_machines_are_refused(
    unit: type[Duration | Bytes], text: str, problem: str
) -> None:
    """A value that no float or metric can hold is an error with a short text."""
    with pytest.raises(ValueError, match=problem) as error:
        unit.parse(text)

    assert len(str(error.value)) < 150
    assert unit.parse("8760h" if unit is Duration else "1048576Ti")
