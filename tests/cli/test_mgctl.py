"""The node's own `mgctl`: GPU use in tables and for programs."""

import json
import os
import socket
import sys
import termios
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from anyio import to_thread

from metagpu import __version__
from metagpu.cli import live, mgctl
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.doctor import CHECKS
from metagpu.core.reports.reading import plain_report
from metagpu.core.usage.collector import NodeUsage
from metagpu.core.usage.report import usage_report
from metagpu.display.table import CLEAR_SCREEN, PLAIN, Terminal
from metagpu.display.usage import KINDS, Top, format_usage
from metagpu.plugins.control.socket import control_server
from tests.core.usage.test_report import RULES, node

HINT = "set `hostPID: true`"


def answer(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - of any key
    """Return a daemon's answer about that node."""
    report = plain_report(usage_report(*node(), RULES))
    return {**report, "version": "9.9", "at": 1000.0, "node": "gpu-7", **changes}


@asynccontextmanager
async def daemon(folder: Path, **changes: Any) -> AsyncIterator[None]:  # noqa: ANN401 - as above
    """Answer on a control socket while the block lasts."""

    async def usage(_: Mapping[str, Any]) -> object:
        return answer(**changes)

    async with control_server(folder, {"usage": usage}):
        yield


async def run_mgctl(folder: Path, *arguments: str, **changes: Any) -> int:  # noqa: ANN401 - as above
    """Run a command against such a daemon; return its exit status."""
    async with daemon(folder, **changes):
        return await to_thread.run_sync(mgctl.main, [*arguments, "--run-dir", str(folder)])


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the terminal wide enough for the tables."""
    monkeypatch.setenv("COLUMNS", "300")


def lines(out: str) -> list[list[str]]:
    """Return the words of each line that has any."""
    return [line.split() for line in out.splitlines() if line.strip()]


# --- order ---------------------------------------------------------------------------------------


async def test_rows_are_sorted_by_a_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order is that of a field of the JSON, in every format; an unknown one is an error."""
    assert await run_mgctl(tmp_path, "get", "pods", "-o", "json", "--sort-by", "usedMiB") == 0
    containers = json.loads(capsys.readouterr().out)["containers"]
    used = [part["usedMiB"] for container in containers for part in container["gpus"]]
    assert used == sorted(used, reverse=True)
    assert len(set(used)) > 1

    assert await run_mgctl(tmp_path, "get", "processes", "--sort-by", "memoryMiB") == 0
    capsys.readouterr()
    assert await run_mgctl(tmp_path, "get", "devices", "--sort-by", "memory") == 1
    assert "memoryMiB" in capsys.readouterr().err


# --- tables ---------------------------------------------------------------------------------------


async def test_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each process, and for each holder without one; the total counts all of them."""
    assert await run_mgctl(tmp_path, "get", "processes") == 0

    head, _, *rows = lines(capsys.readouterr().out)
    assert head == ["POD", "NAMESPACE", "GPU", "NODE", "LOAD", "MEMORY", "PID", "CMD", "SHARES"]
    assert rows[:5] == [
        ["alice", "team", "0", "gpu-7", "150%", "13000/12288", "MiB", "100", "python", "3"],
        ["alice", "team", "0", "gpu-7", "0%", "?/12288", "MiB", "101", "-", "3"],
        ["alice", "team", "1", "gpu-7", "-", "0/8192", "MiB", "-", "-", "2"],
        ["bob", "team", "0", "gpu-7", "-", "0/4096", "MiB", "-", "-", "1"],
        ["-", "-", "1", "gpu-7", "-", "50", "MiB", "300", "-", "-"],
    ]
    assert rows[5] == ["total", "13050", "MiB", "6"]
    assert " ".join(rows[6]) == (
        "1 process uses a GPU without a share of it; -o wide has the reasons"
    )


async def test_wide_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`-o wide` adds the container's sum and limit, its inner pid, the guard, and the reason."""
    assert await run_mgctl(tmp_path, "get", "process", "-o", "wide") == 0

    out = capsys.readouterr().out
    assert "python train.py" in out
    assert "13000/12614 MiB" in out
    assert "enforcer (kill)" in out
    assert "2026-03-01T12:00:00" in out
    assert "the process runs in no container of a pod" in out


async def test_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU has its memory, its shares and their size; the last row is their sum."""
    assert await run_mgctl(tmp_path, "get", "devices") == 0

    head, _, a, _, total = lines(capsys.readouterr().out)
    assert head == ["GPU", "UUID", "MEMORY", "CAPACITY", "SHARE", "SIZE"]
    assert a[0] == "0"
    assert a[2:] == ["40960", "MiB", "10", "4096", "MiB"]
    assert total == ["total", "81920", "MiB", "20"]


async def test_wide_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`-o wide` adds a GPU's memory use, utilization, health and owner."""
    broken = answer()["gpus"]
    broken[0] |= {"cordon": "to be moved"}
    broken[1] |= {"healthy": False, "reason": "XID 79", "shares": []}
    assert await run_mgctl(tmp_path, "get", "devices", "-o", "wide", gpus=broken) == 0

    _, _, a, b, _ = lines(capsys.readouterr().out)
    assert (
        " ".join(a[7:])
        == "cnvrg.io/metagpu 4 13000/40340 MiB 100% kill A100-SXM4-40GB cordoned: to be moved"
    )
    assert " ".join(b[4:]) == "- - - - 50/40340 MiB - kill A100-SXM4-40GB XID 79"


async def test_a_broken_gpu_does_not_look_like_a_healthy_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below the columns, which have no health, a line names each fault."""
    broken = answer()["gpus"]
    broken[0] |= {"cordon": "to be moved", "faults": {"MIG-x": "XID 94"}}
    broken[1] |= {"healthy": False, "reason": "XID 79"}
    assert await run_mgctl(tmp_path, "get", "devices", gpus=broken) == 0

    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[-3:] == [
        "GPU 0 is cordoned: to be moved",
        "MIG-x of GPU 0 is out of service: XID 94",
        "GPU 1 is out of service: XID 79",
    ]


async def test_pods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each container and GPU has its shares, use and guard."""
    assert await run_mgctl(tmp_path, "get", "pods") == 0

    _, _, alice, *_ = lines(capsys.readouterr().out)
    row = "alice team main 0 3 13000/12288 MiB 150% 2 enforcer (kill)"
    assert " ".join(alice) == row


async def test_a_program_cannot_write_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process's name is printed, and neither obeyed nor read as markup."""
    process = answer()["unauthorized"][0]
    for command in (["\x1b[2J[red]evil"], ["[kworker]"]):
        processes = [{**process, "command": command}]
        assert await run_mgctl(tmp_path, "get", "processes", unauthorized=processes) == 0

    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\N{REPLACEMENT CHARACTER}[2J[red]evil" in out
    assert "[kworker]" in out


@pytest.mark.parametrize("named", [False, True])
async def test_a_gpu_without_a_process_list_is_named(
    *, named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table that lacks a GPU's processes names the GPU once."""
    gpus = answer()["gpus"]
    name = f"GPU 1 ({gpus[1]['uuid']}): " if named else ""
    gpus[1] |= {"failure": f"{name}it is lost", "usedMiB": None}
    assert await run_mgctl(tmp_path, "get", "processes", gpus=gpus) == 0

    assert "GPU 1 could not be read: it is lost" in capsys.readouterr().out


async def test_hints_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hints go to stderr, so that a program's input stays unchanged."""
    assert await run_mgctl(tmp_path, "get", "pods", "-o", "json", warnings=[HINT]) == 0

    captured = capsys.readouterr()
    assert json.loads(captured.out)["node"] == "gpu-7"
    assert captured.err == f"mgctl: {HINT}\n"


# --- for programs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("devices", {"node", "gpus"}),
        ("processes", {"node", "containers", "unauthorized"}),
        ("pods", {"node", "containers"}),
    ],
)
@pytest.mark.parametrize("form", ["json", "yaml"])
async def test_json_and_yaml_are_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, keys: set[str], form: str
) -> None:
    """JSON and YAML have the same content, with everything the daemon knows of that kind."""
    assert await run_mgctl(tmp_path, "get", kind, "-o", form) == 0

    out = capsys.readouterr().out
    parsed = json.loads(out) if form == "json" else yaml.safe_load(out)
    assert set(parsed) == keys
    if kind != "pods":
        assert parsed == {key: answer()[key] for key in keys}
    else:
        assert parsed["containers"][0]["gpus"][0]["limitMiB"] == 12614
        assert "processes" not in parsed["containers"][0]["gpus"][0]


