"""What was done about memory, as data and in words."""

from signal import Signals

from metagpu.core.facts import GpusFound
from metagpu.core.gpu import MIB
from metagpu.core.model import Holder
from metagpu.core.tally import Tally, tally_lines, tally_report
from tests.build import after, gpu

A, B = gpu(0), gpu(1)
SNAPSHOT = after(GpusFound((A, B), at=0))
ALICE = Holder("team", "alice", "main")


def test_the_tally_is_written_for_people() -> None:
    """What was done is a line, and nothing is none."""
    tally = Tally(warnings=3)
    assert tally_lines(tally_report(Tally(), SNAPSHOT)) == []
    tally.signals[Signals.SIGTERM] = 2

    assert tally_lines(tally_report(tally, SNAPSHOT, 4)) == [
        "memory, since the daemon's start: 3 warnings, 2 SIGTERM sent",
        "limits of memory that the driver itself keeps: 4",
    ]


def test_the_tally_is_told() -> None:
    """What the enforcer did since the start, and who is over now."""
    tally = Tally(warnings=3, over={B.id: {ALICE: 700 * MIB}})
    tally.signals[Signals.SIGTERM] = 2

    assert tally_report(tally, SNAPSHOT, 4) == {
        "driverLimits": 4,
        "warnings": 3,
        "signals": {"SIGTERM": 2, "SIGKILL": 0},
        "overMiB": [{"gpu": 1, "container": "team/alice (main)", "mib": 700}],
    }
