"""The command line of `metagpu sim` about a simulated cluster."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from metagpu.compat.kube_documents import read_documents
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.config.units import Bytes, Duration
from metagpu.core.errors import describe_error
from metagpu.display.options import add_output
from metagpu.sim.cluster.claim_manifest import ClaimManifest
from metagpu.sim.cluster.document_forms import check_document
from metagpu.sim.cluster.pod_manifest import PodManifest
from metagpu.sim.commands.cluster_commands import (
    AnyClusterCommand,
    ApplyCommand,
    BurstCommand,
    ClaimAddCommand,
    ClaimEndCommand,
    ClaimListCommand,
    ConfigMapCommand,
    DeleteCommand,
    EventListCommand,
    KubeletCommand,
    NodeLabelCommand,
    NodeShowCommand,
    PluginCommand,
    PodAddCommand,
    PodEndCommand,
    PodListCommand,
    ProcessEndCommand,
    ProcessListCommand,
    ProcessStartCommand,
)
from metagpu.sim.commands.node_commands import ProcessCommand
from metagpu.sim.machine.gpu import SimError

SubParsers = Any  # argparse names the type of its sub-parsers privately
Builder = Callable[[argparse.Namespace], AnyClusterCommand | ProcessCommand]
_OfFile = ApplyCommand | DeleteCommand

_REQUEST: Final = "RESOURCE=N"


def add_cluster_arguments(subparsers: SubParsers) -> None:
    """Add one parser per command; `args.build(args)` of their results is the command."""
    for add in (
        _process,
        _manifest,
        _pod,
        _claim,
        _burst,
        _kubelet,
        _node,
        _event,
        _config_map,
        _plugin,
    ):
        add(subparsers)


def _manifest(subparsers: SubParsers) -> None:
    kinds: tuple[type[_OfFile], ...] = (ApplyCommand, DeleteCommand)
    for kind in kinds:
        name = str(kind.__struct_config__.tag)
        add = _command(subparsers, name, kind, partial(_of_file, kind), f"{name} -f demo.yaml")
        help_text = "a YAML or JSON file, - for stdin"
        add.add_argument("-f", "--filename", metavar="FILE", required=True, help=help_text)
        _namespace(add)


def _of_file(kind: type[_OfFile], args: argparse.Namespace) -> _OfFile:
    """Read and check a manifest; an error names the line of its document.

    Raises:
        ConfigError: the file or an object is not valid.
    """
    found = read_documents(args.filename)
    for document in found:
        try:
            check_document(document.value)
        except SimError as error:
            raise document.error(str(error), ConfigReason.INVALID_VALUE) from error
    return kind(tuple(kube_document.value for kube_document in found), args.namespace)


def _pod(subparsers: SubParsers) -> None:
    commands = _group(subparsers, "pod", "Create, end and list pods.")

    add = _command(
        commands, "pod add", PodAddCommand, _pod_add, "pod add train cnvrg.io/metagpu=30"
    )
    add.add_argument("name", metavar="NAME", help="name of the pod")
    add.add_argument("requests", metavar=_REQUEST, nargs="+", help="resources, and how many")
    _namespace(add)
    add.add_argument(
        "--annotation",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="an annotation of the pod; repeat the option for more",
    )
    add.add_argument(
        "--for",
        dest="seconds",
        metavar="TIME",
        help="the pod succeeds after this time, such as 30s (default: it runs until ended)",
    )

    end = _command(commands, "pod end", PodEndCommand, _pod_end, "pod end train")
    end.add_argument("name", metavar="NAME", help="name of the pod")
    _namespace(end)

    _output(_command(commands, "pod list", PodListCommand, lambda _: PodListCommand(), "pod list"))


def _pod_add(args: argparse.Namespace) -> PodAddCommand:
    counts = dict(_request(text) for text in args.requests)
    annotations = dict(_pair(text, "annotation", "KEY=VALUE") for text in args.annotation)
    seconds = None if args.seconds is None else _seconds(args.seconds)
    return PodAddCommand(PodManifest(args.name, counts, args.namespace, annotations, seconds))


def _pod_end(args: argparse.Namespace) -> PodEndCommand:
    return PodEndCommand(args.name, args.namespace)


def _process(subparsers: SubParsers) -> None:
    commands = _group(subparsers, "process", "Start, end and list processes on GPUs.")

    example = "process start --pod train --memory 8Gi --load 40"
    start = _command(commands, "process start", ProcessStartCommand, _process_start, example)
    _of_process(start)
    start.add_argument("--container", metavar="NAME", default="", help="of the pod (default: any)")
    text = "memory on the GPU, such as 8Gi (default: unknown to NVML)"
    start.add_argument("--memory", metavar="AMOUNT", help=text)
    text = "SM utilization, such as 40 (default: 0)"
    start.add_argument("--load", metavar="PERCENT", type=_percent, default=0, help=text)
    for option, what in (("--gi", "the MIG GPU instance"), ("--ci", "the compute instance in it")):
        start.add_argument(option, metavar="N", type=int, help=f"ID of {what}, without --pod")

    example = "process end --pod train"
    _of_process(_command(commands, "process end", ProcessEndCommand, _process_end, example))
    every = ProcessListCommand()
    _output(_command(commands, "process list", ProcessListCommand, lambda _: every, "process list"))


def _of_process(command: argparse.ArgumentParser) -> None:
    text = "index or UUID of the GPU (with --pod: of several that the pod sees)"
    command.add_argument("gpu", metavar="GPU", nargs="?", default="", help=text)
    text = "ID of a process of this machine or a made-up one, without --pod"
    command.add_argument("pid", metavar="PID", nargs="?", type=int, help=text)
    command.add_argument("--pod", metavar="NAME", default="", help="the pod of the process")
    _namespace(command)


def _process_start(args: argparse.Namespace) -> AnyClusterCommand | ProcessCommand:
    try:
        memory = None if args.memory is None else int(Bytes.parse(args.memory))
    except ValueError as error:
        raise ConfigError(str(error), ConfigReason.INVALID_VALUE) from None
    if not _in_pod(args):
        process = args.gpu, args.pid, memory, args.gi, args.ci, args.load
        return ProcessCommand("start", *process)
    if args.gi is not None or args.ci is not None:
        problem = "the pod has a MIG instance of its own; leave out --gi and --ci"
        raise ConfigError(problem, ConfigReason.CONFLICT)
    place = args.pod, args.namespace, args.container, args.gpu
    return ProcessStartCommand(*place, memory, args.load)


def _process_end(args: argparse.Namespace) -> AnyClusterCommand | ProcessCommand:
    if not _in_pod(args):
        return ProcessCommand("end", args.gpu, args.pid)
    return ProcessEndCommand(args.pod, args.namespace)


def _in_pod(args: argparse.Namespace) -> bool:
    """Return whether a process is one of a pod, and not one by its GPU and PID.

    Raises:
        ConfigError: the command line names neither or both.
    """
    if args.pod == "" and args.pid is None:
        problem = "name a pod by --pod, or a GPU and a PID"
        raise ConfigError(problem, ConfigReason.MISSING)
    if args.pod and args.pid is not None:
        problem = "a process in a pod gets its PID; leave out PID, or --pod"
        raise ConfigError(problem, ConfigReason.CONFLICT)
    return bool(args.pod)


def _percent(text: str) -> int:
    number = text.removesuffix("%")
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage; write one like 40%")
    return int(number)


def _claim(subparsers: SubParsers) -> None:
    commands = _group(subparsers, "claim", "Create, end and list ResourceClaims.")

    example = "claim add half --class fraction.metagpu.io --capacity shares=50"
    add = _command(commands, "claim add", ClaimAddCommand, _claim_add, example)
    add.add_argument("name", metavar="NAME", nargs="?", help="name of the claim and of its pod")
    add.add_argument("--class", dest="device_class", metavar="CLASS", help="the DeviceClass")
    for option, metavar, help_text in (
        ("--capacity", "NAME=AMOUNT", "an amount of a capacity, such as shares=50 or memory=10Gi"),
        ("--cel", "EXPRESSION", "a condition that the devices fulfil"),
    ):
        text = f"{help_text}; repeat the option for more"
        add.add_argument(option, metavar=metavar, action="append", default=[], help=text)
    add.add_argument(
        "--count", metavar="N", type=int, default=1, help="number of devices (default: 1)"
    )
    add.add_argument(
        "-f",
        "--filename",
        metavar="FILE",
        help="in place of all this: a manifest, as for `metagpu sim apply`",
    )
    _namespace(add)

    end = _command(commands, "claim end", ClaimEndCommand, _claim_end, "claim end half")
    end.add_argument("name", metavar="NAME", help="name of the claim")
    _namespace(end)

    every = ClaimListCommand()
    _output(_command(commands, "claim list", ClaimListCommand, lambda _: every, "claim list"))


def _claim_add(args: argparse.Namespace) -> AnyClusterCommand:
    if (args.filename is None) == (args.name is None):
        problem = "give either a name with --class, or a file with -f"
        raise ConfigError(problem, ConfigReason.CONFLICT)
    if args.filename is not None:
        return _of_file(ApplyCommand, args)
    if args.device_class is None:
        problem = "a claim needs a DeviceClass; add --class, for example fraction.metagpu.io"
        raise ConfigError(problem, ConfigReason.MISSING)
    amounts = dict(_pair(text, "amount", "NAME=AMOUNT") for text in args.capacity)
    return ClaimAddCommand(
        ClaimManifest(
            args.name,
            args.device_class,
            args.count,
            amounts,
            tuple(args.cel),
            args.namespace,
        )
    )


def _claim_end(args: argparse.Namespace) -> ClaimEndCommand:
    return ClaimEndCommand(args.name, args.namespace)


def _burst(subparsers: SubParsers) -> None:
    example = "burst 20 cnvrg.io/metagpu=30 --sizes 10..150"
    command = _command(subparsers, "burst", BurstCommand, _burst_of, example)
    command.add_argument("count", metavar="N", type=int, help="number of pods")
    command.add_argument(
        "request", metavar=_REQUEST, help="the resource, and how many for each pod"
    )
    command.add_argument(
        "--sizes", metavar="MIN..MAX", help="a random number for each pod, in place of N"
    )
    command.add_argument(
        "--seed", metavar="SEED", type=int, help="the same sizes for the same seed"
    )
    _namespace(command)
    _output(command, as_table=False)


def _burst_of(args: argparse.Namespace) -> BurstCommand:
    resource, count = _request(args.request)
    sizes = (count, count)
    if args.sizes is not None:
        least, separator, most = args.sizes.partition("..")
        if not (separator and least.isdecimal() and most.isdecimal()):
            problem = f"{args.sizes!r} is not a range of sizes; write one like 10..150"
            raise ConfigError(problem, ConfigReason.INVALID_VALUE)
        sizes = (int(least), int(most))
    return BurstCommand(args.count, resource, sizes, args.namespace, args.seed)


def _kubelet(subparsers: SubParsers) -> None:
    command = _command(subparsers, "kubelet", KubeletCommand, _kubelet_of, "kubelet restart")
    changes = ("restart", "forget", "stop")
    command.add_argument("change", metavar="|".join(changes), choices=changes, help="the change")


def _kubelet_of(args: argparse.Namespace) -> KubeletCommand:
    return KubeletCommand(args.change)


def _node(subparsers: SubParsers) -> None:
    commands = _group(subparsers, "node", "Show the Node object, and label it.")
    label = _command(
        commands, "node label", NodeLabelCommand, _node_label, "node label metagpu.io/config=large"
    )
    label.add_argument(
        "labels", metavar="KEY=VALUE|KEY-", nargs="+", help="labels to set, or to remove"
    )
    example = "node show -o json"
    _output(_command(commands, "node show", NodeShowCommand, lambda _: NodeShowCommand(), example))


def _node_label(args: argparse.Namespace) -> NodeLabelCommand:
    labels: dict[str, str | None] = {}
    for text in args.labels:
        key, separator, value = text.partition("=")
        if separator and key:
            labels[key] = value
        elif text.endswith("-") and text != "-":
            labels[text[:-1]] = None
        else:
            problem = f"{text!r} is not a label; write KEY=VALUE, or KEY- to remove it"
            raise ConfigError(problem, ConfigReason.INVALID_VALUE)
    return NodeLabelCommand(labels)


def _event(subparsers: SubParsers) -> None:
    commands = _group(subparsers, "event", "List the Events of the Node and of pods.")
    _output(
        _command(
            commands, "event list", EventListCommand, lambda _: EventListCommand(), "event list"
        )
    )


def _config_map(subparsers: SubParsers) -> None:
    command = _command(
        subparsers,
        "config-map",
        ConfigMapCommand,
        _config_map_of,
        "config-map kube-system/metagpu large.yaml small.yaml",
    )
    command.add_argument("name", metavar="NAMESPACE/NAME", help="the ConfigMap")
    command.add_argument(
        "files", metavar="FILE", type=Path, nargs="+", help="files; their names are the keys"
    )


def _config_map_of(args: argparse.Namespace) -> ConfigMapCommand:
    namespace, separator, name = args.name.partition("/")
    if not separator:
        problem = f"{args.name!r} names no ConfigMap; write NAMESPACE/NAME"
        raise ConfigError(problem, ConfigReason.INVALID_VALUE)
    return ConfigMapCommand(namespace, name, {file.name: _text(file) for file in args.files})


def _plugin(subparsers: SubParsers) -> None:
    example = "plugin start cnvrg.io/metagpu --devices 4"
    command = _command(subparsers, "plugin", PluginCommand, _plugin_of, example)
    changes = ("start", "end")
    command.add_argument("change", metavar="|".join(changes), choices=changes, help="the change")
    command.add_argument(
        "resource", metavar="RESOURCE", nargs="?", default="", help="what it registers"
    )
    command.add_argument(
        "--devices", metavar="N", type=int, default=1, help="number of its devices (default: 1)"
    )


def _plugin_of(args: argparse.Namespace) -> PluginCommand:
    return PluginCommand(args.change, args.resource, args.devices)


# ---- shared --------------------------------------------------------------------------------


def _group(subparsers: SubParsers, name: str, summary: str) -> SubParsers:
    command = subparsers.add_parser(name, help=summary, description=summary)
    return command.add_subparsers(title="commands", required=True, metavar="COMMAND")


def _command(
    subparsers: SubParsers, path: str, kind: type, build: Builder, example: str
) -> argparse.ArgumentParser:
    summary = (kind.__doc__ or "").strip()
    command: argparse.ArgumentParser = subparsers.add_parser(
        path.rpartition(" ")[2],
        help=summary,
        description=summary,
        epilog=f"example: metagpu sim {example}",
    )
    command.set_defaults(build=build)
    # As behind `sim`; what is not given here does not replace what was given there.
    command.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        default=argparse.SUPPRESS,
        help="the folder of the daemon's control socket",
    )
    return command


def _namespace(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-n",
        "--namespace",
        metavar="NAMESPACE",
        default="default",
        help="namespace (default: default)",
    )


def _output(command: argparse.ArgumentParser, *, as_table: bool = True) -> None:
    add_output(command)
    command.set_defaults(as_table=as_table)


def _request(text: str) -> tuple[str, int]:
    resource, separator, count = text.partition("=")
    if not (resource and separator and count.isdecimal()):
        problem = f"{text!r} is not a request; write {_REQUEST}, as in cnvrg.io/metagpu=30"
        raise ConfigError(problem, ConfigReason.INVALID_VALUE)
    return resource, int(count)


def _pair(text: str, kind: str, form: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise ConfigError(f"{text!r} is not an {kind}; write {form}", ConfigReason.INVALID_VALUE)
    return key, value


def _seconds(text: str) -> float:
    try:
        return float(Duration.parse(text))
    except ValueError as error:
        raise ConfigError(str(error), ConfigReason.INVALID_VALUE) from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        problem = f"cannot read {file}: {describe_error(error)}"
        raise ConfigError(problem, ConfigReason.UNREADABLE) from error
