"""The programs of a simulated host: none runs, each is told in the log."""

import shlex

import structlog

log = structlog.get_logger()


class SimulatedTools:
    """Takes every command and does nothing: a simulated GPU has no such settings."""

    async def run(self, program: str, *arguments: str) -> str:
        """Tell what would have been run."""
        log.info("simulated", command=shlex.join([program, *arguments]))
        return ""
