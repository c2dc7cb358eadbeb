// Shows the middle of what is wider than its place: <div data-centred> with what is `aria-current`.
for (const place of document.querySelectorAll("[data-centred]")) {
  const current = place.querySelector("[aria-current]")?.getBoundingClientRect();
  if (!current) continue;
  const frame = place.getBoundingClientRect();
  place.scrollLeft += current.left + current.width / 2 - frame.left - frame.width / 2;
  place.scrollTop += current.top + current.height / 2 - frame.top - frame.height / 2;
}
