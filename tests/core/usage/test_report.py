"""The report for `mgctl`: usage in numbers, and for a pod its own part alone."""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from metagpu.core.config.memory import AnnotationKind, EnforcementPolicy, MemoryEnforcement
from metagpu.core.contracts.capabilities import MemoryGuard
from metagpu.core.contracts.driver import GpuProcess
from metagpu.core.contracts.host import ProcessDetails, ProcessIdentity
from metagpu.core.model.gpu import MIB
from metagpu.core.model.mig import Placement
from metagpu.core.model.pods import KnownPod
from metagpu.core.model.shares import HardwareDevice, Holder, ProvisionedState
from metagpu.core.model.snapshot import Snapshot
from metagpu.core.reports.reading import plain_report
from metagpu.core.state.facts import (
    GpuCordoned,
    GpuFaulted,
    GpusFound,
    InstanceFaulted,
    LeasesObserved,
    PodsListed,
    ProvisioningReported,
)
from metagpu.core.usage import report as module
from metagpu.core.usage.accounting import attribute_processes
from metagpu.core.usage.collector import NodeUsage
from metagpu.core.usage.report import ReportRules, RequestingPod
from metagpu.display.table import PLAIN
from metagpu.display.usage import format_usage
from metagpu.sim.machine.containers import container_of
from tests.rigs.build import after, gpu, layout_of

A, B = (replace(gpu(number), reserved=620 * MIB) for number in (0, 1))
ALICE, BOB = Holder("team", "alice", "main"), Holder("team", "bob", "main")
RULES = ReportRules(
    lambda _: MemoryEnforcement(policy=EnforcementPolicy.KILL), {"fraction": MemoryGuard.ENFORCER}
)
STARTED = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
TOLD = ProcessDetails(7, 0, ("python", "train.py"), STARTED, 2048 * MIB, 12.345)


def node() -> tuple[Snapshot, NodeUsage]:
    """Alice holds 3 of 10 of A and 2 of B and uses A, Bob 1 of A; B has an unauthorized process."""
    layout = layout_of(A, B)
    of_a, of_b = ([s.id for s in layout.shares if s.gpu == other.id] for other in (A, B))
    holders = dict.fromkeys([*of_a[:3], *of_b[:2]], ALICE) | {of_a[5]: BOB}
    snapshot = after(GpusFound((A, B), at=0), layout.offer_fact, LeasesObserved(holders, at=1))

    who = ProcessIdentity(100, 5, container_of(ALICE))
    on_a = [GpuProcess(100, 13000 * MIB), GpuProcess(101, None)]
    identities = {
        100: who,
        101: ProcessIdentity(101, 6, container_of(ALICE)),
        300: ProcessIdentity(300, 7, None),
    }
    names = {container_of(ALICE): ALICE}
    return snapshot, NodeUsage(
        gpus={
            A.id: attribute_processes(snapshot.gpus[A.id], on_a, identities, names),
            B.id: attribute_processes(
                snapshot.gpus[B.id], [GpuProcess(300, 50 * MIB)], identities, names
            ),
        },
        utilization={A.id: {100: 45, 999: 80}},
        process_details={who: TOLD},
    )


def usage_report(snapshot: Snapshot, usage: NodeUsage, rules: ReportRules) -> dict[str, Any]:
    """Return a usage as JSON has it."""
    return plain_report(module.usage_report(snapshot, usage, rules))


def pod_report(
    snapshot: Snapshot, usage: NodeUsage, rules: ReportRules, pod: RequestingPod
) -> dict[str, Any]:
    """Return a pod's usage as JSON has it."""
    return plain_report(module.pod_report(snapshot, usage, rules, pod))


def report(rules: ReportRules = RULES) -> dict[str, Any]:
    """Report on that node."""
    return usage_report(*node(), rules)


def pod(holder: Holder, life: int = 0) -> RequestingPod:
    """Name a holder's pod; each life has another uid."""
    return RequestingPod(holder.namespace, holder.pod, container_of(holder, life).pod_uid)


