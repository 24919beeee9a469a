"""Driver upgrades of the GPU operator: shares are withdrawn, and the pods in its way are named."""

from pathlib import Path
from typing import Final

import pytest

from metagpu.core.availability.reasons import availability_of, count_free
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import CordonSource, Holder
from metagpu.core.reports.daemon_checks import check_driver_upgrade
from metagpu.core.state.facts import GpuCordoned, LeasesObserved, PodsListed
from metagpu.display.status import cluster_problems
from metagpu.plugins.cluster.driver_upgrade import STATE_LABEL, summary, upgrade_state
from metagpu.plugins.cluster.settings import Feature
from tests.plugins.cluster.rig import NODE, QUICK, Scene, cluster_at_work
from tests.rigs.build import METAGPU, gpu
from tests.rigs.waiting import becomes

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
        report = it.cluster.report()["driverUpgrade"]
        assert report["pods"] == [{"pod": "team/alice", "seenByOperator": False}]
        assert check_driver_upgrade({"cluster": it.cluster.report()})[0] == "warning"
        assert report["summary"] in cluster_problems(it.cluster.report())

        it.server.label(NODE, {STATE_LABEL: "validation-required"})
        await becomes(lambda: allocatable(it) == 19)
        assert it.cluster.report()["driverUpgrade"] is None

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
            ("Warning", "DriverUpgradeUnderWay", report["summary"]),
            ("Warning", "GPUDriverUpgrade", advice),
        ]
        assert report["summary"] == (
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
        assert (allocatable(it), "driverUpgrade" in it.cluster.report()) == (20, False)


def test_a_sentence_names_a_few_pods() -> None:
    """A node has more pods than a sentence: the rest is a number, and no pods is said too."""
    many = {f"team/{number}": number % 2 == 0 for number in range(10)}

    assert "team/0, team/1 (the operator does not see it)" in summary("x=y", many)
    assert summary("x=y", many).endswith("team/7 (the operator does not see it), 2 more")
    assert summary("x=y", {}).endswith("; no pod holds the driver")
