"""The MIG profiles of the simulated GPU models: NVIDIA's tables, as rows.

Numbers, placements and counts: the tables of NVIDIA's MIG User Guide and published outputs of
`nvidia-smi mig -lgip` and `-lgipp`. Blackwell's numbers are from such outputs alone. Memory is in
MiB as these outputs print it; engines are those of the guide. Values without a table are marked.
"""

from typing import Final, NamedTuple

import msgspec
import pynvml

_ONE: Final = pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE
_TWO: Final = pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE
_THREE: Final = pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE
_FOUR: Final = pynvml.NVML_GPU_INSTANCE_PROFILE_4_SLICE
_SEVEN: Final = pynvml.NVML_GPU_INSTANCE_PROFILE_7_SLICE
_ONE_ME: Final = pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1
_TWO_ME: Final = pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1
_ONE_DOUBLE: Final = pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2


class MediaEngines(NamedTuple):
    """Media engines for video and images; an instance without an engine cannot use it."""

    decoders: int = 0
    encoders: int = 0
    jpeg: int = 0
    ofa: int = 0


class SimProfile(msgspec.Struct, frozen=True):
    """One MIG profile of one GPU model.

    Attributes:
        kind: NVML's constant for the profile on every model; `number` is its ID on this model.
        compute_slices: number of compute slices.
        memory_slices: number of memory slices; an instance begins at one of `starts`.
        max_count: number of instances on an empty GPU.
        memory: MiB.
        multiprocessors: streaming multiprocessors.
        suffix: the end of its name, where another profile has its size.
    """

    kind: int
    number: int
    compute_slices: int
    memory_slices: int
    starts: tuple[int, ...]
    max_count: int
    memory: int
    multiprocessors: int
    copy_engines: int
    engines: MediaEngines
    suffix: str = ""


class _Row(NamedTuple):
    """The values that differ between models of one layout."""

    memory: int
    processors: int
    copies: int
    engines: MediaEngines


def _sevenths(  # noqa: PLR0917 - a row for each profile, in the order of NVIDIA's tables
    one: _Row, one_me: _Row, double: _Row, two: _Row, three: _Row, four: _Row, seven: _Row
) -> tuple[SimProfile, ...]:
    """Return the profiles of a model with seven compute and eight memory slices."""
    first_seven, evens = tuple(range(7)), (0, 2, 4, 6)

    return (
        SimProfile(_ONE, 19, 1, 1, first_seven, 7, *one),
        SimProfile(_ONE_ME, 20, 1, 1, first_seven, 1, *one_me, "+me"),
        SimProfile(_ONE_DOUBLE, 15, 1, 2, evens, 4, *double),
        SimProfile(_TWO, 14, 2, 2, evens[:3], 3, *two),
        SimProfile(_THREE, 9, 3, 4, (0, 4), 2, *three),
        SimProfile(_FOUR, 5, 4, 4, (0,), 1, *four),
        SimProfile(_SEVEN, 0, 7, 8, (0,), 1, *seven),
    )


_A30: Final = (
    SimProfile(_ONE, 14, 1, 1, (0, 1, 2, 3), 4, 5952, 14, 1, MediaEngines()),
    SimProfile(_ONE_ME, 21, 1, 1, (0, 1, 2, 3), 1, 5952, 14, 1, MediaEngines(1, 0, 1, 1), "+me"),
    SimProfile(_TWO, 5, 2, 2, (0, 2), 2, 11968, 28, 2, MediaEngines(2)),
    SimProfile(_TWO_ME, 6, 2, 2, (0, 2), 1, 11968, 28, 2, MediaEngines(2, 0, 1, 1), "+me"),
    SimProfile(_FOUR, 0, 4, 4, (0,), 1, 24000, 56, 4, MediaEngines(4, 0, 1, 1)),
)


def _ampere(memory: tuple[int, int, int, int]) -> tuple[SimProfile, ...]:
    """Return an A100's profiles for the memory of one, two, four and eight slices."""
    one, two, four, eight = memory

    return _sevenths(
        _Row(one, 14, 1, MediaEngines()),
        _Row(one, 14, 1, MediaEngines(1, 0, 1, 1)),
        _Row(two, 14, 1, MediaEngines(1)),
        _Row(two, 28, 2, MediaEngines(1)),
        _Row(four, 42, 3, MediaEngines(2)),
        _Row(four, 56, 4, MediaEngines(2)),
        _Row(eight, 98, 7, MediaEngines(5, 0, 1, 1)),
    )


def _hopper(memory: tuple[int, int, int, int]) -> tuple[SimProfile, ...]:
    """Return the profiles of an H100 or H200 with 132 multiprocessors."""
    one, two, four, eight = memory

    return _sevenths(
        _Row(one, 16, 1, MediaEngines(1, 0, 1)),
        _Row(one, 16, 1, MediaEngines(1, 0, 1, 1)),
        _Row(two, 26, 1, MediaEngines(1, 0, 1)),
        _Row(two, 32, 2, MediaEngines(2, 0, 2)),
        _Row(four, 60, 3, MediaEngines(3, 0, 3)),
        _Row(four, 64, 4, MediaEngines(4, 0, 4)),
        _Row(eight, 132, 8, MediaEngines(7, 0, 7, 1)),
    )


