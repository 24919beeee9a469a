"""Problems that repeat are logged once."""

from metagpu.core.runtime.log_once import LogOnce


def test_a_problem_is_new_once_for_each_subject() -> None:
    """The same problem of another subject, or another problem of the same, is new again."""
    logged = LogOnce()

    assert logged.is_new("gpu 0", "busy")
    assert not logged.is_new("gpu 0", "busy")
    assert logged.is_new("gpu 1", "busy")
    assert logged.is_new("gpu 0", "lost")


def test_a_problem_that_comes_back_is_new() -> None:
    """A problem that is over is forgotten; an unknown problem has no end."""
    logged = LogOnce()
    logged.is_new("gpu 0", "busy")

    assert [logged.clear("gpu 0"), logged.clear("gpu 0")] == [True, False]
    assert logged.is_new("gpu 0", "busy")
