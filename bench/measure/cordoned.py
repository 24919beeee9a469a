"""Allocate beside what gives nothing, compared with the same node without it."""

import random
from contextlib import ExitStack
from typing import Final

from bench import client, daemon
from bench.client import Client
from bench.daemon import Daemon
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
_WITH_MPS: Final = _POOL + "      - {backend: mps, resource: nvidia.com/gpu.mps}\n"
_NO_MPS_PROGRAM: Final = (
    "-c",
    (
        "from metagpu.cli.metagpu import main\n"
        "from metagpu.sim.machine.programs import STAND_INS\n"
        "STAND_INS.clear(); exit(main())"
    ),
)
"""A daemon on a node without MPS's control program."""


def cordoned(plan: Plan) -> list[Figure]:
    """Measure Allocate of a GPU's shares on a node with something that gives nothing, and without.

    First all other GPUs are cordoned, then MPS is suspended on every GPU.
    """
    plan.report("cordoned")
    with ExitStack() as stack:
        node, plain = _node(stack, _POOL), _node(stack, _POOL)
        plugins = _clients(stack, node, plain)
        for gpu in range(1, _GPUS):
            node.ask("cordon", gpu=str(gpu))
        cordons = _compare(plan, f"beside {_GPUS - 1} cordoned GPUs", plugins)

    plan.report("cordoned: suspended MPS")
    with ExitStack() as stack:
        node, plain = _node(stack, _WITH_MPS, _NO_MPS_PROGRAM), _node(stack, _POOL)
        plugins = _clients(stack, node, plain)
        return cordons + _compare(plan, f"MPS suspended on {_GPUS} GPUs", plugins)


def _node(stack: ExitStack, config: str, program: tuple[str, ...] = ("-m", "metagpu")) -> Daemon:
    folder = stack.enter_context(daemon.folder())
    simulate = f"a100-40gb:{_GPUS}"
    return stack.enter_context(
        daemon.start(folder, config=config, simulate=simulate, program=program)
    )


def _clients(stack: ExitStack, *daemons: Daemon) -> list[Client]:
    sockets = [other.socket_of(daemon.RESOURCE) for other in daemons]
    return [stack.enter_context(client.connected(socket)) for socket in sockets]


def _compare(plan: Plan, name: str, plugins: list[Client]) -> list[Figure]:
    """Compare the first with the second, by the shares of the first GPU."""
    ids = client.ids_in(plugins[0].first_list())
    shuffled = random.Random(1).sample(ids[:100], 100)  # noqa: S311 - as Go's map order does
    requests = [client.allocate_request([share]) for share in shuffled]
    ours, plain = alternating(
        plugins[0].allocate, plugins[1].allocate, requests, plan.count(3000, 100)
    )
    row = f"Allocate, 1 id, {name}"
    return [
        ours.ratio(f"{row}: to none", plain, target=1.2),
        ours.figure(row, unit="us"),
    ]
