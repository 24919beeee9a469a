"""The configuration that the cluster chooses, at a simulated API server."""

from pathlib import Path

import anyio
import pytest

from metagpu.core.config.profiles import LAST_GOOD, ClusterChoice, ConfigOutcome
from metagpu.core.model.shares import ProvisionedState
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.state.events import ConfigRejected
from metagpu.core.state.facts import (
    BackendAttached,
    BackendResumed,
    BackendSuspended,
    Fact,
    GpusFound,
    ProvisioningReported,
    SharesClaimed,
    SharesOffered,
)
from metagpu.plugins.cluster import config_follower, connection, label_sync
from metagpu.plugins.cluster.config_follower import MIG_MANAGER_LABEL, mig_state, read_choice
from metagpu.plugins.cluster.settings import ClusterTiming, Feature
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import CONFIG_MAP, NODE, QUICK, cluster_at_work
from tests.rigs.build import METAGPU, after, gpu, layout_of
from tests.rigs.logs import capture_module_logs
from tests.rigs.waiting import becomes, skip


async def test_label_and_config_map_choose_the_configuration(tmp_path: Path) -> None:
    """A label, its change, and a changed profile are each applied once."""
    server = SimApiServer()
    server.configure(*CONFIG_MAP, {"a": "A", "b": "B"})

    async with cluster_at_work(
        tmp_path, Feature.CONFIG, server=server, config_map=CONFIG_MAP
    ) as scene:
        await becomes(scene.cluster.parts.config_follower.decided.is_set)
        assert scene.choices[0].profile is None

        server.label(NODE, {"metagpu.io/config": "b"})
        await becomes(lambda: len(scene.choices) == 2)
        assert (scene.choices[1].profile, scene.choices[1].label) == ("b", "metagpu.io/config")

        server.configure(*CONFIG_MAP, {"a": "A", "b": "B2"})
        await becomes(lambda: len(scene.choices) == 3)
        assert scene.choices[2].profiles == {"a": "A", "b": "B2"}

        server.label(NODE, {"team": "vision"})
        server.label(NODE, {"metagpu.io/config": "a"})
        await becomes(lambda: len(scene.choices) == 4)
        assert scene.choices[3].source == "ConfigMap kube-system/metagpu"


