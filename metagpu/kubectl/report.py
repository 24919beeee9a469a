"""`kubectl metagpu report`: what namespaces held and used, from Prometheus."""

import argparse
import csv
import io
import re
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from metagpu.cli.live import print_text
from metagpu.cli.loading import quick_loading
from metagpu.cli.options import Variable
from metagpu.cli.parser import add_command
from metagpu.core.errors import ClusterError
from metagpu.display.options import add_output, add_sort_by, encode
from metagpu.display.sorting import sort_items
from metagpu.display.table import TextTable, render, stdout_terminal
from metagpu.kubectl.errors import NoData, PrometheusError

if TYPE_CHECKING:
    from metagpu.kubectl.viewer import ClusterViewer

Item = Mapping[str, Any]
Ask = Callable[[Mapping[str, str]], Awaitable[tuple[int, bytes]]]
"""Asks for a range query by its arguments; returns the HTTP status and the body of the answer."""

QUERY_PATH: Final = "/api/v1/query_range"
_HOUR: Final = 3_600_000
"""Milliseconds."""
_GIB: Final = 2**30
_AT_ONCE: Final = 48
"""Windows of one query, which a Prometheus answers within seconds."""
_LOOKS: Final = 60
"""Looks at a gauge in a window, at most one a second."""
_WHOLE: Final = 0.95
"""The part of a window with data from which nothing is missing: a look may be late."""
_AGO: Final = re.compile(r"(\d+)(m|h|d|w)")
_OLDEST: Final = datetime(2000, 1, 1, tzinfo=UTC)
_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_ADDRESS: Final = re.compile("https?://([^/?#]*@)?[^/?#@:][^/?#@]*(/[^?#@]*)?", re.IGNORECASE)
_SERVICE: Final = re.compile(r"([-a-z0-9]+)/((?:https?:)?[-.a-z0-9]+:[-a-z0-9]+)")
_BY: Final = "by (namespace, exported_namespace)"
"""A scrape without `honor_labels` has our label under the second name."""
_GAUGE: Final = "sum_over_time((sum %s (%s))[$window:$look])"
QUERIES: Final = {
    "heldGpuHours": f"sum {_BY} (increase(metagpu_namespace_gpu_seconds_total[$window]))",
    "usedGpuHours": _GAUGE % (_BY, "metagpu_container_utilization_ratio"),
    "heldGiBHours": _GAUGE % (_BY, "metagpu_namespace_memory_held_bytes"),
    "usedGiBHours": _GAUGE % (_BY, "metagpu_namespace_memory_used_bytes"),
}
"""The query of each field; those of gauges are sums of looks at them."""
_DAEMONS: Final = "%s_over_time((count(metagpu_build_info))[$window:$look])"
_HEADS: Final = {
    "namespace": "NAMESPACE",
    "heldGpuHours": "GPU-HOURS HELD",
    "usedGpuHours": "GPU-HOURS USED",
    "heldGiBHours": "GIB-HOURS HELD",
    "usedGiBHours": "GIB-HOURS USED",
}


class Series(msgspec.Struct):
    """Values of one set of labels, each with its time in seconds."""

    metric: Mapping[str, str]
    values: Sequence[tuple[float, float]]


