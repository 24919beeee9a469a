"""The whole agent with an API server: configuration by label, and reports about the node."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio
import pytest

from metagpu.agent import config_loader
from metagpu.agent.config_source import ConfigSource
from metagpu.compat.contract import ConversionContext
from metagpu.core.config.errors import ConfigError
from metagpu.core.config.profiles import ProfileChoice
from metagpu.core.reports.status import explain_report
from metagpu.core.state.events import ConfigRejected
from metagpu.plugins.cluster.settings import ALL_FEATURES, ClusterSettings, ClusterTiming, Feature
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimPod
from tests.rigs.agent import METAGPU, QUICK, agent_at_work
from tests.rigs.logs import capture_module_logs
from tests.rigs.mig import a_node, hurry, mig_pool, on_demand_pool, pod
from tests.rigs.waiting import becomes

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


def joined(server: SimApiServer, tmp_path: Path, **changes: object) -> ClusterSettings:
    """Return the cluster settings of a node whose ConfigMap has profiles."""
    given = {"config_map": PLACE, "timing": ClusterTiming(spread=0.0), **changes}
    return ClusterSettings(NODE, server.kubeconfig(tmp_path), **given)  # type: ignore[arg-type]


async def test_a_label_changes_the_offer(tmp_path: Path) -> None:
    """A profile of NVIDIA's format, chosen by its label, is on offer as soon as it is set."""
    server = SimApiServer()
    server.add_node(NODE)
    server.configure(*PLACE, {"default": QUICK, "slices": SLICES, "bad": "version: metagpu/v9"})

    async with (
        server.running(),
        agent_at_work(tmp_path, cluster_settings=joined(server, tmp_path)) as scene,
    ):
        await scene.until(20, 20)
        server.label(NODE, {"nvidia.com/device-plugin.config": "slices"})
        await scene.until(8, 8, SLICED)

        server.label(NODE, {"nvidia.com/device-plugin.config": "bad"})
        await server.until(lambda: "ConfigRejected" in [each["reason"] for each in server.events()])
        assert scene.agent.layout.backends.keys() == {SLICED}
        assert server.events()[-1]["note"].startswith("ConfigMap kube-system/metagpu: bad: 1: ")

        server.configure(*PLACE, {"default": QUICK, "slices": SLICES, "bad": FIVE})
        await scene.until(10, 10)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"default": FIVE, "slices": SLICES}, {"standard": FIVE, "slices": SLICES}),
        ({"only": FIVE}, {"only": FIVE, "slices": SLICES}),
    ],
    ids=["the default is renamed", "the only one has company"],
)
async def test_a_profile_that_is_chosen_no_more_stays_in_force(
    tmp_path: Path, before: Mapping[str, str], after: Mapping[str, str]
) -> None:
    """Nothing else comes into force by itself: an Event says what to choose."""
    server = SimApiServer()
    server.add_node(NODE)
    server.configure(*PLACE, before)

    async with (
        server.running(),
        agent_at_work(tmp_path, cluster_settings=joined(server, tmp_path)) as scene,
    ):
        await scene.until(10, 10)
        server.configure(*PLACE, after)
        await server.until(lambda: "ConfigRejected" in [each["reason"] for each in server.events()])
        assert "no profile is chosen" in server.events()[-1]["note"]
        assert scene.kubelet.capacity()[METAGPU] == 10

        server.label(NODE, {"metagpu.io/config": "slices"})
        await scene.until(8, 8, SLICED)
        server.label(NODE, {"metagpu.io/config": None})
        await scene.until(20, 20)  # the file's


async def test_first_offer_is_that_of_the_label(tmp_path: Path) -> None:
    """A node that has its label at the start never offers the file's shares first."""
    server = SimApiServer()
    server.add_node(NODE, {"metagpu.io/config": "five"})
    server.configure(*PLACE, {"five": FIVE})

    async with (
        server.running(),
        agent_at_work(tmp_path, cluster_settings=joined(server, tmp_path)) as scene,
    ):
        await scene.until(10, 10)
        assert scene.kubelet.lists[METAGPU] == 1


async def test_a_start_in_a_driver_upgrade_offers_nothing_first(tmp_path: Path) -> None:
    """A daemon that starts while the driver is upgraded gives no share before the end."""
    server = SimApiServer()
    label = "nvidia.com/gpu-driver-upgrade-state"
    server.add_node(NODE, {label: "pod-restart-required"})
    server.configure(*PLACE, {"five": FIVE})

    async with server.running():
        settings = joined(server, tmp_path, drain_on_driver_upgrade=True)
        async with agent_at_work(tmp_path, cluster_settings=settings) as scene:
            await scene.until(10, 0)
            assert scene.kubelet.lists[METAGPU] == 1

            server.label(NODE, {label: "upgrade-done"})
            await scene.until(10, 10)


