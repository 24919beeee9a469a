// Elements of the document. Data enters it as text and attributes only; elements are kept by key, so
// that focus, scrolling and selection outlive an update.

export const $ = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
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

export function setText(it, text) {
  if (isNew(it, 'text', text)) it.textContent = text;
}

export function setAttribute(it, name, value) {
  if (!isNew(it, name, value)) return;
  if (value === null) it.removeAttribute(name);
  else it.setAttribute(name, value);
}

export function setHidden(it, hidden) {
  if (it.hidden !== hidden) it.hidden = hidden;
}

export function setNumber(it, name, value) {
  if (isNew(it, name, value)) it.style.setProperty(name, value);
}

/** Make the children of PARENT those of ITEMS, in their order; an element stays with its key. */
export function keyed(parent, items, keyOf, create, update) {
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
export function withParts(it, named) {
  it.parts = named;
  return it;
}
