"""Writes the tables and plots of `docs/performance.md`, from the newest file of `bench/results`.

`python docs/performance.py` writes them, `--check` compares. What a figure means, and why a goal is
missed, are sentences of people and stand here. A figure that the file lacks is a dash, and named.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, floor, log10
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from bench.figures import Figure, Report

DOCS: Final = Path(__file__).parent
PAGE: Final = DOCS / "performance.md"
IMAGES: Final = DOCS / "images"
RESULTS: Final = DOCS.parent / "bench" / "results"
ABSENT: Final = "-"
_AT_REST: Final = "CPU at rest, 30 s"
_LEASED: Final = "CPU of a second at rest, 16000 shares leased"
_BUSY: Final = "CPU at rest, 8 GPUs, 40 pods"
_OF_A_CORE: Final = "‰"
_PER_MILLE: Final[Mapping[str, float]] = {_AT_REST: 10, _BUSY: 10, _LEASED: 1}
"""Figures of a part of a core, and what makes them thousandths."""
_XID: Final = "XID to list at a client, 8 x 100"
_SECONDS: Final[Mapping[str, float]] = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SIGKILL: Final = "SIGKILL to the next daemon's list"
_START: Final = "process start to registered"


class Row(NamedTuple):
    """A row of the first tables.

    Attributes:
        label: the row's name on the page.
        name: the figure of the bench.
        meaning: a sentence about a node or a pod.
    """

    label: str
    name: str
    meaning: str


class Pair(NamedTuple):
    """A figure of a small node or cluster, and of a large one."""

    label: str
    small: str
    large: str
    meaning: str


class Goal(NamedTuple):
    """A goal of the project.

    Attributes:
        names: the figures that show it, in the order of preference.
        most: the goal itself, in the unit of the figures.
        reason: why it is missed; empty as long as it is met.
    """

    label: str
    names: tuple[str, ...]
    most: float
    unit: str
    reason: str = ""


COSTS: Final = (
    Row(
        "resident memory at rest",
        "resident memory, at rest",
        "The daemon alone.",
    ),
    Row(
        "the same with its relay",
        "resident memory at rest, with the relay",
        "For `mgctl` in containers.",
    ),
    Row(
        "the same with an API server",
        "resident memory at rest, with relay and API server",
        "With all of `--cluster`.",
    ),
    Row(
        "resident memory after load",
        "resident memory, after 50000 allocations",
        "Ended pods leave nothing behind.",
    ),
    Row("CPU at rest", _AT_REST, "No pod; the kubelet is connected."),
    Row(
        "CPU at rest, 40 pods",
        _BUSY,
        "Memory is checked twice a second.",
    ),
    Row(
        "CPU of one enforcement pass",
        "CPU of the enforcer's pass, 8 GPUs, 800 processes, 200 pods",
        "200 pods, 800 processes; twice a second.",
    ),
    Row(
        "CPU of one scrape",
        "CPU of /metrics, 8 GPUs, 40 pods",
        "Of Prometheus, usually twice a minute.",
    ),
)
WAITS: Final = (
    Row(
        "Allocate, 1 share",
        "Allocate, 1 id, rotating: metagpu",
        "A small part of a container's start.",
    ),
    Row(
        "Allocate, 50 shares",
        "Allocate, 50 ids, rotating: metagpu",
        "Half a GPU takes hardly longer.",
    ),
    Row(
        "GetPreferredAllocation, 4 of 800",
        "Preferred, 4 of 800: metagpu",
        "The kubelet asks it before Allocate.",
    ),
    Row(
        "GetPreferredAllocation, 4 of 8,000",
        "Preferred, 4 of 8000: metagpu",
        "With 1,000 shares a GPU.",
    ),
    Row(
        "MIG instance on demand",
        "container could start, instance in 0 s, envvar, create: allocate",
        "The hardware's time is added.",
    ),
    Row(
        "memory excess to the end",
        "excess to the end of a process",
        "With `policy: kill`, neighbours may lack memory so long.",
    ),
    Row("XID to the changed list", _XID, "Then no pod gets the GPU."),
    Row(
        "label change to the new list",
        "label change to the new list, 8 x 100",
        "The scheduler knows within 10 s.",
    ),
    Row(
        "`kubelet.sock` to registered",
        "kubelet.sock to 4 registered, minimal kubelet",
        "No pod starts before, after the kubelet's restart.",
    ),
    Row("daemon's start to registered", _START, "The same after a boot."),
    Row(
        "SIGTERM to the process's end",
        "SIGTERM to the end of the process",
        "The first part of an update.",
    ),
    Row("SIGKILL to the next list", _SIGKILL, "A crash, with a start at once."),
)
GROWTH: Final = (
    Pair(
        "Allocate of 50, 100 or 1,000 a GPU",
        "Allocate, 50 ids: metagpu",
        "Allocate, 50 ids, 1000 shares a GPU: metagpu",
        "Finer shares do not delay a pod.",
    ),
    Pair(
        "GetPreferredAllocation, 4 of 800 or 8,000",
        "Preferred, 4 of 800: metagpu",
        "Preferred, 4 of 8000: metagpu",
        "The kubelet sends all free shares.",
    ),
    Pair(
        "XID to list, 8 x 100 or 16 x 1,000",
        _XID,
        "XID to list at the last of 4 streams, 16 x 1000",
        "Four lists in place of one.",
    ),
    Pair(
        "CPU at rest, 0 or 16,000 leased",
        _AT_REST,
        _LEASED,
        "Leases that do not change cost little.",
    ),
    Pair(
        "`kubectl metagpu top`, 500 or 5,000 nodes",
        "kubectl metagpu top nodes, 500 nodes",
        "kubectl metagpu top nodes, 5000 nodes",
        "Each node is asked.",
    ),
)
_TIME: Final = "to a null plugin's"
_CPU: Final = "CPU to a null plugin's"
GOALS: Final = (
    Goal(
        "Allocate of 1",
        (f"Allocate, 1 id, rotating: {_CPU}", f"Allocate, 1 id, rotating: {_TIME}"),
        1.25,
        "x",
        "Each call is a task of its own, and each grant a fact before an answer.",
    ),
    Goal(
        "Allocate of 50",
        (f"Allocate, 50 ids, rotating: {_CPU}", f"Allocate, 50 ids, rotating: {_TIME}"),
        1.4,
        "x",
        "50 ids are read and checked besides.",
    ),
    Goal(
        "Preferred, 4 of 800",
        (f"Preferred, 4 of 800: {_CPU}", f"Preferred, 4 of 800: {_TIME}"),
        2.2,
        "x",
        "The null server decodes no ids.",
    ),
    Goal(
        "CPU of an admission",
        ("admissions, pods of 1: CPU of the plugin",),
        1700,
        "us",
        "The kubelet's list of pods is read after each.",
    ),
    Goal(
        "XID to list",
        (_XID,),
        2.2,
        "ms",
        "All 100 shares go; the simulator's socket is on the way.",
    ),
    Goal("SIGTERM to the process's end", ("SIGTERM to the end of the process",), 60, "ms"),
    Goal(
        "start to registered, CPU",
        (f"{_START}, CPU",),
        260,
        "ms",
        "Half is [Python and its libraries](decisions/0052-what-a-start-costs.md).",
    ),
    Goal(
        "SIGKILL to the next list",
        (_SIGKILL,),
        400,
        "ms",
        "Most of it is the new daemon's start.",
    ),
    Goal(
        "resident memory with the relay",
        ("resident memory at rest, with the relay",),
        47,
        "MB",
        "The relay is a [process in Python](decisions/0044-a-relay-for-the-calls-of-containers.md),"
        " so that no container stops the daemon.",
    ),
    Goal(
        "resident memory with relay and API server",
        ("resident memory at rest, with relay and API server",),
        55,
        "MB",
        "The relay, and the API server's client.",
    ),
    Goal(
        "CPU at rest, nothing leased",
        (_AT_REST,),
        1.5,
        _OF_A_CORE,
        "Timers of all parts wake it; the simulated NVML is included.",
    ),
    Goal(
        "CPU at rest, 16,000 leased",
        (_LEASED,),
        3,
        _OF_A_CORE,
        "The kubelet's list of pods names 16,000 ids.",
    ),
    Goal(
        "CPU at rest, 40 pods",
        (_BUSY,),
        15,
        _OF_A_CORE,
        "Processes are read twice a second.",
    ),
    Goal(
        "`kubectl metagpu top`, 5,000 nodes",
        ("kubectl metagpu top nodes, 5000 nodes",),
        3,
        "s",
        "The simulated servers share its two cores.",
    ),
)


class UnexplainedError(Exception):
    """Raised where a goal is missed and no sentence says why."""


class Run:
    """The figures of a file, and the names that it lacks."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.report = Report.read(file)
        self.missing: dict[str, None] = {}
        self._figures = {figure.name: figure for figure in self.report.figures}

    def find(self, *names: str) -> Figure | None:
        """Return the first of these figures that the file has, and note the absence of all."""
        found = next((self._figures[name] for name in names if name in self._figures), None)
        if found is None:
            self.missing[names[0]] = None
        elif found.name in _PER_MILLE:
            measured = found.measured * _PER_MILLE[found.name]
            return replace(found, measured=measured, unit=_OF_A_CORE)
        return found


