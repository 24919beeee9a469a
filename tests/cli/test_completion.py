"""Completion of command lines, by the parsers of all programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from metagpu.cli import arguments, mgctl
from metagpu.cli.completion import completions
from metagpu.kubectl import arguments as kubectl_arguments
from metagpu.kubectl.commands import COMMANDS
from metagpu.kubectl.program import complete

PARSERS = {
    "metagpu": arguments.parser,
    "mgctl": mgctl.parser,
    "kubectl-metagpu": kubectl_arguments.parser,
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
    ],
)
def test_what_completes_a_line(line: str, expected: set[str]) -> None:
    """Commands, options and their values complete the last word."""
    program, *words = line.split(" ")
    assert set(completions(PARSERS[program](), words)) == expected


def test_bash_completes_by_the_program_itself(tmp_path: Path) -> None:
    """`complete -C` of a real bash prints the completions of the line."""
    program = tmp_path / "mgctl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m metagpu.cli.mgctl "$@"\n')
    program.chmod(0o755)
    script = f"""
        PATH={tmp_path}:$PATH
        export COMP_LINE='mgctl get dev' COMP_POINT=13
        mgctl mgctl dev get
    """
    done = subprocess.run(  # noqa: S603 - our own program
        ["/bin/bash", "-c", script], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.split() == ["device", "devices"]


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
