"""The options of `metagpu webhook`, and the settings that they make."""

import argparse
from pathlib import Path
from typing import Final

from metagpu.cli.options import Variable, add_kubeconfig, add_metrics_address, metrics_of
from metagpu.cli.resource_names import add_resource_names, resource_names_of
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.plugins.http.address import parse_address
from metagpu.translation.values import POLICIES, TECHNIQUES, TranslationSettings
from metagpu.webhook.settings import WebhookSettings

_DEFAULTS: Final = TranslationSettings()
_IMPOSSIBLE: Final = ("warn", "refuse")


def add_webhook(parser: argparse.ArgumentParser) -> None:
    """Add the options of the webhook."""
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        default=Variable(("METAGPU_WEBHOOK_ADDRESS",), ":8443"),
        help="the address of the reviews, by TLS (default: %(default)s)",
    )
    parser.add_argument(
        "--certificate",
        metavar="DIR",
        type=Path,
        default=Variable(
            ("METAGPU_WEBHOOK_CERTIFICATE",), Path("/etc/metagpu/webhook"), convert=Path
        ),
        help="the folder with tls.crt and tls.key, as of a mounted Secret; they are read again "
        "when they change (default: %(default)s)",
    )
    _add_translation(parser)
    add_kubeconfig(parser)
    add_metrics_address(parser)


def _add_translation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--order",
        metavar="TECHNIQUES",
        default=Variable(("METAGPU_WEBHOOK_ORDER",), ",".join(_DEFAULTS.order)),
        help="the techniques for pods that name none, the preferred one first, of "
        f"{', '.join(sorted(TECHNIQUES))} (default: %(default)s)",
    )
    for option, setting, allowed, help_text in (
        ("--policy", "policy", POLICIES, "the choice of nodes for pods that name no policy"),
        (
            "--impossible",
            "impossible",
            _IMPOSSIBLE,
            "admit pods that no node could serve or that cannot be read, or refuse them",
        ),
    ):
        parser.add_argument(
            option,
            choices=allowed,
            default=Variable(
                (f"METAGPU_WEBHOOK_{setting.upper()}",),
                getattr(_DEFAULTS, setting),
                allowed=allowed,
            ),
            help=f"{help_text} (default: %(default)s)",
        )
    parser.add_argument(
        "--dra-resources",
        metavar="NAMES",
        default=Variable(("METAGPU_WEBHOOK_DRA_RESOURCES",), ""),
        help="names in limits that DRA serves, and no Node counts: requests for them are left as "
        "they are",
    )
    add_resource_names(parser, _DEFAULTS.vocabularies, _variable)
    parser.add_argument(
        "--events",
        action="store_true",
        default=Variable(
            ("METAGPU_WEBHOOK_EVENTS",),
            otherwise=False,
            convert="true".__eq__,
            allowed=("true", "false"),
        ),
        help="write an Event about the controller of a pod that no node could serve; needs the "
        "right to create and patch Events",
    )


def _variable(option: str, name: str) -> Variable:
    return Variable((f"METAGPU_WEBHOOK_{option.strip('-').replace('-', '_').upper()}",), name)


def webhook_of(args: argparse.Namespace) -> WebhookSettings:
    """Return the settings in resolved arguments.

    Raises:
        ConfigError: an address or a technique is none.
    """
    return WebhookSettings(
        parse_address(args.address, "--address"),
        args.certificate,
        metrics_of(args),
        args.kubeconfig,
        TranslationSettings(
            order=_order_of(args.order),
            policy=args.policy,
            impossible=args.impossible,
            dra_resources=frozenset(_listed(args.dra_resources)),
            **resource_names_of(args),
        ),
        events=args.events,
    )


def _order_of(text: str) -> tuple[str, ...]:
    names = _listed(text)
    known = sorted(TECHNIQUES)
    if not names or set(names) - set(known):
        problem = f"{text!r} is not an order of techniques; write some of {', '.join(known)}"
        raise ConfigError(problem, ConfigReason.UNKNOWN_VALUE, file="--order")
    return names


def _listed(text: str) -> tuple[str, ...]:
    return tuple(word for part in text.split(",") if (word := part.strip()))
