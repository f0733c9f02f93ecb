// Elements, made and updated without markup in strings: what a server or a model writes is always text.

/** Make an element. `props` are properties; `class`, `dataset`, `style` (custom properties) and `aria-*` are known. */
export function el(name, props = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (key === "class") made.className = value;
    else if (key === "dataset") Object.assign(made.dataset, value);
    else if (key === "style") for (const [property, size] of Object.entries(value)) made.style.setProperty(property, size);
    else if (key.startsWith("aria-") || key === "role" || key === "scope") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Set an element's text, only if it differs, so that screen readers and selections are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Make the children of `parent` those of `items`, in order. A child is made again by `make(item)` only when what is
 * shown of its item has changed; `patch(child, item)`, where given, changes the child in place instead.
 */
export function reconcile(parent, items, keyOf, make, patch = null) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    const shown = JSON.stringify(item);
    let child = before.get(key);
    before.delete(key);
    if (child === undefined || (child.shown !== shown && patch === null)) {
      const made = make(item);
      made.dataset.key = key;
      if (child !== undefined) {
        if (child === place) place = made;
        child.replaceWith(made);
      }
      child = made;
    } else if (child.shown !== shown) {
      patch(child, item);
    }
    child.shown = shown;
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const gone of before.values()) gone.remove();
}

/** Terms and their values, as children of a dl; each pair is kept together. */
export function terms(pairs) {
  return pairs.map(([term, value, note]) =>
    el("div", {}, el("dt", {}, term), el("dd", {}, value, note ? el("span", { class: "muted" }, ` ${note}`) : null)),
  );
}

/** A bar of parts: `[class, share of the whole, label]`; what is left of the whole stays empty. */
export function stackedBar(parts, label) {
  const bar = el("div", { class: "stack", role: "img", "aria-label": label });
  for (const [name, part] of parts) {
    if (part > 0) bar.append(el("span", { class: name, style: { "--part": `${100 * Math.min(part, 1)}%` } }));
  }
  return bar;
}