async def test_api_server_that_is_away_delays_the_first_offer_a_little(tmp_path: Path) -> None:
    """Without an API server the file's configuration is offered, and the label's one later."""
    server = SimApiServer()
    server.add_node(NODE, {"metagpu.io/config": "five"})
    server.configure(*PLACE, {"five": FIVE})
    async with server.running():
        joins = joined(server, tmp_path, choice_timeout=0.05)

    async with agent_at_work(tmp_path, cluster_settings=joins) as scene:
        await scene.until(20, 20)
        assert scene.agent.cluster is not None
        with anyio.fail_after(30):
            while not scene.agent.cluster.report().problem:  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.005)
        status = await scene.status()
        assert isinstance(status, dict)
        assert status["cluster"]["problem"].startswith("the API server cannot be reached at ")

        async with server.running():
            await scene.until(10, 10)


async def test_directory_of_profiles_needs_no_config_map(tmp_path: Path) -> None:
    """A label chooses a profile of a directory; without a label nothing is offered yet."""
    server = SimApiServer()
    server.add_node(NODE)
    folder = anyio.Path(tmp_path / "profiles")
    await folder.mkdir()
    await (folder / "ten.yaml").write_text(QUICK)
    await (folder / "five.yaml").write_text(FIVE)

    with capture_module_logs(config_loader) as lines:
        async with (
            server.running(),
            agent_at_work(
                tmp_path,
                source=ConfigSource((Path(folder),)),
                cluster_settings=joined(server, tmp_path, config_map=None),
            ) as scene,
        ):
            await server.until(server.events)
            assert not scene.agent.registry.snapshot.offers

            server.label(NODE, {"metagpu.io/config": "ten"})
            await scene.until(20, 20)
            server.label(NODE, {"metagpu.io/config": "five"})
            await scene.until(10, 10)

    assert lines[0]["event"] == "configuration waits for the cluster"


async def test_flag_is_stronger_than_the_label(tmp_path: Path) -> None:
    """A label does not change a profile that a flag of the node chooses, and an Event says so."""
    server = SimApiServer()
    server.add_node(NODE, {"metagpu.io/config": "ten"})
    server.configure(*PLACE, {"ten": QUICK, "five": FIVE})

    async with (
        server.running(),
        agent_at_work(
            tmp_path,
            source=ConfigSource(choice=ProfileChoice("five")),
            cluster_settings=joined(server, tmp_path),
        ) as scene,
    ):
        await scene.until(10, 10)
        await server.until(lambda: rejections(server) != [])
        note = "the label metagpu.io/config=ten has no effect: --profile has precedence; in force: "
        assert rejections(server) == [f"{note}five; the configuration of the option stays"]
        server.label(NODE, {"metagpu.io/config": "five"})
        await server.until(lambda: "ConfigApplied" in [each["reason"] for each in server.events()])


@pytest.mark.parametrize("asked", ["balanced", "no-such"])
async def test_mig_config_option_is_stronger_than_the_label(tmp_path: Path, asked: str) -> None:
    """A layout that an option keeps out of force is answered with failed, and by an Event."""
    server = SimApiServer()
    server.add_node(NODE, {"nvidia.com/mig.config": asked})
    server.configure(*PLACE, {"default": LAYOUTS})
    source = ConfigSource(context=ConversionContext(mig_config="all-disabled"))
    state = "nvidia.com/mig.config.state"

    async with (
        server.running(),
        agent_at_work(tmp_path, source=source, cluster_settings=joined(server, tmp_path)),
    ):
        await server.until(lambda: server.labels(NODE).get(state) == "failed")
        await server.until(lambda: rejections(server) != [])
        assert rejections(server)[0].startswith(
            f"the label nvidia.com/mig.config={asked} has no effect: --mig-config has precedence"
        )
        server.label(NODE, {"nvidia.com/mig.config": "all-disabled"})
        await server.until(lambda: server.labels(NODE).get(state) == "success")


