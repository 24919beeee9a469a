"""Cordons by annotations of the Node, beside those of the node's operator."""

import time
from pathlib import Path
from typing import Final

import pytest
from msgspec import UNSET

from metagpu.core.availability.reasons import availability_of, count_free
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import CordonSource, Holder
from metagpu.core.reports.daemon_checks import check_driver_upgrade
from metagpu.core.reports.reading import plain_report, read_report
from metagpu.core.reports.schema import DriverPodReport, StatusReport
from metagpu.core.state.facts import GpuCordoned, GpuUncordoned, LeasesObserved, PodsListed
from metagpu.display.status import cluster_problems
from metagpu.plugins.cluster.node_cordons import STATE_LABEL, summary, upgrade_state
from metagpu.plugins.cluster.settings import CORDON_PREFIX, Feature
from tests.plugins.cluster.rig import NODE, QUICK, Scene, cluster_at_work
from tests.rigs.build import METAGPU, gpu
from tests.rigs.waiting import becomes


def annotate(it: Scene, **values: str | None) -> None:
    """Write annotations of the Node, as a person does; `_` stands for `-`."""
    keys = {f"{CORDON_PREFIX}{key.removeprefix('n')}": value for key, value in values.items()}
    patch = {"metadata": {"annotations": keys}}
    it.server.store.merge(("nodes", "", NODE), patch, status=False, manager="kubectl")


def reasons(it: Scene) -> list[str | None]:
    """Return why each GPU is cordoned by the Node."""
    states = it.registry.snapshot.gpus.values()
    found = [state.cordons.get(CordonSource.NODE) for state in states]
    return [None if pause is None else pause.reason for pause in found]


async def test_annotations_cordon_gpus_and_their_removal_ends_that(tmp_path: Path) -> None:
    """A GPU is cordoned while its annotation is there; each source lifts its own cordon."""
    async with cluster_at_work(tmp_path, Feature.CORDON, timing=QUICK) as it:
        it.offer()
        annotate(it, n1="replace  the fan", n7="no such GPU")
        await becomes(lambda: reasons(it) == [None, "replace the fan"])
        it.registry.apply(GpuCordoned(gpu(1).id, "mine", time.time()))
        annotate(it, n1="", n0="both")
        await becomes(lambda: reasons(it) == ["both", "no reason was given"])
        annotate(it, n1=None, n0=None)
        await becomes(lambda: reasons(it) == [None, None])
        assert [state.cordon is not None for state in it.registry.snapshot.gpus.values()] == [
            *(False, True)
        ]
        it.registry.apply(GpuUncordoned(gpu(1).id, time.time()))
        assert not any(state.cordon for state in it.registry.snapshot.gpus.values())


async def test_a_gpu_that_comes_later_is_cordoned_too(tmp_path: Path) -> None:
    """An annotation that is older than the GPU cordons it as soon as it is found."""
    async with cluster_at_work(tmp_path, Feature.CORDON, timing=QUICK) as it:
        annotate(it, n0="early")
        it.offer()
        await becomes(lambda: reasons(it) == ["early", None])


async def test_without_the_feature_annotations_mean_nothing(tmp_path: Path) -> None:
    """A daemon without the feature follows no annotation."""
    async with cluster_at_work(tmp_path, Feature.LABELS, timing=QUICK) as it:
        annotate(it, n0="ignored")
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2")
        assert reasons(it) == [None, None]


PAUSED: Final = "paused-for-driver-upgrade"


@pytest.mark.parametrize(
    ("value", "under_way"),
    [
        ("", False),
        ("upgrade-required", False),
        ("cordon-required", True),
        ("wait-for-jobs-required", True),
        ("pod-deletion-required", True),
        ("drain-required", True),
        ("node-maintenance-required", True),
        ("post-maintenance-required", True),
        ("pod-restart-required", True),
        ("upgrade-failed", True),
        ("validation-required", False),
        ("uncordon-required", False),
        ("upgrade-done", False),
        ("a-state-of-tomorrow", False),
    ],
)
def test_an_upgrade_is_under_way_while_the_old_driver_has_to_go(
    value: str, *, under_way: bool
) -> None:
    """Every state of the operator's label is decided; the validator finds shares again."""
    assert upgrade_state({STATE_LABEL: value}) == (f"{STATE_LABEL}={value}" if under_way else "")


@pytest.mark.parametrize("value", [PAUSED, f"container_{PAUSED}"])
def test_paused_operands_are_an_upgrade_without_the_operators_label(value: str) -> None:
    """A driver container pauses the operands itself where no upgrade controller runs."""
    labels = {STATE_LABEL: "upgrade-done", "nvidia.com/gpu.deploy.dcgm": value}

    assert upgrade_state(labels) == f"nvidia.com/gpu.deploy.dcgm={value}"
    assert upgrade_state({"nvidia.com/gpu.deploy.dcgm": "paused-for-mig-change"}) == ""
    assert upgrade_state({"example.com/team": PAUSED}) == ""