async def test_a_changed_config_map_is_followed_after_a_random_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes see it at once, and do not write together; a label of the node counts at once."""
    monkeypatch.setattr(connection, "random_between", lambda _, most: most)
    monkeypatch.setattr(label_sync, "RETRY_PERIOD", 0.0)  # each run of the labels asks for NFD
    server = SimApiServer()
    server.configure(*CONFIG_MAP, {"a": "A", "b": "B"})
    timing = ClusterTiming(spread=100.0)

    async with cluster_at_work(
        *(tmp_path, Feature.CONFIG, Feature.LABELS, Feature.NODE_FEATURE),
        server=server,
        config_map=CONFIG_MAP,
        timing=timing,
    ) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        await becomes(lambda: scene.choices)
        await scene.reads_node()
        asked = -1
        while asked < (asked := len(server.requests)):  # noqa: ASYNC110 - until no label is asked for
            await anyio.sleep(0.5)

        async def reads(text: str) -> None:
            held = scene.connection.config_map
            assert held
            await becomes(lambda: (held.object or {})["data"]["a"] == text)
            await anyio.sleep(0.3)

        server.configure(*CONFIG_MAP, {"a": "A2", "b": "B"})
        await reads("A2")
        assert len(scene.choices) == 1
        assert len(server.requests) == asked
        server.label(NODE, {"metagpu.io/config": "b"})
        await becomes(lambda: len(scene.choices) == 2)

        server.configure(*CONFIG_MAP, {"a": "A3", "b": "B"})
        await reads("A3")
        assert len(scene.choices) == 2
        skip(timing.spread)
        await becomes(lambda: len(scene.choices) == 3)
    seen = [dict(choice.profiles or {}) for choice in scene.choices]
    assert seen == [{"a": text, "b": "B"} for text in ("A", "A2", "A3")]


async def test_rejected_profile_is_reported_once_and_the_next_is_applied(tmp_path: Path) -> None:
    """A wrong profile makes one Event, and a good one afterwards is applied."""
    server = SimApiServer()
    server.add_node(NODE, {"metagpu.io/config": "bad"})
    server.configure(*CONFIG_MAP, {"bad": "x", "good": "y"})

    async with cluster_at_work(
        tmp_path, Feature.CONFIG, Feature.EVENTS, server=server, config_map=CONFIG_MAP
    ) as scene:
        scene.refusal = "bad: 1: no"
        await server.until(lambda: len(server.events()) == 1)
        first = server.events()[0]
        assert first["reason"] == "ConfigRejected"
        assert first["note"] == "bad: 1: no; the last good configuration stays"
        assert first["regarding"]["uid"] == server.node(NODE)["metadata"]["uid"]
        assert scene.cluster.report().refusal == "bad: 1: no"

        scene.refusal = None
        server.label(NODE, {"metagpu.io/config": "good"})
        await server.until(lambda: len(server.events()) == 2)
        assert server.events()[1]["note"] == "profile good, chosen by the label metagpu.io/config"


@pytest.mark.parametrize(("emptied", "what"), [(False, "is gone"), (True, "is empty")])
async def test_config_map_that_is_deleted_or_emptied_changes_nothing(
    tmp_path: Path, *, emptied: bool, what: str
) -> None:
    """The last content of the ConfigMap stays in force, and an Event says so."""
    server = SimApiServer()
    server.configure(*CONFIG_MAP, {"default": "A"})

    async with cluster_at_work(
        tmp_path, Feature.CONFIG, Feature.EVENTS, server=server, config_map=CONFIG_MAP
    ) as scene:
        await becomes(lambda: len(scene.choices) == 1)
        if emptied:
            server.configure(*CONFIG_MAP, {})
        else:
            server.store.delete(("configmaps", *CONFIG_MAP))
        await server.until(server.events)

        assert server.events()[0]["note"] == (
            f"ConfigMap kube-system/metagpu {what}; the last good configuration stays"
        )
        assert len(scene.choices) == 1
        assert (
            scene.cluster.report().features["config"].startswith("ConfigMap kube-system/metagpu is")
        )

        server.configure(*CONFIG_MAP, {"default": "B"})
        await becomes(lambda: len(scene.choices) == 2)


@pytest.mark.parametrize(("refusal", "state"), [(None, "success"), ("no layout 'x'", "failed")])
async def test_mig_managers_label_is_answered(
    tmp_path: Path, refusal: str | None, state: str
) -> None:
    """The answer to mig-manager's label uses its words, and ends with the label."""
    server = SimApiServer()
    server.add_node(NODE)

    async with cluster_at_work(tmp_path, Feature.CONFIG, Feature.LABELS, server=server) as scene:
        scene.refusal = refusal
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2", nvidia_com__mig_config_state=None)
        server.label(NODE, {"nvidia.com/mig.config": "all-1g.5gb"})
        await scene.has_labels(nvidia_com__mig_config_state=state)
        assert scene.choices[-1].mig_config == scene.cluster.report().mig_config == "all-1g.5gb"

        server.label(NODE, {"nvidia.com/mig.config": None})
        await scene.has_labels(nvidia_com__mig_config_state=None)


@pytest.mark.parametrize(
    ("waits", "is_there"),
    [
        (
            BackendSuspended(gpu(0).id, "whole", "the layout waits", at=1),
            BackendResumed(gpu(0).id, "whole", at=2),
        ),
        (
            ProvisioningReported(
                gpu(0).id, "whole", ProvisionedState(blocked={"whole": "not there"}), at=1
            ),
            ProvisioningReported(gpu(0).id, "whole", ProvisionedState(), at=2),
        ),
    ],
)
async def test_mig_managers_label_waits_for_the_instances(
    tmp_path: Path, waits: Fact, is_there: Fact
) -> None:
    """The answer is pending while a GPU's layout is incomplete."""
    server = SimApiServer()
    server.add_node(NODE, {"nvidia.com/mig.config": "all-1g.5gb"})

    async with cluster_at_work(tmp_path, Feature.CONFIG, Feature.LABELS, server=server) as scene:
        await scene.has_labels(nvidia_com__mig_config_state="pending")  # nothing is on offer yet
        scene.offer("version: metagpu/v1\npools: [{name: a, backends: [{backend: whole}]}]")
        scene.registry.apply(waits)
        await scene.has_labels(nvidia_com__mig_config_state="pending")
        scene.registry.apply(is_there)
        await scene.has_labels(nvidia_com__mig_config_state="success")


