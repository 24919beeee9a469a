"""The program of `kubectl metagpu`: its arguments, their help and their examples."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from metagpu import __version__
from metagpu.cli.options import Variable, add_page_address, resolve_environment
from metagpu.cli.parser import (
    Parser,
    add_command,
    add_reason,
    complete_line,
    completions,
    run_command,
    wants_file,
)
from metagpu.cli.resource_names import add_resource_names
from metagpu.display.encoding import LIST_FORMATS, WIDE_FORMATS
from metagpu.display.options import add_output, add_sort_by, add_watch, seconds
from metagpu.translation.values import POLICIES, TECHNIQUES, TranslationSettings
from metagpu.translation.vocabularies import VOCABULARIES

SHORTEST_INTERVAL: Final = 0.5
"""Seconds between two looks of `web`: the page takes no more changes than two a second."""
OBJECTS: Final = {
    "nodes": ("node", "no"),
    "gpus": ("gpu",),
    "pods": ("pod", "po"),
    "namespaces": ("namespace", "ns"),
}
"""The objects of `get` and `top`, and their other names."""
DEFAULTS: Final = TranslationSettings()
SHORTEST_TIMEOUT: Final = 0.1
"""Seconds: in less, no node answers through the API server."""
ANSWER_TIMEOUT: Final = 5.0
"""Seconds for each node's answer."""
DRAIN_TIMEOUT: Final = 300.0
"""Seconds until the last pod has left a GPU."""
_SUMMARIES: Final = {
    "nodes": "the nodes: their GPUs, what is held, used and out of order",
    "gpus": "the GPUs of all nodes",
    "pods": "the containers that hold shares, and their use",
    "namespaces": "what the pods of each namespace hold and use together",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 done, 1 failed, 2 wrong arguments."""
    program = parser()
    if arguments is None and complete_line(program):
        return 0
    args = program.parse_args(arguments)
    return run_command("kubectl metagpu", args, lambda: _do(args))


def _do(args: argparse.Namespace) -> int:
    resolve_environment(args)
    from metagpu.kubectl.commands import COMMANDS  # after `--help`, which needs none of it

    return COMMANDS[args.command](args)


def complete() -> int:
    """Print completions for `kubectl metagpu`, whose words kubectl gives as arguments."""
    program, words = parser(), sys.argv[1:]
    for word in completions(program, words):
        print(word)  # noqa: T201 - as above
    # kubectl's marks: 0 completes names of files, 4 does not.
    print(":0" if wants_file(program, words) else ":4")  # noqa: T201 - as above
    return 0


def parser() -> argparse.ArgumentParser:
    """Build the parser; `command` of its result is the command's name."""
    program = Parser(
        prog="kubectl metagpu",
        description="Shows the GPUs of a cluster, who holds them, and why a pod gets none.",
        epilog="examples:\n  kubectl metagpu top nodes\n  kubectl metagpu get pods -A -o wide\n"
        "  kubectl metagpu why my-pod",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    program.add_argument("--version", action="version", version=f"kubectl-metagpu {__version__}")
    commands = program.add_subparsers(
        title="commands", required=True, metavar="COMMAND", dest="command"
    )
    for add in (
        *(_top, _get, _why, _fit, _doctor, _cordon, _uncordon, _drain_gpu),
        *(_explain, _translate, _web, _version),
    ):
        add(commands)
    return program


def _top(commands: Any) -> None:  # noqa: ANN401 - argparse names the type of its sub-parsers privately
    command = add_command(
        commands,
        "top",
        "show load, memory and shares; live on a terminal, until q is pressed",
        "kubectl metagpu top gpus --sort-by utilization",
    )
    _add_objects(command, "show", "kubectl metagpu top {kind}", WIDE_FORMATS)


def _get(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "get",
        "list nodes, gpus, pods or namespaces, for people or programs",
        "kubectl metagpu get pods -A -o json",
    )
    for one in _add_objects(command, "list", "kubectl metagpu get {kind} -o wide", LIST_FORMATS):
        one.add_argument("--no-headers", action="store_true", help="print rows alone")


def _add_objects(
    command: Parser, verb: str, example: str, formats: Sequence[str]
) -> Sequence[Parser]:
    """Add a command for each kind of objects; return their parsers."""
    added = []
    kinds = command.add_subparsers(title="objects", required=True, metavar="OBJECT")
    for kind, aliases in OBJECTS.items():
        summary = f"{verb} {_SUMMARIES[kind]}"
        one = add_command(kinds, kind, summary, example.format(kind=kind), aliases)
        one.set_defaults(kind=kind)
        _add_selection(one, kind)
        add_output(one, formats)
        add_watch(one)
        _add_connection(one)
        added.append(one)
    return added


def _why(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "why",
        "say why a pod gets no GPU: of each node what is missing, and what to change",
        "kubectl metagpu why train-0 -n team-a",
    )
    command.add_argument(
        "pod",
        metavar="POD",
        type=_pod_or_controller,
        help="a pod, or KIND/NAME of its controller, such as job/train or deployment/web",
    )
    _add_namespace(command)
    add_output(command)
    _add_connection(command)


def _fit(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "fit",
        "say where the pod of a manifest would fit, and why not elsewhere; nothing is created",
        "kubectl metagpu fit -f pod.yaml",
    )
    _add_filename(command, "a Pod, or a workload such as a Deployment")
    _add_namespace(command)
    add_output(command)
    _add_connection(command)


def _doctor(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "doctor",
        "check the daemons of all nodes; print what is wrong, and the fixes",
        "kubectl metagpu doctor",
    )
    _add_selector(command, "nodes")
    add_output(command, WIDE_FORMATS)
    _add_connection(command)


def _cordon(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "cordon",
        "stop giving new shares of a GPU, by an annotation of its Node; running pods stay",
        'kubectl metagpu cordon gpu-1/3 --reason "replace the fan"',
    )
    _add_gpu(command)
    add_reason(command)
    _add_connection(command)


def _uncordon(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "uncordon",
        "give shares of a cordoned GPU again",
        "kubectl metagpu uncordon gpu-1/3",
    )
    _add_gpu(command)
    _add_connection(command)


def _drain_gpu(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "drain-gpu",
        "evict the pods that hold shares of a GPU, after its cordon. It shows them first, and asks "
        "for consent on a terminal",
        'kubectl metagpu drain-gpu gpu-1/3 --reason "replace the fan"',
    )
    _add_gpu(command)
    add_reason(command)
    command.add_argument("-y", "--yes", action="store_true", help="evict without a question")
    command.add_argument(
        "--force",
        action="store_true",
        help="also evict pods of DaemonSets, and pods without a controller, which nothing restarts",
    )
    command.add_argument("--dry-run", action="store_true", help="only show what it would do")
    command.add_argument(
        "--timeout",
        metavar="SECONDS",
        dest="drain_timeout",
        type=seconds(SHORTEST_TIMEOUT),
        default=DRAIN_TIMEOUT,
        help="until the last pod has left the GPU (default: %(default)g)",
    )
    _add_connection(command, timeout=False)


def _add_gpu(command: argparse.ArgumentParser) -> None:
    command.add_argument("gpu", metavar="NODE/GPU", help="a node, and the index or uuid of its GPU")


def _explain(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "explain",
        "print what a node offers to the kubelet, and why",
        "kubectl metagpu explain gpu-1",
    )
    command.add_argument("node", metavar="NODE", help="the name of the node")
    command.add_argument(
        "--topology", action="store_true", help="also print how GPUs are connected"
    )
    add_output(command)
    _add_connection(command)


def _translate(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "translate",
        "print a manifest whose pods ask for resources of the nodes, and no more in terms of HAMi "
        "(nvidia.com/gpumem and the like) or KAI Scheduler (gpu-fraction); nothing is created",
        "kubectl metagpu translate -f pod.yaml | kubectl apply -f -",
    )
    _add_filename(command, "Pods, workloads such as a Deployment, and other objects, which stay")
    command.add_argument(
        "--nodes",
        type=Path,
        metavar="FILE",
        help="the nodes, as `kubectl get nodes -o json` or `-o yaml` prints them (default: those "
        "of the cluster)",
    )
    command.add_argument(
        "--order",
        metavar="NAMES",
        type=_techniques,
        default=DEFAULTS.order,
        help="the techniques by preference, for pods that name none (default: "
        f"{','.join(DEFAULTS.order)})",
    )
    command.add_argument(
        "--policy",
        choices=POLICIES,
        default=DEFAULTS.policy,
        help="between resources that would serve a pod: the one with the least waste, or the one "
        "with the most room (default: %(default)s)",
    )
    add_resource_names(command, VOCABULARIES)
    command.add_argument(
        "--dra-resources",
        metavar="NAMES",
        default="",
        help="names in limits that DRA serves, and no Node counts: requests for them are left as "
        "they are (default: those of the cluster's DeviceClasses, with --nodes none)",
    )
    command.add_argument(
        "--claims",
        action="store_true",
        help="print ResourceClaimTemplates with the alternatives in order, and pods that claim "
        "them, in place of resources of the nodes",
    )
    command.add_argument(
        "--claims-driver",
        metavar="NAME",
        default="gpu.metagpu.io",
        help="the name of the DRA driver, as in the configuration: gpu.nvidia.com asks for MIG "
        "devices and whole GPUs by NVIDIA's DeviceClasses (default: %(default)s)",
    )
    command.add_argument(
        "--explain", action="store_true", help="show what each node would give, not the manifest"
    )
    command.add_argument(
        "-o",
        "--output",
        metavar="FORMAT",
        choices=("yaml", "json"),
        default="yaml",
        help="one of yaml, json (default: %(default)s)",
    )
    _add_connection(command, timeout=False)


def _techniques(text: str) -> tuple[str, ...]:
    """Read the names of techniques, divided by commas."""
    names = tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in names if name not in TECHNIQUES]:
        known = ", ".join(TECHNIQUES)
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a technique; give some of {known}")
    return names


def _web(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "web",
        "show all GPUs of the cluster in a browser: serve the page on this machine alone, with "
        "your rights, until an interrupt",
        "kubectl metagpu web --open",
    )
    add_page_address(command)
    command.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="start a browser with the page (default: only print its URL)",
    )
    command.add_argument(
        "--interval",
        metavar="SECONDS",
        type=seconds(SHORTEST_INTERVAL),
        default=2.0,
        help="between two looks at the nodes, while a browser shows the page "
        "(default: %(default)g)",
    )
    _add_selector(command, "nodes")
    _add_namespace(
        command,
        "show what waits of this namespace (default: of all, or of the context's namespace where "
        "you may list no others)",
    )
    command.add_argument(
        "-A", "--all-namespaces", action="store_true", help="show what waits of all, or fail"
    )
    _add_connection(command)


