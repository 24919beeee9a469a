// The sections of the page, and when they are drawn.

import { $, element, keyed, setAttribute, setHidden, setText, withParts } from './elements.js';
import { asked, filtered, hashOf, updateFilters } from './filters.js';
import { makeGpu, makeMemory, makeReason, updateGpu, updateMemory, updateReason } from './gpu.js';
import { makeNode, updateFree, updateNode } from './node.js';
import { readNode, readOffers, readPods } from './reading.js';
import { RANK } from './reasons.js';
import { assignShades, shadeClass } from './shades.js';
import { isOfPod, state } from './state.js';
import { clock, gib, plural, setTime, shortName, sum } from './words.js';

const ROWS = 40;              // of the table of pods until all are asked for
const PROBLEMS = 40;
const CARDS = 8;              // of GPUs that are drawn in a frame, so that none takes long

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
    ...(isOfPod() ? [] : [['Pods', String(pods.size), isCluster && !state.view.lacking ? `${(state.view.waiting ?? []).length} wait` : 'hold shares']]),
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
  setHidden($('attention'), !all.length);
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
  setHidden(p.memory.parts.meter, !known);
  setText(p.busy, row.busy == null ? '' : `${row.busy} %`);
}

function updatePods(nodes, isCluster) {
  const rows = readPods(nodes);
  const shown = state.allPods ? rows : rows.slice(0, ROWS);
  keyed($('pods'), shown.length ? shown : [null], (row) => row?.key ?? 'none',
    (row) => (row ? makePod() : element('tr', {}, element('td', { colspan: 5, class: 'none' }, 'No pod holds a share.'))),
    (it, row) => row && updatePod(it, row, isCluster));
  setHidden($('all-pods'), shown.length === rows.length);
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

function updateWaiting(waiting, lacking) {
  const wanted = asked().namespace;
  const shown = waiting.filter((it) => !wanted || it.namespace === wanted);
  setHidden($('waiting-part'), !shown.length && !lacking);
  setHidden($('waiting-table'), !shown.length);
  setHidden($('lacking'), !lacking);
  setText($('lacking'), lacking);
  keyed($('waiting'), shown, (it) => `${it.namespace}/${it.pod}`,
    () => element('tr', {}, element('th', { scope: 'row' }), element('td', {}, element('b'), ' ', element('span'), element('small')), element('td')),
    (it, row) => {
      setText(it.children[0], `${row.namespace}/${row.pod}`);
      setText(it.querySelector('b'), String(row.reason ?? '').replaceAll('_', ' '));
      setText(it.querySelector('span'), row.text ?? '');
      setText(it.querySelector('small'), row.scheduler ? `The scheduler says: ${row.scheduler}` : '');
      setText(it.children[2], row.advice ?? '');
    });
}

export function draw() {
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
  setHidden($('content'), false);
  $('content').classList.toggle('picked', Boolean(state.selected));
  setHidden($('filters'), !isCluster);
  setHidden($('nodes-part'), Boolean(one));
  setHidden($('gpus-part'), !one);
  setHidden($('offers-part'), isOfPod());
  setText($('pods-title'), isOfPod() ? 'Containers' : 'Pods');
  if (isCluster) updateFilters(all);
  updateBack(isCluster && Boolean(one));
  updateFigures(nodes, isCluster && !one, all);
  updateAttention(nodes, isCluster && !one);
  if (one) keyed($('gpus'), one.gpus, (it) => `${one.name} ${it.uuid}`, makeGpu, updateCard);
  else keyed($('nodes'), nodes, (it) => it.name, makeNode, updateNode);
  setText($('nodes-title'), nodes.length === all.length ? plural(all.length, 'node') : `${nodes.length} of ${plural(all.length, 'node')}`);
  updateWaiting(state.view.waiting ?? [], state.view.lacking ?? '');
  setText($('waiting-title'), one ? 'Waiting pods of the cluster' : 'Waiting pods');
  updatePods(nodes, isCluster && !one);
  updateOffers(nodes);
  updateEvents((state.view.events ?? []).filter((it) => !one || it.node === one.name || !it.node), isCluster && !one);
  updateConnection();
  drawCards();
}

// Updates of cards that wait for a frame, in their order.
const waiting = new Map();
let cardFrame = 0;

function updateCard(it, gpu) {
  if (it.parts.index.known) waiting.set(it, gpu);
  else updateGpu(it, gpu);
}

function drawCards() {
  let left = CARDS;
  for (const [it, gpu] of waiting) {
    waiting.delete(it);
    if (!it.isConnected) continue;
    updateGpu(it, gpu);
    if (--left === 0) break;
  }
  if (waiting.size) {
    cardFrame ||= requestAnimationFrame(() => {
      cardFrame = 0;
      drawCards();
    });
  }
}

function updateBack(shown) {
  let back = $('back');
  if (shown && !back) $('filters').append((back = element('a', { id: 'back', class: 'back' }, '← All nodes')));
  if (!back) return;
  setHidden(back, !shown);
  setAttribute(back, 'href', hashOf({ node: '' }));
}

export function updateConnection() {
  const it = $('connection');
  setAttribute(it, 'data-state', state.connected ? 'live' : state.lost ? 'lost' : 'connecting');
  if (state.connected) setText(it, 'live');
  else if (state.lost) setText(it, `no connection since ${clock(state.lost)}${state.problem ? `: ${state.problem}` : ''}`);
  else setText(it, 'connecting');
  document.body.classList.toggle('stale', Boolean(state.lost) && !state.connected);
}

let frame = 0;
export function drawSoon() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    draw();
  });
}
