"""Whatever comes and goes, no instance leaks: a GPU in MIG's hands, on a simulated node."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metagpu.backends.mig import MigBackend, keeping, ledger, making, turns
from metagpu.backends.mps_daemon.supervisor import Timing
from metagpu.core.facts import LeasesObserved
from metagpu.core.injection import Injection
from metagpu.core.model import Share
from metagpu.sim.gpu import SimProcess
from metagpu.sim.instances import Making
from tests.mig_rig import configured, cut
from tests.served import Care, in_care

PID: Final = 4242


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nobody wait for what takes seconds on a real node."""
    monkeypatch.setattr(ledger, "GRACE", 0.02)
    for module in (ledger, keeping):
        monkeypatch.setattr(module, "POLL", 0.02)
        monkeypatch.setattr(module, "LOOK", 0.02)
    monkeypatch.setattr(turns, "TURN", 0.01)
    monkeypatch.setattr(making, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(making, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(MigBackend, "timing", Timing(period=0.1, retry=0.02, deadline=20.0))


class Node:
    """A GPU, what pods hold of it, and what goes wrong; each act is what a node may do next."""

    def __init__(self, care: Care) -> None:
        self.care = care
        self.held = list[Share]()
        self.gpu = care.node.gpus[0]

    def ask(self, pick: int) -> None:
        """Let a container be admitted with a share that is free."""
        state = self.care.state()
        free = [it for it in state.shares if it.id not in state.leases and it.id not in state.shut]
        if free:
            self.held.append(free[pick % len(free)])
            self.care.grant(self.held[-1])

    def give_back(self, pick: int) -> None:
        """Let a pod end."""
        if self.held:
            self.care.release(self.held.pop(pick % len(self.held)))

    def run(self, pick: int) -> None:
        """Let a program come, on any instance there is."""
        with self.care.node.changed:
            there = [(it.number, c.number) for it, c in self.gpu.mig.computes]
        if there:
            where = there[pick % len(there)]
            self.care.node.add_process(self.gpu, SimProcess(PID, None, *where))

    def end(self, _: int) -> None:
        """Let all programs end."""
        with self.care.node.changed:
            self.gpu.processes.clear()

    def fail(self, pick: int) -> None:
        """Let the next instances fail, in either half."""
        self.gpu.mig.making = Making(failures=pick % 2, compute_failures=pick % 3)

    def be_busy(self, _: int) -> None:
        """Let the driver be busy for a moment."""
        self.gpu.mig.making = Making(in_use_until=anyio.current_time() + 0.03)

    def reset(self, _: int) -> None:
        """Reset the GPU: all instances are gone."""
        self.care.node.recover(self.gpu)

    def present(self) -> set[str]:
        """Say what is really there, as share ids do."""
        with self.care.node.changed:
            return {
                f"{self.gpu.board.mig_name(it.profile)}@{it.start}"
                for it in self.gpu.mig.present.values()
            }


ACTS: Final = (
    "ask",
    "ask",
    "ask",
    "give_back",
    "give_back",
    "run",
    "end",
    "fail",
    "be_busy",
    "reset",
)


_acts = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 30)), max_size=14)


@settings(max_examples=25)
@given(_acts)
def test_no_sequence_leaks(acts: Sequence[tuple[str, int]]) -> None:
    """When all pods and programs have ended no instance is left, and everything is on offer."""
    anyio.run(_all_of, acts, configured("keepWarm: 0s, deadline: 1s"), set())


@settings(max_examples=15)
@given(_acts)
def test_a_layout_is_there_whatever_happened(acts: Sequence[tuple[str, int]]) -> None:
    """When all pods and programs have ended exactly the layout is there, all of it on offer."""
    layout = {"3g.20gb@4", "2g.10gb@2", "1g.5gb@0", "1g.5gb@1"}
    anyio.run(_all_of, acts, cut("layout: {3g.20gb: 1, 2g.10gb: 1, 1g.5gb: 2}"), layout)


@settings(max_examples=4)
@given(_acts)
def test_control_daemons_are_where_instances_are(acts: Sequence[tuple[str, int]]) -> None:
    """When all has ended each instance has one of its own that answers, and no other is left."""
    layout = {"3g.20gb@4", "1g.5gb@2", "1g.5gb@3"}
    options = "layout: {3g.20gb: 1, 1g.5gb: 2}, mps: {replicas: {1g.5gb: 2, 3g.20gb: 3}}"
    with tempfile.TemporaryDirectory(prefix="mg", dir="/tmp") as folder:
        anyio.run(_all_of, acts, cut(options), layout, folder)
        assert not _running(folder)


def _running(folder: str) -> set[str]:
    """Say which devices have a control daemon; it writes its number down, and takes it along."""
    return {file.parts[-3] for file in Path(folder).glob("mps/*/pipe/*.pid")}


async def _all_of(
    acts: Sequence[tuple[str, int]], text: str, at_last: set[str], folder: str = "/nowhere"
) -> None:
    injection = Injection(run_dir=folder)
    async with in_care(text, boards="a100-40gb:1", enabled=True, injection=injection) as care:
        node = Node(care)
        care.registry.apply(LeasesObserved({}, at=0))
        await _until(lambda: "mig" not in care.state().suspended)

        for act, pick in acts:
            getattr(node, act)(pick)
            await anyio.sleep(0.005)

        for share in node.held:
            care.release(share)
        node.end(0)
        node.gpu.mig.making = Making()
        await _until(lambda: node.present() == at_last and not care.state().shut)
        if folder != "/nowhere":
            devices = {made.device for made in care.state().stocks["mig"].made.values()}
            await _until(lambda: _running(folder) == devices)


async def _until(is_so: object) -> None:
    assert callable(is_so)
    with anyio.fail_after(30):
        while not is_so():  # noqa: ASYNC110 - the node tells nobody
            await anyio.sleep(0.005)
