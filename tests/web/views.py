"""Views of nodes and clusters in the form of the page's contract, for tests of the page.

`test_page.py` holds their keys to those of a real agent.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from metagpu.core.model.xid_severity import DEFAULT_XIDS
from metagpu.core.reports.remarks import RemarkReason
from metagpu.core.reports.schema.status import StatusReport
from metagpu.kubectl.claims import ReadClaims
from metagpu.kubectl.judgement import claims_of, waiting_pods
from metagpu.kubectl.obstacles import ClusterNode
from metagpu.plugins.web.node import ELSEWHERE
from metagpu.plugins.web.pod import node_of_pod
from metagpu.plugins.web.recent_events import GRANTED
from tests.rigs.reported import complete

METAGPU = "cnvrg.io/metagpu"
SHARED = "nvidia.com/gpu.shared"
View = dict[str, Any]
Report = dict[str, Any]

A100 = ("NVIDIA A100-SXM4-80GB", 81920, 763)
H100 = ("NVIDIA H100 80GB HBM3", 81559, 328)
L40S = ("NVIDIA L40S", 46068, 471)
T4 = ("Tesla T4", 15360, 393)
OFF_THE_BUS, ECC_ERROR = (f"XID {code}: {DEFAULT_XIDS[code].meaning}" for code in (79, 48))
FAN = "fan replacement"
OVER_ITS_SHARE = (
    "lab/notebook-ben: container main uses more memory of GPU 0 than it may: its share is 8115 "
    "MiB, its limit 8378 MiB, and all its processes together use 9089 MiB; it keeps running"
)
CONFIG_APPLIED = f"the configuration in force offers 500 {METAGPU}, 12 {SHARED}"
HOSTILE = "<img src=x onerror=alert(1)>"


def ago(minutes: float) -> str:
    """Return a time in the past, as the reports write it."""
    return (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat("T", "seconds")


class NodeView:
    """One node of a view, filled GPU by GPU."""

    def __init__(self, name: str, *, profile: str | None = None) -> None:
        self.name = name
        self.status: Report = {
            **{
                key: {}
                for key in ("resources", "offers", "devices", "unusedPools", "competingPlugins")
            },
            **{key: [] for key in ("gpus", "leases", "remarks", "unreadableGpus", "topology")},
            **{key: [] for key in ("leaseDifferences", "mixedRequests", "lostDevices")},
            "registrationProblems": {},
            "endedTasks": {},
            "dra": None,
            "cdi": None,
            "configuration": {"error": None, "misfits": []},
            "cluster": {"problem": "", "profile": profile},
            "mgctl": {"inPods": True, "problem": None},
        }
        self.usage: Report = {"gpus": [], "containers": [], "unauthorized": 0, "warnings": []}

    def gpu(
        self,
        model: tuple[str, int, int] = A100,
        pods: Sequence[tuple[str, str, int, float]] = (),
        *,
        backends: Sequence[str] = ("fraction",),
        owner: str | None = None,
        offers: Mapping[str, int] | None = None,
        mig: Iterable[tuple[str, str]] = (),
        **changed: object,
    ) -> Report:
        """Add a GPU with its holders.

        Args:
            model: product, memory and reserved memory in MiB.
            pods: holder, resource, shares, and the used part of the memory that it holds.
            backends: backends of its pool.
            owner: the backend that owns it; by default the only one, if somebody holds a share.
            offers: shares by resource.
            mig: slot and holder of each MIG device; an empty holder is idle.
            changed: further keys of the report.
        """
        product, memory, reserved = model
        index, usable = len(self.status["gpus"]), memory - reserved
        uuid, offers = f"GPU-{self.name}-{index}", dict(offers or {METAGPU: 100})
        mig = list(mig)
        for slot, holder in mig:
            if holder:
                resource = f"nvidia.com/mig-{slot.partition('@')[0]}"
                pods = [*pods, (holder, resource, 1, 0.4)]
        held = {name: sum(count for _, r, count, _ in pods if r == name) for name in offers}
        busy_with = {name for name, count in held.items() if count}
        healthy = changed.get("healthy", True)
        shares = {
            name: {
                "capacity": capacity,
                "held": held[name],
                "free": capacity - held[name] if healthy and busy_with <= {name} else 0,
            }
            for name, capacity in offers.items()
        }
        report: Report = {
            "index": index,
            "uuid": uuid,
            "product": product,
            "memoryMiB": memory,
            "pciBusId": f"0000:{index + 1:02x}:00.0",
            "numaNode": index // 4,
            "healthy": True,
            "reason": "",
            "since": ago(3000),
            "recovery": None,
            "backends": list(backends),
            "turn": None,
            "cleaning": {},
            "suspended": {},
            "owner": owner or (backends[0] if pods else None),
            "cordon": None,
            "unheard": None,
            "faults": [],
            "blocked": [],
            "paused": [],
            "devices": [
                {
                    "share": f"{uuid}::{slot}",
                    "device": f"MIG-{uuid}-{slot}",
                    "holder": f"{holder} (main)" if holder else None,
                    **_placed(slot),
                    "gpuInstance": number,
                    "computeInstance": 0,
                    "idle": not holder,
                }
                for number, (slot, holder) in enumerate(mig)
            ],
            "waitsFor": None,
            "nvlinkPeers": [],
            "pool": "all",
            "poolReason": "all GPUs",
            "shares": shares,
            "freeCapacity": None,
            **changed,
        }
        self.status["gpus"].append(report)
        used = sum(self._hold(report, usable, pod) for pod in pods)
        self.usage["gpus"].append(
            {
                "index": index,
                "uuid": uuid,
                "product": product,
                "memoryMiB": memory,
                "usableMiB": usable,
                "usedMiB": used if healthy else None,
                "utilization": min(97, 23 * len(pods)) if healthy else None,
                "shares": [
                    {
                        "resource": name,
                        "capacity": capacity,
                        "held": held[name],
                        "shareMiB": _share_mib(name, usable, capacity),
                    }
                    for name, capacity in offers.items()
                ],
                "healthy": healthy,
                "reason": report["reason"],
                "since": report["since"],
                "faults": {},
                "cordon": None,
                "policy": "warn",
                "failure": None,
            }
        )
        return report

    def _hold(self, gpu: Report, usable: int, pod: tuple[str, str, int, float]) -> int:
        holder, resource, shares, used = pod
        namespace, _, name = holder.partition("/")
        capacity = gpu["shares"].get(resource, {}).get("capacity", 1)
        memory = shares * _share_mib(resource, usable, capacity)
        self.status["leases"].append(
            {
                "resource": resource,
                "gpu": gpu["index"],
                "uuid": gpu["uuid"],
                "shares": shares,
                "holder": f"{holder} (main)",
                "podUid": f"uid-{name}",
                "podOwner": "",
                "podPhase": "Running",
                "part": round(shares / capacity, 4),
            }
        )
        self.usage["containers"].append(
            {
                "namespace": namespace,
                "pod": name,
                "container": "main",
                "podUid": f"uid-{name}",
                "podOwner": None,
                "podPhase": "Running",
                "gpus": [
                    {
                        "index": gpu["index"],
                        "uuid": gpu["uuid"],
                        "resource": resource,
                        "shares": shares,
                        "capacity": capacity,
                        "shareMiB": memory,
                        "limitMiB": memory,
                        "usedMiB": round(memory * used),
                        "overLimit": used > 1,
                        "utilization": round(60 * used),
                        "relativeUtilization": 90,
                        "guard": "enforcer",
                        "policy": "warn",
                        "processes": 1,
                    }
                ],
            }
        )
        return round(memory * used)

    def as_node(self, *, problem: str = "") -> Report:
        """Return the node as a view has it, with the totals of its offers."""
        offers: dict[str, Report] = {}
        for gpu in self.status["gpus"]:
            for name, document in gpu["shares"].items():
                known = self.status["resources"].setdefault(name, {"capacity": 0, "allocatable": 0})
                known["capacity"] += document["capacity"]
                known["allocatable"] += document["capacity"] if gpu["healthy"] else 0
                one = offers.setdefault(name, {"free": 0, "heldBack": 0, "largestRequest": 0})
                one["requestRule"] = "any"
                one["free"] += document["free"]
                one["largestRequest"] = max(one["largestRequest"], document["free"])
        self.status["offers"] = {**offers, **self.status["offers"]}
        answered = not problem
        return {
            "name": self.name,
            "problem": problem,
            "labels": {},
            "status": self.status if answered else None,
            "usage": self.usage if answered else None,
        }


def _placed(slot: str) -> Report:
    """Return profile and placement of a slot, as `3g.40gb@0`, on a GPU of 80 GB."""
    profile, _, start = slot.partition("@")
    size = int(profile.partition(".")[2].removesuffix("gb")) // 10
    return {"profile": profile, "placement": {"start": int(start), "size": size}}


def _share_mib(resource: str, usable: int, capacity: int) -> int:
    """Return the memory of one share; a MIG device's is in its profile's name."""
    if "gb" in resource:
        return int(resource.rpartition(".")[2].removesuffix("gb")) * 1024
    return usable // capacity


def view(kind: str, nodes: Iterable[Report], **more: object) -> View:
    """Return a view of nodes."""
    return {
        "kind": kind,
        "at": ago(0),
        "nodes": list(nodes),
        "events": [],
        "waiting": [],
        **more,
    }


def event(minutes: float, severity: str, reason: str, text: str, **where: object) -> Report:
    """Return an event; `node` and `gpu` may be given."""
    return {
        "at": ago(minutes),
        "node": "",
        "gpu": None,
        "severity": severity,
        "reason": reason,
        "text": text,
        **where,
    }


def granted(minutes: float, pod: str, shares: str, gpu: int, **where: object) -> Report:
    """Return the event of a grant."""
    text = f"{pod} has {shares} on GPU {gpu}"
    return event(minutes, "info", GRANTED, text, gpu=gpu, **where)


MIG_OFFERS = {
    "nvidia.com/mig-1g.10gb": 7,
    "nvidia.com/mig-2g.20gb": 3,
    "nvidia.com/mig-3g.40gb": 2,
}
MIXED = ("mig", "timeslice", "fraction")
MIXED_OFFERS = {**MIG_OFFERS, SHARED: 4, METAGPU: 100}


def busy_node(name: str = "gpu-node-01") -> NodeView:
    """Return a node with each way of sharing, a mixed pool and faults."""
    node = NodeView(name)
    node.gpu(
        A100,
        [("vision/train-resnet", METAGPU, 50, 0.83), ("lab/notebook-ana", METAGPU, 20, 0.35),
         ("lab/notebook-ben", METAGPU, 10, 1.12)],
    )  # fmt: skip
    node.gpu(
        H100,
        mig=[("3g.40gb@0", "nlp/finetune-7b"), ("2g.20gb@4", "serve/rerank"), ("1g.10gb@6", "")],
        backends=MIXED,
        offers=MIXED_OFFERS,
        pool="mixed",
        freeCapacity={"largest": "1g.10gb", "largestSlices": 1, "freeSlices": 2, "slices": 8},
    )
    node.gpu(
        H100,
        [(f"serve/chat-{n}", SHARED, 1, 0.7) for n in "abc"],
        backends=MIXED,
        owner="timeslice",
        offers=MIXED_OFFERS,
        pool="mixed",
    )
    node.gpu(
        H100,
        backends=MIXED,
        offers=MIXED_OFFERS,
        pool="mixed",
        turn={"backend": "mig", "withdrawn": False, "next": "timeslice", "nextIn": 12.0},
        freeCapacity={"largest": "7g.80gb", "largestSlices": 8, "freeSlices": 8, "slices": 8},
    )
    node.gpu(
        A100,
        [("vision/train-vit", METAGPU, 100, 0.94)],
    )
    node.gpu(
        A100,
        [("lab/sweep-14", METAGPU, 40, 0.5)],
        healthy=False,
        reason=OFF_THE_BUS,
        since=ago(14),
    )
    node.gpu(
        A100,
        [("nlp/embed", METAGPU, 30, 0.6), ("lab/notebook-cleo", METAGPU, 30, 0.2)],
        cordon={"reason": FAN, "since": ago(47), "reset": False},
    )
    node.gpu(A100)
    node.status["offers"][METAGPU] = {
        "free": 120,
        "heldBack": 20,
        "largestRequest": 100,
        "requestRule": "whole_gpus",
    }
    node.status["devices"] = {"gpu": {"devices": 4, "free": 1, "largest": {}}}
    hidden = f"20 free shares of {METAGPU} are hidden from the scheduler"
    back = f"{hidden}: one pod can get at most 100 now"
    move = (
        "if nlp/finetune-7b (main) moved from 3g.40gb@0 of GPU 1 to 3g.40gb@0 of GPU 3, a 4g.40gb "
        "would fit on GPU 1"
    )
    largest = "GPU 1: the largest instance that fits is 1g.10gb"
    node.status["remarks"] = [
        {"reason": RemarkReason.SHARES_HELD_BACK, "gpu": 0, "text": f"GPU 0: {back}"},
        {"reason": RemarkReason.LARGEST_INSTANCE, "gpu": 1, "text": largest},
        {"reason": RemarkReason.MOVE_FOR_INSTANCE, "gpu": None, "text": move},
    ]
    return node


def node_view() -> View:
    """Return the view of `busy_node`."""
    return view(
        "node",
        [busy_node().as_node()],
        events=[
            granted(2, "lab/notebook-ben", f"10 shares of {METAGPU}", 0),
            granted(9, "serve/rerank", "1 share of nvidia.com/mig-2g.20gb", 1),
            event(14, "error", "GPUUnhealthy", f"GPU 5: {OFF_THE_BUS}", gpu=5),
            event(21, "warning", "GPUMemoryExceeded", OVER_ITS_SHARE, gpu=0),
            event(47, "info", "GPUCordoned", f"GPU 6 accepts no new shares: {FAN}", gpu=6),
            event(180, "info", "ConfigApplied", CONFIG_APPLIED),
        ],
        lacking=ELSEWHERE,
    )


def pod_view() -> View:
    """Return the view of one pod, as its daemon's answers make it: of two GPUs, one faulty."""
    node = NodeView("gpu-node-01")
    node.gpu(A100, [("lab/notebook-ana", METAGPU, 20, 0.35)])
    node.gpu(
        H100,
        [("lab/notebook-ana", METAGPU, 40, 1.2)],
        healthy=False,
        reason=OFF_THE_BUS,
        since=ago(14),
    )
    containers = [
        {
            **container,
            "gpus": [
                {**part, "limitMiB": 24576, "processes": [{}, {}]} for part in container["gpus"]
            ],
        }
        for container in node.usage["containers"]
    ]
    gpus = [{**gpu, "devices": [], "slices": 0} for gpu in node.usage["gpus"]]
    row = node_of_pod(
        {"node": node.name, "gpus": gpus}, {"containers": containers, "unauthorized": []}
    )
    events = [
        event(14, "error", "GPUUnhealthy", f"GPU 1: {OFF_THE_BUS}", gpu=1, node=node.name),
        granted(90, "lab/notebook-ana", f"20 shares of {METAGPU}", 0, node=node.name),
    ]
    return view("pod", [row], events=events)


