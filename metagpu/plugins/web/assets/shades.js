// Colours and patterns of pods.

const SHADES = 8, PATTERNS = 4;
// Of each colour in the first round: colours that some people cannot tell apart have different ones.
const FIRST_PATTERN = [0, 1, 1, 3, 2, 0, 1, 2];

const shades = new Map();

function hash(text) {
  let value = 5381;
  for (const it of text) value = ((value * 33) ^ it.codePointAt(0)) >>> 0;
  return value;
}

/** Give each pod a colour and a pattern of its own while there are some; a pod keeps its own. */
export function assignShades(pods) {
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

export function shadeClass(pod) {
  const slot = shades.get(pod) ?? 0;
  const pattern = (Math.floor(slot / SHADES) + FIRST_PATTERN[slot % SHADES]) % PATTERNS;
  return `shade${slot % SHADES} pattern${pattern}`;
}
