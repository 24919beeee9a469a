"""Options that the environment may set as well, and those that say where the configuration is."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from metagpu.compat.contract import Circumstances
from metagpu.core.errors import ConfigError
from metagpu.core.profiles import Choice
from metagpu.plugins.cluster.settings import Feature, Settings, settings_of
from metagpu.plugins.metrics.address import Address, address_of
from metagpu.sources import Source

CONFIG_HELP: Final = (
    "a file, or a folder of profiles; also one of MetaGPU, NVIDIA's device plugin, mig-parted "
    "or HAMi; may be given again where files belong together (default: 100 shares of every GPU)"
)


class Variable(msgspec.Struct, frozen=True):
    """The default of an option: what a variable of the environment says, or else `otherwise`.

    Attributes:
        names: the variables, the first that is set and not empty counts.
        otherwise: the value when none is.
        convert: makes the value of the text.
        allowed: the texts that may be said, any if empty.
    """

    names: tuple[str, ...]
    otherwise: Any = None
    convert: Callable[[str], Any] = str
    allowed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.otherwise)

    def value(self, environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - of any option
        """Give the value.

        Raises:
            ConfigError: if the variable says what is not allowed.
        """
        for name in self.names:
            if not (text := environment.get(name)):
                continue
            if self.allowed and text not in self.allowed:
                problem = f"{text!r} is not known here; allowed: {', '.join(self.allowed)}"
                raise ConfigError(problem, file="environment", path=name)
            return self.convert(text)
        return self.otherwise


def settle(args: argparse.Namespace, environment: Mapping[str, str] | None = None) -> None:
    """Put the environment's values where no option was given.

    Raises:
        ConfigError: if a variable says what is not allowed.
    """
    for name, value in list(vars(args).items()):
        if isinstance(value, Variable):
            setattr(args, name, value.value(os.environ if environment is None else environment))


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the configuration is."""
    parser.add_argument(
        "--config",
        type=Path,
        action=_Several,
        metavar="PATH",
        default=Variable(("METAGPU_CONFIG", "CONFIG_FILE"), convert=_paths),
        help=CONFIG_HELP,
    )
    add_choice(parser)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose among profiles, MIG layouts and nodes."""
    for option, variables, help_text in (
        ("--profile", ("METAGPU_PROFILE",), "this node's profile, in a folder or a ConfigMap"),
        (
            "--default-profile",
            ("METAGPU_DEFAULT_PROFILE", "DEFAULT_CONFIG"),
            "the profile of nodes without one (default: default, or the only one)",
        ),
        (
            "--mig-config",
            ("METAGPU_MIG_CONFIG", "MIG_PARTED_SELECTED_CONFIG"),
            "which of mig-parted's layouts this node has",
        ),
        ("--node-name", ("METAGPU_NODE_NAME", "NODE_NAME"), "this node's name in Kubernetes"),
    ):
        parser.add_argument(option, metavar="NAME", default=Variable(variables), help=help_text)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what of the API server is used."""
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        default=Variable(("METAGPU_KUBECONFIG", "KUBECONFIG"), convert=Path),
        help="how to reach the API server (default: as a pod with a service account does)",
    )
    parser.add_argument(
        "--config-map",
        metavar="NAMESPACE/NAME",
        default=Variable(("METAGPU_CONFIG_MAP",)),
        help="profiles of the cluster; a label of the node chooses one",
    )
    parser.add_argument(
        "--cluster",
        metavar="USES",
        default=Variable(("METAGPU_CLUSTER",), "all"),
        help=f"what the API server is used for: all, none, or of {', '.join(Feature)}; all,-taint "
        "leaves one out (default: %(default)s)",
    )
    parser.add_argument(
        "--remove-labels-on-exit",
        action="store_true",
        default=Variable(
            ("METAGPU_REMOVE_LABELS_ON_EXIT",),
            otherwise=False,
            convert=lambda said: said == "true",
            allowed=("true", "false"),
        ),
        help="take the node's labels and condition back at the end",
    )


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where monitoring may ask."""
    parser.add_argument(
        "--metrics",
        metavar="ADDRESS",
        default=Variable(("METAGPU_METRICS",)),
        help="serve metrics for Prometheus and the probes /healthz and /readyz here, as in "
        "127.0.0.1:9400; :9400 is every address of the node (default: nowhere)",
    )


def metrics_of(args: argparse.Namespace) -> Address | None:
    """Give the address that settled arguments name, `None` if there is none.

    Raises:
        ConfigError: if it is no address.
    """
    return address_of(args.metrics) if args.metrics else None


def cluster_of(args: argparse.Namespace) -> Settings | None:
    """Give the uses of the API server that settled arguments name, `None` if there are none.

    Raises:
        ConfigError: if something was asked for that needs what is missing.
    """
    return settings_of(
        node=args.node_name,
        kubeconfig=args.kubeconfig,
        config_map=args.config_map,
        features=args.cluster,
        remove_labels=args.remove_labels_on_exit,
    )


def source_of(args: argparse.Namespace, paths: Sequence[Path] | None = None) -> Source:
    """Give the source that settled arguments name; `paths` instead of `--config` if given."""
    return Source(
        tuple(paths if paths is not None else args.config or ()),
        Choice(args.profile, args.default_profile),
        Circumstances(args.node_name, args.mig_config, dict(os.environ)),
    )


class _Several(argparse.Action):
    """Gathers what an option is given each time; argparse's own would add to the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - the shape of an Action
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,  # noqa: ARG002 - as above
    ) -> None:
        """Add one value."""
        given = getattr(namespace, self.dest)
        before = given if isinstance(given, list) else []
        setattr(namespace, self.dest, [*before, values])


def _paths(text: str) -> list[Path]:
    return [Path(part) for part in text.split(os.pathsep)]
