"""Placements of a fixed layout, known before the GPU creates an instance."""

import pytest

from metagpu.backends.mig.backend import MigBackend
from metagpu.backends.mig.layout import layout_name, place_layout
from metagpu.backends.mig.options import MigOptions
from metagpu.backends.mig.planner import UnplaceableLayout
from metagpu.core.grants.injection import Injection
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import layout_of

A = mig_gpu(0)


def backend(layout: dict[str, int], resource: str | None = None) -> MigBackend:
    """Create the backend of a pool with a layout."""
    return MigBackend(MigOptions("mig", layout=layout, resource=resource), Injection())


def test_each_instance_is_one_share() -> None:
    """An id has profile and slice, the resource the profile; no two shares exclude each other."""
    shares = backend({"1g.5gb": 3, "2g.10gb": 2}).shares(A)

    assert [(it.id.partition("::")[2], it.resource, it.number) for it in shares] == [
        *((f"1g.5gb@{at}", "nvidia.com/mig-1g.5gb", n) for n, at in enumerate((0, 1, 6))),
        *((f"2g.10gb@{at}", "nvidia.com/mig-2g.10gb", n) for n, at in enumerate((2, 4))),
    ]
    slots = [slot for it in shares for slot in it.footprint]
    assert len(slots) == len(set(slots))
    assert shares[-1].memory == 9856 * 2**20


def test_ids_do_not_depend_on_the_order_of_the_file() -> None:
    """Ids depend neither on the file's order nor on further profiles of a newer driver."""
    there = place_layout(A, {"1g.5gb": 3, "2g.10gb": 2})

    assert place_layout(A, {"2g.10gb": 2, "1g.5gb": 3}) == there
    assert not isinstance(there, UnplaceableLayout)
    assert len(there) == 5


def test_one_name_numbers_its_shares() -> None:
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
def test_a_layout_that_does_not_fit_is_reported(layout: str, why: str) -> None:
    """Such a GPU offers nothing, `explain` has the reason, and the resource has no shares."""
    text = (
        f"version: metagpu/v1\npools: [{{name: a, backends: [{{backend: mig, layout: {layout}}}]}}]"
    )
    found = layout_of(A, text=text)

    assert not found.shares
    assert len(found.backends) == layout.count(":")
    assert [it.reason for it in found.pool_assignments] == [f"all GPUs, but no shares: {why}"]


def test_a_layout_is_named_as_in_mig_parted() -> None:
    """The largest profiles come first."""
    assert layout_name({"1g.5gb": 3, "2g.10gb": 2}) == "2x2g.10gb-3x1g.5gb"
