"""What is told of a command line that is not understood, and of output that nobody can read."""

import errno
import gc
import os
import subprocess
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from metagpu.__main__ import main as program
from metagpu.cli import main
from metagpu.command_line import finished

ALL = "run, demo, explain, validate, plan, status, acknowledge, cordon, uncordon, sim"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "metagpu: the following arguments are required: COMMAND; see `metagpu --help`"),
        (
            "explan",
            (
                f"metagpu: COMMAND: 'explan' is not known here; allowed: {ALL}; did you mean "
                "explain? See `metagpu --help`"
            ),
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
                "metagpu run: --log-level: 'loud' is not known here; allowed: debug, info, "
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
def test_a_mistake_is_one_line(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that is not understood ends with 2, and one line says what would be."""
    with pytest.raises(SystemExit) as end:
        main(line.split())

    assert end.value.code == 2
    assert capsys.readouterr().err == f"{told}\n"


def explained(output: int) -> subprocess.CompletedProcess[bytes]:
    """Run `metagpu explain --json` as a program that writes to a file descriptor."""
    code = "import sys; from metagpu.cli import main; sys.exit(main())"
    return subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", code, "explain", "--simulate", "a100-40gb:8", "--json"],
        stdout=output,
        stderr=subprocess.PIPE,
        check=False,
    )


def test_a_reader_who_goes_is_no_failure_to_tell() -> None:
    """`| head` gets its lines, and nobody reads of a broken pipe."""
    read, write = os.pipe()
    os.close(read)
    done = explained(write)
    os.close(write)

    assert (done.returncode, done.stderr) == (1, b"")


def test_a_full_disk_is_one_line() -> None:
    """What cannot be written is told with the reason, and never as a traceback."""
    with Path("/dev/full").open("wb") as full:
        done = explained(full.fileno())

    assert done.returncode == 1
    assert done.stderr == b"metagpu: cannot write: No space left on device\n"


def test_an_interrupt_before_the_command_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who presses Ctrl-C while modules are loaded reads no traceback either."""

    class Impatient(MetaPathFinder):
        def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
            if fullname == "metagpu.cli":
                raise KeyboardInterrupt
            return None

    monkeypatch.setattr(sys, "meta_path", [Impatient(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "metagpu.cli")

    monkeypatch.setattr(gc, "disable", lambda: None)

    assert program() == 130


def test_other_failures_are_not_hidden() -> None:
    """An error that no output has is a fault of ours, and keeps its traceback."""

    def command() -> int:
        raise IsADirectoryError(errno.EISDIR, "Is a directory")

    with pytest.raises(IsADirectoryError):
        finished("metagpu", command)
