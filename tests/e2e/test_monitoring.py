"""A real Prometheus scrapes a daemon: metrics, rules and dashboards."""

import json
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from anyio import to_thread
from msgspec.structs import replace

from metagpu.core.model.gpu import MIB
from metagpu.core.model.request_errors import FractionSplit
from metagpu.core.model.shares import Holder, ResourceName
from metagpu.kubectl.program import main
from metagpu.plugins.http.address import ListenAddress
from metagpu.sim.kubelet.kubelet import SimPod
from metagpu.sim.machine.containers import SimHost
from metagpu.sim.machine.gpu import SimProcess
from tests.agent.test_metrics import port_of
from tests.e2e.cluster import Cluster
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.prometheus import Prometheus, backfill, prometheus_of, promtool, provide
from tests.e2e.rig.waiting import wait_for
from tests.plugins.http.rig import asked
from tests.plugins.metrics.test_families import DOCS
from tests.rigs.agent import METAGPU, Scene, agent_at_work
from tests.rigs.host import running
from tests.rigs.mig import a_node
from tests.test_alerts import ALERTS, RULES
from tests.test_dashboards import expressions

MIG = "nvidia.com/mig-1g.5gb"
CONFIG = """
version: metagpu/v1
health: {quietPeriod: 100ms, rescanPeriod: 100ms}
pools:
  - name: instances
    gpus: {index: 0}
    backends: [{backend: mig, keepWarm: 1h, profiles: [1g.5gb, 2g.10gb]}]
  - name: parts
    memoryEnforcement: {policy: warn}
    backends: [{backend: fraction, sharesPerGpu: 10}]
"""
PLACEHOLDERS = {
    "$__rate_interval": "20s",
    "$__range": "20s",
    "$node": ".*",
    "$namespace": ".*",
}
[JOINED] = re.findall(r"^label_replace.* DCGM_.*$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
"""The query of the documentation that joins our series with those of DCGM."""
OF_DCGM = (
    "DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE + DCGM_FI_DEV_FB_RESERVED)",
    'avg by (hostname) (DCGM_FI_DEV_GPU_TEMP{hostname!=""})',
    'avg by (Hostname) (DCGM_FI_DEV_GPU_TEMP{Hostname!=""})',
    'DCGM_FI_DEV_GPU_UTIL{exported_pod!=""}',
    'max by (gpu, UUID, err_msg) (DCGM_FI_DEV_XID_ERRORS{err_code=~"48|63|64|79|94|95|119|120"})',
)
"""Queries and an alert that people have for dcgm-exporter."""
SOON_S = 40.0
HOUR = 3600
LINTS = 3
"""The status of `promtool check metrics` for metrics that it can read and would name otherwise."""
NVIDIAS = {
    'counter metrics should have "_total" suffix',
    "label names should be written in 'snake_case' not 'camelCase'",
    "metric name should not include type 'counter'",
}
"""What promtool would do otherwise in the names of dcgm-exporter."""


@pytest.fixture(autouse=True, scope="module")
def prometheus_there() -> None:
    """Skip where neither this machine nor Debian's archive has Prometheus."""
    try:
        provide("prometheus")
    except RigError as error:
        pytest.skip(str(error))


@asynccontextmanager
async def at_work(tmp_path: Path) -> AsyncIterator[Scene]:
    """Run a daemon of a GPU with MIG and one with shares, with a busy pod on each."""
    machine = SimHost(tmp_path)
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}, {model: a100-40gb}")
    address = ListenAddress("127.0.0.1", 0)
    scene = agent_at_work(tmp_path, node, CONFIG, host=machine.host, metrics=address)
    async with scene as live_scene, running() as process:
        await live_scene.until(10, 10)
        await live_scene.until(7, 7, MIG)
        for name, team, resource in (("a", "red", METAGPU), ("b", "blue", MIG)):
            pod = SimPod.single(name, {resource: 1})
            await live_scene.kubelet.admit(replace(pod, namespace=team))
        await live_scene.wait_holders()
        machine.add_container_process(process.pid, Holder("red", "a", "main"))
        live_scene.node.start_process(
            live_scene.node.gpu(1), SimProcess(process.pid, 100 * MIB, sm=40)
        )
        live_scene.agent.context.call_stats.of_resource(ResourceName(METAGPU)).refusals[
            FractionSplit
        ] += 1
        yield live_scene


async def test_promtool_accepts_both_pages(tmp_path: Path) -> None:
    """Our page has no lint at all; that of dcgm-exporter's names can be read."""
    async with at_work(tmp_path) as scene:
        port = await port_of(scene)
        _, _, own = await asked(port)
        _, _, dcgm = await asked(port, "/dcgm")
    assert 'GPU_I_PROFILE="1g.5gb"' in dcgm
    assert promtool("check", "metrics", feed=own) == (0, "")
    status, output = promtool("check", "metrics", feed=dcgm)
    assert (status, {line.split(" ", 1)[1] for line in output.splitlines()}) == (LINTS, NVIDIAS)


