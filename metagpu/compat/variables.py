"""Environment variables of MetaGPU's daemon and of NVIDIA's daemon sets.

MetaGPU's are `METAGPU_DEVICE_PLUGIN_` and a key, in capitals. NVIDIA's are those of the device
plugin, config-manager and MIG manager; names and defaults are those of k8s-device-plugin 0.20 and
mig-parted 0.12, read in their sources. A variable wins over the file, as in those programs.
`cli/options.py` reads those that name files, profiles, roots and the node.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

import msgspec

from metagpu.compat.backend_options import Strategy
from metagpu.compat.contract import CompatNote, ConfigDraft, ConvertedConfig, Data, Origin
from metagpu.compat.keys import IgnoredKey
from metagpu.compat.nvidia_file import CDI_FILES, IGNORED_KEYS, NvidiaFlags, NvidiaPluginFlags
from metagpu.core.config.config import DEFAULT
from metagpu.core.config.document import Document
from metagpu.core.config.errors import ConfigError, ConfigReason

TRUTH: Final = {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}
"""The words for true and false of Go's `strconv.ParseBool`, in any case."""


def parse_bool(variable: str, environment: Mapping[str, str]) -> bool | None:
    """Return a variable's truth as Go reads it, `None` where it is absent or empty.

    Raises:
        ConfigError: the value is neither true nor false.
    """
    if not (value := environment.get(variable)):
        return None
    if (truth := TRUTH.get(value.lower())) is None:
        problem = f"{value!r} is neither true nor false"
        raise ConfigError(problem, ConfigReason.UNKNOWN_VALUE, file="environment", path=variable)
    return truth


def variable_origin(variable: str) -> Origin:
    """Return the origin of what a variable says."""
    return Origin(Document("", "environment"), variable)


def note_variable(variable: str, text: str) -> CompatNote:
    """Return a note about a variable."""
    return variable_origin(variable).note(text)


CNVRG_PREFIX: Final = "METAGPU_DEVICE_PLUGIN_"
MEMORY_ENFORCER: Final = f"{CNVRG_PREFIX}MEMORYENFORCER"
MGCTL_AUTO_INJECT: Final = f"{CNVRG_PREFIX}MGCTLAUTOINJECT"
ACCELERATOR: Final = f"{CNVRG_PREFIX}ACCELERATOR"
CNVRG_NODE_NAME: Final = f"{CNVRG_PREFIX}NODENAME"
"""The node's name; `cli/options.py` reads it."""
CNVRG_VARIABLES: Final = (MEMORY_ENFORCER, MGCTL_AUTO_INJECT, ACCELERATOR, CNVRG_NODE_NAME)


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
        problem = f"{kind!r} is unknown; allowed: nvidia"
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


def cnvrg_variable_notes(environment: Mapping[str, str]) -> Iterator[CompatNote]:
    """Yield a note for each variable of MetaGPU that is not honoured."""
    for variable in sorted(environment):
        if variable.startswith(CNVRG_PREFIX) and variable not in CNVRG_VARIABLES:
            yield note_variable(variable, "has no effect here; docs/compat.md has each key")


_SIGNAL: Final = "signalled the plugin after a choice; metagpu reloads by itself"
_CLIENTS: Final = (
    "stopped programs of the host for a change of MIG mode; metagpu waits until the GPU is unused"
)

VARIABLES_OF_FLAGS: Final = {
    "FAIL_ON_INIT_ERROR": "flags.failOnInitError",
    "GDRCOPY_ENABLED": "flags.gdrcopyEnabled",
    "GDS_ENABLED": "flags.gdsEnabled",
    "MOFED_ENABLED": "flags.mofedEnabled",
    "DEVICE_DISCOVERY_STRATEGY": "flags.deviceDiscoveryStrategy",
    "DEVICE_ID_STRATEGY": "flags.plugin.deviceIDStrategy",
    "CDI_ANNOTATION_PREFIX": "flags.plugin.cdiAnnotationPrefix",
    "MPS_ROOT": "flags.mpsRoot",
    "IMEX_CHANNEL_IDS": "imex.channelIDs",
    "IMEX_REQUIRED": "imex.required",
}
"""Flags that are not honoured, by variable; `merge_settings` reads the honoured ones."""