def _version(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "version",
        "print the versions of this program and of the daemons",
        "kubectl metagpu version",
    )
    command.add_argument("--client", action="store_true", help="print this program's version alone")
    _add_connection(command)


def _name(text: str) -> str:
    """Read the name of an object: of another one the API server has no path."""
    if re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", text):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a name; one has a-z 0-9 - and dots, alphanumeric at both ends"
    )


def _pod_or_controller(text: str) -> str:
    """Read the name of a pod, or kind and name of a controller."""
    kind, slash, name = text.rpartition("/")
    return f"{_name(kind)}/{_name(name)}" if slash else _name(text)


def _namespace(text: str) -> str:
    """Read the name of a namespace; an empty one is that of the context."""
    return _name(text) if text else ""


def _add_selection(command: argparse.ArgumentParser, kind: str) -> None:
    metavar = "NODE/GPU" if kind == "gpus" else "NAME"
    command.add_argument("names", metavar=metavar, nargs="*", help=f"only these {kind}")
    if kind == "pods":
        _add_namespace(command)
    everywhere = "of all namespaces" if kind == "pods" else "no effect: these are of the cluster"
    command.add_argument("-A", "--all-namespaces", action="store_true", help=everywhere)
    _add_selector(command, "nodes" if kind in ("nodes", "gpus") else "pods")
    add_sort_by(command)


