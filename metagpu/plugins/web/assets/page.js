// The page of a node, a cluster or a pod: it draws /api/v1/view, again at each line of /api/v1/changes.
// Data enters the document as text and attributes only; elements are kept by key, so that
// focus, scrolling and selection outlive an update.
'use strict';

const ASK_MS = 5000;          // memory in use changes without a change of the view
const SILENCE_MS = 40000;     // the server sends a comment every 15 s
const PAUSES_MS = [500, 5000];
const SHADES = 8, PATTERNS = 4;
const CUTS = 60;              // drawn per bar; what is smaller is one cut
const ROWS = 40;              // of the table of pods until all are asked for
const PROBLEMS = 40;
const GIB = 1024;
const TOKEN = 'metagpu-token';

const $ = (id) => document.getElementById(id);
const state = { view: null, connected: false, lost: null, problem: '', selected: null, allPods: false };

// --- elements ---------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Return whether VALUE is new to an element; to ask the document itself is slower by far. */
function isNew(it, name, value) {
  const known = (it.known ??= {});
  if (known[name] === value) return false;
  known[name] = value;
  return true;
}

function setText(it, text) {
  if (isNew(it, 'text', text)) it.textContent = text;
}

function setAttribute(it, name, value) {
  if (!isNew(it, name, value)) return;
  if (value === null) it.removeAttribute(name);
  else it.setAttribute(name, value);
}

function setNumber(it, name, value) {
  if (isNew(it, name, value)) it.style.setProperty(name, value);
}

/** Make the children of PARENT those of ITEMS, in their order; an element stays with its key. */
function keyed(parent, items, keyOf, create, update) {
  const kept = (parent.kept ??= new Map());
  const byKey = new Map();
  for (const item of items) {
    let key = String(keyOf(item));
    while (byKey.has(key)) key += '+';
    byKey.set(key, item);
  }
  for (const [key, it] of kept) {
    if (!byKey.has(key)) {
      it.remove();
      kept.delete(key);
    }
  }
  let next = parent.firstElementChild;
  for (const [key, item] of byKey) {
    let it = kept.get(key);
    if (!it) kept.set(key, (it = create(item)));
    update(it, item);
    if (it === next) next = next.nextElementSibling;
    else parent.insertBefore(it, next);
  }
}

/** Return an element whose parts are found by name: `parts(it).NAME`. */
function withParts(it, named) {
  it.parts = named;
  return it;
}

// --- words ------------------------------------------------------------------------------------

const plural = (count, word, ending = 's') => `${count} ${word}${count === 1 ? '' : ending}`;
const shortName = (resource) => (resource ?? '').split('/').pop();
const product = (gpu) => (gpu.product ?? '').replace(/^NVIDIA /, '');
const gib = (mib) => (mib == null ? '?' : mib === 0 ? '0' : (mib / GIB).toFixed(mib < 100 * GIB ? 1 : 0));
const isOfPod = () => state.view?.kind === 'pod';
const { compare } = new Intl.Collator('en', { numeric: true });
const sum = (numbers) => numbers.reduce((total, it) => total + (it ?? 0), 0);

function clock(time) {
  const at = new Date(time);
  if (Number.isNaN(at.getTime())) return String(time);
  const today = at.toDateString() === new Date().toDateString();
  const hours = at.toLocaleTimeString('en-GB');
  return today ? hours : `${at.toLocaleDateString('en-GB', { day: 'numeric', month: 'short' })} ${hours}`;
}

function age(time) {
  const seconds = Math.max(0, (Date.now() - new Date(time)) / 1000);
  for (const [unit, length] of [['d', 86400], ['h', 3600], ['min', 60]]) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return `${Math.floor(seconds)} s`;
}

function setTime(it, time, text = `${clock(time)}, ${age(time)} ago`) {
  setAttribute(it, 'datetime', time ?? '');
  setAttribute(it, 'title', time ?? '');
  setText(it, time ? text : '');
}

/** Return the reasons for which a GPU or a part of it does not serve. */
function reasonsOf(gpu) {
  const found = [];
  const add = (level, word, text, since) => found.push({ level, word, text, since });
  if (!gpu.healthy) {
    const returns = gpu.recovery?.returnsAt;
    if (returns) add('warning', 'recovering', `${gpu.reason}; its checks pass, and it returns at ${clock(returns)}`, gpu.since);
    else if (gpu.recovery) add('error', 'out of service', `${gpu.reason}; it waits for: metagpu acknowledge ${gpu.index}`, gpu.since);
    else add('error', 'out of service', gpu.reason, gpu.since);
  }
  for (const it of gpu.faults ?? []) {
    const where = (it.shares ?? []).map(slotOf).join(', ') || it.device;
    add('error', 'instance out', `MIG device ${where}: ${it.reason}`, it.since);
  }
  if (gpu.cordon) add('warning', 'cordoned', `cordoned: ${gpu.cordon.reason}`, gpu.cordon.since);
  if (gpu.unheard) add('warning', 'unheard', `its XIDs are not heard: ${gpu.unheard.reason}`, gpu.unheard.since);
  for (const [backend, it] of Object.entries(gpu.suspended ?? {})) add('warning', 'suspended', `${backend} suspended: ${it.reason}`, it.since);
  for (const [backend, since] of Object.entries(gpu.cleaning ?? {})) add('info', 'cleaning', `${backend} cleans up`, since);
  for (const text of gpu.blocked ?? []) add('warning', 'withheld', text, null);
  if (gpu.waitsFor) add('info', 'waiting', gpu.waitsFor, null);
  return found;
}

