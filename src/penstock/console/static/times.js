// Ages that go on: <time datetime="…" data-ago>.
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

export function age(seconds) {
  const ahead = seconds < -2;
  const whole = Math.max(0, Math.abs(Math.round(seconds)));
  for (const [unit, name] of UNITS) {
    if (whole >= unit || name === "s") {
      const text = `${Math.floor(whole / unit)} ${name}`;
      return ahead ? `in ${text}` : `${text} ago`;
    }
  }
  return "";
}

export function showTimes(root = document) {
  const now = Date.now();
  for (const each of root.querySelectorAll("time[data-ago]")) {
    const text = age((now - Date.parse(each.dateTime)) / 1000);
    if (each.textContent !== text) each.textContent = text;
  }
}

export function keepTimes() {
  showTimes();
  setInterval(showTimes, 1000);
  document.addEventListener("penstock:update", (event) => showTimes(event.target));
}
