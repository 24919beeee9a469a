"""What we rely on in NVML: how the GPUs are connected."""

from itertools import combinations

from metagpu.core.driver import Driver


async def test_every_connection_is_between_two_gpus_of_the_survey(driver: Driver) -> None:
    """Each pair is told once at most, and nobody is connected with themselves."""
    async with driver.session():
        survey = await driver.survey()

    pairs = {frozenset((a.id, b.id)) for a, b in combinations(survey.gpus, 2)}
    assert survey.topology.connections.keys() <= pairs


async def test_a_connection_is_known_or_said_to_be_unknown(driver: Driver) -> None:
    """Of a healthy pair the PCI path is known, and NVLinks are counted, both ways the same."""
    async with driver.session():
        survey = await driver.survey()

    for a, b in combinations(survey.gpus, 2):
        connection = survey.topology.between(a.id, b.id)
        assert connection == survey.topology.between(b.id, a.id)
        assert connection.pci is not None
        assert connection.nvlinks is not None
        assert connection.nvlinks >= 0
        assert bool(connection.nvlinks) or not connection.switched


async def test_connections_outlive_a_session(driver: Driver) -> None:
    """Another session reads the same connections."""
    async with driver.session():
        first = await driver.survey()
    async with driver.session():
        second = await driver.survey()

    assert first.topology == second.topology