class Span(msgspec.Struct, frozen=True):
    """A time, and the windows of equal length that it is asked in; in milliseconds."""

    begin: int
    window: int
    windows: int

    @property
    def end(self) -> int:
        """The end of the last window."""
        return self.begin + self.window * self.windows

    @property
    def look(self) -> int:
        """The time between two looks at a gauge."""
        return max(1000, min(60_000, self.window // _LOOKS // 1000 * 1000))

    def queries(self, expression: str) -> Iterator[Mapping[str, str]]:
        """Yield the arguments of range queries, which have one value for each window."""
        # A range has its first moment too in Prometheus 2, and not in 3.
        text = expression.replace("$window", f"{self.window - 1}ms")
        for first in range(0, self.windows, _AT_ONCE):
            last = min(first + _AT_ONCE, self.windows)
            yield {
                "query": text.replace("$look", f"{self.look}ms"),
                "start": f"{(self.begin + (first + 1) * self.window) / 1000:.3f}",
                "end": f"{(self.begin + last * self.window) / 1000:.3f}",
                "step": f"{self.window / 1000:.3f}",
            }


def add_report(commands: Any, add_connection: Callable[[argparse.ArgumentParser], None]) -> None:  # noqa: ANN401 - argparse names the type of its sub-parsers privately
    """Add the command, with a connection's options for a Prometheus in the cluster."""
    example = "kubectl metagpu report namespaces --from 2026-11-01 --to 2026-12-01 -o csv"
    report = add_command(
        commands, "report", "sum up what was held and used, from Prometheus", example
    )
    command = add_command(
        report.add_subparsers(title="objects", required=True, metavar="OBJECT"),
        "namespaces",
        "sum up the GPU-hours and the memory that each namespace held and used",
        "kubectl metagpu report namespaces --prometheus-service monitoring/prometheus:web",
        ("namespace", "ns"),
    )
    command.add_argument("names", metavar="NAME", nargs="*", help="only these namespaces")
    for option, name, default, meaning in (
        ("--from", "begin", "7d", "the beginning (default: %(default)s)"),
        ("--to", "end", "0m", "the end (default: now)"),
    ):
        help_ = f"{meaning}: a date or time, in UTC without an offset, or how long ago (12h, 7d)"
        command.add_argument(
            option, dest=name, type=_moment, default=default, metavar="TIME", help=help_
        )
    source = command.add_mutually_exclusive_group()
    source.add_argument(
        "--prometheus",
        metavar="URL",
        default=Variable(("METAGPU_PROMETHEUS",), ""),
        help="the address of Prometheus, or of what has its API, such as Thanos or Mimir",
    )
    source.add_argument(
        "--prometheus-service",
        type=_service,
        metavar="NAMESPACE/NAME:PORT",
        help="a Service of the cluster, reached through the API server with your rights",
    )
    command.add_argument(
        "--prometheus-token-file",
        type=Path,
        metavar="FILE",
        help="a bearer token for the address of --prometheus",
    )
    add_output(command, ("table", "csv", "json", "yaml"))
    add_sort_by(command)
    add_connection(command)


def _moment(text: str) -> datetime:
    """Read a time, or how long ago it was."""
    now, ago = datetime.now(UTC), _AGO.fullmatch(text)
    with suppress(ValueError, OverflowError):
        given = (
            now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
            if ago
            else datetime.fromisoformat(text)
        )
        given = given if given.tzinfo else given.replace(tzinfo=UTC)
        if _OLDEST <= given <= now + timedelta(days=366):
            return given
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a time between 2000 and a year from now; write 2026-11-01, "
        "2026-11-01T12:00+01:00, or 12h, 7d, 4w"
    )


def _service(text: str) -> str:
    """Return the API server's path to a Service."""
    if found := _SERVICE.fullmatch(text):
        return f"/api/v1/namespaces/{found[1]}/services/{found[2]}/proxy"
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a Service; write NAMESPACE/NAME:PORT, for TLS NAMESPACE/https:NAME:PORT"
    )


def ask_service(viewer: "ClusterViewer", path: str) -> Ask:
    """Return what asks a Service through the API server."""

    async def ask(query: Mapping[str, str]) -> tuple[int, bytes]:
        return 200, await viewer.read(path + QUERY_PATH, query)

    return ask


def ask_address(address: str, token_file: Path | None) -> Ask:
    """Return what asks an address.

    Raises:
        PrometheusError: this is not an address, or the token cannot be read.
    """
    try:
        token = token_file.read_text(encoding="utf-8").strip() if token_file else ""
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise PrometheusError(f"{token_file}: {problem}") from error
    with quick_loading():
        from metagpu.plugins.cluster.client import read_address

    with suppress(ValueError):  # of a port or of an IPv6 address
        if _ADDRESS.fullmatch(address) and urlsplit(address).port != 0:
            return lambda query: read_address(address.rstrip("/") + QUERY_PATH, query, token)
    raise PrometheusError(  # without the address, which may have a password
        "name Prometheus by --prometheus http://HOST:PORT (or METAGPU_PROMETHEUS), or by "
        "--prometheus-service NAMESPACE/NAME:PORT"
    )


