"""Profiles: several configurations in one place, of which a node uses one."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from metagpu.core.config.errors import ConfigError, ConfigReason

DEFAULT: Final = "default"
"""The profile of a node without a choice: the name is that of NVIDIA's plugin."""
_SUFFIXES: Final = (".yaml", ".yml", ".json")
_MAX_LISTED: Final = 20
"""The names that a message lists at most."""


class ProfileChoice(msgspec.Struct, frozen=True):
    """The choice of a profile by options or a label.

    Attributes:
        chosen: the node's own profile.
        default: the profile of a node without a choice of its own.
        option: the option or label that chose, for messages.
        required: whether a choice is an error where there are no profiles.
    """

    chosen: str | None = None
    default: str | None = None
    option: str = "--profile"
    required: bool = True


class ClusterChoice(msgspec.Struct, frozen=True):
    """The part of this node's configuration that comes from the cluster.

    Attributes:
        profile: the profile that the node's label chooses; `label` is the label's name.
        mig_config: the layout of mig-parted that the node's label chooses.
        mig_manager: whether NVIDIA's MIG manager runs on the node, and follows that label.
        source: the object that holds the profiles, for messages; empty without one.
        profiles: texts by name.
    """

    profile: str | None = None
    label: str = ""
    mig_config: str | None = None
    source: str = ""
    profiles: Mapping[str, str] | None = None
    mig_manager: bool = False


def choose_profile(
    names: Iterable[str], choice: ProfileChoice, place: str, elsewhere: Collection[str] = ()
) -> str:
    """Choose one of several profiles; the suffix of a file may be left out.

    The node's own choice comes first, then the default choice, then `default`, then the only one.

    Args:
        names: files of a directory, or keys of a ConfigMap.
        choice: the chosen names.
        place: the folder or ConfigMap, for messages.
        elsewhere: profiles of another place, which may be absent here.

    Raises:
        ConfigError: there is no such profile, or no choice among several.
    """
    known = {name: name for name in sorted(names)}
    known |= {_bare(name): name for name in known if _bare(name) not in known}
    listed = _listed(sorted(set(known.values())))

    for name, option in ((choice.chosen, choice.option), (choice.default, "--default-profile")):
        if name is None or (name not in known and name in elsewhere):
            continue
        if name not in known:
            problem = f"there is no profile {name!r} ({option}); there are: {listed}"
            raise ConfigError(problem, ConfigReason.UNKNOWN_CHOICE, file=place)
        return known[name]

    if DEFAULT in known:
        return known[DEFAULT]
    if len(set(known.values())) == 1:
        return next(iter(known.values()))
    if not known:
        problem = "there is no profile in it; put a configuration there"
        raise ConfigError(problem, ConfigReason.MISSING, file=place)
    problem = f"no profile is chosen; give --profile or --default-profile; there are: {listed}"
    raise ConfigError(problem, ConfigReason.NO_CHOICE, file=place)


def has_choice(names: Iterable[str], choice: ProfileChoice) -> bool:
    """Return whether there is a choice among these names, be it an invalid one."""
    known = set(names)
    chosen = choice.chosen is not None or (choice.default is not None and bool(known))
    return chosen or has_profile(known, DEFAULT) or len(known) == 1


def has_profile(names: Iterable[str], name: str) -> bool:
    """Return whether a profile is among some names, with or without a suffix."""
    return any(name in (known, _bare(known)) for known in names)


def _listed(names: Sequence[str]) -> str:
    """Return a list of names, limited: the folder may be a home directory by mistake."""
    more = [f"and {len(names) - _MAX_LISTED} more"] if len(names) > _MAX_LISTED else []
    return ", ".join([*names[:_MAX_LISTED], *more]) or "none"


def _bare(name: str) -> str:
    return next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)


LAST_GOOD: Final = "the last good configuration stays"
"""The effect of a rejected configuration, where another one is in force."""
NOTHING_OFFERED: Final = "nothing is offered until it is corrected"
"""The effect of a rejected configuration, where none is in force."""

OPTION_FIRST: Final = "the configuration of the option stays"
"""The effect of a label that an option of this node has precedence over."""
GPUS_STAY: Final = "the GPUs stay as they are"
"""The effect of a label that names no layout."""


class ConfigOutcome(msgspec.Struct, frozen=True):
    """The outcome of a choice that the cluster made.

    Attributes:
        rejection: why the configuration was rejected, `None` for an accepted one.
        has_mig_layouts: whether layouts of mig-parted are part of the configuration.
        mig_mismatch: why GPUs of such a layout are not offered; empty if all are.
        effect: what is in force instead of a rejected one.
    """

    rejection: str | None = None
    has_mig_layouts: bool = False
    mig_mismatch: str = ""
    effect: str = LAST_GOOD


class ConfigStatus(msgspec.Struct, frozen=True):
    """The configuration in use, and counters of accepted and rejected ones.

    Attributes:
        formats: the formats of its files.
        hash: twelve hexadecimal digits of its content, the same on nodes with the same one.
        ignored_settings: the number of settings of other projects' files without effect.
        is_current: whether the configuration that was read last is in use.
        accepted: the number of accepted configurations; `accepted_at` is the time of the last.
        rejected: the number of rejected ones; `rejected_at` is 0 before the first.
    """

    file: str
    formats: Sequence[str]
    profiles: Sequence[str]
    hash: str
    ignored_settings: int
    is_current: bool
    accepted: int
    accepted_at: float
    rejected: int
    rejected_at: float
