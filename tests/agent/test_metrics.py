"""Monitoring of a whole agent: pages over real HTTP, read as Prometheus reads them."""

import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from metagpu import __version__
from metagpu.core.contracts.host import ProcessDetails, ProcessIdentity
from metagpu.core.model.gpu import MIB
from metagpu.core.model.shares import Fault, Holder
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.plugins.http import server
from metagpu.plugins.http.address import HttpTiming, ListenAddress
from metagpu.plugins.metrics.exposition import PageRenderer
from metagpu.plugins.metrics.families import FAMILIES
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import AdmissionError, SimKubelet, SimPod
from metagpu.sim.machine.containers import SimHost
from metagpu.sim.machine.gpu import SimProcess
from tests.agent.test_daemon import command_line, daemon
from tests.core.usage.test_enforcer import STUBBORN
from tests.plugins.http.rig import asked
from tests.plugins.metrics.rig import Page, labels_of, page_at
from tests.rigs.agent import METAGPU, QUICK, UNHURRIED, Scene, agent_at_work
from tests.rigs.host import running
from tests.rigs.logs import capture_module_logs
from tests.rigs.mig import a_node, on_demand_pool
from tests.rigs.waiting import until

ANY = ListenAddress("127.0.0.1", 0)
ALICE = Holder("default", "alice", "main")
NAMES = {"namespace": "default", "pod": "alice", "container": "main"}
HARD = """
version: metagpu/v1
health: {quietPeriod: 100ms, rescanPeriod: 100ms}
pools:
  - name: all
    memoryEnforcement: {policy: kill, headroom: 1Gi, period: 50ms, grace: 0s, stopTimeout: 50ms}
    backends: [{backend: fraction, sharesPerGpu: 10}]
"""


async def port_of(scene: Scene) -> int:
    """Return the port of the metrics server, once it listens."""
    assert scene.agent.exporter is not None
    server = scene.agent.exporter.server

    async def listens() -> bool:
        return server.port != 0

    await until(listens, deadline=30)
    return server.port


async def page_of(scene: Scene) -> Page:
    """Scrape the metrics once."""
    return await page_at(await port_of(scene))


async def page_when(scene: Scene, is_so: Callable[[Page], bool]) -> Page:
    """Scrape until a page fulfils a condition."""
    pages = []

    async def look() -> bool:
        pages.append(await page_of(scene))
        return is_so(pages[-1])

    await until(look, deadline=30)
    return pages[-1]


async def test_a_node_and_a_pod(tmp_path: Path) -> None:
    """The page has the node's GPUs, holders and use, and the results of the kubelet's calls."""
    machine = SimHost(tmp_path)
    scene = agent_at_work(tmp_path, host=machine.host, metrics=ANY)

    async with scene as live_scene, running() as process:
        await live_scene.until(20, 20)
        await live_scene.kubelet.admit(SimPod.single("alice", {METAGPU: 3}))
        await live_scene.wait_holders()
        [state] = [gpu for gpu in live_scene.agent.registry.snapshot.gpus.values() if gpu.leases]
        machine.add_container_process(process.pid, ALICE)
        live_scene.node.start_process(
            live_scene.node.gpu(state.gpu.index), SimProcess(process.pid, 100 * MIB)
        )
        of_alice = {**NAMES, **labels_of(state.gpu)}
        used = "metagpu_container_memory_used_bytes"
        page = await page_when(
            live_scene, lambda page: page.values(used, **of_alice) == [100 * MIB]
        )

    assert page.value("metagpu_build_info", version=__version__) == 1
    assert page.value("metagpu_resource_capacity_shares", resource=METAGPU) == 20
    assert page.value("metagpu_resource_free_shares", resource=METAGPU) == 17
    assert page.value("metagpu_resource_registered", resource=METAGPU) == 1
    assert page.value("metagpu_container_shares", resource=METAGPU, **of_alice) == 3
    assert page.value("metagpu_container_memory_share_bytes", **of_alice) == 12288 * MIB
    assert page.value("metagpu_gpu_memory_used_bytes", **labels_of(state.gpu)) == 100 * MIB
    calls = {"resource": METAGPU, "call": "Allocate"}
    assert page.value("metagpu_kubelet_calls_total", outcome="answered", **calls) == 1
    assert page.value("metagpu_kubelet_call_duration_seconds_count", call="Allocate") == 1
    assert page.value("metagpu_kubelet_registrations_total", resource=METAGPU) == 1
    assert page.value("metagpu_kubelet_restarts_total") == 0
    assert page.value("metagpu_nvml_up") == 1
    assert page.value("process_resident_memory_bytes") > 0


