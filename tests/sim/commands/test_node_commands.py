"""The commands of `metagpu sim`."""

import argparse

import msgspec
import pytest

from metagpu.core.config.errors import ConfigError
from metagpu.core.contracts.driver import RecoveryAction
from metagpu.core.model.gpu import MIB
from metagpu.sim.commands.arguments import add_arguments, command_from
from metagpu.sim.commands.cluster_commands import ClusterCommand
from metagpu.sim.commands.node_commands import AnySimCommand, SimReply, apply_command
from metagpu.sim.commands.view import view_node
from metagpu.sim.machine.gpu import SimError
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node


def command(line: str) -> AnySimCommand:
    """Return the command of a line as argparse reads it."""
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_subparsers(required=True))
    read = command_from(parser.parse_args(line.split()))
    assert not isinstance(read, ClusterCommand)
    return read


def done(node: SimNode, line: str) -> SimReply:
    """Apply the command of a line after a round trip through JSON."""
    sent = msgspec.json.encode(command(line))
    return apply_command(node, msgspec.json.decode(sent, type=AnySimCommand))


@pytest.mark.parametrize(
    "line",
    [
        *("xid 0 79", "xid 0 13 --gi 7 --ci 0", "lose 0", "recovery-action 0 gpu-reset", "reset 0"),
        *(
            "process start 0 4242 --memory 8Gi",
            "process start 0 4242",
            "ecc 0 --double-bit",
            "ecc 0 --count 3",
        ),
        *("hang 0 10s", "add-gpu a100-40gb", "driver unload", "driver load", "show", "show --json"),
        *(
            "mig on 0",
            "provisioning 0 --duration 2s --failures 1",
            "provisioning 0 --in-use 5s",
            "reboot",
        ),
    ],
)
def test_a_command_is_applied_and_answered(line: str) -> None:
    """Every command goes over JSON, changes the node, and returns a line and a node."""
    reply = done(build_node("a100-40gb:2"), line)

    assert reply.message
    assert "\n" not in reply.message
    assert msgspec.json.decode(msgspec.json.encode(reply), type=SimReply) == reply


def test_faults_are_seen_in_the_node() -> None:
    """The description of the node shows every change of its GPUs."""
    node = build_node("a100-40gb:4")
    for line in (
        "xid 0 79",
        "recovery-action 1 drain-and-reset",
        "hang 2 10m",
        "ecc 3 --double-bit",
    ):
        done(node, line)
    view = done(node, "process start 3 4242 --memory 8Gi --gi 1 --ci 0").node

    assert [gpu.state for gpu in view.gpus] == ["lost", "ok", "hung", "ok"]
    assert view.gpus[1].recovery_action == str(RecoveryAction.DRAIN_AND_RESET)
    assert view.gpus[3].ecc_uncorrected == 1
    assert view.gpus[3].used == 8192 * MIB
    assert [(p.pid, p.gi, p.ci) for p in view.gpus[3].processes] == [(4242, 1, 0)]


def test_everything_can_be_undone() -> None:
    """A reset GPU, an ended process and a reloaded driver are as before."""
    node = build_node("a100-40gb:1")
    before = view_node(node)
    for line in (
        *("xid 0 79", "reset 0", "process start 0 1 --memory 1Gi", "process end 0 1"),
        *("driver unload", "driver load", "hang 0 1h", "reset 0"),
    ):
        done(node, line)

    assert view_node(node) == before


def test_a_gpu_is_named_by_uuid_too() -> None:
    """Commands accept a GPU's uuid."""
    node = build_node("a100-40gb:2")
    view = done(node, f"lose {node.gpu(1).id}").node

    assert [gpu.state for gpu in view.gpus] == ["ok", "lost"]


def test_the_driver_is_away_and_back() -> None:
    """The description shows whether the driver is loaded."""
    node = build_node("a100-40gb:1")

    assert not done(node, "driver unload").node.driver_loaded
    assert done(node, "driver load").node.driver_loaded


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("xid 9 79", SimError, "no GPU 9 here: this node has 0-7"),
        ("process end 0 1", SimError, "no process 1"),
        ("process start 0 1 --memory 99Gi", SimError, "MiB left"),
        ("recovery-action 0 reset", ConfigError, "allowed: none, gpu-reset"),
        ("add-gpu a100", ConfigError, r"did you mean a100-40gb\?"),
        ("xid 0 0", SimError, "the XID is 0; allowed: 1 to 9999"),
        ("xid 0 99999999999999", SimError, "the XID is 99999999999999; allowed: 1 to 9999"),
        ("process start 0 0 --memory 1Gi", SimError, "the pid is 0; allowed: 1 to 4194304"),
        ("process start 0 1 --memory 1Gi --load 101", SimError, "--load is 101; allowed: 0 to 100"),
        ("provisioning 0 --failures -1", SimError, "--failures is -1; allowed: 0 to 1000000"),
        ("provisioning 0 --compute-failures -1", SimError, "--compute-failures is -1; allowed: 0"),
        ("xid 0 13 --gi -1", SimError, "--gi is -1; allowed: 0 to 4294967294"),
        ("process start 0 1 --gi 0 --ci -1", SimError, "--ci is -1; allowed: 0 to 4294967294"),
        ("hang 0 1001h", SimError, "3.6036e\\+06 s is too long; allowed: 1000h at most"),
        ("provisioning 0 --in-use 1001h", SimError, "too long; allowed: 1000h at most"),
        ("ecc 0 --count 0", SimError, "--count is 0; allowed: 1 to 4294967295"),
        ("hang 0 long", ConfigError, "not a duration"),
        ("process start 0 1 --memory lots", ConfigError, "not an amount of memory"),
    ],
)
def test_what_cannot_be_done_says_why(line: str, error: type[Exception], message: str) -> None:
    """Error messages name the existing objects or the allowed values."""
    with pytest.raises(error, match=message) as caught:
        done(build_node("a100-40gb:8"), line)
    assert "GPU GPU-" not in str(caught.value)


def test_one_error_is_an_error() -> None:
    """A number of memory errors has its plural, and one has none."""
    node = build_node("a100-40gb:1")

    assert done(node, "ecc 0").message == "1 corrected memory error on GPU 0"
    assert done(node, "ecc 0 --count 3").message == "3 corrected memory errors on GPU 0"


def test_the_answer_says_whether_an_instance_exists() -> None:
    """The answer says whether the MIG instance exists; the driver may name any number."""
    node = build_node("h100-80gb:1")
    done(node, "mig on 0")
    made = done(node, "instance create 0 2g.20gb@4").message

    assert made == "GPU instance 5 on GPU 0 is 2g.20gb@4"
    assert done(node, "xid 0 13 --gi 5 --ci 0").message == "XID 13 on GPU 0, in GPU instance 5"
    assert done(node, "process start 0 7 --gi 6").message == (
        "process 7 runs on GPU 0, in GPU instance 6, which does not exist"
    )
