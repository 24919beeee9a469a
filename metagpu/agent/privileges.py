"""The capabilities of this process, against those that the configuration needs."""

from collections.abc import Callable, Mapping
from typing import Any

import structlog
from anyio import to_thread

from metagpu.core.config.config import Config
from metagpu.core.model.privileges import Privilege
from metagpu.core.reports.privileges import needed_privileges, privileges_report
from metagpu.host.linux import held_privileges

log = structlog.get_logger()


class PrivilegeCheck:
    """Knows which capabilities this process holds, once they are read.

    Args:
        config: returns the configuration in force.
        ports: the ports that are served, by what they serve.
    """

    def __init__(self, config: Callable[[], Config], ports: Mapping[str, int]) -> None:
        self._config = config
        self._ports = ports
        self._held: frozenset[Privilege] = frozenset()

    async def run(self) -> None:
        """Read the capabilities of this process, and warn of each one that is missing."""
        self._held = await to_thread.run_sync(held_privileges)
        for privilege, uses in self._needed.items():
            if uses and privilege not in self._held:
                fix = "add it to the container's capabilities, or leave these features out"
                log.warning("capability missing", capability=privilege, needed_for=uses, fix=fix)

    def report(self) -> dict[str, Any]:
        """Return for each capability whether it is held, and what needs it."""
        return privileges_report(self._needed, self._held)

    @property
    def _needed(self) -> Mapping[Privilege, list[str]]:
        return needed_privileges(self._config(), self._ports)
