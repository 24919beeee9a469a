"""The size of a page, and what hardware adds to it."""

import gzip
from functools import partial
from pathlib import Path

import pynvml
import pytest
from msgspec.structs import replace

from metagpu.core.model.gpu import MIB
from metagpu.core.model.request_errors import RequestError
from metagpu.core.model.shares import ResourceName
from metagpu.nvml.driver import NvmlDriver
from metagpu.plugins.cluster.settings import Feature
from metagpu.sim.kubelet.kubelet import SimPod
from metagpu.sim.machine.gpu import SimProcess
from metagpu.sim.machine.spec import build_node
from metagpu.sim.nvml.library import SimLibrary
from tests.agent.test_metrics import ANY, page_of, page_when, port_of
from tests.plugins.http.rig import asked, fetched
from tests.plugins.metrics.rig import Page, labels_of
from tests.rigs.agent import METAGPU, UNHURRIED, Scene, agent_at_work
from tests.rigs.mig import a_node, on_demand_pool

pytestmark = pytest.mark.long

MOST = 1000
"""Series of a node of 8 GPUs and 40 pods."""
OF_API_SERVER = len(Feature) - 1 + 5
"""Series where an API server is used: each feature, of which two exclude each other, and others."""
GPUS, PODS = 8, 40
EVERY_PROFILE = "1g.5gb, 1g.5gb+me, 1g.10gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb"
WARM = "keepWarm: 1h"
SLICE = "example.com/slice"
WHOLE = "nvidia.com/gpu"
MIXED = """
version: metagpu/v1
pools:
  - name: all
    backends:
      - {backend: mig, profiles: [1g.5gb, 2g.10gb, 3g.20gb], keepWarm: 1h}
      - {backend: timeslice, replicas: 4, resource: example.com/slice}
      - {backend: fraction, sharesPerGpu: 10}
"""
EVERY_KIND = MIXED.replace("1g.5gb, 2g.10gb, 3g.20gb", EVERY_PROFILE)
WITHOUT_MIG = """
version: metagpu/v1
pools:
  - name: cut
    gpus: {index: [0, 1, 2, 3]}
    backends:
      - {backend: fraction, sharesPerGpu: 10}
      - {backend: timeslice, replicas: 4, resource: example.com/slice}
      - {backend: whole}
  - name: large
    gpus: {index: [4, 5, 6, 7]}
    backends:
      - {backend: fraction, sharesPerGpu: 2, resource: example.com/half}
      - {backend: timeslice, replicas: 8, resource: example.com/eighth}
"""
NINE_RESOURCES = "version: metagpu/v1\npools:\n" + "".join(
    f"""
  - name: {pool}
    gpus: {{index: {gpus}}}
    backends:
      - {{backend: fraction, sharesPerGpu: 10, resource: example.com/fraction-{pool}}}
      - {{backend: timeslice, replicas: 8, resource: example.com/slice-{pool}}}
      - {{backend: whole, resource: example.com/whole-{pool}}}
"""
    for pool, gpus in {"a": [0, 1, 2], "b": [3, 4, 5], "c": [6, 7]}.items()
)
HALF, EIGHTH = "example.com/half", "example.com/eighth"


def of_mig(**counts: int) -> dict[str, int]:
    """Return numbers of instances by resource; `g1` is the profile 1g.5gb, and so on."""
    sizes = {"g1": "1g.5gb", "g2": "2g.10gb", "g3": "3g.20gb", "me": "1g.5gb.me", "g4": "4g.20gb"}
    return {f"nvidia.com/mig-{sizes[name]}": count for name, count in counts.items()}


def of_pools(**counts: int) -> dict[str, int]:
    """Return numbers of pods by resource, as many in each of the three pools."""
    return {f"example.com/{name}-{pool}": n for name, n in counts.items() for pool in "abc"}


def has_free(scene: Scene, resource: str) -> bool:
    """Return whether the kubelet could admit one more pod."""
    held = sum(pod.request(resource) for pod in scene.kubelet.pods)
    return scene.kubelet.allocatable().get(resource, 0) > held


