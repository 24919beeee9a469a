"""`cordon` and `uncordon`: annotations of the Node, which its daemon follows."""

import argparse

import anyio

from metagpu.cli.live import print_text
from metagpu.core.errors import NotCordoned, UnknownGpu
from metagpu.core.reports.schema import GpuReport
from metagpu.core.runtime.rate_limit import Backoff
from metagpu.kubectl.errors import CordonFailed, NoAnswer, NodeNotServed, report_of
from metagpu.kubectl.viewer import STATUS, AgentPod, ClusterViewer
from metagpu.plugins.cluster.settings import CORDON_PREFIX


def delays() -> Backoff:
    """Return the seconds between two looks at a daemon's status."""
    return Backoff(0.05, 2.0)


async def cordon(args: argparse.Namespace, viewer: ClusterViewer) -> int:
    """Cordon a GPU, and wait until its daemon has done so.

    Raises:
        MetagpuError: there is no such GPU, or the daemon does not follow in time.
    """
    reason = " ".join(args.reason.split()) or "no reason was given"
    with report_of(node_of(args.gpu)):
        agent, gpu = await find_gpu(args.gpu, viewer)
        found = await cordon_gpu(viewer, agent, gpu, reason, args.timeout)
        held = sum(it.held for it in found.shares.values())
    title = f"GPU {gpu.index} of node {agent.node}"
    print_text(f"{title} is cordoned; {held} shares are still in use\n")
    return 0


async def cordon_gpu(
    viewer: ClusterViewer, agent: AgentPod, gpu: GpuReport, reason: str, deadline: float
) -> GpuReport:
    """Write the annotation of a cordon; return the GPU as its daemon reports it then.

    Raises:
        MetagpuError: the user may not, or the daemon does not follow within `deadline` seconds.
    """
    await viewer.annotate_node(agent.node, f"{CORDON_PREFIX}{gpu.uuid}", reason)
    return await _follow(viewer, agent, gpu, deadline, cordoned=True)


async def uncordon(args: argparse.Namespace, viewer: ClusterViewer) -> int:
    """End the cordon of a GPU, and wait until its daemon has done so.

    Raises:
        MetagpuError: there is no such GPU, it has another cordon, or the daemon does not follow.
    """
    with report_of(node_of(args.gpu)):
        agent, gpu = await find_gpu(args.gpu, viewer)
        if gpu.cordon is None:
            raise NotCordoned(f"GPU {gpu.index} of {agent.node} is not cordoned")
        for name in (gpu.uuid, str(gpu.index)):
            await viewer.annotate_node(agent.node, f"{CORDON_PREFIX}{name}", None)
        await _follow(viewer, agent, gpu, args.timeout, cordoned=False)
    print_text(f"GPU {gpu.index} of {agent.node} gives new shares again\n")
    return 0


def node_of(gpu: str) -> str:
    """Return the node of `NODE/GPU`."""
    return gpu.partition("/")[0]


async def find_gpu(name: str, viewer: ClusterViewer) -> tuple[AgentPod, GpuReport]:
    """Find the daemon and the GPU of `NODE/GPU`.

    Raises:
        MetagpuError: there is no such node or GPU, or its daemon gives no answer.
    """
    node, _, wanted = name.partition("/")
    if not wanted:
        raise UnknownGpu(f"{name!r} names no GPU; write NODE/GPU, as in gpu-1/3")
    agents = {it.node: it for it in await viewer.agents()}
    if node not in agents:
        raise NodeNotServed(f"metagpu does not run on a node {node}; see `kubectl get nodes`")
    gpus = await _gpus(viewer, agents[node])
    for gpu in gpus:
        if wanted in (str(gpu.index), gpu.uuid):
            return agents[node], gpu
    known = ", ".join(str(gpu.index) for gpu in gpus) or "none"
    raise UnknownGpu(f"there is no GPU {wanted!r} on {node}; there are: {known}")


async def _gpus(viewer: ClusterViewer, agent: AgentPod) -> list[GpuReport]:
    [answer] = await viewer.ask(STATUS, [agent])
    if answer.report is None:
        raise NoAnswer(f"{answer.node}: {answer.problem}")
    return answer.report.gpus


async def _follow(
    viewer: ClusterViewer,
    agent: AgentPod,
    gpu: GpuReport,
    deadline: float,
    *,
    cordoned: bool,
) -> GpuReport:
    """Wait until the daemon reports the GPU as wanted; return what it reports."""
    current, pauses = gpu, delays()
    with anyio.move_on_after(deadline):
        while True:
            # A daemon that has just started, or whose GPU has fallen off the bus, reports it not.
            for it in await _gpus(viewer, agent):
                if it.uuid == gpu.uuid:
                    current = it
                    if (it.cordon is not None) == cordoned:
                        return current
            await anyio.sleep(pauses.next())
    if not cordoned and current.cordon is not None:
        problem = f"it is still cordoned ({current.cordon.reason}): `metagpu uncordon` there"
    else:
        problem = f"its daemon has not followed within {deadline:g} s: see its feature `cordon`"
    raise CordonFailed(f"GPU {gpu.index} of {agent.node}: {problem}")
