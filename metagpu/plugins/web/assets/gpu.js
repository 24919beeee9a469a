// A GPU: its bars, its memory, its state.

import { element, keyed, setAttribute, setHidden, setNumber, setText, withParts } from './elements.js';
import { shadeClass } from './shades.js';
import { isOfPod, state } from './state.js';
import { age, clock, gib, plural, product, setTime, shortName, sum } from './words.js';

const CUTS = 60;              // drawn per bar; what is smaller is one cut

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
      cuts.push({ kind: isOfPod() ? 'beyond' : 'slot', key: `slot ${slice}`, shares: 1, start: slice, size: 1, label: isOfPod() ? '' : String(slice) });
    }
  }
  return cuts.sort((a, b) => a.start - b.start);
}

export function barsOf(gpu) {
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
    setHidden(note, bars.length < 2);
    list.classList.toggle('slices', Boolean(bar.slices));
    if (bar.slices) setNumber(list, '--slices', bar.slices);
    setAttribute(list, 'aria-label', `GPU ${gpu.index}, ${bar.slices ? `${bar.slices} memory slices` : shortName(bar.resource)}`);
    keyed(list, bar.drawn, (cut) => `${cut.kind} ${cut.key}`, makeCut, updateCut);
    const buttons = list.querySelectorAll('button');
    if (buttons.length && !list.querySelector('button[tabindex="0"]')) buttons[0].tabIndex = 0;
  });
}

export function makeMemory() {
  const used = element('span', { class: 'used' }), held = element('span', { class: 'held' });
  const meter = element('span', { class: 'meter', role: 'img' }, held, used);
  const text = element('span', { class: 'meter-text' });
  return withParts(element('span', { class: 'memory' }, meter, text), { meter, used, held, text });
}

export function updateMemory(it, usedMiB, heldMiB, total, text, over = false) {
  const { meter, used, held } = it.parts;
  const share = (mib) => (total ? Math.min(1, (mib ?? 0) / total) : 0);
  setNumber(used, '--part', share(usedMiB));
  setNumber(held, '--part', share(heldMiB));
  setText(it.parts.text, text);
  setAttribute(meter, 'aria-label', text);
  meter.classList.toggle('over', over);
}

export function makeReason() {
  const mark = element('span', { class: 'mark', 'aria-hidden': 'true' });
  const where = element('a', { class: 'where' }), text = element('span'), since = element('time');
  return withParts(element('li', {}, mark, where, text, ' ', since), { mark, where, text, since });
}

export function updateReason(it, reason) {
  const { mark, where, text, since } = it.parts;
  setAttribute(mark, 'data-level', reason.level);
  setText(where, reason.where ?? '');
  setHidden(where, !reason.where);
  setAttribute(where, 'href', reason.href ?? null);
  setText(text, reason.text);
  setTime(since, reason.since, reason.since ? `since ${clock(reason.since)} (${age(reason.since)})` : '');
}

export function makeGpu(gpu) {
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

export function updateGpu(it, gpu) {
  const p = it.parts;
  setAttribute(it, 'data-level', gpu.level);
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
