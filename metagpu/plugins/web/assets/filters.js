// Filters of the cluster, kept in the address.

import { $, element, keyed, withParts } from './elements.js';
import { state } from './state.js';
import { product } from './words.js';

const FILTERS = { namespace: 'Namespace', model: 'Model', profile: 'Profile', health: 'Health' };

export const profileName = (it) => (typeof it === 'string' ? it : it?.name ?? String(it ?? ''));
export const asked = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

export function hashOf(change) {
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

export function updateFilters(nodes) {
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
export function filtered(nodes) {
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