/** Return the problems of a node beside those of its GPUs, in the words of `metagpu status`. */
function problemsOf(status) {
  const found = [];
  const add = (level, text, since = null) => text && found.push({ level, text, since });
  const addAll = (level, named, sentence) => {
    for (const [name, text] of Object.entries(named ?? {})) if (text) add(level, sentence(name, text));
  };
  const { configuration = {}, cluster = {}, dra, cdi, mgctl } = status;
  add('error', configuration.error && `configuration rejected: ${configuration.error}`);
  for (const it of configuration.misfits ?? []) add('warning', `configuration does not fit ${it}`);
  for (const it of status.unreadableGpus ?? []) add('error', `not in service, as it cannot be read: ${it.reason}`, it.since);
  addAll('error', status.competingPlugins, (name, it) => `${name} is served by another plugin on ${it}`);
  addAll('error', status.registrationProblems, (name, it) => `${name}: ${it}`);
  addAll('error', status.endedTasks, (name, it) => `the main task ${name} of the daemon ended: ${it}`);
  for (const it of status.lostDevices ?? []) add('error', `${it.holder.split(' ')[0]}: ${it.reason}`);
  for (const it of [...(status.leaseDifferences ?? []), ...(status.mixedRequests ?? [])]) add('warning', `${it.holder.split(' ')[0]}: ${it.reason}`);
  if (cluster) {
    add('warning', cluster.problem && `API server: ${cluster.problem}`);
    addAll('warning', cluster.features, (use, it) => `API server, ${use}: ${it}`);
    addAll('warning', cluster.nodeDifferences, (name, it) => `${name}: ${it}`);
    add('warning', cluster.resourceSlices?.problem && `API server, ResourceSlices: ${cluster.resourceSlices.problem}`);
    addAll('warning', cluster.resourceSlices?.contested, (name, it) => `${name}: the device plugin offers it here, and the DeviceClass ${it} has it too`);
    add('info', cluster.driverUpgrade?.summary);
    for (const it of cluster.competingPlugins ?? []) {
      const also = it.contested.length ? `; it may serve ${it.contested.join(', ')} too` : '';
      add('warning', `${it.program} runs on this node: pod ${it.pod}${also}`);
    }
  }
  add('warning', dra?.problem && `DRA driver ${dra.driver}: ${dra.problem}`);
  add('warning', cdi?.problem && `containers may not start: ${cdi.problem}`);
  add('warning', cdi?.noLibraries && `containers get no libraries of the driver by CDI: ${cdi.noLibraries}`);
  add('warning', mgctl?.inPods && mgctl.problem && `containers get no answers from mgctl: ${mgctl.problem}`);
  return found;
}

const RANK = { error: 0, warning: 1, info: 2 };

// --- the view as what is drawn ----------------------------------------------------------------

const slotOf = (share) => String(share).split('::').pop();

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
  return { slices: Math.max(gpu.freeCapacity?.slices ?? 8, ...devices.map((it) => it.start + it.size)), devices };
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
  const reasons = reasonsOf(gpu);
  const isMig = (gpu.devices ?? []).length > 0 || (gpu.freeCapacity?.slices > 0 && (gpu.owner ?? 'mig') === 'mig');
  return {
    ...gpu, node, leases, reasons, total, heldMiB: held, processes: sum(parts.map((it) => it.processes)), usedMiB: used.usedMiB ?? null, busy: used.utilization ?? null,
    mig: isMig ? readMig(gpu, leases) : null, bars: isMig ? [] : readBars(gpu, leases),
    level: reasons.length ? reasons.reduce((worst, it) => (RANK[it.level] < RANK[worst] ? it.level : worst), 'info') : 'healthy',
  };
}

