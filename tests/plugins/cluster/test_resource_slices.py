"""The next writes of a pool of ResourceSlices, case by case."""

import re
from typing import Any, cast

import pytest

from metagpu.plugins.cluster.resource_slices import OwnSlices, PoolPlan, named, plan_pool


def devices(*gpus: str) -> dict[str, Any]:
    """Return a slice's spec with a device of each of these GPUs."""
    return {"devices": [{"name": f"{gpu}-whole"} for gpu in gpus]}


def stored(generation: int, count: int, *gpus: str) -> dict[str, Any]:
    """Return a slice as the API server has it."""
    pool = {"name": "node", "generation": generation, "resourceSliceCount": count}
    return {"metadata": {}, "spec": {**devices(*gpus), "pool": pool}}


A, B = (f"gpu-{letter * 8}-1111-1111-1111-{letter * 12}" for letter in "ab")
WANTED = {"s-00": devices(A), "s-01": devices(B)}
COMPLETE = {"s-00": stored(3, 2, A), "s-01": stored(3, 2, B)}


@pytest.mark.parametrize(
    ("before", "waits", "plan"),
    [
        (COMPLETE, {}, PoolPlan(3)),
        (COMPLETE, {"s-00": 0}, PoolPlan(3, {"s-00": WANTED["s-00"]})),
        (COMPLETE, {"s-00": -1, "s-01": 9}, PoolPlan(3, {"s-00": WANTED["s-00"]}, later=9)),
        (COMPLETE, {"s-00": 0, "s-01": 0}, PoolPlan(3, WANTED)),
        (
            {"s-00": stored(3, 2, B), "s-01": stored(3, 2, A)},
            {"s-00": 0, "s-01": 0},
            PoolPlan(4, together=(WANTED,)),
        ),
        ({}, {"s-00": 0, "s-01": 0}, PoolPlan(1, together=({}, WANTED))),
        ({"s-00": stored(3, 1, A)}, {"s-00": 0, "s-01": 0}, PoolPlan(4, together=(WANTED,))),
        (
            {"s-00": stored(3, 2, A), "s-01": stored(2, 2, B)},
            {"s-00": 9},
            PoolPlan(3, together=({"s-00": WANTED["s-00"]}, {"s-01": WANTED["s-01"]})),
        ),
        ({**COMPLETE, "s-02": stored(3, 2, B)}, {}, PoolPlan(4, together=(WANTED,))),
        ({**COMPLETE, "s-02": stored(2, 3, B)}, {}, PoolPlan(3)),
    ],
    ids=[
        "as wanted",
        "one differs",
        "one differs, and one that somebody edited waits",
        "both differ and keep their GPUs",
        "the GPUs change places",
        "none is there",
        "the count differs",
        "one is of an earlier generation",
        "one too many",
        "one too many of an earlier generation",
    ],
)
def test_a_pool_that_is_used_stays_complete(
    before: dict[str, Any], waits: dict[str, float], plan: PoolPlan
) -> None:
    """Slices are replaced one by one where that is safe, and else in a new generation."""
    assert plan_pool(WANTED, before, waits) == plan


async def test_late_news_of_a_slice_is_none() -> None:
    """The answer to a write may be faster than the watch, and a name may be another slice's."""
    changes: list[str] = []
    own = OwnSlices(cast("Any", None), "node", lambda: "gpu.metagpu.io", changes.append)

    def item(version: int, uid: str = "u") -> dict[str, Any]:
        metadata = {"name": "s", "uid": uid, "resourceVersion": str(version)}
        return {"metadata": metadata, "spec": {"driver": "gpu.metagpu.io"}}

    own.on_list([item(5)])
    own.on_update(item(5))
    own.on_delete(item(6, "former"))
    assert (changes, own.version, list(own.objects)) == ([""], 6, ["s"])
    own.on_update(item(7))
    own.on_delete(item(8))
    assert (changes, own.version, list(own.objects)) == (["", "s", ""], 8, [])


@pytest.mark.parametrize("node", ["n" * 139 + "." + "x" * 100, "n" * 138 + "-." + "x" * 100])
def test_a_long_name_of_a_node_is_cut_where_a_name_may_end(node: str) -> None:
    """A slice has a name that Kubernetes accepts, also on a node whose name is as long."""
    [name] = named([{"driver": "gpu.metagpu.io", "nodeName": node, "pool": {"name": node}}])
    assert len(name) <= 253
    assert all(re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", part) for part in name.split("."))