# --- again and again ------------------------------------------------------------------------------


class TtyText(StringIO):
    """A terminal that records the text written on it."""

    def isatty(self) -> bool:
        """Return true, as a person reads."""
        return True


def interrupted_after(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C after so many intervals."""
    left = [times]

    def pause(_: float) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(live, "sleep", pause)


async def test_watch_prints_a_line_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With JSON, each interval is a line; Ctrl-C ends the watch without an error."""
    interrupted_after(3, monkeypatch)
    assert await run_mgctl(tmp_path, "get", "processes", "-w", "-o", "json") == 0

    looks = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["node"] for line in looks] == ["gpu-7"] * 3


async def test_watch_prints_a_document_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With YAML, each interval is a document."""
    interrupted_after(2, monkeypatch)
    assert await run_mgctl(tmp_path, "get", "pods", "-w", "-o", "yaml") == 0

    looks = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [look["node"] for look in looks] == ["gpu-7"] * 2


@pytest.mark.parametrize(
    "command", [("get", "processes", "-w"), ("get", "devices", "-w", "-o", "wide"), ("top",)]
)
async def test_at_a_terminal_tables_are_drawn_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """With `-w` and in `top`, the screen is redrawn until Ctrl-C."""
    screen = TtyText()
    monkeypatch.setattr(sys, "stdout", screen)
    interrupted_after(2, monkeypatch)

    assert await run_mgctl(tmp_path, *command) == 0
    drawn = screen.getvalue()
    assert drawn.startswith(live.ENTER)
    assert drawn.endswith(live.LEAVE)
    assert drawn.count(CLEAR_SCREEN) == 2
    assert "\x1b[1mGPU" in drawn or "\x1b[1mIDX" in drawn


@pytest.mark.parametrize("term", ["dumb", "", None])
async def test_a_terminal_without_codes_is_written_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: str | None
) -> None:
    """`top` and `-w` print one table without codes where TERM is dumb, or not set."""
    screen = TtyText()
    monkeypatch.setattr(sys, "stdout", screen)
    interrupted_after(2, monkeypatch)
    if term is None:
        monkeypatch.delenv("TERM", raising=False)
    else:
        monkeypatch.setenv("TERM", term)

    for command, once in (
        (("top",), "13000/40340 MiB"),
        (("get", "devices", "-w"), "SHARE SIZE"),
        (("get", "devices"), "SHARE SIZE"),
    ):
        screen.truncate(screen.seek(0))
        assert await run_mgctl(tmp_path, *command) == 0
        assert "\x1b" not in screen.getvalue()
        assert screen.getvalue().count(once) == 1


async def test_colours_can_be_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`NO_COLOR` removes colours, at a terminal too."""
    screen = TtyText()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("NO_COLOR", "1")

    assert await run_mgctl(tmp_path, "get", "pods") == 0
    assert "\x1b" not in screen.getvalue()


