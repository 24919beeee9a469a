"""A report as a text table."""

from collections.abc import Iterator

from bench.figures import Figure, Report

_HEADINGS = ("figure", "measured", "p99", "target", "calls", "verdict")


def table(report: Report, earlier: Report | None) -> str:
    """Return a table of measured numbers, their targets, and an earlier run's change."""
    before = {figure.name: figure for figure in earlier.figures} if earlier else {}
    rows = [(*_HEADINGS, *(("change",) if earlier else ()))]

    for figure in report.figures:
        change = (_change(figure, before.get(figure.name)),) if earlier else ()
        rows.append((*_cells(figure), *change))

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def verdict(report: Report) -> str:
    """Return the verdict of the run in one or two lines."""
    judged = [figure for figure in report.figures if figure.met is not None]
    missed = [figure.name for figure in judged if not figure.met]

    if not missed:
        return f"All {len(judged)} targets are met."
    names = "".join(f"\n  {name}" for name in missed)
    return f"MISSED: {len(missed)} of {len(judged)} targets:{names}"


def _cells(figure: Figure) -> Iterator[str]:
    yield figure.name
    yield _amount(figure.measured, figure.unit)
    yield "" if figure.p99 is None else _amount(figure.p99, figure.unit)
    sign = "<=" if figure.better == "lower" else ">="
    yield "" if figure.target is None else f"{sign} {figure.target:g} {figure.unit}"
    yield f"{figure.calls}"
    yield {True: "met", False: "MISSED", None: ""}[figure.met]


def _amount(value: float, unit: str) -> str:
    return f"{value:.0f} {unit}" if unit == "us" else f"{value:.2f} {unit}"


def _change(figure: Figure, before: Figure | None) -> str:
    if before is None:
        return "new"
    if not before.measured:
        return ""
    return f"{figure.measured / before.measured - 1:+.0%}"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return "  ".join(cells).rstrip()
