"""`kubectl metagpu report` with answers of Prometheus 2.42, recorded on 2026-11-29.

They are about a node `a` and a node `b` that began later. `red` held half a GPU and used a quarter,
`blue` two GPUs of MIG in the last hour; in the first hour nobody scraped.
`tests/e2e/test_monitoring.py` asks a running Prometheus.
"""

import csv
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from aiohttp import web
from anyio import to_thread

from metagpu.kubectl.program import main
from metagpu.kubectl.report import Series, Span, by_window, missing_times
from metagpu.plugins.cluster.client import JSON

RECORDED: Final = json.loads(Path(__file__).with_name("prometheus_answers.json").read_text())
RANGE: Final = ("--from", "2025-11-25T16:00:00Z", "--to", "2025-11-26T00:00:00+01:00")
SERVICE: Final = "/api/v1/namespaces/monitoring/services/prometheus:web/proxy"
MISSING: Final = (
    "kubectl metagpu: Prometheus lacks 1 of 7 hours between 2025-11-25T16:00:00Z and "
    "2025-11-25T17:00:00Z: nothing of them is counted\n"
)
NO_ADDRESSES: Final = (
    *("u:secret@prom:9090", "foo", "ftp://x", "127.0.0.1:9090", "http://x:99999", "http://[bad"),
    *("http://", "http://u:12/secret@x", "http://u:12?secret@x", "http://u:12#secret@x"),
)
NO_TIMES: Final = (
    *("999999w", "99999999999d", "9999-12-31T23:59-14:00", "0001-01-01", "1999-12-31"),
    "9" * 5000 + "d",
)


async def _answer(request: web.Request) -> web.Response:
    asked = request.query
    key = " ".join(str(asked[name]) for name in ("query", "start", "end", "step"))
    if key not in RECORDED and str(asked["start"]).startswith("17640"):
        refusal = {"status": "error", "error": f"not recorded: {key}"}
        return web.json_response(refusal, status=400)
    found = RECORDED.get(key, [])
    answer = {"status": "success", "data": {"result": found}}
    return web.json_response(answer, content_type=JSON)


async def _answer_otherwise(request: web.Request) -> web.Response:
    """Answer with a status and nothing, or as an instant query."""
    kind = request.match_info["kind"]
    if kind.isdecimal():
        return web.Response(status=int(kind))
    if kind == "vector":
        series = {"metric": {}, "value": [1764086400, "1"]}
        return web.json_response({"status": "success", "data": {"result": [series]}})
    raise web.HTTPNotFound