function readNode(it) {
  const status = it.status ?? {};
  const leases = (status.leases ?? []).map((lease) => readLease(lease, it.name));
  const byGpu = groupBy(leases, (lease) => lease.uuid);
  const remarks = groupBy(status.remarks ?? [], (text) => /^GPU (\d+): /.exec(text)?.[1] ?? '');
  const ofGpu = (gpu) => (remarks.get(String(gpu.index)) ?? []).map((text) => text.replace(/^GPU \d+: /, ''));
  const gpus = (status.gpus ?? []).map((gpu) => ({ ...readGpu(gpu, it.name, byGpu.get(gpu.uuid) ?? [], it.usage), remarks: ofGpu(gpu) }));
  const problems = [...(it.problem ? [{ level: 'error', text: it.problem, since: null }] : []), ...problemsOf(status)];
  return { name: it.name, problem: it.problem, status, usage: it.usage, remarks: remarks.get('') ?? [], gpus, leases, problems };
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
function readPods(nodes) {
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
        row.usedMiB = (row.usedMiB ?? 0) + part.usedMiB;
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
function readOffers(nodes) {
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

// --- colours ----------------------------------------------------------------------------------

const shades = new Map();

function hash(text) {
  let value = 5381;
  for (const it of text) value = ((value * 33) ^ it.codePointAt(0)) >>> 0;
  return value;
}

/** Give each pod a colour and a pattern of its own while there are some; a pod keeps its own. */
function assignShades(pods) {
  const present = new Set(pods);
  for (const pod of shades.keys()) if (!present.has(pod)) shades.delete(pod);
  const taken = new Set(shades.values());
  for (const pod of present) {
    if (shades.has(pod)) continue;
    const first = hash(pod);
    if (taken.size === SHADES * PATTERNS) {
      shades.set(pod, first % (SHADES * PATTERNS));
      continue;
    }
    let slot = 0;
    for (let step = 0; step < SHADES * PATTERNS; step += 1) {
      const it = Math.floor(step / SHADES) * SHADES + ((first + step) % SHADES);
      if (!taken.has(it)) {
        slot = it;
        break;
      }
    }
    shades.set(pod, slot);
    taken.add(slot);
  }
}

function shadeClass(pod) {
  const slot = shades.get(pod) ?? 0;
  return `shade${slot % SHADES} pattern${Math.floor(slot / SHADES)}`;
}

// --- a GPU ------------------------------------------------------------------------------------

function describeCut(cut) {
  return `${cut.full}: ${cut.shares} of ${cut.capacity} ${shortName(cut.resource)}`;
}

function makeCut(cut) {
  if (cut.kind !== 'held') return element('li', { class: 'rest' }, element('span'));
  return element('li', {}, element('button', { type: 'button', tabindex: '-1' }, element('span')));
}

function updateCut(it, cut) {
  setNumber(it, '--n', cut.shares);
  if (cut.start !== undefined) {
    setNumber(it, '--start', cut.start + 1);
    setNumber(it, '--size', cut.size);
  }
  const inner = it.firstElementChild;
  setText(inner.tagName === 'BUTTON' ? inner.firstElementChild : inner, cut.label);
  if (cut.kind !== 'held') {
    setAttribute(it, 'class', `rest ${cut.kind}`);
    return;
  }
  setAttribute(inner, 'class', `cut ${shadeClass(cut.pod)}${cut.fault ? ' faulty' : ''}`);
  setAttribute(inner, 'aria-label', cut.text);
  setAttribute(inner, 'aria-pressed', state.selected === cut.pod);
  inner.pod = cut.pod;
}

function cutsOfBar(bar) {
  const shown = bar.cuts.slice(0, CUTS), more = bar.cuts.slice(CUTS);
  const cuts = shown.map((it) => ({ ...it, kind: 'held', key: it.full, label: it.name, text: describeCut(it) }));
  if (more.length) cuts.push({ kind: 'more', key: 'more', shares: sum(more.map((it) => it.shares)), label: `${more.length} more` });
  if (isOfPod()) cuts.push({ kind: 'beyond', key: 'beyond', shares: bar.unavailable, label: '' });
  else if (bar.unavailable) cuts.push({ kind: 'unavailable', key: 'unavailable', shares: bar.unavailable, label: `${bar.unavailable} not available` });
  if (bar.free) cuts.push({ kind: 'free', key: 'free', shares: bar.free, label: `${bar.free} free` });
  return cuts;
}

function cutsOfMig({ slices, devices }) {
  const cuts = devices.map((it) => {
    const [lease] = it.leases;
    const place = { ...it, shares: it.size, fault: it.fault };
    if (!lease) return { ...place, kind: it.fault ? 'unavailable' : 'idle', label: `${it.profile} ${it.fault ? 'out' : 'idle'}` };
    const more = it.leases.length > 1 ? ` +${it.leases.length - 1}` : '';
    const label = `${it.profile} ${lease.name}${more}`;
    const holders = it.leases.map((one) => one.full).join(', ');
    return { ...place, kind: 'held', pod: lease.pod, label, text: `${label}: ${holders}, MIG device ${it.key}${it.fault ? `: ${it.fault.reason}` : ''}` };
  });
  for (let slice = 0; slice < slices; slice += 1) {
    if (!devices.some((it) => it.start <= slice && slice < it.start + it.size)) {
      cuts.push({ kind: 'slot', key: `slot ${slice}`, shares: 1, start: slice, size: 1, label: String(slice) });
    }
  }
  return cuts.sort((a, b) => a.start - b.start);
}

function barsOf(gpu) {
  if (gpu.mig) return [{ resource: 'slices', slices: gpu.mig.slices, drawn: cutsOfMig(gpu.mig) }];
  return gpu.bars.map((it) => ({ ...it, drawn: cutsOfBar(it) }));
}

function makeBar() {
  const list = element('ul', { class: 'bar' });
  const note = element('span', { class: 'bar-note' });
  return withParts(element('div', { class: 'bar-line' }, note, list), { list, note });
}

function updateBars(parent, gpu) {
  const bars = barsOf(gpu);
  keyed(parent, bars, (it) => it.resource, makeBar, (it, bar) => {
    const { list, note } = it.parts;
    setText(note, bars.length > 1 ? shortName(bar.resource) : '');
    note.hidden = bars.length < 2;
    list.classList.toggle('slices', Boolean(bar.slices));
    if (bar.slices) setNumber(list, '--slices', bar.slices);
    setAttribute(list, 'aria-label', `GPU ${gpu.index}, ${bar.slices ? `${bar.slices} memory slices` : shortName(bar.resource)}`);
    keyed(list, bar.drawn, (cut) => `${cut.kind} ${cut.key}`, makeCut, updateCut);
    const buttons = list.querySelectorAll('button');
    if (buttons.length && !list.querySelector('button[tabindex="0"]')) buttons[0].tabIndex = 0;
  });
}

function makeMemory() {
  const used = element('span', { class: 'used' }), held = element('span', { class: 'held' });
  const meter = element('span', { class: 'meter', role: 'img' }, held, used);
  const text = element('span', { class: 'meter-text' });
  return withParts(element('span', { class: 'memory' }, meter, text), { meter, used, held, text });
}

function updateMemory(it, usedMiB, heldMiB, total, text, over = false) {
  const { meter, used, held } = it.parts;
  const share = (mib) => (total ? Math.min(1, (mib ?? 0) / total) : 0);
  setNumber(used, '--part', share(usedMiB));
  setNumber(held, '--part', share(heldMiB));
  setText(it.parts.text, text);
  setAttribute(meter, 'aria-label', text);
  meter.classList.toggle('over', over);
}

function makeReason() {
  const mark = element('span', { class: 'mark', 'aria-hidden': 'true' });
  const where = element('a', { class: 'where' }), text = element('span'), since = element('time');
  return withParts(element('li', {}, mark, where, text, ' ', since), { mark, where, text, since });
}

function updateReason(it, reason) {
  const { mark, where, text, since } = it.parts;
  setAttribute(mark, 'data-level', reason.level);
  setText(where, reason.where ?? '');
  where.hidden = !reason.where;
  setAttribute(where, 'href', reason.href ?? null);
  setText(text, reason.text);
  setTime(since, reason.since, reason.since ? `since ${clock(reason.since)} (${age(reason.since)})` : '');
}

function makeGpu(gpu) {
  const part = (tag, name, ...children) => element(tag, { class: name }, ...children);
  const index = part('span', 'index'), model = part('span', 'model'), health = part('span', 'health');
  const mark = element('span', { class: 'mark', 'aria-hidden': 'true' }), word = element('span');
  health.append(mark, word);
  const owners = element('ul', { class: 'owners', 'aria-label': 'Backends; the owner is marked' });
  const bars = part('div', 'bars'), memory = makeMemory(), reasons = part('ul', 'reasons'), facts = part('p', 'facts');
  const head = element('h3', {}, index, model);
  return withParts(element('li', { class: 'gpu', id: `gpu-${gpu.index}`, tabindex: '-1' }, part('div', 'gpu-head', head, owners, health), bars, memory, facts, reasons), {
    index, model, mark, word, owners, bars, memory, reasons, facts,
  });
}

function turnOf(gpu) {
  const turn = gpu.turn;
  if (!turn) return gpu.owner || !gpu.backends?.length || gpu.level === 'error' ? '' : 'idle';
  const next = turn.next && turn.next !== turn.backend ? `, by ${turn.next} in ${Math.round(turn.nextIn)} s` : '';
  return `idle, offered by ${turn.backend} now${next}`;
}

function freeOf(gpu) {
  const free = Object.entries(gpu.shares ?? {}).filter(([, it]) => it.free).map(([name, it]) => `${it.free} of ${it.capacity} ${shortName(name)}`);
  return free.length ? `free: ${free.join(' · ')}` : gpu.healthy ? 'nothing is free' : '';
}

function updateGpu(it, gpu) {
  const p = it.parts;
  it.dataset.level = gpu.level;
  setText(p.index, `GPU ${gpu.index}`);
  setText(p.model, product(gpu));
  setAttribute(p.model, 'title', `${gpu.uuid} ${gpu.pciBusId ?? ''}`);
  setAttribute(p.mark, 'data-level', gpu.level);
  setText(p.word, gpu.reasons[0]?.word ?? 'healthy');
  keyed(p.owners, gpu.backends ?? [], (name) => name, () => element('li'), (item, name) => {
    const owns = gpu.owner === name;
    item.classList.toggle('owner', owns);
    item.classList.toggle('offers', !gpu.owner && gpu.turn?.backend === name);
    setText(item, owns && gpu.backends.length > 1 ? `${name} owns it` : name);
  });
  updateBars(p.bars, gpu);
  const used = gpu.usedMiB == null ? 'used memory unknown' : `${gib(gpu.usedMiB)} used`;
  const busy = gpu.busy == null ? '' : ` · ${gpu.busy} % busy`;
  updateMemory(p.memory, gpu.usedMiB, gpu.heldMiB, gpu.total, `${used} · ${gib(gpu.heldMiB)} held of ${gib(gpu.total)} GiB${busy}`);
  const facts = isOfPod() ? [plural(gpu.processes, 'process', 'es')] : [`pool ${gpu.pool ?? 'none'}`, turnOf(gpu), freeOf(gpu), ...gpu.remarks];
  setText(p.facts, facts.filter(Boolean).join('  ·  '));
  keyed(p.reasons, gpu.reasons, (one) => one.word + one.text, makeReason, updateReason);
}

// --- a node of the cluster --------------------------------------------------------------------

function makeMini() {
  const bars = element('span', { class: 'mini-bar' }), memory = element('span', { class: 'mini-memory' }, element('span'));
  const name = element('span', { class: 'mini-name' }), mark = element('span', { class: 'mark' });
  const image = element('div', { class: 'mini', role: 'img' }, element('span', { class: 'mini-head' }, name, mark), bars, memory);
  return withParts(element('li', {}, image), { image, bars, memory: memory.firstElementChild, name, mark });
}

function updateMini(it, gpu) {
  const { image, bars, memory, name, mark } = it.parts;
  const [bar] = barsOf(gpu);
  const word = gpu.reasons[0]?.word ?? 'healthy';
  setText(name, String(gpu.index));
  setAttribute(mark, 'data-level', gpu.level);
  image.dataset.level = gpu.level;
  image.classList.toggle('aside', Boolean(gpu.aside));
  const holders = [...new Set(gpu.leases.map((lease) => lease.full))];
  const text = `GPU ${gpu.index}, ${product(gpu)}: ${word}; ${holders.length ? `held by ${holders.join(', ')}` : 'held by nobody'}; ${gib(gpu.usedMiB)} of ${gib(gpu.total)} GiB used`;
  setAttribute(image, 'aria-label', text);
  image.hintText = gpu.reasons.length ? `${text}. ${gpu.reasons[0].text}` : text;
  setNumber(memory, '--part', gpu.total ? Math.min(1, (gpu.usedMiB ?? 0) / gpu.total) : 0);
  keyed(bars, bar?.drawn ?? [], (cut) => cut.key, () => element('span'), (cut, one) => {
    setNumber(cut, '--n', one.shares);
    setAttribute(cut, 'class', one.kind === 'held' ? `cut ${shadeClass(one.pod)}${state.selected === one.pod ? ' chosen' : ''}` : `rest ${one.kind}`);
  });
}

function makeNode() {
  const name = element('a', {}), models = element('span', { class: 'models' }), problem = element('ul', { class: 'reasons' });
  const gpus = element('ul', { class: 'minis' }), offers = element('ul', { class: 'node-offers' });
  return withParts(element('li', { class: 'node' }, element('div', { class: 'node-head' }, element('h3', {}, name), models), gpus, offers, problem), { name, models, problem, gpus, offers });
}

function updateNode(it, node) {
  const { name, models, problem, gpus, offers } = it.parts;
  setText(name, node.name);
  setAttribute(name, 'href', hashOf({ node: node.name }));
  const counts = new Map();
  for (const gpu of node.gpus) counts.set(product(gpu), (counts.get(product(gpu)) ?? 0) + 1);
  const profile = node.status.cluster?.profile;
  setText(models, [...[...counts].map(([model, count]) => `${count} × ${model}`), ...(profile ? [`profile ${profileName(profile)}`] : [])].join(', '));
  keyed(gpus, node.gpus, (gpu) => gpu.uuid, makeMini, updateMini);
  keyed(offers, readOffers([node]).filter((one) => one.capacity), (one) => one.name, makeFree, updateFree);
  keyed(problem, node.problems, (one) => one.text, makeReason, updateReason);
}

function makeFree() {
  const meter = element('span', { class: 'meter fragments', role: 'img' }, element('span', { class: 'held' }), element('span', { class: 'used' }));
  const text = element('span', { class: 'meter-text' });
  return withParts(element('li', { class: 'memory' }, meter, text), { meter, text });
}

function updateFree(it, offer) {
  const { meter, text } = it.parts;
  const part = (count) => (offer.capacity ? count / offer.capacity : 0);
  setNumber(meter.children[0], '--part', part(offer.free));
  setNumber(meter.children[1], '--part', part(Math.min(offer.largest, offer.free)));
  const sentence = offer.free ? `largest ${offer.largest} of ${offer.free} free` : 'nothing is free';
  setAttribute(meter, 'aria-label', `${shortName(offer.name)}: ${sentence}`);
  setText(text, it.tagName === 'LI' ? `${shortName(offer.name)}: ${sentence}` : sentence);
}

// --- filters ----------------------------------------------------------------------------------

const FILTERS = { namespace: 'Namespace', model: 'Model', profile: 'Profile', health: 'Health' };

const profileName = (it) => (typeof it === 'string' ? it : it?.name ?? String(it ?? ''));
const asked = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

function hashOf(change) {
  const all = new URLSearchParams();
  for (const [name, value] of Object.entries({ ...asked(), ...change })) if (value) all.set(name, value);
  return `#${all}`;
}

function migProfiles(gpu) {
  const offered = Object.keys(gpu.shares ?? {}).map((it) => /(\d+g\.\d+gb\S*)$/.exec(it)?.[1]);
  return [...offered, ...(gpu.mig?.devices ?? []).map((it) => it.profile)].filter(Boolean);
}

function valuesOf(gpu, node) {
  return {
    namespace: gpu.leases.map((it) => it.namespace).filter(Boolean),
    model: [product(gpu)],
    profile: [...migProfiles(gpu), ...(node.status.cluster?.profile ? [profileName(node.status.cluster.profile)] : [])],
    health: [gpu.level === 'healthy' ? 'healthy' : 'needs attention'],
  };
}

function makeFilter(name) {
  const select = element('select', { id: `filter-${name}`, name });
  return withParts(element('label', { for: `filter-${name}` }, element('span', {}, FILTERS[name]), select), { select });
}

function updateFilters(nodes) {
  const choices = Object.fromEntries(Object.keys(FILTERS).map((name) => [name, new Set()]));
  for (const node of nodes) {
    for (const gpu of node.gpus) {
      for (const [name, values] of Object.entries(valuesOf(gpu, node))) for (const it of values) choices[name].add(it);
    }
    if (node.problem) choices.health.add('needs attention');
  }
  for (const it of state.view.waiting ?? []) choices.namespace.add(it.namespace);
  keyed($('filters'), Object.keys(FILTERS), (name) => name, makeFilter, (it, name) => {
    const chosen = asked()[name] ?? '';
    const options = ['', ...[...choices[name].add(chosen)].filter(Boolean).sort()];
    keyed(it.parts.select, options, (one) => one, (one) => element('option', { value: one }, one || 'all'), () => {});
    if (it.parts.select.value !== chosen) it.parts.select.value = chosen;
    it.classList.toggle('active', chosen !== '');
  });
}

/** Return the nodes that have a GPU as asked for; GPUs that are not stand aside. */
function filtered(nodes) {
  const wanted = Object.entries(asked()).filter(([name]) => Object.hasOwn(FILTERS, name));
  if (!wanted.length) return nodes;
  return nodes
    .map((node) => ({
      ...node,
      gpus: node.gpus.map((gpu) => {
        const values = valuesOf(gpu, node);
        return { ...gpu, aside: !wanted.every(([name, value]) => values[name].includes(value)) };
      }),
      leases: node.leases.filter((it) => !asked().namespace || it.namespace === asked().namespace),
    }))
    .filter((node) => node.gpus.some((gpu) => !gpu.aside) || (node.problem && wanted.every(([name, value]) => name === 'health' && value === 'needs attention')));
}

// --- the page ---------------------------------------------------------------------------------

function updateFigures(nodes, isCluster, allNodes) {
  const gpus = nodes.flatMap((node) => node.gpus).filter((it) => !it.aside);
  const total = sum(gpus.map((it) => it.total)), used = sum(gpus.map((it) => it.usedMiB)), held = sum(gpus.map((it) => it.heldMiB));
  const usable = isOfPod() ? held : total;
  const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : '–');
  const pods = new Set(nodes.flatMap((node) => node.leases).map((it) => it.pod));
  const figures = [
    ...(isCluster ? [['Nodes', String(nodes.filter((it) => !it.problem).length), `of ${allNodes.length}`]] : []),
    ['GPUs in service', String(gpus.filter((it) => it.healthy).length), `of ${gpus.length}`],
    ...(isOfPod() ? [] : [['Idle GPUs', String(gpus.filter((it) => it.healthy && !it.leases.length).length), 'nobody holds a share']]),
    ['Memory held', percent(held, total), `${gib(held)} of ${gib(total)} GiB`],
    ['Memory used', percent(used, usable), `${gib(used)} of ${gib(usable)} GiB`],
    ...(isOfPod() ? [] : [['Pods', String(pods.size), isCluster ? `${(state.view.waiting ?? []).length} wait` : 'hold shares']]),
  ];
  keyed($('figures'), figures, ([name]) => name,
    ([name]) => element('div', {}, element('dt', {}, name), element('dd', {}, element('b'), ' ', element('small'))),
    (it, [, value, note]) => {
      setText(it.querySelector('b'), value);
      setText(it.querySelector('small'), note);
    });
}

let announced = new Set();

function updateAttention(nodes, isCluster) {
  const all = nodes.flatMap((node) => [
    ...node.problems.map((it) => ({ ...it, key: `${node.name} ${it.text}`, where: isCluster ? node.name : null, href: hashOf({ node: node.name }) })),
    ...node.gpus.filter((gpu) => !gpu.aside).flatMap((gpu) => gpu.reasons.filter((it) => it.level !== 'info').map((it) => ({
      ...it, key: `${node.name} ${gpu.index} ${it.text}`, where: isCluster ? `${node.name} GPU ${gpu.index}` : `GPU ${gpu.index}`,
      href: isCluster ? hashOf({ node: node.name }) : `#gpu-${gpu.index}`,
    }))),
  ]).sort((a, b) => RANK[a.level] - RANK[b.level]);
  $('attention').hidden = !all.length;
  keyed($('problems'), all.slice(0, PROBLEMS), (it) => it.key, makeReason, updateReason);
  const fresh = all.filter((it) => !announced.has(it.key));
  if (fresh.length) setText($('news'), fresh.slice(0, 3).map((it) => `${it.where ?? ''} ${it.text}`).join('. '));
  announced = new Set(all.map((it) => it.key));
}

function makePod() {
  const swatch = element('span', { class: 'swatch', 'aria-hidden': 'true' }), name = element('span'), container = element('small');
  const button = element('button', { type: 'button', class: 'pod' }, swatch, name);
  const gpus = element('td'), held = element('td'), memory = makeMemory(), busy = element('td', { class: 'number' });
  return withParts(element('tr', {}, element('th', { scope: 'row' }, button, ' ', container), gpus, held, element('td', {}, memory), busy), { swatch, name, container, button, gpus, held, memory, busy });
}

function updatePod(it, row, isCluster) {
  const p = it.parts;
  setAttribute(p.swatch, 'class', `swatch ${shadeClass(row.pod)}`);
  setText(p.name, row.namespace ? row.pod : row.name);
  setText(p.container, row.container && row.container !== 'main' ? row.container : '');
  setAttribute(p.button, 'aria-pressed', state.selected === row.pod);
  p.button.pod = row.pod;
  setText(p.gpus, `${isCluster ? `${row.node} ` : ''}${row.gpus.join(', ')}`);
  setText(p.held, `${row.shares} ${shortName(row.resource)}`);
  const known = row.usedMiB != null;
  const limit = !isOfPod() || row.limitMiB === row.heldMiB ? '' : `, limit ${gib(row.limitMiB)} GiB`;
  updateMemory(p.memory, row.usedMiB, row.heldMiB, row.heldMiB, known ? `${gib(row.usedMiB)} of ${gib(row.heldMiB)} GiB${limit}${row.over ? ', over its limit' : ''}` : '', row.over);
  p.memory.parts.meter.hidden = !known;
  setText(p.busy, row.busy == null ? '' : `${row.busy} %`);
}

function updatePods(nodes, isCluster) {
  const rows = readPods(nodes);
  const shown = state.allPods ? rows : rows.slice(0, ROWS);
  keyed($('pods'), shown.length ? shown : [null], (row) => row?.key ?? 'none',
    (row) => (row ? makePod() : element('tr', {}, element('td', { colspan: 5, class: 'none' }, 'No pod holds a share.'))),
    (it, row) => row && updatePod(it, row, isCluster));
  $('all-pods').hidden = shown.length === rows.length;
  setText($('all-pods'), `Show all ${rows.length} pods`);
}

function updateOffers(nodes) {
  const offers = readOffers(nodes);
  keyed($('offers'), offers.length ? offers : [null], (it) => it?.name ?? 'none', (it) => {
    if (!it) return element('tr', {}, element('td', { colspan: 4, class: 'none' }, 'Nothing is offered.'));
    const [domain, short] = it.name.includes('/') ? [it.name.slice(0, it.name.indexOf('/') + 1), shortName(it.name)] : ['', it.name];
    const name = element('th', { scope: 'row' }, element('span', {}, domain), element('wbr'), element('span', {}, short)), capacity = element('td', { class: 'number' }), back = element('td', { class: 'number' });
    const meter = element('span', { class: 'meter fragments', role: 'img' }, element('span', { class: 'held' }), element('span', { class: 'used' }));
    const text = element('span', { class: 'meter-text' });
    const free = withParts(element('span', { class: 'memory' }, meter, text), { meter, text });
    return withParts(element('tr', {}, name, element('td', {}, free), capacity, back), { free, capacity, back });
  }, (row, it) => {
    if (!it) return;
    updateFree(row.parts.free, it);
    setText(row.parts.capacity, it.capacity === it.allocatable ? String(it.capacity) : `${it.allocatable} / ${it.capacity}`);
    setText(row.parts.back, it.heldBack ? String(it.heldBack) : '–');
  });
  const remarks = nodes.flatMap((node) => node.remarks.map((text) => (nodes.length > 1 ? `${node.name}: ${text}` : text)));
  keyed($('remarks'), remarks.slice(0, 12), (text) => text, (text) => element('li', {}, text), () => {});
}

function updateEvents(events, isCluster) {
  const shown = events.slice(0, 100);
  keyed($('events'), shown.length ? shown : [null], (it) => (it ? `${it.at} ${it.node} ${it.gpu} ${it.reason} ${it.text}` : 'none'), (it) => {
    if (!it) return element('li', { class: 'none' }, 'Nothing has happened since the daemon started.');
    const gpu = it.gpu == null || it.text.includes(`GPU ${it.gpu}`) ? '' : `GPU ${it.gpu}`;
    const where = [isCluster ? it.node : '', gpu].filter(Boolean).join(' ');
    const text = it.text.replace(/ \(GPU-[0-9a-f-]{36}\)/g, '');
    const made = element('li', {}, element('span', { class: 'mark', 'data-level': it.severity, 'aria-hidden': 'true' }), element('time'), element('b', {}, it.reason), ' ', where ? `${where}: ` : '', text);
    setTime(made.querySelector('time'), it.at, clock(it.at));
    return made;
  }, () => {});
}

function updateWaiting(waiting) {
  const wanted = asked().namespace;
  const shown = waiting.filter((it) => !wanted || it.namespace === wanted);
  $('waiting-part').hidden = !shown.length;
  keyed($('waiting'), shown, (it) => `${it.namespace}/${it.pod}`,
    () => element('tr', {}, element('th', { scope: 'row' }), element('td', {}, element('b'), ' ', element('span')), element('td')),
    (it, row) => {
      setText(it.children[0], `${row.namespace}/${row.pod}`);
      setText(it.querySelector('b'), String(row.reason ?? '').replaceAll('_', ' '));
      setText(it.querySelector('span'), row.text ?? '');
      setText(it.children[2], row.advice ?? '');
    });
}

function draw() {
  if (!state.view) return;
  const isCluster = state.view.kind === 'cluster';
  const all = (state.view.nodes ?? []).map(readNode);
  const one = isCluster ? all.find((it) => it.name === asked().node) : all[0];
  const nodes = one ? [one] : filtered(all);
  assignShades(all.flatMap((node) => node.leases.map((it) => it.pod)));
  const pod = isOfPod() && (state.view.nodes[0].pod ?? 'without shares');
  const title = pod ? `Pod ${pod}` : one ? `Node ${one.name}` : 'Cluster';
  setText($('title'), title);
  document.title = `${title} - metagpu`;
  $('content').hidden = false;
  $('content').classList.toggle('picked', Boolean(state.selected));
  $('filters').hidden = !isCluster;
  $('nodes-part').hidden = Boolean(one);
  $('gpus-part').hidden = !one;
  $('node-part').hidden = isOfPod();
  setText($('pods-title'), isOfPod() ? 'Containers' : 'Pods');
  if (isCluster) updateFilters(all);
  updateBack(isCluster && Boolean(one));
  updateFigures(nodes, isCluster && !one, all);
  updateAttention(nodes, isCluster && !one);
  if (one) keyed($('gpus'), one.gpus, (it) => `${one.name} ${it.uuid}`, makeGpu, updateGpu);
  else keyed($('nodes'), nodes, (it) => it.name, makeNode, updateNode);
  setText($('nodes-title'), nodes.length === all.length ? plural(all.length, 'node') : `${nodes.length} of ${plural(all.length, 'node')}`);
  updateWaiting(isCluster && !one ? state.view.waiting ?? [] : []);
  updatePods(nodes, isCluster && !one);
  updateOffers(nodes);
  updateEvents((state.view.events ?? []).filter((it) => !one || it.node === one.name || !it.node), isCluster && !one);
  updateConnection();
}

function updateBack(shown) {
  let back = $('back');
  if (shown && !back) $('filters').append((back = element('a', { id: 'back', class: 'back' }, '← All nodes')));
  if (!back) return;
  back.hidden = !shown;
  setAttribute(back, 'href', hashOf({ node: '' }));
}

function updateConnection() {
  const it = $('connection');
  setAttribute(it, 'data-state', state.connected ? 'live' : state.lost ? 'lost' : 'connecting');
  if (state.connected) setText(it, 'live');
  else if (state.lost) setText(it, `no connection since ${clock(state.lost)}${state.problem ? `: ${state.problem}` : ''}`);
  else setText(it, 'connecting');
  document.body.classList.toggle('stale', Boolean(state.lost) && !state.connected);
}

let frame = 0;
function drawSoon() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    draw();
  });
}

