// Makes an element's content what HTML of the server says, and leaves alone what is the same: the
// focus, what is open, what is scrolled and what somebody types stay.

function key(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset?.key || "" : "";
}

function alike(a, b) {
  return a.nodeType === b.nodeType && a.nodeName === b.nodeName && key(a) === key(b);
}

function attributes(from, to) {
  for (const { name, value } of to.attributes) {
    if (from.getAttribute(name) !== value) from.setAttribute(name, value);
  }
  for (const { name } of [...from.attributes]) {
    // What is open is the reader's, and styles are set by scripts alone.
    const isTheirs = name === "style" || (name === "open" && from.nodeName === "DETAILS");
    if (!to.hasAttribute(name) && !isTheirs) from.removeAttribute(name);
  }
}

function same(from, to) {
  if (from.nodeType !== Node.ELEMENT_NODE) {
    if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
    return;
  }
  if ("keep" in from.dataset) return;
  if (from.nodeName === "TIME" && from.getAttribute("datetime") === to.getAttribute("datetime")) return;
  if (from === document.activeElement && /^(INPUT|TEXTAREA|SELECT)$/.test(from.nodeName)) return;
  attributes(from, to);
  children(from, to);
}

function children(from, to) {
  const known = new Map();
  for (const each of from.childNodes) if (key(each)) known.set(key(each), each);
  let at = from.firstChild;
  for (const wanted of [...to.childNodes]) {
    const named = key(wanted) && known.get(key(wanted));
    if (named && alike(named, wanted)) {
      if (named === at) at = at.nextSibling;
      else from.insertBefore(named, at);
      same(named, wanted);
    } else if (at && alike(at, wanted) && !key(at)) {
      const next = at.nextSibling;
      same(at, wanted);
      at = next;
    } else {
      from.insertBefore(wanted, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

export function morph(place, html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  children(place, template.content);
}