async def test_mig_managers_label_is_answered_by_the_agent(tmp_path: Path) -> None:
    """An existing layout of `mig-configs` is answered with success, an unknown one with failed."""
    server = SimApiServer()
    server.add_node(NODE, {"nvidia.com/mig.config": "all-disabled"})
    server.configure(*PLACE, {"default": LAYOUTS})
    state = "nvidia.com/mig.config.state"

    async with (
        server.running(),
        agent_at_work(tmp_path, cluster_settings=joined(server, tmp_path)) as scene,
    ):
        await server.until(lambda: server.labels(NODE).get(state) == "success")
        server.label(NODE, {"nvidia.com/mig.config": "all-of-it"})
        await server.until(lambda: server.labels(NODE).get(state) == "failed")
        await server.until(lambda: rejections(server) != [])

        assert rejections(server) == [
            (
                "there is no layout 'all-of-it' (label nvidia.com/mig.config); there are: "
                "all-disabled; the GPUs stay as they are"
            )
        ]
        assert scene.agent.config_loader.loaded.layout.name == "all-disabled"


async def test_a_gpu_that_leaves_mig_mode_is_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way back from MIG is pending until the GPU is reset; then it is a success."""
    hurry(monkeypatch)
    server = SimApiServer()
    server.add_node(NODE, {"nvidia.com/mig.config": "all-disabled"})
    server.configure(*PLACE, {"default": LAYOUTS})
    state = "nvidia.com/mig.config.state"
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")

    async with (
        server.running(),
        agent_at_work(tmp_path, node, cluster_settings=joined(server, tmp_path)) as scene,
    ):
        await server.until(lambda: server.labels(NODE).get(state) == "pending")
        # It is pending before metagpu has asked for the other mode too: a reset is in vain then.
        await becomes(lambda: not scene.node.gpus[0].mig.pending)
        scene.node.reset_gpu(scene.node.gpus[0])
        await scene.agent.health.survey()
        await server.until(lambda: server.labels(NODE).get(state) == "success")
        assert not scene.node.gpus[0].mig.enabled


async def test_a_gpu_that_is_not_on_offer_yet_is_pending(tmp_path: Path) -> None:
    """The way back from MIG is a success once the whole GPU is on offer, and not before."""
    server = SimApiServer()
    server.add_node(NODE, {"nvidia.com/mig.config": "all-disabled"})
    server.configure(*PLACE, {"default": LAYOUTS})
    node = await a_node(tmp_path, "{model: h100-80gb, mig: true}")

    def has_succeeded() -> bool:
        return server.labels(NODE).get("nvidia.com/mig.config.state") == "success"

    async with (
        server.running(),
        agent_at_work(tmp_path, node, cluster_settings=joined(server, tmp_path)) as scene,
    ):
        await scene.until(0, 0, "nvidia.com/gpu")
        await becomes(lambda: not scene.node.gpus[0].mig.enabled)
        await becomes(lambda: "after the next check" in str(scene.state(0).suspended))
        assert not has_succeeded()
        await scene.agent.health.survey()
        await scene.until(1, 1, "nvidia.com/gpu")
        await server.until(has_succeeded)


async def test_a_layout_that_single_cannot_name_has_failed(tmp_path: Path) -> None:
    """A layout that `single` cannot name is answered with failed, and changes nothing."""
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
    source = ConfigSource(context=ConversionContext(environment={"MIG_STRATEGY": "single"}))
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true, count: 2}")

    async with (
        server.running(),
        agent_at_work(
            tmp_path, node, source=source, cluster_settings=joined(server, tmp_path)
        ) as scene,
    ):
        await server.until(lambda: server.labels(NODE).get(state) == "failed")
        await server.until(
            lambda: "MIGLayoutRejected" in [each["reason"] for each in server.events()]
        )
        reported = explain_report(scene.agent.registry.snapshot, scene.agent.layout).gpus
        assert ["these have 1g.5gb, 2g.10gb" in gpu.pool_reason for gpu in reported] == [
            True,
            True,
        ]

        server.label(NODE, {"nvidia.com/mig.config": "seven"})
        await scene.until(14, 14, "nvidia.com/gpu")
        await server.until(lambda: server.labels(NODE).get(state) == "success")


def rejections(server: SimApiServer) -> list[str]:
    """Return the notes of the Events of rejected configurations, the oldest first."""
    return [each["note"] for each in server.events() if "Rejected" in each["reason"]]


def is_last_rejection(server: SimApiServer, note: str) -> bool:
    """Return whether the newest of those Events has this note."""
    return rejections(server)[-1:] == [note]


async def test_a_layout_that_no_gpu_can_have_changes_nothing(tmp_path: Path) -> None:
    """The last good layout stays, the state is failed, and every report has the same reason."""
    server = SimApiServer()
    server.add_node(NODE, {"nvidia.com/mig.config": "seven"})
    layouts = """
version: v1
mig-configs:
  seven: [{devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 7}}]
  other-model: [{devices: [0], mig-enabled: true, mig-devices: {1g.18gb: 7}}]
  too-many: [{devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 8}}]
