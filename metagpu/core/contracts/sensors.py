"""Readings of a GPU's sensors and error counters, for monitoring alone."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class ThrottleReason(StrEnum):
    """A reason for which the driver or the hardware lowers a GPU's clocks now."""

    POWER_CAP = "power_cap"
    SOFTWARE_THERMAL = "software_thermal"
    HARDWARE_THERMAL = "hardware_thermal"
    POWER_BRAKE = "power_brake"


class NvlinkError(StrEnum):
    """A kind of NVLink error, over all links of a GPU."""

    CRC_FLIT = "crc_flit"
    CRC_DATA = "crc_data"
    REPLAY = "replay"
    RECOVERY = "recovery"


class GpuSensors(msgspec.Struct, frozen=True):
    """One reading of a GPU; `None`, or a missing key, is what the GPU does not report.

    Attributes:
        temperature: degrees Celsius; `memory_temperature` likewise.
        power: watts drawn now; `power_limit` is the enforced limit.
        energy: joules since the driver was loaded.
        sm_clock: hertz; `memory_clock` likewise.
        ecc_corrected: memory errors since the driver was loaded; `ecc_uncorrected` likewise.
        nvlink_errors: errors since the driver was loaded.
        pcie_replays: since the GPU's last reset.
        throttled: the reasons for lower clocks; `None` where they are unknown.
    """

    temperature: float | None = None
    memory_temperature: float | None = None
    power: float | None = None
    power_limit: float | None = None
    energy: float | None = None
    sm_clock: float | None = None
    memory_clock: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    nvlink_errors: Mapping[NvlinkError, int] = msgspec.field(default_factory=dict)
    pcie_replays: int | None = None
    throttled: frozenset[ThrottleReason] | None = None


class DetailedSensors(GpuSensors, frozen=True):
    """One reading of a GPU with what NVML takes five further calls for.

    Attributes:
        utilization: part of the time with a kernel on the GPU, 0 to 1; `memory_utilization` is the
            part with the memory read or written, `encoder` and `decoder` those of the engines.
        memory_used: bytes in use without the part that the driver reserves, `memory_reserved`;
            `memory_free` is free.
        rows_correctable: memory rows that were remapped, of each kind.
        rows_failed: whether a row could not be remapped.
    """

    utilization: float | None = None
    memory_utilization: float | None = None
    encoder: float | None = None
    decoder: float | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    memory_reserved: int | None = None
    rows_correctable: int | None = None
    rows_uncorrectable: int | None = None
    rows_failed: bool | None = None


class InstanceSensors(msgspec.Struct, frozen=True):
    """One reading of a MIG instance.

    Attributes:
        number: NVML's id of the GPU instance; `profile` is the number of its profile.
        memory_used: bytes in use, `memory_free` and `memory_reserved` as of a GPU.
    """

    number: int
    profile: int
    memory_used: int
    memory_free: int
    memory_reserved: int | None = None
