"""GetPreferredAllocation on a node whose pods name GPUs, and for a pod that is not known yet."""

import random
import time
from contextlib import ExitStack
from typing import Final

import anyio
from anyio import to_thread

from bench import client, daemon
from bench.figures import Figure, Samples
from bench.measure.calls import Call, alternating
from bench.plan import Plan
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.plugins.kubelet.timing import TIMING
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.machine.spec import build_node

_NODE: Final = "bench"
_KNOWN, _UNKNOWN = 4, 5
"""Shares of the pod that the API server has, and of one that it has not."""
_NAME: Final = f"Preferred, {_KNOWN} of 800, of a pod that names its GPU"
_LATE: Final = f"Preferred, {_UNKNOWN} of 800, of a pod that is not known in time"
_TIMEOUT: Final = 30.0


def preferences(plan: Plan) -> list[Figure]:
    """Measure on two nodes; only one has an API server, and a pod that is bound to it."""
    return anyio.run(_preferences, plan)


async def _preferences(plan: Plan) -> list[Figure]:
    named = build_node(daemon.GPUS).gpus[-1].id
    server = SimApiServer()
    server.add_node(_NODE)
    server.add_pod(
        *("bench", "train", _NODE, {"nvidia.com/use-gpuuuid": named}),
        phase="Pending",
        requests={daemon.RESOURCE: _KNOWN},
    )
    async with server.running():
        return await to_thread.run_sync(_measure, plan, server, named)


def _measure(plan: Plan, server: SimApiServer, named: str) -> list[Figure]:
    plan.report("preferences")
    with ExitStack() as stack:
        plugins = []
        for joined in (True, False):
            folder = stack.enter_context(daemon.folder())
            joins = {"--node-name": _NODE, "--kubeconfig": server.kubeconfig(folder)}
            config = daemon.POOL.format(shares=100)
            subject = stack.enter_context(
                daemon.start(folder, config=config, further=joins if joined else None)
            )
            plugins.append(stack.enter_context(client.connected(subject.socket)))
        ids = client.ids_in(plugins[0].first_list())
        shuffled = random.Random(1).sample(ids, len(ids))  # noqa: S311 - as Go's map order does
        request = client.preferred_request(shuffled, _KNOWN)
        _await_gpu(plugins[0].prefer, request, named)
        ours, plain = alternating(
            plugins[0].prefer, plugins[1].prefer, [request], plan.count(3000, 100)
        )
        late = client.preferred_request(shuffled, _UNKNOWN)
        waits = Samples([_timed(plugins[0].prefer, late) for _ in range(plan.count(200, 10))])
    return [
        ours.ratio(f"{_NAME}: to one without annotations", plain, target=1.5),
        ours.figure(_NAME, unit="us"),
        waits.figure(_LATE, target=TIMING.pod_wait * 1e3 + 5),
    ]


def _await_gpu(prefer: Call, request: bytes, gpu: str) -> None:
    """Wait until the daemon knows the pod: it prefers the GPU that the pod names."""
    deadline = time.monotonic() + _TIMEOUT
    while True:
        [answer] = v1beta1.PreferredAllocationResponse.parse(prefer(request)).container_responses
        if {it.partition("::")[0] for it in answer.device_i_ds} == {gpu}:
            return
        assert time.monotonic() < deadline, f"the daemon prefers {answer.device_i_ds}"


def _timed(prefer: Call, request: bytes) -> float:
    began = time.perf_counter()
    prefer(request)
    return time.perf_counter() - began
