"""Errors: their tree, and their texts."""

import errno
import inspect
import re

import pytest

from metagpu.core import errors
from metagpu.core.errors import ConfigError, MetagpuError, describe_error


@pytest.mark.parametrize(
    ("error", "described"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"), "No such file or dir"),
        (OSError("AF_UNIX path too long"), "AF_UNIX path too long"),
        (ValueError("odd"), "odd"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_failure_is_described_in_words(error: Exception, described: str) -> None:
    """A failure is described without system error numbers, and never with an empty text."""
    assert describe_error(error).startswith(described)
    assert "Errno" not in describe_error(error)


def test_a_configuration_error_names_its_place() -> None:
    """The message has file, line, path and problem, as far as they are known."""
    assert str(ConfigError("bad", file="f", line=3, path="a.b")) == "f: 3: a.b: bad"
    assert str(ConfigError("bad", file="f")) == "f: bad"


def test_the_drawn_tree_is_the_tree_of_classes() -> None:
    """The module's docstring draws every error class below its base class, and no other name."""
    drawn: dict[str, str] = {}
    parents: list[str] = []

    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"((?:│   )*(?:[├└]── )?)([A-Z]\w+)(?: {2,}\S|$)", line)
        if found is not None:
            depth = len(found[1]) // 4
            parents[depth:] = [found[2]]
            drawn[found[2]] = parents[depth - 1] if depth else "Exception"

    classes = dict(inspect.getmembers(errors, inspect.isclass))
    assert drawn == {name: cls.__mro__[1].__name__ for name, cls in classes.items()}
    assert all(issubclass(cls, MetagpuError) for cls in classes.values())
