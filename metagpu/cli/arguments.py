"""The arguments of `metagpu`'s commands, their help and their examples."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from metagpu import __version__
from metagpu.agent import paths
from metagpu.cli.options import (
    Variable,
    add_choice,
    add_cluster,
    add_driver_roots,
    add_kubelet,
    add_metrics,
    add_run_dir,
    add_source,
    flag,
)
from metagpu.cli.parser import Parser, add_command, add_completion, add_reason, completed_by
from metagpu.display.options import add_json, add_output, add_watch

SIMULATE_HELP: Final = (
    "simulate a node instead of reading NVML: models and counts, such as a100-40gb:4,t4:2, also "
    "with driver=VERSION among them, or a YAML file that describes the node"
)
_LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_LOG_FORMATS: Final = ("auto", "json", "console")
_GPU_HELP: Final = "index, uuid or PCI bus id of the GPU"


def parser() -> argparse.ArgumentParser:
    """Build the parser; `command` of its result is the command's name."""
    program = Parser(
        prog="metagpu",
        description="Lets the pods of a Kubernetes node share its NVIDIA GPUs.",
        epilog="Try `metagpu demo`: it needs neither a GPU nor a cluster.",
    )
    program.add_argument("--version", action="version", version=f"metagpu {__version__}")
    commands = program.add_subparsers(
        title="commands", required=True, metavar="COMMAND", dest="command"
    )

    for add in (
        *(_run, _demo, _explain, _validate, _plan, _status),
        *(_acknowledge, _cordon, _uncordon, _install, _uninstall, _sim, _webhook),
    ):
        add(commands)
    add_completion(commands, program.prog)
    return program


def _run(commands: Any) -> None:  # noqa: ANN401 - argparse names the type of its sub-parsers privately
    command = add_command(
        commands,
        "run",
        "serve this node: offer its GPUs to the kubelet until stopped",
        "metagpu run --config metagpu.yaml\n"
        "  metagpu run --simulate a100-40gb:8 --with-kubelet --run-dir /tmp/run",
    )
    _add_node(command)
    add_kubelet(command)
    _add_folders(command)
    command.add_argument(
        "--nvidia-cdi-hook-path",
        metavar="PATH",
        default=Variable(
            ("METAGPU_NVIDIA_CDI_HOOK_PATH", "NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
            otherwise="",
        ),
        help="the program of the CDI specification's hooks, by its path on the host (default: "
        "nvidia-cdi-hook, found there)",
    )
    _add_log(command)
    command.add_argument(
        "--with-kubelet",
        action="store_true",
        default=flag("METAGPU_WITH_KUBELET"),
        help="also simulate a cluster of this node: a kubelet, a scheduler and an API server, "
        "which `metagpu sim pod add` and others use; needs --simulate",
    )
    command.add_argument(
        "--take-over",
        action="store_true",
        default=flag("METAGPU_TAKE_OVER"),
        help="prepare while another daemon runs, and take the node when that one ends; "
        "without this option, a second daemon ends with an error",
    )
    add_run_dir(command)
    add_metrics(command)
    add_cluster(command)


def _demo(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "demo",
        "show metagpu at work on simulated nodes with a simulated kubelet",
        "metagpu demo --json",
    )
    add_json(command)


def _explain(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "explain",
        "print what a configuration offers to the kubelet, and why, without serving it",
        "metagpu explain --config metagpu.yaml --simulate a100-40gb:4,t4:2\n"
        "  metagpu explain --config metagpu.yaml --claim pod.yaml",
    )
    _add_node(command)
    add_json(command)
    command.add_argument(
        "--claim",
        metavar="FILE",
        action="append",
        default=[],
        help="also print what the ResourceClaims of a manifest, and of its pods, would get on this "
        "node without any other pod, or why they get nothing; `-` for stdin",
    )
    command.add_argument(
        "--topology", action="store_true", help="also print how the GPUs are connected"
    )


def _validate(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "validate",
        "check configuration files; print line, path and fix of every error. What GPUs provide of "
        "them is shown by metagpu explain, on a node or with --simulate MODELS",
        "metagpu validate metagpu.yaml\n"
        "  metagpu validate --convert nvidia-time-slicing-config.yaml --profile slice-4\n"
        "  kubectl get deviceclasses -o yaml | metagpu validate metagpu.yaml --device-classes -",
    )
    command.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="a file, a folder of profiles, or the manifest of a ConfigMap, in any known format; "
        "`-` is stdin",
    )
    either = command.add_mutually_exclusive_group()
    either.add_argument(
        "--convert",
        action="store_true",
        help="print the configuration of all files together as metagpu/v1",
    )
    either.add_argument(
        "--device-classes",
        metavar="FILE",
        action="append",
        default=[],
        help="also refuse a resource of the device plugin that a DeviceClass of this manifest has "
        "as its extendedResourceName, where a pool has `api: dra`; `-` for stdin",
    )
    add_output(command)
    add_choice(command)


def _plan(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "plan",
        "print what a configuration would change, without changing anything",
        "metagpu plan --config new.yaml\n"
        "  metagpu plan --from old.yaml --config new.yaml --simulate a100-40gb:4",
    )
    _add_node(command)
    command.add_argument(
        "--from",
        dest="before",
        type=Path,
        action="append",
        metavar="PATH",
        help="compare with this configuration instead of the running daemon's",
    )
    add_json(command)
    add_run_dir(command)