"""
    server.configure(*PLACE, {"default": layouts})
    state, small = "nvidia.com/mig.config.state", "nvidia.com/mig-1g.5gb"
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}, {model: a100-40gb}")

    async with (
        server.running(),
        agent_at_work(tmp_path, node, cluster_settings=joined(server, tmp_path)) as scene,
    ):
        await scene.until(7, 7, small)
        await server.until(lambda: server.labels(NODE).get(state) == "success")

        for wrong, reason in (
            ("other-model", "has no profile 1g.18gb"),
            ("too-many", "8 x 1g.5gb wanted, room for 7"),
        ):
            server.label(NODE, {"nvidia.com/mig.config": wrong})
            await server.until(lambda: server.labels(NODE).get(state) == "failed")
            await scene.until(7, 7, small)
            await scene.until(1, 1, "nvidia.com/gpu")

            report = scene.agent.config_loader.report()
            place = f"ConfigMap kube-system/metagpu: default: 5: mig-configs.{wrong}[0]: "
            place = place.replace("5:", "5:" if wrong == "other-model" else "6:")
            assert (report.error or "").startswith(place)
            assert reason in (report.error or "")
            note = f"{report.error}; the last good configuration stays"
            # The Event and the label are written one after the other, in any order.
            await server.until(partial(is_last_rejection, server, note))
            gpus = explain_report(scene.agent.registry.snapshot, scene.agent.layout).gpus
            assert [gpu.pool_reason for gpu in gpus if "no shares" in gpu.pool_reason] == []
            assert [gpu.suspended for gpu in gpus] == [{}, {}]

            server.label(NODE, {"nvidia.com/mig.config": "seven"})
            await server.until(lambda: server.labels(NODE).get(state) == "success")


async def test_a_layout_that_some_gpus_can_have_is_theirs(tmp_path: Path) -> None:
    """The GPUs that can have a layout get it; the state is failed, with the others named."""
    server = SimApiServer()
    server.add_node(NODE, {"nvidia.com/mig.config": "all-18"})
    layouts = """
version: v1
mig-configs:
  all-18: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}]
"""
    server.configure(*PLACE, {"default": layouts})
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}, {model: h100-80gb, mig: true}")

    async with (
        server.running(),
        agent_at_work(tmp_path, node, cluster_settings=joined(server, tmp_path)) as scene,
    ):
        await scene.until(7, 7, "nvidia.com/mig-1g.5gb")
        await server.until(
            lambda: server.labels(NODE).get("nvidia.com/mig.config.state") == "failed"
        )
        [misfit] = scene.agent.config_loader.report().misfits
        assert misfit.startswith("GPU 1: the layout 7x1g.5gb does not fit: the GPU has no profile")
        await server.until(lambda: rejections(server))
        assert rejections(server) == [misfit]


async def test_running_pods_keep_what_they_hold(tmp_path: Path) -> None:
    """A change by label waits for the pods on a GPU, as a change by file does."""
    server = SimApiServer()
    server.add_node(NODE)
    server.configure(*PLACE, {"default": QUICK, "slices": SLICES})

    async with (
        server.running(),
        agent_at_work(tmp_path, cluster_settings=joined(server, tmp_path)) as scene,
    ):
        await scene.until(20, 20)
        old = SimPod.single("old", {METAGPU: 10})
        await scene.kubelet.admit(old)
        await scene.wait_holders()
        server.label(NODE, {"metagpu.io/config": "slices"})
        await scene.until(8, 4, SLICED)

        await scene.kubelet.delete(old)
        await scene.until(8, 8, SLICED)


async def test_taint_condition_and_labels_of_a_whole_node(tmp_path: Path) -> None:
    """A node reports its start, its faults and its recovery to the cluster."""
    server = SimApiServer()
    server.add_node(NODE, taints=[{"key": "metagpu.io/starting", "effect": "NoSchedule"}])
    settings: dict[str, object] = {
        "config_map": None,
        "features": ALL_FEATURES - {Feature.ALLOCATABLE},
    }

    def condition() -> str:
        found = server.node(NODE)["status"].get("conditions") or [{}]
        return str(found[0].get("status"))

    async with (
        server.running(),
        agent_at_work(tmp_path, cluster_settings=joined(server, tmp_path, **settings)) as scene,
    ):
        await scene.until(20, 20)
        server.report(NODE, scene.kubelet.capacity(), scene.kubelet.allocatable())
        await server.until(lambda: not server.node(NODE)["spec"].get("taints"))
        await server.until(lambda: condition() == "False")

        scene.node.raise_xid(scene.node.gpu("0"), 79)
        await server.until(lambda: condition() == "True")
        scene.node.reset_gpu(scene.node.gpu("0"))
        await server.until(lambda: condition() == "False")

        # Labels are written beside conditions.
        await server.until(lambda: "nvidia.com/gpu.family" in server.labels(NODE))
        labels = server.labels(NODE)
        assert labels["nvidia.com/cuda.driver-version.full"] == scene.node.driver
        assert labels["nvidia.com/cuda.runtime-version.major"]
        assert labels["metagpu.io/gpu.ecc"] in ("true", "false")
        assert labels["nvidia.com/gpu.family"] == "ampere"

        def reasons() -> list[str]:
            return [each["reason"] for each in server.events()]

        await server.until(lambda: reasons()[:2] == ["GPUUnhealthy", "GPURecovered"])


async def test_the_nodes_amounts_follow_an_instance_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MIG instance lowers every profile that it displaces at the Node, before any kubelet."""
    hurry(monkeypatch)
    server = SimApiServer()
    server.add_node(NODE)
    use: dict[str, object] = {"config_map": None, "features": frozenset({Feature.ALLOCATABLE})}
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")

    async with (
        server.running(),
        agent_at_work(
            tmp_path,
            node,
            on_demand_pool(),
            cluster_settings=joined(server, tmp_path, **use),
        ) as scene,
    ):
        await scene.until(1, 1, "nvidia.com/mig-7g.40gb")
        await scene.until(2, 2, "nvidia.com/mig-3g.20gb")
        server.report(NODE, scene.kubelet.capacity(), scene.kubelet.allocatable())
        before = dict(server.node(NODE)["status"]["allocatable"])
        await scene.kubelet.admit(pod("train", "3g.20gb"))
        await scene.until(1, 0, "nvidia.com/mig-7g.40gb")

        def same() -> bool:
            counted = {name: str(n) for name, n in scene.kubelet.allocatable().items()}
            return counted == dict(server.node(NODE)["status"]["allocatable"]) != before

        await server.until(same)