async def test_prometheus_scrapes_rules_and_dashboards(tmp_path: Path) -> None:
    """Both pages are scraped, each rule is evaluated, and each query of a dashboard has data.

    So have queries that are written for dcgm-exporter.
    """
    data = tmp_path / "prometheus"
    data.mkdir()
    async with at_work(tmp_path) as scene:
        host = f"127.0.0.1:{await port_of(scene)}"
        scene.node.raise_xid(scene.node.gpu(1), 31)
        scene.node.raise_xid(scene.node.gpu(1), 63)

        def measure() -> None:
            with prometheus_of(data, {"/metrics": host, "/dcgm": host}, RULES) as prometheus:
                _await_data(prometheus)

        await to_thread.run_sync(measure)


def test_a_report_adds_up_days_with_a_restart_and_a_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A namespace's hours are those that it held, whatever restarted; what nobody scraped is said.

    `red` holds half a GPU for two days, in which the daemon restarts after 30 hours and nobody
    scrapes for five; `blue` holds two GPUs for six hours.
    """
    end = int(time.time()) // HOUR * HOUR
    begin = end - 48 * HOUR
    minutes = [
        when
        for when in range(begin, end + 1, 60)
        if not begin + 10 * HOUR < when <= begin + 15 * HOUR
    ]
    restart = begin + 30 * HOUR
    six = [when for when in minutes if begin + 20 * HOUR <= when <= begin + 26 * HOUR]
    backfill(
        tmp_path,
        {
            'metagpu_build_info{node="a"}': [(when, 1) for when in minutes],
            'metagpu_namespace_gpu_seconds_total{namespace="red",node="a"}': [
                (when, (when - (begin if when < restart else restart)) / 2) for when in minutes
            ],
            'metagpu_namespace_gpu_seconds_total{namespace="kube-system",'
            'exported_namespace="blue",node="a"}': [(when, (when - six[0]) * 2) for when in six],
            'metagpu_container_utilization_ratio{namespace="red",pod="p",node="a"}': [
                (when, 0.25) for when in minutes
            ],
            'metagpu_namespace_memory_held_bytes{namespace="red",node="a"}': [
                (when, 20 * 2**30) for when in minutes
            ],
        },
    )
    times = [f"{datetime.fromtimestamp(when, UTC):%Y-%m-%dT%H:%M}" for when in (begin, end)]
    with prometheus_of(tmp_path, {}, RULES) as prometheus:
        line = ["report", "namespaces", "--from", times[0], "--to", times[1], "-o", "json"]
        assert main([*line, "--prometheus", f"http://127.0.0.1:{prometheus.port}"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    blue, red = found["items"]

    assert (blue["namespace"], red["namespace"]) == ("blue", "red")
    assert blue["heldGpuHours"] == pytest.approx(12, rel=0.01)
    assert red["heldGpuHours"] == pytest.approx(43 / 2, rel=0.01)
    assert red["usedGpuHours"] == pytest.approx(43 / 4, rel=0.01)
    assert red["heldGiBHours"] == pytest.approx(43 * 20, rel=0.01)
    assert [time["hours"] for time in found["missing"]] == [pytest.approx(5, abs=0.2)]
    assert "of 48 hours between" in err


def test_prometheus_names_the_pods_of_a_node(cluster: Cluster, tmp_path: Path) -> None:
    """A pod of a real kubelet has its name and namespace in Prometheus, and its namespace pays."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    cluster.repair("--metrics", address)
    held = 'metagpu_container_shares{namespace="cnvrg",pod="paying"}'
    paid = 'increase(metagpu_namespace_gpu_seconds_total{namespace="cnvrg"}[5s])'
    cluster.run("paying", 50)
    with prometheus_of(tmp_path, {"/metrics": address}, RULES) as prometheus:

        def pays() -> bool:
            shares = [float(document["value"][1]) for document in prometheus.query(held)]
            seconds = [float(document["value"][1]) for document in prometheus.query(paid)]
            if shares != [50] or not seconds or not 1.5 < seconds[0] < 3.5:
                raise RigError(f"{shares} shares and {seconds} of 2.5 GPU seconds in 5 s")
            return True

        wait_for("half a GPU to be paid for", pays, within_s=SOON_S)


def _await_data(prometheus: Prometheus) -> None:
    """Wait until each query of the dashboards has a series, and check rules and labels."""
    queries = {query for found in expressions().values() for query in found} | {*OF_DCGM}

    def all_have_data() -> bool:
        if missing := [query for query in queries if not prometheus.query(_filled(query))]:
            raise RigError(f"no data for {missing}")
        return True

    wait_for("data for each query", all_have_data, within_s=SOON_S, pause_s=1)

    [power] = prometheus.query('DCGM_FI_DEV_POWER_USAGE{gpu="1"}')
    labels = power["metric"]
    holder = labels["exported_namespace"], labels["exported_pod"]
    assert (*holder, labels["node"]) == ("red", "a", "gpu-1")
    [used] = prometheus.query('metagpu_container_memory_used_bytes{namespace="red"}')
    assert used["metric"]["pod"] == "a"
    assert float(used["value"][1]) == 100 * MIB
    [joined] = prometheus.query(JOINED)
    assert (joined["metric"]["namespace"], joined["metric"]["pod"]) == ("blue", "b")
    states = prometheus.rules()
    assert states.keys() == ALERTS.keys()
    assert set(states.values()) <= {"inactive", "pending", "firing"}
    assert states["MetagpuDown"] == "inactive"


def _filled(query: str) -> str:
    """Return a query as Grafana sends it."""
    return re.sub(r"\$(__)?\w+", lambda own_match: PLACEHOLDERS[own_match[0]], query)
