"""Every error is told so that its reader can act on it."""

import errno

import pytest

from metagpu.core.errors import ConfigError, why


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"), "No such file or dir"),
        (OSError("AF_UNIX path too long"), "AF_UNIX path too long"),
        (ValueError("odd"), "odd"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_failure_is_told_in_words(error: Exception, told: str) -> None:
    """No reader of the log has to know the system's numbers, and none finds an empty reason."""
    assert why(error).startswith(told)
    assert "Errno" not in why(error)


def test_what_is_wrong_in_a_file_is_told_by_place() -> None:
    """File, line, path and problem, as far as they are known."""
    assert str(ConfigError("bad", file="f", line=3, path="a.b")) == "f: 3: a.b: bad"
    assert str(ConfigError("bad", file="f")) == "f: bad"
