"""The limit of open files of this process."""

import resource
from typing import Final

import structlog

ENOUGH: Final = 1024
"""Open files of a busy daemon, with room: sockets, two for each resource, pidfds, MIG devices."""
NEEDED: Final = 128
"""With fewer, some of the sockets cannot be opened."""

log = structlog.get_logger()


def raise_file_limit() -> None:
    """Raise the limit as far as it is needed and allowed; report one that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft != resource.RLIM_INFINITY and soft < NEEDED:
        log.error(
            "too few open files allowed",
            limit=soft,
            needed=NEEDED,
            effect="sockets cannot be opened: shares may not be offered at all",
            fix=f"start metagpu with a limit of {ENOUGH} (systemd: LimitNOFILE={ENOUGH})",
        )
