"""What a node tells its cluster, and how it hears of its configuration: over HTTP, both ways."""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from metagpu.core.facts import (
    BackendResumed,
    BackendSuspended,
    Fact,
    GpuFaulted,
    GpuRecovered,
    GpusFound,
    InstanceFaulted,
    InstanceRecovered,
    SharesGranted,
    SharesOffered,
    SharesReleased,
    StockTold,
)
from metagpu.core.model import ResourceName, Stock
from metagpu.core.snapshot import Snapshot
from metagpu.plugins import cluster
from metagpu.plugins.cluster import chore, telling
from metagpu.plugins.cluster.settings import Feature
from metagpu.sim.apiserver import SimApiServer
from tests.build import METAGPU, gpu
from tests.heard import heard
from tests.plugins.cluster.rig import CONFIG_MAP, NODE, cluster_at_work

SIDE_BY_SIDE = """
version: metagpu/v1
pools:
  - name: all
    backends:
      - {backend: fraction, sharesPerGpu: 10}
      - {backend: timeslice, resource: nvidia.com/gpu.shared, replicas: 4}
"""
SLICED = ResourceName("nvidia.com/gpu.shared")


# --- labels -----------------------------------------------------------------------------------


async def test_labels_are_written_and_follow_what_is_on_offer(tmp_path: Path) -> None:
    """The node's labels say what GPUs it has and how they are cut, also after a change."""
    async with cluster_at_work(tmp_path, Feature.LABELS) as it:
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2", nvidia_com__gpu_sharing_strategy=None)
        labels = it.server.labels(NODE)

        assert labels["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB"
        assert labels["metagpu.io/cnvrg.io_metagpu.replicas"] == "10"
        assert labels["kubernetes.io/hostname"] == NODE

        it.offer(SIDE_BY_SIDE, count=3)
        await it.has_labels(nvidia_com__gpu_count="3")
        assert it.server.labels(NODE)["nvidia.com/gpu.sharing-strategy"] == "time-slicing"


async def test_labels_that_are_true_are_not_written_again(tmp_path: Path) -> None:
    """A node that says what is so is left alone, whoever changes something else of it."""
    async with cluster_at_work(tmp_path, Feature.LABELS, Feature.CONDITION) as it:
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2")
        await it.server.until(lambda: it.server.node(NODE)["status"].get("conditions"))
        before = [each for each in it.server.requests if each.method == "PATCH"]
        it.server.label(NODE, {"team": "vision"})
        it.registry.apply(GpuFaulted(gpu(0).id, "XID 79", at=5))
        await it.server.until(
            lambda: it.server.node(NODE)["status"]["conditions"][0]["status"] == "True"
        )

        after = [each for each in it.server.requests if each.method == "PATCH"]
        assert [each.what for each in after[len(before) :]] == [f"/api/v1/nodes/{NODE}/status"]


async def test_labels_outlive_a_restart_and_end_with_the_offer(tmp_path: Path) -> None:
    """A daemon that starts takes no label away before it knows better; then it does."""
    server = SimApiServer()
    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as it:
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2")

    async with cluster_at_work(tmp_path, Feature.LABELS, Feature.CONDITION, server=server) as it:
        it.registry.apply(GpusFound((gpu(0),), at=0))
        await server.until(lambda: server.node(NODE)["status"].get("conditions"))
        assert server.labels(NODE)["nvidia.com/gpu.count"] == "2"

        it.offer(count=1)
        await it.has_labels(nvidia_com__gpu_count="1")
        it.registry.apply(SharesOffered((), ()))
        await it.has_labels(nvidia_com__gpu_count=None)


async def test_labels_are_left_to_gpu_feature_discovery(tmp_path: Path) -> None:
    """Where GPU Feature Discovery labels the node, its names stay its own."""
    server = SimApiServer()
    server.add_node(NODE)
    server.label(NODE, {"nvidia.com/gfd.timestamp": "1", "nvidia.com/gpu.count": "9"}, "nfd-master")

    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as it:
        it.offer()
        await it.server.until(
            lambda: "metagpu.io/cnvrg.io_metagpu.replicas" in it.server.labels(NODE)
        )
        labels = it.server.labels(NODE)

        assert labels["nvidia.com/gpu.count"] == "9"
        assert "nvidia.com/gpu.product" not in labels

        server.label(NODE, {"nvidia.com/gfd.timestamp": None, "nvidia.com/gpu.count": None})
        await it.has_labels(nvidia_com__gpu_count="2")


async def test_a_label_that_somebody_else_applies_stays_theirs(tmp_path: Path) -> None:
    """A conflict over one label costs that label alone."""
    server = SimApiServer()
    server.add_node(NODE)
    server.label(NODE, {"nvidia.com/gpu.family": "mine"}, by="person")

    async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as it:
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2")

        assert server.labels(NODE)["nvidia.com/gpu.family"] == "mine"
        assert it.cluster.report()["uses"]["labels"] == ""


async def test_labels_and_condition_leave_only_if_that_is_wanted(tmp_path: Path) -> None:
    """What the node told stays behind the daemon, unless it is asked to take it along."""
    for remove in (False, True):
        async with cluster_at_work(
            tmp_path, Feature.LABELS, Feature.CONDITION, remove_labels=remove
        ) as it:
            it.offer()
            await it.has_labels(nvidia_com__gpu_count="2")
            await it.server.until(lambda: it.server.node(NODE)["status"].get("conditions"))

        assert ("nvidia.com/gpu.count" in it.server.labels(NODE)) is not remove
        assert bool(it.server.node(NODE)["status"]["conditions"]) is not remove
        assert it.server.labels(NODE)["kubernetes.io/hostname"] == NODE


# --- taint, condition, amounts ----------------------------------------------------------------


async def test_startup_taint_goes_when_every_resource_is_told(tmp_path: Path) -> None:
    """Our taint leaves once the node has all shares, and other taints stay."""
    server = SimApiServer()
    other = {"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}
    ours = {"key": "metagpu.io/starting", "effect": "NoSchedule"}
    server.add_node(NODE, taints=[other, ours])

    async with cluster_at_work(tmp_path, Feature.TAINT, Feature.LABELS, server=server) as it:
        it.offer()
        server.report(NODE, {METAGPU: 10}, {METAGPU: 10})
        await it.has_labels(nvidia_com__gpu_count="2")
        assert ours in server.node(NODE)["spec"]["taints"]

        server.report(NODE, {METAGPU: 20}, {METAGPU: 20})
        await server.until(lambda: server.node(NODE)["spec"]["taints"] == [other])


async def test_taints_that_others_change_meanwhile_are_kept(tmp_path: Path) -> None:
    """The list of taints is written over the one that was read alone, else read again."""
    server = SimApiServer()
    server.add_node(NODE, taints=[{"key": "metagpu.io/starting", "effect": "NoSchedule"}])
    server.report(NODE, {METAGPU: 20}, {METAGPU: 20})

    async with cluster_at_work(tmp_path, Feature.TAINT, server=server) as it:
        await server.until(lambda: any("?watch" in each.what for each in server.requests))
        server.fail(409, reason="Conflict")
        it.offer()
        await server.until(lambda: [each.method for each in server.requests].count("PATCH") >= 1)
        server.label(NODE, {"team": "vision"})
        await server.until(lambda: "taints" not in server.node(NODE)["spec"])
        assert it.cluster.report()["uses"]["taint"] == ""
        assert [each.method for each in server.requests].count("PATCH") >= 2


async def test_condition_says_which_gpu_is_out_and_why(tmp_path: Path) -> None:
    """A GPU that goes out of service is a problem of the node until it is back."""
    async with cluster_at_work(tmp_path, Feature.CONDITION) as it:
        it.offer()

        def said() -> tuple[str, str]:
            found = it.server.node(NODE)["status"].get("conditions") or [{}]
            return found[0].get("status", ""), found[0].get("message", "")

        await it.server.until(lambda: said() == ("False", "all 2 GPUs are in service"))
        it.registry.apply(GpuFaulted(gpu(1).id, "XID 79: fallen off the bus", at=5))
        await it.server.until(lambda: said()[0] == "True")
        assert said()[1] == f"GPU {gpu(1)}: XID 79: fallen off the bus"

        it.registry.apply(GpuRecovered(gpu(1).id, "quiet", at=9))
        await it.server.until(lambda: said()[0] == "False")


async def test_amounts_fall_at_once_and_rise_when_the_kubelet_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a grant withholds leaves the node's allocatable number before its kubelet says so."""
    monkeypatch.setattr(telling, "RISE", 0.02)
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20, SLICED: 8}, {METAGPU: 20, SLICED: 8})

    async with cluster_at_work(tmp_path, Feature.ALLOCATABLE, server=server) as it:
        it.offer(SIDE_BY_SIDE)
        share = next(iter(it.registry.snapshot.offers[SLICED].shares.values()))

        def free() -> dict[str, str]:
            return dict(server.node(NODE)["status"]["allocatable"])

        it.registry.apply(SharesGranted((share,), at=1))
        await server.until(lambda: free() == {METAGPU: "10", SLICED: "8"})

        it.registry.apply(SharesReleased((share,), at=2))
        await server.until(lambda: free() == {METAGPU: "20", SLICED: "8"})


