"""The commands of `metagpu sim` about a cluster, as users write them."""

import argparse
from pathlib import Path

import msgspec
import pytest

from metagpu.core.config.errors import ConfigError
from metagpu.core.errors import MetagpuError
from metagpu.sim.cluster.claim_manifest import ClaimManifest
from metagpu.sim.cluster.pod_manifest import PodManifest
from metagpu.sim.commands.arguments import add_arguments, command_from
from metagpu.sim.commands.cluster_commands import (
    AnyClusterCommand,
    ApplyCommand,
    BurstCommand,
    ClaimAddCommand,
    DeleteCommand,
    NodeLabelCommand,
    PodAddCommand,
    ProcessEndCommand,
    ProcessStartCommand,
)
from metagpu.sim.commands.node_commands import ProcessCommand
from metagpu.sim.commands.remote import command_handler
from metagpu.sim.machine.spec import build_node

COMMANDS = (
    *("apply", "delete"),
    *("pod add", "pod end", "pod list", "burst", "kubelet", "node label", "node show"),
    *("claim add", "claim end", "claim list"),
    *("event list", "config-map", "plugin"),
    *("process start", "process end", "process list"),
)


def command(line: str) -> AnyClusterCommand | ProcessCommand:
    """Return the command of a line as argparse reads it."""
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_subparsers(required=True))
    read: AnyClusterCommand | ProcessCommand = command_from(parser.parse_args(line.split()))  # type: ignore[assignment]
    return read


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command's help ends with an example line that the command accepts, also over JSON."""
    monkeypatch.chdir(tmp_path)
    for file in ("large.yaml", "small.yaml", "demo.yaml"):
        (tmp_path / file).write_text("{kind: Namespace, metadata: {name: a}}")
    with pytest.raises(SystemExit):
        command(f"{name} --help")

    _, _, line = capsys.readouterr().out.partition("example: metagpu sim ")
    read = command(line)
    assert line.startswith(name)
    assert msgspec.json.decode(msgspec.json.encode(read), type=AnyClusterCommand) == read


def test_a_pod_is_read() -> None:
    """A pod has its resources, namespace, annotations and time."""
    line = "pod add a x.y/z=2 x.y/w=3 --namespace team --annotation k=v=w --for 2m"

    assert command(line) == PodAddCommand(
        PodManifest("a", {"x.y/z": 2, "x.y/w": 3}, "team", {"k": "v=w"}, 120.0)
    )


def test_a_process_is_read() -> None:
    """A process is in a pod, with an amount of memory and a load, or on a GPU by its PID."""
    line = "process start 1 --pod a --container b --memory 3Gi --load 40% -n team"
    assert command(line) == ProcessStartCommand("a", "team", "b", "1", 3 * 2**30, 40)
    assert command("process end --pod a") == ProcessEndCommand("a")
    line = "process start 0 7 --memory 1Gi --gi 1 --ci 0 --load 5"
    assert command(line) == ProcessCommand("start", "0", 7, 2**30, 1, 0, 5)
    assert command("process end 0 7") == ProcessCommand("end", "0", 7)
    for wrong, problem in (
        ("process start", "name a pod by --pod, or a GPU and a PID"),
        ("process end 0", "name a pod by --pod, or a GPU and a PID"),
        ("process start 0 7 --pod a", "leave out PID, or --pod"),
        ("process start --pod a --gi 1", "leave out --gi and --ci"),
        ("process start --pod a --memory lots", "'lots' is not an amount of memory"),
    ):
        with pytest.raises(ConfigError, match=problem):
            command(wrong)


def test_a_claim_is_read(tmp_path: Path) -> None:
    """A claim has its class, amounts, number and selectors; or a file has the objects."""
    line = "claim add a --class b.c --capacity shares=5 --count 2 --cel true -n team"
    assert command(line) == ClaimAddCommand(
        ClaimManifest("a", "b.c", 2, {"shares": "5"}, ("true",), "team")
    )
    file = tmp_path / "claim.yaml"
    kind, metadata = "Namespace", {"name": "a"}
    file.write_text("kind: Namespace\nmetadata: {name: a}\n---\n")
    documents = ({"kind": kind, "metadata": metadata},)
    assert command(f"claim add -f {file}") == command(f"apply -f {file}")
    assert command(f"apply -f {file} -n b") == ApplyCommand(documents, "b")
    assert command(f"delete -f {file}") == DeleteCommand(documents)


def test_labels_are_set_and_removed() -> None:
    """`KEY=VALUE` sets a label, `KEY-` removes it, and a value may be empty."""
    assert command("node label a/b=c d- e=") == NodeLabelCommand({"a/b": "c", "d": None, "e": ""})


def test_sizes_replace_the_number() -> None:
    """A burst has pods of one size, or of sizes in a range."""
    assert command("burst 3 x.y/z=5") == BurstCommand(3, "x.y/z", (5, 5))
    assert command("burst 3 x.y/z=5 --sizes 1..9 --seed 4") == BurstCommand(
        3, "x.y/z", (1, 9), seed=4
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("pod add a x.y/z", "'x.y/z' is not a request; write RESOURCE=N"),
        ("pod add a x.y/z=-1", "'x.y/z=-1' is not a request"),
        ("pod add a x.y/z=1 --annotation k", "'k' is not an annotation; write KEY=VALUE"),
        ("claim add a", "a claim needs a DeviceClass; add --class"),
        ("claim add a --class b --capacity shares", "'shares' is not an amount; write NAME=AMOUNT"),
        ("claim add", "give either a name with --class, or a file with -f"),
        ("claim add a -f x.yaml", "give either a name with --class, or a file with -f"),
        ("claim add -f missing.yaml", "missing.yaml: cannot be read"),
        ("pod add a x.y/z=1 --for soon", "'soon' is not a duration"),
        ("node label k", "'k' is not a label; write KEY=VALUE, or KEY- to remove it"),
        ("burst 3 x.y/z=1 --sizes 5", "'5' is not a range of sizes; write one like 10..150"),
        ("config-map metagpu a.yaml", "'metagpu' names no ConfigMap; write NAMESPACE/NAME"),
        ("config-map a/b missing.yaml", "cannot read missing.yaml: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line(line: str, problem: str) -> None:
    """A mistake is an error of one line that shows the right form."""
    with pytest.raises(ConfigError) as error:
        command(line)

    assert problem in str(error.value)
    assert "\n" not in str(error.value)


async def test_a_node_without_a_cluster_says_so() -> None:
    """Without `--with-kubelet`, a command about pods is refused with the option to give."""
    handle = command_handler(build_node("t4:1"))

    with pytest.raises(MetagpuError, match="--with-kubelet"):
        await handle({"change": {"do": "pod-list"}})
