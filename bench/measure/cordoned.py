"""Allocate beside GPUs that give nothing, compared with the same node without them."""

import random
from contextlib import ExitStack
from typing import Final

from bench import client, daemon
from bench.figures import Figure
from bench.measure.calls import alternating
from bench.plan import Plan

_GPUS: Final = 16
_POOL: Final = """\
version: metagpu/v1
pools:
  - name: shared
    backends:
      - {backend: fraction, resource: cnvrg.io/metagpu, sharesPerGpu: 100}
      - {backend: timeslice, resource: nvidia.com/gpu.shared, replicas: 16}
      - {backend: whole, resource: nvidia.com/gpu}
"""
_NAME: Final = f"Allocate, 1 id, beside {_GPUS - 1} cordoned GPUs"


def cordoned(plan: Plan) -> list[Figure]:
    """Measure Allocate of a GPU's shares on two nodes; one has all other GPUs cordoned.

    A cordoned GPU and a suspended backend are judged by the same code, in every resource's list.
    """
    plan.report("cordoned")
    with ExitStack() as stack:
        plugins = []
        for is_cordoned in (True, False):
            folder = stack.enter_context(daemon.folder())
            subject = stack.enter_context(
                daemon.start(folder, config=_POOL, simulate=f"a100-40gb:{_GPUS}")
            )
            plugins.append(
                stack.enter_context(client.connected(subject.socket_of(daemon.RESOURCE)))
            )
            ids = client.ids_in(plugins[-1].first_list())
            for gpu in range(1, _GPUS) if is_cordoned else ():
                subject.ask("cordon", gpu=str(gpu))

        shuffled = random.Random(1).sample(ids[:100], 100)  # noqa: S311 - as Go's map order does
        requests = [client.allocate_request([share]) for share in shuffled]
        ours, plain = alternating(
            plugins[0].allocate, plugins[1].allocate, requests, plan.count(3000, 100)
        )
    return [
        ours.ratio(f"{_NAME}: to none cordoned", plain, target=1.2),
        ours.figure(_NAME, unit="us"),
    ]