def allocatable(it: Scene) -> int:
    """Return how many shares the kubelet could give."""
    snapshot = it.registry.snapshot
    return sum(count_free(state, METAGPU) for state in snapshot.gpus.values())


def node_events(it: Scene) -> list[tuple[str, str, str]]:
    """Return type, reason and note of each Event about a driver upgrade, in order."""
    return [
        (each["type"], each["reason"], each["note"])
        for each in it.server.events()
        if "DriverUpgrade" in each["reason"]
    ]


async def test_shares_are_withdrawn_and_the_pods_in_the_way_named(tmp_path: Path) -> None:
    """From the label on no share is free, held ones stay, and Events name who holds the driver."""
    features = (Feature.EVENTS, Feature.POD_EVENTS)
    async with cluster_at_work(
        tmp_path, *features, drain_on_driver_upgrade=True, timing=QUICK
    ) as it:
        it.server.label(NODE, {STATE_LABEL: "upgrade-required"})
        it.offer()
        shares = it.registry.snapshot.offers[METAGPU].shares
        held = next(iter(shares))
        it.registry.apply(LeasesObserved({held: Holder("team", "alice", "main")}, at=1))
        it.registry.apply(PodsListed((KnownPod("u1", "team", "alice"),)))
        await it.cluster.wait_for_choice()
        assert allocatable(it) == 19

        it.server.label(NODE, {STATE_LABEL: "pod-deletion-required"})
        await becomes(lambda: allocatable(it) == 0)
        state = it.registry.snapshot.gpus[gpu(0).id]
        assert held not in availability_of(state).unlisted
        assert it.registry.snapshot.gpus[gpu(1).id].cordon is not None
        report = it.cluster.report().present_upgrade
        assert report is not None
        assert report.pods == [DriverPodReport("team/alice", seen_by_operator=False)]
        cluster = {"cluster": plain_report(it.cluster.report())}
        assert check_driver_upgrade(read_report(cluster, StatusReport))[0] == "warning"
        assert report.summary in cluster_problems(it.cluster.report())

        it.server.label(NODE, {STATE_LABEL: "validation-required"})
        await becomes(lambda: allocatable(it) == 19)
        assert it.cluster.report().driver_upgrade is None

        await it.server.until(lambda: len(node_events(it)) == 3)
        advice = (
            "the GPU operator upgrades the driver of this node. The pod holds the driver through "
            "its GPU, and the upgrade waits for the pod's end, or fails: delete the pod, or drain "
            "the node"
        )
        assert sorted(node_events(it)) == [
            (
                "Normal",
                "DriverUpgradeEnded",
                "the driver upgrade is over, and the GPUs give shares again",
            ),
            ("Warning", "DriverUpgradeUnderWay", report.summary),
            ("Warning", "GPUDriverUpgrade", advice),
        ]
        assert report.summary == (
            "the GPU operator upgrades the driver of this node "
            f"({STATE_LABEL}=pod-deletion-required), and no GPU gives new shares; these pods hold "
            "the driver: team/alice (the operator does not see it)"
        )


async def test_an_operators_cordon_outlasts_the_upgrade(tmp_path: Path) -> None:
    """The end of an upgrade ends its own cordon alone; without the option nothing follows it."""
    async with cluster_at_work(tmp_path, drain_on_driver_upgrade=True, timing=QUICK) as it:
        it.server.label(NODE, {STATE_LABEL: "drain-required"})
        it.offer()
        it.registry.apply(GpuCordoned(gpu(0).id, "fan", at=1))
        await becomes(lambda: allocatable(it) == 0)
        it.server.label(NODE, {STATE_LABEL: "upgrade-done"})
        await becomes(lambda: allocatable(it) == 10)
        assert it.registry.snapshot.gpus[gpu(0).id].cordons.keys() == {CordonSource.OPERATOR}

    async with cluster_at_work(tmp_path, Feature.LABELS, timing=QUICK) as it:
        it.server.label(NODE, {STATE_LABEL: "drain-required"})
        it.offer()
        await it.has_labels(nvidia_com__gpu_count="2")
        assert (allocatable(it), it.cluster.report().driver_upgrade) == (20, UNSET)


def test_a_sentence_names_a_few_pods() -> None:
    """A node has more pods than a sentence: the rest is a number, and no pods is said too."""
    many = {f"team/{number}": number % 2 == 0 for number in range(10)}

    assert "team/0, team/1 (the operator does not see it)" in summary("x=y", many)
    assert summary("x=y", many).endswith("team/7 (the operator does not see it), 2 more")
    assert summary("x=y", {}).endswith("; no pod holds the driver")
