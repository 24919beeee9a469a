"""What a module logs, heard by a test."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import structlog
from structlog.testing import LogCapture


@contextmanager
def heard(module: ModuleType) -> Iterator[list[MutableMapping[str, Any]]]:
    """Hear the module's own logger while the block lasts, every level of it.

    It gets one that owes nothing to the settings a test of the command line left behind.
    """
    capture = LogCapture()
    hearing = structlog.wrap_logger(
        structlog.PrintLogger(),
        processors=[capture],
        wrapper_class=structlog.make_filtering_bound_logger(0),
    )
    known, module.log = module.log, hearing  # type: ignore[attr-defined]
    try:
        yield capture.entries
    finally:
        module.log = known  # type: ignore[attr-defined]
