"""From an allocation to the changed lists of the GPU's other backends."""

import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Final

from bench import client, daemon
from bench.client import Client, Lists
from bench.figures import Figure, Samples
from bench.plan import Plan
from bench.pod_resources import PodResources

TIME_LIMIT: Final = 180.0
"""Seconds; `calls` of the figure is the number of claims."""
_GPUS: Final = 8
_RESOURCES: Final = (
    "cnvrg.io/metagpu",
    "nvidia.com/gpu.shared",
    "nvidia.com/gpu.mps",
    "nvidia.com/gpu",
)
_POOL: Final = """\
version: metagpu/v1
pools:
  - name: shared
    backends:
      - {{backend: fraction, resource: {}, sharesPerGpu: 100}}
      - {{backend: timeslice, resource: {}, replicas: 16}}
      - {{backend: mps, resource: {}}}
      - {{backend: whole, resource: {}}}
""".format(*_RESOURCES)
_NAME: Final = "allocation to the lists of 3 other backends, 8 x (100 + 16 + 100 + 1)"


def claims(plan: Plan) -> list[Figure]:
    """Claim every GPU of a pool by one of its four backends, release all, and repeat."""
    samples = Samples()
    pod_resources = PodResources()

    with ExitStack() as stack:
        folder = stack.enter_context(daemon.folder())
        socket = folder / "pods.sock"
        stack.enter_context(pod_resources.served(socket))
        subject = stack.enter_context(
            daemon.start(folder, config=_POOL, simulate=f"a100-40gb:{_GPUS}", pod_resources=socket)
        )
        clients = {
            resource: stack.enter_context(client.connected(subject.socket_of(resource)))
            for resource in _RESOURCES
        }
        lists = {name: stack.enter_context(other.lists()) for name, other in clients.items()}
        deadline = time.monotonic() + TIME_LIMIT

        for number in range(-1, plan.count(100, 2)):
            if time.monotonic() > deadline:
                break
            if number % 10 == 0:
                plan.report(f"claims: {number}")
            idle = {name: _all_free(stream) for name, stream in lists.items()}
            took = _claim_all(clients, lists, idle, pod_resources, turn=number)
            pod_resources.wait_for_list()  # a lease whose holder was never listed lasts longer
            pod_resources.hold({})
            if number >= 0:
                samples.seconds += took

    return [samples.figure(_NAME, target=10), samples.worst(f"{_NAME}, worst")]


def _all_free(stream: Lists) -> bytes:
    """Return the list once every device on it is healthy."""
    while b"Unhealthy" in (message := stream.take().message):
        pass
    return message


def _claim_all(
    clients: dict[str, Client],
    lists: dict[str, Lists],
    known: dict[str, bytes],
    pod_resources: PodResources,
    *,
    turn: int,
) -> list[float]:
    """Claim one GPU after the other; return the seconds until the other lists changed."""
    took = []
    held = defaultdict[str, list[str]](list)
    ids = {name: _first_of_each_gpu(message) for name, message in known.items()}

    for gpu in range(_GPUS):
        resource = _RESOURCES[(gpu + turn) % len(_RESOURCES)]
        share = ids[resource][gpu]
        held[resource].append(share)
        pod_resources.hold(held)
        began = time.perf_counter()
        clients[resource].allocate(client.allocate_request([share]))
        others = [name for name in _RESOURCES if name != resource]
        arrivals = {name: lists[name].changed(known[name]) for name in others}
        took.append(max(arrival.at for arrival in arrivals.values()) - began)
        known |= {name: arrival.message for name, arrival in arrivals.items()}
    return took


def _first_of_each_gpu(message: bytes) -> list[str]:
    firsts: dict[str, str] = {}
    for share in client.ids_in(message):
        firsts.setdefault(share.partition("::")[0], share)
    return list(firsts.values())
