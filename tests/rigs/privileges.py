"""Privileges that tests need; a test is skipped without them, with a line."""

import subprocess
from functools import cache

import pytest


def with_only(*capabilities: str) -> tuple[str, ...]:
    """Return the command that starts a program as root with these capabilities alone."""
    bounds = ",".join(("-all", *(f"+{capability}" for capability in capabilities)))
    return ("setpriv", f"--bounding-set={bounds}", "--inh-caps=-all", "--no-new-privs")


def require_mounts(what: str) -> None:
    """Skip the test where this process may not mount; WHAT is not tested then."""
    if not _may_mount():
        pytest.skip(f"only root with the capability SYS_ADMIN may mount; not tested: {what}")


@cache
def _may_mount() -> bool:
    """Try once: root of a container lacks the capability, or a profile refuses the call."""
    command = ("unshare", "--mount", "true")
    try:
        done = subprocess.run(command, check=False, capture_output=True)  # noqa: S603 - fixed
    except FileNotFoundError:
        return False
    return done.returncode == 0
