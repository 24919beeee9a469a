"""The commands of `metagpu`; their arguments stand in `metagpu.cli.arguments`."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from metagpu.agent.paths import AgentPaths, default_pod_dir
from metagpu.cli.arguments import parser
from metagpu.cli.loading import configure_log, loading, return_large_buffers
from metagpu.cli.options import (
    cluster_of,
    driver_roots_of,
    metrics_of,
    pod_resources_of,
    resolve_environment,
    source_of,
    status_api_of,
    web_of,
)
from metagpu.cli.parser import complete_line, run_command
from metagpu.cli.simulation import use_simulated_cluster
from metagpu.core.errors import AnotherDaemon
from metagpu.patches import load_structlog
from metagpu.plugins.control.client import send_request

if TYPE_CHECKING:
    from metagpu.agent.agent import Agent
    from metagpu.agent.config_source import ConfigSource
    from metagpu.plugins.cluster.settings import ClusterSettings
    from metagpu.plugins.http.address import ListenAddress

_UNKNOWN: Final = 3
"""The exit status where nothing here can tell about a claim."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 done, 1 failed, 2 wrong arguments."""
    program = parser()
    if arguments is None and complete_line(program):
        return 0
    args = program.parse_args(arguments)
    status = 1

    try:
        status = run_command("metagpu", args, lambda: _do(args))
    finally:
        _exit_beside_threads(args, status)
    return status


def _do(args: argparse.Namespace) -> int:
    resolve_environment(args, _environment(args))
    return COMMANDS[args.command](args)


def _environment(args: argparse.Namespace) -> Mapping[str, str]:
    """Return the variables of this process, and for `uninstall` those of the service."""
    if args.command != "uninstall":
        return os.environ
    from metagpu.host.service import SETTINGS, read_environment

    return {**read_environment(args.root / SETTINGS / "metagpu.env"), **os.environ}


def _exit_beside_threads(args: argparse.Namespace, status: int) -> None:
    """End the process beside threads in NVML: Python would wait for them.

    One waits for events at each end, and nothing can interrupt it; others hang, and are logged.
    """
    agent: Agent | None = getattr(args, "agent", None)
    if agent is None or not agent.driver.has_threads:
        return

    if sys.exc_info()[0] is not None:
        traceback.print_exc()
    if calls := agent.driver.unanswered_calls:
        load_structlog()
        import structlog

        structlog.get_logger().warning("exit while NVML hangs", calls=calls)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


# --- the commands -------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    # A service manager may start with any mask; nobody else writes into folders made here.
    os.umask(0o022)
    return_large_buffers()
    with loading():
        import anyio

        from metagpu.core.runtime.loop import WatchedLoop
        from metagpu.plugins.kubelet.paths import check_kubelet_dir

        use_simulated_cluster(args)
        cluster_settings, metrics = cluster_of(args), metrics_of(args)
        status_address = status_api_of(args, cluster_settings)
        web_address = web_of(args, cluster_settings)
        check_kubelet_dir(args.kubelet_dir)
        configure_log(args.log_level, args.log_format)
        args.agent = _agent(
            source_of(args),
            args.simulate,
            _paths(args),
            cluster_settings,
            metrics,
            status_address=status_address,
            web_address=web_address,
            cluster_node=args.node_name if args.with_kubelet else None,
            take_over=args.take_over,
        )
    anyio.run(args.agent.run, backend_options={"loop_factory": WatchedLoop})
    return 0


def _demo(args: argparse.Namespace) -> int:
    from metagpu.sim.demo import demo

    configure_log("critical", "console")
    return demo.run(args.output)


def _explain(args: argparse.Namespace) -> int:
    import anyio

    from metagpu.agent.parts import label_settings
    from metagpu.cli.config_commands import print_notes
    from metagpu.core.model.offers import Api
    from metagpu.core.reports.reading import plain_report
    from metagpu.core.reports.status import explain_report
    from metagpu.display.status import show, show_explanation
    from metagpu.plugins.cluster.gpu_labels import node_labels

    configure_log("error", "console")
    paths = AgentPaths(roots=driver_roots_of(args))
    args.agent = agent = _agent(source_of(args), args.simulate, paths)
    anyio.run(agent.survey_once)
    print_notes(agent)
    snapshot = agent.registry.snapshot
    explained = explain_report(snapshot, agent.layout)
    more: dict[str, Any] = {"labels": node_labels(snapshot, label_settings(agent.context))}
    if snapshot.offers_of(Api.DRA):
        more["resourceSlices"] = _slices(agent)
    if args.claim:
        more["claims"] = _claim_fits(args.claim, agent, more.get("resourceSlices", ()))

    if args.output != "table":
        _print_encoded({**plain_report(explained), **more}, args.output)
    else:
        show_explanation(explained, topology=args.topology)
        if "resourceSlices" in more:
            from metagpu.display.claims import slices_table

            show("", slices_table(more["resourceSlices"]))
        if args.claim:
            from metagpu.display.claims import claim_fits_parts

            show("", *claim_fits_parts(more["claims"]))
    answers = {claim["answer"] for claim in more.get("claims", ())}
    return 1 if "error" in answers else _UNKNOWN if "unknown" in answers else 0