def mig_pod_view() -> View:
    """Return the view of a pod that holds one MIG device of a GPU of eight slices."""
    node = NodeView("gpu-node-01")
    held = [("2g.20gb@4", "lab/notebook-ana")]
    node.gpu(H100, mig=held, backends=("mig",), offers=MIG_OFFERS)
    device = {
        "container": "main",
        "device": "MIG-4",
        "profile": "2g.20gb",
        "placement": {"start": 4, "size": 2},
        "share": "GPU-gpu-node-01-0::2g.20gb@4",
        "fault": {"reason": "XID 94", "since": ago(5)},
    }
    gpus = [{**gpu, "devices": [device], "slices": 8} for gpu in node.usage["gpus"]]
    containers = [
        {
            **container,
            "gpus": [{**part, "limitMiB": None, "processes": []} for part in container["gpus"]],
        }
        for container in node.usage["containers"]
    ]
    devices = {"node": node.name, "gpus": gpus}
    return view("pod", [node_of_pod(devices, {"containers": containers, "unauthorized": []})])


def _status_of(node: View) -> StatusReport | None:
    return None if node["status"] is None else complete(node["status"], StatusReport)


def cluster_view(count: int = 9) -> View:
    """Return a cluster of nodes of several models; one does not answer."""
    nodes = [busy_node("gpu-a-01").as_node()]
    teams = ("vision", "nlp", "lab", "serve")
    for number in range(2, count):
        kind = number % 3
        node = NodeView(
            f"gpu-{'bcd'[kind]}-{number:02d}", profile=("large", "inference", None)[kind]
        )
        for index in range((8, 4, 4)[kind]):
            held = [
                (f"{teams[(number + index + k) % 4]}/job-{number}{index}{k}", METAGPU, size, 0.7)
                for k, size in enumerate(((30, 20), (60,), (), (25, 25, 40))[(number + index) % 4])
            ]
            if kind == 2:
                slots = [("3g.40gb@0", f"nlp/mig-{number}{index}"), ("1g.10gb@4", "")]
                node.gpu(
                    H100,
                    mig=slots if index % 2 else [],
                    backends=("mig",),
                    offers=MIG_OFFERS,
                    freeCapacity={
                        "largest": "2g.20gb",
                        "largestSlices": 2,
                        "freeSlices": 3,
                        "slices": 8,
                    },
                )
            else:
                broken = number == 4 and index == 2
                fault = {"healthy": False, "reason": ECC_ERROR}
                node.gpu((A100, L40S)[kind], held, **(fault if broken else {}))  # type: ignore[arg-type]
        nodes.append(node.as_node())
    lost = "no answer within 5 s"
    nodes.append(NodeView("gpu-d-99").as_node(problem=lost))
    return view(
        "cluster",
        nodes,
        events=[
            event(3, "error", "GPUUnhealthy", f"GPU 2: {ECC_ERROR}", node="gpu-c-04", gpu=2),
            event(14, "error", "GPUUnhealthy", f"GPU 5: {OFF_THE_BUS}", node="gpu-a-01", gpu=5),
            granted(31, "nlp/mig-51", "1 share of nvidia.com/mig-3g.40gb", 1, node="gpu-d-05"),
        ],
        waiting=waiting_pods(
            [
                waiting_pod("nlp", "train-70b", {METAGPU: 700}),
                waiting_pod("lab", "sweep-15", claim="two-gpus"),
            ],
            [
                ClusterNode(other["name"], report=_status_of(other), problem=other["problem"])
                for other in nodes
            ],
            two_gpus(),
        ),
    )


