"""From a grant to the Node's allocatable numbers at the API server."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import anyio
from anyio import to_thread

from bench import client, daemon
from bench.client import Client
from bench.figures import Figure, Samples
from bench.plan import Plan
from bench.pod_resources import PodResources
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.sim.apiserver.server import SimApiServer

_NODE: Final = "bench"
_POD: Final = ("bench", "pod")
_CALM: Final = 0.2
"""Seconds before a grant: what the daemon writes to the Node has been written then."""
_READY: Final = 3.0
"""Seconds after which each GPU has its MPS daemon."""
_TARGET: Final = 10
_CONFIG: Final = "version: metagpu/v1\npools: [{{name: all, backends: [{}]}}]\n"
_FRACTION, _MPS = daemon.RESOURCE, "nvidia.com/gpu.mps"
_SLICE, _WHOLE = "nvidia.com/gpu.shared", "nvidia.com/gpu"


@dataclass(frozen=True)
class _Case:
    """Grants of one resource, one to each GPU in turn, that lower a number of the Node.

    Attributes:
        lowered: the resource whose number falls.
        shares: of one grant.
        silent: grants at first that lower nothing.
        healthy: whether the granted shares are Healthy on the list; if not, another backend offers
            their GPU, and one grant changes whose turn the others have.
    """

    backends: str
    granted: str
    lowered: str
    simulate: str = daemon.GPUS
    shares: int = 1
    silent: int = 0
    healthy: bool = True

    def grants(self, message: bytes) -> Sequence[Sequence[str]]:
        """Return the ids of the grants of one round."""
        by_gpu: dict[str, list[str]] = {}
        for device in v1beta1.ListAndWatchResponse.parse(message).devices:
            if (device.health == "Healthy") is self.healthy:
                by_gpu.setdefault(device.id.partition("::")[0], []).append(device.id)
        grants = [ids[: self.shares] for ids in by_gpu.values()]
        return grants if self.healthy else grants[:1]


_CASES: Final[Mapping[str, _Case]] = {
    "fraction": _Case("{backend: fraction}", _FRACTION, _FRACTION, shares=50, silent=1),
    "mps": _Case(
        f"{{backend: mps, resource: {_MPS}}}", _MPS, _MPS, "a100-40gb:2", shares=50, silent=1
    ),
    "mig": _Case(
        "{backend: mig, profiles: [1g.5gb, 7g.40gb]}",
        "nvidia.com/mig-1g.5gb",
        "nvidia.com/mig-7g.40gb",
        "gpus: [{model: a100-40gb, count: 8, mig: true}]",
    ),
    "time-slices of a GPU that goes whole": _Case(
        f"{{backend: timeslice, resource: {_SLICE}, replicas: 4}}, "
        f"{{backend: whole, resource: {_WHOLE}}}",
        _WHOLE,
        _SLICE,
        healthy=False,
    ),
}


def amounts(plan: Plan) -> list[Figure]:
    """Measure for every backend whose grants lower a number."""
    figures = []
    for name, case in _CASES.items():
        plan.report(f"amounts: {name}")
        samples = anyio.run(_measure, case, plan.count(60, 3))
        row = f"grant to the Node's number, {name}"
        figures += [samples.figure(row, target=_TARGET), samples.worst(f"{row}, worst")]
    return figures


async def _measure(case: _Case, count: int) -> Samples:
    samples, pod_resources = Samples(), PodResources()
    async with _joined(case, pod_resources) as (server, plugin):
        full = _number(server, case.lowered)
        while len(samples.seconds) < count:
            server.add_pod(*_POD, _NODE)
            held: list[str] = []
            grants = case.grants(await to_thread.run_sync(plugin.first_list))
            for number, ids in enumerate(grants):
                await anyio.sleep(_CALM)
                before = _number(server, case.lowered)
                request, began = client.allocate_request(ids), time.perf_counter()
                await to_thread.run_sync(plugin.allocate, request)
                held += ids
                pod_resources.hold({case.granted: held})
                if number >= case.silent:
                    await server.until(partial(_is_below, server, case.lowered, before))
                    samples.seconds.append(time.perf_counter() - began)
            # A lease whose holder was never listed lasts longer.
            await to_thread.run_sync(pod_resources.wait_for_list)
            pod_resources.hold({})
            server.delete_pod(*_POD)
            await server.until(lambda: _number(server, case.lowered) == full)
    return samples


def _number(server: SimApiServer, resource: str) -> int:
    return int(server.node(_NODE)["status"]["allocatable"][resource])


def _is_below(server: SimApiServer, resource: str, before: int) -> bool:
    return _number(server, resource) < before


@asynccontextmanager
async def _joined(
    case: _Case, pod_resources: PodResources
) -> AsyncIterator[tuple[SimApiServer, Client]]:
    """Run a daemon whose Node shows its lists, as a kubelet reports them."""
    server = SimApiServer()
    server.add_node(_NODE)
    async with server.running():
        with daemon.folder() as folder, pod_resources.served(folder / "pods.sock"):
            simulate = folder / "node.yaml"
            simulate.write_text(case.simulate)
            joins = {"--node-name": _NODE, "--kubeconfig": server.kubeconfig(folder)}
            with daemon.start(
                folder,
                config=_CONFIG.format(case.backends),
                simulate=str(simulate) if "{" in case.simulate else case.simulate,
                pod_resources=folder / "pods.sock",
                further=joins,
            ) as subject:
                for resource in {case.granted, case.lowered}:
                    socket = await to_thread.run_sync(subject.socket_of, resource)
                    with client.connected(socket) as plugin:
                        capacity, healthy = await to_thread.run_sync(_counted, plugin)
                    server.report(_NODE, {resource: capacity}, {resource: healthy})
                socket = subject.socket_of(case.granted)
                with client.connected(socket) as plugin:
                    await anyio.sleep(_CALM)
                    yield server, plugin


def _counted(plugin: Client) -> tuple[int, int]:
    """Return the shares on the list, and the Healthy ones, once GPUs are ready."""
    time.sleep(_READY)
    devices = v1beta1.ListAndWatchResponse.parse(plugin.first_list()).devices
    return len(devices), sum(device.health == "Healthy" for device in devices)