async def report_namespaces(args: argparse.Namespace, ask: Ask) -> int:
    """Print the report; return the exit status.

    Raises:
        NoData: Prometheus has nothing of metagpu in this time.
        PrometheusError: Prometheus refuses a query or gives no answer, or the time is empty.
    """
    begin, end = (round(moment.timestamp() * 1000) for moment in (args.begin, args.end))
    if begin >= end:
        raise PrometheusError(f"--from {_iso(begin)} is not before --to {_iso(end)}")
    if args.sort_by:
        sort_items([dict.fromkeys(_HEADS)], args.sort_by)  # judged before Prometheus is asked
    windows = max(1, (end - begin) // _HOUR)
    span = Span(begin, (end - begin) // windows, windows)

    looks = by_window(await _series(ask, span, _DAEMONS % "count"), span)
    if not any(looks):
        raise NoData(
            f"Prometheus has no metrics of metagpu between {_iso(begin)} and {_iso(end)}; check "
            "that it scrapes the daemons, and how long it keeps data"
        )
    missing = missing_times(looks, span)
    least, most = [
        [round(count) for count in by_window(await _series(ask, span, _DAEMONS % name), span)]
        for name in ("min", "max")
    ]
    nodes = {"least": min(filter(None, least)), "most": max(most)}
    items = [
        item
        for item in await _items(ask, span)
        if item["namespace"] in args.names or not args.names
    ]
    if args.sort_by:
        items = list(sort_items(items, args.sort_by))
    if args.output == "csv":
        print_text(_csv(items))
    elif args.output == "table":
        print_text(render([_table(items)], stdout_terminal()) if items else "")
    else:
        times = {"from": _iso(begin), "to": _iso(end)}
        found = {**times, "items": items, "missing": missing, "nodes": nodes}
        print_text(encode(found, args.output))
    for note in _notes(items, missing, nodes, span):
        print(f"kubectl metagpu: {note}", file=sys.stderr)  # noqa: T201 - a command line speaks so
    return 0


async def _items(ask: Ask, span: Span) -> Sequence[Item]:
    """Return a row for each namespace, in hours of a GPU and of a GiB."""
    sums: dict[str, dict[str, float]] = defaultdict(dict)
    for field, expression in QUERIES.items():
        hours = (1000 if field == "heldGpuHours" else span.look) / _HOUR
        unit = hours / _GIB if field.endswith("GiBHours") else hours
        for series in await _series(ask, span, expression):
            labels = series.metric
            of_namespace = sums[labels.get("exported_namespace") or labels.get("namespace", "")]
            total = sum(value for _, value in series.values) * unit
            of_namespace[field] = of_namespace.get(field, 0.0) + total
    return [
        {
            "namespace": name,
            **{key: round(found[key], 3) if key in found else None for key in QUERIES},
        }
        for name, found in sorted(sums.items())
    ]


async def _series(ask: Ask, span: Span, expression: str) -> Sequence[Series]:
    """Return the series of an expression, one set of labels maybe in several.

    Raises:
        PrometheusError: Prometheus refuses the query, or gives no answer.
    """
    found: list[Series] = []
    for query in span.queries(expression):
        try:
            status, body = await ask(query)
        except ClusterError as error:
            raise PrometheusError(f"Prometheus: {error.message or error}") from error
        if status in (401, 403):
            fix = "give --prometheus-token-file, or USER:PASSWORD in the address"
            raise PrometheusError(f"Prometheus answers {status}: {fix}")
        try:
            answer = msgspec.json.decode(body)
            if answer["status"] == "success":
                result = answer["data"]["result"]
                found += msgspec.convert(result, list[Series], strict=False)
                continue
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            shown = f"{status} {' '.join(body[:100].decode(errors='replace').split())!r}"
            raise PrometheusError(
                f"this is not the API of a Prometheus: it answers {shown}"
            ) from error
        raise PrometheusError(f"Prometheus refuses the query: {answer.get('error')}")
    return found


def by_window(series: Sequence[Series], span: Span) -> Sequence[float]:
    """Return the values of one series by window, 0 where there is none."""
    values = [0.0] * span.windows
    for when, value in (each for one in series for each in one.values):
        place = round((when * 1000 - span.begin) / span.window) - 1
        if 0 <= place < span.windows:  # Mimir may move times to multiples of the step
            values[place] = value
    return values


def missing_times(looks: Sequence[float], span: Span) -> Sequence[Item]:
    """Return the times in which windows lack data of all daemons, neighbours as one."""
    found: list[dict[str, Any]] = []
    for place, seen in enumerate(looks):
        part = min(1.0, seen * span.look / span.window)
        if part >= _WHOLE:
            continue
        begin, end = (_iso(span.begin + at * span.window) for at in (place, place + 1))
        if not found or found[-1]["to"] != begin:
            found.append({"from": begin, "hours": 0.0})
        found[-1]["to"] = end
        found[-1]["hours"] = round(found[-1]["hours"] + (1 - part) * span.window / _HOUR, 2)
    return found


def _notes(
    items: Sequence[Item], missing: Sequence[Item], nodes: Mapping[str, int], span: Span
) -> Iterator[str]:
    hours = (span.end - span.begin) / _HOUR
    for time in missing:
        yield (
            f"Prometheus lacks {time['hours']:g} of {hours:g} hours between {time['from']} and "
            f"{time['to']}: nothing of them is counted"
        )
    if nodes["least"] < nodes["most"]:
        yield (
            f"between {nodes['least']} and {nodes['most']} nodes had data: of a node that was not "
            "scraped nothing is counted"
        )
    if not items:
        yield "no pods held GPU shares"


def _table(items: Sequence[Item]) -> TextTable:
    table = TextTable(tuple(_HEADS.values()))
    for item in items:
        table.add(item["namespace"], *(_cell([item[key]]) for key in QUERIES))
    table.add_sums(len(items), *(_cell([item[key] for item in items]) for key in QUERIES))
    return table


def _cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known):.2f}" if known else "-"


def _csv(items: Sequence[Item]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, tuple(_HEADS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(items)
    return text.getvalue()


def _iso(moment: int) -> str:
    text = datetime.fromtimestamp(moment / 1000, UTC).isoformat(timespec="seconds")
    return text.replace("+00:00", "Z")
