"""Agents on a simulated node, and in its cluster (`metagpu run --with-kubelet`)."""

import argparse
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from metagpu.agent import paths
from metagpu.core.config.errors import ConfigError, ConfigReason

if TYPE_CHECKING:
    from metagpu.agent.agent import Agent
    from metagpu.agent.config_source import ConfigSource
    from metagpu.agent.paths import AgentPaths
    from metagpu.plugins.cluster.settings import ClusterSettings
    from metagpu.plugins.control.socket import CommandHandler
    from metagpu.plugins.http.address import ListenAddress
    from metagpu.sim.cluster.single_node import SingleNodeCluster
    from metagpu.sim.machine.node import SimNode

_DRIVER: Final = Path("/proc/driver/nvidia/version")
"""A file of a loaded kernel driver, which every container sees."""


def use_simulated_cluster(args: argparse.Namespace) -> None:
    """Name the simulated kubelet and API server in the arguments of `run`, if wanted.

    Raises:
        ConfigError: the GPUs are real, another kubelet is named, or another daemon is to be
            taken over from; or the node's own kubelet would get simulated GPUs beside real ones.
    """
    if not args.with_kubelet:
        if args.simulate is not None and args.kubelet_dir == paths.KUBELET_DIR:
            _refuse_beside_driver(_DRIVER)
        return
    if args.simulate is None:
        problem = "a simulated kubelet needs simulated GPUs; also give --simulate"
        raise ConfigError(problem, ConfigReason.CONFLICT, file="--with-kubelet")
    named = (args.kubelet_root, args.kubelet_dir, args.pod_resources)
    if named != (paths.KUBELET_ROOT, paths.KUBELET_DIR, None):
        problem = (
            "the simulated kubelet has folders of its own; leave out --kubelet-root, "
            "--kubelet-dir and --pod-resources"
        )
        raise ConfigError(problem, ConfigReason.CONFLICT, file="--with-kubelet")

    if args.take_over:
        problem = "the simulated kubelet ends with its daemon; leave out --take-over"
        raise ConfigError(problem, ConfigReason.CONFLICT, file="--with-kubelet")

    from metagpu.sim.cluster import paths as simulated

    args.kubelet_root = args.run_dir
    args.kubelet_dir = simulated.kubelet_dir(args.run_dir)
    args.pod_resources = simulated.pod_resources(args.run_dir)
    args.kubeconfig = simulated.kubeconfig(args.run_dir)
    if not args.dev_root:
        args.dev_root = str(simulated.host_root(args.run_dir))
    if args.cdi_dir == paths.CDI_DIR:
        args.cdi_dir = simulated.cdi_dir(args.run_dir)
    args.node_name = args.node_name or simulated.NODE_NAME
    if not args.status_api and args.cluster != "none":
        args.status_api = "127.0.0.1:0"


def _refuse_beside_driver(driver: Path) -> None:
    if driver.exists():
        problem = (
            f"this node has an NVIDIA driver ({driver}), and its pods would get shares of GPUs "
            "that do not exist; leave out --simulate (the chart's value simulate), or try it with "
            "--with-kubelet"
        )
        raise ConfigError(problem, ConfigReason.CONFLICT, file="--simulate")


def simulated_agent(
    source: "ConfigSource",
    simulate: str,
    agent_paths: "AgentPaths",
    cluster_settings: "ClusterSettings | None",
    metrics: "ListenAddress | None",
    *,
    status_address: "ListenAddress | None" = None,
    web_address: "ListenAddress | None" = None,
    cluster_node: str | None = None,
    take_over: bool = False,
) -> "Agent":
    """Build an agent on a simulated node; a `cluster_node` names that of its cluster.

    Raises:
        ConfigError: the description of the node is not valid.
        MetagpuError: the address of the status is not free.
    """
    from metagpu.agent.agent import Agent
    from metagpu.host.linux import LinuxHost
    from metagpu.nvml.driver import NvmlDriver
    from metagpu.sim.machine.programs import SimPrograms, sim_daemons
    from metagpu.sim.machine.spec import build_node
    from metagpu.sim.nvml.library import SimLibrary

    node, cluster = build_node(simulate), None
    if cluster_node is not None:
        from metagpu.sim.cluster.single_node import SingleNodeCluster

        cluster = SingleNodeCluster(node, agent_paths.run_dir, cluster_node)
    agent = Agent(
        source,
        NvmlDriver(SimLibrary(node)),
        agent_paths,
        {"sim": _sim_handler(node, cluster)},
        programs=SimPrograms(),
        daemons=sim_daemons(node.driver_branch),
        host=cluster.containers.machine.host if cluster else LinuxHost(own_pids=True),
        pcie_root=lambda gpu: node.pcie_root(gpu.id),
        cluster_settings=cluster_settings,
        metrics=metrics,
        status_address=status_address,
        web_address=web_address,
        beside=cluster.running if cluster else nullcontext,
        take_over=take_over,
    )
    if cluster and agent.status_api:
        agent.status_api.server.bind("--status-api")
        cluster.status_port = agent.status_api.server.port
    return agent


def _sim_handler(node: "SimNode", cluster: "SingleNodeCluster | None") -> "CommandHandler":
    """Return the handler of `metagpu sim`; its commands are loaded with the first one."""
    from anyio import to_thread

    async def handle(request: Mapping[str, Any]) -> object:
        remote = await to_thread.run_sync(import_module, "metagpu.sim.commands.remote")
        answer: object = await remote.command_handler(node, cluster)(request)
        return answer

    return handle
