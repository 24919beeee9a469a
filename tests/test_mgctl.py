"""What a person at a node's terminal gets of who uses what."""

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from anyio import to_thread

from metagpu import __version__, mgctl
from metagpu.core.census import Findings
from metagpu.core.doctor import CHECKS
from metagpu.core.snapshot import Snapshot
from metagpu.core.usage_report import usage_report
from metagpu.plugins.control import controlled
from metagpu.sheets import AFRESH, PLAIN
from metagpu.usage_text import KINDS, Top, written
from tests.core.test_usage_report import RULES, node

HINT = "set `hostPID: true`"


def answer(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - of any key
    """Give what a daemon would say of that node."""
    return {
        "version": "9.9",
        "at": 1000.0,
        "node": "gpu-7",
        **usage_report(*node(), RULES),
        **changes,
    }


@asynccontextmanager
async def daemon(folder: Path, **changes: Any) -> AsyncIterator[None]:  # noqa: ANN401 - as above
    """Answer on a control socket while the block lasts."""

    async def usage(_: Mapping[str, Any]) -> object:
        return answer(**changes)

    async with controlled(folder, {"usage": usage}):
        yield


async def said(folder: Path, *arguments: str, **changes: Any) -> int:  # noqa: ANN401 - as above
    """Run a command against such a daemon; give its exit status."""
    async with daemon(folder, **changes):
        return await to_thread.run_sync(mgctl.main, [*arguments, "--run-dir", str(folder)])


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tables have room."""
    monkeypatch.setenv("COLUMNS", "300")


def lines(out: str) -> list[list[str]]:
    """Give the words of each line that has any."""
    return [line.split() for line in out.splitlines() if line.strip()]


# --- tables ---------------------------------------------------------------------------------------


async def test_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MetaGPU's columns: a row for each process, and for who holds shares and has none."""
    assert await said(tmp_path, "get", "processes") == 0

    head, _, *rows = lines(capsys.readouterr().out)
    assert head == ["POD", "NS", "DEVICE", "NODE", "GPU", "MEMORY", "PID", "CMD", "REQ"]
    assert rows[:5] == [
        ["alice", "team", "0", "gpu-7", "150%", "13000/12288", "MiB", "100", "python", "3"],
        ["alice", "team", "0", "gpu-7", "0%", "?/12288", "MiB", "101", "-", "3"],
        ["alice", "team", "1", "gpu-7", "-", "0/8192", "MiB", "-", "-", "2"],
        ["bob", "team", "0", "gpu-7", "-", "0/4096", "MiB", "-", "-", "1"],
        ["-", "-", "1", "gpu-7", "-", "50", "MiB", "300", "-", "-"],
    ]
    assert rows[5] == ["2", "13000", "MiB", "6"]
    assert " ".join(rows[6]) == (
        "1 process belongs to nobody who holds a share of the GPU; -o wide says why"
    )


async def test_wide_says_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`-o wide` adds the container's sum and limit, the pid it knows, what guards it, and why."""
    assert await said(tmp_path, "get", "process", "-o", "wide") == 0

    out = capsys.readouterr().out
    assert "python train.py" in out
    assert "13000/12614 MiB" in out
    assert "enforcer (kill)" in out
    assert "2026-03-01T12:00:00" in out
    assert "it is in no container of a pod" in out


async def test_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MetaGPU's columns, and their sums."""
    assert await said(tmp_path, "get", "devices") == 0

    head, _, a, _, total = lines(capsys.readouterr().out)
    assert head == ["IDX", "UUID", "MEMORY", "SHARES", "SHARE", "SIZE"]
    assert a[0] == "0"
    assert a[2:] == ["40960", "MiB", "10", "4096", "MiB"]
    assert total == ["2", "81920", "MiB", "20"]


async def test_wide_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`-o wide` says how full, how busy and how healthy a GPU is, and what holds for it."""
    broken = answer()["gpus"]
    broken[0] |= {"cordon": "to be moved"}
    broken[1] |= {"healthy": False, "reason": "XID 79", "shares": []}
    assert await said(tmp_path, "get", "devices", "-o", "wide", gpus=broken) == 0

    _, _, a, b, _ = lines(capsys.readouterr().out)
    assert (
        " ".join(a[7:])
        == "cnvrg.io/metagpu 4 13000/40340 MiB 100% kill A100-SXM4-40GB cordoned: to be moved"
    )
    assert " ".join(b[4:]) == "- - - - 50/40340 MiB - kill A100-SXM4-40GB XID 79"


async def test_a_broken_gpu_does_not_look_like_a_healthy_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MetaGPU's columns say nothing of health: what is wrong stands below them."""
    broken = answer()["gpus"]
    broken[0] |= {"cordon": "to be moved", "faults": {"MIG-x": "XID 94"}}
    broken[1] |= {"healthy": False, "reason": "XID 79"}
    assert await said(tmp_path, "get", "devices", gpus=broken) == 0

    told = [line for line in capsys.readouterr().out.splitlines() if line]
    assert told[-3:] == [
        "GPU 0 is cordoned: to be moved",
        "MIG-x of GPU 0 is out of service: XID 94",
        "GPU 1 is out of service: XID 79",
    ]


async def test_pods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each container and GPU: what it holds, what it uses, what guards it."""
    assert await said(tmp_path, "get", "pods") == 0

    _, _, alice, *_ = lines(capsys.readouterr().out)
    row = "alice team main 0 3 13000/12288 MiB 150% 2 enforcer (kill)"
    assert " ".join(alice) == row


async def test_a_program_cannot_write_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a process calls itself is shown, and neither obeyed nor read as markup."""
    stranger = answer()["strangers"][0]
    for command in (["\x1b[2J[red]evil"], ["[kworker]"]):
        strangers = [{**stranger, "command": command}]
        assert await said(tmp_path, "get", "processes", strangers=strangers) == 0

    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\N{REPLACEMENT CHARACTER}[2J[red]evil" in out
    assert "[kworker]" in out


@pytest.mark.parametrize("named", [False, True])
async def test_a_gpu_that_could_not_be_asked_is_told(
    *, named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table that lacks a GPU's processes says so, and names the GPU once."""
    gpus = answer()["gpus"]
    name = f"GPU 1 ({gpus[1]['uuid']}): " if named else ""
    gpus[1] |= {"failure": f"{name}it is lost", "usedMiB": None}
    assert await said(tmp_path, "get", "processes", gpus=gpus) == 0

    assert "GPU 1 could not be asked: it is lost" in capsys.readouterr().out


async def test_what_hinders_us_is_told_beside_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hints go to stderr: what is read by programs stays what it is."""
    assert await said(tmp_path, "get", "pods", "-o", "json", hints=[HINT]) == 0

    told = capsys.readouterr()
    assert json.loads(told.out)["node"] == "gpu-7"
    assert told.err == f"mgctl: {HINT}\n"


# --- for programs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("devices", {"node", "gpus"}),
        ("processes", {"node", "containers", "strangers"}),
        ("pods", {"node", "containers"}),
    ],
)
@pytest.mark.parametrize("form", ["json", "yaml"])
async def test_programs_get_what_they_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, keys: set[str], form: str
) -> None:
    """JSON and YAML say the same, with everything the daemon knows of that kind."""
    assert await said(tmp_path, "get", kind, "-o", form) == 0

    out = capsys.readouterr().out
    told = json.loads(out) if form == "json" else yaml.safe_load(out)
    assert set(told) == keys
    if kind != "pods":
        assert told == {key: answer()[key] for key in keys}
    else:
        assert told["containers"][0]["gpus"][0]["limitMiB"] == 12614
        assert "processes" not in told["containers"][0]["gpus"][0]


# --- again and again ------------------------------------------------------------------------------


class TtyText(StringIO):
    """A terminal that remembers what was written on it."""

    def isatty(self) -> bool:
        """Say that a person listens."""
        return True


def interrupted_after(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C at so many pauses from now."""
    left = [times]

    def pause(_: float) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(mgctl, "sleep", pause)


async def test_watch_prints_a_line_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With JSON, each look is a line; Ctrl-C is how it ends, and no failure."""
    interrupted_after(3, monkeypatch)
    assert await said(tmp_path, "get", "processes", "-w", "-o", "json") == 0

    looks = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["node"] for line in looks] == ["gpu-7"] * 3


async def test_watch_prints_a_document_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With YAML, each look is a document."""
    interrupted_after(2, monkeypatch)
    assert await said(tmp_path, "get", "pods", "-w", "-o", "yaml") == 0

    looks = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [look["node"] for look in looks] == ["gpu-7"] * 2


@pytest.mark.parametrize(
    "command", [("get", "processes", "-w"), ("get", "devices", "-w", "-o", "wide"), ("top",)]
)
async def test_at_a_terminal_it_is_drawn_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Watched and `top`, the screen is drawn anew until Ctrl-C."""
    screen = TtyText()
    monkeypatch.setattr(sys, "stdout", screen)
    interrupted_after(2, monkeypatch)

    assert await said(tmp_path, *command) == 0
    drawn = screen.getvalue()
    assert drawn.startswith(mgctl.ENTER)
    assert drawn.endswith(mgctl.LEAVE)
    assert drawn.count(AFRESH) == 2
    assert "\x1b[1mGPU" in drawn or "\x1b[1mIDX" in drawn


async def test_colours_can_be_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`NO_COLOR` is heard, at a terminal too."""
    screen = TtyText()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("NO_COLOR", "1")

    assert await said(tmp_path, "get", "pods") == 0
    assert "\x1b" not in screen.getvalue()


async def test_top_without_a_terminal_is_drawn_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bars for the GPUs, processes with most memory first, no colours."""
    assert await said(tmp_path, "top") == 0

    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "13000/40340 MiB" in out
    assert out.index("team/alice (main)") < out.index("no lease")


async def test_top_says_how_much_of_a_processor_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second look on, the processor time since the first one is a percentage."""
    screen = TtyText()
    monkeypatch.setattr(sys, "stdout", screen)
    interrupted_after(2, monkeypatch)
    looks = iter([(500.0, 12.0), (502.0, 13.0)])

    async def usage(_: Mapping[str, Any]) -> object:
        at, seconds = next(looks)
        told = answer(at=at)
        told["containers"][0]["gpus"][0]["processes"][0]["cpuSeconds"] = seconds
        return told

    async with controlled(tmp_path, {"usage": usage}):
        assert await to_thread.run_sync(mgctl.main, ["top", "--run-dir", str(tmp_path)]) == 0
    assert "50%" in screen.getvalue()


# --- ends -----------------------------------------------------------------------------------------


async def test_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both versions are told: its own, and the daemon's."""
    assert await said(tmp_path, "version") == 0
    assert capsys.readouterr().out == f"mgctl {__version__}\nmetagpu 9.9\n"


def test_version_without_a_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own version needs no daemon; that there is none is said."""
    assert mgctl.main(["version", "--run-dir", str(tmp_path)]) == 0

    told = capsys.readouterr()
    assert told.out == f"mgctl {__version__}\n"
    assert told.err.startswith(f"mgctl: no daemon answers on {tmp_path / 'metagpu.sock'}")


def test_without_a_daemon_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No daemon is status 1, and a line that says how to get one."""
    assert mgctl.main(["get", "pods", "--run-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"mgctl: no daemon answers on {tmp_path / 'metagpu.sock'} (No such file or directory); "
        "start `metagpu run`, or name its directory with --run-dir\n"
    )


@pytest.mark.parametrize("arguments", [[], ["get"], ["get", "cakes"], ["get", "pods", "-o", "xml"]])
def test_what_is_not_understood_is_misuse(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What it does not know ends with status 2 and a line that says where to read on."""
    with pytest.raises(SystemExit) as end:
        mgctl.main(arguments)

    assert end.value.code == 2
    [told] = capsys.readouterr().err.splitlines()
    assert told.startswith("mgctl")
    assert "--help`" in told


async def test_a_reader_who_goes_ends_it_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piped into `head`, it ends with status 1 and without a traceback."""
    written = tmp_path / "out"
    with written.open("w") as out:

        def broken(*_: object, **__: object) -> None:
            raise BrokenPipeError

        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(mgctl, "_say", broken)
        assert await said(tmp_path, "get", "pods") == 1


def test_an_empty_node_is_drawn() -> None:
    """Without GPUs, pods and processes there are tables with nothing in them."""
    empty = {"node": "n", "at": 0.0, **usage_report(Snapshot(), Findings(), RULES)}
    for kind in KINDS:
        assert len(written(empty, kind, "table", PLAIN).splitlines()) >= 2
    assert "POD (CONTAINER)" in Top().screen(empty, PLAIN)


# --- doctor ---------------------------------------------------------------------------------------


def examined(folder: Path, *more: str) -> int:
    """Examine a node that has nothing."""
    places = ("root", "run-dir", "kubelet-dir", "pod-resources")
    return mgctl.main(["doctor", *(f"--{place}={folder}" for place in places), *more])


def test_the_doctor_names_code_verdict_and_mend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each check, its mend below it; what is bad is status 1."""
    assert examined(tmp_path) == 1

    out = capsys.readouterr().out
    assert "MG201  bad   NVIDIA's kernel module is not loaded\n             install the" in out
    assert "MG303  good  no other plugin for GPUs\n" in out
    assert (
        f"MG401  bad   the daemon does not answer\n             no daemon answers on {tmp_path}"
        in out
    )


def test_the_doctor_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For programs: the same, as a list."""
    assert examined(tmp_path, "-o", "json") == 1

    told = json.loads(capsys.readouterr().out)
    assert [each["code"] for each in told] == list(CHECKS)
    assert told[0].keys() == {"code", "verdict", "finding", "mend"}


@pytest.mark.parametrize(
    "command", [*(f"get {kind}" for kind in KINDS), "get", "top", "doctor", "version"]
)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command's help ends with an example that begins with the command."""
    with pytest.raises(SystemExit) as end:
        mgctl.main([*command.split(), "--help"])

    assert end.value.code == 0
    assert f"example:\n  mgctl {command}" in capsys.readouterr().out