async def test_a_scrape_reads_no_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scrape has the memory of a process, and leaves its details to the reports of people."""
    machine, described = SimHost(tmp_path), []
    describe = machine.host.describe

    async def note(
        who: Collection[ProcessIdentity],
    ) -> Mapping[ProcessIdentity, ProcessDetails]:
        described.append(len(who))
        return await describe(who)

    monkeypatch.setattr(machine.host, "describe", note)
    scene = agent_at_work(tmp_path, "a100-40gb:1", host=machine.host, metrics=ANY)
    async with scene as live_scene, running() as process:
        await live_scene.until(10, 10)
        await live_scene.kubelet.admit(SimPod.single("alice", {METAGPU: 3}))
        await live_scene.wait_holders()
        machine.add_container_process(process.pid, ALICE)
        live_scene.node.start_process(live_scene.node.gpu(0), SimProcess(process.pid, 100 * MIB))
        used = "metagpu_container_memory_used_bytes"
        await page_when(live_scene, lambda page: page.values(used) == [100 * MIB])
        assert described == []
        report = await live_scene.agent.usage_service.report()

    [container] = report.containers
    assert container.gpus[0].known_processes[0].command
    assert described == [1]


async def test_faults_are_counted_and_recoveries_too(tmp_path: Path) -> None:
    """An XID is counted by its number, fatal or not; a fault by its kind while the GPU is out."""
    # No device check beside the events: a check at that moment finds the GPU lost before its XID.
    config = QUICK.replace("rescanPeriod: 100ms", "rescanPeriod: 1h")
    async with agent_at_work(tmp_path, config=config, metrics=ANY) as scene:
        await scene.until(20, 20)
        first = labels_of(scene.state(0).gpu)
        scene.node.raise_xid(scene.node.gpu(0), 31)
        scene.node.raise_xid(scene.node.gpu(0), 79)
        page = await page_when(
            scene,
            lambda page: page.value("metagpu_gpu_faults_total", fault=Fault.XID, **first) == 1,
        )
        assert page.value("metagpu_gpu_healthy", **first) == 0
        assert page.value("metagpu_gpu_fault", fault=Fault.XID, **first) == 1
        assert page.value("metagpu_gpu_xid_errors_total", xid="31", **first) == 1
        assert page.value("metagpu_gpu_xid_errors_total", xid="79", **first) == 1
        assert page.value("metagpu_resource_allocatable_shares", resource=METAGPU) == 10

        with pytest.raises(AdmissionError):
            await scene.kubelet.admit(SimPod.single("greedy", {METAGPU: 15}))
        scene.node.reset_gpu(scene.node.gpu(0))
        page = await page_when(
            scene, lambda page: page.value("metagpu_gpu_recoveries_total", **first) == 1
        )
        assert page.value("metagpu_gpu_healthy", **first) == 1
        assert sum(page.values("metagpu_gpu_faults_total")) == 1


async def test_dcgms_name_of_an_xid_outlives_the_gpu_and_ends_with_the_fault(
    tmp_path: Path,
) -> None:
    """`DCGM_FI_DEV_XID_ERRORS` says 79 while the GPU is off the bus, and 0 after its reset."""
    async with agent_at_work(tmp_path, metrics=ANY) as scene:
        await scene.until(20, 20)
        port = await port_of(scene)

        async def reads(code: int) -> bool:
            _, _, text = await asked(port, "/dcgm")
            last = "DCGM_FI_DEV_XID_ERRORS"
            return Page(text).values(last, gpu="0", err_code=str(code)) == [code]

        scene.node.raise_xid(scene.node.gpu(0), 79)
        await scene.until(20, 10)
        await until(partial(reads, 79), deadline=30)
        scene.node.reset_gpu(scene.node.gpu(0))
        await until(partial(reads, 0), deadline=30)


async def test_enforcement_is_counted(tmp_path: Path) -> None:
    """The warning and both signals are counted on their GPU."""
    machine = SimHost(tmp_path)
    scene = agent_at_work(tmp_path, "a100-40gb:1", HARD, host=machine.host, metrics=ANY)

    async with scene as live_scene, running(sys.executable, "-c", STUBBORN) as greedy:
        assert greedy.stdout is not None
        await greedy.stdout.receive()
        await live_scene.until(10, 10)
        await live_scene.kubelet.admit(SimPod.single("alice", {METAGPU: 1}))
        await live_scene.wait_holders()
        machine.add_container_process(greedy.pid, ALICE)
        live_scene.node.start_process(live_scene.node.gpu(0), SimProcess(greedy.pid, 20000 * MIB))
        with anyio.fail_after(30):
            await greedy.wait()
        signals = "metagpu_enforcement_signals_total"
        page = await page_when(live_scene, lambda page: page.value(signals, signal="SIGKILL") >= 1)

    assert page.value(signals, signal="SIGTERM") == 1
    assert page.value("metagpu_enforcement_warnings_total") >= 1


async def test_a_refused_configuration_is_a_metric(tmp_path: Path) -> None:
    """The last good configuration stays, and its time of load is a metric."""
    async with agent_at_work(tmp_path, metrics=ANY) as scene:
        await scene.until(20, 20)
        good = await page_of(scene)
        assert good.value("metagpu_config_last_reload_successful") == 1
        assert good.value("metagpu_config_last_reload_failure_timestamp_seconds") == 0
        assert good.labels("metagpu_config_info")["format"] == "metagpu/v1"

        await anyio.Path(scene.config_file).write_text("version: metagpu/v9\n")
        await scene.agent.reload()
        bad = await page_when(
            scene, lambda page: page.value("metagpu_config_last_reload_successful") == 0
        )
        assert bad.value("metagpu_config_reloads_total", outcome="rejected") >= 1
        assert bad.value("metagpu_config_last_reload_failure_timestamp_seconds") > 1e9
        taken = "metagpu_config_last_reload_success_timestamp_seconds"
        assert bad.value(taken) == good.value(taken)

        await anyio.Path(scene.config_file).write_text(QUICK)
        await scene.agent.reload()
        page = await page_of(scene)
        assert page.value("metagpu_config_last_reload_successful") == 1


async def test_instances_and_the_free_capacity_of_a_gpu(tmp_path: Path) -> None:
    """A pod's instance is counted as held, and the free capacity beside it is a metric."""
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    config = on_demand_pool("keepWarm: 1h", "1g.5gb, 2g.10gb, 7g.40gb")

    async with agent_at_work(tmp_path, node, config, metrics=ANY) as scene:
        await scene.until(1, 1, "nvidia.com/mig-7g.40gb")
        page = await page_of(scene)
        assert page.value("metagpu_mig_largest_placeable_slices") == 8
        assert page.value("metagpu_mig_fragmentation_ratio") == 0
        assert not page.values("metagpu_mig_instances")
        free = "metagpu_gpu_resource_free_shares"
        assert page.value(free, resource="nvidia.com/mig-1g.5gb") == 7

        asking = SimPod.single("train", {"nvidia.com/mig-2g.10gb": 1})
        await scene.kubelet.admit(asking)
        await scene.wait_holders()
        page = await page_when(
            scene,
            lambda page: page.value("metagpu_mig_instances", profile="2g.10gb", state="held") == 1,
        )
        assert page.value("metagpu_mig_largest_placeable_slices") == 2
        assert page.value("metagpu_mig_free_slices") == 6
        assert page.value(free, resource="nvidia.com/mig-1g.5gb") == 5
        assert page.value(free, resource="nvidia.com/mig-7g.40gb") == 0


