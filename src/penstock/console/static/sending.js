// Sends forms that change something. What became of it is told on the page that the answer names; if
// that is this one, it is loaded anew in its own place, so that Back leads to the page before. If the
// dispatcher does not answer, this page stays as it is, with what was typed, and says so.
const ANSWER_MS_MAX = 45000;
const underway = new WeakSet();
const NO_ANSWER = "The dispatcher does not answer, so the request most likely failed. Your input is kept: when the dispatcher is back, check the result and submit again if needed.";

function tell(text) {
  const place = document.querySelector(".told") ?? document.createElement("div");
  place.className = "told bad";
  place.setAttribute("role", "status");
  place.textContent = text;
  document.querySelector("main").before(place);
  place.scrollIntoView({ block: "nearest" });
}

// What is written in two ways, as `%3A` and `:`, is one place.
function plain(address) {
  try { return decodeURIComponent(address); } catch { return address; }
}

function go(to) {
  if (plain(to) === plain(location.pathname + location.search)) location.replace(to);
  else location.assign(to);
}

function sentences(html) {
  const page = new DOMParser().parseFromString(html, "text/html");
  return [...page.querySelectorAll("main h1, main [data-hint]")].map((each) => each.textContent).join(" ");
}

// Whether another page is shown now.
async function send(form) {
  const answer = await fetch(form.getAttribute("action"), {
    method: "POST",
    headers: { accept: "application/json" },
    body: new URLSearchParams(new FormData(form)),
    signal: AbortSignal.timeout(ANSWER_MS_MAX),
  });
  const kind = answer.headers.get("content-type") ?? "";
  const said = await answer.text();
  if (answer.status === 401) location.reload();
  else if (answer.ok && kind.startsWith("application/json")) go(JSON.parse(said).to);
  else {
    tell((kind.startsWith("text/html") ? sentences(said) : said).trim() || NO_ANSWER);
    return false;
  }
  return true;
}

async function sent(form) {
  // Twice is never meant.
  underway.add(form);
  const buttons = [...form.querySelectorAll("button:enabled")];
  for (const each of buttons) each.disabled = true;
  let isLeft = false;
  try {
    isLeft = await send(form);
  } catch {
    tell(NO_ANSWER);
  }
  if (isLeft) return;
  underway.delete(form);
  for (const each of buttons) each.disabled = false;
}

export function sendForms() {
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.getAttribute("method") !== "post") return;
    event.preventDefault();
    if (underway.has(form)) return;
    if (form.dataset.sure && !confirm(form.dataset.sure)) return;
    // A form that came with the stream, which is the same for all, has no token of its own.
    const token = form.elements.namedItem("form_token");
    if (token && !token.value) token.value = document.body.dataset.formToken;
    sent(form);
  });
}
