"""Slices: what the scheduler is told of each GPU, as the API server's rules allow it."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from metagpu.core.availability.reasons import CORDONED, HELD, SUSPENDED, UNHEALTHY
from metagpu.core.devices.slices import SliceSpec, comparable, dropped_fields, slices_of
from metagpu.core.model.gpu import Gpu
from metagpu.core.model.shares import Fault, ResourceClaimRef, Share
from metagpu.core.model.snapshot import Snapshot, Versions
from metagpu.core.state.facts import (
    BackendSuspended,
    DriverRead,
    Fact,
    GpuCordoned,
    GpuFaulted,
    SharesClaimed,
    SharesReleased,
)
from metagpu.sim.machine.gpu_models import GPU_MODELS
from tests.backends.mig.gpus import mig_gpu
from tests.core.devices.test_devices import FOUR, LABEL, SIZED
from tests.rigs.build import after, gpu, offered

CLAIM = ResourceClaimRef("ns", "half", "uid-1")
MIXED = """\
version: metagpu/v1
pools: [{{name: all, api: dra, backends: [{{backend: fraction}}, {{backend: mig, {}}}]}}]
"""
QUALIFIED = re.compile(r"([a-z0-9.-]{1,63}/)?[A-Za-z_][A-Za-z0-9_]{0,31}")


def _every_profile(of: Gpu) -> str:
    return MIXED.format(f"profiles: {json.dumps([profile.name for profile in of.mig_profiles])}")


def _published(snapshot: Snapshot) -> tuple[SliceSpec, ...]:
    """Return the slices of the node's pool."""
    return slices_of(snapshot, "n1", "gpu.metagpu.io")["n1"]


def _devices(snapshot: Snapshot, of: Gpu | None = None) -> Mapping[str, Any]:
    """Return the published devices of the only GPU, by the ends of their names."""
    uuid = (of or gpu(0)).id.lower()
    return {
        device["name"].removeprefix(f"{uuid}-"): device
        for specs in slices_of(snapshot, "n1", "gpu.metagpu.io").values()
        for spec in specs
        for device in spec.get("devices", ())
    }


def _claimed(*shares: Share, at: float = 1, pool: str = "n1") -> SharesClaimed:
    """Return the fact that a claim whose device is of a pool has got shares."""
    pools = {share.id: f"gpu.metagpu.io/{pool}" for share in shares}
    return SharesClaimed(shares, at=at, resource_claim=CLAIM, pools=pools)


def _after(*facts: Fact, text: str = FOUR) -> Snapshot:
    return after(*facts, since=offered(gpu(0), text=text)[1])


def _shares(backend: str, count: int) -> tuple[Share, ...]:
    shares = [share for share in offered(gpu(0), text=FOUR)[0].shares if share.backend == backend]
    return tuple(shares[:count])


def _value(device: Mapping[str, Any]) -> str:
    [capacity] = device["capacity"].values()
    return str(capacity["value"])


def _taints(device: Mapping[str, Any]) -> dict[str, str]:
    assert {taint["effect"] for taint in device.get("taints", ())} <= {"NoSchedule"}
    return {taint["key"]: taint.get("value", "") for taint in device.get("taints", ())}


