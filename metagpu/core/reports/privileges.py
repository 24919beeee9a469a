"""The capabilities that a configuration needs, each with its uses.

docs/permissions.md lists them; the measurement is described there.
"""

from collections.abc import Mapping

from metagpu.core.config.config import Config
from metagpu.core.config.memory import AnnotationKind, EnforcementPolicy, MemoryEnforcement
from metagpu.core.contracts.capabilities import NeedsPrivileges
from metagpu.core.grants.injection import Injection
from metagpu.core.model.privileges import Privilege
from metagpu.core.reports.schema import PrivilegeReport

_FIRST_FREE_PORT = 1024
"""ip_unprivileged_port_start of a kernel, by default."""


def needed_privileges(config: Config, ports: Mapping[str, int]) -> Mapping[Privilege, list[str]]:
    """Return the capabilities that a configuration needs, each with its uses.

    `ports` are those that are served, by what they serve.
    """
    needed: dict[Privilege, list[str]] = {each: [] for each in Privilege}

    for pool, backends in config.build_backends(config.root.injection(Injection())):
        for backend in backends:
            if isinstance(backend, NeedsPrivileges):
                for privilege, use in backend.privileges().items():
                    needed[privilege].append(f"{use} (pool {pool.name})")
        for privilege, use in _of_enforcement(pool.memory_enforcement).items():
            needed[privilege].append(f"{use} (pool {pool.name})")
    for name, port in ports.items():
        if 0 < port < _FIRST_FREE_PORT:
            needed[Privilege.NET_BIND_SERVICE].append(f"the port {port} of the {name}")
    return needed


def privileges_report(
    needed: Mapping[Privilege, list[str]], held: frozenset[Privilege]
) -> dict[str, PrivilegeReport]:
    """Return for each capability whether it is held, and what needs it."""
    return {
        str(privilege): PrivilegeReport(privilege in held, uses)
        for privilege, uses in needed.items()
    }


def _of_enforcement(settings: MemoryEnforcement) -> Mapping[Privilege, str]:
    needed = {}
    may_kill = settings.policy is EnforcementPolicy.KILL and not settings.dry_run
    if may_kill or AnnotationKind.POLICY in settings.allow_annotations:
        needed[Privilege.KILL] = "the end of processes over their memory"
    if settings.uses_driver_limits:
        needed[Privilege.SYS_ADMIN] = "the driver's own memory limits"
    return needed