@pytest.mark.parametrize("unread", ["/nodes", "/configmaps"])
async def test_first_offer_does_not_wait_for_ever(tmp_path: Path, unread: str) -> None:
    """A silent API server delays the first offer by its timeout only; half a choice is none."""
    server = SimApiServer()
    server.denied.append(("GET", unread))

    with capture_module_logs(config_follower) as lines:
        async with cluster_at_work(
            tmp_path, Feature.CONFIG, server=server, config_map=CONFIG_MAP
        ) as scene:
            await becomes(lambda: scene.cluster.report().connected or unread == "/nodes")
            with anyio.fail_after(30):
                await scene.cluster.parts.config_follower.wait_for_choice(0.1)
            assert not scene.choices

    assert lines[0]["event"] == "cluster choice timed out; going on without it"


async def test_node_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """The problem names the missing Node."""
    server = SimApiServer()

    async with cluster_at_work(tmp_path, Feature.CONFIG, server=server) as scene:
        await becomes(scene.cluster.parts.config_follower.decided.is_set)
        server.store.delete(("nodes", "", NODE))
        await becomes(lambda: scene.cluster.report().features["config"])

        assert (
            scene.cluster.report().features["config"] == f"there is no Node {NODE}; see --node-name"
        )


OURS = "metagpu.io/config"
PLUGIN = "nvidia.com/device-plugin.config"
MIG = "nvidia.com/mig.config"
HELD = {"data": {"a": "1", "all-balanced": "2"}}


@pytest.mark.parametrize(
    ("labels", "profile", "label", "mig"),
    [
        ({}, None, "", None),
        ({OURS: "a"}, "a", OURS, None),
        ({PLUGIN: "b"}, "b", PLUGIN, None),
        ({OURS: "a", PLUGIN: "b", MIG: "m"}, "a", OURS, "m"),
        ({OURS: ""}, None, "", None),
        ({MIG: "all-balanced"}, "all-balanced", MIG, "all-balanced"),
        ({MIG: "elsewhere"}, None, "", "elsewhere"),
        ({MIG: "all-balanced", OURS: "a"}, "a", OURS, "all-balanced"),
    ],
)
def test_labels_choose(
    labels: dict[str, str], profile: str | None, label: str, mig: str | None
) -> None:
    """Our label comes before NVIDIA's; mig-manager's names a layout, or a profile of its name."""
    data = HELD["data"]
    assert read_choice(labels, HELD, "here") == ClusterChoice(profile, label, mig, "here", data)


def test_config_map_may_be_missing_or_empty() -> None:
    """Without a ConfigMap profiles are unknown; one without data has none."""
    assert read_choice({}).profiles is None
    assert read_choice({}, {}, "here").profiles == {}


async def test_a_layout_that_does_not_fit_all_gpus_is_an_event(tmp_path: Path) -> None:
    """The answer is failed, and the Event names the GPUs."""
    server = SimApiServer()
    server.add_node(NODE, {"nvidia.com/mig.config": "all-1g.5gb"})
    features = (Feature.CONFIG, Feature.LABELS, Feature.EVENTS)
    async with cluster_at_work(tmp_path, *features, server=server) as scene:
        scene.mismatch = "GPU 1: no such profile"
        scene.offer()
        await scene.has_labels(nvidia_com__mig_config_state="failed")
        await server.until(server.events)
        [event] = server.events()
        assert (event["reason"], event["type"]) == ("MIGLayoutRejected", "Warning")
        assert event["note"] == "GPU 1: no such profile"


async def test_a_config_map_that_comes_later_keeps_no_daemon_waiting(tmp_path: Path) -> None:
    """Without it no profile is known; it is followed as soon as it is there."""
    server = SimApiServer()
    async with cluster_at_work(
        tmp_path, Feature.CONFIG, server=server, config_map=CONFIG_MAP
    ) as scene:
        await becomes(scene.cluster.parts.config_follower.decided.is_set)
        assert scene.choices[0].profiles == {}
        server.configure(*CONFIG_MAP, {"default": "A"})
        await becomes(lambda: len(scene.choices) == 2)


async def test_each_end_of_a_config_map_is_logged_once(tmp_path: Path) -> None:
    """Another change of the Node does not repeat it, and a next end is another one."""
    server = SimApiServer()
    with capture_module_logs(config_follower) as lines:
        async with cluster_at_work(
            tmp_path, Feature.CONFIG, server=server, config_map=CONFIG_MAP
        ) as scene:
            for count in (1, 2):
                server.configure(*CONFIG_MAP, {"default": f"{count}"})
                await becomes(lambda wanted=count: len(scene.choices) == wanted)  # type: ignore[misc] # of a loop
                server.store.delete(("configmaps", *CONFIG_MAP))
                await becomes(lambda: scene.cluster.parts.config_follower.problem)
                server.label(NODE, {"team": f"{count}"})
                await scene.reads_node()
                await anyio.sleep(0.2)
                assert [line["event"] for line in lines] == ["configuration rejected"] * count


