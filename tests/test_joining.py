"""The whole agent with an API server: configuration by label, and what the node tells of it."""

from pathlib import Path

import anyio
import pytest

from metagpu import adoption
from metagpu.compat.contract import Circumstances
from metagpu.core.errors import ConfigError
from metagpu.core.news import ConfigurationRefused
from metagpu.core.profiles import Choice
from metagpu.core.report import explanation
from metagpu.plugins.cluster.settings import ALL, Feature, Settings
from metagpu.sim.apiserver import SimApiServer
from metagpu.sim.kubelet import Pod
from metagpu.sources import Source
from tests.agent_rig import METAGPU, QUICK, agent_at_work
from tests.heard import heard
from tests.mig_rig import a_node

NODE = "gpu-1"
PLACE = ("kube-system", "metagpu")
SLICED = "nvidia.com/gpu.shared"
SLICES = """
version: v1
sharing:
  timeSlicing:
    renameByDefault: true
    resources: [{name: nvidia.com/gpu, replicas: 4}]
"""
FIVE = QUICK.replace("sharesPerGpu: 10", "sharesPerGpu: 5")
LAYOUTS = """
version: v1
mig-configs:
  all-disabled: [{devices: all, mig-enabled: false}]
"""


def joined(server: SimApiServer, tmp_path: Path, **said: object) -> Settings:
    """Give the settings of a node of a running server, with profiles in its ConfigMap."""
    given: dict[str, object] = {"config_map": PLACE, "patience": 5.0, **said}
    return Settings(NODE, server.kubeconfig(tmp_path), **given)  # type: ignore[arg-type]


async def test_label_changes_what_the_kubelet_is_offered(tmp_path: Path) -> None:
    """A profile of NVIDIA's format, chosen by its label, is on offer as soon as it is set."""
    server = SimApiServer()
    server.add_node(NODE)
    server.configure(*PLACE, {"default": QUICK, "slices": SLICES, "bad": "version: metagpu/v9"})

    async with (
        server.running(),
        agent_at_work(tmp_path, joins=joined(server, tmp_path)) as it,
    ):
        await it.until(20, 20)
        server.label(NODE, {"nvidia.com/device-plugin.config": "slices"})
        await it.until(8, 8, SLICED)

        server.label(NODE, {"nvidia.com/device-plugin.config": "bad"})
        await server.until(
            lambda: "ConfigurationRefused" in [each["reason"] for each in server.events()]
        )
        assert it.agent.layout.backends.keys() == {SLICED}
        assert server.events()[-1]["note"].startswith("ConfigMap kube-system/metagpu: bad: 1: ")

        server.configure(*PLACE, {"default": QUICK, "slices": SLICES, "bad": FIVE})
        await it.until(10, 10)


async def test_first_offer_is_that_of_the_label(tmp_path: Path) -> None:
    """A node that has its label at the start is never offered the file's shares first."""
    server = SimApiServer()
    server.add_node(NODE, {"metagpu.io/config": "five"})
    server.configure(*PLACE, {"five": FIVE})

    async with (
        server.running(),
        agent_at_work(tmp_path, joins=joined(server, tmp_path)) as it,
    ):
        await it.until(10, 10)
        assert it.kubelet.lists[METAGPU] == 1


async def test_api_server_that_is_away_delays_the_first_offer_a_little(tmp_path: Path) -> None:
    """Without an answer the file's configuration is served, and the label's once it is heard."""
    server = SimApiServer()
    server.add_node(NODE, {"metagpu.io/config": "five"})
    server.configure(*PLACE, {"five": FIVE})
    async with server.running():
        joins = joined(server, tmp_path, patience=0.05)

    async with agent_at_work(tmp_path, joins=joins) as it:
        await it.until(20, 20)
        assert it.agent.cluster is not None
        with anyio.fail_after(30):
            while not it.agent.cluster.report()["problem"]:  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.005)
        status = await it.agent._status({})
        assert isinstance(status, dict)
        assert status["cluster"]["problem"].startswith("the API server cannot be reached at ")

        async with server.running():
            await it.until(10, 10)