async def test_probes(tmp_path: Path) -> None:
    """The daemon is alive without a kubelet, and ready while every resource is registered."""
    kubelet = SimKubelet(tmp_path / "device-plugins", pod_resources=tmp_path / "pod-resources.sock")

    async with agent_at_work(tmp_path, kubelet=kubelet, metrics=ANY) as scene:
        port = await port_of(scene)
        await scene.wait_snapshot(lambda now: bool(now.offers))
        assert (await asked(port, "/healthz"))[::2] == (200, "ok\n")
        assert (await asked(port, "/readyz"))[::2] == (
            503,
            f"{METAGPU} is not registered with the kubelet\n",
        )

        async def ready() -> bool:
            return (await asked(port, "/readyz"))[::2] == (200, "ok\n")

        async def unready() -> bool:
            return not await ready()

        async with kubelet.running():
            await until(ready, deadline=30)
        await until(unready, deadline=30)
        assert (await asked(port, "/healthz"))[0] == 200


async def test_a_daemon_with_an_ended_part_is_not_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The liveness probe fails when a main part of the daemon has ended."""

    async def end_at_once(_: object) -> None:
        """Return at once from a part that should never end."""

    monkeypatch.setattr("metagpu.core.layout.backend_runner.BackendRunner.run", end_at_once)
    async with agent_at_work(tmp_path, metrics=ANY) as scene:
        port = await port_of(scene)
        assert (await asked(port, "/healthz"))[::2] == (
            503,
            "the main task backends has ended: it returned\n",
        )
        status = await scene.status()
        assert status["endedTasks"] == {"backends": "it returned"}


async def test_nvml_that_hangs_delays_a_page_a_little(tmp_path: Path) -> None:
    """While NVML hangs, a page has everything but the processes of the GPUs."""
    timing = replace(UNHURRIED, nvml_timeout=0.0)
    async with agent_at_work(tmp_path, metrics=ANY, metrics_timing=timing) as scene:
        await scene.until(20, 20)
        scene.node.hang_gpu(scene.node.gpu(0), 600.0)
        page = await page_of(scene)

        assert page.value("metagpu_resource_capacity_shares", resource=METAGPU) == 20
        assert page.values("metagpu_usage_timestamp_seconds") == []
        scene.node.hang_gpu(scene.node.gpu(0), 0.0)
        await page_when(scene, lambda page: bool(page.values("metagpu_usage_timestamp_seconds")))


async def test_a_fault_in_a_page_is_no_reason_to_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error in a page the probes still succeed, and the next page works."""

    def fail(*_: object) -> bytes:
        raise ZeroDivisionError

    async with agent_at_work(tmp_path, metrics=ANY) as scene:
        port = await port_of(scene)
        with monkeypatch.context() as broken, capture_module_logs(server):
            broken.setattr(PageRenderer, "render", fail)
            assert (await asked(port))[::2] == (
                500,
                "metagpu failed to render the page; its log has the details\n",
            )
            assert (await asked(port, "/healthz"))[0] == 200
        assert (await asked(port))[0] == 200


