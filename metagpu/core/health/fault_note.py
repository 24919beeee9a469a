"""The note of faults and cordons, which the next daemon on this machine reads.

A passed check proves nothing after some faults, so a restart of the daemon must not forget them. A
reboot ends faults and cordons: a note of another boot says nothing.
"""

from collections.abc import Collection
from typing import Final, TypeVar

import msgspec

from metagpu.core.errors import FaultNoteUnusable
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import CordonSource, Fault
from metagpu.core.model.snapshot import Snapshot

VERSION: Final = 1
SIZE_LIMIT: Final = 256 * 1024
"""Bytes of a note; a machine with 16 GPUs in MIG mode, all of it faulty, needs less than 64 KiB."""
NOTED_FAULTS: Final = frozenset({Fault.XID, Fault.MEMORY, Fault.RECOVERY_ACTION})
"""Faults that the next daemon cannot find by itself, or not since when; it does find the others."""
_REASON_LENGTH: Final = 500


class NotedFault(msgspec.Struct, frozen=True):
    """A GPU that is out of service; `needs_proof` as in `GpuRecovery`.

    A newer daemon may know kinds of faults that this one does not: `kind` is `None` then.
    """

    gpu: GpuId
    reason: str
    since: float
    fault: str | None = None
    needs_proof: bool = False

    @property
    def kind(self) -> Fault | None:
        """The kind of the fault."""
        return Fault(self.fault) if self.fault in set(Fault) else None


class NotedDevice(msgspec.Struct, frozen=True):
    """A MIG device that is out of service."""

    gpu: GpuId
    device: str
    reason: str
    since: float


class NotedCordon(msgspec.Struct, frozen=True):
    """A GPU that an operator has cordoned."""

    gpu: GpuId
    reason: str
    since: float


NotedT = TypeVar("NotedT", NotedFault, NotedDevice, NotedCordon)


class FaultNote(msgspec.Struct, frozen=True):
    """All faults and cordons of a machine since its boot."""

    faults: tuple[NotedFault, ...] = ()
    devices: tuple[NotedDevice, ...] = ()
    cordons: tuple[NotedCordon, ...] = ()

    def of(self, gpus: Collection[GpuId], *, but: bool = False) -> "FaultNote":
        """Return the note of these GPUs alone, or of all `but` these."""

        def chosen(entries: tuple[NotedT, ...]) -> tuple[NotedT, ...]:
            return tuple(it for it in entries if (it.gpu in gpus) is not but)

        return FaultNote(chosen(self.faults), chosen(self.devices), chosen(self.cordons))

    def joined(self, other: "FaultNote") -> "FaultNote":
        """Return the entries of both notes."""
        return FaultNote(
            self.faults + other.faults,
            self.devices + other.devices,
            self.cordons + other.cordons,
        )

    def without(self, known: "FaultNote") -> "FaultNote":
        """Return the entries that another note lacks.

        A fault that needs proof is more than a fault of the same GPU that needs none.
        """
        faults = {(it.gpu, proof) for it in known.faults for proof in {False, it.needs_proof}}
        devices = {(it.gpu, it.device) for it in known.devices}
        cordons = {(it.gpu, it.reason) for it in known.cordons}
        return FaultNote(
            tuple(it for it in self.faults if (it.gpu, it.needs_proof) not in faults),
            tuple(it for it in self.devices if (it.gpu, it.device) not in devices),
            tuple(it for it in self.cordons if (it.gpu, it.reason) not in cordons),
        )


class _Written(msgspec.Struct, frozen=True):
    version: int
    boot: str
    note: FaultNote


def take_note(snapshot: Snapshot) -> FaultNote:
    """Return the note of a snapshot. Pure."""
    states = snapshot.gpus.items()
    return FaultNote(
        tuple(
            NotedFault(gpu, _brief(it.reason), it.since, it.fault, it.needs_proof)
            for gpu, state in states
            if not (it := state.verdict).healthy and (it.fault in NOTED_FAULTS or it.needs_proof)
        ),
        tuple(
            NotedDevice(gpu, device, _brief(it.reason), it.since)
            for gpu, state in states
            for device, it in state.mig_faults.items()
        ),
        tuple(
            NotedCordon(gpu, _brief(cordon.reason), cordon.since)
            for gpu, state in states
            if (cordon := state.cordons.get(CordonSource.OPERATOR)) is not None
        ),
    )


def encode(note: FaultNote, boot: str) -> bytes:
    """Encode a note for the boot with this id."""
    return msgspec.json.encode(_Written(VERSION, boot, note))


def decode(text: bytes, boot: str) -> FaultNote:
    """Decode a note; an empty one where it is of another boot.

    Raises:
        MetagpuError: it is no note, or one of another version.
    """
    try:
        version = msgspec.json.decode(text, type=dict[str, msgspec.Raw]).get("version")
        if version != msgspec.Raw(str(VERSION).encode()):
            raise FaultNoteUnusable(f"it is not a note of version {VERSION}")
        written = msgspec.json.decode(text, type=_Written)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FaultNoteUnusable(f"it cannot be read: {error}") from error
    return written.note if written.boot == boot else FaultNote()


def _brief(text: str) -> str:
    return text[:_REASON_LENGTH]
