"""The severity of XIDs, and the overrides of a configuration."""

import pytest

from metagpu.core.model.xid_severity import (
    DEFAULT_XIDS,
    UNKNOWN_XID,
    Severity,
    XidRule,
    rule_for,
)

APPLICATION = [13, 31, 43, 45, 68, 109]
"""What clusters are used to from the NVIDIA device plugin: an application's own fault."""


@pytest.mark.parametrize("code", APPLICATION)
def test_a_programs_fault_leaves_the_gpu_in_service(code: int) -> None:
    """An XID that a program causes is never held against the GPU."""
    assert rule_for(code, {}).severity is Severity.APPLICATION


@pytest.mark.parametrize("code", [46, 48, 62, 64, 74, 79, 95, 119, 120, 140])
def test_faulty_hardware_is_fatal(code: int) -> None:
    """An XID of faulty hardware keeps containers from the GPU."""
    assert rule_for(code, {}).severity is Severity.FATAL


@pytest.mark.parametrize("code", [63, 92, 154])
def test_a_notice_is_no_fault(code: int) -> None:
    """An XID of hardware that goes on working is no fault."""
    assert rule_for(code, {}).severity is Severity.NOTICE


@pytest.mark.parametrize("code", [0, 1, 999, -1])
def test_an_unknown_xid_is_a_notice(code: int) -> None:
    """A code that is not in the table is left to the GPU's recovery action."""
    assert rule_for(code, {}) == UNKNOWN_XID == XidRule(Severity.NOTICE, "not in metagpu's table")


def test_the_configuration_decides_the_severity() -> None:
    """An override changes the severity of its code alone, known or not, and keeps the meaning."""
    overrides = {79: Severity.NOTICE, 999: Severity.FATAL}

    assert rule_for(79, overrides) == XidRule(Severity.NOTICE, DEFAULT_XIDS[79].meaning)
    assert rule_for(999, overrides) == XidRule(Severity.FATAL, UNKNOWN_XID.meaning)
    assert rule_for(48, overrides) == DEFAULT_XIDS[48]


def test_the_table_can_be_read_by_people() -> None:
    """Every row has a meaning in lower-case words, as a reason in a log wants it."""
    assert [
        code
        for code, rule in DEFAULT_XIDS.items()
        if not rule.meaning or rule.meaning.endswith(".")
    ] == []
