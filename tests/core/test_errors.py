"""Errors: their tree, and their texts."""

import errno
import inspect
import re
from types import ModuleType

import pytest

from metagpu.core import errors
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.errors import MetagpuError, describe_error
from metagpu.core.model import request_errors
from metagpu.core.model.request_errors import GpuUnhealthy, ProvisioningLasts
from metagpu.kubectl import errors as kubectl_errors

WRONG = ConfigReason.INVALID_VALUE


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
    assert str(ConfigError("bad", WRONG, file="f", line=3, path="a.b")) == "f: 3: a.b: bad"
    assert str(ConfigError("bad", WRONG, file="f")) == "f: bad"


def test_a_reason_is_the_name_of_the_class_or_of_the_kind() -> None:
    """Each class is the reason of its errors, but for a configuration, which has kinds."""
    assert GpuUnhealthy.reason == "gpu_unhealthy"
    assert ProvisioningLasts.reason == "provisioning_lasts"
    assert ConfigError("bad", WRONG).reason == "invalid_value"


@pytest.mark.parametrize("module", [errors, request_errors, kubectl_errors])
def test_the_drawn_tree_is_the_tree_of_classes(module: ModuleType) -> None:
    """The module's docstring draws every error class below its base class, and no other name."""
    drawn: dict[str, str] = {}
    parents: list[str] = []

    for line in (module.__doc__ or "").splitlines():
        found = re.match(r"((?:[│ ]   )*(?:[├└]── )?)([A-Z]\w+)(?: {2,}\S|$)", line)
        if found is not None:
            depth = len(found[1]) // 4
            parents[depth:] = [found[2]]
            drawn[found[2]] = parents[depth - 1] if depth else "Exception"

    members = dict(inspect.getmembers(module, inspect.isclass))
    classes = {name: kind for name, kind in members.items() if issubclass(kind, Exception)}
    assert drawn == {name: cls.__mro__[1].__name__ for name, cls in classes.items()}
    assert all(issubclass(cls, MetagpuError) for cls in classes.values())
