"""The commands of `metagpu sim`."""

import argparse

import msgspec
import pytest

from metagpu.core.driver import RecoveryAction
from metagpu.core.errors import ConfigError
from metagpu.core.gpu import MIB
from metagpu.sim import steer
from metagpu.sim.arguments import add_arguments, command_from
from metagpu.sim.gpu import SimError
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated
from metagpu.sim.view import describe


def command(line: str) -> steer.AnyCommand:
    """Give the command of a line as argparse reads it."""
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_subparsers(required=True))
    return command_from(parser.parse_args(line.split()))


def done(node: SimNode, line: str) -> steer.Reply:
    """Do what a line says, on its way over a wire."""
    sent = msgspec.json.encode(command(line))
    return steer.steer(node, msgspec.json.decode(sent, type=steer.AnyCommand))


@pytest.mark.parametrize(
    "line",
    [
        *("xid 0 79", "xid 0 13 --gi 7 --ci 0", "lose 0", "need 0 gpu-reset", "recover 0"),
        *("process add 0 4242 8Gi", "process add 0 4242", "ecc 0 --double-bit", "ecc 0 --count 3"),
        *("hang 0 10s", "add a100-40gb", "driver fail", "driver restore", "node", "node --json"),
        *("mig on 0", "making 0 --takes 2s --failures 1", "making 0 --in-use 5s", "reboot"),
    ],
)
def test_a_line_is_done_and_answered(line: str) -> None:
    """Every command goes over JSON, does something, and is answered in a line and a node."""
    reply = done(simulated("a100-40gb:2"), line)

    assert reply.message
    assert "\n" not in reply.message
    assert msgspec.json.decode(msgspec.json.encode(reply), type=steer.Reply) == reply


def test_faults_are_seen_in_the_node() -> None:
    """What was done to GPUs is what describing the node shows."""
    node = simulated("a100-40gb:4")
    for line in ("xid 0 79", "need 1 drain-and-reset", "hang 2 10m", "ecc 3 --double-bit"):
        done(node, line)
    view = done(node, "process add 3 4242 8Gi --gi 1 --ci 0").node

    assert [gpu.state for gpu in view.gpus] == ["lost", "ok", "hung", "ok"]
    assert view.gpus[1].recovery_action == str(RecoveryAction.DRAIN_AND_RESET)
    assert view.gpus[3].ecc_uncorrected == 1
    assert view.gpus[3].used == 8192 * MIB
    assert [(p.pid, p.gi, p.ci) for p in view.gpus[3].processes] == [(4242, 1, 0)]


def test_everything_can_be_undone() -> None:
    """A recovered GPU, an ended process and a restored driver are as before."""
    node = simulated("a100-40gb:1")
    before = describe(node)
    for line in (
        *("xid 0 79", "recover 0", "process add 0 1 1Gi", "process end 0 1"),
        *("driver fail", "driver restore", "hang 0 1h", "recover 0"),
    ):
        done(node, line)

    assert describe(node) == before


def test_a_gpu_is_named_by_uuid_too() -> None:
    """Programs name GPUs by uuid."""
    node = simulated("a100-40gb:2")
    view = done(node, f"lose {node.gpu(1).id}").node

    assert [gpu.state for gpu in view.gpus] == ["ok", "lost"]


def test_the_driver_is_away_and_back() -> None:
    """The view tells whether the driver is there."""
    node = simulated("a100-40gb:1")

    assert not done(node, "driver fail").node.driver_loaded
    assert done(node, "driver restore").node.driver_loaded


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("xid 9 79", SimError, "no GPU 9 here: this node has 0-7"),
        ("process end 0 1", SimError, "no process 1"),
        ("process add 0 1 99Gi", SimError, "MiB left"),
        ("need 0 reset", ConfigError, "allowed: none, gpu-reset"),
        ("add a100", ConfigError, r"did you mean a100-40gb\?"),
        ("xid 0 0", SimError, "the XID is 0; allowed: 1 to 9999"),
        ("xid 0 99999999999999", SimError, "the XID is 99999999999999; allowed: 1 to 9999"),
        ("process add 0 0 1Gi", SimError, "the pid is 0; allowed: 1 to 4194304"),
        ("process add 0 1 1Gi --sm 101", SimError, "--sm is 101; allowed: 0 to 100"),
        ("making 0 --failures -1", SimError, "--failures is -1; allowed: 0 to 1000000"),
        ("making 0 --compute-failures -1", SimError, "--compute-failures is -1; allowed: 0"),
        ("xid 0 13 --gi -1", SimError, "--gi is -1; allowed: 0 to 4294967294"),
        ("process add 0 1 --gi 0 --ci -1", SimError, "--ci is -1; allowed: 0 to 4294967294"),
        ("hang 0 1001h", SimError, "3.6036e\\+06 s is too long; allowed: 1000h at most"),
        ("making 0 --in-use 1001h", SimError, "too long; allowed: 1000h at most"),
        ("ecc 0 --count 0", SimError, "--count is 0; allowed: 1 to 4294967295"),
        ("hang 0 long", ConfigError, "no duration"),
        ("process add 0 1 lots", ConfigError, "no amount of memory"),
    ],
)
def test_what_cannot_be_done_says_why(line: str, error: type[Exception], message: str) -> None:
    """Errors say what there is, or what is allowed."""
    with pytest.raises(error, match=message):
        done(simulated("a100-40gb:8"), line)


def test_an_instance_is_told_and_whether_it_is_there() -> None:
    """Who mistakes the number of a MIG instance reads so; the driver may name any."""
    node = simulated("h100-80gb:1")
    done(node, "mig on 0")
    made = done(node, "instance make 0 2g.20gb@4").message

    assert made == "GPU instance 5 is 2g.20gb@4 on GPU 0"
    assert done(node, "xid 0 13 --gi 5 --ci 0").message == "XID 13 on GPU 0, in its GPU instance 5"
    assert done(node, "process add 0 7 --gi 6").message == (
        "process 7 is on GPU 0, in its GPU instance 6, which it does not have"
    )
