"""Who uses what as plain data: what `mgctl` shows.

Memory is in MiB, utilisation in percent; `None` where the driver does not say.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from metagpu.core.backend import Guard
from metagpu.core.census import Findings
from metagpu.core.enforcement import Enforcement
from metagpu.core.enforcer import guarded
from metagpu.core.gpu import MIB, GpuId
from metagpu.core.model import Holder, Share, ShareId
from metagpu.core.pods import KnownPod
from metagpu.core.snapshot import GpuState, Snapshot
from metagpu.core.usage import Account, Process, Stranger, Usage
from metagpu.core.wishes import settle


class Rules(msgspec.Struct, frozen=True):
    """What holds on this node.

    Attributes:
        terms: what the pool of each GPU says.
        guards: what guards the containers of each backend.
        limited: whether the driver keeps a container within its limit.
    """

    terms: Callable[[GpuId], Enforcement]
    guards: Mapping[str, Guard]
    limited: Callable[[Usage], bool] = lambda _: False


class Pod(msgspec.Struct, frozen=True):
    """Who asks, where that is a pod; the uid tells it from an earlier one of its name."""

    namespace: str
    name: str
    uid: str

    def owns(self, usage: Usage) -> bool:
        """Say whether a usage is this pod's; where no process tells a uid, the name decides."""
        holder = usage.holder
        return (holder.namespace, holder.pod) == (self.namespace, self.name) and (
            usage.pod_uid in (None, self.uid)
        )


def usage_report(snapshot: Snapshot, findings: Findings, rules: Rules) -> dict[str, Any]:
    """Say who uses what of which GPU, and who belongs to nobody."""
    usages = [usage for account in findings.accounts.values() for usage in account.usages]
    strangers = [it for account in findings.accounts.values() for it in account.strangers]

    return {
        "gpus": [
            _gpu(state, _whole(state, findings), findings, rules)
            for state in snapshot.gpus.values()
        ],
        "containers": _containers(snapshot, usages, findings, rules),
        "strangers": [_stranger(it, snapshot, findings) for it in strangers],
        "hints": list(findings.hints),
    }


def pod_report(snapshot: Snapshot, findings: Findings, rules: Rules, pod: Pod) -> dict[str, Any]:
    """Say the same to a pod, of itself alone, in the same shape.

    It hears of the GPUs it holds shares of. What is used and held of them is what it uses and
    holds itself, and pids are those its containers know.
    """
    usages = [usage for it in findings.accounts.values() for usage in it.usages if pod.owns(usage)]
    containers = _containers(snapshot, usages, findings, rules)

    for container in containers:
        for part in container["gpus"]:
            for process in part["processes"]:
                process["pid"] = process["innerPid"]
    return {
        "gpus": [
            _gpu_for(state, _own(state, its, findings), findings, rules)
            for gpu, state in snapshot.gpus.items()
            if (its := [usage for usage in usages if usage.gpu == gpu])
        ],
        "containers": containers,
        "strangers": [],
        "hints": [],
    }


class _Use(msgspec.Struct, frozen=True):
    """What somebody has of a GPU: shares, memory, and by pid how busy they keep it."""

    held: Container[ShareId]
    memory: int
    busy: Mapping[int, int] | None


def _whole(state: GpuState, findings: Findings) -> _Use:
    """Say what all have of a GPU."""
    account = findings.accounts.get(state.gpu.id, Account(state.gpu.id))
    strangers = sum(stranger.process.memory or 0 for stranger in account.strangers)
    memory = sum(usage.memory for usage in account.usages) + strangers
    return _Use(state.leases, memory, findings.busy.get(state.gpu.id))


def _own(state: GpuState, usages: Sequence[Usage], findings: Findings) -> _Use:
    """Say what one pod has of a GPU."""
    held = {share.id for usage in usages for share in usage.shares}
    busy = findings.busy.get(state.gpu.id)
    pids = [process.pid for usage in usages for process in usage.processes]
    own = None if busy is None else {pid: busy.get(pid, 0) for pid in pids}
    return _Use(held, sum(usage.memory for usage in usages), own)


def _gpu(state: GpuState, use: _Use, findings: Findings, rules: Rules) -> dict[str, Any]:
    gpu, busy = state.gpu, use.busy
    failure = findings.failures.get(gpu.id)

    return {
        "index": gpu.index,
        "uuid": gpu.id,
        "product": gpu.name,
        "memoryMiB": _mib(gpu.memory),
        "usableMiB": _mib(gpu.memory - (gpu.reserved or 0)),
        "usedMiB": None if failure else _mib(use.memory),
        "utilisation": None if busy is None else min(100, sum(busy.values())),
        "shares": _offered(state, use.held),
        "healthy": state.verdict.healthy,
        "reason": state.verdict.reason,
        "faults": {device: verdict.reason for device, verdict in state.faults.items()},
        "cordon": state.cordon and state.cordon.reason,
        "policy": str(rules.terms(gpu.id).policy),
        "failure": failure,
    }


