"""The program of `kubectl metagpu`: its arguments, their help and their examples."""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from metagpu import __version__
from metagpu.cli.options import Variable, add_page_address, resolve_environment
from metagpu.cli.parser import (
    Parser,
    add_command,
    add_completion,
    add_reason,
    complete_line,
    completed_by,
    completions,
    run_command,
    wants_file,
)
from metagpu.cli.translation_options import add_manifest_translation
from metagpu.display.options import (
    LIST_FORMATS,
    WIDE_FORMATS,
    add_output,
    add_sort_by,
    add_watch,
    duration,
)
from metagpu.kubectl.report import add_report

SHORTEST_INTERVAL: Final = 0.5
"""Seconds between two looks of `web`: the page takes no more changes than two a second."""
OBJECTS: Final = {
    "nodes": ("node", "no"),
    "gpus": ("gpu",),
    "pods": ("pod", "po"),
    "namespaces": ("namespace", "ns"),
}
"""The objects of `get` and `top`, and their other names."""
SHORTEST_TIMEOUT: Final = 0.1
"""Seconds: in less, no node answers through the API server."""
ANSWER_TIMEOUT: Final = 5.0
"""Seconds for each node's answer."""
COMPLETION_TIMEOUT: Final = 2.0
"""Seconds for the names that complete a line: nobody waits longer for a Tab."""
WHOLE_TIMEOUT: Final = 300.0
"""Seconds for the pods of a GPU, or for daemons and nodes, to end."""
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
        *(_explain, _translate, _uninstall, _web, _version),
    ):
        add(commands)
    add_report(commands, _add_connection)
    note = "kubectl completes `kubectl metagpu` by kubectl_complete-metagpu, which it finds in PATH"
    add_completion(commands, program.prog, note)
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
    pod = command.add_argument(
        "pod",
        metavar="POD",
        type=_pod_or_controller,
        help="a pod, or KIND/NAME of its controller, such as job/train or deployment/web",
    )
    completed_by(pod, partial(_there, "controllers"))
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
    _add_consent(
        command,
        "also evict pods of DaemonSets, and pods without a controller, which nothing restarts",
        "until the last pod has left the GPU",
    )
    _add_connection(command, timeout=False)


def _add_consent(command: argparse.ArgumentParser, force: str, timeout: str) -> None:
    """Add the options of what cannot be undone."""
    command.add_argument("-y", "--yes", action="store_true", help="do it without a question")
    command.add_argument("--force", action="store_true", help=force)
    command.add_argument("--dry-run", action="store_true", help="only show what it would do")
    command.add_argument(
        "--timeout",
        metavar="DURATION",
        dest="whole_timeout",
        type=duration(SHORTEST_TIMEOUT),
        default=WHOLE_TIMEOUT,
        help=f"{timeout} (default: %(default)gs)",
    )


def _add_gpu(command: argparse.ArgumentParser) -> None:
    gpu = command.add_argument(
        "gpu", metavar="NODE/GPU", help="a node, and the index or uuid of its GPU"
    )
    completed_by(gpu, partial(_there, "gpus"))


def _there(kind: str, args: argparse.Namespace, word: str) -> Iterable[str]:
    """Return the names of what is in the cluster, for the completion of a line."""
    from metagpu.kubectl.commands import names_of

    args.timeout = COMPLETION_TIMEOUT
    return names_of(kind, args, word)


def _explain(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "explain",
        "print what a node offers to the kubelet, and why",
        "kubectl metagpu explain gpu-1",
    )
    node = command.add_argument("node", metavar="NODE", help="the name of the node")
    completed_by(node, partial(_there, "nodes"))
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
    add_manifest_translation(command)
    add_output(command, ("yaml", "json"))
    _add_connection(command, timeout=False)


def _uninstall(commands: Any) -> None:  # noqa: ANN401 - as above
    command = add_command(
        commands,
        "uninstall",
        "end metagpu in the cluster, and remove what it left on each node. Running pods go on, and "
        "what they use stays; it shows its plan first, and asks for consent on a terminal",
        "kubectl metagpu uninstall --dry-run",
    )
    _add_consent(
        command,
        "remove also what running pods use: their programs may fail, and containers that start "
        "again too",
        "until the daemons have ended, and as much until the nodes are clean",
    )
    add_output(command)
    _add_connection(command, timeout=False)


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
        metavar="DURATION",
        type=duration(SHORTEST_INTERVAL),
        default=2.0,
        help="between two looks at the nodes, while a browser shows the page "
        "(default: %(default)gs)",
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
    names = command.add_argument("names", metavar=metavar, nargs="*", help=f"only these {kind}")
    completed_by(names, partial(_there, kind))
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
    help_ = f"only {objects} with these labels, as kubectl takes them"
    command.add_argument("-l", "--selector", metavar="LABELS", default="", help=help_)


def _add_namespace(
    command: argparse.ArgumentParser, meaning: str = "default: that of the context"
) -> None:
    namespace = command.add_argument(
        "-n", "--namespace", metavar="NAME", type=_namespace, default="", help=meaning
    )
    completed_by(namespace, partial(_there, "namespaces"))


def _add_connection(command: argparse.ArgumentParser, *, timeout: bool = True) -> None:
    command.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        default=Variable(("KUBECONFIG",), convert=Path),
        help="address and credentials of the API server (default: ~/.kube/config)",
    )
    context = command.add_argument(
        "--context", metavar="NAME", help="the context of the kubeconfig"
    )
    completed_by(context, partial(_there, "contexts"))
    agent_namespace = command.add_argument(
        "--agent-namespace",
        metavar="NAME",
        default=Variable(("METAGPU_AGENT_NAMESPACE",), ""),
        help="the namespace that metagpu is installed in (default: the only one with daemons)",
    )
    completed_by(agent_namespace, partial(_there, "namespaces"))
    if timeout:
        command.add_argument(
            "--timeout",
            metavar="DURATION",
            type=duration(SHORTEST_TIMEOUT),
            default=ANSWER_TIMEOUT,
            help="for each node's answer (default: %(default)gs)",
        )
    else:
        command.set_defaults(timeout=ANSWER_TIMEOUT)


if __name__ == "__main__":
    sys.exit(main())
