// The server: the view, its changes, and the token that it may ask for.

import { drawSoon, updateConnection } from './drawing.js';
import { $, setText } from './elements.js';
import { state } from './state.js';

const UNSEEN_MS = 60000;      // a short look at another tab costs no new connection
const ASK_MS = 5000;          // memory in use changes without a change of the view
const SILENCE_MS = 40000;     // the server sends a comment every 15 s
const PAUSES_MS = [500, 5000];
const TOKEN = 'metagpu-token';

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

function becomesSeen() {
  return new Promise((resolve) => {
    const look = () => {
      if (!isSeen()) return;
      document.removeEventListener('visibilitychange', look);
      resolve();
    };
    document.addEventListener('visibilitychange', look);
  });
}

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

/** Follow the server for ever. A tab that nobody sees lets go of it after a while. */
export async function follow() {
  let [pause, longest] = PAUSES_MS;
  for (;;) {
    if (!isSeen()) await becomesSeen();
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
let unseen = 0;
document.addEventListener('visibilitychange', () => {
  clearTimeout(unseen);
  if (!isSeen()) unseen = setTimeout(() => reconnect(), UNSEEN_MS);
  else if (state.connected) load().catch(() => reconnect());
});
