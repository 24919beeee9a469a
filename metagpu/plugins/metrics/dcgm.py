"""The page of NVIDIA's dcgm-exporter: its names, labels and units, without DCGM.

Names, types and help texts are those of its `etc/default-counters.csv`, with the counters that are
commented out there and that NVML knows. A series has the labels of a container where that container
alone holds the GPU or the MIG instance, as it does without `--kubernetes-virtual-gpus`. The node's
name has both spellings: the exporter writes `hostname` since May 2026, and wrote `Hostname` before.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from metagpu.core.contracts.sensors import DetailedSensors, InstanceSensors, NvlinkError
from metagpu.core.model.gpu import MIB, Gpu, GpuId
from metagpu.core.model.shares import Lease, holders_of
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.model.xid_severity import rule_for
from metagpu.core.state.events import XidReported
from metagpu.plugins.metrics.samples import (
    FamilyFactory,
    MetricFamily,
    MetricType,
    Sample,
    families_in,
)

_LABELS: Final = (
    *("gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID"),
    *("Hostname", "hostname", "DCGM_FI_DRIVER_VERSION", "container", "namespace", "pod"),
)
_gauge: Final = FamilyFactory(MetricType.GAUGE, _LABELS, "DCGM_FI_DEV_")
_counter: Final = FamilyFactory(MetricType.COUNTER, _LABELS, "DCGM_FI_DEV_")
_MEGA: Final = 1e6
_MILLI: Final = 1000
_PERCENT: Final = 100
XID_KEPT_S: Final = 300.0
"""Time for which an XID is shown: the default window of the exporter's own counter of XIDs."""

SM_CLOCK: Final = _gauge("SM_CLOCK", "SM clock frequency (in MHz).")
MEM_CLOCK: Final = _gauge("MEM_CLOCK", "Memory clock frequency (in MHz).")
MEMORY_TEMP: Final = _gauge("MEMORY_TEMP", "Memory temperature (in C).")
GPU_TEMP: Final = _gauge("GPU_TEMP", "GPU temperature (in C).")
POWER_USAGE: Final = _gauge("POWER_USAGE", "Power draw (in W).")
ENERGY: Final = _counter("TOTAL_ENERGY_CONSUMPTION", "Total energy consumption since boot (in mJ).")
PCIE_REPLAY: Final = _counter("PCIE_REPLAY_COUNTER", "Total number of PCIe retries.")
GPU_UTIL: Final = _gauge("GPU_UTIL", "GPU utilization (in %).")
MEM_COPY_UTIL: Final = _gauge("MEM_COPY_UTIL", "Memory utilization (in %).")
ENC_UTIL: Final = _gauge("ENC_UTIL", "Encoder utilization (in %).")
DEC_UTIL: Final = _gauge("DEC_UTIL", "Decoder utilization (in %).")
XID_ERRORS: Final = _gauge(
    "XID_ERRORS", "Value of the last XID error encountered.", "err_code", "err_msg"
)
FB_FREE: Final = _gauge("FB_FREE", "Framebuffer memory free (in MiB).")
FB_USED: Final = _gauge("FB_USED", "Framebuffer memory used (in MiB).")
FB_RESERVED: Final = _gauge("FB_RESERVED", "Framebuffer memory reserved (in MiB).")
ECC_SBE: Final = _counter("ECC_SBE_VOL_TOTAL", "Total number of single-bit volatile ECC errors.")
ECC_DBE: Final = _counter("ECC_DBE_VOL_TOTAL", "Total number of double-bit volatile ECC errors.")
NVLINK: Final = {
    NvlinkError.CRC_FLIT: _counter(
        "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "Total number of NVLink flow-control CRC errors."
    ),
    NvlinkError.CRC_DATA: _counter(
        "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "Total number of NVLink data CRC errors."
    ),
    NvlinkError.REPLAY: _counter(
        "NVLINK_REPLAY_ERROR_COUNT_TOTAL", "Total number of NVLink retries."
    ),
    NvlinkError.RECOVERY: _counter(
        "NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "Total number of NVLink recovery errors."
    ),
}
REMAPPED_UNCORRECTABLE: Final = _counter(
    "UNCORRECTABLE_REMAPPED_ROWS", "Number of remapped rows for uncorrectable errors"
)
REMAPPED_CORRECTABLE: Final = _counter(
    "CORRECTABLE_REMAPPED_ROWS", "Number of remapped rows for correctable errors"
)
REMAP_FAILURE: Final = _gauge("ROW_REMAP_FAILURE", "Whether remapping of rows has failed")

FAMILIES: Final = (
    *families_in(vars()),
    *NVLINK.values(),
)


