"""The page under dcgm-exporter's names."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
from msgspec.structs import replace

from metagpu.core.contracts.sensors import (
    DetailedSensors,
    InstanceSensors,
    NvlinkError,
    ThrottleReason,
)
from metagpu.core.model.gpu import MIB, GpuId
from metagpu.core.model.mig import MigProfile
from metagpu.core.model.shares import (
    HardwareDevice,
    Pause,
    ProvisionedState,
    ShareId,
    Verdict,
)
from metagpu.core.model.snapshot import GpuState, Snapshot
from metagpu.core.state.events import XidReported
from metagpu.core.state.facts import GpuRecovered
from metagpu.plugins.metrics import dcgm
from metagpu.plugins.metrics.daemon import EventCounters
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


EXPORTER = json.loads(Path(__file__).with_name("dcgm_exporter.json").read_text())
"""Default counters and label template of dcgm-exporter, of the date in the file."""
XID = "DCGM_FI_DEV_XID_ERRORS"
NOW = 5000.0


# The parser adds `_total` to the names of counters that lack it; the page does not.


def page(**changes: object) -> Page:
    """Render the page of a node, of whose GPUs the first one is read."""
    snapshot, _ = node()
    return rendered(
        snapshot, {A.id: replace(READING, **changes)}, {A.id: XidReported(A.id, 79, NOW)}
    )


def rendered(
    snapshot: Snapshot,
    readings: Mapping[GpuId, DetailedSensors],
    last_xids: Mapping[GpuId | None, XidReported] = MappingProxyType({}),
    instances: Mapping[GpuId, Sequence[InstanceSensors]] = MappingProxyType({}),
) -> Page:
    """Render the page of a snapshot."""
    samples = dcgm.dcgm_samples(snapshot, readings, instances, last_xids, node="gpu-1", now=NOW)
    return Page(PageRenderer(dcgm.FAMILIES).render(samples).decode())


def test_units_are_those_of_dcgm() -> None:
    """Clocks are in MHz, energy in mJ, memory in MiB and utilization in percent."""
    whole_page = page()
    assert whole_page.value("DCGM_FI_DEV_SM_CLOCK") == 1410
    assert whole_page.value("DCGM_FI_DEV_GPU_TEMP") == 61
    assert whole_page.value("DCGM_FI_DEV_POWER_USAGE") == 312.5
    assert whole_page.value("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total") == 1234567
    assert whole_page.value("DCGM_FI_DEV_GPU_UTIL") == 97
    assert whole_page.value("DCGM_FI_DEV_FB_USED") == 13000
    assert whole_page.value("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL_total") == 4
    assert whole_page.value(XID, gpu="0") == 79


def test_nvidias_dashboard_has_its_names_but_for_profiling() -> None:
    """Each name in NVIDIA's dashboard is served, or listed among those that stay empty."""
    wanted = {f"DCGM_FI_DEV_{name}" for name in DASHBOARD}
    of_profiling = {"DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"}
    served = {family.name: set(family.labels) for family in dcgm.FAMILIES}
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
    whole_page = rendered(snapshot, {B.id: READING})
    labels = whole_page.labels("DCGM_FI_DEV_POWER_USAGE")
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
    instances = [InstanceSensors(number, 19, MIB, 2 * MIB, 3 * MIB) for number in (7, 9, 11)]
    whole_page = rendered(
        replace(snapshot, gpus={A.id: state}), {A.id: READING}, instances={A.id: instances}
    )

    assert whole_page.values("DCGM_FI_DEV_FB_FREE", GPU_I_PROFILE="1g.5gb") == [2, 2, 2]
    assert whole_page.values("DCGM_FI_DEV_FB_RESERVED", GPU_I_PROFILE="1g.5gb") == [3, 3, 3]
    assert whole_page.values("DCGM_FI_DEV_FB_USED", GPU_I_ID="") == []
    assert whole_page.labels("DCGM_FI_DEV_POWER_USAGE")["GPU_I_ID"] == ""
    pods = {
        number: whole_page.labels("DCGM_FI_DEV_FB_USED", GPU_I_ID=number)["pod"]
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
    assert {metric_family.type for metric_family in dcgm.FAMILIES} == {
        MetricType.GAUGE,
        MetricType.COUNTER,
    }


def test_each_default_counter_of_the_exporter_is_served_or_named_with_a_reason() -> None:
    """Each counter of the exporter's own default file is here with its type, or has a reason."""
    served = {family.name: str(family.type) for family in dcgm.FAMILIES}
    reasons = dict(re.findall(r"^\| `(DCGM_\w+)` \| (\S.*) \|$", DOCS.read_text(), re.MULTILINE))
    missing = EXPORTER["counters"].keys() - served.keys()
    assert missing == reasons.keys()
    assert {value: served[value] for value in EXPORTER["counters"].keys() - missing} == {
        name: kind for name, kind in EXPORTER["counters"].items() if name not in missing
    }


def test_each_label_of_the_exporters_template_is_there() -> None:
    """Each series has the exporter's labels, also under a spelling that it had before."""
    wanted = {*EXPORTER["labels"], *EXPORTER["labelsUntil"]}
    for family in dcgm.FAMILIES:
        of_xids = EXPORTER["labelsOfXids"] if family.name == XID else []
        assert set(family.labels) == {*wanted, *of_xids}
    labels = page().labels("DCGM_FI_DEV_GPU_TEMP")
    assert labels["hostname"] == labels["Hostname"] == "gpu-1"


def test_the_parts_of_memory_give_the_whole() -> None:
    """Used, free and reserved memory have the same labels, so that queries can add them."""
    whole_page = page(memory_free=27340 * MIB, memory_reserved=620 * MIB)
    parts = [whole_page.labels(f"DCGM_FI_DEV_FB_{part}") for part in ("USED", "FREE", "RESERVED")]
    assert parts[0] == parts[1] == parts[2]
    assert whole_page.value("DCGM_FI_DEV_FB_RESERVED") == 620


@pytest.mark.parametrize(
    ("code", "at", "out_since", "shown"),
    [
        (79, NOW - 3600, NOW - 3599, 79),  # out of service for an hour, because of it
        (31, NOW - 3600, NOW - 60, 0),  # long over when the GPU went out of service
        (31, NOW - 299, None, 31),
        (31, NOW - 301, None, 0),
    ],
)
def test_an_xid_is_shown_for_a_time(
    code: int, at: float, out_since: float | None, shown: int
) -> None:
    """An XID is shown for 5 minutes, and while its GPU is out of service; NVML is not asked."""
    snapshot, _ = node()
    state = snapshot.gpus[A.id]
    if out_since is not None:
        state = replace(state, verdict=Verdict(healthy=False, since=out_since))
    whole_page = rendered(of_gpu(snapshot, state), {}, {A.id: XidReported(A.id, code, at)})
    labels = whole_page.labels(XID)
    assert (whole_page.value(XID), labels["err_code"]) == (shown, str(shown))
    assert labels["UUID"] == A.id
    meanings = {0: "No Error", 31: "GPU memory page fault", 79: "GPU has fallen off the bus"}
    assert labels["err_msg"] == meanings[shown]


def test_an_xid_is_over_when_its_gpu_is_back() -> None:
    """A GPU that is back in service has XID 0 at once."""
    counts = EventCounters()
    counts.count(XidReported(A.id, 79, NOW))
    counts.count(GpuRecovered(A.id, "well", NOW))
    assert rendered(node()[0], {}, counts.last_xids).value(XID, gpu="0") == 0


def test_without_delivery_of_xids_none_is_unknown() -> None:
    """A GPU whose XIDs NVML does not deliver has no series that says 0."""
    snapshot, _ = node()
    deaf = replace(snapshot.gpus[A.id], unheard=Pause("NVML refused", NOW))
    assert rendered(of_gpu(snapshot, deaf), {}).values(XID) == []
    known = rendered(of_gpu(snapshot, deaf), {}, {A.id: XidReported(A.id, 79, NOW)})
    assert known.value(XID) == 79


def of_gpu(snapshot: Snapshot, state: GpuState) -> Snapshot:
    """Return the snapshot with this GPU alone."""
    return replace(snapshot, gpus={state.gpu.id: state})


def test_every_name_is_documented_and_no_other() -> None:
    """The list in the documentation is that of the page."""
    (listed,) = re.findall(r"^The metrics are (.*)\.$", DOCS.read_text(), re.MULTILINE)
    documented = re.findall(r"`(\w+)`", listed)
    assert documented == [family.name for family in dcgm.FAMILIES]


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