def test_the_usage_of_a_container_on_a_gpu() -> None:
    """Shares, memory, limit and utilisation are those of one container on one GPU."""
    alice, _ = report()["containers"]
    on_a, on_b = alice["gpus"]
    processes = on_a.pop("processes")

    assert (alice["namespace"], alice["pod"], alice["container"]) == ("team", "alice", "main")
    assert alice["podUid"] == container_of(ALICE).pod_uid
    assert on_a == {
        "index": 0,
        "uuid": A.id,
        "resource": "cnvrg.io/metagpu",
        "shares": 3,
        "capacity": 10,
        "part": 0.3,
        "shareMiB": 12288,
        "limitMiB": 12102 + 512,
        "usedMiB": 13000,
        "overLimit": True,
        "utilization": 45,
        "relativeUtilization": 150,
        "guard": "enforcer",
        "policy": "kill",
        "overShareSeconds": None,
    }
    assert [process["pid"] for process in processes] == [100, 101]
    assert (on_b["shares"], on_b["usedMiB"], on_b["utilization"]) == (2, 0, None)


def test_unknown_values_of_a_process_are_null() -> None:
    """Unknown values of a process are null, not zero."""
    known, unknown = report()["containers"][0]["gpus"][0]["processes"]

    assert known == {
        "pid": 100,
        "containerPid": 7,
        "memoryMiB": 13000,
        "utilization": 45,
        "user": "root",
        "command": ["python", "train.py"],
        "startedAt": "2026-03-01T12:00:00+00:00",
        "hostMemoryMiB": 2048,
        "cpuSeconds": 12.35,
    }
    assert unknown == {**dict.fromkeys(known), "pid": 101, "utilization": 0}


def test_a_container_without_processes_is_reported() -> None:
    """A holder of shares without a process is reported with zero."""
    _, bob = report()["containers"]

    assert (bob["pod"], bob["podUid"]) == ("bob", None)
    assert (bob["gpus"][0]["usedMiB"], bob["gpus"][0]["processes"]) == (0, [])


def test_a_gpu_is_reported_with_its_offers() -> None:
    """A GPU has its total, usable and used memory, its offered and its leased shares."""
    a, b = report()["gpus"]

    assert (a["memoryMiB"], a["usableMiB"], a["usedMiB"], b["usedMiB"]) == (40960, 40340, 13000, 50)
    assert a["shares"] == [
        {"resource": "cnvrg.io/metagpu", "capacity": 10, "held": 4, "shareMiB": 4096}
    ]
    assert (a["utilization"], b["utilization"]) == (100, None)
    assert a["policy"] == "kill"


def test_a_gpu_that_does_not_answer_is_reported_with_reasons() -> None:
    """A GPU has the reasons of its fault and of a missing answer; its use is unknown."""
    snapshot, findings = node()
    snapshot = after(GpuFaulted(B.id, "XID 79", at=5), GpuCordoned(A.id, "no", 6), since=snapshot)
    findings.failures[B.id] = "the GPU is lost"
    a, b = usage_report(snapshot, findings, RULES)["gpus"]

    assert (b["healthy"], b["reason"], b["failure"]) == (False, "XID 79", "the GPU is lost")
    assert b["usedMiB"] is None
    assert (a["cordon"], b["cordon"]) == ("no", None)


def test_unauthorized_processes_are_reported_with_the_reason() -> None:
    """A process that belongs to no lease is listed apart."""
    [unauthorized] = report()["unauthorized"]

    assert (unauthorized["index"], unauthorized["pid"], unauthorized["memoryMiB"]) == (1, 300, 50)
    assert unauthorized["reason"] == "the process runs in no container of a pod"
    assert unauthorized["pod"] is None


def test_a_pods_report_has_that_pod_alone() -> None:
    """A pod gets no other pods, no unauthorized processes and no GPUs without its shares."""
    pod_data = pod_report(*node(), RULES, pod(BOB))

    assert [container["pod"] for container in pod_data["containers"]] == ["bob"]
    assert [gpu["index"] for gpu in pod_data["gpus"]] == [0]
    assert pod_data["unauthorized"] == []
    assert "alice" not in str(pod_data)
    assert pod_data.keys() == report().keys()


