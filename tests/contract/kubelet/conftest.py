"""The kubelets under the contract: the simulated one always, the real one with `-m e2e`."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from metagpu.sim.cluster.single_node import SingleNodeCluster
from metagpu.sim.machine.spec import build_node
from tests.contract.kubelet.rig import NAMESPACE, Kubelet, RealKubelet, SimulatedKubelet
from tests.e2e.rig.node import Node, running_node

REAL = pytest.param("real", marks=[pytest.mark.e2e, pytest.mark.timeout(300)])


@pytest.fixture(scope="session")
def real_node() -> Iterator[Node]:
    """Yield the session's Kubernetes node, with the namespace of these tests."""
    with running_node() as node:
        node.kubectl.create_namespace(NAMESPACE)
        yield node


@pytest.fixture(params=["simulated", REAL])
async def kubelet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kubelet]:
    """Yield a kubelet; a simulated one is new, the real one has no pod of these tests."""
    if request.param == "real":
        real = RealKubelet(request.getfixturevalue("real_node"))
        before = {*real.directory.rglob("*.sock")}
        yield real
        await real.clear()
        for left in {*real.directory.rglob("*.sock")} - before:
            if not left.name.startswith("metagpu"):  # a daemon of other tests may run
                left.unlink()
        return
    cluster, ended = SingleNodeCluster(build_node("t4:1"), tmp_path), asyncio.Event()

    async def run() -> None:  # its cancel scopes belong to one task, and those of a fixture to two
        async with cluster.running():
            await ended.wait()

    task = asyncio.create_task(run())
    await cluster.started.wait()
    yield SimulatedKubelet(cluster, tmp_path)
    ended.set()
    await task


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> str:
    """Return the name of a resource that no other test has."""
    name = request.node.originalname.removeprefix("test_").replace("_", "-")
    return f"contract.example/{name[:60].strip('-')}"
