"""ResourceSlices: the delay of a registration and of a change, and the rates of writes."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import anyio
import grpc
from anyio import to_thread

from bench import daemon
from bench.daemon import Daemon
from bench.figures import Figure, Samples
from bench.plan import Plan
from metagpu.plugins.kubelet.pb import pluginregistration
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.machine.spec import build_node

_NODE: Final = "bench"
_DRIVER: Final = "gpu.metagpu.io"
_GPUS: Final = 16
_SIMULATED: Final = f"a100-40gb:{_GPUS}"
_UUIDS: Final = [gpu.id.lower() for gpu in build_node(_SIMULATED).gpus]
"""With these the names of their devices begin."""
_CONFIG: Final = """\
version: metagpu/v1
pools:
  - name: all
    api: dra
    backends:
      - {backend: whole}
      - {backend: fraction, sharesPerGpu: 100}
      - {backend: mig, profiles: [1g.5gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb], enableMig: true}
"""
_SLICES: Final = "resourceslices"
_CALM: Final = 0.7
"""Seconds between two changes, in which a node may write a slice."""
_RATE: Final = 2.0
"""Slices that a node may write a second."""
_CHURN: Final = 10.0
_SETTLING: Final = 3.0
_TIMEOUT: Final = 60.0


def slices(plan: Plan) -> list[Figure]:
    """Register daemons, change one GPU now and then, and all of them all the time."""
    return anyio.run(_slices, plan)


async def _slices(plan: Plan) -> list[Figure]:
    registered, changed, churn = Samples(), Samples(), 0.0
    rounds = plan.count(8, 1)
    for number in range(rounds):
        plan.report(f"slices: registration {number}")
        server = SimApiServer()
        server.add_node(_NODE)
        async with server.running(), _registering(server, _CONFIG) as (subject, began):
            await server.until(partial(_are_published, server), within=_TIMEOUT)
            registered.seconds.append(time.perf_counter() - began)
            if number == rounds - 1:
                for change in range(plan.count(100, 4)):
                    changed.seconds.append(await _change(server, subject, change))
                    await anyio.sleep(_CALM)
                plan.report("slices: churn")
                churn = await _churn(server, subject, plan)

    return [
        registered.figure(f"registration to the slices of {_GPUS} GPUs with MIG", target=1000),
        registered.worst("registration to the slices, worst"),
        changed.figure(f"change of one GPU of {_GPUS} to its slice", target=100),
        changed.worst("change of one GPU to its slice, worst"),
        _written(f"{_GPUS} GPUs changing all the time", churn),
    ]


def _written(what: str, rate: float) -> Figure:
    name = f"slices written a second, {what}"
    return Figure(name=name, unit="1/s", measured=rate, target=_RATE, calls=1)


@asynccontextmanager
async def _registering(server: SimApiServer, config: str) -> AsyncIterator[tuple[Daemon, float]]:
    """Run a daemon, and register its driver as a kubelet does; yield it and the time of that."""
    with daemon.folder() as folder:
        joins = {
            "--node-name": _NODE,
            "--kubeconfig": server.kubeconfig(folder),
            "--cdi-dir": folder / "cdi",
        }
        start = partial(daemon.start, folder, config=config, simulate=_SIMULATED, further=joins)
        subject = await to_thread.run_sync(start)
        try:
            began = await to_thread.run_sync(_register, folder, subject)
            yield subject, began
        except Exception as error:
            error.add_note(subject.log_tail)
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(subject.stop)


def _register(folder: Path, subject: Daemon) -> float:
    """Wait for the registration's socket, ask it, and say that all is well; return when."""
    socket = folder / "plugins_registry" / f"{_DRIVER}-reg.sock"
    deadline = time.monotonic() + _TIMEOUT
    while not socket.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the daemon does not register:\n{subject.log_tail}")
        time.sleep(0.01)
    time.sleep(1)  # a kubelet looks for sockets once a second
    with grpc.insecure_channel(f"unix://{socket}") as channel:
        channel.unary_unary("/pluginregistration.Registration/GetInfo")(b"")
        notify = channel.unary_unary("/pluginregistration.Registration/NotifyRegistrationStatus")
        began = time.perf_counter()
        notify(bytes(pluginregistration.RegistrationStatus(plugin_registered=True)))
    return began


def _specs(server: SimApiServer) -> list[Mapping[str, Any]]:
    return [document["spec"] for key, document in server.store.objects.items() if key[0] == _SLICES]


def _devices(server: SimApiServer) -> list[Mapping[str, Any]]:
    return [device for spec in _specs(server) for device in spec.get("devices") or ()]


def _are_published(server: SimApiServer) -> bool:
    """Return whether the node's pools are complete, with devices of all GPUs."""
    pools: dict[str, list[int]] = {}
    for spec in _specs(server):
        pools.setdefault(spec["pool"]["name"], []).append(spec["pool"]["resourceSliceCount"])
    names = [device["name"] for device in _devices(server)]
    return all(len(pool) == pool[0] for pool in pools.values()) and all(
        any(name.startswith(gpu) for name in names) for gpu in _UUIDS
    )


def _is_cordoned(server: SimApiServer, gpu: str) -> bool:
    return any(
        taint["key"] == "metagpu.io/cordoned"
        for device in _devices(server)
        if device["name"].startswith(gpu)
        for taint in device.get("taints") or ()
    )


async def _change(server: SimApiServer, subject: Daemon, number: int) -> float:
    """Cordon a GPU, or end its cordon; return the seconds until its slice shows it."""
    gpu, cordon = _UUIDS[number // 2 % len(_UUIDS)], number % 2 == 0
    began = time.perf_counter()
    await to_thread.run_sync(_set_cordon, subject, f"GPU-{gpu.removeprefix('gpu-')}", cordon)
    await server.until(lambda: _is_cordoned(server, gpu) == cordon, within=_TIMEOUT)
    return time.perf_counter() - began


def _set_cordon(subject: Daemon, gpu: str, cordon: bool) -> None:  # noqa: FBT001 - a state
    if cordon:
        subject.ask("cordon", gpu=gpu, reason="bench")
    else:
        subject.ask("uncordon", gpu=gpu)


async def _churn(server: SimApiServer, subject: Daemon, plan: Plan) -> float:
    """Change all GPUs all the time; return the writes a second, once those at once are done."""
    changes = _changes(subject)
    while not plan.quick and await _rate(server, changes, _SETTLING) > _RATE + 1 / _SETTLING:
        pass
    return await _rate(server, changes, _CHURN)


async def _rate(server: SimApiServer, changes: AsyncIterator[None], seconds: float) -> float:
    began, writes = time.perf_counter(), _writes(server)
    while time.perf_counter() < began + seconds:
        await anext(changes)
    return (_writes(server) - writes) / (time.perf_counter() - began)


async def _changes(subject: Daemon) -> AsyncIterator[None]:
    """Change one GPU after the other, without end."""
    for cordon in cycle((True, False)):
        for index in range(_GPUS):
            await to_thread.run_sync(_set_cordon, subject, str(index), cordon)
            yield


def _writes(server: SimApiServer) -> int:
    return sum(
        _SLICES in request.target and request.method in {"PUT", "POST"}
        for request in server.requests
    )
