"""Environment variables of MetaGPU's daemon.

Each is `METAGPU_DEVICE_PLUGIN_` and a key, in capitals. As in MetaGPU, a variable wins over the
file.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from metagpu.compat.contract import CompatNote, ConfigDraft, Data, Origin
from metagpu.compat.environment import note_variable, parse_bool, variable_origin
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError, ConfigReason

PREFIX: Final = "METAGPU_DEVICE_PLUGIN_"
MEMORY_ENFORCER: Final = f"{PREFIX}MEMORYENFORCER"
MGCTL_AUTO_INJECT: Final = f"{PREFIX}MGCTLAUTOINJECT"
ACCELERATOR: Final = f"{PREFIX}ACCELERATOR"
NODE_NAME: Final = f"{PREFIX}NODENAME"
"""The node's name; `cli/options.py` reads it."""
HONOURED_VARIABLES: Final = (MEMORY_ENFORCER, MGCTL_AUTO_INJECT, ACCELERATOR, NODE_NAME)


class CnvrgSwitches(msgspec.Struct, frozen=True):
    """Switches of MetaGPU: on, off, or `None` where nothing says so."""

    memory_enforcer: bool | None
    mgctl: bool | None
    mgctl_origin: Origin

    @property
    def rules(self) -> Data:
        """The keys of every pool."""
        if self.memory_enforcer is None:
            return {}
        return {"memoryEnforcement": {"policy": "kill" if self.memory_enforcer else "off"}}


def read_switches(
    document: Document,
    environment: Mapping[str, str],
    *,
    memory_enforcer: bool | None = None,
    mgctl_auto_inject: bool | None = None,
) -> CnvrgSwitches:
    """Return the switches of a file; the environment wins.

    Raises:
        ConfigError: a variable has a value that is not allowed.
    """
    if (kind := environment.get(ACCELERATOR)) and kind != "nvidia":
        problem = f"{kind!r} is not known here; allowed: nvidia"
        raise ConfigError(problem, ConfigReason.UNKNOWN_VALUE, file="environment", path=ACCELERATOR)

    memory = parse_bool(MEMORY_ENFORCER, environment)
    mgctl = parse_bool(MGCTL_AUTO_INJECT, environment)
    in_file = Origin(document, "mgctlAutoInject")
    return CnvrgSwitches(
        memory_enforcer if memory is None else memory,
        mgctl_auto_inject if mgctl is None else mgctl,
        in_file if mgctl is None else variable_origin(MGCTL_AUTO_INJECT),
    )


def set_mgctl(draft: ConfigDraft, switches: CnvrgSwitches) -> None:
    """Set whether `mgctl` is in containers, if a switch says so."""
    if switches.mgctl is not None:
        draft.set("mgctl", {"inPods": switches.mgctl}, switches.mgctl_origin)


def variable_notes(environment: Mapping[str, str]) -> Iterator[CompatNote]:
    """Yield a note for each variable of MetaGPU that is not honoured."""
    for variable in sorted(environment):
        if variable.startswith(PREFIX) and variable not in HONOURED_VARIABLES:
            yield note_variable(variable, "has no effect here; docs/compat.md has each key")
