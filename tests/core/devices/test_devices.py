"""Devices of DRA: which there are, their names, and the way back from a name."""

import re

import pytest

from metagpu.core.devices.devices import Device, devices_of, find_device, pool_name
from metagpu.core.model.request_errors import UnknownDevice
from tests.backends.mig.gpus import mig_gpu
from tests.rigs.build import gpu, offered

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
UUID_0 = "gpu-00000000-0000-0000-0000-000000000000"
FOUR = """\
version: metagpu/v1
pools:
  - name: all
    api: dra
    backends:
      - {backend: whole}
      - {backend: fraction, sharesPerGpu: 50}
      - {backend: timeslice, replicas: 4}
      - {backend: mps, unitsPerGpu: 10}
"""
SIZED = """\
version: metagpu/v1
pools: [{name: all, api: dra, backends: [{backend: fraction, memoryUnit: 1Gi}]}]
"""
MIG = """\
version: metagpu/v1
pools: [{name: all, api: dra, backends: [{backend: mig, profiles: [1g.5gb, 1g.5gb+me]}]}]
"""


def _of(text: str, *, of: int = 0) -> dict[str, Device]:
    _, snapshot = offered(gpu(0), text=text)
    state = snapshot.gpus[gpu(of).id]
    return {device.name.removeprefix(state.gpu.id.lower()): device for device in devices_of(state)}


def test_every_backend_has_a_device_of_its_own() -> None:
    """Equal shares are one device with one capacity; a whole GPU is consumed by nobody else."""
    found = _of(FOUR)

    assert {
        name: (device.type, device.capacity_name, len(device.shares))
        for name, device in found.items()
    } == {
        "": ("gpu", None, 1),
        "-fraction": ("fraction", "shares", 50),
        "-timeslice": ("timeslice", "slices", 4),
        "-mps": ("mps", "shares", 10),
    }
    assert found["-fraction"].count_shares(30) == 30
    assert found["-fraction"].count_shares(None) == 1
    assert found[""].count_shares(None) == 1


def test_fractions_of_a_size_are_asked_for_by_memory() -> None:
    """With `memoryUnit` the capacity is memory, in bytes; a part of a unit takes all of it."""
    [device] = _of(SIZED).values()

    assert (device.capacity_name, device.unit) == ("memory", 2**30)
    assert [device.count_shares(n * 2**30 // 2) for n in (2, 3, 20)] == [1, 2, 10]


def test_each_mig_placement_is_a_device_with_a_legal_name() -> None:
    """Two profiles of one size and all placements differ in name; each name is a DNS label."""
    _, snapshot = offered(gpu_ := mig_gpu(0), text=MIG)
    devices = devices_of(snapshot.gpus[gpu_.id])
    names = [device.name for device in devices]

    assert f"{UUID_0}-mig-1g5gb-4" in names
    assert f"{UUID_0}-mig-1g5gbplusme-4" in names
    assert len(names) == len(set(names)) == 14
    assert all(LABEL.fullmatch(name) for name in names)
    assert {(device.type, device.capacity_name, len(device.shares)) for device in devices} == {
        ("mig", None, 1)
    }


def test_a_pool_of_the_device_plugin_api_has_no_devices() -> None:
    """The default API publishes nothing."""
    _, snapshot = offered(gpu(0))

    assert devices_of(snapshot.gpus[gpu(0).id]) == ()


def test_a_device_is_found_by_the_names_of_an_allocation() -> None:
    """The two names of an allocation lead to the device; a wrong one says what to do."""
    _, snapshot = offered(gpu(0), gpu(1), text=FOUR)
    pool = pool_name("n1.example")

    device = find_device(snapshot, pool, f"{gpu(1).id.lower()}-mps")
    assert (device.gpu, device.backend) == (gpu(1).id, "mps")

    with pytest.raises(UnknownDevice, match="offers other devices now; delete the ResourceClaim"):
        find_device(snapshot, pool, f"{gpu(1).id.lower()}-of-before")
    with pytest.raises(UnknownDevice, match=r"the node has no such GPU"):
        find_device(snapshot, pool, f"{gpu(2).id.lower()}-mps")


def test_a_claim_of_an_earlier_pool_has_its_device() -> None:
    """Earlier versions had a pool for each GPU: the device's name alone says which it is."""
    _, snapshot = offered(gpu(0), text=FOUR)
    uuid = gpu(0).id.lower()

    assert find_device(snapshot, f"n1/{uuid}", f"{uuid}-mps").backend == "mps"