async def test_directory_of_profiles_needs_no_config_map(tmp_path: Path) -> None:
    """Profiles in files are chosen by the label as well; without one nothing is offered yet."""
    server = SimApiServer()
    server.add_node(NODE)
    folder = anyio.Path(tmp_path / "profiles")
    await folder.mkdir()
    await (folder / "ten.yaml").write_text(QUICK)
    await (folder / "five.yaml").write_text(FIVE)

    with heard(adoption) as lines:
        async with (
            server.running(),
            agent_at_work(
                tmp_path,
                source=Source((Path(folder),)),
                joins=joined(server, tmp_path, config_map=None),
            ) as it,
        ):
            await server.until(server.events)
            assert not it.agent.registry.snapshot.offers

            server.label(NODE, {"metagpu.io/config": "ten"})
            await it.until(20, 20)
            server.label(NODE, {"metagpu.io/config": "five"})
            await it.until(10, 10)

    assert lines[0]["event"] == "nothing is offered before the cluster says what"


async def test_flag_is_stronger_than_the_label(tmp_path: Path) -> None:
    """A profile that is chosen on the node itself is not changed by its label."""
    server = SimApiServer()
    server.add_node(NODE, {"metagpu.io/config": "ten"})
    server.configure(*PLACE, {"ten": QUICK, "five": FIVE})

    async with (
        server.running(),
        agent_at_work(
            tmp_path,
            source=Source(choice=Choice("five")),
            joins=joined(server, tmp_path),
        ) as it,
    ):
        await it.until(10, 10)


async def test_mig_managers_label_is_answered_by_the_agent(tmp_path: Path) -> None:
    """A layout of `mig-configs` that exists is a success, one that does not has failed."""
    server = SimApiServer()
    server.add_node(NODE, {"nvidia.com/mig.config": "all-disabled"})
    server.configure(*PLACE, {"default": LAYOUTS})
    state = "nvidia.com/mig.config.state"

    async with (
        server.running(),
        agent_at_work(tmp_path, joins=joined(server, tmp_path)) as it,
    ):
        await server.until(lambda: server.labels(NODE).get(state) == "success")
        server.label(NODE, {"nvidia.com/mig.config": "all-of-it"})
        await server.until(lambda: server.labels(NODE).get(state) == "failed")

        assert it.agent.adoption.error is not None
        assert "all-of-it" in it.agent.adoption.error


async def test_a_layout_that_single_cannot_name_has_failed(tmp_path: Path) -> None:
    """It takes nothing down: the label is answered, an Event says why, the next one is taken."""
    server = SimApiServer()
    server.add_node(NODE, {"nvidia.com/mig.config": "balanced"})
    layouts = """
version: v1
mig-configs:
  balanced: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 2, 2g.10gb: 1}}]
  seven: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}]
"""
    server.configure(*PLACE, {"default": layouts})
    state = "nvidia.com/mig.config.state"
    source = Source(circumstances=Circumstances(environment={"MIG_STRATEGY": "single"}))
    node = await a_node(tmp_path, "{board: a100-40gb, mig: true, count: 2}")

    async with (
        server.running(),
        agent_at_work(tmp_path, node, source=source, joins=joined(server, tmp_path)) as it,
    ):
        await server.until(lambda: server.labels(NODE).get(state) == "failed")
        await server.until(
            lambda: "MIGLayoutRefused" in [each["reason"] for each in server.events()]
        )
        told = explanation(it.agent.registry.snapshot, it.agent.layout)["gpus"]
        assert ["these have 1g.5gb, 2g.10gb" in gpu["why"] for gpu in told] == [True, True]

        server.label(NODE, {"nvidia.com/mig.config": "seven"})
        await it.until(14, 14, "nvidia.com/gpu")
        await server.until(lambda: server.labels(NODE).get(state) == "success")