M = "all-1g.5gb"
HELD_GPU = after(GpusFound((gpu(0),), at=0), layout_of(gpu(0)).offer_fact)
ORPHAN = after(
    SharesClaimed(HELD_GPU.gpus[gpu(0).id].shares[:1], at=1),
    SharesOffered((METAGPU,), ()),
    since=HELD_GPU,
)
PAUSED = after(
    BackendAttached(gpu(0).id, "fraction", needs_setup=False, needs_cleanup=False, at=1),
    ProvisioningReported(
        gpu(0).id,
        "fraction",
        ProvisionedState(paused={HELD_GPU.gpus[gpu(0).id].shares[0].id: "it hangs"}),
        at=1,
    ),
    since=HELD_GPU,
)


@pytest.mark.parametrize(
    ("wanted", "outcome", "snapshot", "state"),
    [
        (None, ConfigOutcome(has_mig_layouts=True), HELD_GPU, None),
        (ClusterChoice(mig_config=None), ConfigOutcome(has_mig_layouts=True), HELD_GPU, None),
        (ClusterChoice(mig_config=M), ConfigOutcome(has_mig_layouts=True), HELD_GPU, "success"),
        (ClusterChoice(mig_config=M), ConfigOutcome(), HELD_GPU, None),
        (ClusterChoice(M, mig_config=M), ConfigOutcome(), HELD_GPU, "success"),
        (ClusterChoice("other", mig_config=M), ConfigOutcome(), HELD_GPU, None),
        (ClusterChoice(mig_config=M), ConfigOutcome("bad: 1: no"), HELD_GPU, None),
        (ClusterChoice(mig_config=M), ConfigOutcome(f"no {M}"), HELD_GPU, "failed"),
        (ClusterChoice(M, mig_config=M), ConfigOutcome("bad: 1: no"), HELD_GPU, "failed"),
        (ClusterChoice(M, mig_config=M), ConfigOutcome(mig_mismatch="x"), HELD_GPU, "failed"),
        (ClusterChoice(M, mig_config=M), ConfigOutcome(), after(), "pending"),
        (ClusterChoice(M, mig_config=M), ConfigOutcome(), ORPHAN, "pending"),
        (ClusterChoice(M, mig_config=M), ConfigOutcome(), PAUSED, "pending"),
    ],
)
def test_only_what_is_ours_is_answered(
    wanted: ClusterChoice | None, outcome: ConfigOutcome, snapshot: Snapshot, state: str | None
) -> None:
    """Another program may follow mig-manager's label on a node without layouts of ours."""
    assert mig_state(wanted, outcome, snapshot) == state


@pytest.mark.parametrize(("value", "managed"), [("true", True), ("false", False), (None, False)])
def test_mig_manager_runs_where_the_operator_says_so(value: str | None, *, managed: bool) -> None:
    """The operator writes `false` where it pauses or has removed its MIG manager."""
    labels = {} if value is None else {MIG_MANAGER_LABEL: value}
    assert read_choice(labels) == ClusterChoice(mig_manager=managed)


async def test_a_rejection_that_nothing_else_shows_is_answered(tmp_path: Path) -> None:
    """A file that changes on the node may make the configuration wrong."""
    server = SimApiServer()
    server.add_node(NODE, {MIG: M})
    features = (Feature.CONFIG, Feature.LABELS)
    async with cluster_at_work(tmp_path, *features, server=server, timing=QUICK) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__mig_config_state="success")
        await scene.reads_node()
        await anyio.sleep(0.3)  # nothing else triggers
        scene.refusal = "a.yaml: 1: no"
        scene.registry.events.publish(ConfigRejected(scene.refusal, 1, LAST_GOOD))
        await scene.has_labels(nvidia_com__mig_config_state="failed")


async def test_a_choice_that_takes_its_time_is_answered_then(tmp_path: Path) -> None:
    """The labels were written before the choice was followed, and nothing else has changed."""
    server = SimApiServer()
    async with cluster_at_work(tmp_path, Feature.CONFIG, Feature.LABELS, server=server) as scene:
        scene.offer()
        await scene.has_labels(nvidia_com__gpu_count="2")
        scene.follow_s = 0.3
        server.label(NODE, {MIG: M})
        await scene.has_labels(nvidia_com__mig_config_state="success")
