"""Options that the environment may set as well, and the settings that they make."""

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from metagpu.agent import paths
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.model.driver_roots import RootOptions
from metagpu.plugins.cluster.settings import ClusterSettings, Feature, resolve_settings
from metagpu.plugins.http.address import ListenAddress, parse_address

if TYPE_CHECKING:
    from metagpu.agent.config_source import ConfigSource

WEB_ADDRESS: Final = "127.0.0.1:9450"
"""The address of `--web` alone."""
_MIG_PARTED_FILE: Final = "MIG_PARTED_CONFIG_FILE"
CONFIG_HELP: Final = (
    "a configuration file, or a folder of profiles; also a file of MetaGPU, NVIDIA's device "
    "plugin, mig-parted or HAMi; repeat the option for files that belong together (default: 100 "
    "shares of every GPU)"
)


class Variable(msgspec.Struct, frozen=True):
    """An option's default: the value of an environment variable, or else `otherwise`.

    Attributes:
        names: the variables; the first that is set and not empty counts.
        otherwise: the value when no variable is set.
        convert: converts the variable's text to the value.
        allowed: the allowed texts, any text if empty.
    """

    names: tuple[str, ...]
    otherwise: Any = None
    convert: Callable[[str], Any] = str
    allowed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.otherwise)

    def value(self, environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - of any option
        """Return the value.

        Raises:
            ConfigError: if the variable's text is not allowed.
        """
        for name in self.names:
            if not (text := environment.get(name)):
                continue
            if self.allowed and text not in self.allowed:
                problem = f"{text!r} is unknown; allowed: {', '.join(self.allowed)}"
                raise ConfigError(
                    problem, ConfigReason.UNKNOWN_VALUE, file="environment", path=name
                )
            return self.convert(text)
        return self.otherwise


class _ConfigVariable(Variable, frozen=True):
    """The paths of the configuration; two variables of NVIDIA's go together."""

    def value(self, environment: Mapping[str, str]) -> list[Path] | None:
        """Return our own variable's paths, else the plugin's file and mig-parted's."""
        found: list[Path] = super().value(environment) or []
        if environment.get(self.names[0]) or not (layouts := environment.get(_MIG_PARTED_FILE)):
            return found or None
        return [*found, *(path for path in _path_list(layouts) if path not in found)]


def flag(name: str) -> Variable:
    """Return the default of a flag, whose variable is `true` or `false`."""
    return Variable(
        (name,), otherwise=False, convert=lambda text: text == "true", allowed=("true", "false")
    )


def resolve_environment(
    args: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> None:
    """Replace each option that was not given by its variable's value.

    Raises:
        ConfigError: if a variable's text is not allowed.
    """
    for name, value in list(vars(args).items()):
        if isinstance(value, Variable):
            setattr(args, name, value.value(os.environ if environment is None else environment))


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the configuration."""
    parser.add_argument(
        "--config",
        type=Path,
        action=_Repeated,
        metavar="PATH",
        default=_ConfigVariable(
            ("METAGPU_CONFIG", "CONFIG_FILE", "CONFIG_FILE_SRCDIR"), convert=_path_list
        ),
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
            "the profile of nodes without one (default: the one named default, or the only one)",
        ),
        (
            "--mig-config",
            ("METAGPU_MIG_CONFIG", "MIG_PARTED_SELECTED_CONFIG"),
            "this node's layout among those of a mig-parted file, or those made from the GPUs",
        ),
        (
            "--node-name",
            ("METAGPU_NODE_NAME", "NODE_NAME", "METAGPU_DEVICE_PLUGIN_NODENAME"),
            "this node's name in Kubernetes",
        ),
    ):
        action = parser.add_argument(
            option, metavar="NAME", default=Variable(variables), help=help_text
        )
        action.complete = partial(_choices, option)  # type: ignore[attr-defined] # see `Completer`


def _choices(option: str, args: argparse.Namespace, _: str) -> Iterable[object]:
    """Return the profiles, MIG layouts or nodes that the files of the line have."""
    from metagpu.agent.config_source import ConfigSource

    given = [*args.given.get("config", ()), *args.given.get("files", ())]
    paths = given or getattr(args, "config", None) or ()
    sources = [source for _, source in ConfigSource(tuple(paths)).variants()]
    if option == "--mig-config":
        return {source.context.mig_config for source in sources} - {None}
    if option == "--node-name":
        return {source.context.node for source in sources} - {None}
    return {source.choice.chosen for source in sources} - {None}


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder of the control socket."""
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        default=Variable(("METAGPU_RUN_DIR",), paths.RUN_DIR, convert=Path),
        help="the folder of the daemon's control socket (default: %(default)s)",
    )


def add_page_address(parser: argparse.ArgumentParser) -> None:
    """Add the option for the address of a page that a command serves to its user."""
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        type=_loopback,
        default="127.0.0.1:8400",
        help="an address of this machine's loopback, and a port; 0 is any free port "
        "(default: %(default)s)",
    )


