"""A fault in what the node can do without stays there."""

import anyio
import pytest

from metagpu.core import endurance
from metagpu.core.endurance import enduring
from tests.heard import heard


async def test_a_fault_in_what_can_be_done_without_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told by name, and what failed begins anew; what ends by itself has ended."""
    monkeypatch.setattr(endurance, "ANEW", 0.01)
    tries = 0

    async def work() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise KeyError("a fault of ours")

    with heard(endurance) as entries, anyio.fail_after(30):
        await enduring(work, "the weather")

    assert tries == 3
    assert [(it["event"], it["part"]) for it in entries] == [
        ("a part of metagpu failed; it begins anew", "the weather")
    ] * 2