@asynccontextmanager
async def prometheus() -> AsyncIterator[str]:
    """Serve the answers, at its address and through the path of an API server."""
    application = web.Application()
    application.router.add_get("/api/v1/query_range", _answer)
    application.router.add_get("/{kind}/api/v1/query_range", _answer_otherwise)
    application.router.add_get(f"{SERVICE}/api/v1/query_range", _answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def report(*arguments: str) -> int:
    """Run the command; return its status."""
    return await to_thread.run_sync(main, ["report", "namespaces", *arguments])


def kubeconfig_of(address: str, folder: Path) -> Path:
    """Write a kubeconfig for an address."""
    file = folder / "kubeconfig"
    content = {
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file.write_text(yaml.safe_dump(content))
    return file


async def test_a_table_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """Each namespace has its hours, the foot their sums, and stderr the time without data."""
    async with prometheus() as address:
        assert await report(*RANGE, "--prometheus", address) == 0

    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert rows[2:] == [
        ["blue", "2.00", "-", "81.33", "-"],
        ["red", "3.00", "1.50", "120.00", "30.00"],
        ["2", "5.00", "1.50", "201.33", "30.00"],
    ]
    assert err == MISSING


async def test_the_same_through_the_api_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Service of the cluster is asked with the user's kubeconfig."""
    async with prometheus() as address:
        given = ("--prometheus-service", "monitoring/prometheus:web", "-o", "json")
        file = await to_thread.run_sync(kubeconfig_of, address, tmp_path)
        assert await report(*RANGE, *given, "--kubeconfig", str(file)) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["items"][1] == {
        "namespace": "red",
        "heldGpuHours": 3.0,
        "usedGpuHours": 1.5,
        "heldGiBHours": 120.0,
        "usedGiBHours": 30.0,
    }
    assert found["missing"] == [
        {"from": "2025-11-25T16:00:00Z", "to": "2025-11-25T17:00:00Z", "hours": 1.0}
    ]
    assert (found["from"], found["to"]) == ("2025-11-25T16:00:00Z", "2025-11-25T23:00:00Z")
    assert found["nodes"] == {"least": 2, "most": 2}


async def test_a_refusal_through_the_api_server_keeps_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints what Prometheus says of a query, not only that it was a bad one."""
    async with prometheus() as address:
        file = await to_thread.run_sync(kubeconfig_of, address, tmp_path)
        given = ("--prometheus-service", "monitoring/prometheus:web", "--kubeconfig", str(file))
        assert await report("--from", "2025-11-24T18:00", "--to", "2025-11-24T20:00", *given) == 1

    assert "Prometheus: not recorded: " in capsys.readouterr().err


async def test_csv_has_the_fields_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A spreadsheet reads names as in JSON, an empty cell for what is unknown, and no notes."""
    async with prometheus() as address:
        status = await report(
            *RANGE, "--prometheus", address, "-o", "csv", "--sort-by", "heldGpuHours"
        )

    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert status == 0
    assert [(row["namespace"], row["heldGpuHours"], row["usedGpuHours"]) for row in rows] == [
        ("red", "3.0", "1.5"),
        ("blue", "2.0", ""),
    ]


async def test_only_named_namespaces(capsys: pytest.CaptureFixture[str]) -> None:
    """Names choose rows; a namespace that held nothing has none."""
    async with prometheus() as address:
        assert await report("red", "green", *RANGE, "--prometheus", address, "-o", "csv") == 0

    assert [line.split(",")[0] for line in capsys.readouterr().out.split()] == ["namespace", "red"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (
            ("--from", "yesterday"),
            2,
            "'yesterday' is not a time between 2000 and a year from now; write 2026-11-01",
        ),
        (("--prometheus-service", "prometheus"), 2, "write NAMESPACE/NAME:PORT"),
        ((), 1, "name Prometheus by --prometheus http://HOST:PORT (or METAGPU_PROMETHEUS)"),
        (
            ("--prometheus", "http://127.0.0.1:1"),
            1,
            "http://127.0.0.1:1/api/v1/query_range: Cannot connect",
        ),
        (
            ("--prometheus", "http://u:se@secret@127.0.0.1:1"),
            1,
            "http://127.0.0.1:1/api/v1/query_range: Cannot connect",
        ),
        (("--prometheus", "ADDRESS", "--from", "2d", "--to", "3d"), 1, "is not before --to"),
        (("--prometheus", "ADDRESS", "--from", "2d"), 1, "has no metrics of metagpu between"),
        (("--prometheus", "ADDRESS/prometheus", *RANGE), 1, "is not the API of a Prometheus"),
        (
            ("--prometheus", "ADDRESS", "--from", "2025-11-24T18:00", "--to", "2025-11-24T20:00"),
            1,
            "Prometheus refuses the query: not recorded",
        ),
        (("--prometheus", "ADDRESS", "--prometheus-token-file", "/none"), 1, "/none: No such file"),
        (("--prometheus", "ADDRESS", "--prometheus-token-file", "LATIN1"), 1, ": not UTF-8 text"),
        *(
            (("--prometheus", word), 1, "name Prometheus by --prometheus http")
            for word in NO_ADDRESSES
        ),
        *((("--from", word), 2, f"'{word}' is not a time between 2000") for word in NO_TIMES),
        (
            ("--prometheus", "ADDRESS/401"),
            1,
            "Prometheus answers 401: give --prometheus-token-file",
        ),
        (("--prometheus", "ADDRESS/503"), 1, "not the API of a Prometheus: it answers 503 ''"),
        (("--prometheus", "ADDRESS/vector"), 1, "is not the API of a Prometheus: it answers 200 "),
        (
            ("--prometheus", "http://127.0.0.1:1", "--sort-by", "foo"),
            1,
            "--sort-by foo: allowed: namespace, heldGpuHours",
        ),
    ],
)
async def test_what_cannot_be_asked_is_one_line(
    arguments: tuple[str, ...],
    status: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error says what to change, without a traceback and without a password."""
    latin1 = tmp_path / "token"
    await to_thread.run_sync(latin1.write_bytes, b"\xe9")
    async with prometheus() as address:
        given = [word.replace("ADDRESS", address) for word in arguments]
        given = [word.replace("LATIN1", str(latin1)) for word in given]
        try:
            found = await report(*given)
        except SystemExit as error:
            found = error.code  # type: ignore[assignment]

    out, err = capsys.readouterr()
    assert (found, out) == (status, "")
    assert said in err
    assert "secret" not in err
    assert err.count("\n") == 1


def test_times_without_data_are_joined() -> None:
    """Neighbouring windows are one time, and a window with a late look is whole."""
    span = Span(0, 3_600_000, 5)
    looks = [60, 0, 30, 58, 0]
    found: Any = missing_times(looks, span)

    assert [(time["from"][11:16], time["to"][11:16], time["hours"]) for time in found] == [
        ("01:00", "03:00", 1.5),
        ("04:00", "05:00", 1.0),
    ]


def test_times_outside_the_windows_are_dropped() -> None:
    """An answer whose times were moved fills the windows that it has."""
    series = Series({}, [(0.0, 1.0), (3600.0, 2.0), (7201.0, 3.0), (9e9, 4.0)])
    assert by_window([series], Span(0, 3_600_000, 2)) == [2.0, 3.0]
