"""State of a simulated driver that outlives the daemon."""

from pathlib import Path

import msgspec
import pytest

from metagpu.core.config.errors import ConfigError
from metagpu.sim.commands.view import view_node
from metagpu.sim.machine.mig_driver import SavedNode
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from tests.sim.commands.test_node_commands import done


def started(folder: Path, gpus: str = "{model: a100-40gb, count: 2, mig: true}") -> SimNode:
    """Start a daemon's node whose driver keeps its state in a file of the folder."""
    (folder / "node.yaml").write_text(f"gpus: [{gpus}]\nstateFile: {folder / 'driver.json'}\n")
    return build_node(str(folder / "node.yaml"))


def test_instances_outlive_the_daemon_with_their_uuids(tmp_path: Path) -> None:
    """A second node on the file finds modes, instances and uuids, and creates new ones."""
    before = started(tmp_path)
    for line in (
        "create 0 2g.10gb@4",
        "create 1 7g.40gb@0",
        "create 0 1g.5gb@0",
        "destroy 0 1g.5gb@0",
    ):
        done(before, f"instance {line}")
    done(before, "mig on 0")

    after = started(tmp_path)
    assert view_node(after) == view_node(before)
    done(after, "instance create 0 1g.5gb@0")
    uuids = [
        uuid
        for gpu in view_node(after).gpus
        for instance in gpu.instances
        for uuid in instance.uuids
    ]
    assert len(set(uuids)) == 3


def test_half_an_instance_is_kept_too(tmp_path: Path) -> None:
    """A daemon that ends between the two halves leaves a GPU instance without a MIG device."""
    node = started(tmp_path)
    done(node, "provisioning 0 --compute-failures 1")
    with pytest.raises(Exception, match="Unknown Error"):
        done(node, "instance create 0 2g.10gb@4")

    [instance] = view_node(started(tmp_path)).gpus[0].instances
    assert (instance.placement, instance.uuids) == ("2g.10gb@4", ())


def test_a_reboot_is_kept(tmp_path: Path) -> None:
    """The state after a reboot is in the file for the next daemon too."""
    node = started(tmp_path)
    done(node, "instance create 0 2g.10gb@4")
    done(node, "reboot")

    assert [gpu.instances for gpu in view_node(started(tmp_path)).gpus] == [(), ()]


def test_what_the_file_does_not_know_is_as_the_node_file_says(tmp_path: Path) -> None:
    """A new GPU has the state of the node file."""
    started(tmp_path, "{model: a100-40gb, mig: true}")
    node = started(tmp_path, "{model: a100-40gb}, {model: h100-80gb, mig: true}, {model: t4}")

    assert [gpu.mig for gpu in view_node(node).gpus] == ["on", "on", "none"]
    kept = msgspec.json.decode((tmp_path / "driver.json").read_bytes(), type=SavedNode)
    assert list(kept.gpus) == [gpu.id for gpu in node.gpus[:2]]


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    """The error about an unreadable or unwritable file names the file."""
    (tmp_path / "driver.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"driver\.json: cannot keep a simulated driver's ins"):
        started(tmp_path)
    (tmp_path / "node.yaml").write_text(
        f"gpus: []\nstateFile: {tmp_path / 'none' / 'driver.json'}\n"
    )
    with pytest.raises(ConfigError, match="No such file or directory"):
        build_node(str(tmp_path / "node.yaml"))
