"""The NVML contract: the connections of the GPUs."""

from itertools import combinations

from metagpu.core.contracts.driver import Driver


async def test_every_connection_is_between_two_gpus_of_the_survey(driver: Driver) -> None:
    """Each pair is listed once at most, and no GPU is connected with itself."""
    async with driver.session():
        survey = await driver.survey()

    pairs = {frozenset((a.id, b.id)) for a, b in combinations(survey.gpus, 2)}
    assert survey.topology.connections.keys() <= pairs


async def test_a_healthy_pair_has_a_known_connection(driver: Driver) -> None:
    """A healthy pair has its PCI path and number of NVLinks, equal in both directions."""
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