// --- what people do ---------------------------------------------------------------------------

function select(pod) {
  state.selected = state.selected === pod ? null : pod;
  draw();
}

function showHint(target) {
  const hint = $('hint');
  const text = target?.getAttribute('aria-label') ?? '';
  hint.hidden = !text;
  if (!text) return;
  setText(hint, target.closest('.mini')?.hintText ?? text);
  const box = target.getBoundingClientRect();
  hint.style.setProperty('--left', `${Math.max(8, Math.min(box.left, innerWidth - hint.offsetWidth - 8))}px`);
  hint.style.setProperty('--top', `${box.bottom + 6 + hint.offsetHeight > innerHeight ? box.top - hint.offsetHeight - 6 : box.bottom + 6}px`);
}

const hinted = (event) => showHint(event.target.closest?.('button.cut, .mini'));
document.addEventListener('pointerover', hinted);
document.addEventListener('focusin', hinted);
document.addEventListener('focusout', () => showHint(null));
document.addEventListener('scroll', () => showHint(null), { passive: true });

document.addEventListener('click', (event) => {
  const button = event.target.closest('button.cut, button.pod');
  if (button) select(button.pod);
  if (event.target.closest('.skip')) {  // its address would replace that of the node and the filters
    event.preventDefault();
    $('main').focus();
  }
  const link = event.target.closest('a[href^="#gpu-"]');
  if (link) {
    event.preventDefault();
    const gpu = document.querySelector(`[id="${link.getAttribute('href').slice(1)}"]`);
    gpu?.scrollIntoView({ block: 'center' });
    gpu?.focus({ preventScroll: true });
  }
});

