"""Errors of the command line, and of output that cannot be written."""

import argparse
import errno
import gc
import io
import os
import subprocess
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from metagpu.__main__ import main as program
from metagpu.cli import arguments, mgctl
from metagpu.cli.metagpu import main
from metagpu.cli.parser import completions, run_command
from metagpu.kubectl import program as kubectl_program
from metagpu.kubectl.commands import COMMANDS
from metagpu.kubectl.program import complete


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "explan",
            "metagpu: unknown command 'explan'. Did you mean 'explain'? See `metagpu --help`",
        ),
        (
            "run --kubelet-dri=/x --json",
            (
                "metagpu run: unknown arguments: --kubelet-dri=/x --json; did you mean "
                "--kubelet-dir? See `metagpu run --help`"
            ),
        ),
        (
            "run --log-level loud",
            (
                "metagpu run: --log-level: 'loud' is unknown; allowed: debug, info, "
                "warning, error; see `metagpu run --help`"
            ),
        ),
        (
            "sim xid 0",
            (
                "metagpu sim xid: the following arguments are required: XID; see "
                "`metagpu sim xid --help`"
            ),
        ),
    ],
)
def test_a_mistake_is_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line ends with status 2, and one line has the correct form."""
    with pytest.raises(SystemExit) as end:
        main(line.split())

    assert end.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"


def test_a_program_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments each program prints its commands, as kubectl does."""
    for run in (main, mgctl.main, kubectl_program.main):
        with pytest.raises(SystemExit) as end:
            run([])
        shown = capsys.readouterr()
        assert (end.value.code, shown.err) == (0, "")
        assert "\ncommands:\n" in shown.out


def test_a_command_without_its_object_names_the_objects(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a command that needs another word, the line has the words."""
    with pytest.raises(SystemExit):
        mgctl.main(["get"])
    assert "required: OBJECT, one of devices, processes, pods; see" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["get nodes --timeout 5", "web --interval 2", "drain-gpu gpu-1/0 --timeout 300"]
)
def test_a_time_has_a_unit(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A number that could be seconds or milliseconds is refused, as by kubectl."""
    with pytest.raises(SystemExit):
        kubectl_program.main(line.split())
    number = line.rpartition(" ")[2]
    assert f"'{number}' has no unit; write one like {number}s; see" in capsys.readouterr().err


def run_explain(output: int) -> subprocess.CompletedProcess[bytes]:
    """Run `metagpu explain --json` as a program that writes to a file descriptor."""
    code = "import sys; from metagpu.cli.metagpu import main; sys.exit(main())"
    return subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", code, "explain", "--simulate", "a100-40gb:8", "--json"],
        stdout=output,
        stderr=subprocess.PIPE,
        check=False,
    )


def test_a_closed_pipe_is_no_error() -> None:
    """`| head` gets its lines, and no broken pipe is reported."""
    read, write = os.pipe()
    os.close(read)
    done = run_explain(write)
    os.close(write)

    assert (done.returncode, done.stderr) == (1, b"")


def test_a_full_disk_is_one_line() -> None:
    """Output that cannot be written is one line with the reason, and no traceback."""
    with Path("/dev/full").open("wb") as full:
        done = run_explain(full.fileno())

    assert done.returncode == 1
    assert done.stderr == b"metagpu: cannot write: No space left on device\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_an_output_without_unicode_has_question_marks(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """A table in a pipe or terminal of another encoding than UTF-8 is no crash."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))

    def command() -> int:
        sys.stdout.write("─ 40 GiB █")
        return 0

    assert run_command("metagpu", argparse.Namespace(), command) == 0
    assert written.getvalue() == b"? 40 GiB ?"