def test_a_pod_learns_nothing_of_neighbours_from_a_gpus_numbers() -> None:
    """A pod gets its own part of a GPU's used memory, utilization and shares."""
    [gpu_of_bob] = pod_report(*node(), RULES, pod(BOB))["gpus"]
    of_alice, _ = pod_report(*node(), RULES, pod(ALICE))["gpus"]

    assert (gpu_of_bob["usedMiB"], gpu_of_bob["utilization"]) == (0, 0)
    assert (of_alice["usedMiB"], of_alice["utilization"]) == (13000, 45)
    assert [gpu_of_bob["shares"][0]["held"], of_alice["shares"][0]["held"]] == [1, 3]


def test_a_pod_does_not_get_the_reason_of_a_cordon() -> None:
    """The reason of a cordon is not for pods: an operator may write of others there."""
    snapshot, findings = node()
    snapshot = after(GpuCordoned(A.id, "alice breaks it", at=5), since=snapshot)

    assert usage_report(snapshot, findings, RULES)["gpus"][0]["cordon"] == "alice breaks it"
    assert "alice" not in str(pod_report(snapshot, findings, RULES, pod(BOB)))


def test_a_pod_gets_faults_of_its_own_devices_alone() -> None:
    """A pod gets the fault of a MIG device if it holds a share of the device."""
    snapshot, findings = node()
    mine, bobs = (
        next(i for i, lease in snapshot.gpus[A.id].leases.items() if lease.holder == holder)
        for holder in (ALICE, BOB)
    )
    provisioned = ProvisionedState(
        {mine: HardwareDevice("MIG-mine", 1, 0), bobs: HardwareDevice("MIG-bobs", 2, 0)}
    )
    faults = [InstanceFaulted(A.id, name, "XID 94", at=5) for name in ("MIG-mine", "MIG-bobs")]
    snapshot = after(
        ProvisioningReported(A.id, "fraction", provisioned, at=4), *faults, since=snapshot
    )

    whole = usage_report(snapshot, findings, RULES)["gpus"][0]
    own = pod_report(snapshot, findings, RULES, pod(ALICE))["gpus"][0]
    assert whole["faults"] == {"MIG-mine": "XID 94", "MIG-bobs": "XID 94"}
    assert own["faults"] == {"MIG-mine": "XID 94"}


def test_a_pod_gets_its_own_mig_devices_alone() -> None:
    """A pod gets profile and slices of the MIG devices of which it holds shares, of no others."""
    snapshot, findings = node()
    mine, bobs = (
        next(i for i, lease in snapshot.gpus[A.id].leases.items() if lease.holder == holder)
        for holder in (ALICE, BOB)
    )
    devices = {
        mine: HardwareDevice("MIG-mine", 1, 0, placement=Placement(0, 4)),
        bobs: HardwareDevice("MIG-bobs", 2, 0, placement=Placement(4, 1)),
    }
    provisioned = ProvisionedState(devices)
    snapshot = after(ProvisioningReported(A.id, "fraction", provisioned, at=4), since=snapshot)

    on_a, on_b = pod_report(snapshot, findings, RULES, pod(ALICE))["gpus"]
    [device] = on_a["devices"]
    assert (device["device"], device["share"], device["container"]) == ("MIG-mine", mine, "main")
    assert device["placement"] == {"start": 0, "size": 4}
    assert on_b["devices"] == []
    [of_bob] = pod_report(snapshot, findings, RULES, pod(BOB))["gpus"]
    assert "MIG-mine" not in str(of_bob)


def test_a_pod_gets_its_own_pids() -> None:
    """A pod gets the pids of its own namespace, never the host's."""
    alice, *_ = pod_report(*node(), RULES, pod(ALICE))["containers"]
    known, unknown = alice["gpus"][0]["processes"]

    assert (known["pid"], known["containerPid"]) == (7, 7)
    assert unknown["pid"] is None
    pod_data = {"node": "n", **pod_report(*node(), RULES, pod(ALICE))}
    assert "None" not in format_usage(pod_data, "processes", "table", PLAIN)


