"""Results that are kept while what they are made of stays the same object."""

from metagpu.core.model.snapshot import latest


def test_a_result_is_made_once_for_each_source() -> None:
    """An equal source that is another object is another source; only the latest is kept."""
    made = []

    @latest
    def double(source: list[int]) -> list[int]:
        """Double."""
        made.append(source)
        return source * 2

    one, other = [1], [1]
    assert double(one) is double(one)
    assert len(made) == 1
    assert double(other) == [1, 1]
    assert double(one) == [1, 1]
    assert len(made) == 3
    assert double.__doc__ == "Double."
