"""Results that are kept with the snapshot that they are made of."""

import gc
import weakref

from msgspec.structs import replace

from metagpu.core.model.snapshot import Snapshot, once


class Result:
    """Anything made of a snapshot."""


@once
def look(_: Snapshot) -> Result:
    """Look."""
    return Result()


@once
def look_again(_: Snapshot) -> Result:
    """Look again."""
    return Result()


def test_a_result_is_made_once_for_each_snapshot() -> None:
    """An equal snapshot that is another object has another result, as another function has."""
    one, other = Snapshot(), replace(Snapshot())
    assert look(one) is look(one)
    assert look(one) is not look(other)
    assert look(one) is not look_again(one)
    assert look.__doc__ == "Look."


def test_a_result_ends_with_its_snapshot() -> None:
    """The collector, which seldom looks at all objects, is not needed."""
    gc.disable()
    try:
        snapshot = Snapshot()
        result = weakref.ref(look(snapshot))
        assert result() is look(snapshot)
        following = replace(snapshot, withdrawn=True)
        del snapshot
        assert result() is None
        assert look(following) is look(following)
    finally:
        gc.enable()
