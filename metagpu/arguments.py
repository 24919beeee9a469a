"""How the commands of `metagpu` are called: their arguments, help and examples."""

import argparse
from pathlib import Path
from textwrap import fill
from typing import Any, Final

from metagpu import __version__
from metagpu.command_line import Parser
from metagpu.core import cdi
from metagpu.options import Variable, add_choice, add_cluster, add_metrics, add_source
from metagpu.plugins import control, kubelet_directory, pod_folder, podresources

SIMULATE_HELP: Final = (
    "simulate a node instead of reading NVML: boards and counts as in a100-40gb:4,t4:2, or a YAML "
    "file that describes the node"
)
_LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_LOG_FORMATS: Final = ("auto", "json", "console")
_GPU_HELP: Final = "index, uuid or PCI bus id"


def parser() -> argparse.ArgumentParser:
    """Build the parser; what it reads names the `command`."""
    made = Parser(
        prog="metagpu",
        description="Lets the pods of a Kubernetes node share its NVIDIA GPUs.",
        epilog="Try `metagpu demo`: it needs neither a GPU nor a cluster.",
    )
    made.add_argument("--version", action="version", version=f"metagpu {__version__}")
    commands = made.add_subparsers(
        title="commands", required=True, metavar="COMMAND", dest="command"
    )

    for add in (
        *(_run, _demo, _explain, _validate, _plan, _status),
        *(_acknowledge, _cordon, _uncordon, _sim),
    ):
        add(commands)
    return made


def _run(commands: Any) -> None:  # noqa: ANN401 - argparse names the type of its sub-parsers privately
    it = _command(
        commands,
        "run",
        "serve this node: offer its GPUs to the kubelet until stopped",
        "metagpu run --config metagpu.yaml\n"
        "  metagpu run --simulate a100-40gb:8 --kubelet-dir /tmp/kubelet --run-dir /tmp/run",
    )
    _add_node(it)
    it.add_argument(
        "--kubelet-dir",
        metavar="DIR",
        type=Path,
        default=Variable(
            ("METAGPU_KUBELET_DIR",), kubelet_directory.DEFAULT_DIRECTORY, convert=Path
        ),
        help="the kubelet's device-plugins folder (default: %(default)s)",
    )
    it.add_argument(
        "--pod-resources",
        metavar="PATH",
        type=Path,
        default=Variable(("METAGPU_POD_RESOURCES",), podresources.DEFAULT_SOCKET, convert=Path),
        help="the kubelet's PodResources socket (default: %(default)s)",
    )
    it.add_argument(
        "--dev-root",
        metavar="DIR",
        type=Path,
        default=Variable(("METAGPU_DEV_ROOT",), convert=Path),
        help="where the host's /dev stands, as seen from here and from the container runtime",
    )
    it.add_argument(
        "--pod-dir",
        metavar="DIR",
        type=Path,
        default=Variable(("METAGPU_POD_DIR",), convert=Path),
        help="the folder that containers with shares see, with mgctl and its socket; the same path "
        f"here and for the container runtime (default: {pod_folder.DEFAULT_POD_DIR}; with "
        "--run-dir, pod in it)",
    )
    it.add_argument(
        "--cdi-dir",
        metavar="DIR",
        type=Path,
        default=Variable(("METAGPU_CDI_DIR",), cdi.DEFAULT_DIR, convert=Path),
        help="where the CDI specification is written, if a configuration gives GPUs by CDI; one of "
        "the folders that the container runtime reads (default: %(default)s)",
    )
    it.add_argument(
        "--log-level",
        default=Variable(("METAGPU_LOG_LEVEL",), "info", allowed=_LOG_LEVELS),
        choices=_LOG_LEVELS,
        help="the least that is told (default: %(default)s)",
    )
    it.add_argument(
        "--log-format",
        default=Variable(("METAGPU_LOG_FORMAT",), "auto", allowed=_LOG_FORMATS),
        choices=_LOG_FORMATS,
        help="json, or console for people; auto asks whether a terminal listens",
    )
    _add_run_dir(it)
    add_metrics(it)
    add_cluster(it)


def _demo(commands: Any) -> None:  # noqa: ANN401 - as above
    it = _command(
        commands,
        "demo",
        "show the main jobs on simulated nodes with a kubelet in them",
        "metagpu demo --json",
    )
    it.add_argument("--json", action="store_true", help="print what happened as JSON")


