"""The rules of health, apart from the loop that follows them."""

import pytest

from metagpu.core.config import Health
from metagpu.core.driver import (
    Condition,
    DriverEvent,
    EccError,
    GpuUnavailable,
    RecoveryAction,
    RecoveryActionChanged,
    RemappedRows,
    Xid,
)
from metagpu.core.judgement import Heard, Inside, Patient, judge_condition, judge_event
from metagpu.core.xid import CONTAINED, DEFAULT_XIDS, Severity
from tests.build import gpu

ID = gpu(0).id
QUIET = 60.0
FINE = Condition(memory_used=0, recovery_action=RecoveryAction.NONE)
SILENT = Condition(memory_used=0)
NEEDY = Condition(memory_used=0, recovery_action=RecoveryAction.GPU_RESET)


@pytest.mark.parametrize(
    ("event", "heard"),
    [
        (Xid(ID, 79), Heard(ID, "XID 79: GPU has fallen off the bus", fatal=True)),
        (Xid(ID, 13), Heard(ID, "XID 13: graphics engine exception", fatal=False)),
        (Xid(ID, 63), Heard(ID, "XID 63: row remapping recorded", fatal=False)),
        (Xid(ID, 999), Heard(ID, "XID 999: not in metagpu's table", fatal=False)),
        (Xid(None, 79), Heard(None, "XID 79: GPU has fallen off the bus", fatal=True)),
        (
            Xid(ID, 94, 0),
            Heard(ID, "XID 94 in MIG instance 0: contained memory error", fatal=False),
        ),
        (
            Xid(ID, 95, 3, 0),
            Heard(ID, "XID 95 in MIG instance 3: uncontained memory error", fatal=True),
        ),
        (
            EccError(ID, double_bit=True),
            Heard(ID, "uncorrected (double-bit) memory error", fatal=True),
        ),
        (
            EccError(ID, double_bit=False),
            Heard(ID, "corrected (single-bit) memory error", fatal=False),
        ),
        (GpuUnavailable(ID), Heard(ID, "it does not answer", fatal=False)),
        (RecoveryActionChanged(ID), Heard(ID, "the recovery action changed", fatal=False)),
    ],
)
def test_an_event_is_a_fault_or_something_to_tell(event: DriverEvent, heard: Heard) -> None:
    """Each event has a reason in words, and is fatal or not."""
    assert judge_event(event, Health()) == heard


@pytest.mark.parametrize(("severity", "fatal"), [("application", False), ("fatal", True)])
def test_the_configuration_decides_what_is_fatal(severity: str, *, fatal: bool) -> None:
    """A severity in the configuration is the one that counts."""
    health = Health(xids={79: Severity(severity)})

    assert judge_event(Xid(ID, 79), health).fatal == fatal


@pytest.mark.parametrize(
    ("code", "instance", "inside"),
    [
        (94, (7, 0), Inside(7, 0)),
        (31, (7, None), Inside(7)),
        (94, (None, None), None),
        (79, (7, 0), None),
        (109, (7, 0), None),
        (999, (7, 0), None),
    ],
)
def test_a_contained_fault_stays_in_its_instance(
    code: int, instance: tuple[int | None, int | None], inside: Inside | None
) -> None:
    """Only what is known to be contained, and only where NVML names the instance."""
    heard = judge_event(Xid(ID, code, *instance), Health(xids={code: Severity.FATAL}))

    assert heard.fatal
    assert heard.inside == inside


def test_what_is_contained_is_in_the_table() -> None:
    """And is an application's fault unless the configuration says otherwise."""
    assert {DEFAULT_XIDS[code].severity for code in CONTAINED} == {Severity.APPLICATION}


@pytest.mark.parametrize(
    ("condition", "refusal"),
    [
        (FINE, None),
        (SILENT, None),
        (NEEDY, "NVML asks for a recovery action: GPU reset"),
        (
            Condition(0, recovery_action=RecoveryAction.NODE_REBOOT),
            "NVML asks for a recovery action: node reboot",
        ),
        (
            Condition(0, recovery_action=RecoveryAction.RECOVER_IMEX_DOMAIN),
            "NVML asks for a recovery action: recover IMEX domain",
        ),
        (
            Condition(0, remapped_rows=RemappedRows(0, 1, pending=False, failed=True)),
            "a row of its memory could not be remapped",
        ),
        (Condition(0, remapped_rows=RemappedRows(9, 9, pending=True, failed=False)), None),
        (Condition(0, ecc=True, ecc_uncorrected=7), None),
        (Condition(0, mig_enabled=False, mig_pending=True), None),
    ],
)
def test_a_condition_refuses_or_does_not(condition: Condition, refusal: str | None) -> None:
    """Only a recovery action that is wanted, or memory that cannot be mended, refuses service."""
    assert judge_condition(condition) == refusal


def test_recovery_takes_a_whole_quiet_period() -> None:
    """A GPU has recovered when its checks have passed for the quiet period, not before."""
    patient = Patient()

    assert [patient.checked(at, FINE, QUIET) for at in (0, 30, 59.9, 60)] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("setback", [None, NEEDY], ids=["check failed", "action wanted"])
def test_a_setback_starts_the_quiet_period_anew(setback: Condition | None) -> None:
    """A check that fails in between costs all that was waited for."""
    patient = Patient()
    checks = [(0, FINE), (50, FINE), (55, setback), (60, FINE), (119, FINE), (120, FINE)]

    assert [patient.checked(at, condition, QUIET) for at, condition in checks] == [False] * 5 + [
        True
    ]


def test_without_a_quiet_period_one_check_is_enough() -> None:
    """A quiet period of zero trusts the first check that passes."""
    assert Patient().checked(7, FINE, 0)


@pytest.mark.parametrize(
    ("proof", "condition", "recovers"),
    [(False, SILENT, True), (True, SILENT, False), (True, FINE, True), (False, NEEDY, False)],
)
def test_silence_proves_nothing_after_a_fatal_xid(
    condition: Condition, *, proof: bool, recovers: bool
) -> None:
    """Where proof is wanted, NVML must say that nothing is needed; saying nothing will not do."""
    patient = Patient(proof=proof)
    patient.checked(0, condition, QUIET)

    assert patient.checked(QUIET, condition, QUIET) == recovers