def test_an_interrupt_before_the_command_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while modules are loaded prints no traceback."""

    class Impatient(MetaPathFinder):
        def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
            if fullname == "metagpu.cli.metagpu":
                raise KeyboardInterrupt
            return None

    monkeypatch.setattr(sys, "meta_path", [Impatient(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "metagpu.cli.metagpu")

    monkeypatch.setattr(gc, "disable", lambda: None)

    assert program() == 130


def test_a_file_that_cannot_be_used_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """An error about a file needs no traceback; about rights the line says what helps."""

    def command() -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/run/metagpu")

    assert run_command("metagpu", argparse.Namespace(), command) == 1
    denied = "metagpu: /run/metagpu: Permission denied; run it as root\n"
    assert capsys.readouterr().err == denied


def test_other_failures_are_not_hidden() -> None:
    """An internal error keeps its traceback."""

    def command() -> int:
        raise IsADirectoryError(errno.EISDIR, "Is a directory")

    with pytest.raises(IsADirectoryError):
        run_command("metagpu", argparse.Namespace(), command)


PARSERS = {
    "metagpu": arguments.parser,
    "mgctl": mgctl.parser,
    "kubectl-metagpu": kubectl_program.parser,
}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("metagpu st", {"status"}),
        ("metagpu run --metr", {"--metrics"}),
        ("metagpu run --log-level war", {"warning"}),
        ("metagpu run --config ", set()),
        ("metagpu sim x", {"xid"}),
        ("mgctl get pro", {"process", "processes"}),
        ("mgctl get pods -o js", {"json"}),
        ("kubectl-metagpu top g", {"gpu", "gpus"}),
        ("kubectl-metagpu get pods --all", {"--all-namespaces"}),
        ("kubectl-metagpu nowhere ", set(COMMANDS)),
        ("kubectl-metagpu drain-gpu --f", {"--force"}),
        ("kubectl-metagpu web --no", {"--no-open"}),
        ("metagpu completion f", {"fish"}),
        ("metagpu cordon 0 ", set()),
    ],
)
def test_what_completes_a_line(line: str, expected: set[str]) -> None:
    """Commands, options and their values complete the last word."""
    program, *words = line.split(" ")
    assert set(completions(PARSERS[program](), words)) == expected


def test_bash_completes_by_the_program_itself(tmp_path: Path) -> None:
    """A real bash that has read `mgctl completion bash` completes a line of mgctl."""
    program = tmp_path / "mgctl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m metagpu.cli.mgctl "$@"\n')
    program.chmod(0o755)
    script = f"""
        PATH={tmp_path}:$PATH
        source <(mgctl completion bash)
        export COMP_LINE='mgctl get dev' COMP_POINT=13
        $(complete -p mgctl | sed "s/.* -C '*\\([^' ]*\\).*/\\1/") mgctl dev get
    """
    done = subprocess.run(  # noqa: S603 - our own program
        ["/bin/bash", "-c", script], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.split() == ["device", "devices"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_ask_the_program_too(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script for zsh and fish names the program that completes the line."""
    for run, name in (
        (main, "metagpu"),
        (mgctl.main, "mgctl"),
        (kubectl_program.main, "kubectl-metagpu"),
    ):
        assert run(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert f"complete -o default -C {name} {name}\n" in script or (
            f"(env COMP_LINE=(commandline --cut-at-cursor) {name})" in script
        )


PROFILES = "version: metagpu/v1\npools: [{name: a, gpus: all, backends: []}]\n"
LAYOUTS = """\
version: v1
mig-configs:
  all-disabled: [{devices: all, mig-enabled: false}]
  halves: [{devices: all, mig-enabled: true, mig-devices: {3g.20gb: 2}}]
"""


def test_a_file_completes_its_profiles_and_layouts(tmp_path: Path) -> None:
    """The choices of a configuration are those of the files that the line names."""
    folder, layouts = tmp_path / "profiles", tmp_path / "layouts.yaml"
    folder.mkdir()
    (folder / "a100").write_text(PROFILES)
    (folder / "t4").write_text(PROFILES)
    layouts.write_text(LAYOUTS)
    of_run = ["run", "--config", str(folder), "--profile", ""]
    assert completions(arguments.parser(), of_run) == ["a100", "t4"]
    of_validate = ["validate", str(layouts), f"--node-name={NAME}", "--mig-config", ""]
    assert completions(arguments.parser(), of_validate) == ["all-disabled", "halves"]
    of_plan = ["plan", f"--config={layouts}", "--mig-config", "h"]
    assert completions(arguments.parser(), of_plan) == ["halves"]


NAME = "gpu-1"


def test_what_cannot_be_asked_completes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without a daemon, file or cluster a Tab prints nothing, and no error."""
    for parser, line in (
        (arguments.parser, f"cordon --run-dir {tmp_path} "),
        (arguments.parser, f"run --config {tmp_path}/absent --profile "),
        (mgctl.parser, f"get pods --run-dir {tmp_path} -n "),
        (kubectl_program.parser, f"why --kubeconfig {tmp_path}/absent "),
    ):
        assert completions(parser(), line.split(" ")) == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("why --name", ["--namespace", ":4"]),
        ("why ", [":4"]),
        ("fit -f ", [":0"]),
        ("get gpus --kubeconfig ", [":0"]),
        ("get gpus -l ", [":4"]),
        ("web --open ", [":4"]),
    ],
)
def test_kubectl_completes_by_its_plugin(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    printed: list[str],
) -> None:
    """Words are the arguments that kubectl gives; it reads whether files complete them."""
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-metagpu", *line.split(" ")])
    assert complete() == 0
    assert capsys.readouterr().out.split() == printed
