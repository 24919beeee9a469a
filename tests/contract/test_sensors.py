"""The NVML contract: sensors and error counters, in units of Prometheus."""

from metagpu.core.contracts.driver import Driver
from metagpu.core.model.gpu import MIB


async def test_a_reading_is_in_base_units(driver: Driver) -> None:
    """Watts, hertz, joules, degrees and ratios of a GPU at work are of the right size."""
    async with driver.session():
        for gpu in (await driver.survey()).gpus:
            sensors = await driver.sensors(gpu.id)
            assert sensors.temperature is not None
            assert 5 < sensors.temperature < 110
            assert sensors.power is not None
            assert sensors.power_limit is not None
            assert 3 < sensors.power < 1500
            assert 30 < sensors.power_limit < 1500
            for clock in (sensors.sm_clock, sensors.memory_clock):
                assert clock is not None
                assert 1e8 < clock < 2e10
            assert sensors.memory_temperature is None or 5 < sensors.memory_temperature < 120
            if not gpu.mig_enabled:
                for ratio in (
                    sensors.utilization,
                    sensors.memory_utilization,
                    sensors.encoder,
                    sensors.decoder,
                ):
                    assert ratio is not None
                    assert 0 <= ratio <= 1
            assert sensors.memory_used is not None
            assert sensors.memory_free is not None
            assert gpu.memory is not None
            assert (
                abs(sensors.memory_used + sensors.memory_free + (gpu.reserved or 0) - gpu.memory)
                < MIB
            )
            assert sensors.throttled is not None
            assert sensors.ecc_uncorrected in (0, None)
            assert sensors.pcie_replays is not None
            assert sensors.pcie_replays >= 0
            assert all(count >= 0 for count in sensors.nvlink_errors.values())


async def test_energy_is_a_counter(driver: Driver) -> None:
    """A second reading of the energy is no smaller, and less than a kilowatt hour away."""
    async with driver.session():
        [gpu, *_] = (await driver.survey()).gpus
        first, second = [(await driver.sensors(gpu.id)).energy for _ in range(2)]
        assert first is not None
        assert second is not None
        assert first <= second < first + 3.6e6