def _claim_fits(
    files: Sequence[str], agent: "Agent", slices: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return what the claims of manifests would get on this node, if it were idle."""
    from metagpu.cli.claim_fits import claim_fits
    from metagpu.compat.kube_documents import read_documents

    documents = [document for file in files for document in read_documents(file)]
    gpus = {gpu: state.gpu.index for gpu, state in agent.registry.snapshot.gpus.items()}
    return claim_fits(documents, slices, gpus, agent.config.root.dra.driver)


def _slices(agent: "Agent") -> list[Mapping[str, Any]]:
    """Return the ResourceSlices that the daemon would publish."""
    from metagpu.core.devices.slices import slices_of
    from metagpu.host.device_nodes import read_pcie_root

    snapshot, read = agent.registry.snapshot, agent.pcie_root or read_pcie_root
    roots = {gpu: root for gpu, state in snapshot.gpus.items() if (root := read(state.gpu))}
    driver = agent.config.root.dra.driver
    published = slices_of(snapshot, agent.source.context.node or "NODE", driver, roots)
    return [spec for specs in published.values() for spec in specs]


def _validate(args: argparse.Namespace) -> int:
    from metagpu.cli.config_commands import validate

    return validate(args)


def _plan(args: argparse.Namespace) -> int:
    from metagpu.cli.config_commands import plan
    from metagpu.display.status import show_plan

    configure_log("error", "console")
    paths = AgentPaths(roots=driver_roots_of(args))
    planned = plan(args, lambda source, simulate: _agent(source, simulate, paths))

    if args.output != "table":
        _print_encoded(planned, args.output)
    else:
        show_plan(planned)
    return 0


def _status(args: argparse.Namespace) -> int:
    from metagpu.cli.live import print_text, repeat, show_live
    from metagpu.core.reports.reading import read_report
    from metagpu.core.reports.schema.status import StatusReport
    from metagpu.display.options import encode
    from metagpu.display.status import draw_status, show_status

    def ask() -> Mapping[str, Any]:
        answer: Mapping[str, Any] = send_request(args.run_dir, {"command": "status"})
        return answer

    if args.output != "table":
        if args.watch:
            return repeat(lambda: print_text(encode(ask(), args.output, compact=True)))
        _print_encoded(ask(), args.output)
    elif args.watch:
        return show_live(lambda screen: draw_status(read_report(ask(), StatusReport), screen))
    else:
        show_status(read_report(ask(), StatusReport))
    return 0


def _acknowledge(args: argparse.Namespace) -> int:
    return _order(args, {"command": "acknowledge", "gpu": args.gpu})


def _cordon(args: argparse.Namespace) -> int:
    return _order(args, {"command": "cordon", "gpu": args.gpu, "reason": args.reason})


def _uncordon(args: argparse.Namespace) -> int:
    return _order(args, {"command": "uncordon", "gpu": args.gpu})


def _order(args: argparse.Namespace, request: Mapping[str, str]) -> int:
    """Send an operator's command to the daemon, and print its answer."""
    print(send_request(args.run_dir, request))  # noqa: T201
    return 0


def _install(args: argparse.Namespace) -> int:
    """Write the files of the service that are missing; say what comes next."""
    from metagpu.cli.live import print_text
    from metagpu.host.service import FileState, service_files

    for file in service_files(_installed_program(), args.root, mps=args.mps):
        match file.state:
            case FileState.SAME:
                line = f"kept     {file.path}"
            case FileState.CHANGED:
                line = (
                    f"kept     {file.path}: it differs from this version's; remove it to get that"
                )
            case FileState.MISSING if args.dry_run:
                line = f"missing  {file.path}"
            case FileState.MISSING:
                file.write()
                line = f"wrote    {file.path}"
        print_text(f"{line}\n")

    print_text("\nnext: edit /etc/metagpu/metagpu.yaml, then\n")
    print_text("  systemctl daemon-reload && systemctl enable --now metagpu\n")
    return 0


def _installed_program() -> Path:
    """Return the path of this installation's program."""
    import sysconfig

    return Path(sysconfig.get_path("scripts")) / "metagpu"


def _uninstall(args: argparse.Namespace) -> int:
    import anyio
    from msgspec.structs import replace

    from metagpu.agent.uninstall import Uninstall
    from metagpu.display.status import show_removals

    configure_log("error", "console")
    paths = _paths(args)
    quiet = replace(paths, pod_dir=None, cdi_dir=None)  # it writes nothing there
    args.agent = agent = _agent(source_of(args), args.simulate, quiet, cluster_of(args))
    job = Uninstall(agent, paths, args.root, _installed_program(), args.yes, args.force)
    try:
        report = anyio.run(job.run)
    except AnotherDaemon as other:
        raise AnotherDaemon(
            f"{other}; end it first, by `systemctl disable --now metagpu` or without its DaemonSet"
        ) from other

    if args.output != "table":
        _print_encoded(report.to_dict(), args.output)
    else:
        show_removals(report.removals, report.notes, wanted=args.yes)
    return 0 if report.complete or not args.yes else 1


def _webhook(args: argparse.Namespace) -> int:
    with loading():
        import anyio

        from metagpu.cli.webhook_options import webhook_of
        from metagpu.host.programs import run_command as start_program
        from metagpu.webhook.program import Webhook

        settings = webhook_of(args)
        configure_log(args.log_level, args.log_format)
    anyio.run(Webhook(settings, start_program).run)
    return 0


def _sim(args: argparse.Namespace) -> int:
    from metagpu.sim.commands.remote import send_command
    from metagpu.sim.commands.tables import print_reply

    form, as_table = getattr(args, "output", "table"), getattr(args, "as_table", False)
    print_reply(send_command(args.run_dir, args), form, as_table=as_table)
    return 0


COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "run": _run,
    "demo": _demo,
    "explain": _explain,
    "validate": _validate,
    "plan": _plan,
    "status": _status,
    "acknowledge": _acknowledge,
    "cordon": _cordon,
    "uncordon": _uncordon,
    "install": _install,
    "uninstall": _uninstall,
    "sim": _sim,
    "webhook": _webhook,
    "completion": lambda args: int(args.do(args)),
}