def test_a_gpu_of_several_backends_has_counters_and_devices() -> None:
    """Every device consumes the one counter, and a shared one has one capacity."""
    bare = replace(gpu(0), numa_node=1, compute_capability=(8, 0), architecture="ampere")
    bare = replace(bare, brand="Nvidia")
    snapshot = after(DriverRead(Versions("550.54.05", (12, 4))), since=offered(bare, text=FOUR)[1])
    pools = slices_of(snapshot, "n1", "gpu.metagpu.io", {bare.id: "pci0000:00"})
    (counters, devices), (looking,) = pools["n1"], pools["n1/monitor"]
    uuid = bare.id.lower()
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 2}
    common = {"driver": "gpu.metagpu.io", "nodeName": "n1", "pool": pool}
    one = {"owner": {"value": "1"}}
    consumes = [{"counterSet": uuid, "counters": one}]

    assert counters == {**common, "sharedCounters": [{"name": uuid, "counters": one}]}
    assert devices == {**common, "devices": devices["devices"]}
    whole, fraction, timeslice, mps = devices["devices"]
    [monitor] = looking["devices"]
    assert looking["pool"] == {"name": "n1/monitor", "generation": 1, "resourceSliceCount": 1}
    attributes = {
        "type": {"string": "gpu"},
        "resource": {"string": "nvidia.com/gpu"},
        "uuid": {"string": bare.id},
        "productName": {"string": "NVIDIA A100-SXM4-40GB"},
        "brand": {"string": "Nvidia"},
        "architecture": {"string": "Ampere"},
        "resource.kubernetes.io/pciBusID": {"string": "0000:00:00.0"},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:00"},
        "cudaComputeCapability": {"version": "8.0.0"},
        "driverVersion": {"version": "550.54.5"},
        "cudaDriverVersion": {"version": "12.4.0"},
        "resource.kubernetes.io/numaNode": {"int": 1},
    }
    assert whole == {
        "name": uuid,
        "attributes": attributes,
        "capacity": {"memory": {"value": "40960Mi"}},
        "consumesCounters": consumes,
    }
    policy = {"default": "1", "validRange": {"min": "1", "step": "1"}}
    assert fraction == {
        "name": f"{uuid}-fraction",
        "attributes": {
            **attributes,
            "type": {"string": "fraction"},
            "resource": {"string": "cnvrg.io/metagpu"},
        },
        "capacity": {"shares": {"value": "50", "requestPolicy": policy}},
        "allowMultipleAllocations": True,
        "consumesCounters": consumes,
    }
    assert timeslice["capacity"] == {"slices": {"value": "4", "requestPolicy": policy}}
    kind = {"type": {"string": "monitor"}}
    assert monitor == {
        "name": f"{uuid}-monitor",
        "attributes": {
            key: value for key, value in {**attributes, **kind}.items() if key != "resource"
        },
        "capacity": {"memory": {"value": "40960Mi"}},
    }
    assert mps["capacity"] == {"shares": {"value": "10", "requestPolicy": policy}}


def test_one_device_needs_no_counters() -> None:
    """Whole GPUs alone work on a cluster that knows neither counters nor capacities."""
    text = FOUR[: FOUR.index("      - {backend: fraction")]
    [only] = _published(_after(text=text))

    assert only["pool"]["resourceSliceCount"] == 1
    assert only["devices"][0].keys() == {"name", "attributes", "capacity"}


def test_a_plain_cluster_gets_whole_gpus_alone() -> None:
    """Without counters the scheduler would allocate a fraction beside the whole GPU."""
    [only], [looking] = slices_of(_after(), "n1", "gpu.metagpu.io", plain=True).values()

    uuid = gpu(0).id.lower()
    assert [device["name"] for device in only["devices"]] == [uuid]
    assert "consumesCounters" not in only["devices"][0]
    assert [device["name"] for device in looking["devices"]] == [f"{uuid}-monitor"]
    assert slices_of(_after(text=SIZED), "n1", "gpu.metagpu.io", plain=True) == {}


def test_memory_is_consumed_in_units() -> None:
    """Fractions of a size have the capacity `memory`; one unit is the least that anybody takes."""
    device = _devices(_after(text=SIZED))["fraction"]

    assert device["capacity"] == {
        "memory": {
            "value": "40960Mi",
            "requestPolicy": {
                "default": "1024Mi",
                "validRange": {"min": "1024Mi", "step": "1024Mi"},
            },
        }
    }


def test_a_range_needs_place_for_two_steps() -> None:
    """One share alone is a value: the API server refuses a range whose step exceeds the value."""
    device = _devices(_after(text=FOUR.replace("50", "1")))["fraction"]

    assert device["capacity"]["shares"] == {
        "value": "1",
        "requestPolicy": {"default": "1", "validValues": ["1"]},
    }


def test_mig_devices_consume_their_slots_and_the_others_all() -> None:
    """Places exclude each other exactly as shares conflict; a fraction excludes every place."""
    of = replace(mig_gpu(0), mig_enabled=False)
    snapshot = offered(of, text=_every_profile(of))[1]
    [shared] = _published(snapshot)[0]["sharedCounters"]
    consumed = {
        name: set(document["consumesCounters"][0]["counters"])
        for name, document in _devices(snapshot, of).items()
        if name != "monitor"
    }

    assert set(shared["counters"]) == {*(f"s{n}" for n in range(8)), "s-plus-me"}
    assert consumed["fraction"] == set(shared["counters"])
    assert consumed["mig-2g10gb-4"] == {"s4", "s5"}
    assert consumed["mig-1g5gbplusme-6"] == {"s6", "s-plus-me"}
    mig = _devices(snapshot, of)["mig-2g10gb-4"]
    assert mig["attributes"]["profile"] == {"string": "2g.10gb"}
    assert mig["attributes"]["parentUUID"] == {"string": of.id}
    assert "uuid" not in mig["attributes"]
    parts = {name: document["value"] for name, document in mig["capacity"].items()}
    assert parts == {
        "memory": "9856Mi",
        "multiprocessors": "28",
        "copyEngines": "2",
        "decoders": "1",
        "encoders": "0",
        "jpegEngines": "0",
        "ofaEngines": "0",
        "memorySlice4": "1",
        "memorySlice5": "1",
    }
    assert "allowMultipleAllocations" not in mig