async def test_top_without_a_terminal_is_drawn_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bars for the GPUs, processes with most memory first, no colours."""
    assert await run_mgctl(tmp_path, "top") == 0

    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "13000/40340 MiB" in out
    assert out.index("team/alice (main)") < out.index("no lease")
    assert await run_mgctl(tmp_path, "top", "--sort-by", "utilization") == 0
    assert capsys.readouterr().out.index("no lease") > 0
    assert await run_mgctl(tmp_path, "top", "--sort-by", "nothing") == 1
    assert await run_mgctl(tmp_path, "top", "-o", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown.keys() == {"node", "gpus", "containers", "unauthorized"}


@pytest.mark.parametrize("kind", ["pods", "processes"])
async def test_one_namespace(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """`-n` shows the containers and processes of one namespace, `-A` those of all."""
    assert await run_mgctl(tmp_path, "get", kind, "-n", "elsewhere", "-o", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["containers"], shown.get("unauthorized", [])) == ([], [])
    for words in (("-n", "team"), ("-n", "elsewhere", "-A")):
        assert await run_mgctl(tmp_path, "get", kind, *words, "-o", "json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert {container["pod"] for container in shown["containers"]} == {"alice", "bob"}


MIXED = [
    {"resource": "cnvrg.io/metagpu", "capacity": 100, "held": 25, "shareMiB": 400},
    {"resource": "nvidia.com/gpu.shared", "capacity": 10, "held": 0, "shareMiB": 0},
    {"resource": "nvidia.com/mig-1g.5gb", "capacity": 7, "held": 2, "shareMiB": 4864},
    {"resource": "nvidia.com/mig-3g.20gb", "capacity": 2, "held": 0, "shareMiB": 19968},
    {"resource": "nvidia.com/gpu", "capacity": 1, "held": 0, "shareMiB": 40960},
]
"""The offers of a GPU in a pool with several backends."""


def test_top_fits_a_small_terminal() -> None:
    """A pool of many resources and a long name break no line of 80 columns."""
    report = answer()
    for gpu in report["gpus"]:
        gpu["shares"] = MIXED
    report["containers"][0]["pod"] = "trainer-of-a-long-name-5d8f7b6c9-x2x4z"
    drawn = Top().screen(report, Terminal(80, 24)).splitlines()

    assert max(map(len, drawn)) <= 80
    assert "25/100" in drawn[2]
    assert "2/7" in drawn[3]
    assert "0/10" not in "".join(drawn)


def test_shares_of_several_resources_have_no_sum() -> None:
    """Fractions, instances and whole GPUs are not added up."""
    report = answer()
    for gpu in report["gpus"]:
        gpu["shares"] = MIXED
    report["containers"][0]["gpus"][0]["resource"] = "nvidia.com/gpu"

    for kind in ("devices", "processes"):
        total = [line for line in format_usage(report, kind, "table", PLAIN).splitlines() if line]
        assert [line.split()[-1] for line in total if line.startswith(" total ")] == ["-"]


async def test_q_ends_a_live_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal `q` ends `top`, and the terminal reads lines again."""
    ours, theirs = os.openpty()

    class Pressing(TtyText):
        """A screen whose reader presses `q` once it is drawn."""

        def write(self, text: str) -> int:
            """Draw."""
            if CLEAR_SCREEN in text:
                os.write(ours, b"q")
            return super().write(text)

    screen = Pressing()
    monkeypatch.setattr(sys, "stdout", screen)
    with os.fdopen(theirs) as keyboard:
        before = termios.tcgetattr(theirs)
        monkeypatch.setattr(sys, "stdin", keyboard)

        assert await run_mgctl(tmp_path, "top") == 0
        assert termios.tcgetattr(theirs) == before
    os.close(ours)
    assert screen.getvalue().endswith(live.LEAVE)


