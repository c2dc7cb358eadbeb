// The map of shards with the keyboard: one stop for Tab, arrows within, and words for the cell.
const map = () => document.querySelector("[data-shards]");
let current = 0;

function cells() {
  return [...(map()?.children ?? [])];
}

function roam() {
  const all = cells();
  current = Math.min(current, Math.max(0, all.length - 1));
  all.forEach((each, place) => { each.tabIndex = place === current ? 0 : -1; });
}

function say(cell) {
  const place = document.querySelector("[data-shard-told]");
  if (place) place.textContent = cell ? `${cell.getAttribute("aria-label")}.` : "";
}

function across(all) {
  const top = all[0].offsetTop;
  const count = all.findIndex((each) => each.offsetTop !== top);
  return count < 0 ? all.length : count;
}

document.addEventListener("keydown", (event) => {
  const all = cells();
  const at = all.indexOf(event.target);
  if (at < 0) return;
  const row = across(all);
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - row, ArrowDown: at + row, Home: 0, End: all.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  if (all[to]) all[to].focus();
});

document.addEventListener("focusin", (event) => {
  const at = cells().indexOf(event.target);
  if (at < 0) return;
  current = at;
  roam();
  say(event.target);
});

document.addEventListener("mouseover", (event) => {
  const cell = event.target.closest?.("[data-shards] > a");
  if (cell) say(cell);
});

document.addEventListener("penstock:update", roam);
roam();