@pytest.mark.parametrize(
    "model", [model.key for model in GPU_MODELS.values() if model.mig_profiles]
)
def test_every_model_stays_within_the_limits_of_the_api(model: str) -> None:
    """Names, devices of a slice and counters of a set are as many and as long as allowed."""
    of = mig_gpu(0, model)
    first, *lists = _published(offered(of, text=_every_profile(of))[1])
    [counters] = [counter["counters"] for counter in first["sharedCounters"]]

    assert len(counters) <= 32
    assert all(map(LABEL.fullmatch, counters))
    for devices in [document["devices"] for document in lists]:
        assert max(len(other["attributes"]) + len(other["capacity"]) for other in devices) <= 32
        assert len(devices) <= 64
        for device in devices:
            assert LABEL.fullmatch(device["name"])
            assert all(map(QUALIFIED.fullmatch, {**device["attributes"], **device["capacity"]}))
            [consumed] = device["consumesCounters"]
            assert counters.keys() >= consumed["counters"].keys() > set()


def test_the_shares_of_an_instance_are_one_device() -> None:
    """Time-slices of MIG instances are consumed; all of them take the instance's slots once."""
    text = MIXED.format("layout: {3g.20gb: 2}, replicas: 3")
    of = replace(mig_gpu(0), mig_enabled=True)
    devices = _devices(offered(of, text=text)[1], of)

    assert devices.keys() == {"mig-3g20gb-0", "mig-3g20gb-4", "monitor"}
    one = devices["mig-3g20gb-0"]
    assert _value(one) == "3"
    assert set(one["consumesCounters"][0]["counters"]) == {"s0", "s1", "s2", "s3"}


def test_resource_claims_change_nothing() -> None:
    """The scheduler knows what it allocated: nothing is written while claims come and go."""
    shares = _shares("fraction", 30)
    held = _after(_claimed(*shares))

    assert _published(held) == _published(_after())
    assert _published(after(SharesReleased(shares, at=2), since=held)) == _published(_after())


def test_pods_of_before_a_reload_take_from_the_devices() -> None:
    """Their shares are missing in the capacity, and other backends' devices are tainted."""
    some = _devices(_after(SharesClaimed(_shares("fraction", 30), at=1)))
    assert (_value(some["fraction"]), _taints(some["fraction"])) == ("20", {})
    for name in ("mps", "timeslice", gpu(0).id.lower()):
        assert _taints(some[name]) == {HELD: "fraction"}

    every = _devices(_after(SharesClaimed(_shares("fraction", 50), at=1)))["fraction"]
    assert (_value(every), _taints(every)) == ("50", {HELD: "fraction"})


def test_claims_of_an_earlier_pool_take_from_the_devices() -> None:
    """The scheduler counts a claim under the pool and driver that it has: not under a new name."""
    earlier = f"n1/{gpu(0).id.lower()}"
    some = _devices(_after(_claimed(*_shares("fraction", 30), pool=earlier)))
    assert (_value(some["fraction"]), _taints(some["fraction"])) == ("20", {})
    assert _taints(some["mps"]) == {HELD: "fraction"}

    whole = _devices(_after(_claimed(*_shares("whole", 1), pool=earlier)))
    assert _taints(whole[gpu(0).id.lower()]) == {HELD: "whole"}


