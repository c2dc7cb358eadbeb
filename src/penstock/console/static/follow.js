// Keeps the end of a log in sight as it grows, unless somebody has scrolled up to read.
const NEAR_PX = 24;
const away = new WeakSet();

function follow() {
  for (const each of document.querySelectorAll("[data-follow]")) {
    if (!away.has(each)) each.scrollTop = each.scrollHeight;
  }
}

document.addEventListener("scroll", (event) => {
  const log = event.target;
  if (!(log instanceof Element) || !log.matches("[data-follow]")) return;
  if (log.scrollHeight - log.scrollTop - log.clientHeight > NEAR_PX) away.add(log);
  else away.delete(log);
}, true);
document.addEventListener("penstock:update", follow);
follow();
