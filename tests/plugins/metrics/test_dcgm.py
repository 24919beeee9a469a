"""The page under dcgm-exporter's names."""

import re

import pytest
from msgspec.structs import replace

from metagpu.core.contracts.sensors import (
    DetailedSensors,
    InstanceSensors,
    NvlinkError,
    ThrottleReason,
)
from metagpu.core.model.gpu import MIB
from metagpu.core.model.mig import MigProfile
from metagpu.core.model.shares import HardwareDevice, ProvisionedState, ShareId
from metagpu.plugins.metrics import dcgm
from metagpu.plugins.metrics.exposition import PageRenderer
from metagpu.plugins.metrics.gpus import sensor_samples
from metagpu.plugins.metrics.samples import MetricType
from tests.core.usage.test_report import A, B, node
from tests.plugins.metrics.rig import Page, valued
from tests.plugins.metrics.test_families import DOCS

READING = DetailedSensors(
    temperature=61,
    power=312.5,
    energy=1234.567,
    sm_clock=1410e6,
    utilization=0.97,
    memory_used=13000 * MIB,
    ecc_corrected=0,
    nvlink_errors={NvlinkError.REPLAY: 4},
    throttled=frozenset([ThrottleReason.POWER_CAP]),
)

DASHBOARD = ("GPU_TEMP", "POWER_USAGE", "SM_CLOCK", "FB_USED", "FB_FREE")
"""What grafana/dcgm-exporter-dashboard.json of dcgm-exporter asks for, beside profiling."""
DASHBOARD_LABELS = {"Hostname", "gpu", "UUID", "GPU_I_ID", "GPU_I_PROFILE"}


# The parser adds `_total` to the names of counters that lack it; the page does not.


def page(**changes: object) -> Page:
    """Render the page of a node, of whose GPUs the first one is read."""
    snapshot, _ = node()
    readings = {A.id: replace(READING, **changes)}
    samples = dcgm.dcgm_samples(snapshot, readings, {}, {A.id: 79}, "gpu-1")
    return Page(PageRenderer(dcgm.FAMILIES).render(samples).decode())


def test_units_are_those_of_dcgm() -> None:
    """Clocks are in MHz, energy in mJ, memory in MiB and utilization in percent."""
    it = page()
    assert it.value("DCGM_FI_DEV_SM_CLOCK") == 1410
    assert it.value("DCGM_FI_DEV_GPU_TEMP") == 61
    assert it.value("DCGM_FI_DEV_POWER_USAGE") == 312.5
    assert it.value("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total") == 1234567
    assert it.value("DCGM_FI_DEV_GPU_UTIL") == 97
    assert it.value("DCGM_FI_DEV_FB_USED") == 13000
    assert it.value("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL_total") == 4
    assert it.value("DCGM_FI_DEV_XID_ERRORS") == 79


def test_nvidias_dashboard_has_its_names_but_for_profiling() -> None:
    """Each name in NVIDIA's dashboard is served, or listed among those that stay empty."""
    wanted = {f"DCGM_FI_DEV_{it}" for it in DASHBOARD}
    of_profiling = {"DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"}
    served = {it.name: set(it.labels) for it in dcgm.FAMILIES}
    assert all(served[name] >= DASHBOARD_LABELS for name in wanted)
    assert not any("_PROF_" in name for name in served)
    page = DOCS.read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in of_profiling)


def test_what_a_gpu_does_not_report_is_absent() -> None:
    """Unknown is not zero."""
    assert page().values("DCGM_FI_DEV_MEMORY_TEMP") == []
    assert page(temperature=None).values("DCGM_FI_DEV_GPU_TEMP") == []


def test_labels_are_those_of_dcgm() -> None:
    """The labels are dcgm-exporter's; those of a container are empty on a GPU of several."""
    labels = page().labels("DCGM_FI_DEV_GPU_TEMP")
    assert labels["UUID"] == A.id
    assert (labels["gpu"], labels["Hostname"], labels["modelName"]) == ("0", "gpu-1", A.name)
    assert {labels["pod"], labels["namespace"], labels["container"]} == {""}


