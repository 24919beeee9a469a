"""Quantities, as Kubernetes reads them."""

from fractions import Fraction

import pytest

from metagpu.core.model.quantities import quantity_value, whole_number


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("7", 7),
        ("2k", 2000),
        ("1e3", 1000),
        ("1E3", 1000),
        ("25e-1", Fraction(5, 2)),
        ("1E", 10**18),
        ("8Ki", 8192),
        ("8Gi", 8 * 2**30),
        ("1.5Gi", 1536 * 2**20),
        (".5k", 500),
        ("5.", 5),
        ("+5", 5),
        ("-5", -5),
        ("500m", Fraction(1, 2)),
        ("5u", Fraction(5, 10**6)),
        ("", None),
        ("k", None),
        (".", None),
        ("8K", None),
        ("8 Gi", None),
        ("8gi", None),
        ("1e3Ki", None),
        ("1e", None),
        ("1e999", None),
        ("٣", None),
        ("None", None),
    ],
)
def test_quantities_are_read_as_kubernetes_reads_them(
    text: str, amount: int | Fraction | None
) -> None:
    """A number has an exponent or a suffix; `k` is the only small letter above one."""
    assert quantity_value(text) == amount


@pytest.mark.parametrize(
    ("amount", "number"),
    [("2k", 2000), (7, 7), ("8000m", 8), ("1500m", None), ("-1", None), (None, None), ("x", None)],
)
def test_things_are_counted_in_whole_numbers(amount: object, number: int | None) -> None:
    """An extended resource has a whole number, however it is written."""
    assert whole_number(amount) == number
