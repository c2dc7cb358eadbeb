// What every page has: the stream, times that go on, the switch of the theme, forms that ask.
import { listen } from "./live.js";
import { keepTimes } from "./times.js";

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("penstock-theme", root.dataset.theme); } catch { /* for this page only */ }
  document.dispatchEvent(new CustomEvent("penstock:theme"));
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-theme-switch]");
  if (button) switchTheme();
});

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.dataset.sure && !confirm(form.dataset.sure)) {
    event.preventDefault();
    return;
  }
  // A form that came with the stream, which is the same for all, has no token of its own.
  const token = form.elements.namedItem("form_token");
  if (token && !token.value) token.value = document.body.dataset.formToken;
  // Twice is never meant.
  for (const button of form.querySelectorAll("button")) queueMicrotask(() => { button.disabled = true; });
});

keepTimes();
if (document.body.dataset.stream) listen(document.body.dataset.stream);
