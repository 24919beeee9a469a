"""The limit of open files: raised where that is allowed, reported where it is not."""

import resource

import pytest

from metagpu.host import file_limit
from metagpu.host.file_limit import raise_file_limit
from tests.rigs.logs import capture_module_logs


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "reported"),
    [
        (16, 16, None, True),
        (16, 100, 100, True),
        (16, 512, 512, False),
        (256, 4096, 1024, False),
        (16, resource.RLIM_INFINITY, 1024, False),
        (1024, 1024, None, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, False),
    ],
)
def test_the_limit_is_raised_or_reported(
    soft: int, hard: int, raised: int | None, *, reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A soft limit is raised to what is needed; a hard one that is too low is reported."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))

    with capture_module_logs(file_limit) as entries:
        raise_file_limit()

    assert limits == ([(raised, hard)] if raised else [])
    assert [entry["event"] for entry in entries] == ["too few open files allowed"] * reported
