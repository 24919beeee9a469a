"""What `mgctl` is told: who uses what, in numbers, and to a pod nothing of others."""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from metagpu.core.backend import Guard
from metagpu.core.census import Findings
from metagpu.core.driver import GpuProcess
from metagpu.core.enforcement import Annotation, Enforcement, Policy
from metagpu.core.facts import (
    GpuCordoned,
    GpuFaulted,
    GpusFound,
    InstanceFaulted,
    LeasesObserved,
    PodsTold,
    StockTold,
)
from metagpu.core.gpu import MIB
from metagpu.core.host import Identity, Particulars
from metagpu.core.model import Holder, Made, Stock
from metagpu.core.pods import KnownPod
from metagpu.core.snapshot import Snapshot
from metagpu.core.usage import account
from metagpu.core.usage_report import (
    Pod,
    Rules,
    pod_report,
    usage_report,
)
from metagpu.sheets import PLAIN
from metagpu.sim.host import container_of
from metagpu.usage_text import written
from tests.build import after, gpu, laid_out

A, B = (replace(gpu(number), reserved=620 * MIB) for number in (0, 1))
ALICE, BOB = Holder("team", "alice", "main"), Holder("team", "bob", "main")
RULES = Rules(lambda _: Enforcement(policy=Policy.KILL), {"fraction": Guard.ENFORCER})
STARTED = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
TOLD = Particulars(7, 0, ("python", "train.py"), STARTED, 2048 * MIB, 12.345)


def node() -> tuple[Snapshot, Findings]:
    """Alice holds 3 of 10 of A and 2 of B and uses A, Bob holds 1 of A; a stranger is on B."""
    layout = laid_out(A, B)
    of_a, of_b = ([s.id for s in layout.shares if s.gpu == it.id] for it in (A, B))
    holders = dict.fromkeys([*of_a[:3], *of_b[:2]], ALICE) | {of_a[5]: BOB}
    snapshot = after(GpusFound((A, B), at=0), layout.offered, LeasesObserved(holders, at=1))

    who = Identity(100, 5, container_of(ALICE))
    on_a = [GpuProcess(100, 13000 * MIB), GpuProcess(101, None)]
    identities = {100: who, 101: Identity(101, 6, container_of(ALICE)), 300: Identity(300, 7, None)}
    names = {container_of(ALICE): ALICE}
    return snapshot, Findings(
        accounts={
            A.id: account(snapshot.gpus[A.id], on_a, identities, names),
            B.id: account(snapshot.gpus[B.id], [GpuProcess(300, 50 * MIB)], identities, names),
        },
        busy={A.id: {100: 45, 999: 80}},
        particulars={who: TOLD},
    )


def report(rules: Rules = RULES) -> dict[str, Any]:
    """Report on that node."""
    return usage_report(*node(), rules)


def pod(holder: Holder, life: int = 0) -> Pod:
    """Name a holder's pod; each life has another uid."""
    return Pod(holder.namespace, holder.pod, container_of(holder, life).pod_uid)


def test_a_containers_part_of_a_gpu() -> None:
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
        "shareMiB": 12288,
        "limitMiB": 12102 + 512,
        "usedMiB": 13000,
        "over": True,
        "utilisation": 45,
        "relativeUtilisation": 150,
        "guard": "enforcer",
        "policy": "kill",
    }
    assert [process["pid"] for process in processes] == [100, 101]
    assert (on_b["shares"], on_b["usedMiB"], on_b["utilisation"]) == (2, 0, None)


def test_a_process_is_told_with_what_is_known_of_it() -> None:
    """What nobody knows of a process is null, not zero."""
    known, unknown = report()["containers"][0]["gpus"][0]["processes"]

    assert known == {
        "pid": 100,
        "innerPid": 7,
        "memoryMiB": 13000,
        "utilisation": 45,
        "user": "root",
        "command": ["python", "train.py"],
        "startedAt": "2026-03-01T12:00:00+00:00",
        "hostMemoryMiB": 2048,
        "cpuSeconds": 12.35,
    }
    assert unknown == {**dict.fromkeys(known), "pid": 101, "utilisation": 0}


