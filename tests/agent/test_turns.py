"""The whole agent on a Node that it writes: backends take turns with idle GPUs."""

from pathlib import Path

import pytest

from metagpu.agent.agent import Agent
from metagpu.core.layout.turns import TurnTiming
from metagpu.plugins.cluster.settings import ClusterSettings, Feature
from metagpu.sim.apiserver.server import SimApiServer
from tests.rigs.agent import METAGPU, agent_at_work
from tests.rigs.waiting import becomes, skip

NODE = "gpu-1"
SLICED = "nvidia.com/gpu.shared"
MIXED = """
version: metagpu/v1
pools:
  - name: all
    backends:
      - {backend: fraction, sharesPerGpu: 10}
      - {backend: timeslice, resource: nvidia.com/gpu.shared, replicas: 4}
"""
FULL = {METAGPU: 20, SLICED: 8}


def joined(server: SimApiServer, tmp_path: Path) -> ClusterSettings:
    """Return the settings of an agent that writes the Node's numbers alone."""
    features = frozenset({Feature.ALLOCATABLE})
    return ClusterSettings(NODE, server.kubeconfig(tmp_path), features=features)


@pytest.mark.parametrize("text", [MIXED, MIXED.replace("name: all", "name: all\n    offer: all")])
async def test_the_node_counts_an_idle_gpu_once(tmp_path: Path, text: str) -> None:
    """Of two idle GPUs each backend offers one, then the other; with `offer: all` both do."""
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, FULL, FULL)

    def shown() -> dict[str, int]:
        amounts = server.node(NODE)["status"]["allocatable"]
        return {name: int(amount) for name, amount in amounts.items()}

    async with (
        server.running(),
        agent_at_work(tmp_path, config=text, cluster_settings=joined(server, tmp_path)) as scene,
    ):
        if "offer" in text:
            await scene.until(20, 20)
            await scene.until(8, 8, SLICED)
            await becomes(lambda: shown() == FULL)
            return
        await scene.until(20, 10)
        await scene.until(8, 4, SLICED)
        await becomes(lambda: shown() == {METAGPU: 10, SLICED: 4})

        before = turns(scene.agent)
        skip(TurnTiming().turn)
        await becomes(lambda: shown() == {METAGPU: 0, SLICED: 0})
        await scene.until(20, 10)
        skip(TurnTiming().grace)
        await becomes(lambda: shown() == {METAGPU: 10, SLICED: 4})
        assert turns(scene.agent) == before[::-1]


async def test_a_reload_begins_and_ends_turns(tmp_path: Path) -> None:
    """`offer` changes no share of backends without a rule, and takes effect at once."""
    server, full = SimApiServer(), {"nvidia.com/gpu": 2, SLICED: 8}
    server.add_node(NODE)
    server.report(NODE, full, full)
    exact = MIXED.replace("fraction, sharesPerGpu: 10", "whole")
    everything = exact.replace("name: all", "name: all\n    offer: all")

    async with (
        server.running(),
        agent_at_work(
            tmp_path, config=everything, cluster_settings=joined(server, tmp_path)
        ) as scene,
    ):
        await scene.until(2, 2, "nvidia.com/gpu")
        await scene.until(8, 8, SLICED)
        assert turns(scene.agent) == [None, None]

        scene.config_file.write_text(exact)
        await scene.agent.reload()
        await becomes(lambda: None not in turns(scene.agent))

        scene.config_file.write_text(everything)
        await scene.agent.reload()
        await becomes(lambda: turns(scene.agent) == [None, None])


def turns(agent: Agent) -> list[str | None]:
    """Return the backend that offers each GPU."""
    states = agent.registry.snapshot.gpus.values()
    return [state.turn.backend if state.turn else None for state in states]
