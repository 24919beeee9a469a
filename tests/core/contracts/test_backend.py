"""The contract of backends: their defaults, and their discovery by entry points."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from metagpu.backends.fraction.backend import FractionBackend
from metagpu.core.contracts import backend as contract
from metagpu.core.contracts.backend import Backend, installed_backends
from metagpu.core.model.snapshot import Snapshot
from tests.rigs.build import METAGPU, gpu, layout_of

LAYOUT = layout_of(gpu(0))
SHARES = LAYOUT.shares


def test_our_backends_are_entry_points() -> None:
    """The backend `fraction` is installed as an entry point under its own name."""
    assert installed_backends()["fraction"] is FractionBackend


def test_a_backend_is_loaded_when_it_is_used() -> None:
    """A name loads its backend alone, and an unknown name none."""
    backends = installed_backends()

    assert {"fraction", "mig"} <= set(backends)
    assert "fractions" not in backends
    assert not backends.loaded
    assert backends["fraction"] is backends.loaded["fraction"]
    assert list(backends.loaded) == ["fraction"]


@dataclass
class Entry:
    """An entry point as the standard library returns it."""

    name: str
    value: str
    loaded: object

    def load(self) -> object:
        """Return the object of the entry point."""
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
    """A package that offers something else, or under another name, gets an error that names it."""

    def entry_points(*, group: str) -> Iterable[Entry]:
        assert group == "metagpu.backends"
        return [entry]

    monkeypatch.setattr(contract, "entry_points", entry_points)
    with pytest.raises(TypeError, match=f"^{problem}"):
        installed_backends()["odd"]


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


def test_a_backend_need_not_check() -> None:
    """By default every set of shares may be granted."""
    Backend.check(LAYOUT.backends[METAGPU], SHARES, Snapshot())
