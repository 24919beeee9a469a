"""The NVML contract: the condition of a GPU, and its processes."""

from math import inf

from metagpu.core.contracts.driver import ComputeMode, Driver, RecoveryAction


async def test_a_healthy_gpu_needs_nothing(driver: Driver) -> None:
    """The recovery action of a healthy GPU is NONE, or unknown to an older driver."""
    async with driver.session():
        for gpu in (await driver.survey()).gpus:
            condition = await driver.condition(gpu.id)
            assert condition.recovery_action in {None, RecoveryAction.NONE}


async def test_memory_in_use_fits_and_counts_the_reserved(driver: Driver) -> None:
    """Memory in use includes what the driver reserves, and is at most the total."""
    async with driver.session():
        for gpu in (await driver.survey()).gpus:
            condition = await driver.condition(gpu.id)
            assert (gpu.memory is None) == (condition.memory_used is None)
            if gpu.memory is not None and condition.memory_used is not None:
                assert (gpu.reserved or 0) <= condition.memory_used <= gpu.memory


async def test_mig_is_known_together(driver: Driver) -> None:
    """A GPU with MIG has the present mode and the next one; other GPUs have neither."""
    async with driver.session():
        for gpu in (await driver.survey()).gpus:
            condition = await driver.condition(gpu.id)
            assert condition.mig_enabled == gpu.mig_enabled
            assert (condition.mig_enabled is None) == (condition.mig_pending is None)


async def test_memory_errors_are_counted_where_they_are_corrected(driver: Driver) -> None:
    """With error correction on there is a count of uncorrected errors."""
    async with driver.session():
        for gpu in (await driver.survey()).gpus:
            condition = await driver.condition(gpu.id)
            if condition.ecc:
                assert condition.ecc_uncorrected is not None
                assert condition.ecc_uncorrected >= 0


async def test_processes_are_well_formed(driver: Driver) -> None:
    """Processes have positive ids, are listed once, and have no more memory than there is."""
    async with driver.session():
        for gpu in (await driver.survey()).gpus:
            processes = await driver.processes(gpu.id)
            keys = [(p.pid, p.gpu_instance, p.compute_instance) for p in processes]
            assert len(set(keys)) == len(keys)
            assert all(p.pid > 0 for p in processes)
            most = inf if gpu.memory is None else gpu.memory
            assert all(p.memory is None or p.memory <= most for p in processes)


async def test_how_busy_processes_are_is_a_percentage(driver: Driver) -> None:
    """Utilization is by pid, from 0 to 100 percent, or unknown."""
    async with driver.session():
        for gpu in (await driver.survey()).gpus:
            busy = await driver.utilization(gpu.id) or {}
            assert all(pid > 0 and 0 <= percent <= 100 for pid, percent in busy.items())


async def test_a_compute_mode_is_one_of_nvmls(driver: Driver) -> None:
    """A GPU has one of NVML's compute modes, or None."""
    async with driver.session():
        for gpu in (await driver.survey()).gpus:
            mode = await driver.compute_mode(gpu.id)
            assert mode in {None, *ComputeMode}