def dcgm_samples(
    snapshot: Snapshot,
    readings: Mapping[GpuId, DetailedSensors],
    instances: Mapping[GpuId, Sequence[InstanceSensors]],
    last_xids: Mapping[GpuId | None, XidReported],
    *,
    node: str,
    now: float,
) -> Iterator[Sample]:
    """Yield one series of each value of a GPU or MIG instance, in DCGM's units.

    DCGM repeats the values of a GPU for each of its instances: a sum would count them several
    times. Memory is the instances' own, and no series of the GPU where it has any, or may have. The
    XID is remembered here: a GPU that NVML cannot read has it too.
    """
    for gpu, state in snapshot.gpus.items():
        hardware, host = _hardware(state.gpu), (node, node, snapshot.versions.driver)
        labels = (*hardware, "", "", *host, *_container(state.leases.values()))
        yield from _xid(labels, state, last_xids.get(gpu), now)
        if (reading := readings.get(gpu)) is None:
            continue
        yield from _samples(labels, _values(reading))
        parts = instances.get(gpu, None if state.gpu.mig_enabled else ())
        if parts is not None and not parts:
            yield from _samples(labels, _memory(reading))
        names = {each.number: each.name for each in state.gpu.mig_profiles}
        for part in parts or ():
            instance = names.get(part.profile, ""), str(part.number)
            labels = (*hardware, *instance, *host, *_container(_leases(state, part.number)))
            yield from _samples(labels, _memory(part))


def _xid(
    labels: tuple[str, ...], state: GpuState, last: XidReported | None, now: float
) -> Iterator[Sample]:
    """Yield the last XID, and 0 once it is over; nothing where NVML delivers none.

    An XID is over 5 minutes after it came, and not before the GPU is back in service.
    """
    if last is None and state.unheard is not None:
        return
    end = now if state.verdict.healthy else min(now, state.verdict.since)
    code = last.code if last is not None and last.at + XID_KEPT_S > end else 0
    meaning = rule_for(code, {}).meaning if code else "No Error"
    yield Sample(XID_ERRORS, (*labels, str(code), meaning), code)


def _samples(
    labels: tuple[str, ...], values: Iterable[tuple[MetricFamily, float | None]]
) -> Iterator[Sample]:
    for family, value in values:
        if value is not None:
            yield Sample(family, labels, value)


def _hardware(gpu: Gpu) -> Sequence[str]:
    device = "" if gpu.minor is None else f"nvidia{gpu.minor}"
    domain, _, rest = gpu.pci_bus_id.upper().partition(":")
    address = f"{domain:0>8}:{rest}" if rest else ""
    return str(gpu.index), gpu.id, address, device, gpu.name


def _leases(state: GpuState, instance: int) -> Iterator[Lease]:
    """Yield the leases of shares of a MIG instance."""
    for backend in state.provisioned.values():
        for share, device in backend.devices.items():
            if device.gpu_instance == instance and share in state.leases:
                yield state.leases[share]


def _container(leases: Iterable[Lease]) -> Sequence[str]:
    """Return the container that alone holds some leases, empty for none and several."""
    holders = {holder for lease in leases for holder in holders_of(lease) or (None,)}
    if len(holders) != 1 or (holder := holders.pop()) is None:
        return "", "", ""
    return holder.container, holder.namespace, holder.pod


def _values(sensors: DetailedSensors) -> Iterator[tuple[MetricFamily, float | None]]:
    yield SM_CLOCK, _scaled(sensors.sm_clock, 1 / _MEGA)
    yield MEM_CLOCK, _scaled(sensors.memory_clock, 1 / _MEGA)
    yield MEMORY_TEMP, sensors.memory_temperature
    yield GPU_TEMP, sensors.temperature
    yield POWER_USAGE, sensors.power
    yield ENERGY, _scaled(sensors.energy, _MILLI)
    yield PCIE_REPLAY, sensors.pcie_replays
    yield GPU_UTIL, _scaled(sensors.utilization, _PERCENT)
    yield MEM_COPY_UTIL, _scaled(sensors.memory_utilization, _PERCENT)
    yield ENC_UTIL, _scaled(sensors.encoder, _PERCENT)
    yield DEC_UTIL, _scaled(sensors.decoder, _PERCENT)
    yield ECC_SBE, sensors.ecc_corrected
    yield ECC_DBE, sensors.ecc_uncorrected
    for kind, count in sensors.nvlink_errors.items():
        yield NVLINK[kind], count
    yield REMAPPED_UNCORRECTABLE, sensors.rows_uncorrectable
    yield REMAPPED_CORRECTABLE, sensors.rows_correctable
    yield REMAP_FAILURE, sensors.rows_failed


def _memory(
    sensors: DetailedSensors | InstanceSensors,
) -> Iterator[tuple[MetricFamily, float | None]]:
    yield FB_FREE, _scaled(sensors.memory_free, 1 / MIB)
    yield FB_USED, _scaled(sensors.memory_used, 1 / MIB)
    yield FB_RESERVED, _scaled(sensors.memory_reserved, 1 / MIB)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else round(value * unit, 3)