# --- shared ---------------------------------------------------------------------------------------


def _paths(args: argparse.Namespace) -> AgentPaths:
    return AgentPaths(
        kubelet_root=args.kubelet_root,
        kubelet_dir=args.kubelet_dir,
        pod_resources=pod_resources_of(args),
        run_dir=args.run_dir,
        roots=driver_roots_of(args),
        pod_dir=args.pod_dir or default_pod_dir(args.run_dir),
        cdi_dir=args.cdi_dir,
        cdi_hook=getattr(args, "nvidia_cdi_hook_path", ""),
    )


def _agent(
    source: "ConfigSource",
    simulate: str | None,
    paths: AgentPaths | None = None,
    cluster_settings: "ClusterSettings | None" = None,
    metrics: "ListenAddress | None" = None,
    *,
    status_address: "ListenAddress | None" = None,
    web_address: "ListenAddress | None" = None,
    cluster_node: str | None = None,
    take_over: bool = False,
) -> "Agent":
    """Build the agent; `cluster_node` is the name of the Node of a simulated cluster."""
    with loading():
        from metagpu.agent.agent import Agent
        from metagpu.host.driver_roots import find_roots
        from metagpu.nvml.driver import NvmlDriver

    paths = paths or AgentPaths()
    if simulate is None:
        driver = NvmlDriver(find_libraries=lambda: find_roots(paths.roots).libraries)
        return Agent(
            source,
            driver,
            paths,
            cluster_settings=cluster_settings,
            metrics=metrics,
            status_address=status_address,
            web_address=web_address,
            take_over=take_over,
        )

    from metagpu.cli.simulation import simulated_agent

    return simulated_agent(
        source,
        simulate,
        paths,
        cluster_settings,
        metrics,
        status_address=status_address,
        web_address=web_address,
        cluster_node=cluster_node,
        take_over=take_over,
    )


def _print_encoded(value: object, form: str) -> None:
    from metagpu.display.options import encode

    print(encode(value, form), end="")  # noqa: T201
