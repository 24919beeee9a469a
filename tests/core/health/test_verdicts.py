"""The verdicts on GPUs, and faults in bus and log."""

import anyio
import pytest
from msgspec.structs import replace

from metagpu.core.config.config import HealthConfig
from metagpu.core.contracts.driver import DriverEvent, EccError
from metagpu.core.errors import MetagpuError
from metagpu.core.health import verdicts as fault_news
from metagpu.core.health.fault_assessment import judge_event
from metagpu.core.health.verdicts import (
    SIZE_LIMIT,
    FaultLog,
    FaultNote,
    GpuVerdicts,
    NotedCordon,
    NotedDevice,
    NotedFault,
    decode,
    encode,
    take_note,
)
from metagpu.core.model.shares import CordonSource, Fault
from metagpu.core.state.facts import (
    GpuCordoned,
    GpuFaulted,
    GpuNeedsProof,
    GpusFound,
    InstanceFaulted,
)
from metagpu.core.state.registry import EventBus, Registry
from tests.rigs.build import after, gpu
from tests.rigs.logs import capture_module_logs

A, B = gpu(0).id, gpu(1).id
XID = NotedFault(A, "XID 79", 1, Fault.XID, needs_proof=True)
DEVICE = NotedDevice(B, "MIG-1", "XID 94", 2)
CORDON = NotedCordon(B, "fan", 3)
NOTE = FaultNote((XID,), (DEVICE,), (CORDON,))


def started(note: FaultNote) -> GpuVerdicts:
    """Return the verdicts of a daemon that has read this note at its start."""
    registry = Registry()
    registry.apply(GpusFound((gpu(0), gpu(1)), at=0))
    verdicts = GpuVerdicts(registry, lambda: 9.0)
    verdicts.restore(note)
    return verdicts


def known(verdicts: GpuVerdicts) -> FaultNote:
    """Return the faults and cordons that the registry has."""
    return take_note(verdicts.registry.snapshot)


def test_faults_of_the_last_moment_are_adopted() -> None:
    """A fault that the daemon before found after its note was read is known to this one."""
    verdicts = started(FaultNote())
    verdicts.adopt(NOTE)

    assert known(verdicts) == NOTE
    assert verdicts.recovering[A].needs_proof


def test_recoveries_of_the_last_moment_are_adopted() -> None:
    """A GPU that the daemon before brought back after its note was read is in service."""
    verdicts = started(NOTE)
    verdicts.adopt(FaultNote())

    assert known(verdicts) == FaultNote()
    assert not verdicts.recovering


def test_a_fault_that_this_daemon_found_stays() -> None:
    """The daemon before may not have heard it."""
    verdicts = started(NOTE)
    verdicts.fault(A, "XID 48", Fault.XID, proof=True)
    verdicts.adopt(FaultNote())

    assert [fault.gpu for fault in known(verdicts).faults] == [A]


def test_a_fault_that_a_later_note_lacks_has_ended() -> None:
    """A daemon that waits hears a fault too, and not the operator who acknowledges it."""
    verdicts = started(FaultNote())
    verdicts.fault(A, "XID 48", Fault.XID, proof=True)
    verdicts.registry.apply(InstanceFaulted(B, "MIG-1", "XID 94", 9.0))
    before = known(verdicts)
    verdicts.adopt(FaultNote(), written=9.0)
    assert known(verdicts) == before

    verdicts.adopt(FaultNote(), written=10.0)
    assert known(verdicts) == FaultNote()


def test_the_proof_that_either_daemon_asks_for_is_needed() -> None:
    """A fault that silence ends is not taken for one that needs proof, nor the reverse."""
    silent = FaultNote((NotedFault(A, "remapped rows", 5, Fault.MEMORY),))

    verdicts = started(silent)
    verdicts.adopt(NOTE)
    assert verdicts.recovering[A].needs_proof

    verdicts = started(FaultNote())
    verdicts.fault(A, "XID 79", Fault.XID, proof=True)
    verdicts.adopt(silent)
    assert verdicts.recovering[A].needs_proof


@pytest.mark.parametrize("asked", [(False, False), (True, False), (False, True)])
def test_the_proof_that_any_fault_asks_for_is_needed(asked: tuple[bool, bool]) -> None:
    """A fault that silence would end does not end the need of one before it."""
    verdicts = started(FaultNote())
    for proof in asked:
        verdicts.fault(A, "a fault", Fault.XID, proof=proof)

    assert verdicts.recovering[A].needs_proof == any(asked)
    assert verdicts.registry.snapshot.gpus[A].verdict.needs_proof == any(asked)


