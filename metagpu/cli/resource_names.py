"""The options of HAMi's resource names, of the webhook and `kubectl metagpu`."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Final

from metagpu.translation.values import TranslationSettings

_DEFAULTS: Final = TranslationSettings()
_NAMES: Final = (
    ("--resource-name", "gpu", "the resource that counts GPUs"),
    ("--resource-mem", "memory", "the resource of MiB on each GPU"),
    ("--resource-mem-percentage", "memory_percentage", "the resource of percent of its memory"),
    ("--resource-cores", "cores", "the resource of percent of its multiprocessors"),
    ("--resource-priority", "priority", "the resource of HAMi's priorities, which is removed"),
)
"""Options by the names that HAMi has for them, and the settings that they set."""


def add_resource_names(
    parser: argparse.ArgumentParser, default: Callable[[str, str], Any] = lambda _, name: name
) -> None:
    """Add the options, with defaults made of an option and a resource name."""
    for option, setting, help_text in _NAMES:
        parser.add_argument(
            option,
            dest=setting,
            metavar="NAME",
            default=default(option, getattr(_DEFAULTS, setting)),
            help=f"{help_text} (default: %(default)s)",
        )


def resource_names_of(args: argparse.Namespace) -> Mapping[str, Any]:
    """Return the names by the fields of `TranslationSettings`."""
    return {setting: getattr(args, setting) for _, setting, _ in _NAMES}
