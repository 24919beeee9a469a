"""Metrics of who uses what of a GPU, from a look at all of them. Pure, for a thread."""

from collections.abc import Iterator

from msgspec.structs import replace

from metagpu.core.backend import Guard
from metagpu.core.census import Findings
from metagpu.core.enforcer import guarded
from metagpu.core.gpu import GpuId
from metagpu.core.model import Holder
from metagpu.core.snapshot import GpuState, Snapshot
from metagpu.core.usage import Account, Usage
from metagpu.core.usage_report import Rules
from metagpu.core.wishes import settle
from metagpu.plugins.metrics import families as f
from metagpu.plugins.metrics.gpus import gpu_labels
from metagpu.plugins.metrics.samples import Sample

_PERCENT = 100


def fixed(rules: Rules, findings: Findings) -> Rules:
    """Ask what may change meanwhile, on the event loop, so that a thread may go by the rules."""
    usages = (usage for account in findings.accounts.values() for usage in account.usages)
    limited = frozenset(map(_place, filter(rules.limited, usages)))
    return replace(rules, limited=lambda usage: _place(usage) in limited)


def _place(usage: Usage) -> tuple[GpuId, Holder, str | None]:
    return usage.gpu, usage.holder, usage.pod_uid


def of_findings(snapshot: Snapshot, findings: Findings, rules: Rules) -> Iterator[Sample]:
    """Measure who uses what: a series for each container and GPU, zero where it uses nothing.

    Of a GPU that could not be asked nothing is said but that: unknown is not zero.
    """
    yield Sample(f.USAGE_TIME, (), findings.at)

    for gpu, account in findings.accounts.items():
        if (state := snapshot.gpus.get(gpu)) is None:
            continue
        known = gpu not in findings.failures
        yield Sample(f.GPU_KNOWN, gpu_labels(state.gpu), known)
        if known:
            yield from _gpu(state, account, findings)
            for holder, usages in _by_holder(account).items():
                yield from _container(snapshot, holder, usages, findings, rules)


def _gpu(state: GpuState, account: Account, findings: Findings) -> Iterator[Sample]:
    me, busy = gpu_labels(state.gpu), findings.busy.get(state.gpu.id)
    strange = sum(stranger.process.memory or 0 for stranger in account.strangers)

    yield Sample(f.GPU_USED, me, strange + sum(usage.memory for usage in account.usages))
    yield Sample(f.GPU_STRANGERS, me, len(account.strangers))
    yield Sample(f.GPU_STRANGERS_MEMORY, me, strange)
    if busy is not None:
        yield Sample(f.GPU_BUSY, me, min(1.0, sum(busy.values()) / _PERCENT))


def _by_holder(account: Account) -> dict[Holder, list[Usage]]:
    """Put together who has one name: a pod, and the earlier one that it replaces."""
    found: dict[Holder, list[Usage]] = {}
    for usage in account.usages:
        found.setdefault(usage.holder, []).append(usage)
    return found


def _container(
    snapshot: Snapshot, holder: Holder, usages: list[Usage], findings: Findings, rules: Rules
) -> Iterator[Sample]:
    state = snapshot.gpus[usages[-1].gpu]
    me = (holder.namespace, holder.pod, holder.container, *gpu_labels(state.gpu))
    processes = [process for usage in usages for process in usage.processes]
    held = [settle(usage, snapshot, rules.terms(state.gpu.id)) for usage in usages]
    guard = guarded(usages[-1], rules.guards)
    judged = guard is Guard.ENFORCER
    if judged and rules.limited(usages[-1]):
        guard = Guard.DRIVER
    backends = ",".join(sorted({share.backend for share in usages[-1].shares}))
    policy = str(held[-1].terms.policy) if judged else ""

    yield Sample(f.CONTAINER_INFO, (*me, backends, str(guard or ""), policy), 1)
    yield Sample(f.CONTAINER_PROCESSES, me, len(processes))
    yield Sample(f.CONTAINER_USED, me, sum(usage.memory for usage in usages))
    if (share := usages[-1].share) is not None:
        yield Sample(f.CONTAINER_SHARE, me, share)
    limits = [each.limit if judged else None for each in held]
    if (limit := limits[-1]) is not None:
        over = [u.memory - at for u, at in zip(usages, limits, strict=True) if at is not None]
        yield Sample(f.CONTAINER_LIMIT, me, limit)
        yield Sample(f.CONTAINER_EXCESS, me, max(0, *over))
    if (busy := findings.busy.get(state.gpu.id)) is not None:
        own = sum(busy.get(process.pid, 0) for process in processes)
        yield Sample(f.CONTAINER_BUSY, me, min(1.0, own / _PERCENT))