def test_a_gpu_of_one_container_names_it() -> None:
    """A container that alone holds a GPU is in the labels of all values."""
    snapshot, _ = node()
    samples = dcgm.dcgm_samples(snapshot, {B.id: READING}, {}, {}, "gpu-1")
    it = Page(PageRenderer(dcgm.FAMILIES).render(samples).decode())
    labels = it.labels("DCGM_FI_DEV_POWER_USAGE")
    assert (labels["namespace"], labels["pod"], labels["container"]) == ("team", "alice", "main")


def test_each_mig_instance_has_its_memory_and_its_container() -> None:
    """Memory is that of the instances alone; what a GPU has once stays the GPU's."""
    snapshot, _ = node()
    state = snapshot.gpus[A.id]
    held, shared = list(state.leases)[:2], list(state.leases)[-1]
    devices = dict.fromkeys(held, HardwareDevice("MIG-1", 7, 0))
    devices[shared] = HardwareDevice("MIG-2", 9, 0)
    devices[ShareId("free")] = HardwareDevice("MIG-3", 11, 0)
    gpu = replace(A, mig_profiles=(MigProfile("1g.5gb", 19, 1, 5 * 2**30, 7, ()),))
    state = replace(state, gpu=gpu, provisioned={"mig": ProvisionedState(devices=devices)})
    instances = [InstanceSensors(it, 19, MIB, 2 * MIB) for it in (7, 9, 11)]
    samples = dcgm.dcgm_samples(
        replace(snapshot, gpus={A.id: state}), {A.id: READING}, {A.id: instances}, {}, "gpu-1"
    )
    it = Page(PageRenderer(dcgm.FAMILIES).render(samples).decode())

    assert it.values("DCGM_FI_DEV_FB_FREE", GPU_I_PROFILE="1g.5gb") == [2, 2, 2]
    assert it.values("DCGM_FI_DEV_FB_USED", GPU_I_ID="") == []
    assert it.labels("DCGM_FI_DEV_POWER_USAGE")["GPU_I_ID"] == ""
    pods = {
        number: it.labels("DCGM_FI_DEV_FB_USED", GPU_I_ID=number)["pod"]
        for number in ("7", "9", "11")
    }
    assert pods == {"7": "alice", "9": "bob", "11": ""}


def test_counters_have_dcgms_names() -> None:
    """A counter's HELP and TYPE have its name without the library's suffix."""
    text = page().text
    assert "_total" not in text
    for family in dcgm.FAMILIES:
        assert f"# HELP {family.name} {family.help}\n" in text
        assert f"# TYPE {family.name} {family.type}\n" in text
    assert {it.type for it in dcgm.FAMILIES} == {MetricType.GAUGE, MetricType.COUNTER}


def test_every_name_is_documented_and_no_other() -> None:
    """The list in the documentation is that of the page."""
    documented = re.findall(r"^\| `(DCGM_\w+)` \|", DOCS.read_text(), re.MULTILINE)
    assert documented == [it.name for it in dcgm.FAMILIES]


@pytest.mark.parametrize("throttled", [None, frozenset[ThrottleReason]()])
def test_our_own_names_have_base_units(throttled: frozenset[ThrottleReason] | None) -> None:
    """The same reading under our names is in joules and hertz; unknown reasons are absent."""
    snapshot, _ = node()
    values = valued(sensor_samples(snapshot, {A.id: replace(READING, throttled=throttled)}))
    on_a = "0", A.id
    assert values["metagpu_gpu_energy_joules_total", *on_a] == 1234.567
    assert values["metagpu_gpu_clock_hertz", *on_a, "sm"] == 1410e6
    assert values["metagpu_gpu_nvlink_errors_total", *on_a, "replay"] == 4
    assert ("metagpu_gpu_clock_hertz", *on_a, "memory") not in values
    reasons = [name for name in values if name[0] == "metagpu_gpu_clocks_throttled"]
    assert len(reasons) == (0 if throttled is None else len(ThrottleReason))
