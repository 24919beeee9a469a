"""MIG on simulated GPUs: what the driver does, and how it is steered."""

import pytest

from metagpu.core.gpu import MIB
from metagpu.sim import cutting, foreign
from metagpu.sim.boards import BOARDS
from metagpu.sim.gpu import SimError, SimGpu, SimProcess
from metagpu.sim.node import SimNode
from metagpu.sim.spec import simulated
from metagpu.sim.view import describe
from tests.sim.test_steer import done


def cut(board: str = "a100-40gb", *places: str) -> tuple[SimNode, SimGpu]:
    """Make a node with one GPU in MIG mode that has instances at these places."""
    node = simulated(f"{board}:1")
    gpu = node.gpu(0)
    gpu.mig.enabled = gpu.mig.pending = True
    for place in places:
        foreign.make(node, gpu, place)
    return node, gpu


def reachable(board: str, names: set[str]) -> set[tuple[str, ...]]:
    """Find every set of instances that can be on a GPU at once, as sorted names."""
    profiles = [it for it in BOARDS[board].mig_profiles if BOARDS[board].mig_name(it) in names]
    found: set[tuple[str, ...]] = set()

    def more(gpu: SimGpu, node: SimNode) -> None:
        present = tuple(
            sorted(BOARDS[board].mig_name(it.profile) for it in gpu.mig.present.values())
        )
        found.add(present)
        last = max((it.start for it in gpu.mig.present.values()), default=-1)
        for profile in profiles:
            for start in profile.starts:
                if start > last and gpu.mig.free(profile, start):
                    with node.changed:
                        made = cutting.make(node, gpu, profile.number, start, profile.size)
                        more(gpu, node)
                        cutting.end(gpu, made)

    node, gpu = cut(board)
    more(gpu, node)
    return found - {()}


@pytest.mark.parametrize(
    ("board", "names", "count"),
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
def test_as_many_combinations_as_on_a_real_board(board: str, names: set[str], count: int) -> None:
    """What can be on a GPU at once is what NVIDIA's tables allow, and no more."""
    assert len(reachable(board, names)) == count


def test_numbers_go_by_size() -> None:
    """The whole is 0, halves are 1 and 2, quarters begin at 3, eighths at 7."""
    _, gpu = cut("h100-80gb", "3g.40gb@4", "2g.20gb@0", "1g.10gb@2")
    assert {it.start: number for number, it in gpu.mig.present.items()} == {4: 2, 0: 3, 2: 9}

    _, whole = cut("h100-80gb", "7g.80gb@0")
    assert list(whole.mig.present) == [0]


def test_all_video_engines_leave_none_to_others() -> None:
    """On an RTX PRO 6000 `+me.all` goes with instances that need no engines, and only those."""
    node, gpu = cut("rtx-pro-6000", "1g.24gb+me.all@0")
    foreign.make(node, gpu, "1g.24gb-me@1")

    with pytest.raises(SimError, match="Insufficient Resources"):
        foreign.make(node, gpu, "1g.24gb@2")


def test_a_process_in_an_instance_has_its_memory() -> None:
    """What a process may use is what is left of its instance, not of the GPU."""
    node, gpu = cut("a100-40gb", "1g.5gb@0")
    node.add_process(gpu, SimProcess(1, 4000 * MIB, 7, 0))

    with pytest.raises(SimError, match="864 MiB left"):
        node.add_process(gpu, SimProcess(2, 1000 * MIB, 7, 0))
    node.add_process(gpu, SimProcess(1, 4864 * MIB, 7, 0))


@pytest.mark.parametrize(("board", "stays"), [("a100-40gb", True), ("h100-80gb", False)])
def test_a_reboot_takes_instances_and_on_hopper_the_mode(board: str, *, stays: bool) -> None:
    """Ampere keeps MIG's mode when its driver is loaded anew, later boards do not."""
    node, gpu = cut(board, "7g.40gb@0" if stays else "7g.80gb@0")
    node.add_process(gpu, SimProcess(1, None, 0, 0))
    node.reboot()

    assert not gpu.mig.present
    assert not gpu.processes
    assert gpu.mig.enabled == gpu.mig.pending == stays
    assert node.loads == 2


def test_steering_cuts_a_gpu_as_somebody_else_would() -> None:
    """Mode, instances and how they are made are steered, and seen in the node."""
    node = simulated("h100-80gb:1")
    assert done(node, "mig on 0").message == "MIG of GPU 0 is on"
    assert done(node, "instance make 0 2g.20gb@4").message == (
        "GPU instance 5 is 2g.20gb@4 on GPU 0"
    )
    [gpu] = describe(node).gpus
    assert gpu.mig == "on"
    assert [(it.gi, it.place, len(it.uuids)) for it in gpu.instances] == [(5, "2g.20gb@4", 1)]

    done(node, "making 0 --takes 2s --compute-takes 1s --failures 1 --compute-failures 2")
    making = node.gpu(0).mig.making
    assert (making.takes, making.compute_takes) == (2.0, 1.0)
    assert (making.failures, making.compute_failures) == (1, 2)
    done(node, "making 0 --in-use 1m")
    with pytest.raises(SimError, match="stays: In use by another client"):
        done(node, "instance end 0 2g.20gb@4")
    done(node, "making 0")
    done(node, "instance end 0 2g.20gb@4")
    assert not describe(node).gpus[0].instances


def test_steering_says_when_a_mode_waits() -> None:
    """On Ampere the mode waits for a reset, which `recover` is."""
    node = simulated("a100-40gb:1")

    assert done(node, "mig on 0").message == "MIG of GPU 0 will be on after a reset"
    assert describe(node).gpus[0].mig == "off until reset"
    assert done(node, "recover 0").node.gpus[0].mig == "on"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mig on 1", "GPU 1 is a t4, which has no MIG"),
        ("instance make 0 2g", "'2g' is no PROFILE@START such as 2g.10gb@4"),
        ("instance make 0 2g.20gb@0", "no profile 2g.20gb; it has: 1g.5gb, 1g.5gb"),
        ("instance make 0 2g.10gb@1", "Invalid Argument; 2g.10gb starts at: 0, 2, 4"),
        ("instance end 0 2g.10gb@0", "no 2g.10gb@0 on GPU .*; there: 1g.5gb@6"),
        ("instance make 1 1g.5gb@0", "it has: no MIG"),
    ],
)
def test_what_cannot_be_cut_says_why(line: str, message: str) -> None:
    """Errors say what there is."""
    node = simulated("a100-40gb:1,t4:1")
    node.gpu(0).mig.enabled = True
    foreign.make(node, node.gpu(0), "1g.5gb@6")

    with pytest.raises(SimError, match=message):
        done(node, line)
