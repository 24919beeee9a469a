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
