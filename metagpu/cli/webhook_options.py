"""The options of `metagpu webhook`, and the settings that they make."""

import argparse
from pathlib import Path
from typing import Final

from metagpu.cli.options import Variable, add_kubeconfig, add_metrics_address, metrics_of
from metagpu.cli.translation_options import add_translation, translation_of
from metagpu.plugins.http.address import parse_address
from metagpu.translation.values import TranslationSettings
from metagpu.webhook.settings import WebhookSettings

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
    add_translation(parser, TranslationSettings().vocabularies, _variable)
    parser.add_argument(
        "--impossible",
        choices=_IMPOSSIBLE,
        default=_variable("--impossible", _IMPOSSIBLE[0], _IMPOSSIBLE),
        help="admit pods that no node could serve or that cannot be read, or refuse them "
        "(default: %(default)s)",
    )
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
    add_kubeconfig(parser)
    add_metrics_address(parser)


def _variable(option: str, value: str, allowed: tuple[str, ...]) -> Variable:
    name = option.strip("-").replace("-", "_").upper()
    return Variable((f"METAGPU_WEBHOOK_{name}",), value, allowed=allowed)


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
        translation_of(args, impossible=args.impossible),
        events=args.events,
    )