def test_a_kind_of_fault_of_a_newer_daemon_is_restored() -> None:
    """A GPU stays out of service, whatever this daemon knows of the reason."""
    newer = decode(encode(FaultNote((NotedFault(A, "melted", 1, "heat"),)), "boot"), "boot")
    verdict = started(newer).registry.snapshot.gpus[A].verdict

    assert (verdict.healthy, verdict.reason, verdict.fault) == (False, "melted", None)


def log(fault_log: FaultLog, event: DriverEvent) -> None:
    """Log an event with its meaning under the default rules."""
    fault_log.log(event, judge_event(event, HealthConfig()))


async def test_corrected_memory_errors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's first is logged at once, those of the next minute with the first one after it."""
    now = 1000.0
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    fault_log = FaultLog(EventBus(), lambda: 7.0)

    with capture_module_logs(fault_news) as logs:
        for now in (1000.0, 1001.0, 1059.0, 1060.0, 1061.0):  # noqa: B007 - the clock reads it
            log(fault_log, EccError(gpu(0).id, double_bit=False))
        log(fault_log, EccError(gpu(1).id, double_bit=False))

    assert [(entry["gpu"], entry["count"]) for entry in logs] == [
        (gpu(0).id, 1),
        (gpu(0).id, 3),
        (gpu(1).id, 1),
    ]


async def test_each_uncorrected_error_is_logged() -> None:
    """Each uncorrected memory error is logged."""
    fault_log = FaultLog(EventBus(), lambda: 7.0)

    with capture_module_logs(fault_news) as logs:
        for _ in range(2):
            log(fault_log, EccError(gpu(0).id, double_bit=True))

    assert [entry["event"] for entry in logs] == ["nvml event"] * 2


A, B = gpu(0).id, gpu(1).id
FOUND = GpusFound((gpu(0), gpu(1)), at=0)
SAVED = FaultNote(
    (NotedFault(A, "XID 95", 1.5, Fault.XID, needs_proof=True),),
    (NotedDevice(B, "MIG-1", "XID 94", 2.5),),
    (NotedCordon(B, "fan", 3.5),),
)


def test_a_note_has_what_nobody_else_can_tell() -> None:
    """Faults with time and reason, faulty MIG devices and cordons are noted."""
    snapshot = after(
        FOUND,
        GpuFaulted(A, "XID 95", 1.5, Fault.XID),
        GpuNeedsProof(A),
        InstanceFaulted(B, "MIG-1", "XID 94", 2.5),
        GpuCordoned(B, "fan", 3.5),
        GpuCordoned(
            A, "an upgrade: the Node's label says how long", 4, CordonSource.DRIVER_UPGRADE
        ),
    )

    assert take_note(snapshot) == SAVED
    long = take_note(after(FOUND, GpuFaulted(A, "x" * SIZE_LIMIT, 1.5, Fault.XID)))
    assert len(encode(long, "boot")) < SIZE_LIMIT / 16, "a note of 16 GPUs would not be read"


@pytest.mark.parametrize("fault", [Fault.DRIVER, Fault.NO_ANSWER, Fault.NOT_LISTED])
def test_a_fault_that_a_check_finds_is_not_noted(fault: Fault) -> None:
    """Faults of answering are found again by the next daemon; with a fatal XID they are noted."""
    lost = GpuFaulted(A, "the GPU is lost", 1, fault)

    assert take_note(after(FOUND, lost)) == FaultNote()
    assert take_note(after(FOUND, lost, GpuNeedsProof(A))).faults[0].needs_proof


def test_a_note_is_of_one_boot() -> None:
    """A note is read back in its boot; in another boot it is empty."""
    assert decode(encode(SAVED, "boot"), "boot") == SAVED
    assert decode(encode(SAVED, "boot"), "another") == FaultNote()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"version": 2, "boot": "boot", "note": {}}',
        b'{"version": 1, "note": {}}',
        encode(SAVED, "boot")[:-5],
        encode(SAVED, "boot").replace(b"1.5", b'"x"'),
    ],
)
def test_a_broken_note_is_an_error(text: bytes) -> None:
    """A text that is no note of this version is an error of ours."""
    with pytest.raises(MetagpuError):
        decode(text, "boot")


def test_a_note_is_parted_by_gpus() -> None:
    """The entries of some GPUs and those of all others are the whole note."""
    assert SAVED.of({B}) == FaultNote((), SAVED.devices, SAVED.cordons)
    assert SAVED.of({B}, but=True).joined(SAVED.of({B})) == SAVED


def test_entries_that_another_note_lacks() -> None:
    """A fault that needs proof is more than one that needs none, and no less."""
    [proven] = SAVED.faults
    silent = FaultNote((replace(proven, needs_proof=False),))

    assert SAVED.without(SAVED) == FaultNote()
    assert SAVED.without(FaultNote()) == SAVED
    assert SAVED.without(silent) == SAVED
    assert silent.without(SAVED) == FaultNote()