async def test_running_pods_keep_what_they_hold(tmp_path: Path) -> None:
    """A change by label waits for the pods on a GPU, as one by file does."""
    server = SimApiServer()
    server.add_node(NODE)
    server.configure(*PLACE, {"default": QUICK, "slices": SLICES})

    async with (
        server.running(),
        agent_at_work(tmp_path, joins=joined(server, tmp_path)) as it,
    ):
        await it.until(20, 20)
        old = Pod.single("old", {METAGPU: 10})
        await it.kubelet.admit(old)
        await it.told()
        server.label(NODE, {"metagpu.io/config": "slices"})
        await it.until(8, 4, SLICED)

        await it.kubelet.delete(old)
        await it.until(8, 8, SLICED)


async def test_taint_condition_and_labels_of_a_whole_node(tmp_path: Path) -> None:
    """A node that starts, breaks and is mended says so to its cluster."""
    server = SimApiServer()
    server.add_node(NODE, taints=[{"key": "metagpu.io/starting", "effect": "NoSchedule"}])
    settings: dict[str, object] = {"config_map": None, "features": ALL - {Feature.ALLOCATABLE}}

    def condition() -> str:
        found = server.node(NODE)["status"].get("conditions") or [{}]
        return str(found[0].get("status"))

    async with (
        server.running(),
        agent_at_work(tmp_path, joins=joined(server, tmp_path, **settings)) as it,
    ):
        await it.until(20, 20)
        server.report(NODE, it.kubelet.capacity(), it.kubelet.allocatable())
        await server.until(lambda: not server.node(NODE)["spec"].get("taints"))
        await server.until(lambda: condition() == "False")

        it.node.raise_xid(it.node.gpu("0"), 79)
        await server.until(lambda: condition() == "True")
        it.node.recover(it.node.gpu("0"))
        await server.until(lambda: condition() == "False")

        labels = server.labels(NODE)
        assert labels["nvidia.com/cuda.driver-version.full"] == it.node.driver
        assert labels["nvidia.com/cuda.runtime-version.major"]
        assert labels["metagpu.io/gpu.ecc"] in ("true", "false")
        assert labels["nvidia.com/gpu.family"] == "ampere"

        def reasons() -> list[str]:
            return [each["reason"] for each in server.events()]

        await server.until(lambda: reasons()[:2] == ["GPUOutOfService", "GPUBackInService"])


async def test_a_wrong_file_is_heard_on_the_bus_and_in_the_cluster(tmp_path: Path) -> None:
    """A file that is refused while the daemon runs is news, with line and reason, for both."""
    server = SimApiServer()
    server.add_node(NODE)

    async with (
        server.running(),
        agent_at_work(tmp_path, joins=joined(server, tmp_path, config_map=None)) as it,
    ):
        await it.until(20, 20)
        with it.agent.registry.news.subscribe(ConfigurationRefused) as news:
            new = anyio.Path(tmp_path / "new.yaml")
            await new.write_text("version: metagpu/v9\n")
            await new.rename(it.config_file)  # nobody reads half of one
            with anyio.fail_after(30):
                refused = await anext(aiter(news))
        await server.until(
            lambda: "ConfigurationRefused" in [each["reason"] for each in server.events()]
        )

        assert isinstance(refused, ConfigurationRefused)
        assert refused.why.startswith(f"{it.config_file}: 1: version: 'metagpu/v9' is not ")
        [told] = [each for each in server.events() if each["reason"] == "ConfigurationRefused"]
        assert told["note"] == f"{refused.why}; the last good configuration stays"
        await it.until(20, 20)


async def test_without_the_use_a_wrong_file_still_ends_the_start(tmp_path: Path) -> None:
    """Who does not ask the cluster for a configuration is told at once what is wrong with it."""
    server = SimApiServer()
    async with server.running():
        joins = joined(server, tmp_path, config_map=None, features=frozenset({Feature.LABELS}))

    with pytest.raises(ConfigError):
        async with agent_at_work(tmp_path, config="version: nothing", joins=joins):
            raise AssertionError
