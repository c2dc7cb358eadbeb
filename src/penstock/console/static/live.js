// Keeps what has `data-live` up to date by server-sent events, and says when they do not come.
import { morph } from "./morph.js";

// Something is heard every ten seconds, be it a heartbeat: one of them may be late, or lost.
const LATE_MS = 25000;
let isAway = false;
let lateTimer = 0;

function say(state) {
  for (const each of document.querySelectorAll("[data-connection]")) {
    each.dataset.state = state;
    each.querySelector("b").textContent = state;
  }
}

function trouble(text) {
  const place = document.querySelector("[data-trouble]");
  place.textContent = text;
  place.hidden = !text;
}

function heard() {
  clearTimeout(lateTimer);
  lateTimer = setTimeout(() => lost(), LATE_MS);
  if (isAway) {
    isAway = false;
    trouble("");
  }
  say("live");
}

function lost() {
  isAway = true;
  say("not connected");
  trouble("Connection to the dispatcher lost. This page shows the last known state and reconnects automatically.");
}

// What a stream was refused for: who is signed out is shown the page to sign in, and not what was here.
async function again(page) {
  const answer = await fetch("/live", { method: "HEAD" }).catch(() => null);
  if (answer?.status === 401) location.reload();
  else listen(page);
}

export function listen(page) {
  const source = new EventSource(`/live?page=${encodeURIComponent(page)}`);
  source.onopen = heard;
  source.onerror = () => {
    lost();
    // A browser gives up on an answer that is not a stream, such as the page to sign in.
    if (source.readyState === EventSource.CLOSED) setTimeout(() => again(page), 2000);
  };
  source.addEventListener("heartbeat", heard);
  source.addEventListener("trouble", (event) => {
    heard();
    trouble(JSON.parse(event.data));
  });
  for (const name of new Set([...document.querySelectorAll("[data-live]")].map((each) => each.dataset.live))) {
    source.addEventListener(name, (event) => {
      heard();
      const html = JSON.parse(event.data);
      for (const place of document.querySelectorAll(`[data-live="${name}"]`)) {
        morph(place, html);
        place.dispatchEvent(new CustomEvent("penstock:update", { bubbles: true }));
      }
    });
  }
  addEventListener("pagehide", () => source.close(), { once: true });
}
