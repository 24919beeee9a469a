"""MIG on simulated GPUs: the driver's behaviour and its commands."""

import pytest

from metagpu.core.model.gpu import MIB
from metagpu.sim.commands.view import view_node
from metagpu.sim.machine import foreign_instances, mig_driver
from metagpu.sim.machine.gpu import SimError, SimGpu, SimProcess
from metagpu.sim.machine.gpu_models import GPU_MODELS
from metagpu.sim.machine.node import SimNode
from metagpu.sim.machine.spec import build_node
from tests.sim.commands.test_node_commands import done


def node_with(model: str = "a100-40gb", *placements: str) -> tuple[SimNode, SimGpu]:
    """Create a node with one GPU in MIG mode that has instances at these placements."""
    node = build_node(f"{model}:1")
    gpu = node.gpu(0)
    gpu.mig.enabled = gpu.mig.pending = True
    for place in placements:
        foreign_instances.create_instance(node, gpu, place)
    return node, gpu


def reachable(model: str, names: set[str]) -> set[tuple[str, ...]]:
    """Find every set of instances that can be on a GPU at once, as sorted names."""
    profiles = [
        profile
        for profile in GPU_MODELS[model].mig_profiles
        if GPU_MODELS[model].profile_name(profile) in names
    ]
    found: set[tuple[str, ...]] = set()

    def more(gpu: SimGpu, node: SimNode) -> None:
        present = tuple(
            sorted(
                GPU_MODELS[model].profile_name(instance.profile)
                for instance in gpu.mig.instances.values()
            )
        )
        found.add(present)
        last = max((instance.start for instance in gpu.mig.instances.values()), default=-1)
        for profile in profiles:
            for start in profile.starts:
                if start > last and gpu.mig.is_free(profile, start):
                    with node.changed:
                        made = mig_driver.create_gpu_instance(
                            node, gpu, profile.number, start, profile.memory_slices
                        )
                        more(gpu, node)
                        mig_driver.destroy_gpu_instance(gpu, made)

    node, gpu = node_with(model)
    more(gpu, node)
    return found - {()}


@pytest.mark.parametrize(
    ("model", "names", "count"),
    [
        # Counts that follow from NVIDIA's placements, by hand.
        ("a100-40gb", {"1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"}, 37),
        ("a100-40gb", {"1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"}, 77),
        (
            "a100-40gb",
            {"1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"},
            127,
        ),
        ("a30", {"1g.6gb", "2g.12gb", "4g.24gb"}, 9),
    ],
)
def test_as_many_combinations_as_on_a_real_gpu(model: str, names: set[str], count: int) -> None:
    """The possible sets of instances are those of NVIDIA's tables."""
    assert len(reachable(model, names)) == count


def test_numbers_go_by_size() -> None:
    """The whole GPU is 0, halves are 1 and 2, quarters begin at 3, eighths at 7."""
    _, gpu = node_with("h100-80gb", "3g.40gb@4", "2g.20gb@0", "1g.10gb@2")
    assert {instance.start: number for number, instance in gpu.mig.instances.items()} == {
        4: 2,
        0: 3,
        2: 9,
    }

    _, whole = node_with("h100-80gb", "7g.80gb@0")
    assert list(whole.mig.instances) == [0]


def test_all_video_engines_leave_none_to_others() -> None:
    """On an RTX PRO 6000 `+me.all` goes only with instances without engines."""
    node, gpu = node_with("rtx-pro-6000", "1g.24gb+me.all@0")
    foreign_instances.create_instance(node, gpu, "1g.24gb-me@1")

    with pytest.raises(SimError, match="Insufficient Resources"):
        foreign_instances.create_instance(node, gpu, "1g.24gb@2")


def test_a_process_in_an_instance_has_its_memory() -> None:
    """A process is limited by the free memory of its instance, not of the GPU."""
    node, gpu = node_with("a100-40gb", "1g.5gb@0")
    node.start_process(gpu, SimProcess(1, 4000 * MIB, 7, 0))

    with pytest.raises(SimError, match="864 MiB left"):
        node.start_process(gpu, SimProcess(2, 1000 * MIB, 7, 0))
    node.start_process(gpu, SimProcess(1, 4864 * MIB, 7, 0))


@pytest.mark.parametrize(("model", "stays"), [("a100-40gb", True), ("h100-80gb", False)])
def test_a_reboot_takes_instances_and_on_hopper_the_mode(model: str, *, stays: bool) -> None:
    """Ampere keeps MIG mode over a driver reload, later models do not."""
    node, gpu = node_with(model, "7g.40gb@0" if stays else "7g.80gb@0")
    node.start_process(gpu, SimProcess(1, None, 0, 0))
    node.reboot()

    assert not gpu.mig.instances
    assert not gpu.processes
    assert gpu.mig.enabled == gpu.mig.pending == stays
    assert node.driver_loads == 2


def test_commands_create_instances_as_an_operator_does() -> None:
    """Commands set mode, instances and provisioning, and the node shows them."""
    node = build_node("h100-80gb:1")
    assert done(node, "mig on 0").message == "MIG mode of GPU 0 is on"
    assert done(node, "instance create 0 2g.20gb@4").message == (
        "GPU instance 5 on GPU 0 is 2g.20gb@4"
    )
    [gpu] = view_node(node).gpus
    assert gpu.mig == "on"
    assert [
        (instance.gi, instance.placement, len(instance.uuids)) for instance in gpu.instances
    ] == [(5, "2g.20gb@4", 1)]

    done(
        node, "provisioning 0 --duration 2s --compute-duration 1s --failures 1 --compute-failures 2"
    )
    making = node.gpu(0).mig.provisioning
    assert (making.duration, making.compute_duration) == (2.0, 1.0)
    assert (making.failures, making.compute_failures) == (1, 2)
    done(node, "provisioning 0 --in-use 1m")
    with pytest.raises(SimError, match="stays: In use by another client"):
        done(node, "instance destroy 0 2g.20gb@4")
    done(node, "provisioning 0")
    done(node, "instance destroy 0 2g.20gb@4")
    assert not view_node(node).gpus[0].instances


def test_a_command_says_that_a_mode_waits() -> None:
    """On Ampere the mode waits for the command `reset`."""
    node = build_node("a100-40gb:1")

    assert done(node, "mig on 0").message == "MIG mode of GPU 0 will be on after a reset"
    assert view_node(node).gpus[0].mig == "off until reset"
    assert done(node, "reset 0").node.gpus[0].mig == "on"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mig on 1", "GPU 1 is a t4, which has no MIG"),
        ("instance create 0 2g", "'2g' is not a PROFILE@START such as 2g.10gb@4"),
        ("instance create 0 2g.20gb@0", "no profile 2g.20gb; it has: 1g.5gb, 1g.5gb"),
        ("instance create 0 2g.10gb@1", "Invalid Argument; 2g.10gb starts at: 0, 2, 4"),
        ("instance destroy 0 2g.10gb@0", "no 2g.10gb@0 on GPU-.*; there: 1g.5gb@6"),
        ("instance create 1 1g.5gb@0", "it has: no MIG"),
    ],
)
def test_impossible_instances_have_a_reason(line: str, message: str) -> None:
    """Error messages name the existing objects."""
    node = build_node("a100-40gb:1,t4:1")
    node.gpu(0).mig.enabled = True
    foreign_instances.create_instance(node, node.gpu(0), "1g.5gb@6")

    with pytest.raises(SimError, match=message):
        done(node, line)
