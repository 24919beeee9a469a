"""The contract of backends: what they get for free, and how they are found."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from metagpu.backends.fraction import FractionBackend
from metagpu.core import backend as contract
from metagpu.core.backend import Backend, installed_backends
from metagpu.core.snapshot import Snapshot
from tests.build import METAGPU, gpu, laid_out

LAYOUT = laid_out(gpu(0))
SHARES = LAYOUT.shares


def test_our_backends_come_through_the_door_of_everyone() -> None:
    """Fractions are installed as an entry point under their own name."""
    assert installed_backends()["fraction"] is FractionBackend


@dataclass
class Entry:
    """An entry point as the standard library gives it."""

    name: str
    value: str
    loaded: object

    def load(self) -> object:
        """Give what it stands for."""
        return self.loaded


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (
            Entry("odd", "pkg:thing", 3),
            "the entry point pkg:thing of metagpu.backends is no Backend",
        ),
        (
            Entry("odd", "pkg:Thing", int),
            "the entry point pkg:Thing of metagpu.backends is no Back",
        ),
        (Entry("odd", "pkg:Frac", FractionBackend), "pkg:Frac calls itself fraction, not odd"),
    ],
)
def test_an_entry_point_that_is_no_backend_is_named(
    entry: Entry, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that offers something else, or under another name, is told which it is."""

    def entry_points(*, group: str) -> Iterable[Entry]:
        assert group == "metagpu.backends"
        return [entry]

    monkeypatch.setattr(contract, "entry_points", entry_points)
    with pytest.raises(TypeError, match=f"^{problem}"):
        installed_backends()


@pytest.mark.parametrize(
    ("required", "size", "expected"),
    [
        ([], 2, [0, 1]),
        ([3], 2, [3, 0]),
        ([3, 4], 2, [3, 4]),
        ([], 99, list(range(10))),
        ([], 0, []),
    ],
)
def test_a_backend_without_preference_takes_the_first(
    required: list[int], size: int, expected: list[int]
) -> None:
    """The default is the required shares, then the available ones in their order, each once."""
    chosen = Backend.prefer(
        LAYOUT.backends[METAGPU], SHARES, [SHARES[n] for n in required], size, Snapshot()
    )

    assert [share.number for share in chosen] == expected


async def test_a_backend_need_not_check_or_prepare() -> None:
    """By default every set may be granted, and no container start is waited for."""
    fraction = LAYOUT.backends[METAGPU]
    Backend.check(fraction, SHARES, Snapshot())
    await Backend.prepare(fraction, SHARES, Snapshot())

    assert not Backend.prepares
