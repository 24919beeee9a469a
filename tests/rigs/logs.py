"""Log events of a module, captured by a test."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import structlog
from structlog.testing import LogCapture


@contextmanager
def capture_module_logs(module: ModuleType) -> Iterator[list[MutableMapping[str, Any]]]:
    """Capture the module's own logger at every level until the block ends.

    The logger is a new one, without settings that a test of the command line left behind.
    """
    capture = LogCapture()
    logger = structlog.wrap_logger(
        structlog.PrintLogger(),
        processors=[capture],
        wrapper_class=structlog.make_filtering_bound_logger(0),
    )
    known, module.log = module.log, logger  # type: ignore[attr-defined]
    try:
        yield capture.entries
    finally:
        module.log = known  # type: ignore[attr-defined]
