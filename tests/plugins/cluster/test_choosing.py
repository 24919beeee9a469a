"""The configuration that the cluster chooses, at a simulated API server."""

from pathlib import Path

import anyio
import pytest

from metagpu.core.facts import BackendResumed, BackendSuspended, Fact, StockTold
from metagpu.core.model import Stock
from metagpu.plugins.cluster import choosing
from metagpu.plugins.cluster.settings import Feature
from metagpu.sim.apiserver import SimApiServer
from tests.build import gpu
from tests.heard import heard
from tests.plugins.cluster.rig import CONFIG_MAP, NODE, cluster_at_work
from tests.waiting import becomes


async def test_label_and_config_map_choose_the_configuration(tmp_path: Path) -> None:
    """A label, its change, and a change of the profile itself are heard, each once."""
    server = SimApiServer()
    server.configure(*CONFIG_MAP, {"a": "A", "b": "B"})

    async with cluster_at_work(
        tmp_path, Feature.CONFIG, server=server, config_map=CONFIG_MAP
    ) as it:
        await becomes(it.cluster.chooser.decided.is_set)
        assert it.told[0].profile is None

        server.label(NODE, {"metagpu.io/config": "b"})
        await becomes(lambda: len(it.told) == 2)
        assert (it.told[1].profile, it.told[1].label) == ("b", "metagpu.io/config")

        server.configure(*CONFIG_MAP, {"a": "A", "b": "B2"})
        await becomes(lambda: len(it.told) == 3)
        assert it.told[2].profiles == {"a": "A", "b": "B2"}

        server.label(NODE, {"team": "vision"})
        server.label(NODE, {"metagpu.io/config": "a"})
        await becomes(lambda: len(it.told) == 4)
        assert it.told[3].place == "ConfigMap kube-system/metagpu"


async def test_refused_profile_is_told_once_and_the_next_is_taken(tmp_path: Path) -> None:
    """A profile that is wrong makes one Event, and a good one afterwards is taken."""
    server = SimApiServer()
    server.add_node(NODE, {"metagpu.io/config": "bad"})
    server.configure(*CONFIG_MAP, {"bad": "x", "good": "y"})

    async with cluster_at_work(
        tmp_path, Feature.CONFIG, Feature.EVENTS, server=server, config_map=CONFIG_MAP
    ) as it:
        it.refusal = "bad: 1: no"
        await server.until(lambda: len(server.events()) == 1)
        first = server.events()[0]
        assert first["reason"] == "ConfigurationRefused"
        assert first["note"] == "bad: 1: no; the last good configuration stays"
        assert first["regarding"]["uid"] == server.node(NODE)["metadata"]["uid"]
        assert it.cluster.report()["refusal"] == "bad: 1: no"

        it.refusal = None
        server.label(NODE, {"metagpu.io/config": "good"})
        await server.until(lambda: len(server.events()) == 2)
        assert server.events()[1]["note"] == "profile good, by the label metagpu.io/config"


async def test_config_map_that_is_deleted_changes_nothing(tmp_path: Path) -> None:
    """A ConfigMap that goes away leaves its last content in force, and is told."""
    server = SimApiServer()
    server.configure(*CONFIG_MAP, {"default": "A"})

    async with cluster_at_work(
        tmp_path, Feature.CONFIG, Feature.EVENTS, server=server, config_map=CONFIG_MAP
    ) as it:
        await becomes(lambda: len(it.told) == 1)
        server.store.delete(("configmaps", *CONFIG_MAP))
        await server.until(server.events)

        assert server.events()[0]["note"] == (
            "ConfigMap kube-system/metagpu is gone; the last good configuration stays"
        )
        assert len(it.told) == 1
        assert it.cluster.report()["uses"]["config"].startswith("ConfigMap kube-system/metagpu is")

        server.configure(*CONFIG_MAP, {"default": "B"})
        await becomes(lambda: len(it.told) == 2)


@pytest.mark.parametrize(("refusal", "state"), [(None, "success"), ("no layout 'x'", "failed")])
async def test_mig_managers_label_is_answered(
    tmp_path: Path, refusal: str | None, state: str
) -> None:
    """The label of mig-manager is answered in its words, and no more once it is gone."""
    server = SimApiServer()
    server.add_node(NODE)

    async with cluster_at_work(tmp_path, Feature.CONFIG, Feature.LABELS, server=server) as it:
        it.refusal = refusal
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2", nvidia_com__mig_config_state=None)
        server.label(NODE, {"nvidia.com/mig.config": "all-1g.5gb"})
        await it.has_labels(nvidia_com__mig_config_state=state)
        assert it.told[-1].mig_config == "all-1g.5gb"

        server.label(NODE, {"nvidia.com/mig.config": None})
        await it.has_labels(nvidia_com__mig_config_state=None)


@pytest.mark.parametrize(
    ("waits", "is_there"),
    [
        (
            BackendSuspended(gpu(0).id, "whole", "the layout waits", at=1),
            BackendResumed(gpu(0).id, "whole", at=2),
        ),
        (
            StockTold(gpu(0).id, "whole", Stock(blocked={"whole": "not there"}), at=1),
            StockTold(gpu(0).id, "whole", Stock(), at=2),
        ),
    ],
)
async def test_mig_managers_label_waits_for_the_instances(
    tmp_path: Path, waits: Fact, is_there: Fact
) -> None:
    """While a GPU's layout is not there, or not all of it, the answer is pending."""
    server = SimApiServer()
    server.add_node(NODE, {"nvidia.com/mig.config": "all-1g.5gb"})

    async with cluster_at_work(tmp_path, Feature.CONFIG, Feature.LABELS, server=server) as it:
        it.offer("version: metagpu/v1\npools: [{name: a, backends: [{backend: whole}]}]")
        it.registry.apply(waits)
        await it.has_labels(nvidia_com__mig_config_state="pending")
        it.registry.apply(is_there)
        await it.has_labels(nvidia_com__mig_config_state="success")


async def test_first_offer_does_not_wait_for_ever(tmp_path: Path) -> None:
    """A cluster that says nothing holds the first offer up for its patience alone."""
    server = SimApiServer()
    server.denied.append(("GET", "/nodes"))

    with heard(choosing) as lines:
        async with cluster_at_work(tmp_path, Feature.CONFIG, server=server) as it:
            with anyio.fail_after(30):
                await it.cluster.chooser.decision()

    assert lines[0]["event"].startswith("the API server has not said which profile")


async def test_node_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """A wrong node name is told as that."""
    server = SimApiServer()

    async with cluster_at_work(tmp_path, Feature.CONFIG, server=server) as it:
        await becomes(it.cluster.chooser.decided.is_set)
        server.store.delete(("nodes", "", NODE))
        await becomes(lambda: it.cluster.report()["uses"]["config"])

        assert it.cluster.report()["uses"]["config"] == f"there is no Node {NODE}; see --node-name"