async def test_amounts_that_the_kubelet_lowered_are_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet that counts fewer knows why: only what we lowered ourselves is ours to raise."""
    monkeypatch.setattr(telling, "RISE", 0.01)
    server = SimApiServer()
    server.add_node(NODE)
    server.report(NODE, {METAGPU: 20}, {METAGPU: 0})

    async with cluster_at_work(tmp_path, Feature.ALLOCATABLE, Feature.LABELS, server=server) as it:
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2")
        it.offer(count=3)
        await it.has_labels(nvidia_com__gpu_count="3")

        assert server.node(NODE)["status"]["allocatable"] == {METAGPU: "0"}


# --- configuration ----------------------------------------------------------------------------


async def test_label_and_config_map_choose_the_configuration(tmp_path: Path) -> None:
    """A label, its change, and a change of the profile itself are heard, each once."""
    server = SimApiServer()
    server.configure(*CONFIG_MAP, {"a": "A", "b": "B"})

    async with cluster_at_work(
        tmp_path, Feature.CONFIG, server=server, config_map=CONFIG_MAP
    ) as it:
        await until(it.cluster.decided.is_set)
        assert it.told[0].profile is None

        server.label(NODE, {"metagpu.io/config": "b"})
        await until(lambda: len(it.told) == 2)
        assert (it.told[1].profile, it.told[1].label) == ("b", "metagpu.io/config")

        server.configure(*CONFIG_MAP, {"a": "A", "b": "B2"})
        await until(lambda: len(it.told) == 3)
        assert it.told[2].profiles == {"a": "A", "b": "B2"}

        server.label(NODE, {"team": "vision"})
        server.label(NODE, {"metagpu.io/config": "a"})
        await until(lambda: len(it.told) == 4)
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
        await until(lambda: len(it.told) == 1)
        server.store.delete(("configmaps", *CONFIG_MAP))
        await server.until(server.events)

        assert server.events()[0]["note"] == (
            "ConfigMap kube-system/metagpu is gone; the last good configuration stays"
        )
        assert len(it.told) == 1
        assert it.cluster.report()["uses"]["config"].startswith("ConfigMap kube-system/metagpu is")

        server.configure(*CONFIG_MAP, {"default": "B"})
        await until(lambda: len(it.told) == 2)


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


# --- an API server in trouble -----------------------------------------------------------------


async def test_api_server_that_is_away_is_told_once_and_found_again(tmp_path: Path) -> None:
    """While nobody answers, one line says so; what was known stays, and what is new comes later."""
    server = SimApiServer()
    with heard(chore) as lines:
        async with cluster_at_work(tmp_path, Feature.LABELS, server=server) as it:
            it.offer()
            await it.has_labels(nvidia_com__gpu_count="2")
            server.fail(503, times=3)
            it.offer(count=3)
            await it.has_labels(nvidia_com__gpu_count="3")

    told = [line["event"] for line in lines]
    assert told.count("not done at the API server; trying again") == 1


async def test_right_that_is_missing_is_named(tmp_path: Path) -> None:
    """A feature without its right says so in the status, and hinders no other."""
    server = SimApiServer()
    server.denied.append(("PATCH", "/status"))

    async with cluster_at_work(tmp_path, Feature.LABELS, Feature.CONDITION, server=server) as it:
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2")
        await until(lambda: it.cluster.report()["uses"]["condition"])

        assert it.cluster.report()["uses"]["condition"] == (
            'the API server does not allow it: User "sim" cannot patch '
            f"/api/v1/nodes/{NODE}/status; docs/permissions.md has the rule to add, or take the "
            "use out of --cluster"
        )
        assert it.cluster.report()["uses"]["labels"] == ""


async def test_first_offer_does_not_wait_for_ever(tmp_path: Path) -> None:
    """A cluster that says nothing holds the first offer up for its patience alone."""
    server = SimApiServer()
    server.denied.append(("GET", "/nodes"))

    with heard(cluster) as lines:
        async with cluster_at_work(tmp_path, Feature.CONFIG, server=server) as it:
            with anyio.fail_after(30):
                await it.cluster.decision()

    assert lines[0]["event"].startswith("the API server has not said which profile")


async def test_fault_of_ours_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody foresaw is logged, and all of it starts anew."""
    monkeypatch.setattr(cluster, "ANEW", 0.01)
    failing = True

    def broken(snapshot: Snapshot) -> object:
        if failing:
            raise KeyError("unforeseen")
        return telling.look(snapshot)

    monkeypatch.setattr(cluster, "look", broken)
    with heard(cluster) as lines:
        async with cluster_at_work(tmp_path, Feature.LABELS) as it:
            await until(lambda: lines)
            failing = False
            it.offer()
            await it.has_labels(nvidia_com__gpu_count="2")

    assert lines[0]["event"] == "the API server's side failed; it starts anew"


