"""Options of translation: of `metagpu webhook` and `kubectl metagpu translate`."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.translation.values import POLICIES, TECHNIQUES, TranslationSettings
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


def add_translation(
    parser: argparse.ArgumentParser,
    vocabularies: Iterable[str],
    default: Callable[[str, str, tuple[str, ...]], Any] = lambda _, value, __: value,
    *,
    dra_resources: str = "none",
) -> None:
    """Add the options of both programs.

    Args:
        parser: gets the options.
        vocabularies: those that count by default.
        default: makes the default of an option from a value and the allowed ones, if only some are.
        dra_resources: says what counts without this option.
    """
    parser.add_argument(
        "--order",
        metavar="TECHNIQUES",
        default=default("--order", ",".join(_DEFAULTS.order), ()),
        help="the techniques for pods that name none, the preferred one first, of "
        f"{', '.join(sorted(TECHNIQUES))} (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default=default("--policy", _DEFAULTS.policy, POLICIES),
        help="between resources that would serve a pod: the one with the least waste, or the one "
        "with the most room (default: %(default)s)",
    )
    parser.add_argument(
        "--dra-resources",
        metavar="NAMES",
        default=default("--dra-resources", "", ()),
        help="names in limits that DRA serves, and no Node counts: requests for them are left as "
        f"they are (default: {dra_resources})",
    )
    parser.add_argument(
        "--vocabularies",
        metavar="NAMES",
        default=default("--vocabularies", ",".join(vocabularies), ()),
        help=f"those that pods may ask in, of {', '.join(VOCABULARIES)}; `kai` is that of KAI "
        "Scheduler's annotations, where metagpu serves such pods in its place (default: "
        "%(default)s)",
    )
    for option, setting, help_text in _NAMES:
        parser.add_argument(
            option,
            dest=setting,
            metavar="NAME",
            default=default(option, getattr(_DEFAULTS, setting), ()),
            help=f"{help_text} (default: %(default)s)",
        )


def add_manifest_translation(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kubectl metagpu translate` alone, and those of both."""
    parser.add_argument(
        "--nodes",
        type=Path,
        metavar="FILE",
        help="the nodes, as `kubectl get nodes -o json` or `-o yaml` prints them (default: those "
        "of the cluster)",
    )
    served = "those of the cluster's DeviceClasses, with --nodes none"
    add_translation(parser, VOCABULARIES, dra_resources=served)
    parser.add_argument(
        "--claims",
        action="store_true",
        help="print ResourceClaimTemplates with the alternatives in order, and pods that claim "
        "them, in place of resources of the nodes",
    )
    parser.add_argument(
        "--claims-driver",
        metavar="NAME",
        default="gpu.metagpu.io",
        help="the name of the DRA driver, as in the configuration: gpu.nvidia.com asks for MIG "
        "devices and whole GPUs by NVIDIA's DeviceClasses (default: %(default)s)",
    )
    parser.add_argument(
        "--explain", action="store_true", help="show what each node would give, not the manifest"
    )


def translation_of(
    args: argparse.Namespace, *, impossible: str = "warn", dra_resources: Iterable[str] = ()
) -> TranslationSettings:
    """Return the settings in resolved arguments.

    Args:
        args: the resolved arguments.
        impossible: what becomes of a pod that no node could serve.
        dra_resources: count where the option names none.

    Raises:
        ConfigError: a technique or a vocabulary is none.
    """
    return TranslationSettings(
        order=_listed(args, "order", TECHNIQUES, "techniques"),
        policy=args.policy,
        impossible=impossible,
        vocabularies=_listed(args, "vocabularies", VOCABULARIES, "vocabularies"),
        dra_resources=frozenset(_split(args.dra_resources) or dra_resources),
        **{setting: getattr(args, setting) for _, setting, _ in _NAMES},
    )


def _listed(
    args: argparse.Namespace, option: str, allowed: Iterable[str], objects: str
) -> tuple[str, ...]:
    names, known = _split(text := getattr(args, option)), tuple(allowed)
    if not names or set(names) - set(known):
        problem = f"{text!r} names no {objects}; write some of {', '.join(known)}"
        raise ConfigError(problem, ConfigReason.UNKNOWN_VALUE, file=f"--{option}")
    return names


def _split(text: str) -> tuple[str, ...]:
    return tuple(word for part in text.split(",") if (word := part.strip()))
