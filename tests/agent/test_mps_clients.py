"""The end of a pod under MPS: its clients end before the kubelet kills them, and no others."""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from anyio.abc import Process

from metagpu.backends.common.mps_daemon import supervisor
from metagpu.backends.common.mps_daemon.decisions import MpsDaemonTiming
from metagpu.backends.mps.backend import MpsBackend
from metagpu.core.model.shares import Holder
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.machine.containers import SimHost
from metagpu.sim.machine.gpu import SimProcess
from tests.rigs.agent import Scene, agent_at_work
from tests.rigs.daemons import StandIn
from tests.rigs.host import running
from tests.rigs.logs import capture_module_logs
from tests.rigs.mig import a_node, mig_pool
from tests.rigs.mig_mps import QUARTERS, control, devices, hurry_mps
from tests.rigs.waiting import until

NODE = "gpu-1"
UIDS = {
    "alice": "7f2d0001-0000-4000-8000-00000000000a",
    "bob": "7f2d0002-0000-4000-8000-00000000000b",
}
CLIENT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    server.recv(1)  # until its contexts are gone
"""
LIMIT = 30.0


def delete(server: SimApiServer, name: str, grace: float) -> None:
    """Delete a pod, whose containers have so many seconds."""
    end = datetime.now(UTC) + timedelta(seconds=grace)
    metadata = {"deletionTimestamp": end.isoformat(), "deletionGracePeriodSeconds": grace}
    server.store.merge(("pods", "team", name), {"metadata": metadata}, status=False, manager="x")


@asynccontextmanager
async def with_clients(
    tmp_path: Path, server: SimApiServer, pool: str, gpus: str
) -> AsyncIterator[tuple[StandIn, dict[str, Process]]]:
    """Run an agent, and a client of one control daemon in a pod each of Alice and Bob."""
    machine = SimHost(tmp_path)
    server.add_node(NODE)
    for name, uid in UIDS.items():
        server.add_pod("team", name, NODE, uid=uid)
    node = await a_node(tmp_path, gpus)

    async def serves(scene: Scene) -> StandIn:
        async def is_there() -> bool:
            return bool(await devices(tmp_path))

        await until(is_there, LIMIT)
        stand_in = control(tmp_path, (await devices(tmp_path))[0])
        await stand_in.answers()
        await scene.wait_snapshot(lambda now: now.pods.by_uid.keys() == {*UIDS.values()})
        return stand_in

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server.running())
        settings = ClusterSettings(
            NODE, server.kubeconfig(tmp_path), features=frozenset({Feature.PODS})
        )
        scene = await stack.enter_async_context(
            agent_at_work(tmp_path, node, pool, cluster_settings=settings, host=machine.host)
        )
        stand_in = await serves(scene)
        processes = {}
        command = (
            sys.executable,
            "-S",
            "-E",
            "-c",
            CLIENT,
            str(stand_in.folders.pipes / "control"),
        )
        for name, uid in UIDS.items():
            processes[name] = process = await stack.enter_async_context(running(*command))
            machine.add_container_process(process.pid, Holder("team", name, "main"), uid=uid)
            scene.node.start_process(scene.node.gpu(0), SimProcess(process.pid, 1))

        async def connected() -> bool:
            [mps_server] = await stand_in.servers()
            return len(await stand_in.control.clients(mps_server)) == len(processes)

        await until(connected, LIMIT)
        yield stand_in, processes
    for device in await devices(tmp_path):
        await control(tmp_path, device).gone()


GPU = "version: metagpu/v1\npools: [{name: all, backends: [{backend: mps, unitsPerGpu: 10}]}]\n"


@pytest.mark.parametrize(
    ("pool", "gpus"),
    [
        pytest.param(GPU, "{model: a100-40gb}", id="gpu"),
        pytest.param(mig_pool(QUARTERS), "{model: a100-40gb, mig: true}", id="instance"),
    ],
)
async def test_a_client_ends_before_the_kubelet_kills_it(
    pool: str, gpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that does not end by itself keeps half of a short grace period, and then has no work.

    Its neighbour on the GPU stays.
    """
    hurry_mps(monkeypatch)
    monkeypatch.setattr(MpsBackend, "timing", MpsDaemonTiming(deadline=20.0))
    server = SimApiServer()
    with capture_module_logs(supervisor) as logs:
        async with with_clients(tmp_path, server, pool, gpus) as (stand_in, clients):
            began = anyio.current_time()
            delete(server, "alice", grace=2.0)
            with anyio.fail_after(LIMIT):
                assert await clients["alice"].wait() == 0
            assert anyio.current_time() - began > 0.9
            [mps_server] = await stand_in.servers()

            async def bob_stays() -> bool:  # a command beside metagpu's may be lost
                return await stand_in.control.clients(mps_server) == [clients["bob"].pid]

            await until(bob_stays, LIMIT)

            async def is_logged() -> bool:  # once the agent has read the answer
                ended = [line["pid"] for line in logs if line["event"] == "mps client ended"]
                return ended == [clients["alice"].pid]

            await until(is_logged, LIMIT)


async def test_a_client_that_cannot_be_ended_is_named(tmp_path: Path) -> None:
    """The log has the control daemon's answer, and the other clients of the pod end."""
    server = SimApiServer()
    with capture_module_logs(supervisor) as logs:
        async with with_clients(tmp_path, server, GPU, "{model: a100-40gb}") as (stand_in, clients):
            stand_in.steer("garbage")
            delete(server, "alice", grace=1.0)

            async def is_named() -> bool:
                return any(line["event"] == "mps client not ended" for line in logs)

            await until(is_named, LIMIT)
            stand_in.steer("")
            with anyio.fail_after(LIMIT):
                assert await clients["alice"].wait() == 0
