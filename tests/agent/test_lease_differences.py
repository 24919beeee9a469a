"""Leases against what processes and cgroups show: the whole agent, and its cluster."""

import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import Holder
from metagpu.core.reports.diagnosis import CheckResult, check_leases
from metagpu.core.reports.reading import read_report
from metagpu.core.reports.schema.status import StatusReport
from metagpu.core.usage import lease_differences
from metagpu.core.usage.timing import UsageTiming
from metagpu.display.status import show_status
from metagpu.plugins.cluster.node_object import NODES
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.plugins.http.address import ListenAddress
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.pods import SimContainer, SimPod
from metagpu.sim.machine.containers import SimHost
from metagpu.sim.machine.gpu import SimProcess
from tests.agent.test_metrics import page_of
from tests.rigs.agent import METAGPU, Scene, agent_at_work
from tests.rigs.host import running
from tests.rigs.logs import capture_module_logs
from tests.rigs.mig import until

NODE = "gpu-1"
ALICE, BOB, MALLORY = (Holder("team", name, "main") for name in ("alice", "bob", "mallory"))
QUICK = UsageTiming(
    idle_period=0.02,
    unauthorized_period=0.02,
    admission_window=0.05,
    absent_period=0.02,
    absent_after=0.1,
)


def pod_of(holder: Holder, shares: int) -> SimPod:
    """Return a pod whose only container asks for shares."""
    container = SimContainer(holder.container, {METAGPU: shares})
    return SimPod(holder.pod, holder.namespace, containers=(container,))


@dataclass
class Node:
    """An agent with an API server, and the containers of its host."""

    scene: Scene
    machine: SimHost
    server: SimApiServer

    async def status(self) -> Mapping[str, Any]:
        """Return the answer to `metagpu status`."""
        found: Any = await self.scene.status()
        return dict(found)

    async def differences(self) -> Sequence[Mapping[str, Any]]:
        """Return the differences of leases in `metagpu status`."""
        found: Sequence[Mapping[str, Any]] = (await self.status())["leaseDifferences"]
        return found

    async def wait_differences(self, count: int) -> None:
        """Wait until there are this many differences."""
        await until(lambda: len(self.scene.agent.usage_service.lease_differences) == count)

    async def metric(self, difference: str) -> float:
        """Scrape the number of differences of a kind."""
        page = await page_of(self.scene)
        return page.value("metagpu_lease_differences", difference=difference)


@asynccontextmanager
async def node_at_work(tmp_path: Path) -> AsyncIterator[Node]:
    """Run an agent with Events of pods and metrics; alice holds 3 shares and runs."""
    server, machine = SimApiServer(), SimHost(tmp_path)
    server.add_node(NODE)
    async with server.running():
        uses = frozenset({Feature.POD_EVENTS})
        joins = ClusterSettings(NODE, server.kubeconfig(tmp_path), features=uses)
        async with agent_at_work(
            tmp_path,
            cluster_settings=joins,
            host=machine.host,
            metrics=ListenAddress("127.0.0.1", 0),
            usage_timing=QUICK,
        ) as scene:
            await server.watched(NODES)
            await scene.until(20, 20)
            machine.start(ALICE)
            await scene.kubelet.admit(pod_of(ALICE, 3))
            await scene.wait_holders()
            yield Node(scene, machine, server)


async def test_a_lease_whose_container_is_gone_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status, doctor, an Event and a metric name a holder that no longer runs."""
    with capture_module_logs(lease_differences) as lines:
        async with node_at_work(tmp_path) as node:
            watch = node.scene.agent.usage_service._absent
            await until(lambda: ALICE in watch.last_seen)
            assert await node.differences() == []
            assert await node.metric("lease_without_container") == 0

            shutil.rmtree(node.machine.start(ALICE))
            await node.wait_differences(1)
            await node.server.until(node.server.events)
            status = await node.status()
            metric = await node.metric("lease_without_container")

            node.machine.start(ALICE)
            await node.wait_differences(0)
            assert await node.metric("lease_without_container") == 0

    [found], [event], [line] = status["leaseDifferences"], node.server.events(), lines
    assert (found["difference"], found["holder"]) == (
        "lease_without_container",
        "team/alice (main)",
    )
    assert "holds 3 shares of GPU" in found["reason"]
    assert metric == 1
    assert (event["reason"], event["regarding"]["name"]) == ("GPUShareWithoutContainer", "alice")
    assert event["note"] == found["reason"]
    assert (line["event"], line["container"]) == ("container of a lease absent", str(ALICE))
    result, finding, *_ = check_leases(read_report(status, StatusReport))
    assert (result, found["reason"] in finding) == (CheckResult.WARNING, True)
    show_status(read_report(status, StatusReport))
    assert f"team/alice: {found['reason']}" in " ".join(capsys.readouterr().out.split())


async def test_an_empty_cgroup_is_no_running_container(tmp_path: Path) -> None:
    """A container whose cgroup is left without a process does not run."""
    async with node_at_work(tmp_path) as node:
        events = node.machine.start(ALICE) / "cgroup.events"
        events.write_text("populated 1\nfrozen 0\n")
        await until(lambda: ALICE in node.scene.agent.usage_service._absent.last_seen)
        events.write_text("populated 0\nfrozen 0\n")
        await node.wait_differences(1)


async def test_use_without_a_lease_is_a_difference(tmp_path: Path) -> None:
    """Unauthorized use is in status, doctor and metric for as long as it lasts."""
    async with node_at_work(tmp_path) as node, running() as process:
        gpu = node.scene.node.gpu(0)
        container = node.machine.add_container_process(process.pid, MALLORY)
        node.scene.node.start_process(gpu, SimProcess(process.pid, 100 * MIB))
        await node.wait_differences(1)
        await node.server.until(node.server.events)
        status, metric = await node.status(), await node.metric("use_without_lease")

        node.scene.node.end_process(gpu, process.pid)
        await node.wait_differences(0)
        assert await node.metric("use_without_lease") == 0

    [found], [event] = status["leaseDifferences"], node.server.events()
    assert (found["difference"], found["holder"]) == ("use_without_lease", str(MALLORY))
    assert found["podUid"] == container.pod_uid
    assert found["reason"] == event["note"]
    assert metric == 1
    assert check_leases(read_report(status, StatusReport))[0] is CheckResult.WARNING


async def test_a_container_that_was_never_seen_is_unknown(tmp_path: Path) -> None:
    """A holder whose container was never seen to run is not reported."""
    async with node_at_work(tmp_path) as node:
        await node.scene.kubelet.admit(pod_of(BOB, 1))
        await node.scene.wait_holders()
        await until(lambda: ALICE in node.scene.agent.usage_service._absent.last_seen)
        shutil.rmtree(node.machine.start(ALICE))
        await node.wait_differences(1)
        assert [difference["holder"] for difference in await node.differences()] == [str(ALICE)]
