"""The health of a GPU in words and colours, and what memory enforcement has done."""

from collections.abc import Iterator, Sequence
from typing import Final

from metagpu.core.reports.schema.daemon import EnforcementReport
from metagpu.core.reports.schema.gpus import GpuReport, UsedGpuReport
from metagpu.core.reports.schema.usage import UsageReport
from metagpu.display.table import Cell

_OUT_OF_SERVICE: Final = "bold red"
_HEALTHY: Final = Cell("healthy", "green")


def brief_health(gpu: GpuReport) -> Sequence[Cell]:
    """Return one word for each reason of `full_health`, a line each."""
    recovering = gpu.recovery and gpu.recovery.returns_at
    out = Cell("recovering", "yellow") if recovering else Cell("out of service", _OUT_OF_SERVICE)
    words = [] if gpu.healthy else [out]
    words += [
        Cell(word, "yellow")
        for word, reason in (
            ("instance out", gpu.faults),
            ("cordoned", gpu.cordon),
            ("unheard", gpu.unheard),
            ("suspended", gpu.suspended),
            ("cleaning", gpu.cleaning),
            ("withheld", gpu.blocked),
            ("waiting", gpu.waits_for),
        )
        if reason
    ]
    return words or [_HEALTHY]


def reasons(gpus: Sequence[GpuReport]) -> Sequence[Cell]:
    """Return the lines below a table with `brief_health`, one for each reason."""
    return [
        Cell(f"GPU {gpu.index}: {line.text}", line.style)
        for gpu in gpus
        for line in full_health(gpu)
        if line is not _HEALTHY
    ]


def full_health(gpu: GpuReport) -> Sequence[Cell]:
    """Return the reasons for which a GPU or a backend does not serve, or `healthy`."""
    lines = [] if gpu.healthy else [_out_of_service(gpu)]
    for fault in gpu.faults:
        slots = (
            ", ".join(share.partition("::")[2] for share in fault.shares) or "not made by metagpu"
        )
        reason = f"MIG device {fault.device} ({slots}): {fault.reason}"
        lines.append(_since(reason, fault.since, _OUT_OF_SERVICE))
    if cordon := gpu.cordon:
        lines.append(_since(f"cordoned: {cordon.reason}", cordon.since))
    if unheard := gpu.unheard:
        lines.append(_since(f"NVML does not report its XIDs: {unheard.reason}", unheard.since))
    for backend, suspended in gpu.suspended.items():
        lines.append(_since(f"{backend} suspended: {suspended.reason}", suspended.since))
    for backend, since in gpu.cleaning.items():
        lines.append(Cell(f"{backend} has been cleaning up since {_time(since)}", "yellow"))
    lines += [Cell(blocked, "yellow") for blocked in gpu.blocked]
    if gpu.waits_for:
        lines.append(Cell(gpu.waits_for, "yellow"))
    return lines or [_HEALTHY]


def _out_of_service(gpu: GpuReport) -> Cell:
    recovery = gpu.recovery
    if recovery is None:
        return _since(gpu.reason, gpu.since, _OUT_OF_SERVICE)
    if recovery.returns_at is None:
        line = _since(gpu.reason, gpu.since, _OUT_OF_SERVICE)
        fix = f"waits for an operator: metagpu acknowledge {gpu.index}"
        return Cell(f"{line.text}; {fix}", line.style)
    return Cell(
        f"recovering: its checks have passed since {_time(recovery.since)}, and it returns at "
        f"{_time(recovery.returns_at)} if none fails; it was out of service for: "
        f"{gpu.reason}, since {_time(gpu.since)}",
        "yellow",
    )


def format_enforcement(report: EnforcementReport | None) -> Sequence[str]:
    """Return an enforcement report in words, nothing if all counters are 0."""
    if report is None:
        return ()
    sent = [f"{count} {name}" for name, count in report.signals.items() if count]
    count = report.warnings
    parts = [f"{count} {'warning' if count == 1 else 'warnings'}"] if count else []
    parts += [f"{' and '.join(sent)} sent"] if sent else []
    lines = [f"memory enforcement since the daemon's start: {', '.join(parts)}"] if parts else []
    if report.driver_limits:
        lines.append(f"memory limits set in the driver: {report.driver_limits}")
    return lines


def _since(reason: str, since: str, style: str = "yellow") -> Cell:
    return Cell(f"{reason}, since {_time(since)}", style)


def _time(since: str) -> str:
    return since.removesuffix("+00:00").replace("T", " ") + " UTC"


def health_cell(gpu: UsedGpuReport) -> Cell:
    """Return the health of a GPU, as its column has it."""
    if not gpu.healthy:
        return Cell(gpu.reason, _OUT_OF_SERVICE)
    if gpu.cordon:
        return Cell(f"cordoned: {gpu.cordon}", "yellow")
    if gpu.suspended:
        return Cell("; ".join(_suspended(gpu)), "yellow")
    return _HEALTHY


def _suspended(gpu: UsedGpuReport) -> Sequence[str]:
    return [f"{backend} suspended: {reason}" for backend, reason in gpu.suspended.items()]


def gpu_problems(answer: UsageReport, *, wide: bool) -> Iterator[Cell]:
    """Return the lines below the GPUs for what has no column."""
    for gpu in answer.gpus:
        if not gpu.healthy and not wide:
            yield Cell(f"GPU {gpu.index} is out of service: {gpu.reason}", _OUT_OF_SERVICE)
        if gpu.cordon and not wide:
            yield Cell(f"GPU {gpu.index} is cordoned: {gpu.cordon}", "yellow")
        if not wide or gpu.cordon or not gpu.healthy:
            yield from (Cell(f"GPU {gpu.index}: {line}", "yellow") for line in _suspended(gpu))
        for device, reason in gpu.faults.items():
            yield Cell(f"{device} of GPU {gpu.index} is out of service: {reason}", _OUT_OF_SERVICE)
