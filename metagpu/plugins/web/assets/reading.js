// The view of the server as what is drawn: pure functions.

import { RANK, problemsOf, reasonsOf } from './reasons.js';
import { compare, sum } from './words.js';

function splitHolder(holder) {
  const [, namespace, pod, container] = /^([^/]*)\/(\S+)(?: \((.*)\))?$/.exec(holder ?? '') ?? [];
  return { namespace, pod, container };
}

function readLease(lease, node) {
  const held = splitHolder(lease.holder);
  const name = held.pod ?? (lease.resourceClaim ? `claim ${lease.resourceClaim}` : 'a pod that starts');
  const full = lease.holder ?? name;
  return { ...lease, ...held, name: lease.sharers?.length ? `${name} +${lease.sharers.length}` : name, full: [full, ...(lease.sharers ?? [])].join(', '), node, pod: held.pod ? `${held.namespace}/${held.pod}` : `${node} ${name}` };
}

/** Return the slices of a GPU and the MIG devices on them; shares of one device are one entry. */
function readMig(gpu, leases) {
  const bySlot = new Map();
  for (const it of gpu.devices ?? []) {
    if (!it.placement) continue;
    const { start, size } = it.placement;
    const key = `${it.profile}@${start}`;
    const found = bySlot.get(key) ?? { key, profile: it.profile, start, size, leases: [], fault: null };
    bySlot.set(key, found);
    const lease = it.holder && leases.find((one) => one.holder === it.holder);
    if (lease) found.leases.push(lease);
    found.fault ??= (gpu.faults ?? []).find((fault) => fault.device === it.device) ?? null;
  }
  const devices = [...bySlot.values()].sort((a, b) => a.start - b.start);
  return { slices: Math.max(gpu.freeCapacity?.slices ?? (gpu.slices || 8), ...devices.map((it) => it.start + it.size)), devices };
}

function readBars(gpu, leases) {
  const names = Object.keys(gpu.shares ?? {});
  const held = [...new Set(leases.map((it) => it.resource))];
  const shown = held.length ? held : names.filter((it) => gpu.shares[it].free).slice(0, 1);
  return (shown.length ? shown : names.slice(0, 1)).map((resource) => {
    const its = leases.filter((it) => it.resource === resource);
    const taken = sum(its.map((it) => it.shares));
    const { capacity = taken, free = 0 } = gpu.shares?.[resource] ?? {};
    const whole = Math.max(capacity, taken, 1);
    const cuts = its.map((it) => ({ ...it, capacity: whole })).sort((a, b) => b.shares - a.shares || compare(a.full, b.full));
    return { resource, capacity: whole, held: taken, free, cuts, unavailable: Math.max(0, whole - taken - free) };
  });
}

function readGpu(gpu, node, leases, usage) {
  const used = usage?.gpus?.find((it) => it.uuid === gpu.uuid) ?? {};
  const parts = (usage?.containers ?? []).flatMap((it) => it.gpus).filter((it) => it.uuid === gpu.uuid);
  const total = used.usableMiB ?? gpu.memoryMiB;
  const held = Math.min(total ?? 0, sum((used.shares ?? []).map((it) => it.held * it.shareMiB)));
  const unauthorized = [usage?.unauthorized ?? []].flat()[0] && used.usedMiB != null ? used.usedMiB - sum(parts.map((it) => it.usedMiB)) : 0;
  const reasons = reasonsOf(gpu, unauthorized > parts.length ? unauthorized : 0);  // each part is rounded
  const isMig = (gpu.devices ?? []).length > 0 || (gpu.freeCapacity?.slices > 0 && (gpu.owner ?? 'mig') === 'mig');
  return {
    ...gpu, node, leases, reasons, total, heldMiB: held, processes: sum(parts.map((it) => it.processes)), usedMiB: used.usedMiB ?? null, busy: used.utilization ?? null,
    mig: isMig ? readMig(gpu, leases) : null, bars: isMig ? [] : readBars(gpu, leases),
    level: reasons.length ? reasons.reduce((worst, it) => (RANK[it.level] < RANK[worst] ? it.level : worst), 'info') : 'healthy',
  };
}

export function readNode(it) {
  const status = it.status ?? {};
  const leases = (status.leases ?? []).map((lease) => readLease(lease, it.name));
  const byGpu = groupBy(leases, (lease) => lease.uuid);
  const remarks = groupBy(status.remarks ?? [], (remark) => remark.gpu ?? null);
  const ofGpu = (gpu) => (remarks.get(gpu.index) ?? []).map((remark) => remark.text.replace(/^GPU \d+: /, ''));
  const gpus = (status.gpus ?? []).map((gpu) => ({ ...readGpu(gpu, it.name, byGpu.get(gpu.uuid) ?? [], it.usage), remarks: ofGpu(gpu) }));
  const problems = [...(it.problem ? [{ level: 'error', text: it.problem, since: null }] : []), ...problemsOf(status)];
  return { name: it.name, problem: it.problem, status, usage: it.usage, remarks: (remarks.get(null) ?? []).map((remark) => remark.text), gpus, leases, problems };
}

function groupBy(items, keyOf) {
  const found = new Map();
  for (const it of items) {
    const key = keyOf(it);
    if (found.has(key)) found.get(key).push(it);
    else found.set(key, [it]);
  }
  return found;
}

/** Return a row for each container and resource, with its memory and GPUs. */
export function readPods(nodes) {
  const rows = new Map();
  for (const node of nodes) {
    const used = new Map();
    for (const it of node.usage?.containers ?? []) {
      for (const part of it.gpus) used.set(`${it.namespace}/${it.pod} (${it.container})|${part.uuid}|${part.resource}`, part);
    }
    const capacity = new Map(node.gpus.map((gpu) => [gpu.uuid, gpu.shares]));
    for (const lease of node.leases) {
      const key = `${node.name}|${lease.full}|${lease.resource}`;
      const row = rows.get(key) ?? { key, ...lease, gpus: [], shares: 0, usedMiB: null, heldMiB: null, limitMiB: null, busy: null, over: false };
      const part = used.get(`${lease.holder}|${lease.uuid}|${lease.resource}`);
      row.gpus.push(lease.gpu);
      row.shares += lease.shares;
      row.capacity = capacity.get(lease.uuid)?.[lease.resource]?.capacity;
      if (part) {
        if (part.usedMiB != null) row.usedMiB = (row.usedMiB ?? 0) + part.usedMiB;
        row.heldMiB = (row.heldMiB ?? 0) + (part.shareMiB ?? 0);
        row.limitMiB = (row.limitMiB ?? 0) + (part.limitMiB ?? part.shareMiB ?? 0);
        if (part.utilization != null) row.busy = (row.busy ?? 0) + part.utilization;
        row.over ||= part.overLimit;
      }
      rows.set(key, row);
    }
  }
  return [...rows.values()].sort((a, b) => compare(a.full, b.full));
}

/** Return for each resource what is free, and the largest part that one pod may get of it. */
export function readOffers(nodes) {
  const found = new Map();
  for (const { status } of nodes) {
    for (const [name, it] of Object.entries(status.offers ?? {})) {
      const row = found.get(name) ?? { name, free: 0, largest: 0, heldBack: 0, capacity: 0, allocatable: 0 };
      row.free += it.free;
      row.heldBack += it.heldBack;
      row.largest = Math.max(row.largest, it.largestRequest);
      row.capacity += status.resources?.[name]?.capacity ?? 0;
      row.allocatable += status.resources?.[name]?.allocatable ?? 0;
      found.set(name, row);
    }
  }
  return [...found.values()].sort((a, b) => compare(a.name, b.name));
}