document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') {
    showHint(null);
    if (state.selected) select(state.selected);
    return;
  }
  const button = event.target.closest?.('button.cut');
  if (!button) return;
  const all = [...button.closest('.bar').querySelectorAll('button.cut')];
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -all.length, End: all.length };
  if (!(event.key in steps)) return;
  event.preventDefault();
  const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(button) + steps[event.key]))];
  button.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});

$('filters').addEventListener('change', (event) => {
  history.replaceState(null, '', hashOf({ [event.target.name]: event.target.value }));
  draw();
});
$('filters').addEventListener('submit', (event) => event.preventDefault());
$('all-pods').addEventListener('click', () => {
  state.allPods = true;
  draw();
});
addEventListener('hashchange', () => {
  draw();
  scrollTo(0, 0);
});

// --- the server -------------------------------------------------------------------------------

class Refused extends Error {}
class Unserved extends Error {}  // the server answers, and says why it has no data

async function ask(path, signal) {
  const token = sessionStorage.getItem(TOKEN);
  const answer = await fetch(path, { signal, cache: 'no-store', headers: token ? { [TOKEN]: token } : {} });
  if (answer.ok) return answer;
  const text = await answer.text().catch(() => '');
  let said = text.trim();
  try {
    said = JSON.parse(text).message;
  } catch {
    // a plain line
  }
  said ||= `${path}: ${answer.status}`;
  throw answer.status === 403 ? new Refused(said) : new Unserved(said);
}