async def test_a_wrong_file_is_an_event_on_the_bus_and_in_the_cluster(tmp_path: Path) -> None:
    """A refused file is an event, with line and reason, on the bus and in the cluster."""
    server = SimApiServer()
    server.add_node(NODE)

    async with (
        server.running(),
        agent_at_work(
            tmp_path, cluster_settings=joined(server, tmp_path, config_map=None)
        ) as scene,
    ):
        await scene.until(20, 20)
        with scene.agent.registry.events.subscribe(ConfigRejected) as rejections:
            new = anyio.Path(tmp_path / "new.yaml")
            await new.write_text("version: metagpu/v9\n")
            await new.rename(scene.config_file)  # never a part of a file
            with anyio.fail_after(30):
                refused = await anext(aiter(rejections))
        await server.until(lambda: "ConfigRejected" in [each["reason"] for each in server.events()])

        assert isinstance(refused, ConfigRejected)
        assert refused.reason.startswith(
            f"{scene.config_file}: 1: version: 'metagpu/v9' is unknown"
        )
        [reported] = [each for each in server.events() if each["reason"] == "ConfigRejected"]
        assert reported["note"] == f"{refused.reason}; the last good configuration stays"
        await scene.until(20, 20)


async def test_a_resource_that_no_gpu_provides_is_an_event(tmp_path: Path) -> None:
    """A profile that no GPU has is a warning of the Node, not only an amount of 0."""
    server = SimApiServer()
    server.add_node(NODE)
    node = await a_node(tmp_path, "{model: a100-40gb, mig: true}")
    config = mig_pool("profiles: [1g.5gb, 7g.80gb]")
    async with (
        server.running(),
        agent_at_work(
            tmp_path, node, config, cluster_settings=joined(server, tmp_path, config_map=None)
        ),
    ):
        await server.until(lambda: "ResourceEmpty" in [each["reason"] for each in server.events()])
        [reported] = [each for each in server.events() if each["reason"] == "ResourceEmpty"]
        assert reported["note"].startswith("nvidia.com/mig-7g.80gb has the amount 0")


async def test_without_the_use_a_wrong_file_still_ends_the_start(tmp_path: Path) -> None:
    """Without configuration from the cluster a wrong file ends the start with its error."""
    server = SimApiServer()
    async with server.running():
        joins = joined(server, tmp_path, config_map=None, features=frozenset({Feature.LABELS}))

    with pytest.raises(ConfigError):
        async with agent_at_work(tmp_path, config="version: nothing", cluster_settings=joins):
            raise AssertionError
