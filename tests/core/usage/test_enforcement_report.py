"""The counters of memory enforcement, as data."""

from signal import Signals

from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import Holder
from metagpu.core.reports.schema.daemon import EnforcementReport, OverLimitReport
from metagpu.core.state.facts import GpusFound
from metagpu.core.usage.enforcer import EnforcementRecord, enforcement_report
from tests.rigs.build import after, gpu

A, B = gpu(0), gpu(1)
SNAPSHOT = after(GpusFound((A, B), at=0))
ALICE = Holder("team", "alice", "main")


def test_the_stats_are_data() -> None:
    """The stats have the enforcer's actions, and the containers above their limit."""
    tally = EnforcementRecord(warnings=3, over_limit={B.id: {ALICE: 700 * MIB}})
    tally.signals[Signals.SIGTERM] = 2

    assert enforcement_report(tally, SNAPSHOT, 4) == EnforcementReport(
        driver_limits=4,
        warnings=3,
        signals={"SIGTERM": 2, "SIGKILL": 0},
        over_limit=[OverLimitReport(1, "team/alice (main)", 700)],
    )
