// What every page has: the stream, times that go on, the switch of the theme, forms.
import { listen } from "./live.js";
import { sendForms } from "./sending.js";
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

keepTimes();
sendForms();
if (document.body.dataset.stream) listen(document.body.dataset.stream);