def waiting_pod(
    namespace: str, name: str, limits: Mapping[str, int] | None = None, claim: str = ""
) -> Report:
    """Return a Pod that the scheduler has found no node for."""
    says = "0/9 nodes are available: 9 cannot allocate all claims."
    claims = [{"name": "gpu", "resourceClaimName": claim}] if claim else []
    return {
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "containers": [{"name": "main", "resources": {"limits": limits or {}}}],
            "resourceClaims": claims,
        },
        "status": {
            "conditions": [
                {"type": "PodScheduled", "status": "False", "message": says if claim else ""}
            ]
        },
    }


def two_gpus() -> ReadClaims:
    """Return the claim of two whole GPUs, and the class that it names."""
    selector = (
        "device.driver == 'gpu.metagpu.io' && device.attributes['gpu.metagpu.io'].type == 'gpu'"
    )
    exactly = {"deviceClassName": "gpu.metagpu.io", "count": 2}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    [ref] = claims_of([waiting_pod("lab", "sweep-15", claim="two-gpus")])
    selectors = [{"cel": {"expression": selector}}]
    named = {"metadata": {"name": "gpu.metagpu.io"}, "spec": {"selectors": selectors}}
    return ReadClaims({ref: spec}, [named])


def crowded_view(gpus: int = 16, pods: int = 60, shares: int = 1000) -> View:
    """Return a node of many GPUs with many shares and holders each."""
    node = NodeView("crowded")
    for index in range(gpus):
        holders = [
            (f"team-{k % 7}/pod-{index}-{k}", METAGPU, shares // pods, 0.6) for k in range(pods)
        ]
        node.gpu(A100, holders, offers={METAGPU: shares})
    return view("node", [node.as_node()])