let loading = null, again = false;

/** Read the view; a call while one is under way reads it once more afterwards. */
async function load() {
  again = true;
  loading ??= (async () => {
    try {
      while (again) {
        again = false;
        state.view = await (await ask('/api/v1/view', AbortSignal.timeout(10000))).json();
        drawSoon();
      }
    } finally {
      loading = null;
    }
  })();
  return loading;
}

let reconnect = () => {};  // a view that cannot be read says more than a stream that is silent

const isSeen = () => document.visibilityState === 'visible';

async function listen() {
  const abort = new AbortController();
  reconnect = () => abort.abort();
  let silence = setTimeout(() => abort.abort(), SILENCE_MS);
  try {
    const reader = (await ask('/api/v1/changes', abort.signal)).body.pipeThrough(new TextDecoderStream()).getReader();
    await load();
    state.connected = true;
    state.lost = null;
    updateConnection();
    let text = '';
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(), SILENCE_MS);
      text += value;
      const end = text.lastIndexOf('\n\n');
      if (end < 0) continue;
      if (isSeen() && /^event: *change/m.test(text.slice(0, end))) await load();
      text = text.slice(end + 2);
    }
  } finally {
    clearTimeout(silence);
    abort.abort();
    if (state.connected || !state.lost) state.lost = new Date();
    state.connected = false;
    updateConnection();
  }
}