async def test_without_nvml(tmp_path: Path) -> None:
    """Without NVML the page is there and reports the missing driver."""
    async with agent_at_work(tmp_path, drivers=False, metrics=ANY) as scene:
        page = await page_when(scene, lambda page: page.value("metagpu_nvml_up") == 0)
        assert page.values("metagpu_gpu_healthy") == []
        preparation = scene.agent.preparation

        async def has_looked() -> bool:  # at NVML, which is not read at first
            await preparation.look()
            return preparation.problems[0].startswith("the driver: the NVIDIA driver is not loaded")

        await until(has_looked)
        status, _, body = await asked(await port_of(scene), "/readyz")
        assert (status, body.splitlines()) == (503, list(preparation.problems))


async def test_the_api_server_has_metrics(tmp_path: Path) -> None:
    """The page has the API server's state and the result of each of its uses."""
    server = SimApiServer()
    server.add_node("gpu-1")

    async with server.running():
        joins = ClusterSettings(
            "gpu-1", server.kubeconfig(tmp_path), features=frozenset([Feature.LABELS])
        )
        async with agent_at_work(tmp_path, cluster_settings=joins, metrics=ANY) as scene:
            page = await page_when(
                scene, lambda page: page.value("metagpu_api_server_connected") == 1
            )
            assert page.value("metagpu_api_server_feature_healthy", feature="labels") == 1
            assert page.value("metagpu_api_server_events_dropped_total", regarding="node") == 0