def _loopback(text: str) -> ListenAddress:
    with suppress(ConfigError):
        if (address := parse_address(text)).is_loopback:
            return address
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a port of the loopback, and no other machine may reach this page; "
        "write one as in 127.0.0.1:8400"
    )


def add_kubelet(parser: argparse.ArgumentParser) -> None:
    """Add the options for the kubelet's folders."""
    parser.add_argument(
        "--kubelet-root",
        metavar="DIR",
        type=Path,
        default=Variable(("METAGPU_KUBELET_ROOT",), paths.KUBELET_ROOT, convert=Path),
        help="the kubelet's --root-dir (default: %(default)s)",
    )
    parser.add_argument(
        "--kubelet-dir",
        metavar="DIR",
        type=Path,
        default=Variable(("METAGPU_KUBELET_DIR",), paths.KUBELET_DIR, convert=Path),
        help="the kubelet's device-plugins folder, which no --root-dir moves "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--pod-resources",
        metavar="PATH",
        type=Path,
        default=Variable(("METAGPU_POD_RESOURCES",), convert=Path),
        help="the kubelet's PodResources socket (default: pod-resources/kubelet.sock below "
        "--kubelet-root)",
    )


def pod_resources_of(args: argparse.Namespace) -> Path:
    """Return the PodResources socket in resolved arguments."""
    named: Path | None = args.pod_resources
    return named or paths.pod_resources_socket(args.kubelet_root)


