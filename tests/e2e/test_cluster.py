"""The configuration that a cluster chooses, on a real API server with the rights of deploy/."""

import json

import pytest

from tests.e2e.cluster import ALL_SHARES, NAMESPACE, RESOURCE, idle_pod
from tests.e2e.joined import OUR_LABEL, SOON_S, Joined
from tests.e2e.rig.errors import RigError
from tests.e2e.rig.kubectl import Document
from tests.e2e.rig.tools import REPOSITORY
from tests.e2e.rig.waiting import wait_for

SHARED = "nvidia.com/gpu.shared"
SMALL, LARGE = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
NEW = "cnvrg.io/metagpu-new"
STARTING = "metagpu.io/starting"

FRACTIONS = """\
version: metagpu/v1
health: {{quietPeriod: 1s}}
pools:
  - name: all
    backends: [{{backend: fraction, resource: {resource}, sharesPerGpu: {shares}}}]
"""
TWO_POOLS = f"""\
version: metagpu/v1
health: {{quietPeriod: 1s}}
pools:
  - name: fractions
    gpus: {{index: 0-3}}
    backends: [{{backend: fraction, resource: {RESOURCE}, sharesPerGpu: 100}}]
  - name: other
    gpus: {{index: 4-7}}
    backends: [OTHER]
"""
SLICES = TWO_POOLS.replace("OTHER", "{backend: timeslice, replicas: 4}")
MIG = TWO_POOLS.replace(
    "OTHER", "{backend: mig, layout: {1g.10gb: 4, 3g.40gb: 1}, enableMig: true}"
)


def fractions(shares: int, resource: str = RESOURCE) -> str:
    """Return a profile with so many shares of every GPU."""
    return FRACTIONS.format(shares=shares, resource=resource)


@pytest.mark.long
def test_the_startup_taint_goes_when_the_node_shows_every_share(member: Joined) -> None:
    """Pods are scheduled only after the node has all shares of its profile."""
    cluster = member.cluster
    wait_for(
        "the daemon's labels", lambda: "nvidia.com/gpu.product" in member.labels, within_s=SOON_S
    )
    assert member.labels["nvidia.com/gpu.count"] == "4"  # of the product that the labels name
    assert member.labels["metagpu.io/gpu.numa-nodes"] == "2"

    member.daemon.stop()
    member.profiles(default=fractions(10, NEW))
    member.kubectl("taint", "node", member.node.name, f"{STARTING}:NoSchedule")
    cluster.kubectl.apply(idle_pod("early", 3, NEW))
    wait_for(
        "the scheduler to respect the taint",
        lambda: "untolerated taint" in cluster.event_messages("early", "FailedScheduling"),
        within_s=SOON_S,
    )

    with member.kubectl.watching("node", member.node.name) as versions:
        member.daemon.start(*member.options)
        cluster.await_running()
        wait_for("the watch to show no taint", lambda: not tainted(versions()[-1]), within_s=SOON_S)
        seen = versions()

    assert tainted(seen[0])
    open_with = {
        document["status"]["allocatable"].get(NEW) for document in seen if not tainted(document)
    }
    assert open_with == {"80"}


def tainted(node: Document) -> bool:
    """Return whether a node has the startup taint."""
    return STARTING in [taint["key"] for taint in node["spec"].get("taints", ())]


@pytest.mark.long
def test_the_node_has_the_profile_of_its_label(member: Joined) -> None:
    """A wrong profile or label changes nothing but an Event; every right one is applied."""
    cluster, pid = member.cluster, member.daemon.pid
    member.profiles(tens=fractions(10), slices=SLICES, bad=fractions(0))

    member.label("tens")
    cluster.await_amounts(80, 80)
    member.label("slices")
    cluster.await_amounts(400, 400)
    cluster.await_amounts(16, 16, SHARED)
    member.await_event("ConfigApplied", f"profile slices, chosen by the label {OUR_LABEL}")

    member.label("bad")
    member.await_event(
        "ConfigRejected",
        "ConfigMap kube-system/metagpu: bad: 5: pools[0].backends[0]",
        "sharesPerGpu is 0; allowed: 1 to 70000; the last good configuration stays",
    )
    member.label("nobodys")
    unknown = (
        "ConfigMap kube-system/metagpu: there is no profile 'nobodys' (label metagpu.io/config); "
        "there are: bad, slices, tens"
    )
    member.await_event("ConfigRejected", unknown)
    assert member.report["refusal"] == unknown
    assert cluster.node.resource(RESOURCE) == (400, 400)
    assert cluster.node.resource(SHARED) == (16, 16)

    member.label("tens")
    cluster.await_amounts(80, 80)
    wait_for("no refusal", lambda: member.report["refusal"] is None, within_s=SOON_S)
    member.profiles(tens=fractions(20), slices=SLICES)
    cluster.await_amounts(160, 160)
    member.label(None)
    cluster.await_amounts(ALL_SHARES, ALL_SHARES)
    assert member.daemon.pid == pid


