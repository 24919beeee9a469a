"""Profiles: several configurations side by side, of which a node has one."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from metagpu.core.errors import ConfigError

DEFAULT: Final = "default"
"""The profile that a node has when nobody chose one: the name that NVIDIA's plugin looks for."""
_SUFFIXES: Final = (".yaml", ".yml", ".json")
_MOST: Final = 20
"""Names that a message lists."""


class Choice(msgspec.Struct, frozen=True):
    """Who chose which profile.

    Attributes:
        wanted: the node's own profile.
        default: what a node without one has.
        by: who wants it, for messages.
        required: whether it is a mistake to want one where there are none.
    """

    wanted: str | None = None
    default: str | None = None
    by: str = "--profile"
    required: bool = True


class Instruction(msgspec.Struct, frozen=True):
    """What the cluster says of this node's configuration; nothing, where it says nothing.

    Attributes:
        profile: what the node's label chooses; `label` is its name, for messages.
        mig_config: which of mig-parted's layouts the node's label chooses.
        place: where the profiles are, for messages; empty if the cluster holds none.
        profiles: texts by name.
    """

    profile: str | None = None
    label: str = ""
    mig_config: str | None = None
    place: str = ""
    profiles: Mapping[str, str] | None = None


def choose(
    names: Iterable[str], choice: Choice, place: str, elsewhere: Collection[str] = ()
) -> str:
    """Choose one of the profiles of a place; a file's suffix need not be said.

    The node's own comes first, then the default one, then `default`, then the only one.

    Args:
        names: files of a directory, or keys of a ConfigMap.
        choice: who chose what.
        place: where they are, for messages.
        elsewhere: profiles that another place has, so that here they may be absent.

    Raises:
        ConfigError: if there is no such profile, or nothing chooses among several.
    """
    known = {name: name for name in sorted(names)}
    known |= {_bare(name): name for name in known if _bare(name) not in known}
    listed = _listed(sorted(set(known.values())))

    for name, option in ((choice.wanted, choice.by), (choice.default, "--default-profile")):
        if name is None or (name not in known and name in elsewhere):
            continue
        if name not in known:
            problem = f"there is no profile {name!r} ({option}); there are: {listed}"
            raise ConfigError(problem, file=place)
        return known[name]

    if DEFAULT in known:
        return known[DEFAULT]
    if len(set(known.values())) == 1:
        return next(iter(known.values()))
    if not known:
        raise ConfigError("there is no profile in it; put a configuration there", file=place)
    problem = f"no profile is chosen; give --profile or --default-profile; there are: {listed}"
    raise ConfigError(problem, file=place)


def chooses(names: Iterable[str], choice: Choice) -> bool:
    """Tell whether a choice among these names leads anywhere, be it to an error."""
    known = set(names)
    chosen = choice.wanted is not None or (choice.default is not None and bool(known))
    return chosen or has(known, DEFAULT) or len(known) == 1


def has(names: Iterable[str], name: str) -> bool:
    """Tell whether a profile is among some names, with or without a suffix."""
    return any(name in (known, _bare(known)) for known in names)


def _listed(names: Sequence[str]) -> str:
    """Write names, of very many the first: a folder may turn out to be somebody's home."""
    more = [f"and {len(names) - _MOST} more"] if len(names) > _MOST else []
    return ", ".join([*names[:_MOST], *more]) or "none"


def _bare(name: str) -> str:
    return next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)
