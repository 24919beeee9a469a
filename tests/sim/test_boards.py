"""The table of boards."""

import pytest

from metagpu.sim.boards import BOARDS, CUBE_MESH, Board, Fabric


def test_the_usual_boards_are_there() -> None:
    """Boards are found by the names that documentation uses."""
    assert set(BOARDS) == {
        *("v100-16gb", "v100-32gb", "t4", "l40s", "a30"),
        *("a100-40gb", "a100-pcie-40gb", "a100-80gb", "h100-80gb", "h200", "b200"),
        "rtx-pro-6000",
    }


def test_an_a100_has_forty_gibibytes() -> None:
    """The total is nvidia-smi's, which slot counts are computed from."""
    assert BOARDS["a100-40gb"].memory == 40960


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_board_makes_sense(board: Board) -> None:
    """Little is reserved, only boards from Ampere on have MIG, and NVIDIA is the vendor."""
    assert 0 < board.reserved < board.memory / 10
    assert board.remaps_rows or not board.mig
    assert board.pci_device_id & 0xFFFF == 0x10DE
    assert board.pci_device_id >> 16 == board.device


@pytest.mark.parametrize(
    ("board", "names"),
    [
        ("a30", "1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb"),
        ("a100-40gb", "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
        ("a100-pcie-40gb", "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
        ("a100-80gb", "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
        ("h100-80gb", "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
        ("h200", "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"),
        ("b200", "1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb"),
        ("t4", ""),
        ("l40s", ""),
        ("v100-16gb", ""),
    ],
)
def test_profiles_have_the_names_that_nvidia_prints(board: str, names: str) -> None:
    """Memory of board and profile together give the names of NVIDIA's MIG User Guide."""
    it = BOARDS[board]

    assert [it.mig_name(profile) for profile in it.mig_profiles] == names.split()


@pytest.mark.parametrize("board", [it for it in BOARDS.values() if it.mig], ids=lambda it: it.key)
def test_instances_have_no_more_than_their_board(board: Board) -> None:
    """As many instances of a kind as there can be have its memory and engines at most."""
    whole = max(board.mig_profiles, key=lambda it: it.size)

    for profile in board.mig_profiles:
        assert profile.most * profile.memory <= board.memory
        assert profile.most * profile.slices <= whole.slices
        for own, total in zip(profile.engines, whole.engines, strict=True):
            assert profile.most * own <= total


def test_boards_are_linked_as_in_real_machines() -> None:
    """Eight V100s are a mesh, later SXM boards are on NVSwitches, the others have the PCI bus."""
    fabrics = {key: board.fabric for key, board in BOARDS.items()}

    assert {key for key, fabric in fabrics.items() if fabric is Fabric.NONE} == {
        *("t4", "l40s", "a30", "a100-pcie-40gb", "rtx-pro-6000")
    }
    assert {key for key, fabric in fabrics.items() if fabric is Fabric.CUBE_MESH} == {
        *("v100-16gb", "v100-32gb")
    }


def test_the_mesh_uses_all_links_both_ways() -> None:
    """Each V100 has six NVLinks, and what one end has the other has too."""
    assert [sum(row) for row in CUBE_MESH] == [BOARDS["v100-16gb"].nvlinks] * 8
    assert [list(column) for column in zip(*CUBE_MESH, strict=True)] == [*map(list, CUBE_MESH)]
