"""The table of boards."""

import pytest

from metagpu.sim.boards import BOARDS, Board


def test_the_usual_boards_are_there() -> None:
    """Boards are found by the names that documentation uses."""
    assert set(BOARDS) == {
        *("v100-16gb", "v100-32gb", "t4", "l40s", "a30"),
        *("a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200"),
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
