"""ResourceClaims: their preparation, and the memory of a daemon with many of them."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from uuid import UUID

import anyio
import grpc
from anyio import to_thread

from bench import client, daemon, machine
from bench.figures import Figure, Samples
from bench.measure.memory import SETTLE
from bench.plan import Plan
from metagpu.plugins.kubelet.pb.k8s.io.kubelet.pkg.apis.dra import v1
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.machine.spec import build_node

_NODE: Final = "bench"
_DRIVER: Final = "gpu.metagpu.io"
_SERVICE: Final = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
_GPUS: Final = 8
_POOL: Final = """\
version: metagpu/v1
pools:
  - name: all
    api: dra
    backends: [{backend: fraction, sharesPerGpu: 100}]
"""
_TIMEOUT: Final = 60.0
_MEMORY: Final = "/dev/shm"  # noqa: S108 - a file system in memory, as that of `/var/run/cdi`


def prepares(plan: Plan) -> list[Figure]:
    """Prepare claims one after the other, then a hundred at once, and read the memory."""
    return anyio.run(_prepares, plan)


async def _prepares(plan: Plan) -> list[Figure]:
    count = plan.count(100, 10)
    server = SimApiServer()
    server.add_node(_NODE)
    claims = [_allocate(server, number) for number in range(2 * count)]
    async with server.running(), _served(server) as (subject, endpoint):
        of_cluster = await _cluster_memory(server)
        with grpc.insecure_channel(f"unix://{endpoint}") as channel:
            prepare = channel.unary_unary(f"{_SERVICE}/NodePrepareResources")
            unprepare = channel.unary_unary(f"{_SERVICE}/NodeUnprepareResources")
            singles, gets = Samples(), Samples()
            with closing(HTTPConnection("127.0.0.1", server.port, timeout=_TIMEOUT)) as connection:
                get = partial(_get, connection, server.token)
                for number, claim in enumerate(claims[:count]):
                    if number % 50 == 0:
                        plan.report(f"prepares: {number}")
                    # In turns: both find the processors and the API server as rested as the other.
                    gets.seconds.append(await to_thread.run_sync(get, claim))
                    singles.seconds.append(await to_thread.run_sync(_timed, prepare, [claim]))
            at_once = await to_thread.run_sync(_timed, prepare, claims[count:])
            resident = machine.resident(subject.pid)
            await to_thread.run_sync(unprepare, _request(claims))

    memory = f"resident memory, {2 * count} claims"
    beyond = (singles.p50 - gets.p50) * 1e3
    return [
        singles.figure("Prepare of a fraction, with the API server's GET"),
        gets.figure("GET of the claim alone"),
        _figure("Prepare beyond that GET", "ms", beyond, 3, count),
        _figure(f"{count} claims in one call", "s", at_once, 1, 1),
        _figure(f"{memory}, without the cluster plugin", "MB", resident - of_cluster, 60, 1),
        Figure(name=memory, unit="MB", measured=resident, target=None, calls=1),
    ]


async def _cluster_memory(server: SimApiServer) -> float:
    """Return the memory of the cluster plugin, its client included, without the DRA driver."""
    resident = []
    for joined in (True, False):
        with daemon.folder() as folder:
            joins = {"--node-name": _NODE, "--kubeconfig": server.kubeconfig(folder)}
            pool = daemon.POOL.format(shares=100)
            start = partial(daemon.start, folder, config=pool, further=joins if joined else None)
            async with _second(start, _is_served) as subject:
                await anyio.sleep(SETTLE)
                resident.append(machine.resident(subject.pid))
    return resident[0] - resident[1]


def _is_served(subject: daemon.Daemon) -> bool:
    with client.connected(subject.socket):
        return True


@asynccontextmanager
async def _second(
    start: Callable[[], daemon.Daemon], is_served: Callable[[daemon.Daemon], bool]
) -> AsyncIterator[daemon.Daemon]:
    """Run the second of two daemons in one folder: what an image has already is compiled."""
    for last in (False, True):
        subject = start()
        try:
            with anyio.fail_after(_TIMEOUT):
                while not await to_thread.run_sync(is_served, subject):  # noqa: ASYNC110 - a file
                    await anyio.sleep(0.05)
            if last:
                yield subject
        except Exception as error:
            error.add_note(subject.log_tail)
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(subject.stop)


def _figure(name: str, unit: str, measured: float, target: float, calls: int) -> Figure:
    return Figure(name=name, unit=unit, measured=measured, target=target, calls=calls)


def _allocate(server: SimApiServer, number: int) -> v1.Claim:
    """Make a claim that has three shares of a GPU."""
    gpu = build_node(f"a100-40gb:{_GPUS}").gpus[number % _GPUS].id.lower()
    claim = v1.Claim(namespace="bench", name=f"claim-{number}", uid=str(UUID(int=number + 1)))
    result = {
        "request": "gpu",
        "driver": _DRIVER,
        "pool": _NODE,
        "device": f"{gpu}-fraction",
        "consumedCapacity": {"shares": "3"},
    }
    content = {
        "metadata": {"uid": claim.uid},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }
    server.store.put(("resourceclaims", claim.namespace, claim.name), content)
    return claim


def _request(claims: Sequence[v1.Claim]) -> bytes:
    return bytes(v1.NodePrepareResourcesRequest(claims=list(claims)))


def _timed(call: grpc.UnaryUnaryMultiCallable, claims: Sequence[v1.Claim]) -> float:
    """Return the seconds of a call that prepares all of these claims."""
    request = _request(claims)
    began = time.perf_counter()
    answer = call(request)
    took = time.perf_counter() - began
    found = v1.NodePrepareResourcesResponse.parse(answer).claims
    assert len(found) == len(claims)
    assert not any(response.error for response in found.values()), found
    return took


def _get(connection: HTTPConnection, token: str, claim: v1.Claim) -> float:
    """Return the seconds of a GET of a claim, on one connection as the daemon has it."""
    collection = f"namespaces/{claim.namespace}/resourceclaims"
    began = time.perf_counter()
    path = f"/apis/resource.k8s.io/v1/{collection}/{claim.name}"
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    connection.getresponse().read()
    return time.perf_counter() - began


@asynccontextmanager
async def _served(server: SimApiServer) -> AsyncIterator[tuple[daemon.Daemon, Path]]:
    """Run a daemon with DRA; yield it and the socket of its service."""
    with daemon.folder() as folder, TemporaryDirectory(dir=_MEMORY) as cdi:
        nodes = folder / "dev"
        nodes.mkdir()
        for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(_GPUS))):
            (nodes / name).touch()
        joins = {
            "--node-name": _NODE,
            "--kubeconfig": server.kubeconfig(folder),
            "--cdi-dir": cdi,
            "--dev-root": folder,
        }
        endpoint = folder / "plugins" / _DRIVER / "dra.sock"
        start = partial(daemon.start, folder, config=_POOL, further=joins)
        async with _second(start, lambda _: endpoint.exists()) as subject:
            yield subject, endpoint
