"""The probes: what the kubelet is told of a daemon."""

import anyio
import pytest

from metagpu.core.facts import RivalMet
from metagpu.core.model import ResourceName
from metagpu.core.snapshot import Snapshot
from metagpu.plugins.metrics.probes import Pulse, ills, lacks
from metagpu.plugins.record import KubeletRecord
from tests.build import METAGPU, after, gpu, offered


def test_nothing_ails_a_daemon_whose_parts_run() -> None:
    """A loop that is a little late is none of the kubelet's business."""
    assert ills(0.5, []) == []


def test_what_a_restart_would_mend() -> None:
    """A part that has ended, and a loop in which nothing is answered in time."""
    assert ills(7.26, ["leases"]) == [
        "a part of metagpu has ended: leases",
        "the event loop was 7.3 s late",
    ]


def test_ready_is_every_resource_at_the_kubelet() -> None:
    """What is missing is named; before there is an offer there is nothing to be ready with."""
    record = KubeletRecord()
    _, snapshot = offered(gpu(0))

    assert lacks(Snapshot(), record) == ["nothing is on offer yet"]
    assert lacks(snapshot, record) == [f"{METAGPU} is not registered with the kubelet"]

    record.of(METAGPU).listed = True
    assert lacks(snapshot, record) == []


def test_a_rival_is_named() -> None:
    """A resource that another plugin serves is not ours to be ready with."""
    _, snapshot = offered(gpu(0))
    snapshot = after(RivalMet(ResourceName(METAGPU), "/dp/other.sock"), since=snapshot)

    assert lacks(snapshot, KubeletRecord()) == [
        f"{METAGPU} is served by another device plugin on /dp/other.sock"
    ]


async def test_the_pulse_measures_how_late_the_loop_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment at which it should have woken."""
    clock, pulse = iter([10.0, 11.25]), Pulse()

    async def at_once(_: float) -> None:
        """Wake when the clock says."""

    monkeypatch.setattr(anyio, "current_time", lambda: next(clock))
    monkeypatch.setattr(anyio, "sleep", at_once)
    with pytest.raises(RuntimeError, match="StopIteration"):  # the clock has no more to say
        await pulse.run()

    assert pulse.lag == 0.25
