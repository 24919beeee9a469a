"""The conversation of two daemons, of which one hands the node over."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
import msgspec
import pytest
from msgspec.structs import replace

from metagpu.agent import predecessor as predecessor_module
from metagpu.agent.exchange import COMMAND, PROTOCOL, ExchangeTiming, HandedState
from metagpu.agent.hand_over import Duties, HandOver
from metagpu.agent.predecessor import connect_predecessor
from metagpu.core.config.profiles import ClusterChoice
from metagpu.core.errors import TakeoverFailed
from metagpu.core.health.fault_note import FaultNote, NotedCordon, NotedDevice, NotedFault
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Fault, Holder, Lease, ResourceName, Share, ShareId
from metagpu.core.runtime.tasks import PausableTasks
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.core.state.facts import LeasesHandedOver
from metagpu.core.state.registry import Registry
from metagpu.plugins.control.client import SOCKET_NAME
from metagpu.plugins.control.socket import control_server
from metagpu.plugins.kubelet.call_gate import CallGate
from tests.core.two_gpus import A_SHARES, B_SHARES, FOUND, OFFERED, A
from tests.rigs.waiting import skip

if TYPE_CHECKING:
    from metagpu.core.layout.backend_runner import BackendRunner

NOTE = FaultNote(cordons=(NotedCordon(A.id, "fan", 3),))
TIMING = ExchangeTiming(calls=0.05, answer=60, exchange=60, successor=1e9)


@dataclass
class FakeDuties(Duties):
    """Duties that only record what is asked of them."""

    lines: list[str] = field(default_factory=list)

    async def pause(self) -> None:
        """Record it."""
        self.lines.append("pause")

    def resume(self) -> None:
        """Record it."""
        self.lines.append("resume")


@dataclass
class Cluster:
    """A cluster that chose a profile."""

    keeps_labels: bool = False
    choice: ClusterChoice | None = field(default_factory=lambda: ClusterChoice(profile="small"))


@dataclass
class Old:
    """A daemon that may hand over."""

    hand_over: HandOver
    duties: FakeDuties
    gate: CallGate
    registry: Registry

    async def went_on(self) -> None:
        """Wait until the daemon has gone on."""
        with anyio.fail_after(30):
            while self.duties.lines[-1:] != ["resume"]:  # noqa: ASYNC110 - a list has no event
                await anyio.sleep(0.005)
        assert not self.gate.closed
        assert not self.hand_over.done.is_set()


@asynccontextmanager
async def old_daemon(folder: Path) -> AsyncIterator[Old]:
    """Serve the control socket of a daemon while the block lasts."""
    registry, gate = Registry(), CallGate()
    registry.apply(FOUND)
    registry.apply(OFFERED)
    runner = cast("BackendRunner", None)  # what these duties do needs none
    duties = FakeDuties(
        registry, KubeletCallStats(), runner, PausableTasks(()), Cluster(), lambda: NOTE
    )
    hand_over = HandOver(gate, duties, 0.01, TIMING)
    async with control_server(folder, {}, {COMMAND: hand_over.converse}):
        yield Old(hand_over, duties, gate, registry)


async def test_old_daemon_reports_what_it_knows(tmp_path: Path) -> None:
    """The new daemon gets all leases, cordons and the profile."""
    claimed = Lease(A_SHARES[0], 5)
    forgotten = Lease(B_SHARES[0], 5, Holder("team", "bob", "main"), unconfirmed=True)
    listed = Lease(A_SHARES[1], 5, Holder("team", "alice", "main"))

    async with old_daemon(tmp_path) as old:
        old.registry.apply(LeasesHandedOver((claimed, forgotten, listed), at=7))
        async with connect_predecessor(tmp_path, TIMING) as new:
            state = await new.begin()
            assert old.gate.closed
            await new.finish()
        assert old.hand_over.done.is_set()

    assert set(state.leases) == {replace(it, since=7) for it in (claimed, forgotten, listed)}
    assert state.note == NOTE
    assert state.choice == ClusterChoice(profile="small")
    assert old.duties.lines == ["pause"]


async def test_old_daemon_goes_on_when_the_new_one_hangs_up(tmp_path: Path) -> None:
    """The end of the connection, whatever its cause, is the end of the exchange."""
    async with old_daemon(tmp_path) as old:
        async with connect_predecessor(tmp_path, TIMING) as new:
            await new.begin()
            await new.expect_detach()
            await new.end_lists({ResourceName("a/b"): tmp_path / "a.sock"})
        await old.went_on()


async def test_new_daemon_notices_that_the_old_one_gave_up(tmp_path: Path) -> None:
    """An exchange that takes too long is given up, and none of its steps is possible any more."""
    async with old_daemon(tmp_path) as old, connect_predecessor(tmp_path, TIMING) as new:
        await new.begin()
        skip(TIMING.exchange)
        await old.went_on()
        with anyio.fail_after(30):
            await new.wait_gone()
        for _ in range(2):
            with pytest.raises(TakeoverFailed, match=r"hung up|has ended"):
                await new.expect_detach()
        assert not old.gate._detached


async def test_steps_after_a_refusal_begin_no_conversation(tmp_path: Path) -> None:
    """A step that is asked for again is not taken for the first message of an exchange."""
    async with old_daemon(tmp_path) as old, connect_predecessor(tmp_path, TIMING) as new:
        await new.begin()
        with pytest.raises(TakeoverFailed, match="unexpected step"):
            await new.begin()
        with pytest.raises(TakeoverFailed):
            await new.expect_detach()
        await old.went_on()


async def test_new_daemon_gives_up_before_the_old_one(tmp_path: Path) -> None:
    """Without time left, the exchange has failed for the new daemon, and the old one goes on."""
    async with old_daemon(tmp_path) as old:
        async with connect_predecessor(tmp_path, replace(TIMING, successor=0)) as new:
            with pytest.raises(TakeoverFailed, match="longer than 0 s"):
                await new.begin()
        assert not old.hand_over.done.is_set()


async def test_the_last_answer_counts_whenever_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old daemon that has given the node away has done so, though the time is over."""
    async with old_daemon(tmp_path) as old, connect_predecessor(tmp_path, TIMING) as new:
        await new.begin()
        readline = new._reader.readline

        async def read_late() -> bytes:
            line = await readline()
            new._ends = 0.0
            return line

        monkeypatch.setattr(new._reader, "readline", read_late)
        await new.finish()
        assert old.hand_over.done.is_set()