def _gpu_for(state: GpuState, use: _Use, findings: Findings, rules: Rules) -> dict[str, Any]:
    """Say it to a pod: no word of other pods' devices, nor why an operator has cordoned it."""
    made = [it for stock in state.stocks.values() for it in stock.made.items()]
    own = {its.device for share, its in made if share in use.held}
    told = _gpu(state, use, findings, rules)
    faults = {device: reason for device, reason in told["faults"].items() if device in own}
    return {**told, "cordon": None, "faults": faults}


def _offered(state: GpuState, held: Container[ShareId]) -> list[dict[str, Any]]:
    by_resource: dict[str, list[Share]] = {}
    for share in state.shares:
        by_resource.setdefault(share.resource, []).append(share)

    return [
        {
            "resource": resource,
            "capacity": len(shares),
            "held": sum(share.id in held for share in shares),
            "shareMiB": _mib(shares[0].memory),
        }
        for resource, shares in by_resource.items()
    ]


def _containers(
    snapshot: Snapshot, usages: Iterable[Usage], findings: Findings, rules: Rules
) -> list[dict[str, Any]]:
    found: dict[tuple[Holder, str | None], list[Usage]] = {}
    told = {usage.holder: usage.pod_uid for usage in usages if usage.pod_uid}
    for usage in usages:
        # On a GPU that it does not use, nothing tells a pod's uid: it is that of the others.
        uid = usage.pod_uid or told.get(usage.holder)
        if uid is None and (pod := snapshot.pods.find(usage.holder, None)) is not None:
            uid = pod.uid
        found.setdefault((usage.holder, uid), []).append(usage)

    return [
        {
            "namespace": holder.namespace,
            "pod": holder.pod,
            "container": holder.container,
            "podUid": uid,
            **_known(snapshot.pods.find(holder, uid)),
            "gpus": [_part(snapshot, its, findings, rules) for its in parts],
        }
        for (holder, uid), parts in sorted(found.items(), key=lambda item: str(item[0]))
    ]


def _known(pod: KnownPod | None) -> dict[str, Any]:
    """Say what the API server tells of a pod, nothing where it is not asked."""
    return {"podOwner": pod and (pod.owner or None), "podPhase": pod and (pod.phase or None)}


def _part(snapshot: Snapshot, usage: Usage, findings: Findings, rules: Rules) -> dict[str, Any]:
    """Say what one container has of one GPU."""
    state, guard = snapshot.gpus[usage.gpu], guarded(usage, rules.guards)
    settled = settle(usage, snapshot, rules.terms(usage.gpu))
    judged = guard is Guard.ENFORCER
    limit = settled.limit if judged else None
    if judged and rules.limited(usage):
        guard = Guard.DRIVER
    resource = usage.shares[0].resource
    capacity = sum(share.resource == resource for share in state.shares)
    busy = findings.busy.get(usage.gpu)
    own = None if busy is None else sum(busy.get(p.pid, 0) for p in usage.processes)

    return {
        "index": state.gpu.index,
        "uuid": usage.gpu,
        "resource": resource,
        "shares": len(usage.shares),
        "capacity": capacity,
        "shareMiB": None if usage.share is None else _mib(usage.share),
        "limitMiB": None if limit is None else _mib(limit),
        "usedMiB": _mib(usage.memory),
        "over": limit is not None and usage.memory > limit,
        "utilisation": own,
        # Of what its shares are of the GPU: above 100 it takes what others leave.
        "relativeUtilisation": (
            None if own is None else round(own * max(capacity, 1) / len(usage.shares))
        ),
        "guard": guard and str(guard),
        "policy": str(settled.terms.policy) if judged else None,
        "processes": [_process(p, busy, findings) for p in usage.processes],
    }


def _stranger(stranger: Stranger, snapshot: Snapshot, findings: Findings) -> dict[str, Any]:
    holder = stranger.holder

    return {
        "index": snapshot.gpus[stranger.gpu].gpu.index,
        "uuid": stranger.gpu,
        "namespace": holder and holder.namespace,
        "pod": holder and holder.pod,
        "container": holder and holder.container,
        "why": stranger.why,
        **_process(stranger.process, findings.busy.get(stranger.gpu), findings),
    }


def _process(
    process: Process, busy: Mapping[int, int] | None, findings: Findings
) -> dict[str, Any]:
    told = findings.particulars.get(process.who) if process.who else None

    return {
        "pid": process.pid,
        "innerPid": told and told.inner_pid,
        "memoryMiB": None if process.memory is None else _mib(process.memory),
        "utilisation": None if busy is None else busy.get(process.pid, 0),
        "user": told and ("root" if told.uid == 0 else str(told.uid)),
        "command": told and list(told.command),
        "startedAt": told
        and datetime.fromtimestamp(told.started_at, UTC).isoformat("T", "seconds"),
        "hostMemoryMiB": told and _mib(told.memory),
        "cpuSeconds": told and round(told.cpu, 2),
    }


def _mib(amount: int) -> int:
    return amount // MIB
