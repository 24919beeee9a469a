"""NVIDIA's names of MIG profiles and placements."""

import pytest

from metagpu.core.model.gpu import MIB
from metagpu.core.model.mig import Placement, profile_name


@pytest.mark.parametrize(
    ("slices", "memory", "total", "name"),
    [
        # Memory and totals in MiB, as nvidia-smi prints them; names of NVIDIA's MIG User Guide.
        (1, 4864, 40960, "1g.5gb"),
        (2, 9856, 40960, "2g.10gb"),
        (3, 19968, 40960, "3g.20gb"),
        (7, 40192, 40960, "7g.40gb"),
        (1, 9728, 81920, "1g.10gb"),
        (1, 5952, 24576, "1g.6gb"),
        (4, 24000, 24576, "4g.24gb"),
        (1, 9984, 81559, "1g.10gb"),
        (3, 71424, 143771, "3g.71gb"),
        (1, 22912, 183359, "1g.23gb"),
        (2, 45824, 183359, "2g.45gb"),
        (2, 47616, 190464, "2g.47gb"),
        (7, 80896, 81920, "7g.80gb"),
    ],
)
def test_names_are_nvidias(slices: int, memory: int, total: int, name: str) -> None:
    """A profile has NVIDIA's name, also on GPUs where half a GB is rounded up."""
    assert profile_name(slices, memory * MIB, total * MIB) == name


def test_names_of_equal_sizes_differ_at_the_end() -> None:
    """Two profiles of one size differ in the end of their names."""
    assert profile_name(1, 4864 * MIB, 40960 * MIB, "+me") == "1g.5gb+me"


def test_a_placement_is_its_slices() -> None:
    """Four slices from the fifth on are written as nvidia-smi does."""
    place = Placement(4, 4)

    assert list(place.slices) == [4, 5, 6, 7]
    assert str(place) == "4:4"
