// Puts a part of another page of ours into this one: what takes long to load does not hold the page up.
// <div data-fetched="/path">…</div> gets what stands in `data-take` there. Scripts in it do not run.
async function take(place) {
  const told = place.querySelector("[role=status]");
  if (told) told.textContent = "It is being read…";
  try {
    const answer = await fetch(place.dataset.fetched);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const taken = page.querySelector("[data-take]");
    if (!taken) throw new Error(page.querySelector("h1")?.textContent ?? "");
    place.replaceChildren(...taken.childNodes);
    place.dispatchEvent(new CustomEvent("penstock:update", { bubbles: true }));
  } catch (error) {
    if (told) told.textContent = error.message || "It cannot be read now.";
  }
}

for (const place of document.querySelectorAll("[data-fetched]")) take(place);
