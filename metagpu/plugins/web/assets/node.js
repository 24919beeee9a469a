// A node of the cluster: a row of GPUs.

import { element, keyed, setAttribute, setNumber, setText, withParts } from './elements.js';
import { hashOf, profileName } from './filters.js';
import { barsOf, makeReason, updateReason } from './gpu.js';
import { readOffers } from './reading.js';
import { shadeClass } from './shades.js';
import { state } from './state.js';
import { gib, product, shortName } from './words.js';

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
  setAttribute(image, 'data-level', gpu.level);
  image.classList.toggle('aside', Boolean(gpu.aside));
  const held = bar?.drawn.filter((cut) => cut.kind === 'held').map((cut) => cut.text) ?? [];
  const rest = bar?.drawn.filter((cut) => cut.kind !== 'held' && cut.kind !== 'slot').map((cut) => cut.label) ?? [];
  const cuts = [held.length ? `held by ${held.join(', ')}` : 'held by nobody', ...rest].join('; ');
  const text = `GPU ${gpu.index}, ${product(gpu)}: ${word}; ${cuts}; ${gib(gpu.usedMiB)} of ${gib(gpu.total)} GiB used`;
  setAttribute(image, 'aria-label', text);
  image.hintText = gpu.reasons.length ? `${text}. ${gpu.reasons[0].text}` : text;
  setNumber(memory, '--part', gpu.total ? Math.min(1, (gpu.usedMiB ?? 0) / gpu.total) : 0);
  keyed(bars, bar?.drawn ?? [], (cut) => cut.key, () => element('span'), (cut, one) => {
    setNumber(cut, '--n', one.shares);
    setAttribute(cut, 'class', one.kind === 'held' ? `cut ${shadeClass(one.pod)}${state.selected === one.pod ? ' chosen' : ''}` : `rest ${one.kind}`);
  });
}

export function makeNode() {
  const name = element('a', {}), models = element('span', { class: 'models' }), problem = element('ul', { class: 'reasons' });
  const gpus = element('ul', { class: 'minis' }), offers = element('ul', { class: 'node-offers' });
  return withParts(element('li', { class: 'node' }, element('div', { class: 'node-head' }, element('h3', {}, name), models), gpus, offers, problem), { name, models, problem, gpus, offers });
}

export function updateNode(it, node) {
  const { name, models, problem, gpus, offers } = it.parts;
  setText(name, node.name);
  setAttribute(name, 'href', hashOf({ node: node.name }));
  const counts = new Map();
  for (const gpu of node.gpus) counts.set(product(gpu), (counts.get(product(gpu)) ?? 0) + 1);
  const profile = node.status.cluster?.profile;
  setText(models, [...[...counts].map(([model, count]) => `${count} × ${model}`), ...(profile ? [`profile ${profileName(profile)}`] : [])].join(', '));
  keyed(gpus, node.gpus, (gpu) => gpu.uuid, makeMini, updateMini);
  keyed(offers, readOffers([node]).filter((one) => one.capacity), (one) => one.name, makeFree, updateFree);
  // All others are in the list of what needs attention.
  keyed(problem, node.problem ? node.problems.slice(0, 1) : [], (one) => one.text, makeReason, updateReason);
}

function makeFree() {
  const meter = element('span', { class: 'meter fragments', role: 'img' }, element('span', { class: 'held' }), element('span', { class: 'used' }));
  const text = element('span', { class: 'meter-text' });
  return withParts(element('li', { class: 'memory' }, meter, text), { meter, text });
}

export function updateFree(it, offer) {
  const { meter, text } = it.parts;
  const part = (count) => (offer.capacity ? count / offer.capacity : 0);
  setNumber(meter.children[0], '--part', part(offer.free));
  setNumber(meter.children[1], '--part', part(Math.min(offer.largest, offer.free)));
  const sentence = offer.free ? `largest ${offer.largest} of ${offer.free} free` : 'nothing is free';
  setAttribute(meter, 'aria-label', `${shortName(offer.name)}: ${sentence}`);
  setText(text, it.tagName === 'LI' ? `${shortName(offer.name)}: ${sentence}` : sentence);
}
