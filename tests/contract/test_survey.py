"""The NVML contract: the GPUs of a node."""

import re

from metagpu.core.contracts.driver import Driver
from metagpu.core.model.gpu import MIB

UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


async def test_every_gpu_is_read(driver: Driver) -> None:
    """A healthy node has at least one GPU, and no unreadable one."""
    async with driver.session():
        survey = await driver.survey()

    assert survey.gpus
    assert not survey.unreadable
    assert re.fullmatch(r"\d{3}(\.\d+)+", survey.driver_version)


async def test_gpus_come_in_the_order_of_their_indices(driver: Driver) -> None:
    """Indices count from 0 without a gap."""
    async with driver.session():
        survey = await driver.survey()

    assert [gpu.index for gpu in survey.gpus] == list(range(len(survey.gpus)))


async def test_ids_are_uuids_and_unique(driver: Driver) -> None:
    """Ids have NVML's form, which share ids are built on, and no two GPUs share one."""
    async with driver.session():
        survey = await driver.survey()

    ids = [gpu.id for gpu in survey.gpus]
    assert all(UUID.fullmatch(gpu_id) for gpu_id in ids)
    assert len(set(ids)) == len(ids)


async def test_bus_ids_are_those_of_sysfs(driver: Driver) -> None:
    """PCI addresses are written as the kernel's file system writes them, and unique."""
    async with driver.session():
        survey = await driver.survey()

    addresses = [gpu.pci_bus_id for gpu in survey.gpus]
    assert all(BUS_ID.fullmatch(address) for address in addresses)
    assert len(set(addresses)) == len(addresses)


async def test_device_nodes_are_unique(driver: Driver) -> None:
    """Each GPU has its own /dev/nvidiaN."""
    async with driver.session():
        survey = await driver.survey()

    minors = [gpu.minor for gpu in survey.gpus]
    assert all(minor is not None and minor >= 0 for minor in minors)
    assert len(set(minors)) == len(minors)


async def test_memory_is_in_bytes_and_some_is_reserved(driver: Driver) -> None:
    """Totals are gigabytes in bytes, and the driver reserves a small part of them."""
    async with driver.session():
        survey = await driver.survey()

    for gpu in survey.gpus:
        if gpu.memory is None:
            continue  # on the machine's memory, as GB10
        assert 1024 * MIB < gpu.memory < 1024 * 1024 * MIB
        assert gpu.reserved is not None
        assert 0 <= gpu.reserved < gpu.memory / 10


async def test_a_data_centre_gpu_has_its_facts(driver: Driver) -> None:
    """Name, architecture and compute capability are known, and XIDs are delivered."""
    async with driver.session():
        survey = await driver.survey()
        unheard = driver.unheard

    for gpu in survey.gpus:
        assert gpu.name
        assert gpu.architecture
        assert gpu.compute_capability is not None
        assert gpu.compute_capability >= (3, 0)
        assert gpu.numa_node is None or gpu.numa_node >= 0
        assert gpu.id not in unheard


async def test_two_surveys_are_equal(driver: Driver) -> None:
    """Two surveys of an unchanged node are equal."""
    async with driver.session():
        assert await driver.survey() == await driver.survey()