function askForToken(refusal) {
  $('content').hidden = true;
  $('access').hidden = false;
  setText($('title'), 'metagpu');
  setText($('refusal'), refusal);
  $('token').focus();
  return new Promise((resolve) => {
    $('access').addEventListener('submit', (event) => {
      event.preventDefault();
      // fetch() refuses a header with other characters, as those that a word processor adds
      sessionStorage.setItem(TOKEN, $('token').value.replace(/[^\x21-\x7e]/g, ''));
      $('token').value = '';
      $('access').hidden = true;
      resolve();
    }, { once: true });
  });
}

async function follow() {
  let [pause, longest] = PAUSES_MS;
  for (;;) {
    const began = Date.now();
    try {
      await listen();
    } catch (error) {
      state.problem = error instanceof Unserved ? error.message : '';
      updateConnection();
      if (error instanceof Refused) {
        state.lost = null;
        setText($('connection'), 'needs a token');
        await askForToken(error.message);
        continue;
      }
    }
    if (Date.now() - began > longest) pause = PAUSES_MS[0];
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, longest);
  }
}

setInterval(() => {
  // The changes of a cluster are those of its usage too.
  if (state.connected && state.view?.kind === 'node' && isSeen()) load().catch(() => reconnect());
}, ASK_MS);
document.addEventListener('visibilitychange', () => {
  if (state.connected && isSeen()) load().catch(() => reconnect());
});
follow();