IGNORED_VARIABLES: Final = {
    "KUBELET_SOCKET": IgnoredKey(
        "set where the kubelet listens; use --kubelet-dir",
        ("/var/lib/kubelet/device-plugins/kubelet.sock",),
    ),
    "CDI_FEATURE_FLAGS": IgnoredKey(CDI_FILES),
    "CDI_DISABLE_HOOKS": IgnoredKey(CDI_FILES),
    "CONFIG_FILE_DST": IgnoredKey(
        "set where config-manager links the chosen file; metagpu reads the folder itself"
    ),
    "FALLBACK_STRATEGIES": IgnoredKey(
        "set the profile of nodes without a label; here it is the one named default, else the only "
        "one, see --default-profile",
        ("named", "named,single"),
    ),
    "NODE_LABEL": IgnoredKey(
        "named the label that chooses this node's profile; here it is metagpu.io/config, or "
        "nvidia.com/device-plugin.config",
        ("nvidia.com/device-plugin.config",),
    ),
    "ONESHOT": IgnoredKey("chosen a profile once; metagpu follows the label", (False,)),
    **dict.fromkeys(("SEND_SIGNAL", "SIGNAL"), IgnoredKey(_SIGNAL, (True,))),
    "PROCESS_TO_SIGNAL": IgnoredKey(_SIGNAL, ("nvidia-device-plugin",)),
    "MIG_PARTED_HOOKS_FILE": IgnoredKey("named programs that run around a change of MIG"),
    "MIG_PARTED_MODE_CHANGE_ONLY": IgnoredKey("left the instances as they are", (False,)),
    "GPU_CLIENTS_FILE": IgnoredKey(_CLIENTS),
    "WITH_SHUTDOWN_HOST_GPU_CLIENTS": IgnoredKey(_CLIENTS, (False,)),
    "WITH_REBOOT": IgnoredKey(
        "rebooted the node for a change of MIG mode; metagpu names the GPUs that wait for a reset",
        (False,),
    ),
}
"""Variables that are not honoured and have no key in a file."""

NVIDIA_VARIABLES: Final = (
    "MIG_STRATEGY",
    "PASS_DEVICE_SPECS",
    "DEVICE_LIST_STRATEGY",
    "SHARED_DEVICES_ALLOCATION_POLICY",
    "DP_DISABLE_HEALTHCHECKS",
    "DP_ENABLE_HEALTHCHECKS",
)
"""The variables that `merge_settings` reads."""
_DISABLE, _ENABLE = NVIDIA_VARIABLES[-2:]
_STRATEGIES: Final = ("none", "single", "mixed")
_POLICIES: Final = ("distributed", "packed")
_EVERY_XID: Final = frozenset(("all", "xids"))
_XID: Final = re.compile("[0-9]{1,9}")
"""A number of NVIDIA's plugin, in which 0 stands for all XIDs."""


class NvidiaSettings(msgspec.Struct, frozen=True):
    """The flags that are honoured, from the file and the environment."""

    mig_strategy: Strategy | None = None
    pass_device_specs: bool | None = None
    device_list_strategies: tuple[str, ...] = ()
    allocation_policy: str | None = None
    xids: Mapping[int, str] = {}
    other_xids: Literal["application", "fatal"] | None = None

    @property
    def health(self) -> Data:
        """The section `health` of metagpu's own format."""
        named = {"xids": dict(self.xids)} if self.xids else {}
        return named | ({"otherXids": self.other_xids} if self.other_xids else {})


def merge_settings(flags: NvidiaFlags | None, environment: Mapping[str, str]) -> NvidiaSettings:
    """Return the flags that are honoured; the environment wins.

    Raises:
        ConfigError: a variable has a value that is not allowed.
    """
    flags = flags or NvidiaFlags()
    plugin = flags.plugin or NvidiaPluginFlags()
    lists = environment.get("DEVICE_LIST_STRATEGY") or plugin.device_list_strategy or ()
    listed = lists.split(",") if isinstance(lists, str) else lists
    passing = parse_bool("PASS_DEVICE_SPECS", environment)
    disabled, enabled = (_xids(variable, environment) for variable in (_DISABLE, _ENABLE))
    others = None
    if enabled is None:
        others = "fatal"
    elif disabled is None:
        others = "application"

    return msgspec.convert(
        {
            "mig_strategy": _one_of("MIG_STRATEGY", _STRATEGIES, environment) or flags.mig_strategy,
            "pass_device_specs": plugin.pass_device_specs if passing is None else passing,
            "device_list_strategies": tuple(filter(None, (each.strip() for each in listed))),
            "allocation_policy": _one_of("SHARED_DEVICES_ALLOCATION_POLICY", _POLICIES, environment)
            or plugin.shared_devices_allocation_policy,
            "xids": {
                **dict.fromkeys((disabled or ()) if enabled is not None else (), "application"),
                **dict.fromkeys(enabled or (), "fatal"),
            },
            "other_xids": others,
        },
        NvidiaSettings,
    )


