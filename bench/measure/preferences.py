"""GetPreferredAllocation on a node whose pods name GPUs, and for a pod that is not known yet."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio
from anyio import to_thread

from bench import client, daemon
from bench.client import Client
from bench.figures import Figure, Samples
from bench.measure.calls import Call
from bench.plan import Plan
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.plugins.kubelet.timing import TIMING
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.machine.spec import build_node

_NODE: Final = "bench"
_PODS: Final = 25
"""Pods that are admitted at once: each call is that of another one."""
_KNOWN, _UNKNOWN = 4, 5
"""Shares of these pods, and of one that the API server has not."""
_NAME: Final = f"Preferred, {_KNOWN} of 800, of a pod that names its GPU"
_LATE: Final = f"Preferred, {_UNKNOWN} of 800, of a pod that is not known in time"
_CALM: Final = 0.3
"""Seconds after a change of the pods: the daemon knows them then."""


def preferences(plan: Plan) -> list[Figure]:
    """Measure on two nodes; only one has an API server, with pods that are bound to it."""
    return anyio.run(_preferences, plan)


async def _preferences(plan: Plan) -> list[Figure]:
    server = SimApiServer()
    server.add_node(_NODE)
    named = build_node(daemon.GPUS).gpus[-1].id
    ours, plain, waits = Samples(), Samples(), Samples()
    async with server.running():
        with _plugin(server) as plugin, _plugin(None) as other:
            ids = await to_thread.run_sync(lambda: client.ids_in(plugin.first_list()))
            shuffled = random.Random(1).sample(ids, len(ids))  # noqa: S311 - as Go's map order does
            request = client.preferred_request(shuffled, _KNOWN)
            for number in range(-1, plan.count(40, 2)):
                plan.report(f"preferences: {number}")
                _arrive(server, number, named)
                await anyio.sleep(_CALM)
                for call, samples in ((plugin.prefer, ours), (other.prefer, plain)):
                    found, answer = await to_thread.run_sync(_timed, call, request, _PODS)
                    if call is plugin.prefer:
                        assert _gpus(answer) == {named}
                    if number >= 0:  # the round before the first only warms up
                        samples.seconds += found
            late = client.preferred_request(shuffled, _UNKNOWN)
            waits.seconds, _ = await to_thread.run_sync(
                _timed, plugin.prefer, late, plan.count(200, 10)
            )
    return [
        ours.ratio(f"{_NAME}: to one without annotations", plain, target=2),
        ours.figure(_NAME, unit="us"),
        waits.figure(_LATE, target=TIMING.pod_wait * 1e3 + 5),
    ]


def _arrive(server: SimApiServer, number: int, named: str) -> None:
    """Replace the pods by others, which are bound and have still to be admitted."""
    for other in server.pods():
        server.delete_pod("bench", other["metadata"]["name"])
    for pod in range(_PODS):
        server.add_pod(
            *("bench", f"train-{number}-{pod}", _NODE, {"nvidia.com/use-gpuuuid": named}),
            phase="Pending",
            requests={daemon.RESOURCE: _KNOWN},
        )


@contextmanager
def _plugin(server: SimApiServer | None) -> Iterator[Client]:
    """Run a daemon, perhaps with an API server."""
    with daemon.folder() as folder:
        joins: dict[str, object] = {}
        if server is not None:
            joins = {"--node-name": _NODE, "--kubeconfig": server.kubeconfig(folder)}
        config = daemon.POOL.format(shares=100)
        with (
            daemon.start(folder, config=config, further=joins) as subject,
            client.connected(subject.socket) as plugin,
        ):
            yield plugin


def _timed(call: Call, request: bytes, count: int) -> tuple[list[float], bytes]:
    """Return the seconds of each of some calls, and the last answer."""
    seconds, answer = [], b""
    for _ in range(count):
        began = time.perf_counter()
        answer = call(request)
        seconds.append(time.perf_counter() - began)
    return seconds, answer


def _gpus(answer: bytes) -> set[str]:
    [preferred] = v1beta1.PreferredAllocationResponse.parse(answer).container_responses
    return {name.partition("::")[0] for name in preferred.device_i_ds}