async def test_node_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """A wrong node name is told as that."""
    server = SimApiServer()

    async with cluster_at_work(tmp_path, Feature.CONFIG, server=server) as it:
        await until(it.cluster.decided.is_set)
        server.store.delete(("nodes", "", NODE))
        await until(lambda: it.cluster.report()["uses"]["config"])

        assert it.cluster.report()["uses"]["config"] == f"there is no Node {NODE}; see --node-name"


async def test_health_is_told_as_events(tmp_path: Path) -> None:
    """A GPU that goes out of service, and its return, are Events of the node."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as it:
        it.offer()
        await it.server.until(lambda: any("?watch" in each.what for each in it.server.requests))
        it.registry.apply(GpuFaulted(gpu(0).id, "XID 79", at=1))
        it.registry.apply(GpuRecovered(gpu(0).id, "acknowledged", at=2))
        await it.server.until(lambda: len(it.server.events()) == 2)

        told = [(e["reason"], e["type"], e["note"]) for e in it.server.events()]
        assert told == [
            ("GPUOutOfService", "Warning", f"GPU {gpu(0)}: XID 79"),
            ("GPUBackInService", "Normal", f"GPU {gpu(0)}: acknowledged"),
        ]


async def test_connection_and_dropped_events_are_told(tmp_path: Path) -> None:
    """Not connected before it is; and what was dropped before a new beginning stays counted."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as it:
        assert not it.cluster.report()["connected"]
        await until(lambda: it.cluster.report()["connected"])

        recorder = it.cluster._recorder
        assert recorder is not None
        recorder.dropped = 3
        it.cluster._arranged(recorder.client)
        assert it.cluster.report()["eventsDropped"] == 3
        assert it.cluster.report()["podEventsDropped"] == 0