def set_flags(
    draft: ConfigDraft, settings: NvidiaSettings, origin_of: Callable[[str, str], Origin]
) -> None:
    """Set what the flags say of injection and health.

    Args:
        draft: the configuration under construction.
        settings: the flags.
        origin_of: returns the origin of a flag, by its path and its variable.
    """
    if settings.mig_strategy in {"single", "mixed"}:
        origin = origin_of("flags.migStrategy", "MIG_STRATEGY")
        draft.set("migStrategy", settings.mig_strategy, origin)
    if settings.pass_device_specs is not None:
        origin = origin_of("flags.plugin.passDeviceSpecs", "PASS_DEVICE_SPECS")
        draft.set("passDeviceSpecs", settings.pass_device_specs, origin)
    if strategies := list(settings.device_list_strategies):
        origin = origin_of("flags.plugin.deviceListStrategy", "DEVICE_LIST_STRATEGY")
        if {"cdi-annotations", "cdi-cri"} <= {*strategies}:
            strategies = [each for each in strategies if each != "cdi-annotations"]
            draft.add_note(
                origin,
                "cdi-cri is used of the two ways of CDI: a runtime that knows both would give a "
                "container its GPU twice",
            )
        draft.set("deviceListStrategy", strategies, origin)
    if settings.health:
        draft.set("health", settings.health, origin_of("", _ENABLE))


def nvidia_variable_notes(environment: Mapping[str, str]) -> Iterator[CompatNote]:
    """Yield a note for each variable that asks for something and is not honoured."""
    flags = {variable: IGNORED_KEYS[path] for variable, path in VARIABLES_OF_FLAGS.items()}
    for variable, ignored in {**flags, **IGNORED_VARIABLES}.items():
        value: object = environment.get(variable)
        value = TRUTH.get(str(value).lower(), value)
        if ignored.is_requested(value):
            yield note_variable(variable, ignored.text)

    if _xids(_ENABLE, environment) is None and _xids(_DISABLE, environment) != []:
        text = f"has no effect, as in NVIDIA's plugin: {_ENABLE} wins"
        yield note_variable(_DISABLE, text)


def _one_of(variable: str, allowed: tuple[str, ...], environment: Mapping[str, str]) -> str | None:
    value = environment.get(variable)
    if value and value not in allowed:
        problem = f"{value!r} is unknown; allowed: {', '.join(sorted(allowed))}"
        raise ConfigError(problem, ConfigReason.UNKNOWN_VALUE, file="environment", path=variable)
    return value or None


def _xids(variable: str, environment: Mapping[str, str]) -> list[int] | None:
    """Read a list of XIDs, `None` for all; other words are skipped, as there."""
    listed = [part.strip() for part in environment.get(variable, "").lower().split(",")]
    numbers = [int(number) for number in listed if _XID.fullmatch(number)]
    return None if 0 in numbers or not _EVERY_XID.isdisjoint(listed) else numbers


_OWN_FILE = "has no effect with a file in metagpu's own format; see docs/compat.md"


class DefaultPool(msgspec.Struct, frozen=True):
    """The pool of GPUs about which no file says anything."""

    name: str
    backends: list[Data]
    rules: Data
    origin: Origin


def default_pool(draft: ConfigDraft, environment: Mapping[str, str]) -> DefaultPool:
    """Return the pool of a node without a file; set what MetaGPU's variables change.

    Raises:
        ConfigError: a variable has a value that is not allowed.
    """
    document = Document(DEFAULT, "<default>")
    switches = read_switches(document, environment)
    set_mgctl(draft, switches)
    draft.notes += cnvrg_variable_notes(environment)
    [pool] = document.data["pools"]
    return DefaultPool(pool["name"], pool["backends"], switches.rules, Origin(document, "pools[0]"))


def with_variables(environment: Mapping[str, str]) -> ConvertedConfig:
    """Return the configuration of a node without a file, as variables change it.

    NVIDIA's say how a container gets its GPU, and which XIDs count; MetaGPU's switch memory
    enforcement and `mgctl`.

    Raises:
        ConfigError: a variable has a value that is not allowed.
    """
    draft = ConfigDraft()
    settings = merge_settings(None, environment)
    set_flags(draft, settings, lambda _, variable: variable_origin(variable))
    draft.notes += nvidia_variable_notes(environment)
    for variable in ("MIG_STRATEGY", "SHARED_DEVICES_ALLOCATION_POLICY"):
        if environment.get(variable, "none") not in ("", "none"):
            text = "has no effect without a file: every GPU is offered in fractions"
            draft.notes.append(note_variable(variable, text))

    pool = default_pool(draft, environment)
    draft.add_pool(pool.name, None, pool.backends, pool.origin, rules=pool.rules)
    return draft.finish()


def own_file_notes(environment: Mapping[str, str]) -> Iterator[CompatNote]:
    """Yield a note for each variable that would change a foreign file."""
    honoured = (*NVIDIA_VARIABLES, *CNVRG_VARIABLES)
    for variable in honoured:
        if environment.get(variable) and variable != CNVRG_NODE_NAME:
            yield note_variable(variable, _OWN_FILE)
    yield from nvidia_variable_notes(environment)
    yield from cnvrg_variable_notes(environment)