async def test_a_full_node_has_a_thousand_series_at_most(tmp_path: Path) -> None:
    """With 8 GPUs and 40 pods in 4 namespaces the page has at most 1000 series."""
    async with agent_at_work(tmp_path, f"a100-40gb:{GPUS}", metrics=ANY) as scene:
        await scene.until(80, 80)
        for number in range(PODS):
            pod = SimPod.single(f"pod-{number}", {METAGPU: 2})
            await scene.kubelet.admit(replace(pod, namespace=f"team-{number % 4}"))
        await scene.wait_holders()
        page = await page_of(scene)
        plain = await fetched(await port_of(scene), "/metrics")
        small = await fetched(await port_of(scene), "/metrics", "accept-encoding: gzip\r\n")

    assert len(page.values("metagpu_container_shares")) == PODS
    assert len(page.values("metagpu_gpu_power_watts")) == GPUS
    assert len(page.samples) <= MOST
    assert len(page.values("metagpu_namespace_gpu_seconds_total")) == 4
    assert plain.headers.get("content-encoding") is None
    assert small.headers["content-encoding"] == "gzip"
    assert Page(gzip.decompress(small.body).decode()).samples.keys() == page.samples.keys()
    assert len(small.body) < len(plain.body) / 8


async def test_a_full_node_with_mig_has_a_thousand_series_at_most(tmp_path: Path) -> None:
    """The same node with MIG instances on demand stays within the same number."""
    node = await a_node(tmp_path, ", ".join(["{model: a100-40gb, mig: true}"] * GPUS))
    config = on_demand_pool("keepWarm: 1h", "1g.5gb, 2g.10gb, 7g.40gb")
    resource = "nvidia.com/mig-1g.5gb"
    async with agent_at_work(tmp_path, node, config, metrics=ANY) as scene:
        await scene.until(7 * GPUS, 7 * GPUS, resource)
        for number in range(PODS):
            pod = SimPod.single(f"pod-{number}", {resource: 1})
            await scene.kubelet.admit(replace(pod, namespace=f"team-{number % 4}"))
        await scene.wait_holders()
        page = await page_when(
            scene, lambda page: len(page.values("metagpu_container_mig_info")) == PODS
        )
        labels = page.labels("metagpu_container_mig_info", pod="pod-0")
        [gpu] = [gpu for gpu in node.gpus if gpu.id == labels["uuid"]]
        program = SimProcess(7, 100 * MIB, gi=int(labels["gpu_instance"]), ci=0)
        scene.node.start_process(gpu, program)
        _, _, body = await asked(await port_of(scene), "/dcgm")
        of_dcgm = Page(body)
    used, profile = "DCGM_FI_DEV_FB_USED", {"GPU_I_PROFILE": labels["profile"]}
    instance = {"UUID": gpu.id, "GPU_I_ID": labels["gpu_instance"], "pod": "pod-0"}
    assert of_dcgm.values(used, **instance, **profile) == [100]
    assert len(of_dcgm.values(used, **profile)) == PODS
    assert len(of_dcgm.values("DCGM_FI_DEV_POWER_USAGE", GPU_I_ID="")) == GPUS
    assert len(of_dcgm.samples) <= MOST
    assert labels["mig_uuid"].startswith("MIG-")
    assert labels["profile"] == "1g.5gb"
    assert labels["gpu_instance"].isdecimal()
    assert len(page.samples) <= MOST


