"""How the simulated boards can be cut by MIG: NVIDIA's tables, as rows.

Numbers, placements and counts: the tables of NVIDIA's MIG User Guide and published outputs of
`nvidia-smi mig -lgip` and `-lgipp`. Blackwell's numbers are from such outputs alone. Memory is what
these outputs print, in MiB; engines are those of the guide. What no table has is marked.
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


class Engines(NamedTuple):
    """Engines for video and images; an instance without a kind of them cannot use it."""

    decoders: int = 0
    encoders: int = 0
    jpeg: int = 0
    ofa: int = 0


class SimProfile(msgspec.Struct, frozen=True):
    """A kind of GPU instance.

    Attributes:
        kind: NVML's number for it on every board; `number` the one on this board.
        slices: compute slices.
        size: memory slices; it may begin at each of `starts`.
        most: how many an empty GPU has room for.
        memory: MiB.
        processors: streaming multiprocessors.
        suffix: the end of its name, where others have its size.
    """

    kind: int
    number: int
    slices: int
    size: int
    starts: tuple[int, ...]
    most: int
    memory: int
    processors: int
    copies: int
    engines: Engines
    suffix: str = ""


class _Row(NamedTuple):
    """What differs between boards: memory, multiprocessors, copy engines, and the others."""

    memory: int
    processors: int
    copies: int
    engines: Engines


def _sevenths(  # noqa: PLR0917 - a row for each profile, in the order of NVIDIA's tables
    one: _Row, one_me: _Row, double: _Row, two: _Row, three: _Row, four: _Row, seven: _Row
) -> tuple[SimProfile, ...]:
    """Cut a board of seven compute and eight memory slices."""
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
    SimProfile(_ONE, 14, 1, 1, (0, 1, 2, 3), 4, 5952, 14, 1, Engines()),
    SimProfile(_ONE_ME, 21, 1, 1, (0, 1, 2, 3), 1, 5952, 14, 1, Engines(1, 0, 1, 1), "+me"),
    SimProfile(_TWO, 5, 2, 2, (0, 2), 2, 11968, 28, 2, Engines(2)),
    SimProfile(_TWO_ME, 6, 2, 2, (0, 2), 1, 11968, 28, 2, Engines(2, 0, 1, 1), "+me"),
    SimProfile(_FOUR, 0, 4, 4, (0,), 1, 24000, 56, 4, Engines(4, 0, 1, 1)),
)


def _ampere(memory: tuple[int, int, int, int]) -> tuple[SimProfile, ...]:
    """Cut an A100: memory of one, two, four and eight slices."""
    one, two, four, eight = memory

    return _sevenths(
        _Row(one, 14, 1, Engines()),
        _Row(one, 14, 1, Engines(1, 0, 1, 1)),
        _Row(two, 14, 1, Engines(1)),
        _Row(two, 28, 2, Engines(1)),
        _Row(four, 42, 3, Engines(2)),
        _Row(four, 56, 4, Engines(2)),
        _Row(eight, 98, 7, Engines(5, 0, 1, 1)),
    )


def _hopper(memory: tuple[int, int, int, int]) -> tuple[SimProfile, ...]:
    """Cut an H100 or H200 of 132 multiprocessors."""
    one, two, four, eight = memory

    return _sevenths(
        _Row(one, 16, 1, Engines(1, 0, 1)),
        _Row(one, 16, 1, Engines(1, 0, 1, 1)),
        _Row(two, 26, 1, Engines(1, 0, 1)),
        _Row(two, 32, 2, Engines(2, 0, 2)),
        _Row(four, 60, 3, Engines(3, 0, 3)),
        _Row(four, 64, 4, Engines(4, 0, 4)),
        _Row(eight, 132, 8, Engines(7, 0, 7, 1)),
    )


def _blackwell(memory: tuple[int, int, int, int]) -> tuple[SimProfile, ...]:
    """Cut a B200; decoders and JPEG engines are assumed to be as many as on Hopper."""
    one, two, four, eight = memory

    return _sevenths(
        _Row(one, 18, 2, Engines(1, 0, 1)),
        _Row(one, 18, 2, Engines(1, 0, 1, 1)),
        _Row(two, 18, 2, Engines(1, 0, 1)),
        _Row(two, 36, 3, Engines(2, 0, 2)),
        _Row(four, 54, 6, Engines(3, 0, 3)),
        _Row(four, 72, 8, Engines(4, 0, 4)),
        _Row(eight, 126, 16, Engines(7, 0, 7, 1)),
    )


_EVERY: Final = Engines(4, 4, 4, 1)


def _quarters(sizes: tuple[int, int, int]) -> tuple[SimProfile, ...]:
    """Cut an RTX PRO 6000, with and without graphics and video engines.

    Its engines are assumed: four of each for video, one for optical flow. Of its multiprocessors
    (188) each slice is taken to have 46.
    """
    one, two, four = sizes
    all_four, halves = (0, 1, 2, 3), (0, 2)

    def quarter(
        kind: int, number: int, most: int, engines: Engines, suffix: str = ""
    ) -> SimProfile:
        return SimProfile(kind, number, 1, 1, all_four, most, one, 46, 1, engines, suffix)

    def half(kind: int, number: int, most: int, engines: Engines, suffix: str = "") -> SimProfile:
        return SimProfile(kind, number, 2, 2, halves, most, two, 92, 2, engines, suffix)

    def whole(kind: int, number: int, suffix: str = "") -> SimProfile:
        return SimProfile(kind, number, 4, 4, (0,), 1, four, 188, 4, _EVERY, suffix)

    return (
        quarter(_ONE, 14, 4, Engines(1, 1, 1)),
        quarter(_ONE_ME, 21, 1, Engines(1, 1, 1, 1), "+me"),
        quarter(pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_GFX, 47, 4, Engines(1, 1, 1), "+gfx"),
        quarter(pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME, 65, 1, _EVERY, "+me.all"),
        quarter(pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_NO_ME, 67, 4, Engines(), "-me"),
        half(_TWO, 5, 2, Engines(2, 2, 2)),
        half(pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_GFX, 35, 2, Engines(2, 2, 2), "+gfx"),
        half(pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME, 64, 1, _EVERY, "+me.all"),
        half(pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE_NO_ME, 66, 2, Engines(), "-me"),
        whole(_FOUR, 0),
        whole(pynvml.NVML_GPU_INSTANCE_PROFILE_4_SLICE_GFX, 32, "+gfx"),
    )


PROFILES: Final = {
    "a30": _A30,
    "a100-40gb": _ampere((4864, 9856, 19968, 40192)),
    "a100-pcie-40gb": _ampere((4864, 9856, 19968, 40192)),
    "a100-80gb": _ampere((9728, 19968, 40192, 80896)),
    "h100-80gb": _hopper((9984, 20096, 40448, 81152)),
    # Of three and four slices, and of the whole: assumed to be the published GiB.
    "h200": _hopper((16384, 33280, 71424, 143360)),
    # The guide's 23040 for each slice make more than this board's total: 22912 of 183359 here.
    "b200": _blackwell((22912, 45824, 91648, 183296)),
    "rtx-pro-6000": _quarters((24192, 48384, 97280)),
}
"""By the board's name; a board that is not here has no MIG."""
