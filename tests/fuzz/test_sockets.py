"""No input crashes the daemon's sockets, makes them hang, or shows a neighbour's data.

`make test` runs the same few hundred inputs every time. `make fuzz` runs pieces of a minute, each
with inputs of its own; the piece that finds something is named, and runs again by its number.
"""

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from metagpu.core.grants.injection import POD_SOCKET_NAME
from metagpu.core.model.shares import Holder
from metagpu.plugins.control.socket import control_server
from metagpu.plugins.pod_api.server import PodMgctlServer
from metagpu.plugins.pod_api.socket import PodSocketLimits
from metagpu.sim.kubelet.kubelet import SimPod
from metagpu.sim.machine.containers import SimHost
from metagpu.sim.machine.gpu import SimProcess
from tests.fuzz.callers import Received, call, call_and_go, converse, frames
from tests.fuzz.inputs import control_requests, pod_requests
from tests.rigs.agent import METAGPU, agent_at_work
from tests.rigs.host import running
from tests.rigs.mgctl import pack_request
from tests.rigs.waiting import until

ALICE, NEIGHBOUR = Holder("default", "alice", "main"), Holder("default", "zebra", "main")
NEIGHBOURS_MIB = 31337
STRANGER = "0::/user.slice/session-1.scope\n"

# `make fuzz` has all of them, with other inputs, for each change.
pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


@dataclass
class Target:
    """A running daemon whose containers are Alice's, which is this process, and a neighbour's."""

    run: Path
    pods: Path
    machine: SimHost

    def set_caller(self, holder: Holder | None) -> None:
        """Place this process in a container, or outside all containers."""
        if holder is None:
            self.machine.add_process(os.getpid(), STRANGER)
        else:
            self.machine.add_container_process(os.getpid(), holder)

    async def is_answered(self) -> bool:
        """Return whether a valid `mgctl` request gets the caller's own pod."""
        request = pack_request("get", "pods", "-o", "json")
        received = await to_thread.run_sync(call, self.pods, request)
        return b"alice" in received.data


@asynccontextmanager
async def target(tmp_path: Path) -> AsyncIterator[Target]:
    """Run the whole agent while the block lasts; check at the end that it still works."""
    machine = SimHost(tmp_path)
    pods, folder = tmp_path / "pods", tmp_path / "pods" / POD_SOCKET_NAME
    with capture_logs() as logs:
        async with (
            agent_at_work(tmp_path, host=machine.host, pod_dir=pods) as scene,
            control_server(tmp_path, scene.agent.commands) as own,
            running() as neighbours,
        ):
            await scene.until(20, 20)
            for name in ("alice", "zebra"):
                await scene.kubelet.admit(SimPod.single(name, {METAGPU: 2}))
            await scene.wait_holders()
            machine.add_container_process(os.getpid(), ALICE)
            machine.add_container_process(neighbours.pid, NEIGHBOUR)
            scene.node.start_process(
                scene.node.gpus[0], SimProcess(neighbours.pid, NEIGHBOURS_MIB << 20)
            )
            live_target = Target(own, folder, machine)
            await until(anyio.Path(folder).exists, 30)
            yield live_target

            live_target.set_caller(ALICE)
            await until(live_target.is_answered, 30)
            status = await to_thread.run_sync(
                converse, live_target.run, [b'{"command": "status"}\n']
            )
            assert "ok" in json.loads(status[0])
    assert not [line for line in logs if line["log_level"] in {"error", "critical"}]


@pytest.fixture(autouse=True)
def no_rate_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable rate limits, which would keep inputs from being tried."""
    limits = PodSocketLimits(pod_requests=1e6, accepted=1e6, calls=1e6, request_time=0.1)
    monkeypatch.setattr(PodMgctlServer, "limits", limits)


def check(received: Received) -> None:
    """Check that an answer shows nothing of the neighbour, and is well formed if it is whole."""
    assert NEIGHBOUR.pod.encode() not in received.data
    assert str(NEIGHBOURS_MIB).encode() not in received.data

    if received.whole:
        parts = frames(received.data)
        assert not parts or parts[-1][0] == b"x"


@pytest.mark.parametrize("caller", [ALICE, None], ids=["from a pod", "from no pod"])
async def test_requests_of_containers(tmp_path: Path, caller: Holder | None) -> None:
    """Any bytes from a container get a whole answer or none, without another pod's data."""

    @given(st.lists(pod_requests, min_size=1, max_size=4), st.booleans())
    def attack(path: Path, requests: Sequence[bytes], stay: bool) -> None:  # noqa: FBT001 - it is drawn
        for request in requests:
            if stay:
                received = call(path, request)
                check(received)
                assert caller is not None or b"alice" not in received.data
            else:
                call_and_go(path, request)

    async with target(tmp_path) as live_target:
        live_target.set_caller(caller)
        await to_thread.run_sync(attack, live_target.pods)


async def test_requests_of_root(tmp_path: Path) -> None:
    """Each line to the control socket has its answer, which is never an internal error."""

    @given(st.lists(control_requests, min_size=1, max_size=6))
    def attack(path: Path, lines: Sequence[bytes]) -> None:
        for answer in converse(path, lines):
            output = json.loads(answer)
            assert output.keys() in ({"ok"}, {"error", "reason"})
            assert "the daemon failed" not in str(output.get("error"))

    async with target(tmp_path) as live_target:
        await to_thread.run_sync(attack, live_target.run)