async def test_a_reset_that_is_needed_is_told_with_its_command(tmp_path: Path) -> None:
    """Also if it was before the API server was there; other suspensions are no Events."""
    async with cluster_at_work(tmp_path, Feature.EVENTS) as it:
        it.offer()
        await it.server.until(lambda: any("?watch" in each.what for each in it.server.requests))
        first, second = gpu(0).id, gpu(1).id
        it.registry.apply(BackendSuspended(first, "mig", "MIG mode is off", at=1))
        it.registry.apply(BackendSuspended(first, "mig", "reset it", at=2, reset=True))
        it.registry.apply(InstanceFaulted(second, "MIG-x", "XID 94", at=3))
        it.registry.apply(InstanceRecovered(second, "MIG-x", "it was removed", at=4))
        await it.server.until(lambda: len(it.server.events()) == 3)

        told = [(e["reason"], e["type"], e["note"]) for e in it.server.events()]
        assert told == [
            ("GPUResetNeeded", "Warning", f"GPU {gpu(0)}: reset it"),
            ("MIGDeviceOutOfService", "Warning", f"GPU {gpu(1)}: MIG device MIG-x alone: XID 94"),
            ("MIGDeviceFaultOver", "Normal", f"GPU {gpu(1)}: MIG device MIG-x: it was removed"),
        ]


async def until(seen: Callable[[], object]) -> None:
    """Wait until something in this process is so."""
    with anyio.fail_after(30):
        while not seen():  # noqa: ASYNC110 - what it asks has no event
            await anyio.sleep(0.005)