def _explain(commands: Any) -> None:  # noqa: ANN401 - as above
    it = _command(
        commands,
        "explain",
        "say what the kubelet would be offered, and why, without starting anything",
        "metagpu explain --config metagpu.yaml --simulate a100-40gb:4,t4:2",
    )
    _add_node(it)
    it.add_argument("--json", action="store_true", help="print JSON")
    it.add_argument("--topology", action="store_true", help="also say how the GPUs are connected")


def _validate(commands: Any) -> None:  # noqa: ANN401 - as above
    it = _command(
        commands,
        "validate",
        "check configuration files; name line, path and mend of what is wrong",
        "metagpu validate metagpu.yaml\n"
        "  metagpu validate --convert nvidia-time-slicing-config.yaml --profile slice-4",
    )
    it.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="a file, a folder of profiles, or the manifest of a ConfigMap; of any format",
    )
    it.add_argument(
        "--convert",
        action="store_true",
        help="print the configuration, of all these files together, as metagpu/v1",
    )
    add_choice(it)


def _plan(commands: Any) -> None:  # noqa: ANN401 - as above
    it = _command(
        commands,
        "plan",
        "say what a configuration would change, without changing anything",
        "metagpu plan --config new.yaml\n"
        "  metagpu plan --from old.yaml --config new.yaml --simulate a100-40gb:4",
    )
    _add_node(it)
    it.add_argument(
        "--from",
        dest="before",
        type=Path,
        action="append",
        metavar="PATH",
        help="compare with this configuration instead of with the running daemon",
    )
    it.add_argument("--json", action="store_true", help="print JSON")
    _add_run_dir(it)


def _status(commands: Any) -> None:  # noqa: ANN401 - as above
    it = _command(
        commands,
        "status",
        "say what the running daemon offers, who has each GPU, which are healthy, who holds what",
        "metagpu status --json",
    )
    it.add_argument("--json", action="store_true", help="print JSON")
    _add_run_dir(it)


def _acknowledge(commands: Any) -> None:  # noqa: ANN401 - as above
    it = _command(
        commands,
        "acknowledge",
        "take a GPU with its MIG devices, or one of these, back into service on your word, if the "
        "GPU passes the device check",
        "metagpu acknowledge 3",
    )
    it.add_argument("gpu", help=f"{_GPU_HELP}; or uuid of a MIG device", metavar="GPU")
    _add_run_dir(it)


def _cordon(commands: Any) -> None:  # noqa: ANN401 - as above
    it = _command(
        commands,
        "cordon",
        "let no new shares of a GPU be given; running pods are not touched. It lasts until "
        "uncordon or the end of the daemon: to keep a GPU out for good, leave it out of the "
        "configuration's pools",
        'metagpu cordon 3 --reason "fan to be replaced"',
    )
    it.add_argument("gpu", help=_GPU_HELP, metavar="GPU")
    it.add_argument("--reason", default="", metavar="TEXT", help="told to pods that are refused")
    _add_run_dir(it)


def _uncordon(commands: Any) -> None:  # noqa: ANN401 - as above
    it = _command(
        commands,
        "uncordon",
        "let shares of a cordoned GPU be given again",
        "metagpu uncordon 3",
    )
    it.add_argument("gpu", help=_GPU_HELP, metavar="GPU")
    _add_run_dir(it)


def _sim(commands: Any) -> None:  # noqa: ANN401 - as above
    from metagpu.sim.arguments import add_arguments  # noqa: PLC0415 - a running daemon does without it

    it = _command(
        commands,
        "sim",
        "steer the simulated node of a running `metagpu run --simulate`",
        "metagpu sim xid 0 79\n  metagpu sim recover 0\n  metagpu sim node",
    )
    _add_run_dir(it)
    add_arguments(it.add_subparsers(title="what to do", required=True, metavar="WHAT"))


def _command(
    commands: Any,  # noqa: ANN401 - as above
    name: str,
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary.partition(". ")[0],
        description=fill(summary[:1].upper() + summary[1:] + ".", 78),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return made


def _add_node(it: argparse.ArgumentParser) -> None:
    add_source(it)
    it.add_argument(
        "--simulate",
        metavar="BOARDS|FILE",
        default=Variable(("METAGPU_SIMULATE",)),
        help=SIMULATE_HELP,
    )


def _add_run_dir(it: argparse.ArgumentParser) -> None:
    it.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        default=Variable(("METAGPU_RUN_DIR",), control.DEFAULT_RUN_DIR, convert=Path),
        help="where the daemon's control socket stands (default: %(default)s)",
    )
