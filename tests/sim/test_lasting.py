"""What a simulated driver keeps while no daemon runs."""

from pathlib import Path

import msgspec
import pytest

from metagpu.core.errors import ConfigError
from metagpu.sim.lasting import KeptNode
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated
from metagpu.sim.view import describe
from tests.sim.test_steer import done


def started(folder: Path, gpus: str = "{board: a100-40gb, count: 2, mig: true}") -> SimNode:
    """Start a daemon's node, whose driver keeps what it has in a file of the folder."""
    (folder / "node.yaml").write_text(f"gpus: [{gpus}]\nkeep: {folder / 'driver.json'}\n")
    return simulated(str(folder / "node.yaml"))


def test_instances_outlive_the_daemon_with_their_uuids(tmp_path: Path) -> None:
    """Who starts on the same file finds modes, instances and uuids, and makes other ones beside."""
    before = started(tmp_path)
    for line in ("make 0 2g.10gb@4", "make 1 7g.40gb@0", "make 0 1g.5gb@0", "end 0 1g.5gb@0"):
        done(before, f"instance {line}")
    done(before, "mig on 0")

    after = started(tmp_path)
    assert describe(after) == describe(before)
    done(after, "instance make 0 1g.5gb@0")
    uuids = [uuid for gpu in describe(after).gpus for it in gpu.instances for uuid in it.uuids]
    assert len(set(uuids)) == 3


def test_half_an_instance_is_kept_too(tmp_path: Path) -> None:
    """A daemon that ends between the two halves leaves a GPU instance without a MIG device."""
    node = started(tmp_path)
    done(node, "making 0 --compute-failures 1")
    with pytest.raises(Exception, match="Unknown Error"):
        done(node, "instance make 0 2g.10gb@4")

    [instance] = describe(started(tmp_path)).gpus[0].instances
    assert (instance.place, instance.uuids) == ("2g.10gb@4", ())


def test_a_reboot_is_kept(tmp_path: Path) -> None:
    """What a reboot takes is gone for the next daemon too."""
    node = started(tmp_path)
    done(node, "instance make 0 2g.10gb@4")
    done(node, "reboot")

    assert [gpu.instances for gpu in describe(started(tmp_path)).gpus] == [(), ()]


def test_what_the_file_does_not_know_is_as_the_node_file_says(tmp_path: Path) -> None:
    """A GPU that is new has what the node file gives it; nothing else is asked of the file."""
    started(tmp_path, "{board: a100-40gb, mig: true}")
    node = started(tmp_path, "{board: a100-40gb}, {board: h100-80gb, mig: true}, {board: t4}")

    assert [gpu.mig for gpu in describe(node).gpus] == ["on", "on", "none"]
    kept = msgspec.json.decode((tmp_path / "driver.json").read_bytes(), type=KeptNode)
    assert list(kept.gpus) == [gpu.id for gpu in node.gpus[:2]]


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """What cannot be understood or written is told with the file's name."""
    (tmp_path / "driver.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"driver\.json: cannot keep a simulated driver's ins"):
        started(tmp_path)
    (tmp_path / "node.yaml").write_text(f"gpus: []\nkeep: {tmp_path / 'none' / 'driver.json'}\n")
    with pytest.raises(ConfigError, match="No such file or directory"):
        simulated(str(tmp_path / "node.yaml"))