@pytest.mark.parametrize(
    ("with_mig", "config", "resources", "pods"),
    [
        (8, on_demand_pool(WARM, "1g.5gb, 2g.10gb, 3g.20gb"), 3, of_mig(g3=2, g2=6, g1=32)),
        (8, on_demand_pool(WARM, EVERY_PROFILE), 7, of_mig(g4=2, g3=2, g2=4, me=2, g1=30)),
        (5, MIXED, 5, {**of_mig(g3=2, g2=4, g1=18), METAGPU: 12, SLICE: 4}),
        (5, MIXED, 5, {**of_mig(g3=1, g2=3, g1=12), METAGPU: 20, SLICE: 4}),
        (5, EVERY_KIND, 9, {**of_mig(g4=1, g3=1, g2=2, me=2, g1=18), METAGPU: 12, SLICE: 4}),
        (5, EVERY_KIND, 9, {**of_mig(g3=1, g2=2, me=1, g1=12), METAGPU: 20, SLICE: 4}),
        (0, WITHOUT_MIG, 5, {METAGPU: 20, WHOLE: 1, SLICE: 4, HALF: 4, EIGHTH: 11}),
        (0, NINE_RESOURCES, 9, {"example.com/whole-a": 1, **of_pools(fraction=7, slice=6)}),
    ],
    ids=[
        *("three profiles", "every profile", "mostly MIG", "mostly fractions"),
        *("every profile and slices", "every profile and fractions"),
        *("without MIG", "without MIG, nine resources"),
    ],
)
async def test_sizes_and_refusals_stay_within_the_number(
    tmp_path: Path, with_mig: int, config: str, resources: int, pods: dict[str, int]
) -> None:
    """With pods of all sizes and backends, and twelve reasons of refusals, the bound holds."""
    gpus = ["{model: a100-40gb, mig: true}"] * with_mig + ["{model: a100-40gb}"] * (GPUS - with_mig)
    node = await a_node(tmp_path, ", ".join(gpus))
    wanted = [resource for resource, count in pods.items() for _ in range(count)]
    assert len(wanted) == PODS
    async with agent_at_work(tmp_path, node, config, metrics=ANY) as scene:
        for number, resource in enumerate(wanted):
            await scene.kubelet.wait_for(partial(has_free, scene, resource))
            pod = SimPod.single(f"pod-{number}", {resource: 1})
            await scene.kubelet.admit(replace(pod, namespace=f"team-{number % 4}"))
        await scene.wait_holders()
        refused = scene.agent.context.call_stats.of_resource(ResourceName(wanted[0])).refusals
        refused.update(RequestError.__subclasses__()[:12])
        page = await page_of(scene)
    assert len(page.values("metagpu_container_shares")) == PODS
    assert len(page.values("metagpu_kubelet_refusals_total")) == 12
    assert len(page.values("metagpu_resource_capacity_shares")) == resources
    assert len(page.samples) + OF_API_SERVER <= MOST


async def test_sensors_and_their_dcgm_names_are_one_reading(tmp_path: Path) -> None:
    """Both pages have the load of a GPU, in their own units, and its last XID."""
    async with agent_at_work(tmp_path, metrics=ANY) as scene:
        await scene.until(20, 20)
        scene.node.start_process(scene.node.gpu(0), SimProcess(7, 100 * MIB, sm=100))
        scene.node.raise_xid(scene.node.gpu(0), 31)
        first = labels_of(scene.state(0).gpu)
        power, xids = "metagpu_gpu_power_watts", "metagpu_gpu_xid_events_total"
        await page_when(
            scene,
            lambda page: (
                page.values(power, **first) == [400]
                and page.values(xids, severity="application", **first) == [1]
            ),
        )
        status, _, body = await asked(await port_of(scene), "/dcgm")
        page = Page(body)

    assert status == 200
    assert page.value("DCGM_FI_DEV_POWER_USAGE", gpu="0") == 400
    assert page.value("DCGM_FI_DEV_FB_USED", gpu="0") == 100
    assert page.value("DCGM_FI_DEV_XID_ERRORS", gpu="0") == 31
    assert page.value("DCGM_FI_DEV_XID_ERRORS", gpu="1") == 0


async def test_a_gpu_that_hangs_costs_no_other_its_sensors(tmp_path: Path) -> None:
    """While one GPU hangs the others have their sensors, and its call counts as overdue."""
    timing = replace(UNHURRIED, nvml_timeout=0.2)
    node = build_node("a100-40gb:2")
    driver = NvmlDriver(SimLibrary(node), deadline=0.5)
    scene = agent_at_work(tmp_path, node, driver=driver, metrics=ANY, metrics_timing=timing)
    async with scene as live_scene:
        await live_scene.wait_snapshot(lambda now: len(now.gpus) == 2)
        live_scene.node.hang_gpu(live_scene.node.gpu(0), 60.0)
        power, overdue = "metagpu_gpu_power_watts", "metagpu_nvml_overdue_calls"
        await page_when(
            live_scene,
            lambda page: (
                len(page.values(power)) == len(page.values(power, gpu="1")) == 1
                and page.value(overdue) >= 1
            ),
        )
        live_scene.node.hang_gpu(live_scene.node.gpu(0), 0.0)


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST])
async def test_a_lost_gpu_has_no_sensors(tmp_path: Path, code: int) -> None:
    """A lost GPU has no temperature, and its faults say why."""
    async with agent_at_work(tmp_path, metrics=ANY) as scene:
        await scene.until(20, 20)
        scene.node.gpu(0).failure = code
        degrees = "metagpu_gpu_temperature_celsius"
        await page_when(
            scene,
            lambda page: (
                page.values(degrees, gpu="1") == [32] and not page.values(degrees, gpu="0")
            ),
        )
