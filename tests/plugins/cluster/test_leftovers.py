"""Leftovers of metagpu at the API server, by what a Node shows."""

from pathlib import Path
from typing import Any

import pytest

from metagpu.core.model.shares import ResourceName
from metagpu.plugins.cluster.leftovers import find_at_api_server
from metagpu.plugins.cluster.settings import ClusterSettings
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import NODE, client_of

GPU = ResourceName("nvidia.com/gpu")
READY, PROBLEM, RESET = ({"type": name} for name in ("Ready", "GPUProblem", "GPUResetNeeded"))


@pytest.mark.parametrize(
    ("status", "left"),
    [
        (None, []),
        ({"conditions": None}, []),
        ({"conditions": [READY], "capacity": {"cpu": "2"}}, []),
        ({"conditions": [READY, RESET, PROBLEM]}, ["GPUProblem, GPUResetNeeded"]),
        ({"capacity": {GPU: "0"}}, [GPU]),
        ({"allocatable": {GPU: "0"}}, [GPU]),
    ],
)
async def test_conditions_and_amounts_are_left_on_a_node(
    tmp_path: Path, status: dict[str, Any] | None, left: list[str]
) -> None:
    """Conditions of others are not ours, and a Node may show nothing."""
    server = SimApiServer()
    server.add_node(NODE)
    server.node(NODE)["status"] = status
    async with client_of(server, tmp_path) as client:
        found = await find_at_api_server(client, ClusterSettings(NODE), (GPU,), ())
    assert [leftover.where for leftover in found] == [f"Node {NODE}: {each}" for each in left]


@pytest.mark.parametrize(("registered", "counts"), [(None, True), ((GPU,), True), ((), False)])
async def test_amounts_stay_while_the_kubelet_counts_them(
    tmp_path: Path, registered: tuple[ResourceName, ...] | None, *, counts: bool
) -> None:
    """A kubelet writes its amounts again; it may do so where nobody can know."""
    server = SimApiServer()
    server.add_node(NODE)
    server.node(NODE)["status"] = {"capacity": {GPU: "0"}}
    async with client_of(server, tmp_path) as client:
        [amounts] = await find_at_api_server(client, ClusterSettings(NODE), (GPU,), registered)
    assert ("the kubelet counts it" in amounts.stays) is counts
