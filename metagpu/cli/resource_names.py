"""The options of vocabularies and HAMi's names, here and in `kubectl metagpu`."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.translation.values import TranslationSettings
from metagpu.translation.vocabularies import VOCABULARIES

_DEFAULTS: Final = TranslationSettings()
_NAMES: Final = (
    ("--resource-name", "gpu", "the resource that counts GPUs"),
    ("--resource-mem", "memory", "the resource of MiB on each GPU"),
    ("--resource-mem-percentage", "memory_percentage", "the resource of percent of its memory"),
    ("--resource-cores", "cores", "the resource of percent of its multiprocessors"),
    ("--resource-priority", "priority", "the resource of HAMi's priorities, which is removed"),
)
"""Options by the names that HAMi has for them, and the settings that they set."""


_VOCABULARIES: Final = "--vocabularies"


def add_resource_names(
    parser: argparse.ArgumentParser,
    vocabularies: Iterable[str],
    default: Callable[[str, str], Any] = lambda _, name: name,
) -> None:
    """Add the options, with defaults made of an option and a value."""
    parser.add_argument(
        _VOCABULARIES,
        metavar="NAMES",
        default=default(_VOCABULARIES, ",".join(vocabularies)),
        help=f"those that pods may ask in, of {', '.join(VOCABULARIES)}; `kai` is that of KAI "
        "Scheduler's annotations, where metagpu serves such pods in its place (default: "
        "%(default)s)",
    )
    for option, setting, help_text in _NAMES:
        parser.add_argument(
            option,
            dest=setting,
            metavar="NAME",
            default=default(option, getattr(_DEFAULTS, setting)),
            help=f"{help_text} (default: %(default)s)",
        )


def resource_names_of(args: argparse.Namespace) -> Mapping[str, Any]:
    """Return the settings by the fields of `TranslationSettings`.

    Raises:
        ConfigError: a vocabulary is none.
    """
    names = tuple(value for part in args.vocabularies.split(",") if (value := part.strip()))
    if not names or set(names) - VOCABULARIES.keys():
        known = ", ".join(VOCABULARIES)
        problem = f"{args.vocabularies!r} names no vocabularies; write some of {known}"
        raise ConfigError(problem, ConfigReason.UNKNOWN_VALUE, file=_VOCABULARIES)
    settings = {setting: getattr(args, setting) for _, setting, _ in _NAMES}
    return {**settings, "vocabularies": names}