def _add_filename(command: argparse.ArgumentParser, objects: str) -> None:
    help_ = f"a manifest with {objects}; - is stdin"
    command.add_argument("-f", "--filename", required=True, metavar="FILE", help=help_)


def _add_selector(command: argparse.ArgumentParser, objects: str) -> None:
    command.add_argument(
        "-l",
        "--selector",
        metavar="LABELS",
        default="",
        help=f"only {objects} with these labels, as kubectl takes them",
    )


def _add_namespace(
    command: argparse.ArgumentParser, meaning: str = "default: that of the context"
) -> None:
    command.add_argument(
        "-n", "--namespace", metavar="NAME", type=_namespace, default="", help=meaning
    )


def _add_connection(command: argparse.ArgumentParser, *, timeout: bool = True) -> None:
    command.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        default=Variable(("KUBECONFIG",), convert=Path),
        help="address and credentials of the API server (default: ~/.kube/config)",
    )
    command.add_argument("--context", metavar="NAME", help="the context of the kubeconfig")
    command.add_argument(
        "--agent-namespace",
        metavar="NAME",
        default=Variable(("METAGPU_AGENT_NAMESPACE",), ""),
        help="the namespace that metagpu is installed in (default: the only one with daemons)",
    )
    if timeout:
        command.add_argument(
            "--timeout",
            metavar="SECONDS",
            type=seconds(SHORTEST_TIMEOUT),
            default=ANSWER_TIMEOUT,
            help="for each node's answer (default: %(default)g)",
        )
    else:
        command.set_defaults(timeout=ANSWER_TIMEOUT)


if __name__ == "__main__":
    sys.exit(main())
