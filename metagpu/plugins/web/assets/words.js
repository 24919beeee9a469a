// Numbers, names and times as text.

import { setAttribute, setText } from './elements.js';

const GIB = 1024;

export const plural = (count, word, ending = 's') => `${count} ${word}${count === 1 ? '' : ending}`;
export const shortName = (resource) => (resource ?? '').split('/').pop();
export const product = (gpu) => (gpu.product ?? '').replace(/^NVIDIA /, '');
export const gib = (mib) => (mib == null ? '?' : mib === 0 ? '0' : (mib / GIB).toFixed(mib < 100 * GIB ? 1 : 0));
export const { compare } = new Intl.Collator('en', { numeric: true });
export const sum = (numbers) => numbers.reduce((total, it) => total + (it ?? 0), 0);

export function clock(time) {
  const at = new Date(time);
  if (Number.isNaN(at.getTime())) return String(time);
  const today = at.toDateString() === new Date().toDateString();
  const hours = at.toLocaleTimeString('en-GB');
  return today ? hours : `${at.toLocaleDateString('en-GB', { day: 'numeric', month: 'short' })} ${hours}`;
}

export function age(time) {
  const seconds = Math.max(0, (Date.now() - new Date(time)) / 1000);
  for (const [unit, length] of [['d', 86400], ['h', 3600], ['min', 60]]) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return `${Math.floor(seconds)} s`;
}

export function setTime(it, time, text = `${clock(time)}, ${age(time)} ago`) {
  setAttribute(it, 'datetime', time ?? '');
  setAttribute(it, 'title', time ?? '');
  setText(it, time ? text : '');
}
export const slotOf = (share) => String(share).split('::').pop();