def newest() -> Path:
    """Return the newest results: files are named by their dates."""
    return max(RESULTS.glob("*.json"), key=lambda file: file.name)


def render(page: str, run: Run) -> str:
    """Return the page with the tables that a run says.

    Raises:
        UnexplainedError: a goal is missed, and no sentence says why.
    """
    for heading, rows in (
        ("## On a node", _rows(run, COSTS)),
        ("## A pod's wait", _rows(run, WAITS)),
        ("## Growth", _pairs(run)),
        ("## Goals", _goals(run)),
    ):
        before, after = _around_table(page, heading)
        page = "\n".join((before, *(f"| {' | '.join(cells)} |" for cells in rows), after))
    before, heading, _ = page.partition("\n## The run\n")
    return f"{before}{heading}\n{_described(run)}\n"


def _around_table(page: str, heading: str) -> tuple[str, str]:
    """Return what stands before the rows of the table below a heading, and after them."""
    start = page.index("\n|---", page.index(f"\n{heading}\n")) + 1
    before = page[: page.index("\n", start)]
    rows = page[len(before) + 1 :].split("\n")
    count = next(number for number, row in enumerate(rows) if not row.startswith("|"))
    return before, "\n".join(rows[count:])


def _rows(run: Run, rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    for row in rows:
        figure = run.find(row.name)
        yield row.label, _measured(figure), _p99(figure), row.meaning


def _pairs(run: Run) -> Iterator[Sequence[str]]:
    for pair in GROWTH:
        small, large = run.find(pair.small), run.find(pair.large)
        yield pair.label, _measured(small), _measured(large), pair.meaning


def _goals(run: Run) -> Iterator[Sequence[str]]:
    for goal in GOALS:
        figure = run.find(*goal.names)
        met = ABSENT
        if figure is not None:
            met = "yes" if figure.measured <= goal.most else "**no**"
        reason = goal.reason if met == "**no**" else ""
        if met == "**no**" and not reason:
            raise UnexplainedError(f"{goal.label}: say in docs/performance.py why it is missed")
        most = _amount(goal.most, goal.unit)
        yield goal.label, most, _measured(figure), met, reason


def _described(run: Run) -> str:
    machine, name = run.report.machine, run.file.name
    judged = [figure.met for figure in run.report.figures if figure.met is not None]
    text = (
        f"`bench/results/{name}`: {machine['cores']} cores ({machine['cpu']}), kernel"
        f" {machine['kernel']}, Python {machine['python']}. It meets {sum(judged)} of the bench's"
        f" own {len(judged)} targets."
    )
    lacking = f" {len(run.missing)} rows of this page have no measurement in it."
    return text + lacking if run.missing else text


def _measured(figure: Figure | None) -> str:
    return _amount(figure.measured, figure.unit) if figure else ABSENT


def _p99(figure: Figure | None) -> str:
    return _amount(figure.p99, figure.unit) if figure and figure.p99 is not None else ""


def _amount(value: float, unit: str) -> str:
    """Return an amount with three digits, in the unit that reads best."""
    if unit in _SECONDS:
        value *= _SECONDS[unit]
        return f"{value:,.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
    return f"{value:,.3g} {unit}".rstrip()


class Bar(NamedTuple):
    """A bar of a plot, in seconds; none where the file lacks the figure."""

    label: str
    start: float | None
    end: float | None


_LEFT, _WIDTH, _LINE = 340, 340, 22
_STROKE: Final = 'stroke="#2a78d6" stroke-width="4" opacity="0.5"'


def plots(run: Run) -> Mapping[Path, str]:
    """Return the pictures of the page, by their files."""
    waits = [(row, run.find(row.name)) for row in WAITS]
    return {
        IMAGES / "performance-waits.svg": _plot(
            "median and p99",
            [Bar(row.label, _seconds(found), _late_seconds(found)) for row, found in waits],
        ),
        IMAGES / "performance-growth.svg": _plot(
            "from small to large",
            [
                Bar(pair.label, _seconds(run.find(pair.small)), _seconds(run.find(pair.large)))
                for pair in GROWTH
                if pair.small not in _PER_MILLE
            ],
        ),
    }


def _seconds(figure: Figure | None) -> float | None:
    return None if figure is None else figure.measured * _SECONDS[figure.unit]


def _late_seconds(figure: Figure | None) -> float | None:
    if figure is None or figure.p99 is None:
        return None
    return figure.p99 * _SECONDS[figure.unit]


def _plot(title: str, bars: Sequence[Bar]) -> str:
    """Draw bars between two durations on a logarithmic axis, as an SVG picture."""
    durations = [at for bar in bars for at in (bar.start, bar.end) if at is not None] or [1.0]
    first, last = floor(log10(min(durations))), ceil(log10(max(durations)))

    def place(seconds: float) -> str:
        return f"{_LEFT + _WIDTH * (log10(seconds) - first) / max(1, last - first):.0f}"

    bottom = 30 + _LINE * len(bars)
    parts = [f'<text x="{_LEFT - 12}" y="18" text-anchor="end" fill="#666">{title}</text>']
    for duration in (10.0**power for power in range(first, last + 1)):
        x, named = place(duration), _amount(duration, "s")
        parts.append(f'<path d="M{x} 26V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="18" text-anchor="middle" fill="#666">{named}</text>')
    for number, bar in enumerate(bars):
        y = 30 + _LINE * number + _LINE // 2
        label = bar.label.replace("`", "")
        parts.append(f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end">{label}</text>')
        ends = [place(at) for at in (bar.start, bar.end) if at is not None]
        parts.append(
            f'<path d="M{" ".join(f"{x} {y}" for x in ends)}" {_STROKE}/>' * (len(ends) > 1)
        )
        parts += [f'<circle cx="{x}" cy="{y}" r="5" fill="#2a78d6"/>' for x in ends[:1]]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 40} {bottom + 8}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def main(arguments: Sequence[str]) -> int:
    """Write page and plots, or compare them; return the exit status."""
    run = Run(newest())
    pictures = plots(run)
    page = PAGE.read_text(encoding="utf-8")
    try:
        texts = {PAGE: render(page, run), **pictures}
    except UnexplainedError as error:
        print(error, file=sys.stderr)  # noqa: T201 - a script
        return 1
    if "--check" in arguments:
        old = [file.name for file, text in texts.items() if not _is(file, text)]
        problem = (
            f"{', '.join(old)}: not what {run.file.name} says: run `python docs/performance.py`"
        )
        print(problem if old else "", end="\n" * bool(old), file=sys.stderr)  # noqa: T201 - as above
        return int(bool(old))
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    for name in run.missing:
        print(f"bench/results/{run.file.name} lacks: {name}", file=sys.stderr)  # noqa: T201 - as above
    return 0


def _is(file: Path, text: str) -> bool:
    return file.exists() and file.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
