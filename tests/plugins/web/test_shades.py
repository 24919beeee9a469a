"""Colours and patterns of pods, for people who see colours in different ways: computed."""

import math
import re
from importlib.resources import files
from itertools import combinations
from typing import Final

import pytest

from metagpu.plugins import web

ASSETS: Final = files(web) / "assets"
Triple = tuple[float, float, float]
NORMAL: Final = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
VISIONS: Final = {
    "normal": NORMAL,
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
"""What people see of linear sRGB: Machado, Oliveira and Fernandes (2009), at severity 1."""
LEAST: Final = 20
"""Distance in CIELAB; 2.3 is just noticeable side by side."""


def schemes() -> list[list[str]]:
    """Return the eight colours of the light and of the dark scheme."""
    lines = (ASSETS / "page.css").read_text(encoding="utf-8").splitlines()
    return [re.findall(r"--s\d: (#\w{6})", line) for line in lines if "--s0:" in line]


def first_patterns() -> list[int]:
    """Return the pattern that each colour has first."""
    found = re.search(r"FIRST_PATTERN = \[(.*?)\]", (ASSETS / "shades.js").read_text("utf-8"))
    assert found
    return [int(part) for part in found[1].split(",")]


def seen(colour: str, vision: tuple[Triple, ...]) -> Triple:
    """Return a colour in CIELAB, as a vision sees it."""
    linear = [_linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5)]
    red, green, blue = (
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in vision
    )
    x = _root((0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047)
    y = _root(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    z = _root((0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def _root(part: float) -> float:
    return part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_any_two_pods_differ_in_more_than_a_hue(vision: str, scheme: int) -> None:
    """Of the first eight pods, two whose colours somebody could confuse have other patterns."""
    colours, patterns = schemes()[scheme], first_patterns()
    assert len(colours) == len(patterns) == 8
    alike = [
        (one, other)
        for one, other in combinations(range(8), 2)
        if patterns[one] == patterns[other]
        and math.dist(*(seen(colours[number], VISIONS[vision]) for number in (one, other))) < LEAST
    ]
    assert alike == []


def test_each_colour_has_each_pattern_once() -> None:
    """All 32 marks differ: the pattern of a colour moves on with each round of the colours."""
    script = (ASSETS / "shades.js").read_text(encoding="utf-8")
    assert "(Math.floor(slot / SHADES) + FIRST_PATTERN[slot % SHADES]) % PATTERNS" in script
    marks = {(slot % 8, (slot // 8 + first_patterns()[slot % 8]) % 4) for slot in range(32)}
    assert len(marks) == 32