async def test_callers_of_one_moment_share_a_page(tmp_path: Path) -> None:
    """Scrapes at the same moment share one reading of the GPUs and the snapshot."""
    timing = HttpTiming(page_age=3600.0)
    async with agent_at_work(tmp_path, metrics=ANY, http_timing=timing) as scene:
        port = await port_of(scene)
        pages = set()

        async def scrape() -> None:
            pages.add((await asked(port))[2])

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(scrape)
        assert len(pages) == 1


async def test_only_known_metrics_are_served(tmp_path: Path) -> None:
    """The page has all families of the table, and otherwise only those of the process."""
    async with agent_at_work(tmp_path, metrics=ANY) as scene:
        page = await page_of(scene)
        status, headers, _ = await asked(await port_of(scene))

    names = {family.name.removesuffix("_total") for family in FAMILIES}
    others = page.families.keys() - names
    assert names <= page.families.keys()
    assert {name.split("_")[0] for name in others} == {"metagpu", "process"}
    assert {name for name in others if name.startswith("metagpu")} == {
        *("metagpu_mig_instances", "metagpu_mig_free_slices", "metagpu_mps_control_daemon_up"),
        *("metagpu_mig_largest_placeable_slices", "metagpu_mig_fragmentation_ratio"),
    }
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")


async def test_the_daemon_serves_at_the_configured_address(tmp_path: Path) -> None:
    """`run --metrics` and METAGPU_METRICS set the address, which the log names."""
    async with daemon(tmp_path, QUICK, "--metrics", "127.0.0.1:0") as live_daemon:
        assert live_daemon.process.stderr is not None
        seen = b""
        with anyio.fail_after(30):
            while b"metrics served" not in seen or not seen.endswith(b"\n"):
                seen += await live_daemon.process.stderr.receive()
        [line] = [line for line in seen.splitlines() if b"metrics served" in line]
        port = int(line.split(b'"address": "127.0.0.1:')[1].split(b'"')[0])
        await live_daemon.until(20)
        page = await page_at(port)
        assert page.value("metagpu_resource_capacity_shares", resource=METAGPU) == 20
        assert await live_daemon.stop() == 0


async def test_a_daemon_without_metrics_does_not_load_their_library(tmp_path: Path) -> None:
    """The daemon loads neither library of the metrics by default."""
    script = (
        "import sys\n"
        "import metagpu.agent.agent\n"
        "from metagpu.cli.metagpu import main\n"
        "import anyio\n"
        "def stop(*_, **__):\n"
        "    print(*sorted({'h11', 'prometheus_client'} & set(sys.modules)))\n"
        "    raise SystemExit(0)\n"
        "anyio.run = stop\n"
        "main(sys.argv[1:])\n"
    )
    arguments = command_line(tmp_path)[3:]
    await anyio.Path(tmp_path / "metagpu.yaml").write_text(QUICK)

    async def loaded(*more: str) -> list[bytes]:
        done = await anyio.run_process([sys.executable, "-c", script, *arguments, *more])
        return done.stdout.split()

    assert await loaded() == []
    assert await loaded("--metrics", "127.0.0.1:0") == [b"h11", b"prometheus_client"]