def test_who_uses_nothing_is_told_too() -> None:
    """A container that holds shares and has no process is there with zero."""
    _, bob = report()["containers"]

    assert (bob["pod"], bob["podUid"]) == ("bob", None)
    assert (bob["gpus"][0]["usedMiB"], bob["gpus"][0]["processes"]) == (0, [])


def test_gpus_are_told_with_what_is_on_offer_of_them() -> None:
    """Of a GPU: its memory, what programs can have and have, what is offered and held."""
    a, b = report()["gpus"]

    assert (a["memoryMiB"], a["usableMiB"], a["usedMiB"], b["usedMiB"]) == (40960, 40340, 13000, 50)
    assert a["shares"] == [
        {"resource": "cnvrg.io/metagpu", "capacity": 10, "held": 4, "shareMiB": 4096}
    ]
    assert (a["utilisation"], b["utilisation"]) == (100, None)
    assert a["policy"] == "kill"


def test_a_gpu_that_does_not_answer_is_told_as_such() -> None:
    """Why a GPU is out, and why it could not be asked, stands beside it; its use is unknown."""
    snapshot, findings = node()
    snapshot = after(GpuFaulted(B.id, "XID 79", at=5), GpuCordoned(A.id, "no", 6), since=snapshot)
    findings.failures[B.id] = "the GPU is lost"
    a, b = usage_report(snapshot, findings, RULES)["gpus"]

    assert (b["healthy"], b["reason"], b["failure"]) == (False, "XID 79", "the GPU is lost")
    assert b["usedMiB"] is None
    assert (a["cordon"], b["cordon"]) == ("no", None)


def test_strangers_are_told_with_the_reason() -> None:
    """A process that belongs to no lease stands by itself."""
    [stranger] = report()["strangers"]

    assert (stranger["index"], stranger["pid"], stranger["memoryMiB"]) == (1, 300, 50)
    assert stranger["why"] == "it is in no container of a pod"
    assert stranger["pod"] is None


def test_a_pod_is_told_of_itself_alone() -> None:
    """Neither other pods nor strangers nor GPUs it holds nothing of reach a pod."""
    told = pod_report(*node(), RULES, pod(BOB))

    assert [container["pod"] for container in told["containers"]] == ["bob"]
    assert [gpu["index"] for gpu in told["gpus"]] == [0]
    assert told["strangers"] == []
    assert "alice" not in str(told)
    assert told.keys() == report().keys()


def test_a_pod_learns_nothing_of_neighbours_from_a_gpus_numbers() -> None:
    """What is used, busy and held of a GPU is, to a pod, its own part alone."""
    [gpu_of_bob] = pod_report(*node(), RULES, pod(BOB))["gpus"]
    of_alice, _ = pod_report(*node(), RULES, pod(ALICE))["gpus"]

    assert (gpu_of_bob["usedMiB"], gpu_of_bob["utilisation"]) == (0, 0)
    assert (of_alice["usedMiB"], of_alice["utilisation"]) == (13000, 45)
    assert [gpu_of_bob["shares"][0]["held"], of_alice["shares"][0]["held"]] == [1, 3]


def test_a_pod_does_not_hear_why_its_gpu_was_cordoned() -> None:
    """What an operator says of a GPU may speak of others."""
    snapshot, findings = node()
    snapshot = after(GpuCordoned(A.id, "alice breaks it", at=5), since=snapshot)

    assert usage_report(snapshot, findings, RULES)["gpus"][0]["cordon"] == "alice breaks it"
    assert "alice" not in str(pod_report(snapshot, findings, RULES, pod(BOB)))


def test_a_pod_hears_of_faults_of_its_own_devices_alone() -> None:
    """Which MIG device of its GPU is broken is its business if it holds a share of it."""
    snapshot, findings = node()
    mine, bobs = (
        next(i for i, lease in snapshot.gpus[A.id].leases.items() if lease.holder == holder)
        for holder in (ALICE, BOB)
    )
    stock = Stock({mine: Made("MIG-mine", 1, 0), bobs: Made("MIG-bobs", 2, 0)})
    faults = [InstanceFaulted(A.id, it, "XID 94", at=5) for it in ("MIG-mine", "MIG-bobs")]
    snapshot = after(StockTold(A.id, "fraction", stock, at=4), *faults, since=snapshot)

    whole = usage_report(snapshot, findings, RULES)["gpus"][0]
    own = pod_report(snapshot, findings, RULES, pod(ALICE))["gpus"][0]
    assert whole["faults"] == {"MIG-mine": "XID 94", "MIG-bobs": "XID 94"}
    assert own["faults"] == {"MIG-mine": "XID 94"}


