"""The note of faults and cordons, as a value."""

import pytest
from msgspec.structs import replace

from metagpu.core.errors import MetagpuError
from metagpu.core.health.fault_note import (
    FaultNote,
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
from tests.rigs.build import after, gpu

A, B = gpu(0).id, gpu(1).id
FOUND = GpusFound((gpu(0), gpu(1)), at=0)
NOTE = FaultNote(
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

    assert take_note(snapshot) == NOTE


@pytest.mark.parametrize("fault", [Fault.DRIVER, Fault.NO_ANSWER, Fault.NOT_LISTED])
def test_a_fault_that_a_check_finds_is_not_noted(fault: Fault) -> None:
    """Faults of answering are found again by the next daemon; with a fatal XID they are noted."""
    lost = GpuFaulted(A, "the GPU is lost", 1, fault)

    assert take_note(after(FOUND, lost)) == FaultNote()
    assert take_note(after(FOUND, lost, GpuNeedsProof(A))).faults[0].needs_proof


def test_a_note_is_of_one_boot() -> None:
    """A note is read back in its boot; in another boot it is empty."""
    assert decode(encode(NOTE, "boot"), "boot") == NOTE
    assert decode(encode(NOTE, "boot"), "another") == FaultNote()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"version": 2, "boot": "boot", "note": {}}',
        b'{"version": 1, "note": {}}',
        encode(NOTE, "boot")[:-5],
        encode(NOTE, "boot").replace(b"1.5", b'"x"'),
    ],
)
def test_a_broken_note_is_an_error(text: bytes) -> None:
    """A text that is no note of this version is an error of ours."""
    with pytest.raises(MetagpuError):
        decode(text, "boot")


def test_a_note_is_parted_by_gpus() -> None:
    """The entries of some GPUs and those of all others are the whole note."""
    assert NOTE.of({B}) == FaultNote((), NOTE.devices, NOTE.cordons)
    assert NOTE.of({B}, but=True).joined(NOTE.of({B})) == NOTE


def test_entries_that_another_note_lacks() -> None:
    """A fault that needs proof is more than one that needs none, and no less."""
    [proven] = NOTE.faults
    silent = FaultNote((replace(proven, needs_proof=False),))

    assert NOTE.without(NOTE) == FaultNote()
    assert NOTE.without(FaultNote()) == NOTE
    assert NOTE.without(silent) == NOTE
    assert silent.without(NOTE) == FaultNote()