def _blackwell(memory: tuple[int, int, int, int]) -> tuple[SimProfile, ...]:
    """Return the profiles of a B200 or its successors.

    Decoders and JPEG engines are assumed as Hopper's, multiprocessors of all as the B200's.
    """
    one, two, four, eight = memory

    return _sevenths(
        _Row(one, 18, 2, MediaEngines(1, 0, 1)),
        _Row(one, 18, 2, MediaEngines(1, 0, 1, 1)),
        _Row(two, 18, 2, MediaEngines(1, 0, 1)),
        _Row(two, 36, 3, MediaEngines(2, 0, 2)),
        _Row(four, 54, 6, MediaEngines(3, 0, 3)),
        _Row(four, 72, 8, MediaEngines(4, 0, 4)),
        _Row(eight, 126, 16, MediaEngines(7, 0, 7, 1)),
    )


_EVERY: Final = MediaEngines(4, 4, 4, 1)


def _quarters(sizes: tuple[int, int, int]) -> tuple[SimProfile, ...]:
    """Return an RTX PRO 6000's profiles, with and without graphics and media engines.

    Its engines are assumed: four of each for video, one for optical flow. Of its multiprocessors
    (188) each slice is taken to have 46.
    """
    one, two, four = sizes
    all_four, halves = (0, 1, 2, 3), (0, 2)

    def quarter(
        kind: int, number: int, most: int, engines: MediaEngines, suffix: str = ""
    ) -> SimProfile:
        return SimProfile(kind, number, 1, 1, all_four, most, one, 46, 1, engines, suffix)

    def half(
        kind: int, number: int, most: int, engines: MediaEngines, suffix: str = ""
    ) -> SimProfile:
        return SimProfile(kind, number, 2, 2, halves, most, two, 92, 2, engines, suffix)

    def whole(kind: int, number: int, suffix: str = "") -> SimProfile:
        return SimProfile(kind, number, 4, 4, (0,), 1, four, 188, 4, _EVERY, suffix)

    return (
        quarter(_ONE, 14, 4, MediaEngines(1, 1, 1)),
        quarter(_ONE_ME, 21, 1, MediaEngines(1, 1, 1, 1), "+me"),
        quarter(pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_GFX, 47, 4, MediaEngines(1, 1, 1), "+gfx"),
        quarter(pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME, 65, 1, _EVERY, "+me.all"),
        quarter(pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_NO_ME, 67, 4, MediaEngines(), "-me"),
        half(_TWO, 5, 2, MediaEngines(2, 2, 2)),
        half(pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_GFX, 35, 2, MediaEngines(2, 2, 2), "+gfx"),
        half(pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME, 64, 1, _EVERY, "+me.all"),
        half(pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_NO_ME, 66, 2, MediaEngines(), "-me"),
        whole(_FOUR, 0),
        whole(pynvml.NVML_GPU_INSTANCE_PROFILE_4_SLICE_GFX, 32, "+gfx"),
    )


def _halves(one: int, two: int) -> tuple[SimProfile, ...]:
    """Return an RTX PRO 4500's profiles, with the engines of the guide.

    Numbers are assumed to be those of the same profiles of an RTX PRO 6000. Each half is taken to
    have 40 of the 82 multiprocessors.
    """
    some, every = MediaEngines(1, 1, 1), MediaEngines(3, 3, 2, 1)

    def half(kind: int, number: int, most: int, engines: MediaEngines, suffix: str) -> SimProfile:
        return SimProfile(kind, number, 1, 1, (0, 1), most, one, 40, 1, engines, suffix)

    return (
        half(_ONE, 14, 2, some, ""),
        half(pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_GFX, 47, 2, some, "+gfx"),
        half(pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME, 65, 1, every, "+me.all"),
        half(pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_NO_ME, 67, 2, MediaEngines(), "-me"),
        SimProfile(_TWO, 5, 2, 2, (0,), 1, two, 82, 2, every),
        SimProfile(
            pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_GFX, 35, 2, 2, (0,), 1, two, 82, 2, every,
            "+gfx",
        ),
    )  # fmt: skip


MIG_PROFILES: Final = {
    "a30": _A30,
    "a100-40gb": _ampere((4864, 9856, 19968, 40192)),
    "a100-pcie-40gb": _ampere((4864, 9856, 19968, 40192)),
    "a100-80gb": _ampere((9728, 19968, 40192, 80896)),
    "h100-80gb": _hopper((9984, 20096, 40448, 81152)),
    # Of three and four slices, and of the whole: assumed to be the published GiB.
    "h200": _hopper((16384, 33280, 71424, 143360)),
    "h200-nvl": _hopper((16384, 33280, 71424, 143360)),
    "gh200": _hopper((11264, 23552, 47616, 95232)),
    # The guide's 23040 for each slice make more than this board's total: 22912 of 183359 here.
    "b200": _blackwell((22912, 45824, 91648, 183296)),
    # Assumed: eighths of the total; the names are those of mig-parted and of GPU operator.
    "gb200": _blackwell((23680, 47360, 94720, 189440)),
    "b300": _blackwell((34368, 68736, 137472, 274944)),
    "gb300": _blackwell((35520, 71040, 142080, 284160)),
    # Assumed: halves of the total.
    "rtx-pro-4500": _halves(16256, 32512),
    "rtx-pro-6000": _quarters((24192, 48384, 97280)),
}
"""By the board's name; a board that is not here has no MIG."""
