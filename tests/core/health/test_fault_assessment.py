"""Assessment of XIDs, memory errors and conditions."""

from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from metagpu.core.config.config import HealthConfig
from metagpu.core.contracts.driver import (
    DriverEvent,
    EccError,
    GpuCondition,
    GpuUnavailable,
    HealthDriver,
    RecoveryAction,
    RecoveryActionChanged,
    RemappedRows,
    Xid,
)
from metagpu.core.errors import DriverUnavailable
from metagpu.core.health.fault_assessment import (
    FaultAssessment,
    GpuRecovery,
    MigInstanceRef,
    find_problem,
    judge_condition,
    judge_event,
    read_condition,
)
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.xid_severity import CONTAINED_XIDS, DEFAULT_XIDS, Severity
from tests.rigs.build import gpu

ID = gpu(0).id
QUIET = 60.0
FINE = GpuCondition(memory_used=0, recovery_action=RecoveryAction.NONE)
SILENT = GpuCondition(memory_used=0)
NEEDY = GpuCondition(memory_used=0, recovery_action=RecoveryAction.GPU_RESET)


@pytest.mark.parametrize(
    ("event", "heard"),
    [
        (Xid(ID, 79), FaultAssessment(ID, "XID 79: GPU has fallen off the bus", fatal=True)),
        (Xid(ID, 13), FaultAssessment(ID, "XID 13: graphics engine exception", fatal=False)),
        (Xid(ID, 63), FaultAssessment(ID, "XID 63: row remapping recorded", fatal=False)),
        (Xid(ID, 999), FaultAssessment(ID, "XID 999: not in metagpu's table", fatal=False)),
        (Xid(None, 79), FaultAssessment(None, "XID 79: GPU has fallen off the bus", fatal=True)),
        (
            Xid(ID, 94, 0),
            FaultAssessment(ID, "XID 94 in MIG instance 0: contained memory error", fatal=False),
        ),
        (
            Xid(ID, 95, 3, 0),
            FaultAssessment(ID, "XID 95 in MIG instance 3: uncontained memory error", fatal=True),
        ),
        (
            EccError(ID, double_bit=True),
            FaultAssessment(ID, "uncorrected (double-bit) memory error", fatal=True),
        ),
        (
            EccError(ID, double_bit=False),
            FaultAssessment(ID, "corrected (single-bit) memory error", fatal=False),
        ),
        (GpuUnavailable(ID), FaultAssessment(ID, "the GPU does not answer", fatal=False)),
        (
            RecoveryActionChanged(ID),
            FaultAssessment(ID, "the recovery action changed", fatal=False),
        ),
    ],
)
def test_an_event_is_a_fault_or_a_notice(event: DriverEvent, heard: FaultAssessment) -> None:
    """Each event has a reason in words, and is fatal or not."""
    assert judge_event(event, HealthConfig()) == heard


@pytest.mark.parametrize("check", [find_problem, read_condition])
async def test_an_nvml_that_is_gone_is_no_fault_of_the_gpu(
    check: Callable[[HealthDriver, GpuId], Awaitable[object]],
) -> None:
    """A check of a GPU leaves it to its caller that NVML as a whole cannot be used."""

    class Gone:
        async def condition(self, gpu: GpuId) -> GpuCondition:  # noqa: ARG002
            raise DriverUnavailable("the driver was unloaded")

    with pytest.raises(DriverUnavailable):
        await check(cast("HealthDriver", Gone()), ID)


@pytest.mark.parametrize(("severity", "fatal"), [("application", False), ("fatal", True)])
def test_the_configuration_decides_what_is_fatal(severity: str, *, fatal: bool) -> None:
    """A configured severity has precedence."""
    health = HealthConfig(xids={79: Severity(severity)})

    assert judge_event(Xid(ID, 79), health).fatal == fatal


@pytest.mark.parametrize(
    ("code", "instance", "inside"),
    [
        (94, (7, 0), MigInstanceRef(7, 0)),
        (31, (7, None), MigInstanceRef(7)),
        (94, (None, None), None),
        (79, (7, 0), None),
        (109, (7, 0), None),
        (999, (7, 0), None),
    ],
)
def test_a_contained_fault_stays_in_its_instance(
    code: int, instance: tuple[int | None, int | None], inside: MigInstanceRef | None
) -> None:
    """A known contained fault concerns one instance, where NVML names the instance."""
    heard = judge_event(Xid(ID, code, *instance), HealthConfig(xids={code: Severity.FATAL}))

    assert heard.fatal
    assert heard.mig_instance == inside


def test_what_is_contained_is_in_the_table() -> None:
    """Contained XIDs are in the table, as an application's fault unless configured otherwise."""
    assert {DEFAULT_XIDS[code].severity for code in CONTAINED_XIDS} == {Severity.APPLICATION}


@pytest.mark.parametrize(
    ("condition", "refusal"),
    [
        (FINE, None),
        (SILENT, None),
        (NEEDY, "NVML asks for a recovery action: GPU reset"),
        (
            GpuCondition(0, recovery_action=RecoveryAction.NODE_REBOOT),
            "NVML asks for a recovery action: node reboot",
        ),
        (
            GpuCondition(0, recovery_action=RecoveryAction.RECOVER_IMEX_DOMAIN),
            "NVML asks for a recovery action: recover IMEX domain",
        ),
        (
            GpuCondition(0, remapped_rows=RemappedRows(0, 1, pending=False, failed=True)),
            "a memory row could not be remapped",
        ),
        (GpuCondition(0, remapped_rows=RemappedRows(9, 9, pending=True, failed=False)), None),
        (GpuCondition(0, ecc=True, ecc_uncorrected=7), None),
        (GpuCondition(0, mig_enabled=False, mig_pending=True), None),
    ],
)
def test_a_condition_refuses_or_does_not(condition: GpuCondition, refusal: str | None) -> None:
    """A required recovery action and memory beyond repair alone take a GPU out of service."""
    assert judge_condition(condition) == refusal


def test_recovery_takes_a_whole_quiet_period() -> None:
    """A GPU has recovered when its checks have passed for the quiet period, not before."""
    patient = GpuRecovery()

    assert [patient.record_check(at, FINE, QUIET) for at in (0, 30, 59.9, 60)] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("setback", [None, NEEDY], ids=["check failed", "action wanted"])
def test_a_failed_check_restarts_the_quiet_period(setback: GpuCondition | None) -> None:
    """A failed check restarts the quiet period."""
    patient = GpuRecovery()
    checks = [(0, FINE), (50, FINE), (55, setback), (60, FINE), (119, FINE), (120, FINE)]

    assert [patient.record_check(at, condition, QUIET) for at, condition in checks] == [
        False
    ] * 5 + [True]


def test_without_a_quiet_period_one_check_is_enough() -> None:
    """A quiet period of zero trusts the first check that passes."""
    assert GpuRecovery().record_check(7, FINE, 0)


@pytest.mark.parametrize(
    ("proof", "condition", "recovers"),
    [(False, SILENT, True), (True, SILENT, False), (True, FINE, True), (False, NEEDY, False)],
)
def test_silence_proves_nothing_after_a_fatal_xid(
    condition: GpuCondition, *, proof: bool, recovers: bool
) -> None:
    """With proof required, NVML must report that no action is needed."""
    patient = GpuRecovery(needs_proof=proof)
    patient.record_check(0, condition, QUIET)

    assert patient.record_check(QUIET, condition, QUIET) == recovers