@pytest.mark.parametrize(
    "asker", [RequestingPod("other", "bob", pod(BOB).uid), RequestingPod("team", "bo", "x")]
)
def test_a_pod_of_nearly_that_name_is_another(asker: RequestingPod) -> None:
    """A pod is known by its namespace and its name."""
    pod_data = pod_report(*node(), RULES, asker)
    assert (pod_data["gpus"], pod_data["containers"]) == ([], [])


def test_a_pods_successor_gets_nothing_of_its_processes() -> None:
    """Of two pods of one name, one after the other, each has its own processes."""
    pod_data = pod_report(*node(), RULES, pod(ALICE, life=1))
    processes = [
        p
        for container in pod_data["containers"]
        for part in container["gpus"]
        for p in part["processes"]
    ]

    assert processes == []


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (
            ReportRules(lambda _: MemoryEnforcement(policy=EnforcementPolicy.OFF), RULES.guards),
            ("enforcer", "off", None),
        ),
        (ReportRules(RULES.settings, {"fraction": MemoryGuard.MPS}), ("mps", None, None)),
        (ReportRules(RULES.settings, {}), (None, None, None)),
    ],
)
def test_each_container_has_its_guard(
    rules: ReportRules, expected: tuple[str | None, str | None, int | None]
) -> None:
    """Without the enforcer's guard a container has no limit, and is not above it."""
    part = report(rules=rules)["containers"][0]["gpus"][0]

    assert (part["guard"], part["policy"], part["limitMiB"]) == expected
    assert not part["overLimit"]


def test_a_container_that_the_driver_limits_has_the_driver_as_guard() -> None:
    """The driver is the guard, at the same limit; the policy stays the enforcer's."""
    rules = replace(RULES, is_driver_limited=lambda usage: usage.holder == ALICE)
    alice, bob = report(rules=rules)["containers"]

    part = alice["gpus"][0]
    assert (part["guard"], part["policy"], part["limitMiB"]) == ("driver", "kill", 12102 + 512)
    assert bob["gpus"][0]["guard"] == "enforcer"


def test_a_report_has_the_metadata_of_a_pod() -> None:
    """A pod has uid, owner and phase; the uid is there also without a process."""
    snapshot, findings = node()
    pods = (
        KnownPod("u-bob", "team", "bob", "Running", "ReplicaSet/bob-1"),
        KnownPod("u-old", "team", "bob", "Failed", "ReplicaSet/bob-0"),
    )
    pod_data = usage_report(after(PodsListed(pods), since=snapshot), findings, RULES)
    alice, bob = pod_data["containers"]

    assert (bob["podUid"], bob["podOwner"], bob["podPhase"]) == (
        "u-bob",
        "ReplicaSet/bob-1",
        "Running",
    )
    assert (alice["podOwner"], alice["podPhase"]) == (None, None)


def test_a_pods_annotations_are_in_its_limit_and_policy() -> None:
    """The allowed annotations of a pod change its limit and policy."""
    snapshot, findings = node()
    annotations = {"gpu-mem-limit.cnvrg.io/metagpu": "10", "metagpu.io/memory-policy": "report"}
    pod = KnownPod(container_of(ALICE).pod_uid, "team", "alice", memory_annotations=annotations)
    terms = MemoryEnforcement(
        policy=EnforcementPolicy.KILL, allow_annotations=tuple(AnnotationKind)
    )
    pod_data = usage_report(
        after(PodsListed((pod,)), since=snapshot),
        findings,
        replace(RULES, settings=lambda _: terms),
    )
    part = pod_data["containers"][0]["gpus"][0]

    # 10 of the 5 it holds, 3 of them here: twice its part of this GPU.
    assert (part["limitMiB"], part["policy"], part["overLimit"]) == (
        2 * 12102 + 512,
        "report",
        False,
    )
