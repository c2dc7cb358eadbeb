// Sets the theme before anything is painted. Loaded in the head, without waiting.
(() => {
  let kept = null;
  try { kept = localStorage.getItem("penstock-theme"); } catch { /* not allowed: the system's */ }
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
})();
