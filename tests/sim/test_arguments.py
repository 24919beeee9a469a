"""The commands of `metagpu sim` as people write them."""

from typing import get_args

import pytest

from metagpu.sim.spec import simulated
from metagpu.sim.steer import AnyCommand
from tests.sim.test_steer import command, done

NAMES = [str(kind.__struct_config__.tag) for kind in get_args(AnyCommand)]


@pytest.mark.parametrize("name", NAMES)
def test_help_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's help ends with a line to copy, which the command understands."""
    with pytest.raises(SystemExit):
        command(f"{name} --help")

    _, _, line = capsys.readouterr().out.partition("example: metagpu sim ")
    assert command(line).__struct_config__.tag == name


def test_times_and_amounts_are_read() -> None:
    """What people write with a unit arrives in bytes and seconds."""
    node = simulated("a100-40gb:1")
    done(node, "process add 0 1 8Gi")
    done(node, "making 0 --takes 2s")

    assert node.gpu(0).used == 8 * 2**30
    assert node.gpu(0).mig.making.takes == 2
