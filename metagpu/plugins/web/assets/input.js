// What people do: pointer, keyboard, filters.

import { draw } from './drawing.js';
import { $, setText } from './elements.js';
import { hashOf } from './filters.js';
import { state } from './state.js';

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