def test_each_gpu_has_a_counter_set_once_one_has_several_devices() -> None:
    """A pool of several GPUs counts by GPU: whole GPUs too, beside others with fractions."""
    text = """\
version: metagpu/v1
pools:
  - {name: a, gpus: {index: 0}, api: dra, backends: [{backend: whole}]}
  - {name: b, gpus: {index: 1}, api: dra, backends: [{backend: whole}, {backend: fraction}]}
"""
    specs = _published(offered(gpu(0), gpu(1), text=text)[1])
    sets = [counter["name"] for spec in specs for counter in spec.get("sharedCounters", ())]
    consumed = [
        device["consumesCounters"][0]["counterSet"]
        for spec in specs
        for device in spec.get("devices", ())
    ]

    first, second = (gpu(n).id.lower() for n in (0, 1))
    assert (sets, consumed) == ([first, second], [first, second, second])
    assert {spec["pool"]["resourceSliceCount"] for spec in specs} == {len(specs)} == {4}


def test_a_full_gpu_offers_what_is_consumed() -> None:
    """Once MPS serves its clients, no share more is there to be allocated."""
    text = FOUR.replace("unitsPerGpu: 10", "unitsPerGpu: 10, maxClients: 2")
    first, second, *_ = _shares("mps", 3)
    claims = [_claimed(share, at=n) for n, share in enumerate((first, second))]

    assert _value(_devices(_after(claims[0], text=text))["mps"]) == "10"
    assert _value(_devices(_after(*claims, text=text))["mps"]) == "2"


def test_a_gpu_that_is_full_of_pods_is_tainted() -> None:
    """Once MPS serves pods of before a reload alone, a claim would find no share."""
    text = FOUR.replace("unitsPerGpu: 10", "unitsPerGpu: 10, maxClients: 2")
    first, second, *_ = _shares("mps", 3)
    pods = [SharesClaimed((share,), at=n) for n, share in enumerate((first, second))]
    claim = _claimed(second)

    one = _devices(_after(pods[0], text=text))["mps"]
    assert (_value(one), HELD in _taints(one)) == ("9", False)
    assert _taints(_devices(_after(*pods, text=text))["mps"])[HELD] == "mps"
    mixed = _devices(_after(pods[0], claim, text=text))["mps"]
    assert (_value(mixed), HELD in _taints(mixed)) == ("1", False)


def test_taints_say_why_nothing_is_allocated() -> None:
    """A fault and a cordon taint every device but the monitor's, a suspended backend its own."""
    uuid = gpu(0).id
    faulted = dict(
        _devices(_after(GpuFaulted(uuid, "XID 79", 1, Fault.XID), GpuCordoned(uuid, "x", 1)))
    )
    assert _taints(faulted.pop("monitor")) == {}
    assert all(_taints(value) == {UNHEALTHY: "xid", CORDONED: ""} for value in faulted.values())

    suspended = _devices(_after(BackendSuspended(uuid, "mps", "no daemon", 1)))
    assert {name: _taints(value) for name, value in suspended.items() if "taints" in value} == {
        "mps": {SUSPENDED: "mps"}
    }


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("10000", "10k"),
        ("40960Mi", "40Gi"),
        ("1073741824", "1Gi"),
        ({"pool": {"generation": 1}}, {"pool": {"generation": 7}}),
        ([{"key": "a"}], [{"key": "a", "timeAdded": "2026-11-23T03:00:00Z"}]),
    ],
)
def test_another_spelling_is_no_difference(ours: object, theirs: object) -> None:
    """Values that the API server rewrites are equal: no comparison writes them again."""
    assert comparable(ours) == comparable(theirs)


@pytest.mark.parametrize(
    ("one", "other"), [("49", "50"), ("1Gi", "1G"), ("a100", "a10"), (["1", "2"], ["2", "1"])]
)
def test_another_content_is_a_difference(one: object, other: object) -> None:
    """Amounts, names and order count."""
    assert comparable(one) != comparable(other)


def test_dropped_fields_are_named_once() -> None:
    """A field that is missing in each of many devices is one path; an empty one is missing."""
    policy = {"default": "1"}
    sent = {
        "sharedCounters": [{"name": "gpu"}],
        "devices": [
            {"consumesCounters": [1], "capacity": {"n": {"value": "9", "requestPolicy": policy}}},
            {"consumesCounters": [1], "taints": [{"key": "k"}]},
        ],
    }
    answer = {
        "sharedCounters": None,
        "devices": [{"capacity": {"n": {"value": "9"}}}, {"taints": []}],
    }

    assert dropped_fields(sent, answer) == [
        "sharedCounters",
        "devices[].consumesCounters",
        "devices[].capacity.n.requestPolicy",
        "devices[].taints",
    ]
    assert dropped_fields(sent, sent) == []