async def test_the_folder_of_the_daemon_may_be_a_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`METAGPU_RUN_DIR` names the daemon's folder, as for `metagpu`."""
    monkeypatch.setenv("METAGPU_RUN_DIR", str(tmp_path))
    async with daemon(tmp_path):
        assert await to_thread.run_sync(mgctl.main, ["version"]) == 0
    assert "metagpu 9.9" in capsys.readouterr().out


async def test_top_has_the_processor_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second sample on, processor time since the first is a percentage."""
    screen = TtyText()
    monkeypatch.setattr(sys, "stdout", screen)
    interrupted_after(2, monkeypatch)
    looks = iter([(500.0, 12.0), (502.0, 13.0)])

    async def usage(_: Mapping[str, Any]) -> object:
        at, seconds = next(looks)
        report = answer(at=at)
        report["containers"][0]["gpus"][0]["processes"][0]["cpuSeconds"] = seconds
        return report

    async with control_server(tmp_path, {"usage": usage}):
        assert await to_thread.run_sync(mgctl.main, ["top", "--run-dir", str(tmp_path)]) == 0
    assert "50%" in screen.getvalue()


# --- ends -----------------------------------------------------------------------------------------


async def test_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both versions are printed: mgctl's own, and the daemon's."""
    assert await run_mgctl(tmp_path, "version") == 0
    assert capsys.readouterr().out == f"mgctl {__version__}\nmetagpu 9.9\n"


