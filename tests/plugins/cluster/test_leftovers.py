"""Leftovers of metagpu at the API server, by what a Node shows."""

from pathlib import Path
from typing import Any

import pytest

from metagpu.core.errors import ClusterError
from metagpu.core.model.shares import ResourceName
from metagpu.plugins.cluster.leftovers import find_at_api_server
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import NODE, client_of, cluster_at_work

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


OURS, OTHER = ({"key": key, "effect": "NoSchedule"} for key in ("metagpu.io/starting", "a.b/c"))
ASKED = (Feature.LABELS, Feature.NODE_FEATURE, Feature.CONDITION)


@pytest.mark.parametrize(("by_nfd", "first"), [(True, "NodeFeature"), (False, "labels")])
async def test_what_a_daemon_wrote_is_removed(tmp_path: Path, *, by_nfd: bool, first: str) -> None:
    """Each leftover is removed by itself, and what others wrote stays."""
    server = SimApiServer()
    server.add_node(NODE, {"team": "vision"}, taints=[OURS])
    server.report(NODE, {GPU: 0, "cpu": 2}, {GPU: 0, "cpu": 2})
    if by_nfd:
        server.install_nfd()
    async with cluster_at_work(tmp_path, *ASKED, server=server) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        await server.until(lambda: server.node(NODE)["status"].get("conditions"))
    async with client_of(server, tmp_path) as client:
        found = await find_at_api_server(client, ClusterSettings(NODE), (GPU,), ())
        assert [each.kind for each in found] == [first, "conditions", "taint", "amounts"]
        for leftover in found:
            await leftover.remove()
        writes = len([each for each in server.requests if each.method != "GET"])
        await found[2].remove()  # an operator may have been faster
        assert len([each for each in server.requests if each.method != "GET"]) == writes
        assert await find_at_api_server(client, ClusterSettings(NODE), (GPU,), ()) == []
    node = server.node(NODE)
    assert server.labels(NODE) == {"team": "vision"}
    assert "taints" not in node["spec"]
    assert node["status"] == {
        "capacity": {"cpu": "2"}, "allocatable": {"cpu": "2"}, "conditions": []
    }  # fmt: skip


async def test_what_may_not_be_read_is_not_ours(tmp_path: Path) -> None:
    """Without the right to read a kind metagpu wrote none; a server in trouble says nothing."""
    server = SimApiServer()
    server.add_node(NODE)
    server.install_nfd()
    paths = [("GET", "/nodefeatures/"), ("GET", "/resourceslices")]
    server.denied += paths
    async with client_of(server, tmp_path) as client:
        assert await find_at_api_server(client, ClusterSettings(NODE), (), ()) == []
        server.denied.clear()
        for path in paths:
            server.failing = [path]
            with pytest.raises(ClusterError, match="503"):
                await find_at_api_server(client, ClusterSettings(NODE), (), ())


async def test_a_slice_that_went_meanwhile_is_removed(tmp_path: Path) -> None:
    """The kubelet deletes the slices of a driver that has ended."""
    server = SimApiServer()
    server.add_node(NODE)
    spec = {"driver": "gpu.metagpu.io", "nodeName": NODE, "pool": {"name": NODE}}
    metadata = {"labels": {"app.kubernetes.io/managed-by": "metagpu"}}
    server.store.put(("resourceslices", "", "s"), {"metadata": metadata, "spec": spec})
    async with client_of(server, tmp_path) as client:
        [leftover] = await find_at_api_server(client, ClusterSettings(NODE), (), ())
        server.failing.append(("DELETE", "/resourceslices/"))
        with pytest.raises(ClusterError, match="503"):
            await leftover.remove()
        server.failing.clear()
        server.store.delete(("resourceslices", "", "s"))
        await leftover.remove()