def _status(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "status",
        "print the running daemon's offers, GPUs with owner and health, and leases",
        "metagpu status --json",
    )
    add_json(command)
    add_watch(command)
    add_run_dir(command)


def _acknowledge(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "acknowledge",
        "put a GPU with its MIG devices, or one MIG device, back into service, if the GPU passes "
        "the device check",
        "metagpu acknowledge 3",
    )
    _add_gpu(command, ", or uuid of a MIG device")
    add_run_dir(command)


def _cordon(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "cordon",
        "stop giving new shares of a GPU; running pods stay. A cordon lasts until uncordon or a "
        "reboot: to exclude a GPU for good, leave it out of the configuration's pools",
        'metagpu cordon 3 --reason "replace the fan"',
    )
    _add_gpu(command)
    add_reason(command)
    add_run_dir(command)


def _uncordon(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "uncordon",
        "give shares of a cordoned GPU again",
        "metagpu uncordon 3",
    )
    _add_gpu(command)
    add_run_dir(command)


def _add_gpu(command: argparse.ArgumentParser, more: str = "") -> None:
    action = command.add_argument("gpu", help=f"{_GPU_HELP}{more}", metavar="GPU")
    completed_by(action, _gpus)


def _gpus(args: argparse.Namespace, _: str) -> Iterable[object]:
    """Return the indices of the GPUs that the daemon has."""
    from metagpu.plugins.control.client import send_request

    return (gpu["index"] for gpu in send_request(args.run_dir, {"command": "status"})["gpus"])


def _install(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "install",
        "write the files of metagpu as a service of this host. What is there stays as it is",
        "metagpu install --systemd",
    )
    command.add_argument("--systemd", action="store_true", required=True, help="units of systemd")
    command.add_argument(
        "--mps", action="store_true", help="also the drop-in that pools with MPS need"
    )
    command.add_argument(
        "--root",
        metavar="DIR",
        type=Path,
        default=Path("/"),
        help="the root of the system to install into (default: %(default)s)",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="write nothing; list what is missing"
    )


def _sim(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "sim",
        "change the simulated node of a running `metagpu run --simulate`, and with "
        "--with-kubelet its cluster",
        "metagpu sim xid 0 79\n  metagpu sim show\n  metagpu sim pod add a cnvrg.io/metagpu=30",
    )
    add_run_dir(command)
    command.add_late = _add_sim_commands


def _webhook(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "webhook",
        "serve a mutating admission webhook: translate requests in HAMi's terms "
        "(nvidia.com/gpumem) into what the nodes offer",
        "metagpu webhook --certificate /etc/metagpu/webhook --metrics :9400",
    )
    command.add_late = _add_webhook_options


def _add_webhook_options(command: Parser) -> None:
    from metagpu.cli.webhook_options import add_webhook

    add_webhook(command)
    _add_log(command)


def _add_sim_commands(command: Parser) -> None:
    from metagpu.sim.commands.arguments import add_arguments  # it loads the simulator

    commands: Any = command.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_arguments(commands)


def _uninstall(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "uninstall",
        "list what metagpu left on this node and at the API server, and with --yes remove it. "
        "Running pods go on, and what they use stays. No daemon may run meanwhile",
        "metagpu uninstall --node-name gpu-1 --kubeconfig /etc/kubernetes/admin.conf\n"
        "  metagpu uninstall --yes",
    )
    command.add_argument(
        "-y", "--yes", action="store_true", help="remove what is listed without it"
    )
    command.add_argument(
        "--force",
        action="store_true",
        help="remove also what running pods use: their programs may fail, and containers that "
        "start again too",
    )
    add_output(command)
    command.add_argument(
        "--root",
        metavar="DIR",
        type=Path,
        default=Path("/"),
        help="the root of the system that has the service's files; the variables in its "
        "etc/metagpu/metagpu.env count as given (default: %(default)s)",
    )
    _add_node(command)
    add_kubelet(command)
    _add_folders(command)
    add_run_dir(command)
    add_cluster(command)


def _add_log(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--log-level",
        default=Variable(("METAGPU_LOG_LEVEL",), "info", allowed=_LOG_LEVELS),
        choices=_LOG_LEVELS,
        help="the lowest level that is logged (default: %(default)s)",
    )
    command.add_argument(
        "--log-format",
        default=Variable(("METAGPU_LOG_FORMAT",), "auto", allowed=_LOG_FORMATS),
        choices=_LOG_FORMATS,
        help="json, or console for people; auto is console on a terminal (default: %(default)s)",
    )


def _add_folders(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--pod-dir",
        metavar="DIR",
        type=Path,
        default=Variable(("METAGPU_POD_DIR",), convert=Path),
        help="the folder mounted into containers with shares, with mgctl and its socket; the same "
        f"path here and for the container runtime (default: {paths.POD_DIR}; with --run-dir, the "
        "folder pod in it)",
    )
    command.add_argument(
        "--cdi-dir",
        metavar="DIR",
        type=Path,
        default=Variable(("METAGPU_CDI_DIR",), paths.CDI_DIR, convert=Path),
        help="the folder of the CDI specification, written where a configuration gives GPUs by "
        "CDI; the container runtime has to read it (default: %(default)s)",
    )


def _add_node(command: argparse.ArgumentParser) -> None:
    add_source(command)
    command.add_argument(
        "--simulate",
        metavar="MODELS|FILE",
        default=Variable(("METAGPU_SIMULATE",)),
        help=SIMULATE_HELP,
    )
    add_driver_roots(command)
