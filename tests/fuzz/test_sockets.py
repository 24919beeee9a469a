"""Nothing that is sent to the daemon's sockets crashes it, hangs it, or is told of a neighbour.

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

from metagpu.core.model import Holder
from metagpu.plugins import control, pod_folder, pod_socket
from metagpu.sim.gpu import SimProcess
from metagpu.sim.host import SimHost
from metagpu.sim.kubelet import Pod
from tests.agent_rig import METAGPU, agent_at_work
from tests.fuzz.callers import Heard, call, call_and_go, converse, frames
from tests.fuzz.inputs import control_requests, pod_requests
from tests.host_rig import running
from tests.mgctl_rig import packed
from tests.waiting import until

ALICE, NEIGHBOUR = Holder("default", "alice", "main"), Holder("default", "zebra", "main")
NEIGHBOURS_MIB = 31337
STRANGER = "0::/user.slice/session-1.scope\n"

pytestmark = pytest.mark.timeout(900)


@dataclass
class Target:
    """A daemon at work whose containers are Alice's, which is this process, and a neighbour's."""

    run: Path
    pods: Path
    machine: SimHost

    def come_as(self, holder: Holder | None) -> None:
        """Be in a container, or beside all of them."""
        if holder is None:
            self.machine.show(os.getpid(), STRANGER)
        else:
            self.machine.house(os.getpid(), holder)

    async def is_answered(self) -> bool:
        """Tell whether an honest `mgctl` is told of its own pod."""
        request = packed("get", "pods", "-o", "json")
        heard = await to_thread.run_sync(call, self.pods, request)
        return b"alice" in heard.data


@asynccontextmanager
async def target(tmp_path: Path) -> AsyncIterator[Target]:
    """Run the whole agent while the block lasts; see at its end that it was not hurt."""
    machine = SimHost(tmp_path)
    pods, folder = tmp_path / "pods", tmp_path / "pods" / pod_folder.SOCKET_NAME
    with capture_logs() as logs:
        async with (
            agent_at_work(tmp_path, host=machine.host, pods=pods) as scene,
            control.controlled(tmp_path, scene.agent.commands) as own,
            running() as neighbours,
        ):
            await scene.until(20, 20)
            for name in ("alice", "zebra"):
                await scene.kubelet.admit(Pod.single(name, {METAGPU: 2}))
            await scene.told()
            machine.house(os.getpid(), ALICE)
            machine.house(neighbours.pid, NEIGHBOUR)
            scene.node.add_process(
                scene.node.gpus[0], SimProcess(neighbours.pid, NEIGHBOURS_MIB << 20)
            )
            it = Target(own, folder, machine)
            await until(anyio.Path(folder).exists, 30)
            yield it

            it.come_as(ALICE)
            await until(it.is_answered, 30)
            status = await to_thread.run_sync(converse, it.run, [b'{"command": "status"}\n'])
            assert "ok" in json.loads(status[0])
    assert not [line for line in logs if line["log_level"] in {"error", "critical"}]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let callers come as often as they can: what is kept off or waited for finds nothing."""
    monkeypatch.setattr(pod_socket, "REQUESTS_A_SECOND", 1e6)
    monkeypatch.setattr(pod_socket, "_ACCEPTED_A_SECOND", 1e6)
    monkeypatch.setattr(pod_socket, "REQUEST_TIME", 0.1)


def check(heard: Heard) -> None:
    """See that an answer tells nothing of the neighbour, and is well formed if it is whole."""
    assert NEIGHBOUR.pod.encode() not in heard.data
    assert str(NEIGHBOURS_MIB).encode() not in heard.data

    if heard.whole:
        told = frames(heard.data)
        assert not told or told[-1][0] == b"x"


@pytest.mark.parametrize("caller", [ALICE, None], ids=["from a pod", "from no pod"])
async def test_what_containers_send(tmp_path: Path, caller: Holder | None) -> None:
    """Whatever a container sends: a whole answer or none, and nothing about anybody else."""

    @given(st.lists(pod_requests, min_size=1, max_size=4), st.booleans())
    def attack(path: Path, requests: Sequence[bytes], stay: bool) -> None:  # noqa: FBT001 - it is drawn
        for request in requests:
            if stay:
                heard = call(path, request)
                check(heard)
                assert caller is not None or b"alice" not in heard.data
            else:
                call_and_go(path, request)

    async with target(tmp_path) as it:
        it.come_as(caller)
        await to_thread.run_sync(attack, it.pods)


async def test_what_root_sends(tmp_path: Path) -> None:
    """Each line to the daemon's own socket has its answer, which is never a failure of ours."""

    @given(st.lists(control_requests, min_size=1, max_size=6))
    def attack(path: Path, lines: Sequence[bytes]) -> None:
        for answer in converse(path, lines):
            said = json.loads(answer)
            assert said.keys() in ({"ok"}, {"error"})
            assert "the daemon failed" not in str(said.get("error"))

    async with target(tmp_path) as it:
        await to_thread.run_sync(attack, it.run)
