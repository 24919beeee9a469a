"""The commands of `metagpu sim` as users write them."""

from pathlib import Path
from typing import get_args

import pytest

from metagpu.cli.arguments import parser
from metagpu.sim.commands.node_commands import AnySimCommand, ProcessCommand
from metagpu.sim.machine.spec import build_node
from tests.sim.commands.test_node_commands import command, done

NAMES = [
    str(kind.__struct_config__.tag)
    for kind in get_args(AnySimCommand)
    if kind is not ProcessCommand
]


@pytest.mark.parametrize("name", NAMES)
def test_help_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's help ends with an example line that the command accepts."""
    with pytest.raises(SystemExit):
        command(f"{name} --help")

    _, _, line = capsys.readouterr().out.partition("example: metagpu sim ")
    assert command(line).__struct_config__.tag == name


def test_the_run_folder_may_come_last() -> None:
    """`--run-dir` is accepted behind `sim` and at the end; the last one counts."""
    after_sim, at_the_end = ["--run-dir", "/a"], ["--run-dir", "/b"]
    parse = parser().parse_args

    assert parse(["sim", "xid", "0", "79", *at_the_end]).run_dir == Path("/b")
    assert parse(["sim", *after_sim, "xid", "0", "79"]).run_dir == Path("/a")
    assert parse(["sim", *after_sim, "xid", "0", "79", *at_the_end]).run_dir == Path("/b")


def test_times_and_amounts_are_read() -> None:
    """Values with units are converted to bytes and seconds."""
    node = build_node("a100-40gb:1")
    done(node, "process start 0 1 --memory 8Gi")
    done(node, "provisioning 0 --duration 2s")

    assert node.gpu(0).used == 8 * 2**30
    assert node.gpu(0).mig.provisioning.duration == 2