def add_driver_roots(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the driver and the device nodes are."""
    found = "default: found in the driver container, the host's folders below /host, or here"
    for option, variables, help_text in (
        (
            "--driver-root",
            ("NVIDIA_DRIVER_ROOT",),
            f"the root of the driver's files, by its path on the host ({found})",
        ),
        (
            "--container-driver-root",
            ("CONTAINER_DRIVER_ROOT", "DRIVER_ROOT_CTR_PATH"),
            "the same folder, by its path here (default: found at /driver-root or below /host)",
        ),
        (
            "--dev-root",
            ("NVIDIA_DEV_ROOT",),
            "the folder that has /dev with the device nodes, by its path on the host (as above)",
        ),
        (
            "--container-dev-root",
            ("DEV_ROOT_CTR_PATH",),
            "the same folder, by its path here (default: found as the driver's root)",
        ),
    ):
        own = f"METAGPU_{option.strip('-').replace('-', '_').upper()}"
        default = Variable((own, *variables), otherwise="", convert=_absolute)
        parser.add_argument(option, metavar="DIR", type=_absolute, default=default, help=help_text)


def driver_roots_of(args: argparse.Namespace) -> RootOptions:
    """Return what resolved arguments say of the driver's root and the root of /dev."""
    return RootOptions(
        args.driver_root, args.container_driver_root, args.dev_root, args.container_dev_root
    )


def add_kubeconfig(parser: argparse.ArgumentParser) -> None:
    """Add the option for the credentials of the API server."""
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        default=Variable(("METAGPU_KUBECONFIG", "KUBECONFIG"), convert=Path),
        help="address and credentials of the API server (default: the pod's service account)",
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options about the API server."""
    add_kubeconfig(parser)
    parser.add_argument(
        "--config-map",
        metavar="NAMESPACE/NAME",
        default=Variable(("METAGPU_CONFIG_MAP",)),
        help="the ConfigMap with the cluster's profiles; a label of the node chooses one",
    )
    parser.add_argument(
        "--cluster",
        metavar="FEATURES",
        default=Variable(("METAGPU_CLUSTER",), "all"),
        help="the used features of the API server: all, none, or of "
        f"{', '.join(Feature)}; all,-taint leaves one out (default: %(default)s)",
    )
    parser.add_argument(
        "--remove-labels-on-exit",
        action="store_true",
        default=flag("METAGPU_REMOVE_LABELS_ON_EXIT"),
        help="remove the node's labels and condition when the daemon ends",
    )
    parser.add_argument(
        "--drain-on-driver-upgrade",
        action="store_true",
        default=flag("METAGPU_DRAIN_ON_DRIVER_UPGRADE"),
        help="give no new shares while NVIDIA's GPU operator upgrades the driver, as the node's "
        "labels say, and name the pods that hold the driver",
    )


def add_metrics_address(parser: argparse.ArgumentParser) -> None:
    """Add the option for the address of metrics and probes."""
    parser.add_argument(
        "--metrics",
        metavar="ADDRESS",
        default=Variable(("METAGPU_METRICS",)),
        help="serve Prometheus metrics and the probes /healthz and /readyz on this address, such "
        "as 127.0.0.1:9400; :9400 is every address of the node (default: not served)",
    )


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """Add the options for the addresses of metrics, status and page."""
    add_metrics_address(parser)
    parser.add_argument(
        "--status-api",
        metavar="ADDRESS",
        default=Variable(("METAGPU_STATUS_API",)),
        help="serve the node's status to viewers of the cluster (kubectl metagpu) on this address, "
        "such as :9440; the API server reviews their tokens (default: not served)",
    )

    parser.add_argument(
        "--web",
        nargs="?",
        const=WEB_ADDRESS,
        metavar="ADDRESS",
        default=Variable(("METAGPU_WEB",)),
        help=f"serve a page about this node's GPUs on this address ({WEB_ADDRESS} if none is "
        "given); anywhere but on the loopback the API server reviews its clients' tokens (default: "
        "not served)",
    )


def metrics_of(args: argparse.Namespace) -> ListenAddress | None:
    """Return the address in resolved arguments, `None` if there is none.

    Raises:
        ConfigError: if the text is no address.
    """
    return parse_address(args.metrics) if args.metrics else None


def status_api_of(
    args: argparse.Namespace, settings: ClusterSettings | None
) -> ListenAddress | None:
    """Return the status API's address in resolved arguments, `None` if there is none.

    Raises:
        ConfigError: if the text is no address, or the API server is not used.
    """
    if not args.status_api:
        return None
    if settings is None:
        problem = (
            "the API server reviews the tokens of its clients; also give --node-name, outside a "
            "pod --kubeconfig, and a feature of --cluster"
        )
        raise ConfigError(problem, ConfigReason.CONFLICT, file="--status-api")
    return parse_address(args.status_api, "--status-api")


def web_of(args: argparse.Namespace, settings: ClusterSettings | None) -> ListenAddress | None:
    """Return the page's address in resolved arguments, `None` if there is none.

    Raises:
        ConfigError: if the text is no address, or others reach it and no API server is used.
    """
    if not args.web:
        return None
    address = parse_address(args.web, "--web")
    if settings is None and not address.is_loopback:
        problem = (
            f"others reach {address}, and the API server reviews their tokens: give an address "
            f"such as {WEB_ADDRESS}, or also --node-name, outside a pod --kubeconfig, and a "
            "feature of --cluster"
        )
        raise ConfigError(problem, ConfigReason.CONFLICT, file="--web")
    return address


def cluster_of(args: argparse.Namespace) -> ClusterSettings | None:
    """Return the settings of the API server in resolved arguments, `None` for none.

    Raises:
        ConfigError: if a feature needs a setting that is missing.
    """
    return resolve_settings(
        node=args.node_name,
        kubeconfig=args.kubeconfig,
        config_map=args.config_map,
        features=args.cluster,
        remove_labels=args.remove_labels_on_exit,
        drain_on_driver_upgrade=args.drain_on_driver_upgrade,
    )


def source_of(args: argparse.Namespace, paths: Sequence[Path] | None = None) -> "ConfigSource":
    """Return the source in resolved arguments; `paths` replace `--config` if given."""
    from metagpu.agent.config_source import ConfigSource
    from metagpu.compat.contract import ConversionContext
    from metagpu.core.config.profiles import ProfileChoice

    return ConfigSource(
        tuple(paths if paths is not None else args.config or ()),
        ProfileChoice(args.profile, args.default_profile),
        ConversionContext(args.node_name, args.mig_config, dict(os.environ)),
    )


class _Repeated(argparse.Action):
    """An option that may be repeated; argparse's own would append to the default."""

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


def _absolute(text: str) -> str:
    return str(Path(text).absolute())


def _path_list(text: str) -> list[Path]:
    return [Path(part) for part in text.split(os.pathsep)]