def test_a_pod_knows_its_own_pids() -> None:
    """The host's pids mean nothing in a pod: they are told to nobody there."""
    alice, *_ = pod_report(*node(), RULES, pod(ALICE))["containers"]
    known, unknown = alice["gpus"][0]["processes"]

    assert (known["pid"], known["innerPid"]) == (7, 7)
    assert unknown["pid"] is None
    told = {"node": "n", **pod_report(*node(), RULES, pod(ALICE))}
    assert "None" not in written(told, "processes", "table", PLAIN)


@pytest.mark.parametrize("asker", [Pod("other", "bob", pod(BOB).uid), Pod("team", "bo", "x")])
def test_a_pod_of_nearly_that_name_is_another(asker: Pod) -> None:
    """Namespace and name both count."""
    told = pod_report(*node(), RULES, asker)
    assert (told["gpus"], told["containers"]) == ([], [])


def test_a_pods_successor_hears_nothing_of_its_processes() -> None:
    """Of two pods of one name, one after the other, each has its own processes."""
    told = pod_report(*node(), RULES, pod(ALICE, life=1))
    processes = [p for it in told["containers"] for part in it["gpus"] for p in part["processes"]]

    assert processes == []


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Rules(lambda _: Enforcement(policy=Policy.OFF), RULES.guards), ("enforcer", "off", None)),
        (Rules(RULES.terms, {"fraction": Guard.MPS}), ("mps", None, None)),
        (Rules(RULES.terms, {}), (None, None, None)),
    ],
)
def test_each_container_says_what_guards_it(
    rules: Rules, expected: tuple[str | None, str | None, int | None]
) -> None:
    """Where the enforcer does not judge there is no limit of its own, and nobody is over it."""
    part = report(rules=rules)["containers"][0]["gpus"][0]

    assert (part["guard"], part["policy"], part["limitMiB"]) == expected
    assert not part["over"]


def test_a_container_that_the_driver_limits_says_so() -> None:
    """The driver guards it, at the same limit; the policy still says what the enforcer would do."""
    rules = replace(RULES, limited=lambda usage: usage.holder == ALICE)
    alice, bob = report(rules=rules)["containers"]

    part = alice["gpus"][0]
    assert (part["guard"], part["policy"], part["limitMiB"]) == ("driver", "kill", 12102 + 512)
    assert bob["gpus"][0]["guard"] == "enforcer"


def test_what_the_api_server_knows_of_a_pod_is_told() -> None:
    """Uid, owner and phase; the uid also of a pod that has no process."""
    snapshot, findings = node()
    pods = (
        KnownPod("u-bob", "team", "bob", "Running", "ReplicaSet/bob-1"),
        KnownPod("u-old", "team", "bob", "Failed", "ReplicaSet/bob-0"),
    )
    told = usage_report(after(PodsTold(pods), since=snapshot), findings, RULES)
    alice, bob = told["containers"]

    assert (bob["podUid"], bob["podOwner"], bob["podPhase"]) == (
        "u-bob",
        "ReplicaSet/bob-1",
        "Running",
    )
    assert (alice["podOwner"], alice["podPhase"]) == (None, None)


def test_a_pods_wish_is_in_its_limit_and_policy() -> None:
    """What a container may use, and what follows, are as its pod wished where it may."""
    snapshot, findings = node()
    wishes = {"gpu-mem-limit.cnvrg.io/metagpu": "10", "metagpu.io/memory-policy": "report"}
    pod = KnownPod(container_of(ALICE).pod_uid, "team", "alice", wishes=wishes)
    terms = Enforcement(policy=Policy.KILL, allow_annotations=tuple(Annotation))
    told = usage_report(
        after(PodsTold((pod,)), since=snapshot), findings, replace(RULES, terms=lambda _: terms)
    )
    part = told["containers"][0]["gpus"][0]

    # 10 of the 5 it holds, 3 of them here: twice its part of this GPU.
    assert (part["limitMiB"], part["policy"], part["over"]) == (2 * 12102 + 512, "report", False)