async def test_one_exchange_at_a_time(tmp_path: Path) -> None:
    """A second new daemon is refused, and the first goes on undisturbed."""
    async with old_daemon(tmp_path) as old, connect_predecessor(tmp_path, TIMING) as new:
        with pytest.raises(TakeoverFailed, match="another daemon is taking"):
            async with connect_predecessor(tmp_path, TIMING):
                raise AssertionError
        await new.begin()
        await new.finish()
        assert old.hand_over.done.is_set()


async def test_calls_that_last_are_waited_for(tmp_path: Path) -> None:
    """A daemon that creates an instance for a pod hands over later, and holds no call."""
    async with old_daemon(tmp_path) as old, anyio.create_task_group() as group:

        async def create(_: bytes) -> bytes:
            await anyio.sleep_forever()
            return b""

        group.start_soon(old.gate.answer, ResourceName("a/b"), "/x", b"", create)
        async with connect_predecessor(tmp_path, TIMING) as new:
            with pytest.raises(TakeoverFailed, match="answers calls of the kubelet"):
                await new.begin()
        assert not old.gate.closed
        assert old.duties.lines == []
        group.cancel_scope.cancel()


async def test_other_protocol_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons that know other steps do not begin an exchange."""
    monkeypatch.setattr(predecessor_module, "PROTOCOL", PROTOCOL + 1)
    async with old_daemon(tmp_path) as old:
        with pytest.raises(TakeoverFailed, match=f"hands over by protocol {PROTOCOL}"):
            async with connect_predecessor(tmp_path, TIMING):
                raise AssertionError
        assert old.duties.lines == []


@pytest.mark.parametrize(
    ("state", "known"),
    [
        ({}, HandedState()),
        ({"listed": ["a/b"], "dreams": 3}, HandedState(listed=(ResourceName("a/b"),))),
    ],
)
async def test_fields_of_other_versions_are_no_error(
    tmp_path: Path, state: dict[str, Any], known: HandedState
) -> None:
    """A field that is missing has its default, and an unknown one is ignored."""
    closed = anyio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in ({"protocol": PROTOCOL, "version": "9", "more": 1}, state):
            await reader.readline()
            writer.write(json.dumps({"ok": answer}).encode() + b"\n")
        await reader.read()
        writer.close()
        await writer.wait_closed()
        closed.set()

    async with (
        await asyncio.start_unix_server(serve, tmp_path / SOCKET_NAME),
        connect_predecessor(tmp_path, TIMING) as new,
    ):
        assert await new.begin() == known
    await closed.wait()


HANDED = """{
  "leases": [
    {"share": {"id": "GPU-1::m07", "gpu": "GPU-1", "resource": "cnvrg.io/metagpu",
               "backend": "fraction", "number": 7, "footprint": ["m07"], "memory": 1024,
               "replica": true, "interchangeable": true},
     "since": 5.5,
     "holder": {"namespace": "team", "pod": "alice", "container": "main"},
     "provisioned_at_start": true, "unanswered": true, "unconfirmed": true,
     "from_checkpoint": true}
  ],
  "listed": ["cnvrg.io/metagpu"],
  "note": {
    "faults": [{"gpu": "GPU-1", "reason": "XID 79", "since": 6.5, "fault": "xid",
                "needs_proof": true}],
    "devices": [{"gpu": "GPU-2", "device": "MIG-1", "reason": "XID 94", "since": 7.5}],
    "cordons": [{"gpu": "GPU-2", "reason": "fan", "since": 8.5}]
  },
  "choice": {"profile": "small"}
}"""
"""What a daemon of 0.1.0 hands over: every later one has to understand it."""


def test_state_of_the_first_version_is_understood() -> None:
    """No field of the first version is renamed or changes its meaning."""
    state = msgspec.convert(json.loads(HANDED), HandedState)

    faulty, cordoned = GpuId("GPU-1"), GpuId("GPU-2")
    resource = ResourceName("cnvrg.io/metagpu")
    slots = frozenset({"m07"})
    share = Share(ShareId("GPU-1::m07"), faulty, resource, "fraction", 7, slots, 1024, True, True)  # noqa: FBT003
    assert state == HandedState(
        (Lease(share, 5.5, Holder("team", "alice", "main"), True, True, True, True),),  # noqa: FBT003
        (resource,),
        FaultNote(
            (NotedFault(faulty, "XID 79", 6.5, Fault.XID, needs_proof=True),),
            (NotedDevice(cordoned, "MIG-1", "XID 94", 7.5),),
            (NotedCordon(cordoned, "fan", 8.5),),
        ),
        ClusterChoice(profile="small"),
    )