def test_what_no_gpu_can_have_changes_nothing(member: Joined) -> None:
    """A profile of another GPU model is refused with the reason of its GPUs; all stays on offer."""
    cluster = member.cluster
    foreign = TWO_POOLS.replace("OTHER", "{backend: mig, layout: {1g.18gb: 7}, enableMig: true}")
    member.profiles(slices=SLICES, foreign=foreign)
    member.label("slices")
    cluster.await_amounts(16, 16, SHARED)
    cluster.await_amounts(400, 400)

    member.label("foreign")
    event = member.await_event("ConfigRejected", "foreign: ", "has no profile 1g.18gb")
    assert member.report["refusal"] == event.removesuffix("; the last good configuration stays")
    assert cluster.node.resource(RESOURCE) == (400, 400)
    assert cluster.node.resource(SHARED) == (16, 16)


@pytest.mark.long
def test_replicas_change_beside_running_pods(member: Joined) -> None:
    """Four held replicas of a GPU stay, and six of ten are there for others at once."""
    cluster = member.cluster
    one_gpu = SLICES.replace("index: 4-7", "index: 4")
    more = one_gpu.replace("replicas: 4", "replicas: 10")
    member.profiles(four=one_gpu, ten=more)
    member.label("four")
    cluster.await_amounts(4, 4, SHARED)
    cluster.start(*(idle_pod(f"old-{number}", 1, SHARED) for number in range(4)))

    member.label("ten")
    cluster.await_amounts(10, 10, SHARED)
    cluster.start(*(idle_pod(f"new-{number}", 1, SHARED) for number in range(6)))


@pytest.mark.long
def test_a_container_of_two_resources_has_an_event(member: Joined) -> None:
    """The kubelet keeps the variable of one resource; the pod's Event names both GPUs."""
    cluster = member.cluster
    member.profiles(slices=SLICES)
    member.label("slices")
    cluster.await_amounts(16, 16, SHARED)
    both = idle_pod("both", 30)
    resources = both["spec"]["containers"][0]["resources"]
    for amounts in resources.values():
        amounts[SHARED] = "1"
    cluster.start(both)

    visible = cluster.inspect_container("both").environment["NVIDIA_VISIBLE_DEVICES"]
    assert visible.count("GPU-") == 1
    [mixed] = wait_for(
        "status to name the container",
        lambda: member.daemon.status()["mixedRequests"],
        within_s=SOON_S,
    )
    assert mixed["holder"] == f"{NAMESPACE}/both (main)"
    wait_for(
        "the pod's Event",
        lambda: mixed["reason"] in cluster.event_messages("both", "GPUNotVisible"),
        within_s=SOON_S,
    )

    policy = REPOSITORY / "deploy" / "one-resource-per-container.yaml"
    member.kubectl("apply", "-f", str(policy))
    try:
        again = {**both, "metadata": {**both["metadata"], "name": "again"}}

        def refused() -> bool:
            try:
                member.kubectl("create", "--dry-run=server", "-f", "-", feed=json.dumps(again))
            except RigError as error:
                return "request each in a container of its own: main" in str(error)
            return False

        wait_for("the API server to refuse such a pod", refused, within_s=SOON_S)
        single = {**idle_pod("single", 30)}
        member.kubectl("create", "--dry-run=server", "-f", "-", feed=json.dumps(single))
    finally:
        member.kubectl("delete", "-f", str(policy))


def test_one_pool_goes_from_time_slices_to_mig_and_the_other_goes_on(member: Joined) -> None:
    """The other pool gets no new list, its pod runs on; a held GPU waits for its own pod."""
    cluster = member.cluster
    member.profiles(slices=SLICES, mig=MIG)
    member.label("slices")
    cluster.await_amounts(16, 16, SHARED)
    cluster.await_amounts(400, 400)
    cluster.start(idle_pod("on-the-other", 30), idle_pod("slice", 1, SHARED))
    (device,) = cluster.inspect_container("slice").gpu_devices
    held = int(device.removeprefix("nvidia"))
    before, messages = cluster.incarnations(), member.messages(RESOURCE)

    try:
        member.label("mig")
        cluster.await_amounts(16, 12, SMALL)
        cluster.await_amounts(4, 3, LARGE)
        cluster.await_amounts(0, 0, SHARED)
        held_by = f"is held by {NAMESPACE}/slice (main) under {SHARED}, which is not on offer"
        wait_for(
            "status to name the pod with the GPU",
            lambda: held_by in (member.gpu(held)["waitsFor"] or ""),
            within_s=SOON_S,
        )
        cluster.start(idle_pod("instance", 1, LARGE))
        assert (
            cluster.inspect_container("instance").environment["NVIDIA_VISIBLE_DEVICES"][:4]
            == "MIG-"
        )
        cluster.delete("slice")
        cluster.await_amounts(16, 16, SMALL)
        assert member.gpu(held)["waitsFor"] is None

        after = cluster.incarnations()
        assert after["on-the-other"] == before["on-the-other"]
        assert member.messages(RESOURCE) == messages
    finally:
        member.daemon.stop()  # its GPUs are in MIG mode: the next test gets new ones
