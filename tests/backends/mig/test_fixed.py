"""Where the instances of a fixed layout are: known before the GPU is asked for any."""

import pytest

from metagpu.backends.mig import MigBackend
from metagpu.backends.mig.fixed import planned, title
from metagpu.backends.mig.options import MigOptions
from metagpu.backends.mig.planner import Misfit
from metagpu.core.injection import Injection
from tests.backends.mig.gpus import mig_gpu
from tests.build import laid_out

A = mig_gpu(0)


def backend(layout: dict[str, int], resource: str | None = None) -> MigBackend:
    """Make the backend of a pool with a layout."""
    return MigBackend(MigOptions("mig", layout=layout, resource=resource), Injection())


def test_each_instance_is_one_share() -> None:
    """An id says profile and slice, the resource the profile; no two shares exclude each other."""
    shares = backend({"1g.5gb": 3, "2g.10gb": 2}).shares(A)

    assert [(it.id.partition("::")[2], it.resource, it.number) for it in shares] == [
        *((f"1g.5gb@{at}", "nvidia.com/mig-1g.5gb", n) for n, at in enumerate((0, 1, 6))),
        *((f"2g.10gb@{at}", "nvidia.com/mig-2g.10gb", n) for n, at in enumerate((2, 4))),
    ]
    slots = [slot for it in shares for slot in it.footprint]
    assert len(slots) == len(set(slots))
    assert shares[-1].memory == 9856 * 2**20


def test_ids_do_not_depend_on_the_order_of_the_file() -> None:
    """Nor on what other profiles the driver knows: a newer one may have more."""
    there = planned(A, {"1g.5gb": 3, "2g.10gb": 2})

    assert planned(A, {"2g.10gb": 2, "1g.5gb": 3}) == there
    assert not isinstance(there, Misfit)
    assert len(there) == 5


def test_one_name_counts_through() -> None:
    """Under one name the numbers of the shares are those of the instances."""
    shares = backend({"1g.5gb": 7}, "nvidia.com/gpu").shares(A)

    assert {it.resource for it in shares} == {"nvidia.com/gpu"}
    assert [it.number for it in shares] == list(range(7))
    assert backend({"1g.5gb": 7}, "nvidia.com/gpu").resources == ("nvidia.com/gpu",)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("{3g.20gb: 3}", "the layout 3x3g.20gb does not fit: 3 x 3g.20gb wanted, room for 2"),
        (
            "{4g.20gb: 1, 2g.10gb: 2}",
            (
                "the layout 1x4g.20gb-2x2g.10gb does not fit: 2 x 2g.10gb wanted, room for 1 "
                "beside 1 x 4g.20gb"
            ),
        ),
        (
            "{9g.5gb: 1, 1g.5gb: 1}",
            (
                "the layout 1x9g.5gb-1x1g.5gb does not fit: the GPU has no profile 9g.5gb; it has "
                "1g.5gb, 1g.5gb+me, 1g.10gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb"
            ),
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_told(layout: str, why: str) -> None:
    """Such a GPU offers nothing, and `explain` says why; the resource is there with none."""
    text = (
        f"version: metagpu/v1\npools: [{{name: a, backends: [{{backend: mig, layout: {layout}}}]}}]"
    )
    found = laid_out(A, text=text)

    assert not found.shares
    assert len(found.backends) == layout.count(":")
    assert [it.why for it in found.assignments] == [f"all GPUs, but nothing is cut: {why}"]


def test_a_layout_is_named_as_in_mig_parted() -> None:
    """The largest profiles come first."""
    assert title({"1g.5gb": 3, "2g.10gb": 2}) == "2x2g.10gb-3x1g.5gb"