def test_version_without_a_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a daemon mgctl prints its own version, and a note."""
    assert mgctl.main(["version", "--run-dir", str(tmp_path)]) == 0

    captured = capsys.readouterr()
    assert captured.out == f"mgctl {__version__}\n"
    assert captured.err.startswith(f"mgctl: no daemon answers on {tmp_path / 'metagpu.sock'}")


def test_without_a_daemon_mgctl_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No daemon is status 1, and a line with the fix."""
    assert mgctl.main(["get", "pods", "--run-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"mgctl: no daemon answers on {tmp_path / 'metagpu.sock'} (No such file or directory); "
        "start `metagpu run`, or name its directory with --run-dir\n"
    )


async def test_a_closed_pipe_ends_mgctl_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piped into `head`, mgctl ends with status 1 and without a traceback."""
    written = tmp_path / "out"
    with written.open("w") as out:

        def broken(*_: object, **__: object) -> None:
            raise BrokenPipeError

        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(mgctl, "print_text", broken)
        assert await run_mgctl(tmp_path, "get", "pods") == 1


def test_an_empty_node_is_drawn() -> None:
    """A node without GPUs, pods and processes has empty tables."""
    empty = plain_report(usage_report(Snapshot(), NodeUsage(), RULES))
    for kind in KINDS:
        assert len(format_usage(empty, kind, "table", PLAIN).splitlines()) >= 2
    assert "POD (CONTAINER)" in Top().screen(empty, PLAIN)


# --- doctor ---------------------------------------------------------------------------------------


def doctor_report(folder: Path, *more: str) -> int:
    """Examine a node that has nothing."""
    places = ("root", "run-dir", "kubelet-dir", "pod-resources")
    return mgctl.main(["doctor", *(f"--{place}={folder}" for place in places), *more])


def test_the_doctor_looks_below_the_kubelets_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--kubelet-root` finds the PodResources socket of a kubelet with another root."""
    (tmp_path / "pod-resources").mkdir()
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(tmp_path / "pod-resources" / "kubelet.sock"))
        kubelet.listen()
        mgctl.main(["doctor", f"--kubelet-root={tmp_path}", f"--run-dir={tmp_path}"])

    assert "MG302  ok       the kubelet's PodResources socket" in capsys.readouterr().out


def test_the_doctor_names_code_verdict_and_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A summary comes first, then groups, problems first, each check with its fix below."""
    assert doctor_report(tmp_path) == 1

    out = capsys.readouterr().out
    first, *rest = out.splitlines()
    shown = [line[:16].split() for line in rest if line.startswith("MG")]
    counts = Counter(result for _, result in shown)
    unknown = len(CHECKS) - len(shown)
    assert first == (
        f"{counts['error']} errors, {counts['warning']} warnings, {counts['ok']} checks ok; "
        f"{unknown} more need the daemon's answer"
    )
    assert (
        "MG201  error    NVIDIA's kernel module is not loaded\n                install the" in out
    )
    assert "MG303  ok       no other GPU device plugin\n" in out
    assert (
        "\ndaemon\nMG401  error    the daemon does not answer\n"
        f"                no daemon answers on {tmp_path}" in out
    )
    assert "unknown" not in out
    groups = [line for line in rest if line and not line.startswith(("MG", " "))]
    assert groups[0] in ("permissions", "driver")
    for group in out.split("\n\n")[1:]:
        results = [line[7:12].strip() for line in group.splitlines() if line.startswith("MG")]
        assert results == sorted(results, key=["error", "warni", "ok"].index)


def test_the_doctor_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON the checks are a list with the same content."""
    assert doctor_report(tmp_path, "-o", "json") == 1

    checks = json.loads(capsys.readouterr().out)
    assert [each["code"] for each in checks] == list(CHECKS)
    assert checks[0].keys() == {"code", "result", "finding", "fix"}
